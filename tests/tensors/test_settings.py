# SPDX-License-Identifier: Apache-2.0
"""What chooses a kernel, or how it calculates, is for a replay what it was on the first run."""

import ctypes
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from helpers import EVERY, EVERYTHING, Transform, assert_same_as_eager
from processes import together
from torch import Tensor, nn

import rematfn

C = torch._C


class Setting(NamedTuple):
    """How a setting is read and written, and two values of it."""

    get: Callable[[], Any]
    set: Callable[[Any], Any]
    values: tuple[Any, Any]


def switch(name: str) -> Setting:
    return Setting(getattr(C, f"_get_{name}"), getattr(C, f"_set_{name}"), (False, True))


def attention(name: str) -> Setting:
    return Setting(
        getattr(C, f"_get_{name}_sdp_enabled"), getattr(C, f"_set_sdp_use_{name}"), (False, True)
    )


def precision(backend: str, op: str, values: tuple[str, str]) -> Setting:
    return Setting(
        lambda: C._get_fp32_precision_getter(backend, op),
        lambda value: C._set_fp32_precision_setter(backend, op, value),
        values,
    )


def reduction(name: str) -> Setting:
    def put(value: Any) -> None:
        getattr(C, f"_set_cublas_allow_{name}_reduced_precision_reduction")(*value)

    get = getattr(C, f"_get_cublas_allow_{name}_reduced_precision_reduction")
    return Setting(get, put, ((True, True), (False, False)))


def deterministic() -> tuple[bool, bool]:
    return C._get_deterministic_algorithms(), C._get_deterministic_algorithms_warn_only()


SETTINGS: dict[str, Setting] = {
    **{
        name: switch(name)
        for name in (
            *("mkldnn_enabled", "mkldnn_deterministic", "nnpack_enabled"),
            *("cudnn_enabled", "cudnn_benchmark", "cudnn_deterministic", "miopen_immediate"),
            "cublas_allow_fp16_accumulation",
            *("deterministic_fill_uninitialized_memory", "math_sdp_allow_fp16_bf16_reduction"),
        )
    },
    **{f"sdp_use_{n}": attention(n) for n in ("flash", "mem_efficient", "math", "cudnn", "fa3")},
    "sdp_use_overrideable": attention("overrideable"),
    "sdp_priority_order": Setting(
        C._get_sdp_priority_order,
        C._set_sdp_priority_order,
        ([1, 2, 0, 3, 4], [0, 2, 1, 3, 4]),
    ),
    "cublas_allow_fp16_reduced_precision_reduction": reduction("fp16"),
    "cublas_allow_bf16_reduced_precision_reduction": reduction("bf16"),
    "cublas_allow_tf32": switch("cublas_allow_tf32"),
    "cudnn_allow_tf32": switch("cudnn_allow_tf32"),
    "float32_matmul_precision": Setting(
        torch.get_float32_matmul_precision,
        torch.set_float32_matmul_precision,
        ("highest", "medium"),
    ),
    "fp32_precision_setter": precision("generic", "all", ("none", "ieee")),
    "mkldnn matmul": precision("mkldnn", "matmul", ("ieee", "bf16")),
    "mkldnn conv": precision("mkldnn", "conv", ("ieee", "bf16")),
    "mkldnn rnn": precision("mkldnn", "rnn", ("ieee", "bf16")),
    "cuda conv": precision("cuda", "conv", ("ieee", "tf32")),
    "cuda rnn": precision("cuda", "rnn", ("ieee", "tf32")),
    "qengine": Setting(C._get_qengine, C._set_qengine, tuple(C._supported_qengines()[:2])),
    "rocm_fa_preferred_backend": Setting(
        C._get_rocm_fa_preferred_backend,
        C._set_rocm_fa_preferred_backend,
        (C._ROCmFABackend.Default, C._ROCmFABackend.AOTriton),
    ),
    "sm_carveout_experimental": Setting(
        C._get_sm_carveout_experimental, C._set_sm_carveout_experimental, (None, 66)
    ),
    "deterministic_algorithms": Setting(
        deterministic,
        lambda value: C._set_deterministic_algorithms(value[0], warn_only=value[1]),
        ((False, False), (True, True)),
    ),
    "default_dtype": Setting(
        torch.get_default_dtype, C._set_default_dtype, (torch.float32, torch.float64)
    ),
    "num_threads": Setting(torch.get_num_threads, torch.set_num_threads, (1, 3)),
    "flush_denormal": Setting(
        lambda: bool(torch.tensor(1e-39) * 0.5 == 0), torch.set_flush_denormal, (False, True)
    ),
}
if hasattr(C, "_get_cudnn_depthwise_kernel"):
    SETTINGS["cudnn_depthwise_kernel"] = Setting(
        C._get_cudnn_depthwise_kernel, C._set_cudnn_depthwise_kernel, ("auto", "native")
    )
# Torch 2.15's: attention, grouped products, and top-k on CUDA have another kernel with them.
if hasattr(C, "_get_fa4_sdp_enabled"):
    SETTINGS["sdp_use_fa4"] = attention("fa4")
for name in (
    "cublaslt_prefer_grouped_gemm",
    "native_aot_enabled",
    "native_aot_unconditional_masked",
):
    if hasattr(C, f"_get_{name}"):
        SETTINGS[name] = switch(name)


# Setters of torch's whose setting no recorded kernel's result depends on.
NOT_ASKED_BY_KERNELS = {
    "autograd": "autograd_fallback_mode fwd_grad_enabled grad_enabled multithreading_enabled"
    " grad_layout_enforcement_enabled view_replay_enabled warn_on_accumulate_grad_stream_mismatch"
    " override_stale_capture_stream",  # grad mode is restored beside the settings
    "warnings": "backcompat_broadcast_warn backcompat_keepdim_warn warnAlways"
    " warn_deprecated_on_mutable_data_ptr print_stack_traces_on_fatal_signal",
    "checks": "check_sparse_tensor_invariants",
    "a tensor": "conj neg tensor_metadata throw_on_mutable_data_ptr fake_constant",
    "above the dispatcher's backends": "dispatch_mode dtensor_allow_implicit_replication"
    " generator_metaclass meta_in_tls_dispatch_include only_lift_cpu_tensors"
    " skip_next_torch_function torch_function_state cached_tensors_enabled default_tensor_type",
    "TorchScript": "graph_exec_group graph_executor_optimize tracing_state value_trace"
    " should_use_format_with_string_table",
    "processes": "thread_name worker_pids worker_signal_handlers default_mobile_cpu_allocator",
    "only where torch is built for it; captured like the rest": "blas_preferred_backend"
    " linalg_preferred_backend onednn_allow_tf32 cpu_allow_fp16_reduced_precision_reduction",
    "storages, on torch 2.11": "storage_access_error_msg storage_data_ptr_access_error_msg",
}


def test_every_setter_of_torch_is_known() -> None:
    setters = {name[5:] for name in dir(C) if name.startswith("_set_")}
    others = {name for names in NOT_ASKED_BY_KERNELS.values() for name in names.split()}
    assert setters - SETTINGS.keys() - others == set()


def test_context_keeps_its_settings_where_we_look() -> None:
    """All members lie between the first setting and the precisions, and hold what they say."""
    header = Path(torch.__file__).parent / "include" / "ATen" / "Context.h"
    text = re.sub(r"//.*", "", header.read_text(encoding="utf-8"))
    members = text[text.index("once_flag, at::COMPILE") :]
    members = members[: members.index("\n};")]
    found = re.findall(r"^  (?=\S)([\w:<>, *]+?[ *])(\w+)(?: =|\{|;)", members, re.M)
    names = [name for kind, name in found if not kind.startswith("using")]
    first, last = names.index("enabled_cudnn"), names.index("fp32_precision")
    assert first == 0
    assert names[last + 1 :] == ["prev_allocator_ptr_"]
    assert last > 30
    plain = r"(bool|int|at::\w+|\w+(Precision|Option|Kernel)|std::(optional|atomic|array)<.*>) "
    assert [kind for kind, _ in found[:last] if not re.fullmatch(plain, kind)] == []


# --- a replay sees what the first run saw ---------------------------------------------------------


@contextmanager
def restored(setting: Setting) -> Iterator[None]:
    precisions = [
        (backend, op, C._get_fp32_precision_getter(backend, op))
        for backend, op in (("generic", "all"), ("cuda", "matmul"), ("mkldnn", "matmul"))
    ]
    before = setting.get()
    try:
        yield
    finally:
        setting.set(before)
        for backend, op, value in precisions:
            C._set_fp32_precision_setter(backend, op, value)


watched: list[Setting] = []


@torch.library.custom_op("rematfn_tests::with_setting", mutates_args=())
def with_setting(x: Tensor) -> Tensor:
    return x + watched[-1].values.index(watched[-1].get()) + 1


with_setting.register_fake(torch.empty_like)
with_setting.register_autograd(
    lambda ctx, gradient: gradient * ctx.saved_tensors[0],
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(output),
)


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("first", [0, 1])
def test_a_replay_sees_the_setting_of_the_first_run(name: str, first: int) -> None:
    setting = SETTINGS[name]
    here, there = setting.values[first], setting.values[1 - first]

    def f(x: Tensor) -> Tensor:
        setting.set(here)
        y = with_setting(x.sin())
        setting.set(there)  # in the middle of f
        z = with_setting(y * y)
        setting.set(here)
        return with_setting(y * z).cos() * z

    def run(transform: Transform) -> Any:
        x = torch.linspace(-1, 1, 64, dtype=torch.float32).requires_grad_()
        out = transform(f)(x)
        setting.set(there)  # between forward and backward
        (gradient,) = torch.autograd.grad(out.sum(), x)
        assert setting.get() == there
        return out, gradient

    watched.append(setting)
    with restored(setting):
        assert_same_as_eager(run, EVERY)


@pytest.mark.parametrize("name", ["mkldnn_enabled", "num_threads", "fp32_precision_setter"])
def test_a_replay_that_fails_leaves_the_setting_alone(name: str) -> None:
    setting = SETTINGS[name]
    runs = []

    def kernel(x: Tensor) -> Tensor:
        runs.append(setting.get())
        if len(runs) > 1:
            raise ArithmeticError
        return x + 1

    op = torch.library.custom_op(f"rematfn_tests::fails_{name}", kernel, mutates_args=())
    op.register_fake(torch.empty_like)

    def f(x: Tensor) -> Tensor:
        setting.set(setting.values[0])
        y = op(x)
        setting.set(setting.values[1])
        return y.sin()

    with restored(setting):
        with pytest.raises(ArithmeticError):
            EVERYTHING(f)(torch.ones(3))
        assert len(runs) > 1
        assert set(runs) == {setting.values[0]}
        assert setting.get() == setting.values[1]


# --- other threads --------------------------------------------------------------------------------


@pytest.fixture
def other_number_than_openmp() -> Iterator[None]:
    """Torch divides loops among another number of threads than OpenMP gives to a new thread."""
    before = torch.get_num_threads()
    number = []
    omp = ctypes.CDLL(None).omp_get_max_threads
    together(lambda: number.append(omp()))
    torch.set_num_threads(1 if number[0] > 1 else 3)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def normed(transform: Transform) -> list[Any]:
    """Return the gradients of a backward on a new thread, and of a norm there after it."""
    torch.manual_seed(1)
    layers = [m for _ in range(3) for m in (nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU())]
    model = nn.Sequential(*layers)
    x = torch.linspace(-1, 1, 32 * 32).view(32, 32)
    f = transform(model)
    out = f(x)
    after = nn.LayerNorm(32)
    together(lambda: (out.sum().backward(), after(x).cos().sum().backward()))
    return [p.grad for m in (model, after) for p in m.parameters()]


@pytest.mark.usefixtures("other_number_than_openmp")
def test_a_replay_may_be_the_first_operator_on_a_thread() -> None:
    """Torch sets a thread's number of threads once: a replay must not use that up."""
    assert_same_as_eager(normed, EVERY)


@pytest.mark.usefixtures("other_number_than_openmp")
def test_the_first_operator_on_a_thread_is_replayed_with_the_threads_that_it_had() -> None:
    x = torch.linspace(-1, 1, 32 * 32).view(32, 32)
    weight, cotangent = torch.ones(32), x.cos()
    _, mean, rstd = torch.native_layer_norm(x, [32], weight, None, 1e-5)

    def gradient(cotangent: Tensor) -> Any:
        found = torch.ops.aten.native_layer_norm_backward(
            cotangent, x, [32], mean, rstd, weight, None, [False, True, False]
        )
        return found[1] * 1, found[1] * 2

    def run(transform: Transform) -> Any:
        return together(lambda: transform(gradient)(cotangent))

    assert_same_as_eager(run, EVERY)


def beside(meanwhile: Callable[[], Any], name: str) -> Callable[[Tensor], Tensor]:
    """Return a function whose replay has another thread call `meanwhile`, without mkldnn."""
    runs = []

    def kernel(x: Tensor) -> Tensor:
        runs.append(C._get_mkldnn_enabled())
        if len(runs) > 1:
            together(meanwhile)
        return x + 1

    op = torch.library.custom_op(f"rematfn_tests::beside_{name}", kernel, mutates_args=())
    op.register_fake(torch.empty_like)

    def f(x: Tensor) -> Tensor:
        setting = SETTINGS["mkldnn_enabled"]
        with restored(setting):
            setting.set(False)
            y = op(x)
        z = y.sin()
        assert runs == [False, False]
        return z

    return f


def test_a_setting_that_another_thread_may_have_seen_is_named() -> None:
    f = beside(lambda: torch.ones(3) + 1, "operator")
    names = r"`torch\.backends\.mkldnn\.enabled` was False and is True"
    with pytest.raises(rematfn.ReplayError, match=names):
        EVERYTHING(f)(torch.ones(3))
    assert C._get_mkldnn_enabled()


def test_a_child_has_the_settings_that_the_program_has() -> None:
    exits = []

    def fork() -> None:
        pid = os.fork()
        if pid == 0:
            os._exit(0 if C._get_mkldnn_enabled() else 1)
        exits.append(os.waitpid(pid, 0)[1])

    EVERYTHING(beside(fork, "fork"))(torch.ones(3))
    assert set(exits) == {0}
