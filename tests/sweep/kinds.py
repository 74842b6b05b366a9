# SPDX-License-Identifier: Apache-2.0
"""The programs that are made of one sample: forward, backward, and the words over torch.func.

Each gives all that the caller ends up holding, and the random stream's next numbers. The operator
runs twice in each: on the arguments, which come from outside the level, and on tensors made inside
of it, which have been evicted by the time that the operator reads them.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import optree
import torch
from helpers import Transform, scalar, untransformed, weights_like
from torch import Tensor
from torch.func import grad, jvp, vmap

import rematfn

from .samples import Sample

Program = Callable[[Any, Sample, Transform], Any]


@dataclasses.dataclass(frozen=True)
class Kind:
    """A program, and the operators that have it."""

    name: str
    program: Program
    applies: Callable[[Any, torch.dtype], bool]
    requires_grad: bool = False


def twice(sample: Sample) -> Callable[..., Any]:
    """Return the operator as a function of tensors, on them and on copies made inside."""

    def f(*tensors: Tensor) -> Any:
        return sample.apply(tensors), sample.apply([t.clone() for t in tensors])

    return f


def ended(result: Any, tensors: list[Tensor]) -> Any:
    """Return the result with the arguments, that may have been written, and the random stream."""
    return result, tensors, torch.rand(3)


# --- values ---------------------------------------------------------------------------------------


def forward(info: Any, sample: Sample, transform: Transform) -> Any:
    tensors = sample.tensors()
    return ended(transform(twice(sample))(*tensors), tensors)


def in_place(info: Any, sample: Sample, transform: Transform) -> Any:
    def f(*tensors: Tensor) -> Any:
        inside = [t.clone() for t in tensors]
        before = [t * 1 for t in inside]
        return (
            sample.apply(inside, info.inplace_variant),
            inside,
            before,
            sample.apply(tensors, info.inplace_variant),
        )

    tensors = sample.tensors()
    return ended(transform(f)(*tensors), tensors)


def into_out(info: Any, sample: Sample, transform: Transform) -> Any:
    torch.manual_seed(3)
    shapes = sample.apply(sample.tensors())

    def f(outside: Any, *tensors: Tensor) -> Any:
        inside = optree.tree_map(torch.ones_like, shapes)
        returned = sample.apply([t.clone() for t in tensors], out=inside)
        return returned, inside, sample.apply(tensors, out=outside)

    tensors = sample.tensors()
    outside = optree.tree_map(torch.zeros_like, shapes)
    return ended((transform(f)(outside, *tensors), outside), tensors)


# --- autograd -------------------------------------------------------------------------------------


def backward(info: Any, sample: Sample, transform: Transform) -> Any:
    tensors = sample.tensors()
    outputs = transform(twice(sample))(*tensors)
    inputs = [t for t in tensors if t.requires_grad]
    gradients = torch.autograd.grad(scalar(outputs), inputs, allow_unused=True)
    return ended((outputs, gradients), tensors)


def double_backward(info: Any, sample: Sample, transform: Transform) -> Any:
    tensors = sample.tensors()
    outputs = transform(twice(sample))(*tensors)
    inputs = [t for t in tensors if t.requires_grad]
    first = torch.autograd.grad(scalar(outputs), inputs, allow_unused=True, create_graph=True)
    loss = scalar(first)  # a constant, where the first derivative is
    second = torch.autograd.grad(loss, inputs, allow_unused=True) if loss.requires_grad else ()
    return ended((outputs, first, second), tensors)


# --- torch.func, around the level and inside of it ------------------------------------------------


def is_smooth(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def part(
    f: Callable[..., Any], tensors: list[Tensor], chosen: list[bool]
) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """Return `f` as a function of the chosen arguments, and these."""

    def of_chosen(*arguments: Tensor) -> Any:
        given = iter(arguments)
        return f(*(next(given) if c else t for t, c in zip(tensors, chosen, strict=True)))

    return of_chosen, tuple(t for t, c in zip(tensors, chosen, strict=True) if c)


def batched(transform: Transform, sample: Sample, inside: bool) -> Any:
    # Of factories the first one is the only argument.
    tensors = [torch.arange(2), *(torch.stack([t, t]) for t in sample.tensors())]

    def over(f: Transform) -> Transform:
        return vmap(f, randomness="different")

    def f(index: Tensor, *tensors: Tensor) -> Any:
        return twice(sample)(*tensors)

    return ended((transform(over(f)) if inside else over(transform(f)))(*tensors), tensors)


def pushed_forward(transform: Transform, sample: Sample, inside: bool) -> Any:
    tensors = sample.tensors()
    f, primals = part(twice(sample), tensors, [is_smooth(t) for t in tensors])
    tangents = tuple(map(weights_like, primals))

    def over(f: Transform) -> Transform:
        return lambda *primals: jvp(f, primals, tangents)

    return ended((transform(over(f)) if inside else over(transform(f)))(*primals), tensors)


def pulled_back(transform: Transform, sample: Sample, inside: bool) -> Any:
    leaves = sample.tensors()
    tensors = [t.detach() for t in leaves]
    f, primals = part(twice(sample), tensors, [t.requires_grad for t in leaves])

    def loss(*primals: Tensor) -> Tensor:
        return scalar(f(*primals))

    def over(f: Transform) -> Transform:
        return grad(f, argnums=tuple(range(len(primals))))

    return ended((transform(over(loss)) if inside else over(transform(loss)))(*primals), tensors)


# --- with a disk ----------------------------------------------------------------------------------

DISK = rematfn.Disk()


def moved(program: Program) -> Program:
    """Return the program with all that it makes moved to a disk, instead of dropped."""

    def offload(f: Callable[..., Any]) -> Callable[..., Any]:
        return rematfn.offload(f, to=DISK, policy=rematfn.testing.EvictEverything())

    return lambda info, sample, transform: program(
        info, sample, transform if transform is untransformed else offload
    )


# --- the table ------------------------------------------------------------------------------------


def always(info: Any, dtype: torch.dtype) -> bool:
    return True


def has_in_place(info: Any, dtype: torch.dtype) -> bool:
    return info.inplace_variant is not None


def has_out(info: Any, dtype: torch.dtype) -> bool:
    return bool(info.supports_out) and not info.name.startswith("_foreach")


def has_gradient(info: Any, dtype: torch.dtype) -> bool:
    smooth = dtype.is_floating_point or dtype.is_complex
    return smooth and bool(info.supports_autograd)


def has_second_gradient(info: Any, dtype: torch.dtype) -> bool:
    return has_gradient(info, dtype) and bool(info.supports_gradgrad)


def has_tangent(info: Any, dtype: torch.dtype) -> bool:
    return has_gradient(info, dtype) and bool(info.supports_forward_ad)


def around(program: Callable[[Transform, Sample, bool], Any]) -> Program:
    return lambda info, sample, transform: program(transform, sample, False)


def inside(program: Callable[[Transform, Sample, bool], Any]) -> Program:
    return lambda info, sample, transform: program(transform, sample, True)


KINDS = {
    kind.name: kind
    for kind in (
        Kind("forward", forward, always),
        Kind("in-place", in_place, has_in_place),
        Kind("out=", into_out, has_out),
        Kind("backward", backward, has_gradient, requires_grad=True),
        Kind("double backward", double_backward, has_second_gradient, requires_grad=True),
        Kind("vmap(remat)", around(batched), always),
        Kind("remat(vmap)", inside(batched), always),
        Kind("jvp(remat)", around(pushed_forward), has_tangent),
        Kind("remat(jvp)", inside(pushed_forward), has_tangent),
        Kind("grad(remat)", around(pulled_back), has_gradient, requires_grad=True),
        Kind("offload forward", moved(forward), always),
        Kind("offload backward", moved(backward), has_gradient, requires_grad=True),
        Kind("remat(grad)", inside(pulled_back), has_gradient, requires_grad=True),
    )
}
