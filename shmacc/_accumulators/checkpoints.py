"""Checkpoints: accumulators and parameters that belong together, in one file."""

import contextlib
import os
import tempfile
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shmacc._accumulators import changes, saving
from shmacc._accumulators.accumulator import Accumulator
from shmacc._accumulators.parameters import Parameters
from shmacc._records.array_types import ValueArray
from shmacc.errors import DataLossError, FailedPreconditionError, InvalidArgumentError

Saved = Accumulator[Any, Any] | Parameters

_ATTEMPTS = 100


def save(path: str | os.PathLike[str], what: Mapping[str, Saved]) -> None:
    """Write the states of accumulators and parameters into one ``.npz`` file.

    The file is there with all of it, or as it was before: a temporary file beside it is written,
    flushed to the disk and renamed. In the block of a round, after `Parameters.update`, the states
    are those after the round; before it, those before the round.

    Args:
        path: The file.
        what: Accumulators, groups and parameters, by names for `load`.

    Raises:
        InvalidArgumentError: Something that cannot be saved.
        FailedPreconditionError: Rounds ended all the while, so the states did not belong together.
        OSError: Writing failed.
    """
    _check(what)
    arrays = {
        f"{name}/{key}": array
        for name, state in _states(what).items()
        for key, array in state.items()
    }
    target = Path(path)
    with _replacing(target) as file:
        saved: dict[str, Any] = arrays
        np.savez(file, **saved)


def load(path: str | os.PathLike[str], what: Mapping[str, Saved]) -> None:
    """Restore what `save` has written: all of it or nothing.

    Everything is checked first. Parameters are restored before accumulators; if one of them fails,
    those before it get back what they had. For the run's beginning: a process that is killed in the
    middle of it leaves some restored, and to load again is right.

    Args:
        path: The file.
        what: What to restore, by the names that it was saved by; all of them.

    Raises:
        InvalidArgumentError: The file has other names, or states of something else.
        DataLossError: It is no file of `save`, or damaged.
        ResourceExhaustedError: Shared memory, or this process's, is full.
        OSError: Reading failed.
    """
    _check(what)
    states = _read(Path(path))
    if states.keys() != what.keys():
        raise InvalidArgumentError(
            f"{os.fspath(path)} has {sorted(states)}, but {sorted(what)} were asked for"
        )
    for name, one in what.items():
        _check_state(one, states[name])
    parameters = [name for name, one in what.items() if isinstance(one, Parameters)]
    before: list[tuple[Saved, dict[str, ValueArray]]] = []
    try:
        for name in [*parameters, *(name for name in what if name not in parameters)]:
            had = what[name].state()
            what[name].restore(states[name])
            before.append((what[name], had))
    except BaseException:
        for one, had in reversed(before):
            one.restore(had)
        raise


def _check(what: object) -> None:
    if not isinstance(what, Mapping):
        raise InvalidArgumentError(
            "What is saved is a mapping from name to accumulator or parameters, but was a "
            f"{type(what).__name__}"
        )
    for name, one in what.items():
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(f"A name in a file is a string, but was {name!r}")
        if not isinstance(one, Accumulator | Parameters):
            raise InvalidArgumentError(
                f"{name!r} must be an accumulator, a group or shmacc.Parameters, but was a "
                f"{type(one).__name__}"
            )


def _states(what: Mapping[str, Saved]) -> dict[str, dict[str, ValueArray]]:
    """Return states that belong together: no round ended, and no update, while they were read."""
    for _ in range(_ATTEMPTS):
        marks = [_mark(one) for one in what.values()]
        states = {name: one.state() for name, one in what.items()}
        if marks == [_mark(one) for one in what.values()]:
            break
    else:
        raise FailedPreconditionError(
            "Rounds ended all the while that the states were read: save in the block of a round"
        )
    steps = {one.step for one in what.values() if isinstance(one, Parameters)}
    for name, one in what.items():
        if isinstance(one, Accumulator):
            update, step = one.stats().update, int(states[name]["step"])
            if update == "in" or (update == "begun" and step + 1 in steps):
                states[name] = saving.emptied(states[name], step + 1)
    return states


def _mark(one: Saved) -> tuple[object, ...]:
    if isinstance(one, Parameters):
        return (one.step,)
    stats = one.stats()
    return stats.global_step, stats.takes, stats.update


def _check_state(one: Saved, state: dict[str, ValueArray]) -> None:
    if isinstance(one, Parameters):
        changes.of_state(one._arrays, state)  # noqa: SLF001  a part of the same room
    else:
        saving.from_arrays(state, one._spec.members)  # noqa: SLF001


def _read(path: Path) -> dict[str, dict[str, ValueArray]]:
    states: dict[str, dict[str, ValueArray]] = {}
    try:
        with np.load(path, allow_pickle=False) as file:
            for key in file.files:
                name, _, of_state = key.rpartition("/")
                states.setdefault(name, {})[of_state] = file[key]
    except (zipfile.BadZipFile, ValueError, EOFError, AttributeError) as error:
        raise DataLossError(f"{path} is damaged, or no file of shmacc.save: {error}") from error
    return states


@contextlib.contextmanager
def _replacing(target: Path) -> Iterator[Any]:
    """Yield a file that gets the target's name when it is complete and on the disk."""
    descriptor, made = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    temporary = Path(made)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(target.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
