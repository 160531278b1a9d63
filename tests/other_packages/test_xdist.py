"""A user's tests run under pytest-xdist: workers have separate names, and leaks are found."""

import sys
from pathlib import Path
from typing import Final

from helpers.support import run_to_end

from shmacc import testing

CONFTEST: Final = """
import pytest
from shmacc import testing


@pytest.fixture(autouse=True)
def names():
    with testing.isolated_namespace() as namespace:
        yield
        assert testing.leaked_names(namespace) == ()
"""
# Each test waits until the other one, in the other xdist worker, has the same name open.
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


def test_two_workers_may_use_one_name_and_a_leak_is_found(tmp_path: Path, namespace: str) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "test_leaks.py").write_text(LEAK.format(namespace))
    ran = run_to_end(
        [sys.executable, "-m", "pytest", "-n", "2", "-W", "error", "-p", "no:cacheprovider", "."],
        status=1,
        timeout=110,
        cwd=tmp_path,
    )
    assert "3 passed, 1 error" in ran.stdout  # the leak's test passes, its fixture fails
    assert len(list(tmp_path.glob("worker-*"))) == 2
    assert f"forgotten-by-{namespace}" in ran.stdout
    assert not [name for name in testing.leaked_names() if namespace in name]
