"""Constraints, which rows of parameters meet after an optimizer's rule.

`shmacc.optim` has them for users, and says when they are applied.
"""

import dataclasses
import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from shmacc._base import layout
from shmacc._base.shown import shown
from shmacc._values.numbers import finite
from shmacc.errors import InvalidArgumentError


@dataclass(frozen=True, slots=True)
class Constraint:
    """The common base of constraints. The rows that an update changes satisfy them afterwards.

    ``p`` is an element in the formulas. A NaN stays, and so does a row of norm 0 or infinity.
    """

    of_norms: ClassVar[bool] = False
    """Whether the constraint is on a row's norm, so that an array needs two dimensions."""

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            number = finite(getattr(self, each.name), f"{type(self).__name__}'s {each.name}")
            object.__setattr__(self, each.name, number)

    def config(self) -> tuple[int, list[float]]:
        """Return the constraint's bits in the optimizer's kind, and the constraint's limits."""
        return layout.CONSTRAINTS[type(self).__name__], list(dataclasses.astuple(self))


@dataclass(frozen=True, slots=True)
class UnitNorm(Constraint):
    """Each row is divided by its Euclidean norm; a row of zeros stays.

    The norm is computed in float64, by adding the squares in the order of the elements::

        norm = sqrt(sum(p * p))                     # of the row; then rounded to the dtype
        p = p / norm if 0 < norm < inf else p

    An array of one dimension has no rows of several numbers, and is refused.
    """

    of_norms: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class MaxNorm(Constraint):
    """Each row whose Euclidean norm is above a limit is scaled to it.

    The norm is computed as in `UnitNorm`, but not rounded; the quotient is rounded to the dtype::

        p = p * (max_value / norm) if max_value < norm < inf else p

    Attributes:
        max_value: The largest norm, not negative.
    """

    max_value: float

    of_norms: ClassVar[bool] = True

    def __post_init__(self) -> None:
        # super() would fail: a dataclass with slots is another class than the one written here.
        Constraint.__post_init__(self)
        if self.max_value < 0:
            raise InvalidArgumentError(
                f"MaxNorm's max_value must not be negative, but was {self.max_value:g}"
            )


@dataclass(frozen=True, slots=True)
class NonNeg(Constraint):
    """No element is negative: ``p = 0 if p < 0 else p``."""


@dataclass(frozen=True, slots=True)
class Clip(Constraint):
    """Each element is between two limits: ``p = low if p < low else high if p > high else p``.

    Attributes:
        low: The least value; rounded to the array's dtype, as `high`.
        high: The greatest value, not below `low`.
    """

    low: float
    high: float

    def __post_init__(self) -> None:
        Constraint.__post_init__(self)
        if self.low > self.high:
            raise InvalidArgumentError(
                f"Clip's low must not be above its high, but they were {self.low:g} and "
                f"{self.high:g}"
            )


KINDS: tuple[type[Constraint], ...] = (UnitNorm, MaxNorm, NonNeg, Clip)
"""All constraints."""

BITS = functools.reduce(operator.or_, layout.CONSTRAINTS.values())
"""The bits of an optimizer's kind that say which constraint it has."""


def check(value: Any, what: str) -> Constraint | None:
    """Return a constraint, or None.

    Raises:
        InvalidArgumentError: The value is neither.
    """
    if value is not None and type(value) not in KINDS:  # no subclass: a segment keeps no code
        kinds = ", ".join(kind.__name__ for kind in KINDS)
        raise InvalidArgumentError(
            f"{what} must be None or an object of shmacc.optim's {kinds}, but was {shown(value)}"
        )
    checked: Constraint | None = value
    return checked


def of_config(bits: int, limits: Sequence[float]) -> Constraint | None:
    """Return the constraint that these bits of an optimizer's kind mean; None: no constraint.

    Raises:
        InvalidArgumentError: The limits are out of range.
    """
    for kind in KINDS:
        if layout.CONSTRAINTS[kind.__name__] == bits:
            return kind(*limits[: len(dataclasses.fields(kind))])
    return None
