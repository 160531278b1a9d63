"""The floors of docs/architecture.md have the sizes given there, and import from no higher one."""

import re
from typing import Final

import pytest

import floors
import shmacc

PAGE: Final = (floors.ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TOLERANCE: Final = 0.05


def number(text: str) -> int:
    return int(text.replace(",", ""))


def test_the_page_begins_with_the_size_of_each_floor() -> None:
    assert re.findall(r"^#+ .*", PAGE, re.MULTILINE)[1] == "## Floors"
    rows = re.findall(r"^\| (\w+) \| ([\d,]+) \| ([\d,]+) \|", PAGE, re.MULTILINE)
    said = {floor: (number(code), number(tests)) for floor, code, tests in rows}
    assert said == {
        floor: pytest.approx(lines, rel=TOLERANCE) for floor, lines in floors.sizes().items()
    }


def test_the_page_names_three_files_to_read_for_a_change_and_their_lines() -> None:
    table = PAGE.partition("| you change |")[2].partition("\n\n")[0]
    for row in table.splitlines()[2:]:
        _, _, files, said, _ = row.split("|")
        paths = [floors.ROOT / "shmacc" / name for name in re.findall("`([^`]+)`", files)]
        assert len(paths) == 3, row
        lines = sum(path.read_text(encoding="utf-8").count("\n") for path in paths)
        assert number(said) == pytest.approx(lines, rel=TOLERANCE), row


@pytest.mark.parametrize("floor", floors.FLOORS)
def test_no_module_imports_from_a_floor_that_it_does_not_stand_on(floor: str) -> None:
    gone = floors.with_above([floor])
    modules = {name for each in gone for name in floors.FLOORS[each].modules()}
    for path in floors.left_without(gone):
        if path.parts[0] == "shmacc" and path.suffix == ".py" and path.name != "__init__.py":
            names = [name.split(".") for name in floors.imports(path)]
            above = {name[1] for name in names if name[0] == "shmacc" and name[1:]}
            assert not above & modules, path


@pytest.mark.parametrize("name", ["__init__.py", "__init__.pyi"])
def test_public_names_of_a_floor_disappear_with_the_floor(name: str) -> None:
    text = (floors.ROOT / "shmacc" / name).read_text(encoding="utf-8")
    left = floors.without(text, list(floors.FLOORS))
    own = {each for floor in floors.FLOORS.values() for each in floor.names}
    assert {each for each in shmacc.__all__ if f'"{each}"' not in left} <= own
    assert not {each for each in own if re.search(rf'"{each}"|\nfrom .*\b{each}\b', left)}
