"""What the types promise, as type checkers see it, and what the extension's stub says of it."""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, is_typeddict

import pytest

import shmacc
from shmacc import _core, inspection
from shmacc._layout import reports

if TYPE_CHECKING:
    from types import ModuleType

ROOT: Final = Path(__file__).parents[2]
TYPING: Final = ROOT / "tests" / "typing"
PYRIGHT: Final = shutil.which("pyright", path=str(Path(sys.executable).parent))
# Whatever the first run of pyright fetches from its registry may take a while.
MINUTES: Final = 300


def _mypy(*files: Path, how: str = "--strict") -> set[tuple[str, int]]:
    """Files and lines that mypy has errors in."""
    done = subprocess.run(
        [sys.executable, "-m", "mypy", how, "--no-incremental", "--config-file=", *files],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        timeout=MINUTES,
    )
    assert done.returncode in {0, 1}, done.stderr
    found = re.findall(r"^(.+?):(\d+): error", done.stdout, re.MULTILINE)
    return {(Path(file).name, int(line)) for file, line in found}


@cache
def _pyright_command() -> str:
    """Its path; skips where it does not run."""
    if PYRIGHT is None or subprocess.run([PYRIGHT, "--version"], check=False).returncode != 0:
        pytest.skip("pyright is not installed, or cannot be fetched")
    return PYRIGHT


def _pyright(*files: Path, how: str = "") -> set[tuple[str, int]]:
    """Files and lines that pyright has errors in, or warnings; it is as strict with all."""
    del how
    done = subprocess.run(
        [_pyright_command(), "--outputjson", "--pythonpath", sys.executable, *files],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        timeout=MINUTES,
    )
    said: dict[str, Any] = json.loads(done.stdout)
    return {
        (Path(entry["file"]).name, entry["range"]["start"]["line"] + 1)
        for entry in said["generalDiagnostics"]
        if entry["severity"] != "information" and entry.get("rule") != "reportUnusedExpression"
    }


CHECKERS: Final = pytest.mark.parametrize("check", [_mypy, _pyright], ids=["mypy", "pyright"])


@cache
def _found_in(check: Any) -> dict[str, set[int]]:
    """By file, the lines that it has errors in; it starts once for both files."""
    found = check(TYPING / "usage.py", TYPING / "mistakes.py")
    return {name: {line for file, line in found if file == name} for name, _ in found}


@pytest.mark.timeout(MINUTES)
@CHECKERS
def test_programs_have_the_types_of_the_contract(check: Any) -> None:
    found = _found_in(check)
    assert found.keys() == {"mistakes.py"}, found


@pytest.mark.timeout(MINUTES)
@CHECKERS
def test_misspelt_names_and_wrong_arguments_are_errors(check: Any) -> None:
    lines = (TYPING / "mistakes.py").read_text(encoding="utf-8").splitlines()
    wrong = {i for i, line in enumerate(lines, 1) if line.endswith("# wrong")}
    assert len(wrong) > 10
    assert _found_in(check)["mistakes.py"] == wrong


@pytest.mark.timeout(MINUTES)
@CHECKERS
def test_the_readmes_programs(check: Any, tmp_path: Path) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert programs
    files = []
    for i, program in enumerate(programs):
        files.append(tmp_path / f"program_{i}.py")
        files[-1].write_text(program, encoding="utf-8")
    assert check(*files, how="--check-untyped-defs") == set()


@pytest.mark.timeout(MINUTES)
def test_no_public_type_is_left_to_inference() -> None:
    """Checkers infer differently; `pyright --verifytypes` knows all that a user can get at."""
    pyright = _pyright_command()
    done = subprocess.run(
        [pyright, "--verifytypes", "shmacc", "--ignoreexternal", "--outputjson"],
        capture_output=True,
        text=True,
        check=False,
        cwd="/",
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        timeout=MINUTES,
    )
    symbols = json.loads(done.stdout)["typeCompleteness"]["symbols"]
    assert sum(symbol["isExported"] for symbol in symbols) > 200
    causes = {
        (symbol["name"], diagnostic["message"].partition("\n")[0])
        for symbol in symbols
        for diagnostic in symbol["diagnostics"]
    }
    assert {name for name, message in causes if "missing type annotation" in message} == set()
    # Those of torch and SciPy, which need not be installed here.
    unknown = {name for name, message in causes if message.endswith(" is unknown")}
    assert {name.rpartition(".")[0] for name in unknown} <= {
        "shmacc._records.taken.SparseTaken",
        "shmacc.torch._chief.Chief",
        "shmacc.torch._replica.Replica",
        "shmacc.torch._replicas.AsyncReplicas",
        "shmacc.torch._replicas.SyncReplicas",
        "shmacc.torch._viewer.Viewer",
    }


@pytest.mark.parametrize("package", [shmacc, inspection])
def test_one_list_of_names(package: ModuleType) -> None:
    """The stub that checkers read has exactly what there is at run time, under the same names."""
    assert package.__file__ is not None
    stub = ast.parse(Path(package.__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    listed = next(
        ast.literal_eval(node.value)
        for node in stub.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__"
    )
    assert sorted(listed) == sorted(package.__all__)
    for node in stub.body:
        if isinstance(node, ast.ImportFrom) and node.module != package.__name__:
            home = __import__(str(node.module), fromlist=["*"])
            for name in node.names:
                assert getattr(package, name.name) is getattr(home, name.name)
    with pytest.raises(AttributeError, match="no attribute 'nothing_of_that_name'"):
        package.nothing_of_that_name  # noqa: B018 - the look is what is tested


def _parameters(function: Any) -> list[list[str]]:
    """Names of the parameters of each overload, as nanobind knows them."""
    signatures = (function.__doc__ or "").splitlines()[:1]
    return [
        re.findall(r"[(,] ?(\w+)(?=[:,)=])", re.sub(r"\[[^()]*?\]", "", signature))
        for signature in signatures
    ]


def _described(body: list[ast.stmt]) -> dict[str, list[str] | None]:
    """What a stub says: functions with their parameters, and everything else."""
    out: dict[str, list[str] | None] = {}
    for node in body:
        if isinstance(node, ast.FunctionDef):
            is_property = any(ast.unparse(d) == "property" for d in node.decorator_list)
            out[node.name] = None if is_property else [a.arg for a in node.args.args]
        elif isinstance(node, ast.AnnAssign):
            out[ast.unparse(node.target)] = None
    return out


def _is_described(name: str, value: Any) -> bool:
    """Whether a stub says it: what is public, and the special methods of the extension's own."""
    if name.startswith("__"):
        return str(value.__doc__).startswith(f"{name}(")
    return not name.startswith("_")


def _there_is(owner: Any) -> dict[str, list[str] | None]:
    values = {name: getattr(owner, name) for name in vars(owner)}
    return {
        name: _parameters(value)[0] if callable(value) else None
        for name, value in values.items()
        if _is_described(name, value) and not inspect.isclass(value)
    }


def test_the_extensions_stub() -> None:
    assert shmacc.__file__ is not None
    stub = ast.parse((Path(shmacc.__file__).parent / "_core.pyi").read_text(encoding="utf-8"))
    classes = {node.name: node for node in stub.body if isinstance(node, ast.ClassDef)}
    assert set(classes) == {name for name, value in vars(_core).items() if inspect.isclass(value)}
    assert _described(stub.body) == _there_is(_core)
    for name, node in classes.items():
        assert _described(node.body) == _there_is(getattr(_core, name)), name


# What nanobind calls these: a TypedDict is a dict to it, and the elements of a list or a tuple that
# the extension makes itself are not told.
_TYPED_DICTS: Final = {name for name, value in vars(reports).items() if is_typeddict(value)}
_ALIASES: Final = {"Shape": "tuple | None", "Terms": "tuple"}


def _alternatives(annotation: str) -> set[str]:
    """The parts of a union, in nanobind's words."""
    plain = annotation.replace("shmacc._core.", "").replace("collections.abc.Sequence", "list")
    for alias, meaning in _ALIASES.items():
        plain = re.sub(rf"\b{alias}\b", meaning, plain)
    return {part.strip() for part in re.split(r"\|(?![^\[]*\])", plain)}


def _fits(said: str, native: str) -> bool:
    """Whether what a stub says of a value is what nanobind says, or more."""
    here, there = _alternatives(said), _alternatives(native)
    if "object" in there:  # anything, and checked by hand
        return True
    heads = {part.partition("[")[0] for part in here}
    heads = {"dict" if head in _TYPED_DICTS else head for head in heads}
    with_elements = {part for part in there if "[" in part}
    return heads == {part.partition("[")[0] for part in there} and with_elements <= here


def _annotations(function: ast.FunctionDef) -> dict[str, str]:
    """Types of the parameters that have one, and of the result."""
    named = {arg.arg: ast.unparse(arg.annotation) for arg in function.args.args if arg.annotation}
    return {**named, "return": ast.unparse(function.returns) if function.returns else "None"}


def _native_signature(owner: Any, name: str) -> ast.FunctionDef:
    value = vars(owner)[name]
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    text = re.sub(r"^def \(", "def _(", value.__nb_signature__[0][0])
    (parsed,) = ast.parse(re.sub(r"\\\d+", "0", text) + ": ...").body
    assert isinstance(parsed, ast.FunctionDef)
    return parsed


def test_the_types_in_the_extensions_stub() -> None:
    assert shmacc.__file__ is not None
    stub = ast.parse((Path(shmacc.__file__).parent / "_core.pyi").read_text(encoding="utf-8"))
    bodies = {"": stub.body}
    bodies |= {node.name: node.body for node in stub.body if isinstance(node, ast.ClassDef)}
    wrong, compared = [], 0
    for owner, body in bodies.items():
        for node in body:
            if isinstance(node, ast.FunctionDef) and ast.unparse(node.args) != "self":
                there: Any = getattr(_core, owner) if owner else _core
                natives = _annotations(_native_signature(there, node.name))
                said = _annotations(node)
                assert said.keys() == natives.keys(), node.name
                compared += len(said)
                wrong += [
                    f"{owner}.{node.name}, {what}: {said[what]} is {native}"
                    for what, native in natives.items()
                    if not _fits(said[what], native)
                ]
    assert wrong == []
    assert compared > 100
    numbers = {
        ast.unparse(node.target): ast.unparse(node.annotation)
        for node in stub.body
        if isinstance(node, ast.AnnAssign)
    }
    for name, said_type in numbers.items():
        value = getattr(_core, name)
        of_dict = type(value) is dict and {(type(k), type(v)) for k, v in value.items()}
        assert said_type == type(value).__name__ or (
            said_type == "dict[str, int]" and of_dict == {(str, int)}
        ), name


@pytest.mark.parametrize(
    ("said", "native", "fits"),
    [
        ("int", "int", True),
        ("int", "str", False),
        ("int", "int | None", False),
        ("int | None", "int | None", True),
        ("npt.NDArray[np.int64]", "object", True),
        ("TableState", "dict", True),
        ("TableState", "list", False),
        ("list[Table]", "list", True),
        ("list[int]", "list[int]", True),
        ("list[str]", "list[int]", False),
        ("list[int] | None", "collections.abc.Sequence[int] | None", True),
        ("Shape", "tuple | None", True),
        ("Shape", "tuple", False),
        ("TakenRound", "shmacc._core.TakenRound", True),
        ("Handle", "shmacc._core.TakenRound", False),
    ],
)
def test_what_fits(said: str, native: str, fits: bool) -> None:
    assert _fits(said, native) == fits
