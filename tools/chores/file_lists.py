"""Writes the lists of the library's files, with their first sentences, into the docs.

That of the Python modules stands in docs/modules.md between two comments; folders come in the
order in which they import from each other, from the ground up. That of the C++ files stands in
shmacc/native/README.md, whose lines are in reading order, and keep it; each file has one.
With ``--check`` nothing is written: the exit status is 1 if a list is not what it would be.
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "modules.md"
BEGIN: Final = "<!-- modules: written by tools/chores/file_lists.py -->\n"
END: Final = "<!-- end of modules -->\n"

# Folders of shmacc/, and modules that they import, from the ground up.
ORDER: Final = (
    "_layout",
    "_records",
    "_gradients",
    "optim",
    "_opening",
    "_accumulators",
    "inspection",
    "torch",
    "_multihost",
    "ray",
)

# Folders of shmacc/native/, from the ground up.
NATIVE: Final = ROOT / "shmacc" / "native"
NATIVE_PAGE: Final = NATIVE / "README.md"
NATIVE_FOLDERS: Final = ("segment", "rows", "protocol", "operations", "python")


def first_sentence(path: Path) -> str:
    """Return a module's own words for what it is."""
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    if not text:
        raise SystemExit(f"{path} has no docstring")
    return text.split("\n\n")[0].replace("\n", " ").replace("``", "`")


def modules(folder: Path) -> list[Path]:
    """Return the modules of a folder and of the folders in it."""
    return sorted(path for path in folder.rglob("*.py") if path.name != "__init__.py")


def listed() -> str:
    """Return the list as it is to stand in the page."""
    library = ROOT / "shmacc"
    lines = []
    for name in ORDER:
        folder = library / name
        if not folder.is_dir():
            lines += [f"`shmacc/{name}.py`: {first_sentence(folder.with_suffix('.py'))}\n"]
            continue
        lines += [f"`shmacc/{name}/`: {first_sentence(folder / '__init__.py')}\n"]
        lines += [
            f"* `{path.relative_to(folder)}`: {first_sentence(path)}" for path in modules(folder)
        ]
        lines.append("")
    lines.append("On top of them, in `shmacc/`:\n")
    lines += [
        f"* `{path.name}`: {first_sentence(path)}"
        for path in sorted(library.glob("*.py"))
        if path.stem not in ORDER
    ]
    return "\n".join(lines) + "\n"


def written(page: str) -> str:
    """Return the page with the list in it."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + "\n" + listed() + "\n" + END + rest.split(END)[1]


def first_sentence_in_cpp(path: Path) -> str:
    """Return a C++ file's own words for what it is."""
    head = re.match(r"(?:// .*\n)+", path.read_text(encoding="utf-8"))
    sentence = head and re.match(r".*?\.(?=\s|$)", " ".join(head[0].replace("// ", "").split()))
    if not sentence:
        raise SystemExit(f"{path} does not begin with a sentence")
    return sentence[0]


def written_native(page: str) -> str:
    """Return the page of the C++ files with their sentences in it."""
    line = re.compile(r"^\* `([\w/.]+)`:.*$", re.MULTILINE)
    named = line.findall(page)
    there = [str(path.relative_to(NATIVE)) for path in NATIVE.glob("*/*.?pp")]
    if sorted(named) != sorted(there):
        raise SystemExit(f"{NATIVE_PAGE} and its folders differ in {set(named) ^ set(there)}")
    if sorted(named, key=lambda name: NATIVE_FOLDERS.index(name.split("/")[0])) != named:
        raise SystemExit(f"{NATIVE_PAGE} has the folders in another order than {NATIVE_FOLDERS}")
    return line.sub(lambda at: f"* `{at[1]}`: {first_sentence_in_cpp(NATIVE / at[1])}", page)


def main() -> int:
    """Write the lists, or check them."""
    outdated = False
    for path, rewritten in ((PAGE, written), (NATIVE_PAGE, written_native)):
        page = path.read_text(encoding="utf-8")
        outdated |= rewritten(page) != page
        if sys.argv[1:] != ["--check"]:
            path.write_text(rewritten(page), encoding="utf-8")
    return int(outdated and sys.argv[1:] == ["--check"])


if __name__ == "__main__":
    sys.exit(main())
