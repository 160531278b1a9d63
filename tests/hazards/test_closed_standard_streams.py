"""A process whose standard streams are closed keeps nothing under their numbers.

What a C library prints goes to descriptor 1 or 2, whatever that leads to. Were it a segment, its
first bytes would be overwritten, and every other process would find it damaged.
"""

from __future__ import annotations

import os
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from helpers.apart import run_apart

import shmacc
from shmacc import AccumulatorGroup, Parameters, SharedArrays, TensorSpec, inspection, optim

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from helpers.apart import Pipe

SPECS = {"a": TensorSpec((3,), "f8")}


def _check() -> None:
    for number in range(3):
        with suppress(FileNotFoundError):
            leads_to = os.readlink(f"/proc/self/fd/{number}")  # noqa: PTH115
            assert not leads_to.startswith("/dev/shm"), f"{number} leads to {leads_to}"  # noqa: S108


def _attached(_: Path) -> None:
    with AccumulatorGroup.attach("g") as group, Parameters.attach("p") as params:
        _check()
        group.apply({"a": np.ones(3)}, 0)
        with group.round(1) as taken:
            _check()
            params.update(taken)
    with SharedArrays.attach("s", writable=True) as arrays:
        arrays["a"] += 1
        _check()


def _made(_: Path) -> None:
    with AccumulatorGroup(SPECS) as group:
        _check()
        group.apply({"a": np.ones(3)}, 0)
        _check()
        taken: Any = group.take(1)["a"]
        assert taken.value.tolist() == [1] * 3
    for make in (Parameters, SharedArrays):
        with make({"a": np.ones(3)}) as made:
            _check()
            assert made["a"].tolist() == [1] * 3
    shmacc.raw_ops.ConditionalAccumulator("f4", (), shared_name="raw")
    _check()
    with shmacc.attach("raw") as raw:
        raw.unlink()


def _inspected(_: Path) -> None:
    for name in ("g", "p", "s"):
        inspection.describe(name)
        _check()
        inspection.check(name)
        _check()


def _inherited(_: Path) -> None:
    group = AccumulatorGroup.attach("g")

    def use() -> None:
        group.apply({"a": np.ones(3)}, 0)
        _check()
        with Parameters.attach("p"):
            _check()

    run_apart(use)
    group.close()


def _opened_again(_: Path, *, pipe: Pipe) -> None:
    group = AccumulatorGroup.attach("g")
    os.closerange(0, pipe.fileno())
    os.closerange(pipe.fileno() + 1, 65536)
    with AccumulatorGroup.attach("g") as again, Parameters.attach("p"):
        _check()
        again.apply({"a": np.ones(3)}, 0)
    _check()
    del group


def _saved(path: Path) -> None:
    write = np.savez

    def write_and_check(file: Any, **arrays: Any) -> None:
        assert file.fileno() > 2
        write(file, **arrays)
        _check()

    np.savez = write_and_check  # type: ignore[assignment]
    with AccumulatorGroup.attach("g") as group, Parameters.attach("p") as params:
        shmacc.save(path, {"g": group, "p": params})
        _check()
        shmacc.load(path, {"g": group, "p": params})
        _check()


@pytest.fixture(autouse=True)
def segments() -> Iterator[None]:
    """A segment of each kind, which this process has not open."""
    AccumulatorGroup(SPECS, "g").close()
    Parameters({"a": np.zeros(3)}, "p", optimizer=optim.SGD(1.0)).close()
    SharedArrays({"a": np.zeros(3)}, "s").close()
    yield
    for name in ("g", "p", "s"):
        inspection.remove(name)


def _without(closed: tuple[int, ...], way: Callable[..., None], path: Path, *, pipe: Pipe) -> None:
    for number in closed:
        os.close(number)
    way(path, pipe=pipe) if way is _opened_again else way(path)


@pytest.mark.parametrize(
    ("way", "closed"),
    [
        *((way, (0, 1, 2)) for way in (_made, _inspected, _inherited, _opened_again, _saved)),
        *((_attached, closed) for closed in ((0,), (1,), (2,), (0, 1, 2))),
    ],
)
def test_nothing_is_kept_under_the_numbers_of_the_standard_streams(
    way: Callable[..., None], closed: tuple[int, ...], tmp_path: Path
) -> None:
    run_apart(_without, closed, way, tmp_path / "saved.npz")
    for name in ("g", "p", "s"):
        inspection.describe(name)  # it is not damaged
