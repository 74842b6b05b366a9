# SPDX-License-Identifier: Apache-2.0
"""Memory budgets for PyTorch: try one."""

import argparse
import sys
from collections.abc import Sequence

from rematfn._commands import demo, info
from rematfn.errors import RematError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status: 0, or 1 if it failed or a promise was broken."""
    parser = argparse.ArgumentParser(prog="python -m rematfn", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for part in (demo, info):
        part.add(commands)
    options = parser.parse_args(arguments)
    try:
        return int(options.command(options))
    except ModuleNotFoundError as error:
        if error.name not in ("matplotlib", "tqdm"):  # the program's own
            raise
        needed = f"this needs {error.name}, which is not installed"
        print(f"python -m rematfn: {needed}: pip install tqdm matplotlib", file=sys.stderr)
    except RematError as error:
        print(f"python -m rematfn: {error}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
