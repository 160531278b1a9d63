"""The library's folders import downwards only, and the lists of its files are complete."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).parents[2]
LIBRARY: Final = ROOT / "shmacc"
NATIVE: Final = LIBRARY / "native"

# Folders and modules of shmacc/, the lowest first. GROUND has modules that are below all of these.
ORDER: Final = (
    *("_base", "_values", "optim", "init", "_segment", "testing", "inspection"),
    *("_accumulators", "_parameters", "_attach", "sparse", "raw_ops", "jax", "torch"),
    *("_run", "_multihost", "ray"),
)
NATIVE_FILES: Final = {
    folder: re.findall(r"`([\w.]+)`", files)
    for folder, files in re.findall(
        r"^\| `(\w+)/` \| .* \| (.*) \|$", (NATIVE / "README.md").read_text(), re.MULTILINE
    )
}
NATIVE_FOLDERS: Final = tuple(NATIVE_FILES)

# Every folder may import these.
GROUND: Final = {"_core", "_lazy", "_tree", "_version", "_child_errors", "errors"}


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted name of everything that a module imports, at any place."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def imported(path: Path) -> Iterator[str]:
    """Return everything that a module imports from this library."""
    return (name for name in imports(path) if name.startswith("shmacc."))


def test_every_folder_has_its_place_in_the_order() -> None:
    packages = {path.parent.name for path in LIBRARY.glob("*/__init__.py")}
    modules = {path.stem for path in LIBRARY.glob("*.py")} - {"__init__"}
    assert packages | modules | {"_core"} == {*ORDER, *GROUND}
    assert {path.name for path in NATIVE.iterdir() if path.is_dir()} == set(NATIVE_FOLDERS)


def test_folders_have_the_same_names_in_both_languages() -> None:
    """Only C++ has a folder for the protocol, and one for conversions to and from Python."""
    folders = [name.lstrip("_") for name in ORDER if (LIBRARY / name).is_dir()]
    both = [name for name in NATIVE_FOLDERS if name not in {"protocol", "python"}]
    assert both == [name for name in folders if name in NATIVE_FOLDERS], "in the same order"


def test_python_folders_import_only_from_lower_folders() -> None:
    for number, name in enumerate(ORDER, 1):
        allowed = GROUND.union(ORDER[:number])
        for path in [*(LIBRARY / name).rglob("*.py"), *LIBRARY.glob(f"{name}.py")]:
            assert {each.split(".")[1] for each in imported(path)} <= allowed, path


def test_the_lowest_modules_import_nothing_of_the_package() -> None:
    for name in GROUND - {"_core"}:
        assert not list(imported(LIBRARY / f"{name}.py")), name


@pytest.mark.parametrize("top", [LIBRARY, *sorted((ROOT / "tools").glob("*/shmacc_*"))])
def test_no_files_import_each_other_in_a_circle(top: Path) -> None:
    """Imports for annotations count. Files that import no other are removed, until none is left."""
    files = {
        ".".join(path.relative_to(top.parent).with_suffix("").parts): path
        for path in top.rglob("*.py")
        if path.stem != "__init__"
    }
    needs = {}
    for module, path in files.items():
        names = set(imports(path))
        needs[module] = names.union(name.rpartition(".")[0] for name in names) & files.keys()
    while free := {module for module, needed in needs.items() if not needed}:
        needs = {module: needed - free for module, needed in needs.items() if module not in free}
    assert not needs


def test_native_folders_include_only_from_lower_folders() -> None:
    """Only the highest folder includes headers of Python."""
    for number, folder in enumerate(NATIVE_FOLDERS, 1):
        for path in (NATIVE / folder).iterdir():
            source = path.read_text(encoding="utf-8")
            own = re.findall(r'^#include "([^"/]+)', source, re.MULTILINE)
            assert set(own) <= set(NATIVE_FOLDERS[:number]), path
            if folder != NATIVE_FOLDERS[-1]:
                of_python = r"^#include <(nanobind|numpy|Python)\b"
                assert not re.search(of_python, source, re.MULTILINE), path


def test_the_list_of_cpp_files_is_complete_and_each_file_has_a_head() -> None:
    for folder, listed in NATIVE_FILES.items():
        assert sorted(listed) == sorted(path.name for path in (NATIVE / folder).iterdir())
        for name in listed:
            head = re.match(r"(// .*\n)+", (NATIVE / folder / name).read_text(encoding="utf-8"))
            assert head, name
            assert re.search(r"\.\s", head[0]), f"{name} does not begin with a sentence"


def test_tools_import_only_the_listed_private_modules() -> None:
    used: dict[str, set[str]] = {}
    for path in (ROOT / "tools").rglob("*.py"):
        tool = str(Path(*path.relative_to(ROOT / "tools").parts[:2]))
        for name in imported(path):
            if private := re.match(r"shmacc\.(\w+\.)*?_\w+", name):  # up to the first private name
                used.setdefault(tool, set()).add(private[0])
    # Tools that measure or search the protocol of many hosts must drive it as the library does.
    # The manual page of `shmacc-run` is written from the command's parser, which is private.
    assert used == {
        "inspect/reference.py": {"shmacc._run"},
        "multihost/shmacc_hosts": {"shmacc._base", "shmacc._multihost"},
        "multihost/ray_bench.py": {"shmacc._multihost", "shmacc.ray._parts"},
    }
