"""Programs of the pages, and examples, that use other packages: run as a reader would run them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pytest
from helpers import pages
from helpers.thrice import Thrice

if TYPE_CHECKING:
    from pathlib import Path

# Several processes that each import, and compile, for seconds; more on a busy machine.
SECONDS: Final = 90
pytestmark = pytest.mark.timeout(5 * SECONDS)

PROGRAMS: Final = pages.programs(with_others=True)
EXAMPLES: Final = pages.examples(with_others=True)


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_runs_whatever_was_before(name: str, tmp_path: Path, namespace: str) -> None:
    Thrice.of_text(PROGRAMS[name], tmp_path, namespace, SECONDS, typos=(2,)).run()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_comes_to_its_result_whatever_was_before(
    example: Path, tmp_path: Path, namespace: str
) -> None:
    Thrice(example, tmp_path, namespace, SECONDS, typos=(2,)).run()
    assert "assert" in example.read_text()


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_a_page_links_it(example: Path) -> None:
    link = f"({example.relative_to(pages.ROOT / 'docs')})"
    assert any(link in page.read_text() for page in pages.PAGES)
