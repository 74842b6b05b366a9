# SPDX-License-Identifier: Apache-2.0
"""Models as their libraries ship them, beside the checkpointing that each library has of its own.

Small configurations with random weights: nothing is downloaded. The budget is the peak that the
library's checkpointing comes to, counted at the allocator. Times are of the processor, each step
timed after an untimed one of its own, all taking turns in one process; each model has a process to
itself. Models that are not run keep what an earlier run has recorded.
"""

from __future__ import annotations

import argparse
import bisect
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("KINETO_LOG_LEVEL", "5")  # the profiler is chatty

import torch
from cells import Bench, Ours
from measure import RESULTS, OthersLoad, in_fresh_process, interleaved, machine, place, table
from networks import Network, Program, Runner, State, Step, Transform, untransformed
from torch import Tensor, nn

import rematfn

MIB = 2**20
ALTERNATIVE = (
    "Three bar charts for thirteen models, with their library's checkpointing and with rematfn: "
    "peak, time, and rise of the resident set"
)
ABOUT = """\
One training step of each: loss, backward, every gradient. *Library*: its own checkpointing, with
its defaults; the budget of *ours* is the peak that it comes to. Peaks are the allocator's, above
those at the start of the step, kernels' scratch included; results (loss, gradients) do not count.
*Exact*: loss, gradients and buffers are the plain model's, bit for bit. *Replayed cost*: as a
fraction of the step's, by the cost model. *Floor*: the least share of the plain peak, to a
hundredth, that the simulator runs the recorded step in. Times are of the processor, relative to
the plain step's or the library's; medians of the rounds. Ours has its plan by then: the first
calls, and the search beside them, are not timed. *Resident*: how far the resident set rises in a
step, in MiB, results included. *Others' load*: how many cores others kept busy meanwhile.
"""


@dataclass
class Model:
    """A model, the inputs of a step, and how its library saves memory.

    Attributes:
        loss: Called with the inputs; returns a scalar.
        checkpointing: Turns the library's own checkpointing on or off.
    """

    module: nn.Module
    loss: Callable[..., Tensor]
    inputs: tuple[Tensor, ...]
    checkpointing: Callable[[bool], None]

    def program(self) -> Program:
        """Return the step, with the library's checkpointing where the runner is :func:`own`."""
        parameters = list(self.module.parameters())

        def make_step(transform: Transform, run: Runner) -> Step:
            loss_fn = transform(self.loss)

            def step() -> Any:
                self.checkpointing(run is own)
                loss = loss_fn(*self.inputs)
                loss.backward()
                gradients = [p.grad for p in parameters]
                for p in parameters:
                    p.grad = None
                return loss.detach(), [g for g in gradients if g is not None]

            return step

        return Program(make_step, list(self.module.buffers()))


def own(blocks: Any, state: State) -> State:
    """Stand for the library's own checkpointing, which knows its blocks itself."""
    raise NotImplementedError


def transformers(kind: str, loss_inputs: Callable[[], dict[str, Tensor]], **config: Any) -> Model:
    """Return a model of Hugging Face's, such as ``"GPT2LMHead"``, from its configuration."""
    import transformers as library

    module_class = getattr(library, kind)
    module = module_class(module_class.config_class(**config)).train()
    inputs = loss_inputs()

    def loss(*values: Tensor) -> Tensor:
        return module(**dict(zip(inputs, values, strict=True))).loss  # type: ignore[no-any-return]

    def checkpointing(on: bool) -> None:
        if on:
            module.gradient_checkpointing_enable()
        else:
            module.gradient_checkpointing_disable()

    return Model(module, loss, tuple(inputs.values()), checkpointing)


def timm(name: str, **options: Any) -> Model:
    """Return a classifier of timm's."""
    import timm as library

    module = library.create_model(name, num_classes=10, **options).train()

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(module(x), y)

    inputs = (torch.randn(16, 3, 96, 96), torch.randint(10, (16,)))
    return Model(module, loss, inputs, module.set_grad_checkpointing)


def without_torchvision_operators() -> None:
    """Have torchvision import beside a torch that its compiled operators were not built with.

    timm and transformers need its transforms of images. What it describes of two compiled operators
    asks for their schemas, even where they could not be loaded.
    """
    try:
        import torchvision  # noqa: F401
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _kept.append(library)


_kept: list[Any] = []  # what is defined goes with its library


def diffusers_unet() -> Model:
    """Return diffusers' U-Net, conditioned by a text."""
    import diffusers

    module = diffusers.UNet2DConditionModel(
        sample_size=32,
        block_out_channels=(32, 64, 64),
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=2,
        cross_attention_dim=64,
        attention_head_dim=8,
    ).train()

    def loss(x: Tensor, t: Tensor, text: Tensor, noise: Tensor) -> Tensor:
        return nn.functional.mse_loss(module(x, t, text).sample, noise)

    def checkpointing(on: bool) -> None:
        (module.enable_gradient_checkpointing if on else module.disable_gradient_checkpointing)()

    shape = (4, 4, 32, 32)
    inputs = (
        torch.randn(shape),
        torch.randint(1000, (4,)),
        torch.randn(4, 16, 64),
        torch.randn(shape),
    )
    return Model(module, loss, inputs, checkpointing)


def geometric(conv: str, **options: Any) -> Model:
    """Return PyTorch Geometric's deep network of ``conv`` layers, on a random graph."""
    from torch_geometric import nn as library

    width, nodes, edges = 64, 4000, 16000
    layers = [
        library.DeepGCNLayer(
            getattr(library, conv)(width, width, **options),
            library.LayerNorm(width),
            nn.ReLU(),
            block="res+",
            dropout=0.1,
        )
        for _ in range(8)
    ]
    module = nn.ModuleDict(
        {
            "encoder": nn.Linear(32, width),
            "layers": nn.ModuleList(layers),
            "head": nn.Linear(width, 10),
        }
    ).train()

    def loss(x: Tensor, edge_index: Tensor, y: Tensor) -> Tensor:
        h = module["encoder"](x)
        for layer in layers:
            h = layer(h, edge_index)
        return nn.functional.cross_entropy(module["head"](h), y)

    def checkpointing(on: bool) -> None:
        for layer in layers:
            layer.ckpt_grad = on

    inputs = (
        torch.randn(nodes, 32),
        torch.randint(nodes, (2, edges)),
        torch.randint(10, (nodes,)),
    )
    return Model(module, loss, inputs, checkpointing)


def tokens(batch: int, length: int, **more: Tensor) -> dict[str, Tensor]:
    """Return token ids below 512, which are their own labels, and what else is given."""
    ids = torch.randint(1, 512, (batch, length))
    return {"input_ids": ids, "labels": ids, **more}


def speech() -> dict[str, Tensor]:
    """Return mel spectrograms and what is said."""
    return {
        "input_features": torch.randn(4, 80, 300),
        "labels": torch.randint(1, 512, (4, 64)),
    }


def images() -> dict[str, Tensor]:
    """Return images and their classes."""
    return {"pixel_values": torch.randn(8, 3, 96, 96), "labels": torch.randint(2, (8,))}


# Ids of special tokens, within a vocabulary of 512.
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
MODELS: dict[str, tuple[str, Callable[[], Model]]] = {
    "GPT-2": (
        "transformers",
        lambda: transformers(
            "GPT2LMHeadModel", lambda: tokens(8, 256), vocab_size=512, n_positions=256, n_embd=192,
            n_layer=6, n_head=6, use_cache=False, **_SPECIAL,
        ),
    ),
    "Llama": (
        "transformers",
        lambda: transformers(
            "LlamaForCausalLM", lambda: tokens(8, 256), vocab_size=512, hidden_size=192,
            intermediate_size=512, num_hidden_layers=6, num_attention_heads=6,
            num_key_value_heads=3, max_position_embeddings=256, use_cache=False, **_SPECIAL,
        ),
    ),
    "BERT": (
        "transformers",
        lambda: transformers(
            "BertForMaskedLM", lambda: tokens(8, 256), vocab_size=512, hidden_size=192,
            num_hidden_layers=6, num_attention_heads=6, intermediate_size=768,
            max_position_embeddings=256, pad_token_id=0,
        ),
    ),
    "T5": (
        "transformers",
        lambda: transformers(
            "T5ForConditionalGeneration", lambda: tokens(8, 128), vocab_size=512, d_model=128,
            d_kv=32, d_ff=512, num_layers=4, num_heads=4, use_cache=False, pad_token_id=0,
            decoder_start_token_id=0, eos_token_id=2,
        ),
    ),
    "ViT": (
        "transformers",
        lambda: transformers(
            "ViTForImageClassification", images, hidden_size=192, num_hidden_layers=6,
            num_attention_heads=6, intermediate_size=768, image_size=96, patch_size=8,
        ),
    ),
    "Whisper": (
        "transformers",
        lambda: transformers(
            "WhisperForConditionalGeneration", speech, vocab_size=512, d_model=128,
            encoder_layers=4, decoder_layers=4, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=512, decoder_ffn_dim=512,
            max_source_positions=150, max_target_positions=64, use_cache=False,
            decoder_start_token_id=1, **_SPECIAL,
        ),
    ),
    "Mamba": (
        "transformers",
        lambda: transformers(
            "MambaForCausalLM", lambda: tokens(4, 64), vocab_size=512, hidden_size=96,
            state_size=8, num_hidden_layers=4, use_cache=False, **_SPECIAL,
        ),
    ),
    "ResNet-50": ("timm", lambda: timm("resnet50")),
    "ConvNeXt": ("timm", lambda: timm("convnext_atto", drop_path_rate=0.1)),
    "EfficientNet": ("timm", lambda: timm("efficientnet_b0", drop_path_rate=0.1)),
    "U-Net": ("diffusers", diffusers_unet),
    "GCN": ("PyG", lambda: geometric("GCNConv")),
    "GAT": ("PyG", lambda: geometric("GATConv", heads=4, concat=False)),
}  # fmt: skip


def floor(step: Step, peak: int, steps: int = 100) -> float:
    """Return the least share of ``peak`` that the simulator runs ``step`` in, to 1 / ``steps``."""
    trace = rematfn.record(step)

    def fits(share: int) -> bool:
        try:
            rematfn.simulate(trace, share * peak // steps, rematfn.policies.ON())
        except rematfn.BudgetError:
            return False
        return True

    return bisect.bisect_left(range(steps), True, lo=1, key=fits) / steps


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of a model."""
    torch.set_num_threads(options.threads)
    without_torchvision_operators()
    library, make = MODELS[name]

    def network() -> Program:
        torch.manual_seed(0)
        return make().program()

    bench = Bench(Network(name, library, network))
    theirs = bench.program.make_step(untransformed, own)
    bench.run(theirs)
    results, memory = bench.count(theirs)
    ours = Ours(bench, memory.peak, rematfn.policies.Guided())
    row: dict[str, Any] = {
        "model": name,
        "library": library,
        "plain peak, MiB": bench.peak / MIB,
        "library's": memory.peak / MIB,
        "of plain's": memory.peak / bench.peak,
        "library's exact": bench.is_exact(results),
    }
    del results
    found = ours.measure()
    row |= {"ours": found["peak"] / MIB, "exact": found["exact"]}
    row["within"] = found["peak"] <= ours.budget
    row["replayed cost"] = found["replayed cost"]
    row["floor"] = floor(bench.eager, bench.peak)
    steps = {"plain": bench.eager, "library": theirs, "ours": ours.step}
    for who, step in steps.items():
        added = bench.resident(step)
        row[f"resident, {who}"] = None if added is None else added / MIB
    if options.repeats:
        row |= times(bench, steps, options.repeats)
    return row


def times(bench: Bench, steps: dict[str, Step], repeats: int) -> dict[str, Any]:
    """Return ratios of the steps' processor time."""

    def seconds(step: Step) -> float:
        start = time.process_time()
        results, _ = bench.run(step)
        elapsed = time.process_time() - start
        del results
        return elapsed

    with OthersLoad() as others:
        measured = interleaved({n: lambda s=s: seconds(s) for n, s in steps.items()}, repeats)

    def ratio(a: str, b: str) -> float:
        pairs = zip(measured[a], measured[b], strict=True)
        return statistics.median(x / y for x, y in pairs)

    return {
        "library / plain": ratio("library", "plain"),
        "ours / plain": ratio("ours", "plain"),
        "ours / library": ratio("ours", "library"),
        "plain, s": statistics.median(measured["plain"]),
        "others' load": others.cores,
    }


def broken(rows: list[dict[str, Any]]) -> list[str]:
    """Return a sentence for each promise that a row breaks."""
    found = []
    for row in rows:
        if not row["exact"]:
            found.append(f"{row['model']}: not bitwise the plain model's")
        if not row["within"]:
            found.append(f"{row['model']}: a peak above the budget")
        if row.get("ours / library", 0) > 1:
            found.append(f"{row['model']}: slower than its library's own checkpointing")
    return found


def write(folder: Path, rows: list[dict[str, Any]], where: dict[str, object]) -> str:
    """Write the document, the record and the picture into ``folder``; return the document."""
    from picture import draw_models  # loads matplotlib

    sentences = [f"- {sentence}" for sentence in broken(rows)]
    parts = [
        "# Models of libraries, beside their own checkpointing (`make bench-models`)",
        ABOUT.strip(),
        "\n".join(
            ["**Promises broken:**" + ("" if sentences else " none."), "", *sentences]
        ).strip(),
        f"![{ALTERNATIVE}](library_models.png)",
        table(rows),
        place(where),
    ]
    text = "\n\n".join(parts) + "\n"
    (folder / "library_models.md").write_text(text)
    record = {"machine": where, "rows": rows}
    (folder / "library_models.json").write_text(json.dumps(record, indent=1) + "\n")
    draw_models(folder / "library_models.png", rows)
    return text


def versions() -> dict[str, object]:
    """Return the versions of the libraries."""
    from importlib import metadata

    names = ("transformers", "timm", "diffusers", "torch_geometric")
    return {name: metadata.version(name) for name in names}


def main() -> None:
    """Measure what was asked for; save after each model."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--models", nargs="*", default=list(MODELS), choices=list(MODELS), metavar="NAME",
        help=f"some of: {', '.join(MODELS)}; without a name the document is written anew",
    )  # fmt: skip
    parser.add_argument("--repeats", type=int, default=7, help="timed rounds; with 0, no times")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULTS, help="a folder for the results")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "library_models.json"
    known = json.loads(path.read_text()) if path.exists() else {"rows": [], "machine": {}}
    rows = {row["model"]: row for row in known["rows"]}
    where = {**machine(), **versions()} if options.models else known["machine"]
    for name in options.models:
        rows[name] = in_fresh_process(measure, name, options)
        write(options.out, [rows[model] for model in MODELS if model in rows], where)
    print(write(options.out, [rows[model] for model in MODELS if model in rows], where))


if __name__ == "__main__":
    main()
