"""Checkpoints: accumulators and parameters that belong together, in one file."""

import contextlib
import os
import time
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from shmacc._accumulators import changes, saving
from shmacc._accumulators.accumulator import Accumulator
from shmacc._accumulators.parameters import Parameters
from shmacc._accumulators.replacing import replacing
from shmacc._gradients import arguments
from shmacc._records.array_types import ValueArray
from shmacc.errors import DataLossError, FailedPreconditionError, InvalidArgumentError

Saved = Accumulator[Any, Any] | Parameters

_ATTEMPTS = 100


def save(
    path: str | os.PathLike[str], what: Mapping[str, Saved], *, timeout: float | None = None
) -> None:
    """Write the states of accumulators and parameters into one ``.npz`` file.

    The file is there with all of it, or as it was before: a new file is written, flushed to the
    disk, and takes its place and its rights. A process that is killed meanwhile leaves nothing (on
    file systems without nameless files, as NFS, a hidden file beside it).

    In the block of a round, after `Parameters.update`, the states are those after the round; before
    it, those before the round.

    Args:
        path: The file. A symbolic link is followed.
        what: Accumulators, groups and parameters, by names for `load`.
        timeout: Seconds to wait for their locks, which a stopped process may hold; None: for ever.

    Raises:
        InvalidArgumentError: Something that cannot be saved; or `path` is that of a device, a
            directory, or anything else that is no file.
        DeadlineExceededError: The timeout passed. Nothing was written.
        FailedPreconditionError: Rounds ended all the while, so the states did not belong together;
            or a process died in `load`, so they do not either.
        OSError: Writing failed.
    """
    _check(what)
    arrays = {
        f"{name}/{key}": array
        for name, state in _states(what, arguments.timeout(timeout)).items()
        for key, array in state.items()
    }
    with replacing(Path(path)) as file:
        saved: dict[str, Any] = arrays
        np.savez(file, **saved)


def load(path: str | os.PathLike[str], what: Mapping[str, Saved]) -> None:
    """Restore what `save` has written: all of it or nothing.

    Everything is checked first; if something fails after that, all get back what they had. It is
    for a run's beginning: gradients that workers have computed from what was there before may
    still arrive after it.

    Nothing is trained on that is restored in part. The parameters are restored first, and marked;
    then the accumulators; then the mark is removed. While it is there, `Parameters.update`, `skip`
    and `save` are a FailedPreconditionError, also in a round that was open all the while. If the
    process is killed in between, the mark stays until the same parameters are loaded again, by
    whichever process, which makes all of it whole.

    Args:
        path: The file.
        what: What to restore, by the names that it was saved by; all of them.

    Raises:
        InvalidArgumentError: The file has other names, or states of something else.
        FailedPreconditionError: Another process is loading the same parameters.
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
    with contextlib.ExitStack() as taking_back:
        parameters = {name: one for name, one in what.items() if isinstance(one, Parameters)}
        for name, params in parameters.items():
            take_back = params._begin_load if params._half_loaded else params.restore  # noqa: SLF001
            had = params.state()
            params._begin_load(states[name])  # noqa: SLF001
            taking_back.callback(take_back, had)
        for name, one in what.items():
            if isinstance(one, Accumulator):
                had = one.state()
                one.restore(states[name])
                taking_back.callback(one.restore, had)
        for params in parameters.values():
            params._end_load()  # noqa: SLF001
        taking_back.pop_all()


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


def _states(what: Mapping[str, Saved], timeout: float | None) -> dict[str, dict[str, ValueArray]]:
    """Return states that belong together: no round ended, and no update, while they were read."""
    deadline = None if timeout is None else time.monotonic() + timeout
    for name, one in what.items():
        if isinstance(one, Parameters) and one._half_loaded:  # noqa: SLF001
            raise FailedPreconditionError(
                f"{name!r} cannot be saved: a load of them has not come to its end; load again"
            )
    for _ in range(_ATTEMPTS):
        marks = [_mark(one) for one in what.values()]
        states = {name: one.state(timeout=_left(deadline)) for name, one in what.items()}
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


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _mark(one: Saved) -> tuple[object, ...]:
    if isinstance(one, Parameters):
        return one.step, one._half_loaded  # noqa: SLF001
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
