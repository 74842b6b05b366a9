# SPDX-License-Identifier: Apache-2.0
"""``python -m rematfn``: each command, as its user runs it."""

import re
from pathlib import Path

import pytest
import torch
from processes import python

from rematfn import _C
from rematfn.__main__ import main
from rematfn._interop import compat


def test_info(tmp_path: Path) -> None:
    """By `python -m`, as its user runs it."""
    found = python("-m", "rematfn", "info", cwd=tmp_path)
    assert found.code == 0, found.err
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in found.out.splitlines())
    assert rows["torch"].strip() == torch.__version__
    core, _, built = rows["core"].partition(", built with ")
    assert core == _C.__file__
    assert built == f"torch {torch.__version__.partition('+')[0]}; dispatch key {_C.dispatch_key}"
    here = ".".join(torch.__version__.split(".")[:2])
    others = [f"torch {minor}" for minor in compat.cores() if minor != here]
    assert rows["other cores"] == (", ".join(others) or "none")


@pytest.mark.parametrize("command", ["", "demo", "info"])
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*([command] if command else []), "--help"])
    assert end.value.code == 0
    assert len(capsys.readouterr().out) > 150
