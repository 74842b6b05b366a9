# SPDX-License-Identifier: Apache-2.0
"""``python -m rematfn``: each command, as its user runs it."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import Ended, python

from rematfn import _C
from rematfn.__main__ import main
from rematfn._interop import compat

PROGRAM = """
import torch, rematfn

WEIGHTS = [torch.randn(32, 32, requires_grad=True) for _ in range(8)]

def step():
    x = torch.ones(64, 32)
    for w in WEIGHTS:
        x = torch.tanh(x @ w)
    return torch.autograd.grad(x.sum(), WEIGHTS)

def wants(x):
    return x

def later():
    yield WEIGHTS

if __name__ == "__main__":
    g = rematfn.remat(step, 0.6)
    for _ in range(2):
        g()
    print("it has run")
"""


Run = Callable[..., Ended]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in a folder that has `program.py`."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setattr(sys, "path", list(sys.path))

    def called(*arguments: str) -> Ended:
        code = main(arguments)
        return Ended(code, *capsys.readouterr())

    return called


def test_profile_of_a_function(run: Run) -> None:
    found = run("profile", "program.py:step", "--budgets", "0.7", "0.4", "--out", "curve.png")
    assert found.code == 0, found.err
    for text in ("step", "min budget", "Predicted time of a call", "0.70"):
        assert text in found.out
    assert Path("curve.png").stat().st_size > 1000


def test_explain_of_a_function_and_of_a_script(run: Run) -> None:
    found = run("explain", "program.py:step", "--budget", "0.6", "--rows", "3")
    assert found.code == 0, found.err
    assert "call       guided" in found.out
    assert "tanh at program.py:9 (step)" in found.out
    found = run("explain", "program.py")
    assert found.code == 0, found.err
    assert found.out.startswith("it has run\n")
    assert "remat(step, budget=0.6 of the unconstrained peak)" in found.out


def test_explain_of_a_call_that_does_not_fit(run: Run) -> None:
    found = run("explain", "program.py:step", "--budget", "9KiB")
    assert found.code == 0
    assert found.err.startswith("BudgetError: ")
    assert "program.py:9 in step" in found.err
    assert "[did not run]" in found.out


@pytest.mark.parametrize("ending", ["png", "json"])
def test_timeline(run: Run, ending: str) -> None:
    out = f"step.{ending}"
    found = run("timeline", "program.py:step", "--budget", "0.6", "--out", out)
    assert found.code == 0, found.err
    assert f"saved: {out}" in found.out
    assert Path(out).stat().st_size > 1000
    if ending == "json":
        assert json.loads(Path(out).read_text())["traceEvents"]


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


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("none.py", "there is no file 'none.py'"),
        ("none.py:step", "there is no file 'none.py'"),
        ("module:step", "'module:step' names no script"),
        ("program.py:nothing", "it has step, wants"),
        ("program.py:wants", "missing a required argument: 'x'; name a function without"),
        ("program.py:", "'program.py:' names no function"),
        ("program.py:later", "later is a generator function"),
    ],
)
def test_a_target_that_cannot_be_run(run: Run, target: str, message: str) -> None:
    found = run("profile", target)
    assert found.code == 1
    assert message in found.err
    assert "Traceback" not in found.err


@pytest.mark.parametrize("target", ["breaks.py", "program.py:breaks"])
def test_what_the_program_raises_is_raised(run: Run, target: str) -> None:
    Path("breaks.py").write_text("import no_such_library\n")
    Path("program.py").write_text(PROGRAM + "\ndef breaks():\n    import no_such_library\n")
    with pytest.raises(ModuleNotFoundError, match="No module named 'no_such_library'"):
        run("explain", target)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["profile", "x.py:f", "--out", "picture.gif"], "must end in .png, .svg, .pdf"),
        (["timeline", "x.py:f", "--out", "picture.gif"], "must end in .png, .svg, .pdf"),
        (["explain", "x.py:f", "--budget", "2G"], 'Did you mean "2GiB"'),
        (["explain", "x.py:f", "--budget", "1"], "1.0 is the whole peak"),
        (["profile", "--offload", "x.py:f"], "Write x.py:f before the options"),
        (["profile", "--budgets", "0.5", "x.py:f"], "Write x.py:f before the options"),
    ],
)
def test_what_is_not_known_is_refused_before_anything_runs(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_a_script_that_calls_no_transformed_function(run: Run) -> None:
    Path("plain.py").write_text("import torch\ntorch.ones(3).sin()\n")
    found = run("explain", "plain.py")
    assert found.code == 1
    assert "name a function of it, plain.py:function" in found.err


def test_scripts_arguments_and_exit_status(run: Run) -> None:
    script = "import sys\nprint(sys.argv)\nsys.exit(int(sys.argv[1]))\n"
    Path("script.py").write_text(script)
    found = run("explain", "script.py", "3")
    assert "['script.py', '3']" in found.out
    assert found.code == 1
    assert "exit status 3" in found.err


@pytest.mark.parametrize("command", ["", "demo", "profile", "explain", "timeline", "info"])
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*([command] if command else []), "--help"])
    assert end.value.code == 0
    assert len(capsys.readouterr().out) > 150
