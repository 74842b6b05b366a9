# SPDX-License-Identifier: Apache-2.0
"""A process that sweeps the operators it is told of on stdin, and reports on stdout, in JSON.

What an operator prints goes to stderr, so that a report stays readable.
"""

import json
import os
import sys
import warnings

from .samples import operators
from .verdicts import sweep


def main() -> None:
    kinds, dtypes = (argument.split(",") for argument in sys.argv[1:3])
    warnings.simplefilter("ignore")
    import torch._decomp.decompositions_for_jvp  # warns when it is first needed

    torch.set_num_threads(1)
    reports = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    for line in sys.stdin:
        name = line.strip()
        found = [
            {"kind": kind, "dtype": dtype, "counts": dict(tally.counts), "failure": tally.failure}
            for kind, dtype, tally in sweep(operators()[name], kinds, dtypes)
        ]
        print(json.dumps(found), file=reports, flush=True)


if __name__ == "__main__":
    main()
