# SPDX-License-Identifier: Apache-2.0
"""Execute the notebooks' sources, `[0-9]*.py`, and write each beside it as an `.ipynb`.

`python tutorials/make.py [NAME ...]`. What differs from run to run, times and names of cells, is
left out. A cell with a picture has a comment `# Alt: ...`, which the site takes for the picture's
alternative text.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import jupytext
from nbclient import NotebookClient

FOLDER = Path(__file__).parent
ALT = re.compile(r"^# Alt: .*(?:\n# .*)*", re.M)


def main(names: list[str]) -> None:
    """Make those named, or all."""
    sources = [FOLDER / f"{name}.py" for name in names] or sorted(FOLDER.glob("[0-9]*.py"))
    for source in sources:
        notebook = jupytext.read(source)
        NotebookClient(
            notebook,
            timeout=1200,
            coalesce_streams=True,
            extra_arguments=["--log-level=40"],
            kernel_name="python3",
            resources={"metadata": {"path": str(FOLDER)}},
        ).execute()
        for number, cell in enumerate(notebook.cells):
            cell.metadata.pop("execution", None)
            cell["id"] = f"cell-{number}"
            if text := ALT.search(cell.source):
                words = re.sub(r"\n?# ", " ", text[0]).strip().removeprefix("Alt: ")
                cell.metadata["mystnb"] = {"image": {"alt": words}}
        notebook.metadata.pop("language_info", None)
        jupytext.write(notebook, source.with_suffix(".ipynb"), fmt="ipynb")
        print(source.stem, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
