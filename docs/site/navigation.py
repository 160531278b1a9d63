"""Which page stands where in the navigation. A section may name pages that do not exist yet."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_SECTIONS: Final = {
    "Learn": (
        "docs/install",
        "docs/tutorial",
        "docs/training",
        "docs/torch",
        "docs/jax",
        "docs/scipy",
        "docs/from-tensorflow",
    ),
    "How to": (
        "docs/guide",
        "docs/tables",
        "docs/recipes",
        "docs/examples/README",
        "docs/many-hosts",
        "docs/asyncio",
        "docs/pools",
    ),
    "Operating": (
        "docs/standing-still",
        "docs/operating",
        "docs/containers",
        "docs/kubernetes-and-slurm",
        "docs/sizing",
        "docs/inspect",
        "docs/inspect-json",
    ),
    "Concepts": ("docs/concepts/README", "docs/concepts/*"),
    "Reference": (
        "docs/reference/accumulators",
        "docs/reference/rounds",
        "docs/reference/parameters",
        "docs/reference/errors",
        "docs/reference/*",
        "docs/guarantees",
        "docs/your-process",
    ),
    "Evidence": ("docs/testing",),
    "Project": (
        "docs/README",
        "docs/why",
        "docs/words",
        "docs/architecture",
        "shmacc/native/README",
        "CONTRIBUTING",
        "SECURITY",
        "CHANGELOG",
    ),
}

# What stands behind one door: these pages are listed below it, once a reader is there.
_BEHIND: Final = {
    "docs/testing": (
        "docs/hazards",
        "tools/model/README",
        "tools/model/litmus/*",
        "docs/performance",
        "docs/simulation",
    )
}

# A page that no section names.
_OTHERS_GO_TO: Final = "How to"


def toctrees(pages: Iterable[str]) -> str:
    """Return the navigation for these pages, as MyST has it."""
    named = [pattern for section in (_SECTIONS | _BEHIND).values() for pattern in section]
    others = {
        page
        for page in pages
        if page.startswith("docs/")
        and page.count("/") == 1
        and not any(fnmatch(page, pattern) for pattern in named)
    }
    left = set(pages) - others
    trees = []
    for caption, section in _SECTIONS.items():
        entries = _found(section, left)
        left -= set(entries)
        if caption == _OTHERS_GO_TO:
            entries += sorted(others)
        trees.append(_toctree(entries, f":caption: {caption}\n"))
    return "".join(trees)


def behind(page: str, pages: Iterable[str]) -> str:
    """Return the navigation below a page, if it is a door to others of these."""
    return _toctree(_found(_BEHIND[page], set(pages))) if page in _BEHIND else ""


def _found(patterns: Iterable[str], pages: set[str]) -> list[str]:
    """Of the pages those that match, in the order of the patterns, each once."""
    found = {}
    for pattern in patterns:
        found |= dict.fromkeys(sorted(page for page in pages if fnmatch(page, pattern)))
    return list(found)


def _toctree(entries: Iterable[str], options: str = "") -> str:
    listed = "".join(f"/{page}\n" for page in entries)
    return f"\n```{{toctree}}\n:hidden:\n{options}\n{listed}```\n"
