"""Checkpoints: accumulators and parameters that belong together, in one file."""

import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from shmacc import _core
from shmacc._accumulators import saved_state
from shmacc._accumulators.accumulator import Accumulator
from shmacc._base.array_types import ValueArray
from shmacc._base.shown import shown
from shmacc._parameters.parameters import Parameters
from shmacc._parameters.replaced_file import replacing
from shmacc._values import arguments
from shmacc.errors import DeadlineExceededError, FailedPreconditionError, InvalidArgumentError

Saved = Accumulator[Any, Any] | Parameters

_ATTEMPTS = 100
_LONGEST_NAME = 65_000  # bytes; with the state's key and ".npy" they must be below 2**16


def save(
    path: str | os.PathLike[str], what: Mapping[str, Saved], *, timeout: float | None = None
) -> None:
    """Write the states of accumulators and parameters into one ``.npz`` file.

    The file gets all of its new content, or stays as it was: a new file is written and flushed to
    the disk, and then replaces the old one, with its permissions. A process that is killed in
    between may leave a hidden file beside it, ``.NAME.shmacc-save``. The next call that replaces
    the file removes it. (On file systems without nameless files, such as NFS, or if another program
    has locked the folder, the hidden file is ``.NAME.`` and eight digits, and stays.)

    In the block of a round, the states are from before the round; after `Parameters.update`, they
    are from after the round.

    Args:
        path: The file. A symbolic link is followed.
        what: Accumulators, groups and parameters, by names for `load`.
        timeout: Seconds to wait for their locks, which a stopped process may hold, and for a moment
            in which no round ends; None: for ever.

    Raises:
        InvalidArgumentError: Something cannot be saved; or `path` leads to a device, a directory,
            or anything else that is no file.
        DeadlineExceededError: The timeout passed. Nothing was written.
        FailedPreconditionError: The states do not belong together: rounds ended during every
            attempt to read them, or a process died in `load`.
        OSError: Writing failed.
    """
    _check(what)
    arrays: dict[str, Any] = {
        name + f"/{key}": array  # in an f-string, an enum's name may be another text
        for name, state in _states(what, arguments.timeout(timeout)).items()
        for key, array in state.items()
    }
    with replacing(Path(path)) as file:
        np.savez(file, **arrays)


def load(
    path: str | os.PathLike[str], what: Mapping[str, Saved], *, timeout: float | None = None
) -> None:
    """Restore all states of a file that `save` has written, or none.

    Everything is checked first. Then all objects are replaced as one, with the locks of all of them
    held; no exception can interrupt this, not even a signal handler's. Gradients that workers
    computed before the load are dropped, whatever their step. (An accumulator's `restore` says when
    a worker's gradients count again.)

    Only a process that is killed can leave a load half done. The parameters are then marked:
    `Parameters.update`, `skip` and `save` raise FailedPreconditionError until any process loads the
    same file again, which completes the load.

    Args:
        path: The file.
        what: The objects to restore, under all names of the file.
        timeout: Seconds to wait for their locks, which a stopped process may hold; None: for ever.

    Raises:
        InvalidArgumentError: The file has other names, or states of other objects; or two names
            lead to the same segment.
        DataLossError: The file was not written by `save`, or is damaged.
        DeadlineExceededError: The timeout passed. Nothing was changed.
        ResourceExhaustedError: Shared memory, or this process's memory, is full.
        OSError: Reading failed.
    """
    _check(what)
    seconds = arguments.timeout(timeout)
    states = _read(Path(path))
    if states.keys() != what.keys():
        raise InvalidArgumentError(
            f"{os.fspath(path)} has {_listed(states)}; asked for: {_listed(what)}"
        )
    # `_to_load` checks its state: so all are checked before the first object is changed.
    to_load = {name: one._to_load(states[name]) for name, one in what.items()}  # noqa: SLF001
    parameters = [to_load[name] for name, one in what.items() if isinstance(one, Parameters)]
    accumulators = [to_load[name] for name, one in what.items() if isinstance(one, Accumulator)]
    _core.load(parameters, accumulators, seconds)


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(shown, sorted(names))) or "nothing"


def _check(what: object) -> None:
    if not isinstance(what, Mapping):
        raise InvalidArgumentError(
            "What is saved is a mapping from name to accumulator or parameters, but was a "
            f"{type(what).__name__}"
        )
    names: dict[int, str] = {}
    for name, one in what.items():
        if not isinstance(name, str) or not name or not _can_be_stored(name):
            raise InvalidArgumentError(
                f"A name in a file is a string without NUL and lone surrogates, of at most "
                f"{_LONGEST_NAME:,} bytes in UTF-8, but was {shown(name)}"
            )
        if not isinstance(one, Accumulator | Parameters):
            raise InvalidArgumentError(
                f"{name!r} must be an accumulator, a group or shmacc.Parameters, but was a "
                f"{type(one).__name__}"
            )
        other = names.setdefault(one._token, name)  # noqa: SLF001
        if other != name:
            raise InvalidArgumentError(f"{other!r} and {name!r} are the same {type(one).__name__}")


def _can_be_stored(name: str) -> bool:
    """Return whether a zip file can store the name.

    NUL would end it, UTF-8 must encode it, and a zip file has 16 bits for its length.
    """
    try:
        return "\0" not in name and len(name.encode()) <= _LONGEST_NAME
    except UnicodeEncodeError:
        return False


def _states(what: Mapping[str, Saved], timeout: float | None) -> dict[str, dict[str, ValueArray]]:
    """Return states that belong together: no round or update ended while they were read."""
    deadline = None if timeout is None else time.monotonic() + timeout
    for attempt in range(_ATTEMPTS):
        if attempt and deadline is not None and time.monotonic() > deadline:
            raise DeadlineExceededError(
                "Rounds ended while the states were read, until the timeout; nothing was written: "
                "save in the block of a round"
            )
        ages = [_age(one) for one in what.values()]
        for name, one in what.items():
            if isinstance(one, Parameters) and one._half_loaded:  # noqa: SLF001
                raise FailedPreconditionError(
                    f"{name!r} cannot be saved: a load of them has not come to its end; load again"
                )
        states = {name: one.state(timeout=_left(deadline)) for name, one in what.items()}
        rounds = {
            name: one._handle.state()  # noqa: SLF001
            for name, one in what.items()
            if isinstance(one, Accumulator)
        }
        # Each state is of one instant. They belong together only if no round ended in between.
        if ages == [_age(one) for one in what.values()]:
            break
    else:
        raise FailedPreconditionError(
            "Rounds ended all the while that the states were read: save in the block of a round"
        )
    steps = {what[name]._token: int(states[name]["step"]) for name in what.keys() - rounds.keys()}  # noqa: SLF001
    for name, seen in rounds.items():
        update, step = seen["update"], int(states[name]["step"])
        # The parameters already have this round's gradients. A load must not restore them, too.
        if update and (update["is_in"] or steps.get(seen["belongs_to"]) == step + 1):
            states[name] = saved_state.emptied(states[name], step + 1)
    return states


def _left(deadline: float | None) -> float | None:
    return None if deadline is None else max(0.0, deadline - time.monotonic())


def _age(one: Saved) -> int:
    """Return a number that changes with each round, update and restore."""
    return one._handle.state()["generation"]  # noqa: SLF001


def _read(path: Path) -> dict[str, dict[str, ValueArray]]:
    states: dict[str, dict[str, ValueArray]] = {}
    with (
        path.open("rb") as opened,  # np.load would leave its own file open if it fails
        saved_state.damage_told(str(path)),
        _archive(opened) as file,
    ):
        for key in file.files:
            # A name may have slashes, but a key of a state has none.
            name, _, of_state = key.rpartition("/")
            if not name:
                raise ValueError(f"it has {shown(key)}, which is no name and key of a state")
            states.setdefault(name, {})[of_state] = file[key]
    return states


def _archive(opened: BinaryIO) -> np.lib.npyio.NpzFile:
    file = np.load(opened, allow_pickle=False)
    if not isinstance(file, np.lib.npyio.NpzFile):
        raise ValueError("it is one array (.npy)")  # noqa: TRY004  the file is damaged, no argument
    return file
