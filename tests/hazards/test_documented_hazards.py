"""docs/hazards.md names all tests of this folder; the code names the reports of that page."""

import re
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
HAZARDS: Final = Path(__file__).parent
PAGE: Final = (ROOT / "docs" / "hazards.md").read_text(encoding="utf-8")
# These files test the tests.
NOT_FOR_USERS: Final = {
    *("test_damaged_layout.py", "test_soak_books.py", "test_soak_training.py", Path(__file__).name)
}


def named() -> set[Path]:
    """Return the test files that the page names; those without a directory are in this folder."""
    files = re.findall(r"`((?:tests/\w+/)?test_\w+\.py)`", PAGE)
    return {ROOT / file if file.startswith("tests/") else HAZARDS / file for file in files}


def test_all_tests_that_the_page_names_exist() -> None:
    missing = sorted(str(file) for file in named() if not file.exists())
    assert not missing


def test_the_page_names_all_hazards() -> None:
    unnamed = {file.name for file in HAZARDS.glob("test_*.py") if file not in named()}
    assert unnamed <= NOT_FOR_USERS, f"docs/hazards.md does not say what these show: {unnamed}"


def test_every_report_of_a_hazard_is_named_in_the_code() -> None:
    """The code names at least one report from each row of the page, except Hogwild's rows."""
    files = (path for kind in ("*.py", "*.hpp", "*.cpp") for path in (ROOT / "shmacc").rglob(kind))
    code = "".join(path.read_text(encoding="utf-8") for path in files)
    in_code = set(re.findall(r"\w#(\d+)", code))
    rows = [row for row in re.findall(r"^\| .*", PAGE, re.MULTILINE) if "Hogwild" not in row]
    reports = [found for row in rows if (found := set(re.findall(r"#(\d+)", row.split(" | ")[0])))]
    assert all(of_row & in_code for of_row in reports)
    assert in_code <= set().union(*reports)
