"""Type checkers see the promised types, and the extension's stub describes it truly."""

import ast
import json
import os
import re
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Final, is_typeddict

import pytest
from helpers.support import run_to_end

import shmacc
from shmacc import _core, inspection
from shmacc._base import reports

ROOT: Final = Path(__file__).parents[2]
TYPING: Final = ROOT / "tests" / "typing"
PYRIGHT: Final = shutil.which("pyright", path=str(Path(sys.executable).parent))
# The first run of pyright fetches a package from its registry, which may take a while.
MINUTES: Final = 300


def _mypy(*files: Path) -> set[tuple[str, int]]:
    """Return the files and lines in which mypy finds errors."""
    done = run_to_end(
        [sys.executable, "-m", "mypy", "--strict", "--no-incremental", "--config-file=", *files],
        status=None,
        cwd="/",
        timeout=MINUTES,
    )
    assert done.returncode in {0, 1}, done.stderr
    found = re.findall(r"^(.+?):(\d+): error", done.stdout, re.MULTILINE)
    return {(Path(file).name, int(line)) for file, line in found}


def _pyright(*arguments: str | Path) -> dict[str, Any]:
    """Return the output of pyright; skip the test if pyright does not run here."""
    if PYRIGHT is None:
        pytest.skip("pyright is not installed")
    done = run_to_end(
        [PYRIGHT, "--outputjson", *arguments],
        status=None,
        cwd="/",
        env=os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        timeout=MINUTES,
    )
    if not done.stdout:
        pytest.skip(f"pyright cannot be fetched: {done.stderr}")
    said: dict[str, Any] = json.loads(done.stdout)
    return said


def _pyrights(*files: Path) -> set[tuple[str, int]]:
    """Return the files and lines in which pyright finds errors or warnings."""
    return {
        (Path(entry["file"]).name, entry["range"]["start"]["line"] + 1)
        for entry in _pyright("--pythonpath", sys.executable, *files)["generalDiagnostics"]
        if entry["severity"] != "information" and entry.get("rule") != "reportUnusedExpression"
    }


@pytest.mark.timeout(MINUTES)
@pytest.mark.parametrize("check", [_mypy, _pyrights], ids=["mypy", "pyright"])
def test_checkers_find_exactly_the_mistakes(check: Any, tmp_path: Path) -> None:
    """Only the lines marked "# wrong" are errors; README's programs and usage.py have none."""
    mistakes = (TYPING / "mistakes.py").read_text(encoding="utf-8").splitlines()
    wrong = {("mistakes.py", i) for i, line in enumerate(mistakes, 1) if line.endswith("# wrong")}
    assert len(wrong) > 10
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    programs = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert programs
    files = [TYPING / "usage.py", TYPING / "mistakes.py"]
    for i, program in enumerate(programs):
        files.append(tmp_path / f"program_{i}.py")
        files[-1].write_text(f"# mypy: allow-untyped-defs, allow-untyped-calls\n{program}")
    assert check(*files) == wrong


@pytest.mark.timeout(MINUTES)
def test_no_public_type_is_left_to_inference() -> None:
    """Checkers infer types differently. `pyright --verifytypes` checks all that users can reach."""
    said = _pyright("--verifytypes", "shmacc", "--ignoreexternal")
    symbols = said["typeCompleteness"]["symbols"]
    assert sum(symbol["isExported"] for symbol in symbols) > 200
    causes = {
        (symbol["name"], diagnostic["message"].partition("\n")[0])
        for symbol in symbols
        for diagnostic in symbol["diagnostics"]
    }
    assert {name for name, message in causes if "missing type annotation" in message} == set()
    # Types of torch and SciPy are unknown where these are not installed.
    unknown = {name for name, message in causes if message.endswith(" is unknown")}
    assert {name.rpartition(".")[0] for name in unknown} <= {
        "shmacc._accumulators.taken.SparseTaken",
        "shmacc.torch._chief.Chief",
        "shmacc.torch._replica.Replica",
        "shmacc.torch._replicas.AsyncReplicas",
        "shmacc.torch._replicas.SyncReplicas",
        "shmacc.torch._viewer.Viewer",
    }


@pytest.mark.parametrize("package", [shmacc, inspection])
def test_the_stub_has_exactly_the_public_names(package: ModuleType) -> None:
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
        package.nothing_of_that_name  # noqa: B018 - the access is what is tested


# nanobind names types in its own way: a TypedDict is a dict; lists and tuples that the extension
# itself makes have no types of elements.
_TYPED_DICTS: Final = {name for name, value in vars(reports).items() if is_typeddict(value)}
_ALIASES: Final = {"Shape": "tuple | None", "Terms": "tuple"}


def _alternatives(annotation: str) -> set[str]:
    """Return the parts of a union, as nanobind names them."""
    plain = annotation.replace("shmacc._core.", "").replace("collections.abc.Sequence", "list")
    for alias, meaning in _ALIASES.items():
        plain = re.sub(rf"\b{alias}\b", meaning, plain)
    return {part.strip() for part in re.split(r"\|(?![^\[]*\])", plain)}


def _fits(said: str, native: str) -> bool:
    """Whether a stub's type is nanobind's, or says more about its elements."""
    here, there = _alternatives(said), _alternatives(native)
    if "object" in there:  # the extension itself checks what it gets
        return True
    heads = {part.partition("[")[0] for part in here}
    heads = {"dict" if head in _TYPED_DICTS else head for head in heads}
    with_elements = {part for part in there if "[" in part}
    return heads == {part.partition("[")[0] for part in there} and with_elements <= here


def _annotations(function: ast.FunctionDef) -> dict[str, str]:
    """Return the types of the annotated parameters, and of the result."""
    named = {arg.arg: ast.unparse(arg.annotation) for arg in function.args.args if arg.annotation}
    return {**named, "return": ast.unparse(function.returns) if function.returns else "None"}


def _native_signature(value: Any) -> ast.FunctionDef:
    text = re.sub(r"^def \(", "def _(", value.__nb_signature__[0][0])
    (parsed,) = ast.parse(re.sub(r"\\\d+", "0", text) + ": ...").body
    assert isinstance(parsed, ast.FunctionDef)
    return parsed


def _is_described(name: str, value: Any) -> bool:
    """Whether the stub must have this name: if it is public, or a special method of our own."""
    if name.startswith("__"):
        return str(value.__doc__).startswith(f"{name}(")
    return not name.startswith("_")


def test_the_extensions_stub_fits_the_extension() -> None:
    """The stub has all names of the extension, and the names and types of all parameters."""
    assert shmacc.__file__ is not None
    stub = ast.parse((Path(shmacc.__file__).parent / "_core.pyi").read_text(encoding="utf-8"))
    bodies = {"": stub.body}
    bodies |= {node.name: node.body for node in stub.body if isinstance(node, ast.ClassDef)}
    wrong, compared = [], 0
    for owner, body in bodies.items():
        there: Any = getattr(_core, owner) if owner else _core
        described = {
            ast.unparse(node.target) if isinstance(node, ast.AnnAssign) else node.name
            for node in body
            if isinstance(node, ast.AnnAssign | ast.FunctionDef | ast.ClassDef)
        }
        assert described == {n for n in vars(there) if _is_described(n, getattr(there, n))}, owner
        for node in body:
            if isinstance(node, ast.AnnAssign) and not owner:
                value = getattr(there, ast.unparse(node.target))
                kind = type(value).__name__
                if type(value) is dict and {(type(k), type(v)) for k, v in value.items()} == {
                    (str, int)
                }:
                    kind = "dict[str, int]"
                if type(value) is tuple and {type(each) for each in value} == {str}:
                    kind = "tuple[str, ...]"
                assert ast.unparse(node.annotation) == kind, ast.unparse(node)
            if not isinstance(node, ast.FunctionDef) or ast.unparse(node.args) == "self":
                continue
            value = vars(there)[node.name]
            native = _native_signature(getattr(value, "__func__", value))
            names = [arg.arg for arg in native.args.args]
            assert [arg.arg for arg in node.args.args] == names, node.name
            said, natives = _annotations(node), _annotations(native)
            assert said.keys() == natives.keys(), node.name
            compared += len(said)
            wrong += [
                f"{owner}.{node.name}, {what}: {said[what]} is {native_type}"
                for what, native_type in natives.items()
                if not _fits(said[what], native_type)
            ]
    assert wrong == []
    assert compared > 100
