"""The files that `make dist` makes can be installed and used, under every Python that is found.

All tests here are marked `installs`: each installs with pip into its own environment, with
dependencies from the package index, as a user does.
"""

import re
import shutil
import sys
from pathlib import Path
from typing import Final

import pytest
from helpers import own_shm
from helpers.apart import Apart, needs_own_shm
from helpers.own_shm import BIND, READ_ONLY, REMOUNT
from helpers.pages import ROOT, TUTORIAL, run, run_page

import interpreters

# One of these tests compiles the extension, on machines of any speed.
pytestmark = [pytest.mark.installs, pytest.mark.timeout(1800)]

DIST: Final = ROOT / "dist"
# If a wheel is missing, test_every_python_here_has_its_wheel fails and names its Python.
WHEELS: Final = sorted(DIST.glob("shmacc-*.whl"))


def _python_of(wheel: Path) -> tuple[int, ...]:
    tag = re.search(r"-cp(\d)(\d+)-cp\1\2-", wheel.name)
    assert tag, wheel.name
    return int(tag[1]), int(tag[2])


def _sdist() -> Path:
    [archive] = DIST.glob("shmacc-*.tar.gz")
    return archive


def _install_and_learn(python: str, published: Path, folder: Path) -> None:
    """Install into a new environment of this Python, and follow the tutorial."""
    environment, tutorial = folder / "environment", folder / "tutorial"
    tutorial.mkdir()
    run([python, "-m", "venv", environment], folder)
    run([environment / "bin" / "pip", "install", "--quiet", published], folder)
    where = "import shmacc; print(shmacc.__file__)"
    used = Path(run([environment / "bin" / "python", "-c", where], tutorial).stdout.strip())
    assert used.is_relative_to(environment)
    run_page(TUTORIAL, tutorial, environment)


def test_every_python_here_has_its_wheel() -> None:
    assert sorted(map(_python_of, WHEELS)) == sorted(interpreters.found())


@pytest.mark.parametrize("wheel", WHEELS, ids=lambda wheel: "{}.{}".format(*_python_of(wheel)))
def test_a_wheel_is_enough_for_the_tutorial(wheel: Path, tmp_path: Path) -> None:
    _install_and_learn(interpreters.found()[_python_of(wheel)], wheel, tmp_path)


def test_the_source_distribution_is_enough_for_the_tutorial(tmp_path: Path) -> None:
    _install_and_learn(sys.executable, _sdist(), tmp_path)


def _install_read_only(folder: Path, environment: Path) -> None:
    own_shm.enter_own_namespace()
    own_shm.mount(str(folder), str(folder), flags=BIND)
    own_shm.mount("none", str(folder), flags=BIND | REMOUNT | READ_ONLY)
    for options in ([], ["--force-reinstall", "--no-deps", "--editable"]):
        run([environment / "bin" / "pip", "install", "--quiet", *options, folder], Path("/"))
        run([environment / "bin" / "python", "-c", "import shmacc"], Path("/"))


@needs_own_shm
def test_a_checkout_that_cannot_be_written_can_be_installed(tmp_path: Path) -> None:
    shutil.unpack_archive(_sdist(), tmp_path, filter="data")
    [folder] = tmp_path.iterdir()
    environment = tmp_path / "environment"
    run([sys.executable, "-m", "venv", environment], tmp_path)
    with Apart(_install_read_only, folder, environment) as process:
        process.result(1800)


def test_the_source_distribution_has_all_files_that_its_tests_read(tmp_path: Path) -> None:
    shutil.unpack_archive(_sdist(), tmp_path, filter="data")
    [unpacked] = tmp_path.iterdir()
    pytest_there: list[str | Path] = [
        Path(sys.executable).with_name("pytest"), "-q", "-p", "no:cacheprovider",
    ]  # fmt: skip
    run([*pytest_there, "--collect-only"], unpacked)
    # Some of the tests that read files of the project.
    readers = ["test_docs.py", "documented_hazards", "pins", "test_an_import_in_the_checkout"]
    assert " skipped" not in run([*pytest_there, "-k", " or ".join(readers)], unpacked).stdout
