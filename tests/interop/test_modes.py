# SPDX-License-Identifier: Apache-2.0
"""What a thread can switch on and off: autocast, grad and inference mode, defaults, determinism."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest
import torch
from helpers import (
    EVERY,
    EVERYTHING,
    PLAIN,
    Mode,
    Transform,
    assert_bitwise_equal,
    assert_same_as_eager,
    default_dtype,
    untransformed,
)
from torch import Tensor, func, nn

import rematfn
from rematfn import _C
from rematfn.testing import EvictEverything


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.GELU(), nn.Linear(6, 4))


def batch() -> Tensor:
    return torch.linspace(-1, 1, 12).view(3, 4)


# --- autocast -------------------------------------------------------------------------------------


def autocast(**options: Any) -> Any:
    return torch.autocast("cpu", torch.bfloat16, **options)


@pytest.mark.parametrize("cache", [True, False], ids=["cache", "no-cache"])
@pytest.mark.parametrize("where", ["inside", "around", "around-the-backward-too"])
def test_autocast(where: str, cache: bool, mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        net, x = model(), batch().requires_grad_()

        def f(x: Tensor) -> Tensor:
            with autocast(cache_enabled=cache) if where == "inside" else nullcontext():
                return net(x) * net(x.sin())  # each weight is cast once, or twice

        g = transform(f)
        with autocast(cache_enabled=cache) if where != "inside" else nullcontext():
            out = g(x)
            if where == "around-the-backward-too":
                out.float().sum().backward()
        if where != "around-the-backward-too":
            out.float().sum().backward()
        return out, x.grad, [p.grad for p in net.parameters()]

    assert_same_as_eager(run, mode)


def test_the_weight_cache_keeps_no_level_tensors(mode: Mode) -> None:
    """A weight cast inside one call is read again by the next, and by eager code after it."""

    def run(transform: Transform) -> Any:
        net, x = model(), batch()
        with autocast():
            first = transform(net)(x)
            second = transform(net)(x * 2)
            third = net(x * 3)
            (first + second + third).float().sum().backward()
        return first, second, third, [p.grad for p in net.parameters()]

    assert_same_as_eager(run, mode)


def test_a_cached_cast_is_used_though_its_weight_has_changed(mode: Mode) -> None:
    """As in eager code, for better or worse."""

    def run(transform: Transform) -> Any:
        net, x = model(), batch()
        with autocast():
            first = transform(net)(x).detach()
            with torch.no_grad():
                net[0].weight.mul_(2)
            second = transform(net)(x).detach()
            return first, second, net(x).detach()

    assert_same_as_eager(run, mode)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_weight_cache_does_not_hold_lineage(depth: int) -> None:
    net = model()
    f: Any = net
    for _ in range(depth):
        f = EVERYTHING(lambda x, f=f: f(x.sin()))
    with autocast():
        f(batch())
        assert _C.testing.live_operations() == 0
        rematfn.testing.check()


def test_casts_by_the_weight_cache_obey_the_budget(mode: Mode) -> None:
    """The cache belongs to the outermost autocast, which may be far inside of the function."""

    def run(transform: Transform) -> Any:
        net, x = model(), batch()

        def gradient(x: Tensor) -> Any:
            with autocast():
                loss = sum(net(x * k).float().square().sum() for k in range(3))
            return torch.autograd.grad(loss, list(net.parameters())), loss

        return transform(gradient)(x), transform(gradient)(x)

    assert_same_as_eager(run, mode)


@pytest.mark.parametrize("order", ["grad-remat", "remat-grad", "vmap-grad-remat"])
def test_autocast_under_transforms(order: str, mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        net, x = model(), batch()
        params = dict(net.named_parameters())

        def loss(params: Any, x: Tensor) -> Tensor:
            with autocast():
                return func.functional_call(net, params, (x,)).float().square().mean()

        if order == "grad-remat":
            return func.grad(transform(loss))(params, x)
        if order == "remat-grad":
            return transform(func.grad(loss))(params, x)
        return func.vmap(func.grad(transform(loss)), in_dims=(None, 0))(params, x)

    assert_same_as_eager(run, mode)


def test_custom_fwd_and_bwd(mode: Mode) -> None:
    class Product(torch.autograd.Function):
        @staticmethod
        @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.bfloat16)  # type: ignore[untyped-decorator]
        def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
        def backward(ctx: Any, grad: Tensor) -> Any:
            a, b = ctx.saved_tensors
            return grad @ b.t(), a.t() @ grad

    def run(transform: Transform) -> Any:
        x, w = batch().requires_grad_(), torch.linspace(0, 1, 16).view(4, 4).requires_grad_()

        def f(x: Tensor) -> Tensor:
            with autocast():
                return Product.apply(x.sin(), w.exp()).float().cos()

        out = transform(f)(x)
        out.sum().backward()
        return out, x.grad, w.grad

    assert_same_as_eager(run, mode)


# --- grad mode ------------------------------------------------------------------------------------


def mixed(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    """Switch recording off, on again inside, and off by `set_grad_enabled`."""
    y = (x * w).sin()
    with torch.no_grad():
        z = y.exp() + x
        z.mul_(w)
        with torch.enable_grad():
            u = (z * w).cos() * y
    with torch.set_grad_enabled(False):
        v = u * z
    return u.exp(), v, z, y.detach() * 2


def test_switching_grad_mode_inside(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        x, w = batch().requires_grad_(), batch().exp().requires_grad_()
        outs = transform(mixed)(x, w)
        outs[0].sum().backward()
        return outs, x.grad, w.grad

    assert_same_as_eager(run, mode)


@pytest.mark.parametrize("inner", [torch.no_grad, torch.enable_grad])
@pytest.mark.parametrize("outer", [torch.no_grad, torch.enable_grad])
def test_grad_mode_around(outer: Any, inner: Any, mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        x, w = batch().requires_grad_(), batch().exp().requires_grad_()

        def f(x: Tensor) -> Any:
            with inner():
                return (x * w).sin() * x, mixed(x, w)

        with outer():
            return transform(f)(x)

    assert_same_as_eager(run, mode)


def test_no_grad_as_a_decorator_in_either_order(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        x = batch().requires_grad_()

        def f(x: Tensor) -> Tensor:
            return (x.sin() * x).exp().cos()

        return transform(torch.no_grad()(f))(x), torch.no_grad()(transform(f))(x)

    assert_same_as_eager(run, mode)


# --- inference mode -------------------------------------------------------------------------------


def test_inference_mode_around(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        net, x = model(), batch()
        with torch.inference_mode():
            out = transform(net)(x)
            again = transform(net)(out)
        return out, again

    assert_same_as_eager(run, mode)


def test_inference_mode_inside(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        net, x = model(), batch().requires_grad_()

        def f(x: Tensor) -> Any:
            with torch.inference_mode():
                y = net(x).sin()
                y.mul_(2)
                with torch.inference_mode(False):
                    z = x.exp() * 3
            return y, z, net(x) + y.clone().sum()

        y, z, out = transform(f)(x)
        out.sum().backward()
        return y, z, out, x.grad, [p.grad for p in net.parameters()]

    assert_same_as_eager(run, mode)


def test_inference_tensors_made_inside_used_outside(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        x, w = batch(), torch.ones(4, requires_grad=True)
        with torch.inference_mode():
            y = transform(lambda x: (x.sin() * 2).exp())(x)
        with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
            y * w
        with pytest.raises(RuntimeError, match="Inplace update to inference tensor outside"):
            y.add_(1)
        with torch.inference_mode():
            y.add_(1)
        return y, y * 2, (y.clone() * w).sin()

    assert_same_as_eager(run, mode)


def test_inference_tensors_from_outside_are_read_and_written(mode: Mode) -> None:
    """They have no version counter to compare."""

    def run(transform: Transform) -> Any:
        with torch.inference_mode():
            state = torch.ones(3, 4)

            def f(x: Tensor) -> Tensor:
                y = (x * state).sin()
                state.mul_(0.5)
                return (y.exp() * state).cos()

            out = transform(f)(batch())
        return out, state

    assert_same_as_eager(run, mode)


# --- defaults -------------------------------------------------------------------------------------


@contextmanager
def default_device(device: str) -> Iterator[None]:
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


CONTEXTS: dict[str, Callable[[], Any]] = {
    "dtype": lambda: default_dtype(torch.float64),
    "device": lambda: default_device("cpu"),
    "device-context": lambda: torch.device("cpu"),
    "meta-device-context": lambda: torch.device("meta"),
    "deterministic": deterministic,
}


def factories(x: Tensor) -> tuple[Tensor, ...]:
    """Depend on defaults: dtype of factories and of promoted integers, device, filled memory."""
    y = torch.linspace(0, 1, 4).to(x.device) * x
    z = torch.arange(4).to(x.device) / 3 + y
    u = torch.tensor([1.5, 2.5]).sum().to(x.device) * z.exp()
    v = torch.zeros(6, dtype=x.dtype, device=x.device).index_add(
        0, torch.tensor([0, 2, 2, 5]).to(x.device), z[0].to(x.dtype)
    )
    return u.cos() * y, v.sin(), torch.ones(3) * 2


@pytest.mark.parametrize("context", [c for c in CONTEXTS if c != "meta-device-context"])
@pytest.mark.parametrize("where", ["inside", "around", "forward-only"])
def test_defaults_and_determinism(context: str, where: str, mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        x = batch().requires_grad_()

        def f(x: Tensor) -> Any:
            with CONTEXTS[context]() if where == "inside" else nullcontext():
                return factories(x)

        with CONTEXTS[context]() if where != "inside" else nullcontext():
            outs = transform(f)(x)
            if where == "around":
                sum(o.sum() for o in outs).backward()
        if where != "around":
            sum(o.sum() for o in outs).backward()
        return outs, x.grad

    assert_same_as_eager(run, mode)


@pytest.mark.parametrize("mode", [PLAIN, EVERY], ids=lambda mode: mode.name)
def test_a_module_may_be_made_on_the_meta_device_inside(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        def f(x: Tensor) -> Tensor:
            with torch.device("meta"):
                net = nn.Linear(4, 5)
            shape = net(torch.empty(3, 4, device="meta")).shape
            net = net.to_empty(device="cpu")
            nn.init.constant_(net.weight, 0.5)
            nn.init.zeros_(net.bias)
            return net(x.sin()).view(shape)

        return transform(f)(batch())

    assert_same_as_eager(run, mode)


@pytest.mark.parametrize("fill", [True, False], ids=["filled", "unfilled"])
def test_deterministic_mode_fills_uninitialised_memory(fill: bool, mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        before = torch.utils.deterministic.fill_uninitialized_memory
        torch.utils.deterministic.fill_uninitialized_memory = fill
        try:
            with deterministic():
                y = transform(lambda x: torch.empty(4).copy_(x).exp() * torch.empty(2, 4).isnan())
                return y(torch.ones(4)) if fill else y(torch.ones(4)) * 0
        finally:
            torch.utils.deterministic.fill_uninitialized_memory = before

    assert_same_as_eager(run, mode)


def test_the_deterministic_choice_is_replayed_after_it_was_undone(mode: Mode) -> None:
    """index_add on a CPU takes another path; the replay runs after the mode has been left."""

    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        source, index = torch.randn(64, 8, requires_grad=True), torch.randint(0, 4, (64,))

        def f(source: Tensor) -> Tensor:
            with deterministic():
                y = torch.zeros(4, 8).index_put((index,), source, accumulate=True)
                z = torch.zeros(4, 8).index_add(0, index, source.sin())
            return (y * z).exp().cos() * y

        out = transform(f)(source)
        out.sum().backward()
        return out, source.grad

    assert_same_as_eager(run, mode)


def test_sdpa_backend_choice_is_replayed(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        q, k, v = (torch.randn(2, 2, 5, 8, requires_grad=True) for _ in range(3))

        def f(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            with nn.attention.sdpa_kernel(nn.attention.SDPBackend.MATH):
                a = nn.functional.scaled_dot_product_attention(q, k, v)
            b = nn.functional.scaled_dot_product_attention(a.sin(), k, v, is_causal=True)
            return (a * b).exp()

        out = transform(f)(q, k, v)
        out.sum().backward()
        return out, [t.grad for t in (q, k, v)]

    assert_same_as_eager(run, mode)


@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN:UserWarning")
def test_mkldnn_and_precision_flags(mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        torch.manual_seed(3)
        net = nn.Sequential(nn.Conv2d(2, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 3))
        x = torch.randn(1, 2, 8, 8, requires_grad=True)

        def f(x: Tensor) -> Tensor:
            with torch.backends.mkldnn.flags(enabled=False):
                y = net(x)
            return y + net(x.sin())

        out = transform(f)(x)
        out.sum().backward()
        return out, x.grad, [p.grad for p in net.parameters()]

    assert_same_as_eager(run, mode)


def test_a_replay_leaves_warnings_of_determinism_as_they_are() -> None:
    loss = rematfn.remat(lambda x: x.sin().exp().sum(), policy=EvictEverything())(
        torch.ones(8, requires_grad=True)
    )
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        loss.backward()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


def test_a_cast_of_the_programs_own_fills_no_cache_of_autocast() -> None:
    """An entry would stay as it is when the weight is written."""

    def run(transform: Transform) -> Any:
        w, x = torch.linspace(-1, 1, 12).view(3, 4).requires_grad_(), torch.ones(2, 4)
        with torch.autocast("cpu", torch.bfloat16):
            found = [transform(lambda: w.double().norm())(), transform(lambda: w.bfloat16() * 2)()]
            with torch.no_grad():
                w.mul_(2)
            return [*found, nn.functional.linear(x, w)]

    assert_bitwise_equal(run(rematfn.remat), run(untransformed))
