"""Workers of multiprocess (pathos), billiard (celery) and torch end as multiprocessing's do."""

import os
from collections.abc import Iterator
from typing import Any, Final

import billiard
import billiard.pool
import multiprocess
import pytest
from helpers.support import LONG

import shmacc
from shmacc import ConditionalAccumulator, errors

pytestmark = pytest.mark.filterwarnings(
    "ignore:This process .* is multi-threaded:DeprecationWarning"
)

NAME: Final = "pool"
PACKAGES: Final = {"billiard": billiard, "multiprocess": multiprocess}
TASKS: Final = 4

_used: dict[str, ConditionalAccumulator] = {}  # of this process


@pytest.fixture
def acc() -> Iterator[ConditionalAccumulator]:
    """Yield a named accumulator, which forked workers inherit."""
    with ConditionalAccumulator("f8", (), NAME, unlink_on_close=True) as made:
        _used["acc"] = made
        yield made
        _used.clear()


@pytest.fixture(
    params=[("billiard", "spawn"), ("billiard", "fork"), ("multiprocess", "forkserver")],
    ids=" by ".join,
)
def context(request: pytest.FixtureRequest) -> Any:
    """Return the package's multiprocessing context for a start method."""
    package, method = request.param
    return PACKAGES[package].get_context(method)


def get_ready(given: ConditionalAccumulator | None, namespace: str) -> None:
    """Keep the given accumulator, or attach to it by name."""
    os.environ["SHMACC_NAMESPACE"] = namespace  # a forkserver keeps an earlier test's namespace
    _used["acc"] = ConditionalAccumulator.attach(NAME) if given is None else given


def apply(_: int) -> bool:
    return _used["acc"].apply_grad(1.0, shmacc.NEVER_STALE)


def news(acc: ConditionalAccumulator) -> Any:
    """Return the reasons of deaths that a take reports."""
    try:
        acc.take(2**40, timeout=0, on_death="raise")
    except errors.WorkerDiedError as error:
        return error.reasons
    except errors.DeadlineExceededError:
        return ()
    raise AssertionError


def initialised(acc: ConditionalAccumulator | None) -> dict[str, Any]:
    """Return options that give workers the accumulator as an argument, or by name."""
    return {"initializer": get_ready, "initargs": (acc, os.environ["SHMACC_NAMESPACE"])}


def end_well(pool: Any, acc: ConditionalAccumulator) -> None:
    assert pool.map(apply, range(TASKS), chunksize=1) == [True] * TASKS
    pool.close()
    pool.join()
    assert news(acc) == ()
    assert acc.stats().attached == 1
    assert acc.num_accumulated() == TASKS


@pytest.mark.parametrize("by_name", [True, False])
def test_workers_that_end_well_are_not_reported_dead(
    acc: ConditionalAccumulator, context: Any, *, by_name: bool
) -> None:
    end_well(context.Pool(2, **initialised(None if by_name else acc)), acc)


@pytest.mark.parametrize("package", PACKAGES)
def test_replaced_workers_are_not_reported_dead(acc: ConditionalAccumulator, package: str) -> None:
    """The forked workers inherit the accumulator, or attach by name."""
    how = initialised(None) if package == "billiard" else {}
    context = PACKAGES[package].get_context("fork")
    end_well(context.Pool(2, maxtasksperchild=2, **how), acc)


def fail(acc: ConditionalAccumulator) -> None:
    acc.apply_grad(1.0, shmacc.NEVER_STALE)
    raise ValueError("bad batch")


def test_a_failure_is_reported_by_its_exception(acc: ConditionalAccumulator, context: Any) -> None:
    process = context.Process(target=fail, args=(acc,))
    process.start()
    process.join(LONG)
    assert process.exitcode == 1
    assert news(acc) == ("ValueError: bad batch",)


def die(_: int) -> None:
    apply(0)
    os._exit(0)


def test_a_killed_worker_is_reported(acc: ConditionalAccumulator) -> None:
    pool = billiard.get_context("fork").Pool(1)
    pool.apply_async(die, (0,))
    with pytest.raises(errors.WorkerDiedError, match="killed"):
        acc.take(2**40, timeout=LONG, on_death="raise")
    pool.terminate()
    pool.join()


def test_the_pools_hook_for_a_workers_end_runs(acc: ConditionalAccumulator, tmp_path: Any) -> None:
    def tell(_: int, status: int) -> None:
        (tmp_path / "status").write_text(str(status))

    pool = billiard.pool.Pool(1, on_process_exit=tell, context=billiard.get_context("fork"))
    pool.map(apply, range(1))
    pool.close()
    pool.join()
    assert (tmp_path / "status").read_text() == "0"
    assert news(acc) == ()


def attach_and_fail(rank: int) -> None:
    own = ConditionalAccumulator.attach(NAME)
    own.apply_grad(1.0, 0, contributor=rank)
    raise ValueError("bad batch")


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_failed_worker_of_torchs_spawn_is_reported_with_its_exception(
    acc: ConditionalAccumulator, method: str
) -> None:
    """The reason is not the SystemExit(1) into which torch turns the exception."""
    from torch import multiprocessing  # here, since it takes seconds, also in spawned workers

    with pytest.raises(multiprocessing.ProcessRaisedException, match="bad batch"):
        multiprocessing.start_processes(attach_and_fail, nprocs=1, start_method=method)
    with pytest.raises(errors.WorkerDiedError) as caught:
        acc.take(2, timeout=0, on_death="raise")
    assert caught.value.reasons == ("ValueError: bad batch",)
    assert caught.value.contributors == (0,)
