# SPDX-License-Identifier: Apache-2.0
"""`remat` as a transform: what it takes, what it gives back, and how it says no."""

import dataclasses
from typing import Any, NamedTuple

import optree
import pytest
import torch
from helpers import Transform, assert_bitwise_equal, same_as_eager
from processes import in_a_process
from torch import Tensor
from torch.utils import _pytree as pytree

import rematfn
from rematfn import _C

remat = rematfn.remat


def wave(x: Tensor, scale: float = 2.0) -> Tensor:
    """Return a wave."""
    return (x.sin() * scale).exp()


@pytest.mark.parametrize("transform", [remat, rematfn.offload])
def test_a_class_is_refused(transform: Any) -> None:
    """What would run within the budget is the constructor."""
    with pytest.raises(TypeError, match=r"got the class Linear.*Transform an instance"):
        transform(torch.nn.Linear, "1MiB")


# --- pytrees --------------------------------------------------------------------------------------


class Pair(NamedTuple):
    low: Any
    high: Any


@optree.dataclasses.dataclass(namespace="")
class Registered:
    value: Any
    name: str = optree.dataclasses.field(default="", pytree_node=False)


@same_as_eager
def test_arguments_and_results_are_any_pytree(transform: Transform) -> Any:
    def f(tree: dict[str, Any], *rest: Any, **named: Any) -> Any:
        y = tree["x"].sin() * rest[0][1] + named["pair"].low
        return {
            "list": [y, (y * 2, [y.cos()])],
            "pair": Pair(y[:2], None),
            "node": Registered(y.exp(), name="kept"),
            "none": None,
            "number": 3,
            "text": "text",
            ("tuple", "key"): tree["x"],
        }

    x, y, z = (torch.linspace(0, 1, 5).add(k).requires_grad_() for k in range(3))
    out = transform(f)({"x": x, "flag": True}, (None, y), pair=Pair(z, "text"))
    out["list"][1][0].sum().backward()
    out["node"] = [out["node"].value, out["node"].name, type(out["node"]) is Registered]
    return out, x.grad, y.grad, z.grad


# --- saying no ------------------------------------------------------------------------------------


def test_other_arguments_are_checked_when_they_are_given() -> None:
    with pytest.raises(TypeError, match="function"):
        remat(3)  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="function"):
        remat("4KiB")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="policy"):
        remat(wave, policy="lru")  # type: ignore[call-overload]
    with pytest.raises(TypeError, match="policy"):
        remat(wave, policy=rematfn.policies.reference.LRU)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="cost"):
        remat(wave, cost="speed")  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        remat(wave, 4096, rematfn.policies.reference.LRU())  # type: ignore[call-overload]


def argument() -> Tensor:
    return torch.linspace(0.1, 1.0, 64, requires_grad=True)


class Box:
    def __init__(self, x: Tensor) -> None:
        self.x = x


@in_a_process
def test_what_torch_s_registry_knows_is_sealed() -> None:
    """In a process of its own: torch tells others of it once a compiler is loaded."""
    pytree.register_pytree_node(Box, lambda box: ([box.x], None), lambda xs, _: Box(*xs))
    out = remat(lambda x: Box(x.sin()), policy=rematfn.testing.EvictEverything())(argument())
    assert not _C.has_key(out.x)
    assert_bitwise_equal(out.x, argument().sin())


@dataclasses.dataclass
class Node:
    x: Tensor
    inside: list[Any]
    around: Any = None


def test_dataclasses_that_are_cycles_or_shared() -> None:
    child = Node(argument(), [])
    root = Node(argument(), [child])
    child.around = root
    out = remat(lambda n: Node(n.x.sin(), [n]), policy=rematfn.testing.EvictEverything())(root)
    assert not _C.has_key(out.x)
    assert_bitwise_equal(out.x, argument().sin())
    shared: Any = Node(argument(), [])
    for _ in range(60):
        shared = Node(argument(), [shared, shared])
    assert_bitwise_equal(remat(lambda n: n.x.cos())(shared), argument().cos())
