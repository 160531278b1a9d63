"""Counts the lines of the tree's floors, and removes upper floors in a copy, to test the rest.

A floor is a part of the library that lower parts do not need. `floors.py` prints the sizes.
`floors.py run hosts` removes only floor `run`, then only floor `hosts`; `floors.py run+hosts`
removes both; `floors.py each` removes each alone, then all. Arguments after ``--`` choose among the
tests that remain; by default all of them run. The copy uses this environment's extension unchanged.
"""

import ast
import fnmatch
import functools
import importlib
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import tomllib
import venv
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[2]
COUNTED: Final = {".py", ".pyi", ".hpp", ".cpp", ".sh", ".pml", ".litmus"}
CORE: Final = "core"
TREE: Final = "tree"


@dataclass(frozen=True)
class Floor:
    """A floor's files and names. All other files are the core's.

    Attributes:
        code: Patterns of its files and folders.
        tests: Patterns of the floor's tests. Tests and tools that use it are removed with it, too.
        names: The floor's public names in `shmacc`.
        on: The floors that it needs besides the core; it is removed with each of them.
        stays: Patterns of its files that are never removed: the extension is compiled from them,
            or methods of the core's classes import them.
    """

    code: tuple[str, ...]
    tests: tuple[str, ...]
    names: tuple[str, ...]
    on: tuple[str, ...] = ()
    stays: tuple[str, ...] = ()

    def modules(self) -> set[str]:
        """Return the names of its modules in `shmacc`."""
        return {Path(each).stem for each in self.code if each.startswith("shmacc/")}


# The lowest floor comes first.
FLOORS: Final = {
    "parameters": Floor(
        ("shmacc/_parameters", "shmacc/optim.py", "shmacc/init.py"),
        ("tests/parameters",),
        ("Parameters", "SharedArrays", "Table", "TableSpec", "init", "load", "optim", "save"),
        stays=(
            "shmacc/native/parameters",
            "shmacc/native/python/changes.hpp",
            "shmacc/native/python/parameters.cpp",
            "shmacc/native/python/shared_arrays.hpp",
            "shmacc/native/python/table*.hpp",
        ),
    ),
    "inspection": Floor(
        ("shmacc/inspection", "tools/inspect"),
        ("tests/inspection",),
        ("inspection",),
        stays=(
            "shmacc/native/inspection",
            "shmacc/native/python/inspection.cpp",
            "shmacc/native/python/segment_view.hpp",
        ),
    ),
    "run": Floor(("shmacc/_run",), ("tests/run",), ("run",)),
    "faces": Floor(
        ("shmacc/torch", "shmacc/jax.py"),
        ("tests/other_packages", "tests/accumulators/test_asyncio.py"),
        ("torch", "jax"),
        on=("parameters",),
        stays=(
            "shmacc/_accumulators/coroutines.py",
            "shmacc/_values/conversions",
            "shmacc/_values/foreign.py",
        ),
    ),
    "hosts": Floor(
        ("shmacc/_multihost", "shmacc/ray", "tools/multihost"),
        ("tests/multihost", "tests/on_ray"),
        ("ray",),
        on=("parameters", "run", "faces"),
    ),
}
# Tests of the tree as a whole (conventions, pages, tools) do not run when a floor is removed.
OF_THE_TREE: Final = (
    *("tests/package", "tests/tools", "tests/typing", "tools"),
    "tests/hazards/test_documented_hazards.py",
)
# These tests have environments of their own, with other packages.
ELSEWHERE: Final = ("tests/other_packages", "tests/on_ray")


@functools.cache
def files() -> list[Path]:
    """Return the files of the tree, by their paths below its root."""
    tops = (p for p in ROOT.iterdir() if p.name not in {"build", "dist"} and p.name[0] != ".")
    found = (path for top in tops for path in (top.rglob("*") if top.is_dir() else [top]))
    made = {".pyc", ".so"}
    return sorted(p.relative_to(ROOT) for p in found if p.is_file() and p.suffix not in made)


def matches(path: Path, patterns: tuple[str, ...]) -> bool:
    """Whether the file, or a folder above it, matches one of these patterns."""
    return any(fnmatch.fnmatch(str(p), each) for p in (path, *path.parents) for each in patterns)


def imports(path: Path) -> Iterator[str]:
    """Yield the dotted names that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@functools.cache
def users() -> dict[Path, set[str]]:
    """Return which floors each test and tool uses, directly or through its imports."""
    named, imported, used = {}, {}, {}
    for path in files():
        if path.suffix != ".py" or path.parts[0] not in {"tests", "tools"}:
            continue
        above = path.with_suffix("").parts[1 if path.parts[0] == "tests" else 2 :]
        named[".".join(above)] = path
        imported[path] = set(imports(path))
        text = "\n".join([(ROOT / path).read_text(encoding="utf-8"), *imported[path]])
        used[path] = {
            floor
            for floor, has in FLOORS.items()
            if matches(path, has.code + has.tests)
            or re.search(rf"\bshmacc\.({'|'.join({*has.names, *has.modules()})})\b", text)
            or (floor == "inspection" and re.search(r"\bshmacc[-_]inspect", text))
        }
    before = -1
    while before < (before := sum(map(len, used.values()))):
        for path, names in imported.items():
            both = names | {name.rpartition(".")[0] for name in names}
            used[path].update(*(used[named[name]] for name in both if name in named))
    return used


def sizes() -> dict[str, tuple[int, int]]:
    """Return each floor's number of lines, of code and of tests; the lowest floor comes first."""
    used, counted = users(), Counter[tuple[str, bool]]()
    for path in files():
        if path.suffix in COUNTED and path.parts[0] in {"shmacc", "tests", "tools"}:
            owners = [
                name
                for name, has in FLOORS.items()
                if matches(path, has.code + has.tests + has.stays)
            ]
            if not owners and matches(path, OF_THE_TREE):
                owners = [TREE]
            owner = [CORE, *(each for each in FLOORS if each in used.get(path, ())), *owners][-1]
            lines = (ROOT / path).read_text(encoding="utf-8").count("\n")
            counted[owner, path.parts[0] == "tests"] += lines
    return {name: (counted[name, False], counted[name, True]) for name in (CORE, *FLOORS, TREE)}


def without(text: str, floors: list[str]) -> str:
    """Return ``shmacc/__init__.py`` or ``.pyi`` without the names of these floors."""
    names = "|".join(name for floor in floors for name in FLOORS[floor].names)
    modules = "|".join(name for floor in floors for name in FLOORS[floor].modules())
    text = re.sub(rf'^ *(?:from |")shmacc\.(?:{modules})\b.*\n', "", text, flags=re.MULTILINE)
    text = re.sub(rf'"(?:{names})",\s*', "", text)
    listed = re.compile(r"^from shmacc import .*", re.MULTILINE)
    return listed.sub(lambda line: re.sub(rf"\b(?:{names}), ", "", line[0]), text)


def with_above(floors: list[str]) -> list[str]:
    """Return these floors, and the floors that need them."""
    return [each for each in FLOORS if {each, *FLOORS[each].on}.intersection(floors)]


def left_without(floors: list[str]) -> list[Path]:
    """Return the files that remain when these floors, their tests and their users are removed."""
    used, code = users(), tuple(each for floor in floors for each in FLOORS[floor].code)
    return [p for p in files() if not matches(p, code) and not used.get(p, set()) & set(floors)]


def copy_without(floors: list[str], to: Path) -> None:
    """Copy the tree without these floors."""
    for path in left_without(floors):
        (to / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / path, to / path, follow_symlinks=False)
    for name in ("__init__.py", "__init__.pyi"):
        init = to / "shmacc" / name
        init.write_text(without(init.read_text(encoding="utf-8"), floors), encoding="utf-8")
    extension = importlib.import_module("shmacc._core").__file__
    shutil.copy2(str(extension), to / "shmacc")


def environment(copy: Path) -> Path:
    """Make an environment with the copy and this environment's packages; return its Python."""
    folder = copy / ".venv"
    venv.create(folder, symlinks=True)
    of_it = sysconfig.get_path("purelib", "venv", {"base": str(folder)})
    paths = [copy, copy / "tools" / "inspect", sysconfig.get_path("purelib")]
    Path(of_it, "copy.pth").write_text("\n".join(map(str, paths)), encoding="utf-8")
    python = folder / "bin" / "python"
    with (copy / "pyproject.toml").open("rb") as file:
        scripts = tomllib.load(file)["project"]["scripts"]
    for name, main in scripts.items():
        module, function = main.split(":")
        script = folder / "bin" / name
        code = f"import sys\nfrom {module} import {function}\nsys.exit({function}())\n"
        script.write_text(f"#!{python}\n{code}", encoding="utf-8")
        script.chmod(0o755)
    return python


IMPORT_ALL: Final = """
import pkgutil, shmacc
from shmacc import *
for module in pkgutil.walk_packages(shmacc.__path__, "shmacc."):
    try:
        if not module.name.endswith("__main__"):
            __import__(module.name)
    except ModuleNotFoundError as error:
        if error.name.startswith("shmacc"):  # else a package is missing that users have
            raise
"""


def take_off(floors: list[str], tests: list[str]) -> None:
    """Remove floors in a copy; import and type-check the rest, and run its tests.

    Raises:
        CalledProcessError: One of these checks failed.
    """
    floors = with_above(floors)
    print(f"::: without {', '.join(floors)}", flush=True)
    with tempfile.TemporaryDirectory(prefix="floors-") as folder:
        copy = Path(folder)
        copy_without(floors, copy)
        python = environment(copy)
        every = sorted(each.relative_to(copy) for each in copy.glob("tests/*/test_*.py"))
        left = [
            str(path)
            for path in every
            if not matches(path, OF_THE_TREE + ELSEWHERE)
            and (not tests or matches(path, tuple(tests)))
        ]
        mypy = [sys.executable, "-m", "mypy", "--cache-dir", str(ROOT / "build" / "floors")]
        pytest = [str(python), "-m", "pytest", "--numprocesses", "2", "--dist", "worksteal", *left]
        for command in [str(python), "-W", "error", "-c", IMPORT_ALL], mypy, pytest:
            subprocess.run(command, cwd=copy, check=True)


def main(arguments: list[str]) -> None:
    """Run the command line, which the module's docstring describes."""
    asked, tests = arguments, list[str]()
    if "--" in arguments:
        at = arguments.index("--")
        asked, tests = arguments[:at], arguments[at + 1 :]
    if not asked:
        for name, (code, of_tests) in sizes().items():
            print(f"{name:12} {code:7,} {of_tests:7,}")
    every = "+".join(FLOORS)
    for each in [*FLOORS, every] if asked == ["each"] else asked:
        take_off((every if each == "upper" else each).split("+"), tests)


if __name__ == "__main__":
    main(sys.argv[1:])
