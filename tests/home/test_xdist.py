"""A test-suite that uses shmacc under pytest-xdist: workers do not meet, and leaks are found."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import TYPE_CHECKING, Final

from shmacc import testing

if TYPE_CHECKING:
    from pathlib import Path

CONFTEST: Final = """
import pytest
from shmacc import testing


@pytest.fixture(autouse=True)
def names():
    with testing.isolated_namespace() as namespace:
        yield
        assert testing.leaked_names(namespace) == ()
"""
# Each waits until the other one has the same name open, in the other worker of xdist.
TESTS: Final = """
import os
import pathlib
import time

import pytest
import shmacc


@pytest.mark.parametrize("number", [0, 1])
def test_both_have_the_name(number):
    with shmacc.ConditionalAccumulator(
        "f8", (), "same", if_exists="error", unlink_on_close=True
    ) as acc:
        acc.apply_grad(float(number))
        pathlib.Path(f"open-{number}").touch()
        deadline = time.monotonic() + 60
        while not pathlib.Path(f"open-{1 - number}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        assert acc.take(1).value == number
        pathlib.Path(f"worker-{os.environ['PYTEST_XDIST_WORKER']}").touch()
"""
LEAK: Final = """
import shmacc


def test_leak():
    shmacc.ConditionalAccumulator("f8", (), "forgotten-by-{}").close()
"""


def _pytest(folder: Path, tests: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST)
    (folder / "test_it.py").write_text(tests)
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "2", "-W", "error", "-p", "no:cacheprovider", "."],
        capture_output=True,
        text=True,
        check=False,
        timeout=110,
        cwd=folder,
        env=os.environ,
    )


def test_two_workers_use_one_name_at_the_same_time(tmp_path: Path) -> None:
    ran = _pytest(tmp_path, TESTS)
    assert ran.returncode == 0, ran.stdout
    assert "2 passed" in ran.stdout
    assert len(list(tmp_path.glob("worker-*"))) == 2


def test_a_leak_is_found_and_removed(tmp_path: Path, namespace: str) -> None:
    ran = _pytest(tmp_path, LEAK.format(namespace))
    assert ran.returncode == 1
    assert "1 error" in ran.stdout
    assert f"forgotten-by-{namespace}" in ran.stdout
    assert not [name for name in testing.leaked_names() if namespace in name]
