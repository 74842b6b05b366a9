# SPDX-License-Identifier: Apache-2.0
"""A slice of the sweep over torch's operator database: every operator, on its first sample.

Values and gradients of each, and one in four of the further kinds. `make sweep` is all of it: every
sample, in every dtype and kind.
"""

import pytest
from helpers import EXHAUSTIVE
from sweep.expectations import EXCEPTIONS
from sweep.kinds import KINDS
from sweep.samples import DTYPES, dtypes_of, operators, samples
from sweep.verdicts import FAILED, filled_memory, judge

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's own, about its operators


@pytest.mark.parametrize("name", [name for name, info in operators().items() if dtypes_of(info)])
def test_an_operator_is_bitwise_eagers_under_every_transform(name: str) -> None:
    info, dtype = operators()[name], dtypes_of(operators()[name])[0]
    first = list(operators()).index(name)
    chosen = [*KINDS.values()] if EXHAUSTIVE else [*KINDS.values()][first % 4 :: 4]
    chosen += [kind for kind in (KINDS["forward"], KINDS["backward"]) if kind not in chosen]
    failures = []
    with filled_memory(info):
        for requires_grad in (False, True):
            kinds = [
                kind
                for kind in chosen
                if kind.requires_grad == requires_grad
                and kind.applies(info, DTYPES[dtype])
                and (name, kind.name, dtype) not in EXCEPTIONS
            ]
            if not kinds:
                continue
            sample = next(samples(info, DTYPES[dtype], requires_grad))
            for kind in kinds:
                verdict, why = judge(info, kind, sample)
                if verdict == FAILED:
                    failures.append(f"{kind.name}: {why}")
    assert not failures, "\n".join(failures)
