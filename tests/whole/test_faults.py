# SPDX-License-Identifier: Apache-2.0
"""Whatever fails, wherever: the error is the one raised, and everything else is as it was.

Each test lets one thing fail, at every place in turn; then it looks at the tables, and runs the
same again. What ran before on the same graph has to come out right as well: a backward that failed
may be tried again.
"""

import random
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from helpers import (
    EVERYTHING,
    EXHAUSTIVE,
    UNIT,
    Transform,
    assert_bitwise_equal,
    assert_nothing_keyed,
    refusal_of,
    remains,
    untransformed,
)
from processes import in_a_process, interrupted
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import rematfn
from rematfn import _C

remat = rematfn.remat
EVICTING = rematfn.testing.EvictEverything()
DISK = rematfn.Disk(verify=True)
PACKED = rematfn.Packed(verify=True)
TRANSFORMS: dict[str, Transform] = {
    "tight": lambda f: remat(f, budget=6 * UNIT),
    "everything": EVERYTHING,
    "moves, tight": lambda f: rematfn.offload(f, budget=6 * UNIT, to=DISK),
    "moves or drops": lambda f: remat(f, offload=DISK, policy=EVICTING),
    "packs": lambda f: rematfn.offload(f, to=PACKED, policy=EVICTING),
    "packs or drops": lambda f: remat(f, offload=PACKED, policy=EVICTING),
    "packs or moves, tight": lambda f: rematfn.offload(f, budget=6 * UNIT, to=[PACKED, DISK]),
}
pytestmark = pytest.mark.usefixtures("costs_at_random")
STRIDE = 1 if EXHAUSTIVE else 3  # of the places where something may fail
transforms = pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS.keys())


class OwnError(Exception):
    """A user's exception."""


# --- a program whose operators can be made to fail ------------------------------------------------


class Countdown:
    """Raises when it has been called so many times."""

    def __init__(self) -> None:
        self.left: int | None = None
        self.error: type[BaseException] = OwnError

    def __call__(self) -> None:
        if self.left is None:
            return
        if self.left == 0:
            self.left = None
            raise self.error("asked for by a test")
        self.left -= 1


countdown = Countdown()


@torch.library.custom_op("rematfn_tests::fragile", mutates_args=())
def fragile(x: Tensor) -> Tensor:
    """Copies; fails when the countdown says so, on the first run or on a replay."""
    countdown()
    return x.clone()


fragile.register_fake(torch.empty_like)
fragile.register_autograd(lambda ctx, grad: fragile(grad))


def program(x: Tensor, w: Tensor) -> Tensor:
    """Operators, views, writes, random numbers; every value is read again in the backward."""
    y = fragile(x.sin()) * w
    z = y.view(2, -1)[0].clone().mul_(2)
    h = torch.nn.functional.dropout(fragile(y.exp()), 0.3)
    h.add_(fragile(y.cos()))
    return (h * y).sum() + fragile(z.square()).sum()


def arguments() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    n = UNIT // 4
    return torch.linspace(-1, 1, n).requires_grad_(), torch.rand(n, requires_grad=True)


def look_around() -> None:
    """Assert what has to hold when an exception has been dealt with."""
    rematfn.testing.check()
    assert _C.stack_depth() == 0
    assert remains() == {"levels": 0, "operations": 0}
    assert DISK.held_bytes == PACKED.held_bytes == 0


def run(transform: Transform) -> list[Tensor]:
    x, w = arguments()
    loss = transform(program)(x, w)
    loss.backward()
    return [loss.detach(), x.grad, w.grad]


Fault = Callable[[int], AbstractContextManager[Callable[[], bool]]]


@contextmanager
def failing_kernel(k: int, error: type[BaseException] = OwnError) -> Iterator[Callable[[], bool]]:
    countdown.left, countdown.error = k, error
    yield lambda: countdown.left is None
    countdown.left = None


@contextmanager
def failing_allocation(k: int) -> Iterator[Callable[[], bool]]:
    _C.testing.fail_allocation(k)
    happened: list[bool] = []

    def has_happened() -> bool:
        if not happened:
            happened.append(_C.testing.fail_allocation(None) is None)
        return happened[0]

    yield has_happened
    has_happened()


class FailingMode(TorchDispatchMode):
    """Fails before the k-th operator, or after it."""

    def __init__(self, k: int, after: bool) -> None:
        super().__init__()
        self.left, self.after = k, after

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        now, self.left = self.left == 0, self.left - 1
        if now and not self.after:
            raise OwnError
        result = func(*args, **(kwargs or {}))
        if now:
            raise OwnError
        return result


@contextmanager
def failing_mode(k: int, after: bool) -> Iterator[Callable[[], bool]]:
    with FailingMode(k, after) as mode:
        yield lambda: mode.left < 0


FAULTS: dict[str, tuple[Fault, type[BaseException]]] = {
    "kernel": (failing_kernel, OwnError),
    "interrupt": (lambda k: failing_kernel(k, KeyboardInterrupt), KeyboardInterrupt),
    "allocation": (failing_allocation, RuntimeError),
    "before": (lambda k: failing_mode(k, after=False), OwnError),
    "after": (lambda k: failing_mode(k, after=True), OwnError),
}
faults = pytest.mark.parametrize(("fault", "error"), FAULTS.values(), ids=FAULTS.keys())


@faults
@transforms
def test_every_place_in_turn(
    fault: Fault, error: type[BaseException], transform: Transform
) -> None:
    """In the forward or the backward: afterwards the whole comes out right."""
    right, k = run(untransformed), 0
    while True:
        try:
            with fault(k) as has_happened:
                found = run(transform)
                assert not has_happened(), "the error was swallowed"
        except error:
            found = None
        look_around()
        if found is not None:
            break
        if k % (4 * STRIDE) == 0:
            assert_bitwise_equal(run(transform), right)
        k += STRIDE
    assert k >= 5, "it failed in more than a few places"
    assert_bitwise_equal(found, right)
    assert_nothing_keyed(found)


@faults
@transforms
def test_a_backward_that_failed_is_tried_again(
    fault: Fault, error: type[BaseException], transform: Transform
) -> None:
    """The graph and its level are intact, wherever the backward was broken off."""
    right, k, found = run(untransformed), 0, None
    while found is None:
        x, w = arguments()
        loss = transform(program)(x, w)
        try:
            with fault(k) as has_happened:
                loss.backward(retain_graph=True)
                found = has_happened()
                assert not found, "the error was swallowed"
        except error:
            rematfn.testing.check()
        x.grad = w.grad = None
        loss.backward()
        assert_bitwise_equal([loss.detach(), x.grad, w.grad], right)
        del loss
        look_around()
        k += STRIDE
    assert k >= 5


@transforms
def test_a_forward_that_failed_leaves_its_tensors_readable(transform: Transform) -> None:
    """What `f` stored away before each failure, replayable or resident, is what it was."""
    k, done = 0, False
    while not done:
        stored: list[Tensor] = []

        def f(x: Tensor, stored: list[Tensor] = stored) -> Tensor:
            y = x
            for _ in range(4):
                y = fragile(y.sin()) * 1.5
                stored.append(y)
            return y * stored[0]

        x = arguments()[0].detach()
        try:
            with failing_kernel(k):
                transform(f)(x)
                done = True
        except OwnError:
            pass
        expected: list[Tensor] = []
        f(x, expected)
        assert_bitwise_equal(stored, expected[: len(stored)])
        stored.clear()
        look_around()
        k += 1


# --- hooks ----------------------------------------------------------------------------------------


def raise_own(*args: Any) -> None:
    raise OwnError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x).tanh()
        self.hidden(y)
        return self.second(y * y.sin())

    def hidden(self, y: Tensor) -> None:
        """What is to be done to an intermediate."""


def with_tensor_hook(net: Net) -> None:
    net.hidden = lambda y: y.requires_grad and y.register_hook(raise_own)  # type: ignore


def with_node_hook(net: Net) -> None:
    net.hidden = lambda y: y.grad_fn and y.grad_fn.register_hook(raise_own)  # type: ignore


HOOKS: dict[str, Callable[[Net], Any]] = {
    "forward-pre": lambda net: net.second.register_forward_pre_hook(raise_own),
    "forward": lambda net: net.first.register_forward_hook(raise_own),
    "module-backward": lambda net: net.first.register_full_backward_hook(raise_own),
    "module-backward-pre": lambda net: net.second.register_full_backward_pre_hook(raise_own),
    "leaf": lambda net: net.first.weight.register_hook(raise_own),
    "post-accumulate": lambda net: net.second.bias.register_post_accumulate_grad_hook(raise_own),
    "tensor": with_tensor_hook,
    "node": with_node_hook,
}


@pytest.mark.parametrize("hook", HOOKS.values(), ids=HOOKS.keys())
@transforms
def test_a_hook_that_raises(hook: Callable[[Net], Any], transform: Transform) -> None:
    def step(transform: Transform, hook: Callable[[Net], Any] | None) -> list[Any]:
        torch.manual_seed(1)
        net, x = Net(), torch.rand(4, 8, requires_grad=True)
        handle = hook(net) if hook else None
        g = transform(net)
        try:
            with pytest.raises(OwnError) if hook else nullcontext():
                g(x).sum().backward()
            return [p.grad for p in net.parameters()]
        finally:
            if hasattr(handle, "remove"):
                handle.remove()

    left = step(transform, hook)
    assert_nothing_keyed(left)
    assert_bitwise_equal(left, step(untransformed, hook))
    del left
    look_around()
    assert_bitwise_equal(step(transform, None), step(untransformed, None))


def raise_in_saved_tensor_hooks(end: str, transform: Transform) -> None:
    def keep(t: Any) -> Any:
        return t

    hooks = (raise_own, keep) if end == "pack" else (keep, raise_own)
    x, w = arguments()
    with pytest.raises(OwnError), torch.autograd.graph.saved_tensors_hooks(*hooks):
        transform(program)(x, w).backward()
    rematfn.testing.check()
    assert _C.stack_depth() == 0
    assert_bitwise_equal(run(transform), run(untransformed))


@transforms
def test_a_pack_hook_that_raises(transform: Transform) -> None:
    raise_in_saved_tensor_hooks("pack", transform)
    look_around()


@in_a_process
def test_an_unpack_hook_that_raises() -> None:
    """In a process of its own: torch never frees the node whose unpack hook raised."""
    for transform in (remat, EVERYTHING):
        raise_in_saved_tensor_hooks("unpack", transform)


# --- interrupts -----------------------------------------------------------------------------------


@interrupted
def test_an_interrupt_between_any_two_statements_leaves_a_function_that_runs() -> None:
    def stop(*_: object) -> None:
        if armed[0]:
            raise OwnError

    armed, stopped = [False], 0
    dice = random.Random(0)
    before = signal.signal(signal.SIGALRM, stop)
    try:
        for i in range(1000):
            if i % 20 == 0:  # its first calls are those that are noted anew
                g = rematfn.remat(lambda x: x.sin().cos().sum(), "1MiB")
            try:
                try:
                    armed[0] = True
                    signal.setitimer(signal.ITIMER_REAL, dice.uniform(1e-6, 3e-4))
                    g(torch.ones(8))
                    armed[0] = False
                except OwnError:
                    armed[0] = False
                    stopped += 1
            except OwnError:  # one more, while that one is served
                armed[0] = False
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert stopped > 100
    assert torch.equal(g(torch.ones(8)), torch.ones(8).sin().cos().sum())


def test_an_interrupt_is_served_in_the_middle_of_replays() -> None:
    """One operator that causes replays for long: Ctrl-C does not wait for its end."""
    links = 3_000

    def f(x: Tensor) -> Tensor:
        y = x * 2
        for _ in range(links):
            y = y.sin()
        assert _C.testing.evict(y)
        # Of the processor's time: by then we are in C++, for long.
        signal.setitimer(signal.ITIMER_PROF, 0.02)
        return y * 2

    g, x = remat(f), torch.linspace(0, 1, 200_000)
    before = signal.signal(signal.SIGPROF, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            g(x)
    finally:
        signal.signal(signal.SIGPROF, before)
    assert 0 < rematfn.stats(g).replays < links, "it was broken off in the middle"
    look_around()
    assert_bitwise_equal(run(remat), run(untransformed))


@pytest.mark.parametrize("stop", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_is_not_lost_while_shapes_are_inferred(stop: type[BaseException]) -> None:
    """A shape function in Python that fails is done without; one that is to stop is not."""
    raised: list[BaseException] = []

    @torch.library.custom_op("rematfn_tests::shapeless", mutates_args=())
    def shapeless(x: Tensor) -> Tensor:
        return x + 1

    @shapeless.register_fake
    def _(x: Tensor) -> Tensor:
        if raised:
            raise raised[0]
        return torch.empty_like(x)

    def f(x: Tensor) -> Tensor:
        return shapeless(x * 2).sin()

    x = torch.linspace(0, 1, 8)
    bounded = remat(f, x.nbytes * 3 // 2)  # a call that is refused is asked for its shapes
    raised.append(ValueError("no shape"))
    assert "shapeless` needs" in str(refusal_of(lambda: bounded(x)))
    assert_bitwise_equal(remat(f, "1MiB")(x), f(x))
    raised[0] = stop()
    with pytest.raises(stop):
        bounded(x)
    assert _C.stack_depth() == 0
    raised.clear()
    assert "shapeless` needs" in str(refusal_of(lambda: bounded(x)))
    assert_bitwise_equal(remat(f, "1MiB")(x), f(x))


def test_a_kernel_that_reads_an_evicted_tensor_of_its_level_is_told_so() -> None:
    """Replays cannot begin in the middle of replays."""
    kept: list[Tensor] = []

    @torch.library.custom_op("rematfn_tests::nosy", mutates_args=())
    def nosy(x: Tensor) -> Tensor:
        return x + rematfn.materialize(kept[0])

    nosy.register_fake(torch.empty_like)

    def f(x: Tensor) -> Tensor:
        kept.append(x.sin())
        rematfn.materialize(kept[0])
        y = nosy(x.cos())
        z = y * 2
        return z + y

    try:
        with pytest.raises(RuntimeError, match="in the middle of the replays of its level"):
            EVERYTHING(f)(torch.linspace(0, 1, 8))
    finally:
        kept.clear()
    look_around()
