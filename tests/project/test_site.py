# SPDX-License-Identifier: Apache-2.0
"""The site builds without a warning, and leaves out no public name, no error and no benchmark."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from urllib.parse import unquote

import pytest
from helpers import EXHAUSTIVE

import rematfn

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
MODULES = {
    "rematfn": "rematfn",
    "rematfn.errors": "errors",
    "rematfn.policies": "policies",
    "rematfn.policies.reference": "reference",
    "rematfn.testing": "testing",
}
ENTRY = re.compile(r"^\.\. auto\w+:: (\w+)$", re.M)


@pytest.mark.parametrize("module", MODULES)
def test_the_reference_has_every_public_name_once(module: str) -> None:
    page = (DOCS / "api" / f"{MODULES[module]}.md").read_text(encoding="utf-8")
    elsewhere = {"errors", "policies", "reference", "testing"}
    if module != "rematfn":
        elsewhere.update(rematfn.__all__)
    assert f".. currentmodule:: {module}\n" in page
    assert sorted(ENTRY.findall(page)) == sorted(set(import_module(module).__all__) - elsewhere)


def test_every_error_has_its_part_of_the_page() -> None:
    page = (DOCS / "errors.md").read_text(encoding="utf-8")
    errors = {n for n in rematfn.errors.__all__ if n.endswith("Error")} - {"RematError"}
    assert set(re.findall(r"^## (\w+Error)$", page, re.M)) == errors


def test_every_benchmark_that_has_results_has_its_command() -> None:
    page = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
    results = {p.name for p in (ROOT / "benchmarks" / "results").glob("*.md")}
    rows = re.findall(r"^\|.*\| `.+` \| .*results/([\w-]+\.md)", page, re.M)
    assert set(rows) == results


def test_every_figure_of_a_page_is_told_in_words() -> None:
    results = (ROOT / "benchmarks" / "results").glob("*.md")
    pages = [ROOT / "README.md", *DOCS.rglob("*.md"), *results]
    told = re.compile(r"!\[(.*?)\]\(", re.S)
    texts = [text for page in pages for text in told.findall(page.read_text(encoding="utf-8"))]
    assert len(texts) >= 16
    assert [text for text in texts if len(text.split()) < 8] == []


def broken_links(site: Path) -> set[tuple[str, str]]:
    """Return the pages and links of a site that lead to no file, or to no place in it."""
    texts = {page: page.read_text(encoding="utf-8") for page in site.rglob("*.html")}
    places = {page: set(re.findall(r'\bid="([^"]+)"', text)) for page, text in texts.items()}
    found = set()
    for page, text in texts.items():
        for link in re.findall(r'(?:href|src)="(?!https?:|mailto:|data:)([^"]+)"', text):
            path, _, place = unquote(link).partition("#")
            target = (page.parent / path.partition("?")[0]).resolve() if path else page
            if not target.exists() or (place and place not in places.get(target, {place})):
                found.add((str(page.relative_to(site)), link))
    return found


@pytest.mark.skipif(not EXHAUSTIVE, reason="`make docs` builds it; its links: make test-exhaustive")
def test_it_builds_without_a_warning_and_its_links_lead_somewhere(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    site = tmp_path / "site"
    options = ["-W", "--keep-going", "-q", "-d", tmp_path / "doctrees", "-c", DOCS]
    built = subprocess.run(
        [sys.executable, "-m", "sphinx", *options, ROOT, site],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert built.returncode == 0, built.stderr
    assert broken_links(site.resolve()) == set()


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    (tmp_path / "a.html").write_text('<p id="here"><a href="#here">1</a><a href="b.html#c">2</a>')
    assert broken_links(tmp_path) == {("a.html", "b.html#c")}
    (tmp_path / "b.html").write_text('<p id="c">')
    assert broken_links(tmp_path) == set()
