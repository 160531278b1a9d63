"""The examples in docs/examples: each runs as a reader would run it, and asserts its own result."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

import pytest
from helpers import pages
from helpers.thrice import Thrice

if TYPE_CHECKING:
    from pathlib import Path

DOCS: Final = pages.ROOT / "docs"
EXAMPLES: Final = pages.examples(with_others=False)


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_comes_to_its_result_whatever_was_before(
    example: Path, tmp_path: Path, namespace: str
) -> None:
    Thrice(example, tmp_path, namespace).run()
    assert "assert" in example.read_text()


def test_the_training_loop_has_thirty_lines() -> None:
    assert len((DOCS / "examples" / "training_loop.py").read_text().splitlines()) <= 30


def test_the_page_of_examples_links_every_example() -> None:
    page = (DOCS / "examples" / "README.md").read_text()
    linked = re.findall(r"\((\w+\.py)\)", page)
    assert set(linked) == {example.name for example in EXAMPLES}
