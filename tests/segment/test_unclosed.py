"""Only a handle that is collected without a close gives a ResourceWarning, like a file."""

import gc
import pickle
import sys
import tracemalloc
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.support import run_to_end

import shmacc
from shmacc import ConditionalAccumulator, errors, raw_ops, testing

KINDS: Final[list[Callable[[], Any]]] = [
    lambda: ConditionalAccumulator("f4", (2,)),
    lambda: shmacc.SparseConditionalAccumulator("f4", (None, 2)),
    lambda: shmacc.AccumulatorGroup({"w": shmacc.TensorSpec((2,), "f4")}),
    lambda: shmacc.SharedArrays({"w": np.ones(2)}),
    lambda: raw_ops.ConditionalAccumulator("f4", (2,)),
]


def _warnings_of(use: Callable[[], object]) -> list[warnings.WarningMessage]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        use()
        gc.collect()
    return caught


@pytest.mark.parametrize("make", KINDS)
def test_a_handle_that_is_collected_unclosed_gives_a_warning(make: Callable[[], Any]) -> None:
    def forget() -> None:
        forgotten = make()
        del forgotten  # this line is reported

    (caught,) = _warnings_of(forget)
    assert caught.category is ResourceWarning
    assert str(caught.message).startswith("unclosed ")
    assert "'private-" in str(caught.message)
    assert caught.filename == __file__
    assert caught.lineno == forget.__code__.co_firstlineno + 2

    def in_a_cycle() -> None:
        cycle: list[Any] = [make()]
        cycle.append(cycle)

    (caught,) = _warnings_of(in_a_cycle)
    assert caught.category is ResourceWarning

    def close() -> None:
        made = make()
        getattr(made, "accumulator", made).close()
        with getattr(another := make(), "accumulator", another):
            pass

    assert not _warnings_of(close)


def test_the_warning_of_an_attached_handle_has_its_name() -> None:
    with ConditionalAccumulator("f4", (), "gradients", unlink_on_close=True):
        for attach in (shmacc.attach, ConditionalAccumulator.attach):
            (caught,) = _warnings_of(partial(attach, "gradients"))
            assert str(caught.message) == "unclosed ConditionalAccumulator 'gradients'"
    with shmacc.SharedArrays({"w": np.ones(2)}, "parameters", unlink_on_close=True):
        (caught,) = _warnings_of(lambda: shmacc.SharedArrays.attach("parameters"))
        assert str(caught.message) == "unclosed SharedArrays 'parameters'"


def test_arrays_are_collected_with_their_last_view() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        params = shmacc.SharedArrays({"w": np.ones(2)})
        view = params["w"][1:]
        del params
        assert not caught
        assert view.tolist() == [1.0]
        del view
    assert len(caught) == 1


def test_tracemalloc_shows_where_the_handle_was_made() -> None:
    tracing = tracemalloc.is_tracing()
    if not tracing:
        tracemalloc.start()
    try:
        (caught,) = _warnings_of(lambda: shmacc.SharedArrays({"w": np.ones(2)}))
        made = tracemalloc.get_object_traceback(caught.source)
        assert made is not None
        assert made[-1].filename == __file__
    finally:
        if not tracing:
            tracemalloc.stop()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_collected_handle_is_closed_even_if_the_warning_is_an_error(namespace: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ConditionalAccumulator("f4", (2,))
        gc.collect()
    assert testing.leaked_names(namespace) == ()


def test_a_failed_constructor_gives_no_warning() -> None:
    def fail() -> None:
        with pytest.raises(errors.InvalidArgumentError, match="dtype"):
            ConditionalAccumulator("f8", (), "gradients")
        with pytest.raises(errors.InvalidArgumentError, match="not of shared arrays"):
            shmacc.SharedArrays.attach("gradients")
        with pytest.raises(errors.InvalidArgumentError, match=r"not of an accumulator .*Sparse"):
            shmacc.SparseConditionalAccumulator.attach("gradients")

    with ConditionalAccumulator("f4", (), "gradients", unlink_on_close=True):
        assert not _warnings_of(fail)


def test_unpickled_handles_need_not_be_closed() -> None:
    with (
        ConditionalAccumulator("f4", (), "gradients", unlink_on_close=True) as acc,
        shmacc.SharedArrays({"w": [1.0]}) as params,
    ):
        for made in (acc, params):
            sent = pickle.dumps(made)
            assert not _warnings_of(partial(pickle.loads, sent))


def test_a_forked_child_gets_warnings_about_its_own_handles_only() -> None:
    def drop_the_parents() -> list[str]:
        parents.clear()
        dropped = _warnings_of(lambda: ConditionalAccumulator("f4", (2,)))
        return [str(warning.message).split()[1] for warning in dropped]

    with shmacc.SparseConditionalAccumulator("f4", (None, 2)) as acc:
        parents = [acc]
        assert run_apart(drop_the_parents) == ["ConditionalAccumulator"]


_PROGRAM: Final = """
import multiprocessing
import shmacc


def work():
    shmacc.ConditionalAccumulator("f4", ())
    globals()["kept"] = shmacc.ConditionalAccumulator("f4", ())


kept = [shmacc.ConditionalAccumulator("f4", ()), shmacc.SharedArrays({"w": [1.0]})]
kept.append(kept)
child = multiprocessing.get_context("fork").Process(target=work)
child.start()
child.join()
"""


def test_the_end_of_a_process_closes_all_handles(namespace: str) -> None:
    ran = run_to_end([sys.executable, "-P", "-X", "dev", "-c", _PROGRAM])
    assert ran.stderr.count("unclosed ") == 1  # for the handle that the child dropped
    assert testing.leaked_names(namespace) == ()
