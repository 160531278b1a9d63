"""Makes build/tutorial.ipynb of docs/tutorial.md: the same text, programs and outputs, as cells.

    .venv/bin/python tools/chores/notebook.py

A program of one process is a cell, with the output that the page shows. One that starts processes,
or that takes arguments, is written to a file by its cell, and run by the next: what multiprocessing
starts by spawn imports the main module, and a notebook's cells are in none.

With nbformat, as Jupyter itself reads and writes notebooks. (jupytext, which turns Markdown into
cells, knows neither files to write nor commands with their output.) Whatever differs from run to
run is left out, so that the same page makes the same file.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import nbformat
from nbformat import v4

if TYPE_CHECKING:
    from collections.abc import Iterator

_ROOT: Final = Path(__file__).parents[2]
PAGE: Final = _ROOT / "docs" / "tutorial.md"
NOTEBOOK: Final = _ROOT / "build" / "tutorial.ipynb"

_BLOCK: Final = re.compile(r"^```(\w+)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_COMMAND: Final = re.compile(r"^\$ (.*)\n((?:[^$].*\n)*)", re.MULTILINE)
_NEEDS_A_FILE: Final = re.compile(r"^import multiprocessing\b|\bsys\.argv\b", re.MULTILINE)

# In place of the commands that make a folder.
_ABOUT_CELLS: Final = """\
In this notebook, a program of one process is a cell. One that starts processes or takes arguments
is written to a file by its cell, and run by the next cell: a process that `multiprocessing` starts
by spawn cannot find functions that are defined in a notebook. The next cell makes a temporary
folder for the files, and has `python` be the one that this notebook runs in:"""
_FOLDER: Final = """\
import os
import sysconfig
import tempfile

os.chdir(tempfile.mkdtemp(prefix="tutorial-"))
os.environ["PATH"] = sysconfig.get_path("scripts") + os.pathsep + os.environ["PATH"]"""


def _printed(text: str) -> list[Any]:
    return [v4.new_output("stream", name="stdout", text=text)]


def _cells(page: str) -> Iterator[Any]:
    run_here: dict[str, Any] = {}  # programs that are cells, by the command that the page runs
    first, *rest = _BLOCK.split(page)
    yield v4.new_markdown_cell(first.strip())
    for kind, block, text in zip(rest[::3], rest[1::3], rest[2::3], strict=True):
        if kind == "sh":
            yield v4.new_markdown_cell(_ABOUT_CELLS)
            yield v4.new_code_cell(_FOLDER)
        elif kind == "python":
            name = block.split()[1]  # of its first line, a comment
            if _NEEDS_A_FILE.search(block):
                yield v4.new_code_cell(f"%%writefile {name}\n{block.strip()}")
            else:
                cell = run_here[f"python {name}"] = v4.new_code_cell(block.strip())
                yield cell
        elif kind == "console":
            commands, outputs = zip(*_COMMAND.findall(block), strict=True)
            if cell := run_here.get(commands[0]):
                [printed] = outputs
                cell.outputs = _printed(printed)
            else:
                source = "\n".join(["%%sh", *commands])
                yield v4.new_code_cell(source, outputs=_printed("".join(outputs)))
        else:
            raise ValueError(f"a block of sh, python or console is expected, and this is {kind}")
        if text.strip():
            yield v4.new_markdown_cell(text.strip())


def made_of(page: str) -> str:
    """Return the notebook of this page, as it is to be in its file."""
    cells = list(_cells(page))
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"  # nbformat's own are random
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    made = v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.validate(made)
    return f"{nbformat.writes(made)}\n"


if __name__ == "__main__":
    NOTEBOOK.parent.mkdir(exist_ok=True)
    NOTEBOOK.write_text(made_of(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
