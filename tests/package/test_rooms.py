"""The library's folders import downwards only, and the lists of its files are complete."""

from __future__ import annotations

import ast
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT: Final = Path(__file__).parents[2]
LIBRARY: Final = ROOT / "shmacc"
NATIVE: Final = LIBRARY / "native"
TOOL: Final = ROOT / "tools" / "chores" / "file_lists.py"

_LISTS: Final = runpy.run_path(str(TOOL))

# Folders of shmacc/, and modules that they import, from the ground up.
ORDER: Final = (
    "_layout",
    "_records",
    "_gradients",
    "optim",
    "init",
    "_opening",
    "_accumulators",
    "inspection",
    "torch",
    "_multihost",
    "ray",
)
NATIVE_FOLDERS: Final[tuple[str, ...]] = _LISTS["NATIVE_FOLDERS"]

# What every folder may import.
GROUND: Final = {"_core", "_lazy", "errors"}
COMPILER: Final = os.environ.get("CXX", "c++")


def imported(source: str) -> Iterator[str]:
    """What a module imports of this library, anywhere in it: folders, and modules beside them."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        for name in names:
            package, _, rest = name.partition(".")
            if package == "shmacc":
                yield rest.split(".")[0]


def upward_imports(name: str, source: str) -> set[str]:
    """What a module in this folder, or of this name, imports and must not."""
    allowed = GROUND.union(ORDER[: ORDER.index(name) + 1])
    return set(imported(source)) - allowed


def upward_includes(folder: str, source: str) -> set[str]:
    """What a file in this folder of C++ includes, and must not."""
    included = re.findall(r'^#include "([^"]+)"', source, re.MULTILINE)
    allowed = NATIVE_FOLDERS[: NATIVE_FOLDERS.index(folder) + 1]
    return {path for path in included if path.split("/")[0] not in allowed}


def test_every_folder_has_its_place_in_the_order() -> None:
    packages = {path.parent.name for path in LIBRARY.glob("*/__init__.py")}
    assert packages <= set(ORDER)
    assert all((LIBRARY / f"{name}.py").is_file() for name in set(ORDER) - packages)
    assert {path.name for path in NATIVE.iterdir() if path.is_dir()} == set(NATIVE_FOLDERS)


@pytest.mark.parametrize("name", ORDER)
def test_imports_are_only_from_what_is_below(name: str) -> None:
    for path in [*(LIBRARY / name).rglob("*.py"), *LIBRARY.glob(f"{name}.py")]:
        assert upward_imports(name, path.read_text(encoding="utf-8")) == set(), path


@pytest.mark.parametrize("folder", NATIVE_FOLDERS)
def test_a_folder_includes_only_from_those_below_it(folder: str) -> None:
    for path in (NATIVE / folder).iterdir():
        assert upward_includes(folder, path.read_text(encoding="utf-8")) == set(), path


def test_an_upward_import_is_seen() -> None:
    source = "def later():\n    from shmacc._accumulators.group import AccumulatorGroup\n"
    assert upward_imports("_gradients", source) == {"_accumulators"}
    assert upward_imports("inspection", source) == set()
    assert upward_imports("_layout", "import shmacc.ray\nfrom shmacc import _core, jax") == {
        "ray",
        "jax",
    }


def test_an_upward_include_is_seen() -> None:
    source = '#include <vector>\n\n#include "python/python.hpp"\n#include "segment/layout.hpp"\n'
    assert upward_includes("rows", source) == {"python/python.hpp"}


@pytest.mark.timeout(600)
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"{COMPILER} is not installed")
def test_all_below_the_folder_python_compiles_without_python() -> None:
    headers = [
        path.relative_to(NATIVE)
        for folder in NATIVE_FOLDERS[:-1]
        for path in (NATIVE / folder).iterdir()
    ]
    ran = subprocess.run(
        [COMPILER, "-std=c++17", "-fsyntax-only", f"-I{NATIVE}", "-x", "c++", "-"],
        input="".join(f'#include "{header}"\n' for header in headers),
        capture_output=True,
        text=True,
        timeout=580,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr


def test_the_list_of_cpp_files_is_what_the_files_say() -> None:
    ran = subprocess.run(
        [sys.executable, str(TOOL), "--check"], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, f"{ran.stderr}run {TOOL.relative_to(ROOT)}"


# The protocol of many hosts is driven by engines, and so by what measures and simulates it.
INTERNAL: Final = {
    "multihost/shmacc_simulate": {"shmacc._multihost"},
    "multihost/ray_bench.py": {"shmacc._multihost", "shmacc.ray._parts"},
}


def private_imports(source: str) -> set[str]:
    """Private modules of the library that a program imports, up to the first private name."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            match = re.match(r"shmacc\.(\w+\.)*?_\w+", name)
            found |= {match[0]} if match else set()
    return found


def test_tools_use_what_is_public() -> None:
    used: dict[str, set[str]] = {}
    for path in (ROOT / "tools").rglob("*.py"):
        if private := private_imports(path.read_text(encoding="utf-8")):
            tool = str(Path(*path.relative_to(ROOT / "tools").parts[:2]))
            used.setdefault(tool, set()).update(private)
    assert used == INTERNAL


def test_a_private_import_is_seen() -> None:
    source = "import shmacc\nfrom shmacc import errors, _core\nfrom shmacc.ray._parts import Link\n"
    assert private_imports(source) == {"shmacc._core", "shmacc.ray._parts"}
