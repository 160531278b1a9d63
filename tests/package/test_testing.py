"""`shmacc.testing` gives users' tests their own names, in children of every kind too."""

import concurrent.futures
import contextlib
import multiprocessing
import os

import pytest
from helpers.apart import Crew, run_apart
from helpers.support import LONG, START_METHODS

import shmacc
from shmacc import ConditionalAccumulator, testing


def _apply() -> str:
    with shmacc.attach("gradients") as acc:
        assert isinstance(acc, ConditionalAccumulator)
        acc.apply_grad(1.0)
        return os.environ["SHMACC_NAMESPACE"]


# The second test with "forkserver" meets the server that the first such test has started.
@pytest.mark.parametrize("crew", [*START_METHODS, "forkserver"], indirect=True)
def test_children_have_the_namespace_of_the_test(crew: Crew, namespace: str) -> None:
    with ConditionalAccumulator("f8", (), "gradients", reduction_type="SUM") as acc:
        assert crew.start(_apply).result() == namespace
        with testing.isolated_namespace() as inner:
            with ConditionalAccumulator("f8", (), "gradients") as other:
                assert crew.start(_apply).result() == inner
                assert other.num_accumulated() == 1
                other.unlink()
            assert testing.leaked_names(inner) == ()
        assert crew.start(_apply).result() == namespace
        assert acc.take_grad(2, timeout=0) == 2.0
        acc.unlink()


def _grandchild() -> str:
    context = multiprocessing.get_context("forkserver")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(_apply).result(LONG)


def test_pools_and_grandchildren_have_the_namespace(namespace: str) -> None:
    with ConditionalAccumulator("f8", (), "gradients") as acc:
        context = multiprocessing.get_context("forkserver")
        with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as pool:
            assert pool.submit(_grandchild).result(LONG) == namespace
        acc.unlink()


def test_leaked_names_are_reported_and_removed() -> None:
    with testing.isolated_namespace() as inner:
        ConditionalAccumulator("f8", (), "left").close()
        segment, semaphore = testing.leaked_names(inner)
        assert segment.startswith("sem.") != semaphore.startswith("sem.")
    assert testing.leaked_names(inner) == ()


def test_a_forked_child_that_leaves_the_block_removes_nothing() -> None:
    with contextlib.ExitStack() as block:
        inner = block.enter_context(testing.isolated_namespace())
        with ConditionalAccumulator("f8", (), "kept"):
            before = testing.leaked_names(inner)
            run_apart(block.close)
            assert testing.leaked_names(inner) == before != ()


def test_an_isolated_namespace_ends_cleanly_if_its_variable_was_unset(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("SHMACC_NAMESPACE")
    with testing.isolated_namespace() as inner:
        ConditionalAccumulator("f8", (), "left").close()
        monkeypatch.delenv("SHMACC_NAMESPACE")
    assert testing.leaked_names(inner) == ()


def test_the_namespace_is_put_back_after_an_error(namespace: str) -> None:
    with pytest.raises(ZeroDivisionError), testing.isolated_namespace():
        1 / 0  # noqa: B018 - the error is what is tested
    assert os.environ["SHMACC_NAMESPACE"] == namespace
