"""Memory runs out at any allocation: no round is lost, and nothing without an owner stays open."""

import ctypes
import gc
import importlib
import os
import resource
import types
from collections import deque
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import run_apart
from helpers.killing_scenes import NAME, path
from helpers.support import EVERY_INSTANT, SANITIZED

import shmacc
from shmacc import _core, errors, inspection, testing
from shmacc._base import names

# Memory runs out in forked processes, so that a broken interpreter ends with its process.
# Spare references to each function's code: every failed allocation may drop one.
_MOST_DROPPED: Final = 100

DENSE, SPARSE = shmacc.ConditionalAccumulator, shmacc.SparseConditionalAccumulator
SORTS: Final[dict[str, tuple[Any, str, Callable[[Any], Any]]]] = {
    "sparse": (SPARSE, "float32", lambda acc: acc.take(1, timeout=0)),
    "slices": (SPARSE, "float32", lambda acc: acc.take_indexed_slices_grad(1, timeout=0)),
    "sparse partial": (SPARSE, "int16", lambda acc: acc.take_partial(0, timeout=0)),
    "dense": (DENSE, "complex64", lambda acc: acc.take(1, timeout=0)),
    "sealing": (DENSE, "bfloat16", lambda acc: acc.take_partial(1, timeout=0, seal=True)),
}


def apply(acc: Any, number: int) -> None:
    values = np.full((3, 2), number)
    acc.unseal()
    if isinstance(acc, shmacc.ConditionalAccumulator):
        assert acc.apply_grad(values, local_step=shmacc.NEVER_STALE)
    else:
        assert acc.apply_grad([1, 4, 9], values, local_step=shmacc.NEVER_STALE)


def is_whole(taken: Any, number: int) -> bool:
    for field in ("value", "values"):
        taken = getattr(taken, field, taken)
    return bool(np.shape(taken) == (3, 2) and (taken == number).all())


def _no_round_is_lost(sort: str, failures: Callable[[], Iterator[Callable[[Any], Any]]]) -> int:
    """Take rounds; memory runs out at another point in each. Return how many takes failed."""
    kind, dtype, take = SORTS[sort]
    failed = 0
    with kind(dtype, None, NAME, reduction_type="SUM") as acc:
        apply(acc, 1)
        take(acc)  # a first take imports modules
        for number, failing in enumerate(failures()):
            # The numbers are small, because they must fit half floats.
            apply(acc, number % 100)
            taken = failing(lambda: take(acc))
            if taken is None:
                failed += 1
                taken = take(acc)  # the failed take consumed nothing, or its round comes now
            assert is_whole(taken, number % 100), f"allocation {number}: {taken}"
            assert acc.num_accumulated() == 0
        stats = acc.stats()
        assert stats.applied == stats.taken == number + 2
        assert stats.waiting == 0
        acc.unlink()
    return failed


def _spare_references() -> list[types.CodeType]:
    """Return spare references to the code of all nested functions.

    If making such a function fails (MAKE_FUNCTION), CPython 3.12 and 3.13 drop one reference too
    many to its code, so that the code is freed while its constants are in use: python/cpython issue
    122752, fixed in 3.14.
    """
    gc.unfreeze()
    outer = [each.__code__ for each in gc.get_objects() if isinstance(each, types.FunctionType)]
    inner = []
    while outer:
        found = [each for each in outer.pop().co_consts if isinstance(each, types.CodeType)]
        outer += found
        inner += found
    return inner * _MOST_DROPPED


def _without_memory_of_pythons(in_a_row: int) -> Iterator[Callable[[Any], Any]]:
    """Yield functions that make a call in which `in_a_row` allocations of Python fail."""
    testcapi: Any = importlib.import_module("_testcapi")
    _kept = _spare_references()
    through = False

    def failing(call: Callable[[], Any], first: int) -> Any:
        nonlocal through
        result = None
        try:
            testcapi.set_nomemory(first, first + in_a_row)
            result = call()
        except MemoryError:
            pass
        finally:
            testcapi.remove_mem_hooks()
        through = result is not None
        return result

    succeeded = 0
    for first in count():
        yield lambda call, first=first: failing(call, first)  # type: ignore[misc]
        # A call may survive a failure; ten successes in a row mean that no allocation is left.
        succeeded = succeeded + 1 if through else 0
        if succeeded == 10:
            return


# Two failures in a row crash CPython 3.11 where NumPy's errors are set, as most conversions do.
@pytest.mark.parametrize(
    ("sort", "in_a_row"), [(sort, 1) for sort in SORTS] + [("sparse", 40), ("dense", 40)]
)
def test_no_failed_allocation_of_python_loses_a_round(sort: str, in_a_row: int) -> None:
    pytest.importorskip("_testcapi")
    failed = run_apart(_no_round_is_lost, sort, lambda: _without_memory_of_pythons(in_a_row))
    assert failed > 5


class _Heap:
    """The C library's memory, of which `exhaust` takes all but `left` bytes.

    Taken memory is never given back, so the first call takes thousands of pieces, and later calls
    only what was freed since. `let_grow` lets the C library get new memory again.
    """

    # A freed piece of _SPLIT bytes can be split; smaller ones serve only calls of their own size.
    _LARGEST, _BY_SIZE, _SMALLEST, _SPLIT = 1 << 22, 1 << 10, 16, 1 << 14

    def __init__(self) -> None:
        libc = ctypes.CDLL(None)
        self._malloc, self._free = libc.malloc, libc.free
        self._malloc.restype, self._malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        self._free.restype, self._free.argtypes = None, [ctypes.c_void_p]

    def exhaust(self, left: int) -> None:
        with open("/proc/self/statm", "rb") as statm:  # noqa: PTH123
            mapped = int(statm.read().split()[0]) * resource.getpagesize()
        spare = self._malloc(self._SPLIT)
        resource.setrlimit(resource.RLIMIT_AS, (mapped, resource.RLIM_INFINITY))
        size = self._LARGEST
        while size >= self._SMALLEST:
            if not self._malloc(size):
                # The C library keeps small freed pieces by their size, in steps of 16 bytes.
                size = size // 2 if size > self._BY_SIZE else size - 16
        self._free(spare)
        self._malloc(self._SPLIT - left)

    def let_grow(self) -> None:
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)


def _without_memory_of_c(most: int = 2048) -> Iterator[Callable[[Any], Any]]:
    """Yield functions that make a call while the C library has few bytes left."""
    heap = _Heap()

    def failing(call: Callable[[], Any], left: int) -> Any:
        try:
            heap.exhaust(left)
            return call()
        except MemoryError:
            return None
        finally:
            heap.let_grow()

    for left in range(32, most, 16 if EVERY_INSTANT else 48):
        yield lambda call, left=left: failing(call, left)  # type: ignore[misc]


of_libc = pytest.mark.skipif(SANITIZED, reason="AddressSanitizer has an allocator of its own")


@of_libc
@pytest.mark.parametrize("sort", SORTS)
def test_no_failed_allocation_of_the_extension_loses_a_round(sort: str) -> None:
    assert run_apart(_no_round_is_lost, sort, _without_memory_of_c) > 0


def _no_update_is_lost(failures: Callable[[], Iterator[Callable[[Any], Any]]]) -> int:
    """Make updates; memory runs out at another point in each. Return how many failed."""
    table, rows = np.zeros((16, 8), np.float32), [1, 4, 9]
    failed = 0
    with shmacc.Parameters({"table": table}, optimizer=shmacc.optim.SGD(1.0)) as params:
        specs = params.member_specs(["table"])
        with shmacc.AccumulatorGroup(specs, reduction_type="SUM") as group:
            for number, failing in enumerate(failures()):
                assert group.apply({"table": (rows, np.ones((3, 8)))}, group.global_step)
                with group.round(1) as taken:
                    done = failing(lambda taken=taken: params.update(taken))
                    if done is None:  # nothing has changed, or the next update undoes it
                        failed += 1
                        done = params.update(taken)
                assert done
                table[rows] -= 1
                np.testing.assert_array_equal(params["table"], table)
                assert params.step == group.global_step == number + 1
    return failed


def test_no_failed_allocation_of_python_loses_or_doubles_an_update() -> None:
    pytest.importorskip("_testcapi")
    assert run_apart(_no_update_is_lost, lambda: _without_memory_of_pythons(1)) > 5


@of_libc
def test_no_failed_allocation_of_the_extension_loses_or_doubles_an_update() -> None:
    assert run_apart(_no_update_is_lost, _without_memory_of_c) > 0


def _open() -> tuple[list[str], int]:
    """Return the open descriptors, and the number of mappings of shared memory."""
    with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:  # noqa: PTH123
        mapped = sum(names.SHM_DIRECTORY in line for line in maps)
    return sorted(os.listdir("/proc/self/fd")), mapped  # noqa: PTH208


def _nothing_stays_open(
    call: Callable[[], Any], failures: Callable[[], Iterator[Callable[[Any], Any]]]
) -> int:
    call().close()
    if call is CALLS["create"]:
        inspection.remove("new")
    before = _open()
    failed = 0
    for failing in failures():
        made = failing(call)
        failed += made is None
        if made is not None:
            made.close()
        if call is CALLS["create"] and os.path.lexists(names.segment_name("new").path):
            inspection.remove("new")  # it raises if a process, say this one, is attached
        assert _open() == before
        assert len(testing.leaked_names(names.current_namespace())) == 2  # the two files of NAME
    return failed


CALLS: Final[dict[str, Callable[[], Any]]] = {
    "open": lambda: _core.open(path(), None)[2],
    "view": lambda: _core.view(path())[2],
    "create": lambda: shmacc.SparseConditionalAccumulator("float32", None, "new"),
    "create a private one": lambda: shmacc.ConditionalAccumulator("float32"),
    "attach": lambda: shmacc.attach(NAME),
}


def _open_without(failures: Callable[[], Iterator[Callable[[Any], Any]]], call: str) -> None:
    shmacc.SparseConditionalAccumulator("float32", None, NAME).close()
    assert run_apart(_nothing_stays_open, CALLS[call], failures) > 3
    with shmacc.attach(NAME) as acc:
        assert acc.stats().attached == 1
        acc.unlink()


@pytest.mark.parametrize("call", CALLS)
def test_nothing_stays_open_if_python_has_no_memory_for_its_handle(call: str) -> None:
    pytest.importorskip("_testcapi")
    _open_without(lambda: _without_memory_of_pythons(1), call)


@of_libc
@pytest.mark.parametrize("call", CALLS)
def test_no_failed_allocation_of_the_extension_leaves_a_segment_open(call: str) -> None:
    _open_without(_without_memory_of_c, call)


def _end_without_memory() -> int:
    """Drop handles while no memory is left; return how many were dropped."""
    dropped = 0
    with shmacc.SparseConditionalAccumulator("float32", None, NAME) as acc:
        for failing in _without_memory_of_c():
            handles = [shmacc.attach(NAME) for _ in range(20)]
            for handle in handles:
                assert handle.global_step == 0
            failing(handles.clear)
            dropped += 20 - len(handles)
        acc.unlink()
    return dropped


@of_libc
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_handles_can_be_dropped_while_the_extension_has_no_memory() -> None:
    assert run_apart(_end_without_memory) > 20


def _read_array_without_memory() -> int:
    failed = 0
    with shmacc.Parameters({"array": np.ones(5)}, optimizer=shmacc.optim.SGD(1.0)) as params:
        for failing in _without_memory_of_c():
            failed += failing(lambda: params["array"]) is None
        assert params["array"].sum() == 5
    return failed


@of_libc
def test_getting_a_first_array_without_memory_raises_and_ends_no_process() -> None:
    assert run_apart(_read_array_without_memory) > 5


def _write_without_memory() -> tuple[int, int]:
    """Write to arrays while no memory is left to report it; return how many reports were late."""
    both, late = {"first": np.zeros(5000), "second": np.zeros(5000)}, 0
    with (
        shmacc.SharedArrays(both, NAME, unlink_on_close=True) as made,
        shmacc.SharedArrays.attach(NAME) as shared,
    ):
        arrays = [shared[name] for name in both]
        memset = ctypes.CDLL(None).memset
        memset.argtypes = ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t
        at, sizes = [array.ctypes.data for array in arrays], [array.nbytes for array in arrays]
        run = deque[Any](maxlen=0).extend  # goes through an iterator without Python code
        for number, failing in enumerate(_without_memory_of_c(6000)):
            writes = map(memset, at, (255, 255), sizes)
            with pytest.raises(errors.FailedPreconditionError, match="The write was undone"):  # noqa: PT012
                failing(lambda writes=writes: run(writes))
                assert not any(array.any() for array in arrays)
                late += 1
                shared["first"]
            shared["first"]
            for array, name in zip(arrays, both, strict=True):
                made[name][:] = number
                assert (array == number).all()
                made[name][:] = 0
    return late, number + 1


@of_libc
def test_writes_to_read_only_arrays_are_undone_and_told_though_there_is_no_memory() -> None:
    late, writes = run_apart(_write_without_memory)
    assert 5 < late < writes


def _resident() -> int:
    with open("/proc/self/statm", "rb") as statm:  # noqa: PTH123
        return int(statm.read().split()[1]) * resource.getpagesize()


def _begin_blocks_without_memory(count: int) -> int:
    """Fail to begin blocks; return how many bytes of memory each has cost."""
    testcapi: Any = importlib.import_module("_testcapi")
    with DENSE("float32", (), NAME, unlink_on_close=True) as acc:
        begin = acc.round(1, timeout=0).__enter__
        for number in range(2 * count):
            if number == count:
                before = _resident()
            with pytest.raises(MemoryError):  # noqa: PT012
                testcapi.set_nomemory(0, 1)
                try:
                    begin()
                finally:
                    testcapi.remove_mem_hooks()
        return (_resident() - before) // count


@of_libc
def test_a_block_that_has_no_memory_to_begin_keeps_none() -> None:
    pytest.importorskip("_testcapi")
    assert run_apart(_begin_blocks_without_memory, 10_000) < 50
