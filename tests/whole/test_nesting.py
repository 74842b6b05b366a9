# SPDX-License-Identifier: Apache-2.0
"""`remat` commutes with the transforms of torch.func: words of up to three of them.

A word such as `grad-remat-vmap` reads from the outside in: `grad(remat(vmap(f)))`. Its oracle is
the same word with `remat` left out.
"""

from itertools import product
from typing import Any

import pytest
import torch
from helpers import SNUG, Transform, assert_same_as_eager, same_as_eager, some, untransformed
from nesting import LETTERS, REFUSED, possible, program_of
from torch import func

WORDS = [w for n in (1, 2, 3) for w in product(["remat", *LETTERS], repeat=n) if "remat" in w]
SHORT = [word for word in WORDS if len(word) < 3]
# With everything evicted, `tests/project/test_compositions.py` runs those of one `remat`, too.
LONG = [word for word in WORDS if len(word) == 3 and possible(word)]


# linearize builds an fx graph, and fx warns about the constants that linearize itself puts in it.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize("word", [*SHORT, *some(LONG, 20)], ids="-".join)
def test_a_word_with_remat_equals_the_word_without(word: tuple[str, ...]) -> None:
    assert_same_as_eager(program_of(word), SNUG)


@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
@pytest.mark.parametrize("pair", REFUSED, ids="-".join)
def test_torch_itself_refuses_the_pair(pair: tuple[str, str]) -> None:
    with pytest.raises(RuntimeError, match=REFUSED[pair].removeprefix("torch: ")):
        program_of(pair)(untransformed)


@same_as_eager
def test_axes_and_auxiliary_outputs_pass_through(transform: Transform) -> Any:
    """The arguments that transforms take about their own inputs and outputs."""

    torch.manual_seed(3)
    x, w = torch.randn(3, 4), torch.randn(4)
    f = transform(lambda x, w: ((x * w).sin().prod(0), {"aux": x.exp() * w}))
    one = func.vmap(f, in_dims=(1, 0), out_dims=(0, {"aux": -1}))
    g = transform(lambda x, w: ((x @ w).sin().sum(), (x.cos(), x.exp())))
    two = func.grad(g, argnums=(0, 1), has_aux=True)
    three = func.vmap(func.vmap(transform(torch.atan2), (0, None)), (None, 0))
    four = func.grad_and_value(lambda x: g(x, w)[0])
    loss, pull, aux = func.vjp(lambda w: g(x, w), w, has_aux=True)
    found = [one(x, w), two(x, w), three(x[0], w), four(x)]
    return found, loss, pull(torch.ones(())), aux
