"""Checks what a built site has on every page: python tools/chores/built_site.py build/docs.

Links are followed by links.py.
"""

from __future__ import annotations

import re
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

_IN_A_HEAD: Final = {
    "description": r'<meta name="description" content="[^"]{20,}"',
    "icon": r'<link rel="shortcut icon"',
}
# What readers install, and so must get as it is.
_DOWNLOADS: Final = {"alerts.yml", "schema-2.json", "raycluster.yaml", "slurm.sh"}


def faults(site: Path, version: str) -> Iterator[str]:
    """Say what the site lacks."""
    wanted = _IN_A_HEAD | {"version": rf"<title>[^<]* {re.escape(version)}</title>"}
    for page in sorted(site.rglob("*.html")):
        text = page.read_text(encoding="utf-8")
        if 'http-equiv="refresh"' in text:
            continue
        name = page.relative_to(site)
        yield from (f"{name} has no {what}" for what in wanted if not re.search(wanted[what], text))
    if 'class="next-page"' not in (site / "README.html").read_text(encoding="utf-8"):
        yield "README.html has no button that leads to the next page"
    if (site / "docs" / "site").exists():
        yield "docs/site is no part of the documentation"
    there = {path.name for path in site.glob("_downloads/*/*")}
    yield from (f"{name} cannot be downloaded" for name in sorted(_DOWNLOADS - there))


def main() -> int:
    """Print what is missing; return whether anything is."""
    found = list(faults(Path(sys.argv[1]), metadata.version("shmacc")))
    for fault in found:
        print(fault, file=sys.stderr)
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
