# SPDX-License-Identifier: Apache-2.0
"""Hooks of every kind see what they see in eager, and may change it; anomaly mode."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers import (
    EVERY,
    PLAIN,
    Mode,
    Transform,
    assert_bitwise_equal,
    assert_same_as_eager,
    blocks,
    rows,
    same_as_eager,
    trained,
)
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import rematfn
from rematfn.testing import MemoryTimeline

# --- hooks on tensors -----------------------------------------------------------------------------


@same_as_eager
def test_a_tensor_hook_inside_replaces_the_gradient(transform: Transform) -> Any:
    x, seen = torch.linspace(0.2, 1, 6, requires_grad=True), []

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        weights = y.detach().cos()  # a hook that held y itself would be a cycle
        y.register_hook(lambda grad: seen.append(grad.sum().item()))
        y.register_hook(lambda grad: grad * weights)
        z = (y * x).exp()
        z.register_hook(lambda grad: grad + 1)
        return z * y

    transform(f)(x).sum().backward()
    return x.grad, seen


@same_as_eager
def test_hooks_on_arguments_captured_tensors_and_results(transform: Transform) -> Any:
    leaf = torch.linspace(0.2, 1, 6, requires_grad=True)
    x, captured = leaf.exp(), leaf.cos()
    seen: list[Tensor] = []
    leaf.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    for t in (x, captured):
        t.retain_grad()
        t.register_hook(lambda grad: seen.append(grad))
        t.register_hook(lambda grad: grad.clamp(-2, 2))
    y, z = transform(lambda x: ((x * captured).sin() * x, x.exp()))(x)
    for t in (y, z):
        t.retain_grad()
        t.register_hook(lambda grad: grad * 3)
    (y * z).sum().backward()
    return leaf.grad, x.grad, captured.grad, y.grad, z.grad, seen


@pytest.mark.parametrize("fused", [False, True], ids=["plain", "fused"])
@pytest.mark.parametrize("order", ["inside", "around"])
@same_as_eager
def test_an_optimiser_is_stepped_from_within_a_reentrant_checkpoint(
    transform: Transform, order: str, fused: bool
) -> Any:
    """The parameters' gradients arrive in a backward that runs within the backward."""

    net = blocks()
    optimisers = {p: torch.optim.SGD([p], lr=0.05, fused=fused) for p in net.parameters()}

    def step(p: Tensor) -> None:
        optimisers[p].step()
        p.grad = None

    for p in net.parameters():
        p.register_post_accumulate_grad_hook(step)
    parts = [transform(block) for block in net] if order == "around" else list(net)

    def f(x: Tensor) -> Tensor:
        for part in parts:
            x = checkpoint(part, x.sin(), use_reentrant=True)
        return x.square()

    g = transform(f) if order == "inside" else f
    outs, grads = [], []
    for _ in range(2):
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        outs.append(g(x))
        outs[-1].sum().backward()
        grads.append(x.grad)
    return outs, grads, list(net.parameters())


@same_as_eager
def test_hooks_on_nodes(transform: Transform) -> Any:
    x, seen = torch.linspace(0.2, 1, 6, requires_grad=True), []

    def f(x: Tensor) -> Tensor:
        y = (x.sin() * x).exp()
        node = y.grad_fn
        assert node is not None
        node.register_prehook(lambda grads: tuple(g * 2 for g in grads))
        node.register_hook(lambda ins, outs: seen.append([g.sum().item() for g in ins + outs]))
        return y.cos() * y

    out = transform(f)(x)
    assert out.grad_fn is not None
    out.grad_fn.register_prehook(lambda grads: tuple(g + 1 for g in grads))
    out.sum().backward()
    return x.grad, seen


# --- hooks on modules -----------------------------------------------------------------------------


def forward_pre(seen: list[Any], net: nn.Module) -> None:
    net.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))


def forward(seen: list[Any], net: nn.Module) -> None:
    net.register_forward_hook(lambda module, args, out: out + args[0].sum())
    net.register_forward_hook(lambda module, args, out: seen.append(out.sum().item()))


def forward_with_kwargs(seen: list[Any], net: nn.Module) -> None:
    net.register_forward_hook(
        lambda module, args, kwargs, out: out * (1 + len(kwargs)), with_kwargs=True
    )


def seeing_and_doubling(seen: list[Any]) -> Callable[..., Any]:
    def hook(module: nn.Module, grad_input: Any, grad_output: Any) -> Any:
        seen.append([g.norm().item() for g in (*grad_input, *grad_output) if g is not None])
        return tuple(g if g is None else g * 2 for g in grad_input)

    return hook


def full_backward(seen: list[Any], net: nn.Module) -> None:
    net.register_full_backward_hook(seeing_and_doubling(seen))


def legacy_backward(seen: list[Any], net: nn.Module) -> None:
    """Hangs on the node of the output alone, and sees that node's inputs and outputs."""
    net.register_backward_hook(seeing_and_doubling(seen))


def full_backward_pre(seen: list[Any], net: nn.Module) -> None:
    net.register_full_backward_pre_hook(lambda module, grads: tuple(g.sin() for g in grads))


HOOKS = [
    *(forward_pre, forward, forward_with_kwargs),
    *(full_backward, full_backward_pre, legacy_backward),
]


@pytest.mark.filterwarnings("ignore:Using (a )?non-full backward hook:FutureWarning")
@pytest.mark.parametrize("hook", HOOKS, ids=lambda hook: hook.__name__)
@pytest.mark.parametrize("whole", [False, True], ids=["a-part", "the-whole"])
@same_as_eager
def test_hooks_on_modules(transform: Transform, hook: Any, whole: bool) -> Any:
    """On a module inside the function, and on the transformed module itself."""

    net, seen = blocks(), []
    hook(seen, net if whole else net[0])
    return trained(transform(net), net), seen


# --- hooks on what autograd saves -----------------------------------------------------------------


def half(x: Tensor) -> Any:
    return x.dtype, x.bfloat16() if x.is_floating_point() else x


def full(packed: Any) -> Tensor:
    dtype, x = packed
    return x.to(dtype)


def doubled(packed: Tensor) -> Tensor:
    return packed * 2


def as_array(x: Tensor) -> Any:
    return rematfn.materialize(x.detach()).numpy().copy()


SAVED = {
    "detach": lambda: saved_tensors_hooks(lambda x: x.detach(), lambda x: x),
    "compress": lambda: saved_tensors_hooks(half, full),
    "compute-in-unpack": lambda: saved_tensors_hooks(lambda x: x.detach(), doubled),
    "numpy": lambda: saved_tensors_hooks(as_array, torch.from_numpy),
    "save-on-cpu": save_on_cpu,
}


@pytest.mark.parametrize("hooks", SAVED.values(), ids=SAVED.keys())
@pytest.mark.parametrize("order", ["around", "inside", "around-the-gradient"])
@pytest.mark.parametrize("mode", [PLAIN, EVERY], ids=lambda mode: mode.name)
def test_hooks_on_saved_tensors(hooks: Any, order: str, mode: Mode) -> None:
    def run(transform: Transform) -> Any:
        net = blocks()

        def gradient(x: Tensor) -> Any:
            out = net(x)
            return out, torch.autograd.grad(out.square().sum(), [x, *net.parameters()])

        def hooked(f: Any) -> Any:
            def within(x: Tensor) -> Any:
                with hooks():
                    return f(x)

            return within

        if order == "around-the-gradient":
            return hooked(transform(gradient))(rows())
        f = transform(hooked(net)) if order == "inside" else hooked(transform(net))
        return trained(f, net)

    assert_same_as_eager(run, mode)


# --- anomaly mode ---------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:Error detected in")
@same_as_eager
def test_anomaly_mode_names_the_operator_that_made_a_nan(transform: Transform) -> Any:
    x = torch.linspace(-1, 1, 5, requires_grad=True)
    with torch.autograd.detect_anomaly(check_nan=True):
        out = transform(lambda x: ((x * 2).sqrt() + x.exp()).sum())(x)
        with pytest.raises(RuntimeError, match=r"SqrtBackward0.*nan"):
            out.backward()
    return out


def test_what_hooks_pack_counts_and_may_go() -> None:
    """They run without grad mode; what they make is saved, and not stored away by the program."""
    nbytes, count = 1 << 16, 16

    def f(x: Tensor) -> Tensor:
        with saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            for _ in range(count):
                x = x.tanh()  # saves its result
        return x.sum()

    x = torch.rand(nbytes // 4, requires_grad=True)
    y = x.detach().clone().requires_grad_()
    g = rematfn.remat(f, 6 * nbytes)
    with MemoryTimeline() as timeline:
        out = g(x)
        out.backward()
    f(y).backward()
    assert_bitwise_equal(x.grad, y.grad)
    assert timeline.peak <= 7 * nbytes  # with the gradient
