# SPDX-License-Identifier: Apache-2.0
"""What random programs found, each by name."""

import pytest
import torch
from torch import Tensor

import rematfn
from rematfn import _C

remat = rematfn.remat


def test_a_failed_level_does_not_keep_a_leaf_of_a_transform_within() -> None:
    """A weak reference to functorch's wrapper of x kept x, its gradient, and so the level."""
    x = torch.linspace(-1, 1, 6).view(2, 3).requires_grad_()

    def f(x: Tensor) -> None:
        inner = remat(lambda x: (x.t() @ x).tanh().sum(0))
        y = torch.func.grad(lambda x: inner(x).square().sum())(x)
        y.sin().sum().backward()
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        remat(remat(f))(x)
    del x, f
    assert _C.testing.live_levels() == 0


def test_a_failed_level_does_not_keep_a_leaf_that_was_moved_to_its_storage() -> None:
    x = torch.linspace(-1, 1, 6).requires_grad_()

    def f(x: Tensor) -> None:
        x.sin()
        x.data = x.detach() * 2
        raise ValueError

    with pytest.raises(ValueError):  # noqa: PT011
        remat(f)(x)
    del x
    assert _C.testing.live_levels() == 0


def test_a_write_after_a_change_of_metadata_is_noticed() -> None:
    """`squeeze_` bumps the version counter too; it must not make us blind for good."""
    x, kept = torch.linspace(-1, 1, 256), []

    def f(x: Tensor) -> None:
        kept.append(x.sin())
        x.squeeze_().t_()
        assert _C.testing.evict(kept[0])

    with pytest.raises(ValueError, match="over"):  # so that the level does not end well
        remat(lambda x: [f(x), int("over")])(x)
    assert _C.testing.evict(kept[0])
    x.mul_(2)
    with pytest.raises(rematfn.ReplayError, match="overwritten"):
        kept[0].exp()


def test_a_change_of_metadata_is_no_write() -> None:
    x, expected = torch.linspace(-1, 1, 256), torch.linspace(-1, 1, 256).sin()

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        x.unsqueeze_(0).t_()
        assert _C.testing.evict(y)
        return y * 1

    assert torch.equal(remat(f)(x), expected)


@pytest.mark.parametrize("within", [False, True], ids=["outside", "inside"])
def test_a_gradient_whose_graph_leads_to_the_node_it_is_taken_from(within: bool) -> None:
    """Sealing it added to the hooks of the node that the engine was walking through."""
    x = torch.linspace(-1, 1, 6).requires_grad_()
    y = remat(remat(lambda x: (x * x).tanh()))(x)

    def f() -> Tensor:
        (g,) = torch.autograd.grad((y * y).sum(), y, create_graph=True)
        return g

    g = remat(f)() if within else f()
    (twice,) = torch.autograd.grad(g.sum(), x)
    z = (x * x).tanh()
    (expected,) = torch.autograd.grad((z * 2).sum(), x)
    assert torch.equal(twice, expected)
    assert not _C.has_key(g)


def test_what_replays_make_of_raw_memory_does_not_stay() -> None:
    """Each mask that was replayed left behind the `empty` that it was drawn into."""
    x = torch.linspace(-1, 1, 1024)

    def f(x: Tensor) -> Tensor:
        masks = [torch.empty_like(x).bernoulli_(0.5) for _ in range(20)]
        while masks:
            x = x + masks.pop()
        return x

    torch.manual_seed(0)
    expected = f(x)
    torch.manual_seed(0)
    g = remat(f, 5 * x.nbytes)
    assert torch.equal(g(x), expected)
    assert rematfn.stats(g).replays >= 2 * 15


def test_a_write_into_a_result_before_a_view_of_it_is_sealed() -> None:
    """To seal the view took the result's contents of then for those that were read."""
    x, kept = torch.linspace(-1, 1, 6).requires_grad_(), []

    def f(x: Tensor) -> Tensor:
        y = x.sin()
        kept.extend([y.view(2, 3), y.detach().exp()])
        return y

    y = remat(f)(x)
    assert _C.testing.evict(kept[1])
    with torch.no_grad():
        y.mul_(2)
        kept[0].add(1)
    with pytest.raises(rematfn.ReplayError, match="overwritten"):
        kept[1].add(1)
