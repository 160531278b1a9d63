"""Writes the first sentence of each C++ file into the list in shmacc/native/README.md.

The list has a line for each file, in the order in which to read them, which stays as it is. With
``--check`` nothing is written: the exit status is 1 if the list is out of date.
"""

import re
import sys
from pathlib import Path
from typing import Final

# Folders of shmacc/native/, from the ground up.
NATIVE: Final = Path(__file__).parents[2] / "shmacc" / "native"
NATIVE_PAGE: Final = NATIVE / "README.md"
NATIVE_FOLDERS: Final = (
    "base",
    "values",
    "protocol",
    "segment",
    "inspection",
    "accumulators",
    "parameters",
    "python",
)


def first_sentence_in_cpp(path: Path) -> str:
    """Return the first sentence of a C++ file's head."""
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
    """Write the list, or check it."""
    page = NATIVE_PAGE.read_text(encoding="utf-8")
    rewritten = written_native(page)
    if sys.argv[1:] == ["--check"]:
        return int(rewritten != page)
    NATIVE_PAGE.write_text(rewritten, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
