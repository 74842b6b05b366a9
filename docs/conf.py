# SPDX-License-Identifier: Apache-2.0
"""The site: `make docs`. The sources are the pages and notebooks of the repository, where they lie.

The repository's root is the source directory, so a link from one file to another leads to the same
place on the site. A link to a file that is no page, such as a C++ source, has the file itself.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

from sphinx import addnodes

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

project = "rematfn"
author = "the authors of rematfn"
project_copyright = author
release = version = metadata.version("rematfn")

root_doc = "docs/index"
include_patterns = [
    "docs/**",
    "tutorials/*.ipynb",
    "benchmarks/results/*.md",
    "csrc/README.md",
    "csrc/**/README.md",
    "rematfn/README.md",
    "tutorials/*/README.md",
    "tests/device/README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
]
exclude_patterns = ["build", "out", ".*", "**/.*", "**/__pycache__"]
html_extra_path = ["_site"]  # an index.html, which leads to docs/index.html

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
]

# Pages and notebooks. What a notebook shows was computed by `make notebooks`.
nb_execution_mode = "off"
nb_render_markdown_format = "gfm"
nb_merge_streams = True
# What a screen reader says of a figure whose cell's metadata has no better text, under `mystnb`.
nb_render_image_options = {"alt": "The figure that the cell above draws"}
myst_heading_anchors = 4
myst_enable_extensions = ["attrs_block", "colon_fence"]

# Docstrings
autodoc_member_order = "bysource"
autodoc_typehints = "none"  # the texts say them, and overloads would be shown three times
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_custom_sections = ["The fix"]
napoleon_use_ivar = True

html_theme = "furo"
html_title = "rematfn"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
pygments_style = "friendly"
pygments_dark_style = "github-dark"


def _existing(app: Any, docname: str, source: list[str]) -> None:
    """Leave out the patterns of a list of contents that match no page yet."""
    if docname in (root_doc, "docs/sources"):
        pattern = re.compile(r"^[\w./-]*\*[\w./-]*\n", re.M)

        def matches(path: str) -> bool:
            return any(any(app.confdir.glob(path + end)) for end in ("", ".md"))

        source[0] = pattern.sub(lambda found: found[0] * matches(found[0].strip()), source[0])


def _by_last_name(app: Any, env: Any, node: Any, child: Any) -> Any:
    """Resolve a name in a docstring that says no module, as `Guided`, where it is unambiguous."""
    if node.get("refdomain") != "py":
        return None
    objects = env.domains["py"].objects
    last = f".{node['reftarget']}"
    public = (name for name in objects if name.startswith("rematfn.") and "._" not in name)
    names = [name for name in public if name.endswith(last)]
    if len(names) != 1:
        return None
    node["reftarget"] = names[0]
    return env.domains["py"].resolve_xref(
        env, node["refdoc"], app.builder, node["reftype"], names[0], node, child
    )


def _places(app: Any, doctree: Any) -> None:
    """Give each entry of the API the places that the pages of sources link back to.

    `sphinx.ext.viewcode` links to ``rematfn.Stats``, whatever module the entry names, and to
    `docs/errors.md`, whose entries have no place of their own.
    """
    for entry in doctree.findall(addnodes.desc_signature):
        for module in (entry.get("module"), "rematfn"):
            place = f"{module}.{entry.get('fullname')}"
            if place not in entry["ids"]:
                entry["ids"].append(place)


def setup(app: Any) -> None:
    """Connect the three functions above."""
    app.connect("source-read", _existing)
    app.connect("doctree-read", _places)
    app.connect("missing-reference", _by_last_name)
