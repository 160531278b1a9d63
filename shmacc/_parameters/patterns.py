"""Assigns optimizers and learning rates to arrays by patterns of names."""

import re
from collections.abc import Collection, Mapping
from typing import Any

from shmacc import optim
from shmacc._base.shown import shown
from shmacc._values.numbers import finite
from shmacc.errors import InvalidArgumentError

LearningRate = float | Mapping[str, float] | None
"""The learning rates of one update: a number for all arrays, or a mapping from patterns of names;
None: the optimizers' rates."""


def by_name(
    given: Mapping[str, Any], names: Collection[str], what: str, noun: str = "array"
) -> dict[str, Any]:
    """Return for each name the value of the first pattern that it matches.

    Args:
        given: A mapping from pattern to value. Only ``*`` is special: it stands for any characters.
        names: All names. The result leaves out names that match no pattern.
        what: What the values are, for the message.
        noun: What the names are, for the message.

    Raises:
        InvalidArgumentError: A pattern other than ``"*"`` is not the first match of any name.
    """
    found: dict[str, Any] = {}
    for pattern, value in given.items():
        if not isinstance(pattern, str):
            raise InvalidArgumentError(f"{what} is by name, but a name was {shown(pattern)}")
        matches = re.compile(".*".join(map(re.escape, pattern.split("*"))), re.DOTALL).fullmatch
        new = [name for name in names if name not in found and matches(name)]
        if not new and pattern != "*":
            of_earlier = ", or each has an earlier one" if any(map(matches, found)) else ""
            matches_none = f"matches no {noun}" if "*" in pattern else f"is no {noun}"
            raise InvalidArgumentError(
                f"There is {what} for {shown(pattern)}, which {matches_none}{of_earlier}"
            )
        found.update(dict.fromkeys(new, value))
    return found


def learning_rates(
    value: object, optimizers: Mapping[str, optim.Optimizer | None]
) -> dict[str, float]:
    """Check the learning rates of one update, and return them by the arrays' names.

    Arrays that are not in the result use their optimizers' rates.

    Args:
        value: None, a number for all names, or a mapping from patterns to numbers (`by_name`).
        optimizers: The arrays' optimizers. A pattern must match an array that has an optimizer.

    Raises:
        InvalidArgumentError: A rate is no number, negative or infinite; or `by_name` raises it.
    """
    if value is None:
        return {}
    given = value if isinstance(value, Mapping) else {"*": value}
    rates = {pattern: finite(rate, "learning_rate") for pattern, rate in given.items()}
    for rate in rates.values():
        if rate < 0:
            raise InvalidArgumentError(f"learning_rate must not be negative, but was {shown(rate)}")
    names = [name for name, optimizer in optimizers.items() if optimizer is not None]
    return by_name(rates, names, "a learning_rate", "array with an optimizer")
