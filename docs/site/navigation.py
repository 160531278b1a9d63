"""Which page stands where in the navigation. A section may name pages that do not exist yet."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_SECTIONS: Final = {
    "Learn": ("docs/tutorial", "docs/examples/README"),
    "How to": (
        "docs/guide",
        "docs/recipes",
        "docs/training",
        "docs/torch",
        "docs/jax",
        "docs/scipy",
        "docs/pools",
        "docs/asyncio",
        "docs/from-tensorflow",
        "docs/sizing",
        "docs/containers",
        "docs/many-hosts",
        "docs/kubernetes-and-slurm",
        "docs/operating",
        "docs/inspect",
    ),
    "Concepts": (
        "docs/concepts/README",
        "docs/concepts/semantics",
        "docs/concepts/rounds",
        "docs/concepts/*",
    ),
    "Reference": (
        "docs/reference/accumulators",
        "docs/reference/parameters",
        "docs/reference/shared-arrays",
        "docs/reference/records",
        "docs/reference/errors",
        "docs/reference/*",
        "docs/guarantees",
    ),
    "Evidence": (
        "docs/performance",
        "docs/benchmarks/README",
        "docs/benchmarks/results",
        "docs/simulation",
        "docs/simulation/results",
        "docs/hazards",
        "docs/testing",
        "tools/model/README",
        "tools/model/litmus/*",
    ),
    "Project": (
        "docs/README",
        "docs/architecture",
        "shmacc/native/README",
        "CONTRIBUTING",
        "SECURITY",
        "CHANGELOG",
    ),
}

# A page that no section names.
_OTHERS_GO_TO: Final = "How to"


def toctrees(pages: Iterable[str]) -> str:
    """Return the navigation for these pages, as MyST has it."""
    patterns = [pattern for section in _SECTIONS.values() for pattern in section]
    others = {
        page
        for page in pages
        if page.startswith("docs/")
        and page.count("/") == 1
        and not any(fnmatch(page, pattern) for pattern in patterns)
    }
    left = set(pages) - others
    trees = []
    for caption, section in _SECTIONS.items():
        entries = []
        for pattern in section:
            found = sorted(page for page in left if fnmatch(page, pattern))
            left -= set(found)
            entries += found
        if caption == _OTHERS_GO_TO:
            entries += sorted(others)
        listed = "".join(f"/{page}\n" for page in entries)
        trees.append(f"\n```{{toctree}}\n:hidden:\n:caption: {caption}\n\n{listed}```\n")
    return "".join(trees)
