"""The first import works in the reader's directory, or says why not and what to do.

The tests marked `installs` build the package as a user does, in environments of their own, with
build tools from the package index: `make dist` runs them.
"""

import re
import shutil
import sys
import venv
from pathlib import Path

import pytest
from helpers import interpreter
from helpers.pages import FIRST, ROOT, run

_WHERE = "import shmacc; print(shmacc.__file__)"


def _says_what_to_do(words: str, folder: Path) -> bool:
    """Whether the last line says what to do if shmacc is installed, and if it is not."""
    *_, last = words.splitlines()
    return (
        last.startswith(f"ImportError: {folder / 'shmacc'} is the source of shmacc")
        and "start Python in another folder, or with -P" in last
        and f"`pip install {folder}`" in last
    )


def test_an_import_in_the_checkout_says_that_the_tree_has_no_extension(tmp_path: Path) -> None:
    ran = run([sys.executable, "-c", _WHERE], ROOT, status=1)
    assert _says_what_to_do(ran.stderr, ROOT)
    # The same holds for a script beside the source, whatever it imports first.
    (tmp_path / "shmacc").symlink_to(ROOT / "shmacc")
    script = tmp_path / "script.py"
    for first in ("import shmacc.inspection", "from shmacc import attach"):
        script.write_text(first)
        ran = run([sys.executable, script], Path("/"), status=1)
        assert _says_what_to_do(ran.stderr, tmp_path)


def test_only_an_orphaned_semaphore_needs_posix_ipc() -> None:
    script = """
        import sys
        sys.modules["posix_ipc"] = None  # its import fails
        import numpy as np
        import shmacc
        import shmacc.testing
        from shmacc import inspection
        with shmacc.ConditionalAccumulator("f8", (), "given") as acc:
            acc.apply_grad(1.0)
            assert acc.take_grad(1) == 1.0
        for leftover in inspection.leftovers("given"):
            assert inspection.clean(leftover)
        assert not inspection.leftovers("given")
    """
    status, _, complaints = interpreter.run(script)
    assert (status, complaints) == (0, "")


def test_the_remedies_in_the_error_lead_to_the_installed_package(tmp_path: Path) -> None:
    for command, folder in ("-Pc", ROOT), ("-c", tmp_path):
        ran = run([sys.executable, command, _WHERE], folder)
        assert not Path(ran.stdout).is_relative_to(ROOT / "shmacc")


def test_an_installed_package_without_extension_is_not_taken_for_the_tree(tmp_path: Path) -> None:
    shutil.copytree(
        ROOT / "shmacc", tmp_path / "shmacc", ignore=shutil.ignore_patterns("native", "*.so")
    )
    ran = run([sys.executable, "-c", _WHERE], tmp_path, status=1)
    assert "ModuleNotFoundError: No module named 'shmacc._core'" in ran.stderr


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Copy the checkout, so that tests can build and change the copy."""
    copy = tmp_path_factory.mktemp("first") / "checkout"
    mine = shutil.ignore_patterns(".venv*", "build", "dist", ".git", ".*_cache", "__pycache__")
    return Path(shutil.copytree(ROOT, copy, ignore=mine))


@pytest.fixture(scope="module")
def fresh(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a new environment; return the folder of its commands."""
    folder = tmp_path_factory.mktemp("fresh")
    venv.create(folder, with_pip=True)
    return folder / "bin"


@pytest.mark.installs
@pytest.mark.timeout(1800)  # it compiles twice
def test_an_editable_install_works_inside_and_outside_of_the_checkout(
    checkout: Path, fresh: Path, tmp_path: Path
) -> None:
    install: list[str | Path] = [fresh / "pip", "install", "--quiet", "--editable", "."]
    run(install, checkout)
    script = checkout / FIRST.relative_to(ROOT) / "train.py"
    for folder in checkout, tmp_path:
        ran = run([fresh / "python", "-c", _WHERE], folder)
        assert Path(ran.stdout.strip()) == checkout / "shmacc" / "__init__.py"
        assert "100% of the table is learnt" in run([fresh / "python", script], folder).stdout
        run([fresh / "shmacc-inspect", "list"], folder)

    # A change of Python code takes effect at once; a change of C++, after the same command.
    layout = checkout / "shmacc" / "native" / "base" / "layout.hpp"
    changed, times = re.subn(r"kVersion = \d+;", "kVersion = 4711;", layout.read_text())
    assert times == 1
    layout.write_text(changed)
    run(install, checkout)
    ran = run([fresh / "python", "-c", "from shmacc import _core; print(_core.VERSION)"], checkout)
    assert ran.stdout == "4711\n"
