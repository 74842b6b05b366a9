# SPDX-License-Identifier: Apache-2.0
"""Notes: a subtle point is written once, beside the code it is about, and cited from elsewhere."""

import re
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUFFIXES = {".cpp", ".h", ".hpp", ".md", ".py", ".pyi"}

# A Note starts with its title on a line of its own, underlined with tildes. Every other mention of
# a title is a citation; `torch's Note [...]` is about a Note of torch's.
DEFINED = re.compile(r"^\W*Note \[([^\]]+)\]\s*\n\W*~{4,}", re.MULTILINE)
CITED = re.compile(r"(?<![Tt]orch's )Notes? \[([^\]]+)\]")
LINE_BREAK = re.compile(r"\s*\n\s*(?://+|#+|\*+)?\s*")


def faults(texts):
    """Return what is wrong with the Notes of these sources, a sentence for each fault."""
    defined = Counter(title for text in texts for title in DEFINED.findall(text))
    cited = set()
    for text in texts:
        in_one_line = LINE_BREAK.sub(" ", DEFINED.sub("", text))
        cited.update(CITED.findall(in_one_line))
    return [
        *(f"written {n} times: {title}" for title, n in sorted(defined.items()) if n > 1),
        *(f"cited but never written: {title}" for title in sorted(cited - set(defined))),
        *(f"written but never cited: {title}" for title in sorted(set(defined) - cited)),
    ]


def sources():
    return [
        path.read_text(encoding="utf-8")
        for folder in ("csrc", "rematfn", "docs")
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SUFFIXES
    ]


def test_notes_resolve():
    assert faults(sources()) == []


CPP = "// Note [Pin before you evict]\n// ~~~~~~~~~~~\n// Because.\n"


def test_a_citation_of_nothing_is_found():
    assert faults([CPP, "see Note [Pin before you evict]", "see Note [Pinning]"]) == [
        "cited but never written: Pinning"
    ]


def test_a_note_that_nobody_cites_is_found():
    assert faults([CPP]) == ["written but never cited: Pin before you evict"]
