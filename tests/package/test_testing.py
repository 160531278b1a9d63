"""The helpers for users' tests: names of their own, in children of every kind too."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
from helpers.apart import every_start_method
from helpers.support import LONG

import shmacc
from shmacc import ConditionalAccumulator, testing

if TYPE_CHECKING:
    from helpers.apart import Crew


def _apply() -> tuple[str, int]:
    with shmacc.attach("gradients") as acc:
        assert isinstance(acc, ConditionalAccumulator)
        acc.apply_grad(1.0)
        return os.environ["SHMACC_NAMESPACE"], os.getpid()


@every_start_method
@pytest.mark.parametrize("again", [1, 2])
def test_children_are_in_the_namespace(crew: Crew, again: int, namespace: str) -> None:
    """Again, because the second test of a session meets a forkserver that the first one started."""
    with ConditionalAccumulator("f8", (), "gradients", reduction_type="SUM") as acc:
        assert crew.start(_apply).result()[0] == namespace, again
        with testing.isolated_namespace() as inner:
            with ConditionalAccumulator("f8", (), "gradients") as other:
                assert crew.start(_apply).result()[0] == inner
                assert other.num_accumulated() == 1
                other.unlink()
            assert testing.leaked_names(inner) == ()
        assert crew.start(_apply).result()[0] == namespace
        assert acc.take_grad(2, timeout=0) == 2.0
        acc.unlink()


def _grandchild(method: str) -> str:
    context = multiprocessing.get_context(method)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_apply).result(LONG)[0]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_pools_and_grandchildren(method: str, namespace: str) -> None:
    with ConditionalAccumulator("f8", (), "gradients") as acc:
        context = multiprocessing.get_context(method)
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            assert pool.submit(_grandchild, method).result(LONG) == namespace
        acc.unlink()


def test_programs_that_inherit_the_environment(namespace: str) -> None:
    script = "import os; print(os.environ['SHMACC_NAMESPACE'])"
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=LONG
    )
    assert done.stdout.strip() == namespace


def test_what_is_left_is_named_and_removed() -> None:
    with testing.isolated_namespace() as inner:
        ConditionalAccumulator("f8", (), "left").close()
        segment, semaphore = testing.leaked_names(inner)
        assert segment.startswith("sem.") != semaphore.startswith("sem.")
    assert testing.leaked_names(inner) == ()


def test_the_namespace_is_put_back_after_an_error(namespace: str) -> None:
    with pytest.raises(ZeroDivisionError), testing.isolated_namespace():
        1 / 0  # noqa: B018 - the error is what is tested
    assert os.environ["SHMACC_NAMESPACE"] == namespace
