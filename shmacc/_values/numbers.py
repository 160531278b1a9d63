"""Numbers and flags that a caller gives, checked."""

import math

from shmacc._base.shown import shown
from shmacc._base.signals import pass_on
from shmacc.errors import InvalidArgumentError


def finite(value: object, what: str) -> float:
    """Return a value as a float.

    Raises:
        InvalidArgumentError: The value is no number, or not finite.
    """
    try:
        # NumPy makes a number of an array with one element, but warns.
        is_array = getattr(value, "shape", None) not in {None, ()}
        none = is_array or isinstance(value, str) or _is_flag(value)
        number = math.nan if none else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError) as error:
        pass_on(error)
        number = math.nan
    if not math.isfinite(number):
        raise InvalidArgumentError(f"{what} must be a finite number, but was {shown(value)}")
    return number


def flag(value: object, what: str) -> bool:
    """Return a value as a bool.

    Raises:
        InvalidArgumentError: The value is no bool.
    """
    if not _is_flag(value):
        raise InvalidArgumentError(f"{what} must be True or False, but was {shown(value)}")
    return bool(value)


def _is_flag(value: object) -> bool:
    return type(value).__name__ in {"bool", "bool_"}  # NumPy's, too, without importing NumPy
