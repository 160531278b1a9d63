"""Converts an accumulator's whole content to a plain dict of arrays, for ``np.savez``, and back.

``members`` and ``specs`` name and describe the members. ``step``, ``count``, ``weight`` and
``contributors`` describe the round. Each member i that gradients have touched has ``i.values``
(sums), ``i.count`` and ``i.weight``; a sparse member also has ``i.indices``, ``i.row_counts`` and
``i.shape``.
"""

import contextlib
import errno
import re
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from shmacc._accumulators import gradient_checks
from shmacc._accumulators.member_gradient import MemberInput
from shmacc._accumulators.members import AccumulatedMember
from shmacc._accumulators.taken import DensePartial, SparsePartial
from shmacc._base.array_types import ValueArray
from shmacc._base.reports import Terms
from shmacc._base.signals import pass_on
from shmacc._core import MemberGradient, RoundResult
from shmacc._values import arguments, arrays
from shmacc._values.arguments import describe_shape
from shmacc.errors import DataLossError, InvalidArgumentError, ResourceExhaustedError, ShmaccError

_NUMBERED = re.compile(r"[0-9]+\.values")


def to_arrays(taken: RoundResult, specs: tuple[AccumulatedMember, ...]) -> dict[str, ValueArray]:
    """Return the state that the extension has read into `taken`."""
    state: dict[str, ValueArray] = {
        "members": np.array([spec.name for spec in specs]),
        "specs": np.array([spec.described() for spec in specs]),
        "step": np.array(taken.step),
        "count": np.array(taken.count),
        "weight": np.array(taken.weight),
        "contributors": taken.contributors,
    }
    for i, (number, count, weight) in enumerate(taken.members()):
        state[f"{number}.values"] = taken.values(i)
        state[f"{number}.count"] = np.array(count)
        state[f"{number}.weight"] = np.array(weight)
        if specs[number].kind == "sparse":
            state[f"{number}.indices"] = taken.indices(i)
            state[f"{number}.row_counts"] = taken.row_counts(i)
            state[f"{number}.shape"] = taken.shape(i)
    return state


def emptied(state: Mapping[str, ValueArray], step: int) -> dict[str, ValueArray]:
    """Return a copy of `state` that has no gradients, and this `step`."""
    empty = {key: state[key] for key in ("members", "specs")}
    nothing = {"count": np.array(0), "weight": np.array(0), "contributors": np.empty(0, np.int64)}
    return {**empty, "step": np.array(step), **nothing}


def from_arrays(
    state: Any, specs: tuple[AccumulatedMember, ...]
) -> tuple[list[MemberGradient], int, Terms]:
    """Return a state's members, step and terms in the form that the extension restores.

    Raises:
        InvalidArgumentError: `state` is no state, has other members, or is inconsistent.
        ResourceExhaustedError: There is no memory for contiguous copies.
    """
    own = {spec.name: (number, spec) for number, spec in enumerate(specs)}
    order = _saved_members(state, own)
    count = arguments.partial_count(get(state, "count"), "the state's count")
    weight = arguments.partial_weight(get(state, "weight"), "the state's weight")
    step = arguments.int64(get(state, "step"), "the state's step")
    who = gradient_checks.distinct(get(state, "contributors"), "the state's contributors")
    members, counts = [], []
    for saved, name in enumerate(order):
        if f"{saved}.values" in state:
            number, spec = own[name]
            try:
                partial = _partial(state, saved, spec)
                members.append(MemberInput(number, spec).partial(partial, count, weight))
                counts.append((int(partial.count), int(partial.weight)))
            except ShmaccError as error:
                pass_on(error)
                raise (error.of_member(name) if name else error) from error.__cause__
    if weight < count or (count == 0 and weight > 0):
        raise InvalidArgumentError(
            f"The state's {count} gradients cannot have the weight {weight}: each has at least 1"
        )
    # The member of a single accumulator has no name, and every gradient has this member.
    if not specs[0].name and counts != [(count, weight)] * (count > 0):
        raise InvalidArgumentError(
            f"The state's count and weight are {count} and {weight}, but not those of its values"
        )
    if who is not None and len(who) > count:
        raise InvalidArgumentError(
            f"The state has {len(who)} contributors, but its count is {count}"
        )
    return members, step, (count, weight, who, None)


def _saved_members(
    state: Mapping[str, Any], own: dict[str, tuple[int, AccumulatedMember]]
) -> list[str]:
    existing = {name: spec.described() for name, (_, spec) in own.items()}
    order = names(state, "members", existing, "member", "accumulator's")
    known = {f"{number}.values" for number in range(len(order))}
    for key in state:
        # Without this check, sums of a member that the state does not name would be ignored.
        if isinstance(key, str) and _NUMBERED.fullmatch(key) and key not in known:
            raise InvalidArgumentError(f"The state has {key!r}, but names {len(order)} members")
    return order


def names(state: Any, key: str, existing: Mapping[str, str], what: str, whose: str) -> list[str]:
    """Return the names that a state lists, in the order of the state.

    Args:
        state: The state.
        key: The state's key for its list of names. The key "specs" leads to their descriptions.
        existing: The description that each name must have.
        what: The word for a named thing in messages, such as "member".
        whose: The owner of the members in `existing`, in messages: such as "accumulator's".

    Raises:
        InvalidArgumentError: `state` is no state, has other names or descriptions, or has a name
            twice.
    """
    if not isinstance(state, Mapping):
        raise InvalidArgumentError(
            f"A state is a mapping from name to array, but was a {type(state).__name__}"
        )
    order, described = _texts(state, key), _texts(state, "specs")
    saved = dict(zip(order, described, strict=False))
    for name in existing.keys() | saved.keys():
        if existing.get(name) != saved.get(name):
            of_name = f" of {what} {name!r}" if name else ""
            raise InvalidArgumentError(
                f"The state{of_name} is that of {saved.get(name, f'no such {what}')}, but the "
                f"{whose} is {existing.get(name, f'no such {what}')}"
            )
    if len(order) != len(described):
        raise InvalidArgumentError(
            f"The state names {len(order)} {what}s, but has specs of {len(described)}"
        )
    if len(saved) < len(order):
        twice = next(name for name in saved if order.count(name) > 1)
        raise InvalidArgumentError(f"The state names {what} {twice!r} more than once")
    return order


def _texts(state: Mapping[str, Any], key: str) -> list[str]:
    given = get(state, key)
    if given.dtype.kind != "U" or given.ndim != 1:
        raise InvalidArgumentError(
            f"The state's {key!r} must be an array of strings, but has dtype {given.dtype} and "
            f"shape {describe_shape(given.shape)}"
        )
    return [str(text) for text in given]


def _partial(state: Mapping[str, Any], number: int, spec: AccumulatedMember) -> Any:
    values, count = get(state, f"{number}.values"), get(state, f"{number}.count")
    step, weight = 0, get(state, f"{number}.weight")
    if spec.kind == "dense":
        return DensePartial(values, count, step, weight)
    return SparsePartial(
        get(state, f"{number}.indices"),
        values,
        get(state, f"{number}.shape"),
        get(state, f"{number}.row_counts"),
        count,
        step,
        weight,
    )


def get(state: Mapping[str, Any], key: str) -> Any:
    """Return an array of a state. If the state is a file of ``np.load``, this reads the array.

    Raises:
        InvalidArgumentError: The state has no array of that name.
        DataLossError: The file is damaged.
    """
    if key not in state:
        raise InvalidArgumentError(f"The state has no {key!r}")
    with damage_told(f"the state's {key!r}"):
        given = state[key]
    return arrays.as_array(given, f"the state's {key!r}")


@contextlib.contextmanager
def damage_told(what: str) -> Iterator[None]:
    """Raise DataLossError if NumPy cannot read a file because it is damaged.

    NumPy may then raise nearly any exception, even of zipfile, zlib or tokenize. For instance, it
    raises NotImplementedError if a bit of the compression method's number is flipped.
    """
    try:
        yield
    except MemoryError as error:
        pass_on(error)
        raise ResourceExhaustedError(f"This process has no memory for {what}") from error
    except Exception as error:
        pass_on(error)
        if isinstance(error, OSError) and error.errno not in {None, errno.EINVAL}:
            raise  # an error of the disk; EINVAL comes from a negative offset in a damaged file
        raise DataLossError(f"{what} is damaged, or no file of shmacc.save: {error}") from error
