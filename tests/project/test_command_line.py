# SPDX-License-Identifier: Apache-2.0
"""``python -m rematfn``: each command, as its user runs it."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import rematfn
from rematfn.__main__ import main

ROOT = Path(rematfn.__file__).parents[1]
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

if __name__ == "__main__":
    g = rematfn.remat(step, 0.6)
    for _ in range(2):
        g()
    print("it has run")
"""


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(PROGRAM)
    return path


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-m", "rematfn", *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_profile_of_a_function(program: Path) -> None:
    found = run("profile", f"{program.name}:step", "--budgets", "0.7", "0.4", "--time", "1.2",
                "--out", "curve.png", cwd=program.parent)  # fmt: skip
    assert found.returncode == 0, found.stderr
    for text in ("step", "min budget", "Foretold time of a call", "0.70", "1.2 of its time"):
        assert text in found.stdout
    assert (program.parent / "curve.png").stat().st_size > 1000


def test_explain_of_a_function_and_of_a_script(program: Path) -> None:
    found = run("explain", "program:step", "--budget", "0.6", "--rows", "3", cwd=program.parent)
    assert found.returncode == 0, found.stderr
    assert "call       guided" in found.stdout
    assert "tanh at program.py:9 (step)" in found.stdout
    found = run("explain", program.name, cwd=program.parent)
    assert found.returncode == 0, found.stderr
    assert found.stdout.startswith("it has run\n")
    assert "remat(step, budget=0.6 of the unconstrained peak)" in found.stdout


def test_explain_of_a_call_that_does_not_fit(program: Path) -> None:
    found = run("explain", f"{program.name}:step", "--budget", "9KiB", cwd=program.parent)
    assert found.returncode == 0
    assert found.stderr.startswith("BudgetError: ")
    assert "program.py:9 in step" in found.stderr
    assert "[did not run]" in found.stdout


def test_what_takes_longer_than_a_second_has_a_bar(program: Path) -> None:
    pytest.importorskip("tqdm")
    slow = PROGRAM.replace("    x = torch.ones", "    time.sleep(0.6)\n    x = torch.ones")
    program.write_text("import time\n" + slow)
    for command in ("profile", "explain", "timeline"):
        found = run(command, f"{program.name}:step", "--calls", "3", cwd=program.parent)
        assert found.returncode == 0
        assert f"{command}: " in found.stderr


@pytest.mark.parametrize("ending", ["html", "png", "json"])
def test_timeline(program: Path, ending: str) -> None:
    out = f"step.{ending}"
    found = run("timeline", f"{program.name}:step", "--budget", "0.6", "--out", out,
                cwd=program.parent)  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert f"saved: {out}" in found.stdout
    path = program.parent / out
    assert path.stat().st_size > 1000
    if ending == "json":
        assert json.loads(path.read_text())["traceEvents"]


def test_simulate(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = rematfn.record(torch.func.grad(lambda x: x.sin().cos().exp().sum()), torch.ones(64))
    trace.save(tmp_path / "trace.jsonl")
    assert main(["simulate", str(tmp_path / "trace.jsonl"), "--budget", "0.8"]) == 0
    assert "replays" in capsys.readouterr().out
    assert main(["simulate", str(tmp_path / "trace.jsonl"), "--budget", "8"]) == 1
    assert "does not fit" in capsys.readouterr().err
    assert main(["simulate", str(tmp_path / "none.jsonl")]) == 1
    assert "none.jsonl" in capsys.readouterr().err


def test_info(tmp_path: Path) -> None:
    found = run("info", cwd=tmp_path)
    assert found.returncode == 0, found.stderr
    rows = dict(re.split(r"  +", line, maxsplit=1) for line in found.stdout.splitlines())
    assert rows["torch"].strip() == torch.__version__
    assert rows["built with"].startswith(f"torch {torch.__version__.partition('+')[0]}")
    assert "MB/s out" in rows["disk tier"] or "cannot be used" in rows["disk tier"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("none.py", "there is no file 'none.py'"),
        ("none.py:step", "there is no file 'none.py'"),
        ("no_such_module:step", "cannot import 'no_such_module'"),
        ("program.py:nothing", "it has step, wants"),
        ("program.py:wants", "wants x: name a function without arguments"),
        ("program.py:WEIGHTS", "is no function"),
        ("step", "names no function"),
        (".:step", "cannot import '.'"),
    ],
)
def test_a_target_that_cannot_be_run(program: Path, target: str, message: str) -> None:
    found = run("profile", target, cwd=program.parent)
    assert found.returncode == 1
    assert message in found.stderr
    assert "Traceback" not in found.stderr


def test_what_the_program_raises_is_shown_with_its_lines(program: Path) -> None:
    (program.parent / "breaks.py").write_text("import no_such_library\n")
    program.write_text(PROGRAM + "\ndef breaks():\n    import no_such_library\n")
    for target in ("breaks.py", "breaks:step", "program.py:breaks"):
        found = run("explain", target, cwd=program.parent)
        assert found.returncode == 1
        assert "import no_such_library" in found.stderr
        assert found.stderr.endswith("ModuleNotFoundError: No module named 'no_such_library'\n")


@pytest.mark.parametrize("command", ["profile", "timeline"])
def test_an_ending_is_refused_before_anything_runs(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as end:
        main([command, "x.py:f", "--out", "picture.gif"])
    assert end.value.code == 2
    assert "must end in .png, .svg, .pdf" in capsys.readouterr().err.replace(".html, ", "")


def test_a_cap_is_bytes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["profile", "x.py:f", "--cap", "0.5"])
    assert end.value.code == 2
    assert "--cap: bytes are needed" in capsys.readouterr().err


def test_a_time_that_no_budget_gives(program: Path) -> None:
    found = run("profile", f"{program.name}:step", "--time", "0.01", cwd=program.parent)
    assert found.returncode == 1
    assert "--time 0.01: " in found.stderr
    assert "Traceback" not in found.stderr


def test_a_script_that_calls_no_transformed_function(tmp_path: Path) -> None:
    (tmp_path / "plain.py").write_text("import torch\ntorch.ones(3).sin()\n")
    found = run("explain", "plain.py", cwd=tmp_path)
    assert found.returncode == 1
    assert "name a function of it, plain.py:function" in found.stderr


def test_scripts_arguments_and_exit_status(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import sys\nprint(sys.argv)\nsys.exit(int(sys.argv[1]))\n")
    found = run("explain", "script.py", "3", cwd=tmp_path)
    assert "['script.py', '3']" in found.stdout
    assert found.returncode == 1
    assert "exit status 3" in found.stderr


@pytest.mark.parametrize(
    "command", ["", "demo", "profile", "explain", "timeline", "simulate", "info"]
)
def test_help_teaches(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main([*([command] if command else []), "--help"])
    assert end.value.code == 0
    assert len(capsys.readouterr().out) > 150


def test_what_is_not_known_is_refused_with_the_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["explain", "x.py:f", "--budget", "2G"])
    assert end.value.code == 2
    assert 'Did you mean "2GiB"' in capsys.readouterr().err
