"""A process reaches its own limits: descriptors, file sizes, address space."""

import fcntl
import os
import pickle
import resource
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.apart import apart
from helpers.stepping_tracer import Traced, needs_ptrace
from helpers.support import SANITIZED, left_behind

import shmacc
from shmacc import _core, errors, inspection
from shmacc._base import names


def _allow_descriptors(more: int) -> None:
    used = max(int(fd) for fd in os.listdir("/proc/self/fd"))  # noqa: PTH208  descriptors
    # The listing's own descriptor is closed again, so this many numbers below the limit are free.
    holes = used + 1 - len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    for _ in range(holes):
        os.open("/dev/null", os.O_RDONLY)
    resource.setrlimit(
        resource.RLIMIT_NOFILE, (used + more, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
    )


def _restored_descriptors() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


@apart()
def test_opening_without_enough_descriptors_leaves_nothing() -> None:
    """The error is the same with no descriptor left, with one, with two, and so on."""
    with shmacc.ConditionalAccumulator("f4", (), "there") as there:
        pickled = pickle.dumps(there)
    calls: dict[str, Callable[[], Any]] = {
        "create": lambda: shmacc.ConditionalAccumulator("f4", (), "new"),
        "private": lambda: shmacc.ConditionalAccumulator("f4"),
        "construct": lambda: shmacc.ConditionalAccumulator("f4", (), "there"),
        "attach": lambda: shmacc.attach("there"),
        "unpickle": lambda: pickle.loads(pickled),
    }
    for call, function in calls.items():
        failed = 0
        for more in range(8):
            _allow_descriptors(more)
            said = ""
            try:
                function().close()
            except errors.ResourceExhaustedError as error:
                failed += 1
                said = str(error)
            _restored_descriptors()
            left = [name for name in left_behind() if "there" not in name]
            assert not said or ("ulimit -n" in said and not left), (call, more, said, left)
            with suppress(errors.NotFoundError):
                inspection.remove("new")
        assert failed, call
    # Open accumulators need no other descriptor.
    with shmacc.ConditionalAccumulator.attach("there") as there:
        _allow_descriptors(0)
        assert there.apply_grad(1.0)
        with shmacc.ConditionalAccumulator.attach("there") as again:
            assert again.take_grad(1, timeout=0) == 1.0
        there.unlink()


@needs_ptrace
def test_a_creator_without_descriptors_does_not_disturb_attached_processes() -> None:
    """Other processes may attach before the maker needs its last descriptor."""
    with Traced(lambda _: _make_in_vain()) as maker:
        maker.run_until(Path(names.segment_name("made").path).exists)
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.prlimit(maker.pid, resource.RLIMIT_NOFILE, (3, hard))
        with shmacc.attach("made") as acc:
            maker.finish()
            assert isinstance(acc, shmacc.ConditionalAccumulator)
            assert acc.apply_grad(1.0)
            acc.unlink()


def _make_in_vain() -> None:
    with pytest.raises(errors.ResourceExhaustedError, match="ulimit -n"):
        shmacc.ConditionalAccumulator("f4", (), "made")


@apart()
def test_a_cleaner_without_descriptors_raises_and_does_not_guess() -> None:
    """A cleaner that cannot find out whether a semaphore is still being made must not remove it."""
    with shmacc.ConditionalAccumulator("f4", (), "made", unlink_on_close=True):
        path = Path(names.segment_name("made").path)
        (semaphore,) = path.parent.glob(f"sem.{path.name}.*")
        with semaphore.open("rb") as maker:
            fcntl.flock(maker, fcntl.LOCK_EX)  # as its maker does until the segment has its name
            assert _core.semaphore_is_being_made(str(semaphore))
            for more in range(2):
                _allow_descriptors(more)
                with pytest.raises(errors.ResourceExhaustedError, match="ulimit -n"):
                    _core.semaphore_is_being_made(str(semaphore))
                _restored_descriptors()
        assert not _core.semaphore_is_being_made(str(semaphore))


@apart()
def test_a_limit_of_file_sizes_is_named_in_errors_and_stops_no_growth() -> None:
    known = shmacc.SparseConditionalAccumulator("f4", None, "known")
    assert known.apply_grad(range(100), np.ones((100, 4)))
    # Python ignores SIGXFSZ, so the limit shows as an error number.
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    makers: list[Callable[[], Any]] = [
        lambda: shmacc.ConditionalAccumulator("f4", (), "limited"),
        lambda: shmacc.SharedArrays({"a": np.ones(1000)}, "limited"),
    ]
    for make in makers:
        with pytest.raises(errors.ResourceExhaustedError, match="ulimit -f") as caught:
            make()
        assert "at most 1048576 bytes" in str(caught.value)
        assert "Shared memory is full" not in str(caught.value)
    # A segment's file has its full length from the start, so growth does not reach the limit.
    assert known.apply_grad(range(50_000), np.ones((50_000, 4)))
    assert known.take(2, timeout=0).row_counts.sum() == 50_100
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with shmacc.ConditionalAccumulator("f4", (), "limited") as acc:
        acc.unlink()
    known.unlink()
    assert left_behind() == ()


@pytest.mark.skipif(
    SANITIZED, reason="AddressSanitizer itself needs all the address space there is"
)
@apart()
def test_a_take_without_memory_for_its_result_consumes_nothing() -> None:
    """The process's own memory runs out, not shared memory."""
    acc = shmacc.SparseConditionalAccumulator("f4", None, "big")
    assert acc.apply_grad(range(400_000), np.ones((400_000, 64), "f4"))
    with pytest.raises(MemoryError):
        _core.memory(1 << 60)  # frees memory kept from results that earlier tests dropped
    with open("/proc/self/statm", "rb") as statm:  # noqa: PTH123
        mapped = int(statm.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + (8 << 20), resource.RLIM_INFINITY))
    with pytest.raises(MemoryError):
        acc.take(1, timeout=0)
    with pytest.raises(MemoryError):
        acc.apply_grad(range(900_000), np.broadcast_to(np.float32(1), (900_000, 64)))
    assert (acc.num_accumulated(), acc.global_step) == (1, 0)
    resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    taken = acc.take(1, timeout=0)
    assert taken.values.sum() == 25_600_000
    acc.unlink()
