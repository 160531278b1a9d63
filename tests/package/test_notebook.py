"""The tutorial's notebook is the page, as cells. `make test-home` executes it."""

from __future__ import annotations

import json
from typing import Any

import pytest

import notebook


def _cells(page: str) -> list[Any]:
    cells: list[Any] = json.loads(notebook.made_of(page))["cells"]
    return cells


def test_the_tutorial_can_be_made_a_notebook() -> None:
    assert len(_cells(notebook.PAGE.read_text(encoding="utf-8"))) > 10


def test_a_program_of_one_process_is_a_cell_with_its_output() -> None:
    page = "A\n```python\n# a.py\nprint(1)\n```\n\n```console\n$ python a.py\n1\n```\n\nB\n"
    text, program, after = _cells(page)
    assert text["source"] == ["A"]
    assert "".join(program["source"]) == "# a.py\nprint(1)"
    [output] = program["outputs"]
    assert (output["name"], output["text"]) == ("stdout", ["1\n"])
    assert after["source"] == ["B"]


@pytest.mark.parametrize("line", ["import multiprocessing as mp", "print(sys.argv)"])
def test_one_that_needs_a_file_is_written_and_run(line: str) -> None:
    page = (
        f"```python\n# a.py\n{line}\n```\n```console\n$ python a.py 1\n1\n$ python a.py 2\n2\n```\n"
    )
    _, program, run = _cells(page)
    assert "".join(program["source"]) == f"%%writefile a.py\n# a.py\n{line}"
    assert program["outputs"] == []
    assert "".join(run["source"]) == "%%sh\npython a.py 1\npython a.py 2"
    assert run["outputs"][0]["text"] == ["1\n", "2\n"]


def test_a_block_of_another_kind_is_an_error() -> None:
    with pytest.raises(ValueError, match="this is ruby"):
        notebook.made_of("```ruby\nputs 1\n```\n")
