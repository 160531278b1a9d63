"""Checks of arguments other than arrays: integers, timeouts, shapes."""

import itertools
import math
import operator
from typing import Any, Literal

import numpy as np

from shmacc._base import layout
from shmacc._base.array_types import Shape
from shmacc._base.shown import shown
from shmacc._base.signals import pass_on
from shmacc.errors import InvalidArgumentError

OnDeath = Literal["wait", "raise"]
"""Whether a wait goes on or raises an error when a process that it depends on dies.

With "wait", the wait may then last for ever: tensorflow#20342, #5022.
"""

INT64_MAX = 2**63 - 1
_INT64_MIN = -(2**63)
_MOST_ELEMENTS = 2**36  # in a row, or in a dense gradient (round_shape.hpp)
ONCE = 1
"""The default weight. Compared by identity, since ``True`` and 1.0 are equal to it."""
MOST_GRADIENTS = 2**48
"""The limit of a partial's count, a capacity and a weight: more than any job ever adds up."""
_LONGEST_NAME = 200


class _NotGiven(int):
    """The type of the default `local_step`: 0, and recognisable as not given by the caller."""

    __slots__ = ()


NO_STEP: int = _NotGiven(0)
"""The default of a `local_step`, which is 0 as in TensorFlow. Compared by identity."""


def int64(value: object, what: str) -> int:
    """Return an integer argument: an int, a NumPy integer or scalar array; no bool, no float.

    Raises:
        InvalidArgumentError: The value is anything else, or does not fit int64.
    """
    if type(value) is not int:
        if value is NO_STEP:
            return 0
        if isinstance(value, bool | np.bool_) or getattr(value, "dtype", None) == np.bool_:
            raise InvalidArgumentError(f"{what} must be an integer, but was {shown(value)}")
        try:
            value = operator.index(value)  # type: ignore[arg-type]
        except TypeError as error:
            pass_on(error)
            raise InvalidArgumentError(
                f"{what} must be an integer, but was {shown(value)}"
            ) from None
    if not _INT64_MIN <= value <= INT64_MAX:
        raise InvalidArgumentError(f"{what} must be from -2**63 to 2**63 - 1, but was {value}")
    return value


def timeout(value: object, what: str = "timeout") -> float | None:
    """Return a timeout in seconds; None: for ever.

    Raises:
        InvalidArgumentError: The value is negative, NaN or no number.
    """
    if value is None:
        return None
    try:
        if isinstance(value, bool | np.bool_ | str | bytes):
            raise TypeError  # noqa: TRY301
        seconds = float(value)  # type: ignore[arg-type]
    except OverflowError:
        # An integer that is larger than any float.
        seconds = math.inf
    except (TypeError, ValueError) as error:
        pass_on(error)
        raise InvalidArgumentError(
            f"{what} must be a number of seconds or None, but was {shown(value)}"
        ) from None
    if math.isnan(seconds) or seconds < 0:
        raise InvalidArgumentError(f"{what} must not be negative or NaN, but was {shown(value)}")
    return None if math.isinf(seconds) else seconds


def attach_timeout(value: object) -> float | None:
    """Return how many seconds to wait for a name; None: do not wait; infinity: for ever.

    Raises:
        InvalidArgumentError: `timeout` raises it.
    """
    seconds = timeout(value)
    return math.inf if seconds is None and value is not None else seconds


def declared_shape(shape: Any, kind: str) -> Shape:
    """Return a constructor's shape: None, an int, or a sequence of ints and None.

    A ``tf.TensorShape`` is such a sequence.

    Raises:
        InvalidArgumentError: The shape is anything else, or so large that no gradient could fit.
    """
    if shape is None or (hasattr(shape, "rank") and shape.rank is None):
        return None
    if hasattr(shape, "as_list"):
        shape = shape.as_list()
    if isinstance(shape, str | bytes):
        raise InvalidArgumentError(f"shape must be integers or None, but was {shown(shape)}")
    if hasattr(shape, "__index__") and np.ndim(shape) == 0:
        shape = [shape]
    try:
        # No more than needed: an iterator may have no end.
        entries = list(itertools.islice(iter(shape), layout.MAX_RANK + 1))
    except TypeError as error:
        pass_on(error)
        raise InvalidArgumentError(
            f"shape must be a sequence of integers and None, but was {shown(shape)}"
        ) from None
    if len(entries) > layout.MAX_RANK:
        raise InvalidArgumentError(f"A shape has at most {layout.MAX_RANK} dimensions")
    dims = tuple(
        # TensorFlow 1's Dimension has its number as `value`.
        None if entry is None else int64(getattr(entry, "value", entry), "A dimension")
        for entry in entries
    )
    for dim in dims:
        if dim is not None and dim < 0:
            raise InvalidArgumentError(f"Dimension {dim} must be >= 0")
    row = dims[1:] if kind == "sparse" else dims
    # Dimensions of 0 count as 1, as in NumPy: so the other dimensions are limited, too.
    if math.prod(dim or 1 for dim in row) > _MOST_ELEMENTS:
        raise InvalidArgumentError(
            "A row, or a dense gradient, has at most 2**36 numbers; "
            f"the shape {describe_shape(row)} has more"
        )
    return dims


def describe_shape(shape: Shape) -> str:
    """Return a shape as TensorFlow prints it: ``[?,2]``."""
    if shape is None:
        return "<unknown>"
    return "[" + ",".join("?" if dim is None else str(dim) for dim in shape) + "]"


def partial_count(value: object, what: str = "partial.count") -> int:
    """Return how many gradients a partial counts for.

    Raises:
        InvalidArgumentError: The value is no integer from 0 to 2**48.
    """
    count = int64(value, what)
    if not 0 <= count <= MOST_GRADIENTS:
        raise InvalidArgumentError(
            f"{what} must not be negative, nor more than 2**48, but was {count}"
        )
    return count


def partial_weight(value: object, what: str = "partial.weight") -> int:
    """Return the total weight of a partial's gradients; it may exceed the limit of one weight.

    Raises:
        InvalidArgumentError: The value is negative, or no integer of 64 bits.
    """
    weight_of_all = int64(value, what)
    if weight_of_all < 0:
        raise InvalidArgumentError(f"{what} must not be negative, but was {weight_of_all}")
    return weight_of_all


def weight(value: object) -> int:
    """Return a gradient's weight: how often it counts.

    Raises:
        InvalidArgumentError: The value is no integer from 1 to 2**48.
    """
    count = int64(value, "weight")
    if not 1 <= count <= MOST_GRADIENTS:
        raise InvalidArgumentError(f"weight must be 1 to 2**48, but was {count}")
    return count


def contributor(value: object) -> int | None:
    """Return the contributor of a gradient; None: it has none.

    Raises:
        InvalidArgumentError: The value is no integer from 0 to 2**63 - 1.
    """
    if value is None:
        return None
    number = int64(value, "contributor")
    if number < 0:
        raise InvalidArgumentError(f"contributor must not be negative, but was {number}")
    return number


def limit(value: object, what: str, most: int) -> int | None:
    """Return a constructor's lanes, capacity or max_rows; None: not given.

    Raises:
        InvalidArgumentError: The value is no integer from 1 to `most`.
    """
    if value is None:
        return None
    number = int64(value, what)
    if not 1 <= number <= most:
        raise InvalidArgumentError(f"{what} must be 1 to {most}, but was {number}")
    return number


def required(num_required: object, at_least: object = None, fewest: int = 1) -> tuple[int, int]:
    """Return how many gradients a take waits for, and how many are enough at its deadline.

    Raises:
        InvalidArgumentError: An argument is no integer, `num_required` is below `fewest`, or
            `at_least` is not 1 to `num_required`.
    """
    number = int64(num_required, "num_required")
    if number < fewest:
        what = "positive" if fewest else "not be negative"
        must = "must be" if fewest else "must"
        raise InvalidArgumentError(f"Argument num_required {must} {what}, but was {number}")
    if at_least is None:
        return number, number
    least = int64(at_least, "at_least")
    if not 1 <= least <= number:
        raise InvalidArgumentError(
            f"at_least must be 1 to num_required ({number}), but was {least}"
        )
    return number, least


def on_death(value: object) -> bool:
    """Return whether a wait raises an error when a process that it depends on is gone.

    Raises:
        InvalidArgumentError: The value is neither "wait" nor "raise".
    """
    if isinstance(value, str) and value in {"wait", "raise"}:
        return value == "raise"
    raise InvalidArgumentError(f'on_death must be "wait" or "raise", but was {shown(value)}')


def check_member_name(name: object, whose: str = "A member") -> None:
    """Refuse a value that cannot be the name of a group's member, or of a shared array.

    Raises:
        InvalidArgumentError: The value is no string of 1 to 200 printable characters.
    """
    if not isinstance(name, str) or not 1 <= len(name) <= _LONGEST_NAME or not name.isprintable():
        raise InvalidArgumentError(
            f"{whose}'s name is 1 to {_LONGEST_NAME} printable characters, but was {name!r}"
        )


def reduction(reduction_type: object) -> str:
    """Return a constructor's reduction_type; None is the default, "MEAN".

    Raises:
        InvalidArgumentError: There is no such reduction.
    """
    if reduction_type is None:
        return "MEAN"
    # TensorFlow's ops take bytes, too.
    if isinstance(reduction_type, bytes):
        reduction_type = reduction_type.decode("ascii", "replace")
    if not isinstance(reduction_type, str) or reduction_type not in layout.REDUCTIONS:
        words = ", ".join(f'"{word}"' for word in layout.REDUCTIONS)
        raise InvalidArgumentError(
            f"reduction_type is a word in capitals: passed string {shown(reduction_type)} not in: "
            f"{words}."
        )
    return reduction_type
