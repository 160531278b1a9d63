"""Which page stands where in the navigation."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

_SECTIONS: Final = {
    "Learn": ("docs/tutorial",),
    "How to": (
        "docs/guide",
        "docs/training",
        "docs/torch",
        "docs/jax",
        "docs/scipy",
        "docs/asyncio",
        "docs/from-tensorflow",
        "docs/from-ddp",
        "docs/sizing",
        "docs/containers",
        "docs/operating",
        "docs/inspect",
        "...",
    ),
    "Concepts": (
        "docs/concepts/README",
        "docs/concepts/semantics",
        "docs/concepts/rounds",
        "docs/concepts/*",
    ),
    "Reference": (
        "docs/reference/accumulators",
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
        "docs/hazards",
        "docs/testing",
        "tools/model/README",
        "tools/model/litmus/*",
    ),
    "Project": (
        "docs/README",
        "docs/architecture",
        "CONTRIBUTING",
        "SECURITY",
        "CHANGELOG",
        "docs/examples/README",
    ),
}


def toctrees(pages: Iterable[str]) -> str:
    """Return the navigation for these pages, in MyST; a page of docs that no section names is a how-to."""
    left = set(pages)
    places: dict[tuple[str, int], list[str]] = {}
    named = [
        (s, n, pattern) for s, patterns in _SECTIONS.items() for n, pattern in enumerate(patterns)
    ]
    for section, number, pattern in sorted(named, key=lambda place: place[2] == "..."):
        wanted = "docs/*" if pattern == "..." else pattern
        found = sorted(page for page in left if fnmatch(page, wanted))
        if pattern == "...":
            found = [page for page in found if page.count("/") == 1]
        places[section, number] = found
        left -= set(found)
    return "".join(
        "\n```{toctree}\n:hidden:\n:caption: "
        + section
        + "\n\n"
        + "".join(
            f"/{page}\n" for number in range(len(patterns)) for page in places[section, number]
        )
        + "```\n"
        for section, patterns in _SECTIONS.items()
    )
