"""Writes the list of the library's Python modules, with their first sentences, into the docs.

The list stands in docs/architecture.md between two comments; folders come in the order in which they
import from each other, from the ground up. With ``--check`` nothing is written: the exit status is 1
if the list is not what it would be.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "architecture.md"
BEGIN: Final = "<!-- modules: written by tools/chores/file_lists.py -->\n"
END: Final = "<!-- end of modules -->\n"

# Folders of shmacc/, and what stands beside them, from the ground up.
FOLDERS: Final = (
    "_layout",
    "_records",
    "_gradients",
    "_opening",
    "_accumulators",
    "inspection",
    "torch",
    "_multihost",
    "ray",
)


def first_sentence(path: Path) -> str:
    """A module's own words for what it is."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not text:
        raise SystemExit(f"{path} has no docstring")
    return text.split("\n\n")[0].replace("\n", " ").replace("``", "`")


def modules(folder: Path) -> list[Path]:
    """The modules of a folder and of the folders in it."""
    return sorted(path for path in folder.rglob("*.py") if path.name != "__init__.py")


def listed() -> str:
    """The list as it is to stand in the page."""
    library = ROOT / "shmacc"
    lines = []
    for name in FOLDERS:
        folder = library / name
        lines += [f"`shmacc/{name}/`: {first_sentence(folder / '__init__.py')}\n"]
        lines += [
            f"* `{path.relative_to(folder)}`: {first_sentence(path)}" for path in modules(folder)
        ]
        lines.append("")
    lines.append("On top of them, in `shmacc/`:\n")
    lines += [f"* `{path.name}`: {first_sentence(path)}" for path in sorted(library.glob("*.py"))]
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """The page with the list in it."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + listed() + "\n" + END + rest.split(END)[1]


def main() -> int:
    """Write the list, or check it."""
    page = PAGE.read_text(encoding="utf-8")
    if sys.argv[1:] == ["--check"]:
        return int(written(page) != page)
    PAGE.write_text(written(page), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
