"""What patterns of names give arrays: optimizers, learning rates."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from shmacc import optim
from shmacc.errors import InvalidArgumentError

LearningRate = float | Mapping[str, float] | None
"""Of one update: all arrays', or by patterns of their names; None: the optimizers' own."""


def by_name(given: Mapping[str, Any], names: Collection[str], what: str) -> dict[str, Any]:
    """Return what a mapping from patterns gives each name: that of the first pattern it matches.

    Args:
        given: A ``*`` in a pattern is for any characters; all others are for themselves.
        names: Those that there are. The ones that match no pattern are left out.
        what: What the mapping gives, for the message.

    Raises:
        InvalidArgumentError: A pattern other than ``"*"`` is for no name.
    """
    found: dict[str, Any] = {}
    for pattern, value in given.items():
        if not isinstance(pattern, str):
            raise InvalidArgumentError(f"{what} is by name, but a name was {pattern!r}")
        matches = re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL).fullmatch
        new = [name for name in names if name not in found and matches(name)]
        if not new and pattern != "*":
            of_earlier = ", or each has an earlier one" if any(map(matches, found)) else ""
            matches_none = "matches no array" if "*" in pattern else "is no array"
            raise InvalidArgumentError(
                f"There is {what} for {pattern!r}, which {matches_none}{of_earlier}"
            )
        found.update(dict.fromkeys(new, value))
    return found


def learning_rates(value: object, names: Collection[str]) -> dict[str, float]:
    """Return the rates of one update by name, checked; those left out are the optimizers' own.

    Args:
        value: None, a number for all names, or a mapping from patterns to numbers (`by_name`).
        names: Of the arrays.

    Raises:
        InvalidArgumentError: One is no number, negative or infinite; or a pattern is for no name.
    """
    if value is None:
        return {}
    given = value if isinstance(value, Mapping) else {"*": value}
    rates = {pattern: optim.finite(rate, "learning_rate") for pattern, rate in given.items()}
    for rate in rates.values():
        if rate < 0:
            raise InvalidArgumentError(f"learning_rate must not be negative, but was {rate!r}")
    return by_name(rates, names, "a learning_rate")
