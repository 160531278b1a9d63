"""The initial rows of tables: a row depends on the seed and its id alone.

So an initial row is the same in every process and on every machine, before the id is in the
`Table` and after it was removed. Word ``j`` of a row, an integer of 32 bits, is word ``j % 4`` of
Philox4x32-10 with the counter
``(j // 4, 0, id % 2**32, id // 2**32)`` and the key ``(seed % 2**32, seed // 2**32)``. Philox
repeats these lines ten times; ``high`` and ``low`` are the halves of a 64-bit product::

    a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
    c0, c1, c2, c3 = high(b) ^ c1 ^ k0, low(b), high(a) ^ c3 ^ k1, low(a)
    k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32

Each class computes its numbers from the words in float64, in the order of its formula, and rounds
them once to the table's dtype. In a process whose processor flushes subnormal numbers to zero
(``torch.set_flush_denormal(True)``, ``-ffast-math``), numbers below 1.2e-38 in float32 become 0.
"""

from dataclasses import dataclass
from typing import Any

from shmacc._base import layout
from shmacc._base.shown import shown
from shmacc._base.signals import pass_on
from shmacc._values.numbers import finite
from shmacc.errors import InvalidArgumentError

__all__ = ["Constant", "Initial", "Normal", "Uniform"]

_SEEDS = 1 << 64


@dataclass(frozen=True, slots=True)
class Initial:
    """The common base of initial contents."""

    def config(self) -> tuple[int, tuple[float, ...], int]:
        """Return the initial contents as the extension takes them: kind, numbers, seed."""
        raise NotImplementedError

    def _keep(self, **given: object) -> None:
        name = type(self).__name__
        for field, value in given.items():
            number = finite(value, f"{name}'s {field}")
            object.__setattr__(self, field, number)

    def _keep_seed(self, seed: Any) -> None:
        name = type(self).__name__
        try:
            number = -1 if isinstance(seed, bool) else seed.__index__()
        except (AttributeError, TypeError) as error:
            pass_on(error)
            number = -1
        if not 0 <= number < _SEEDS:
            raise InvalidArgumentError(
                f"{name}'s seed must be an integer from 0 to below 2**64, but was {shown(seed)}"
            )
        object.__setattr__(self, "seed", number)


@dataclass(frozen=True, slots=True)
class Constant(Initial):
    """The same number everywhere.

    Attributes:
        value: The number.
    """

    value: float = 0.0

    def __post_init__(self) -> None:
        self._keep(value=self.value)

    def config(self) -> tuple[int, tuple[float, ...], int]:
        """Return the initial contents as the extension takes them."""
        return layout.INITIALS["Constant"], (self.value,), 0


@dataclass(frozen=True, slots=True)
class Uniform(Initial):
    """Numbers between two bounds, all equally likely.

    ``low + (high - low) * (word * 2**-32)``, with the words of the module's docstring.

    Attributes:
        low: The lower bound, which can occur.
        high: The upper bound, which occurs by rounding only.
        seed: Another seed gives other numbers.
    """

    low: float
    high: float
    seed: int = 0

    def __post_init__(self) -> None:
        self._keep(low=self.low, high=self.high)
        self._keep_seed(self.seed)
        if not self.low <= self.high:
            raise InvalidArgumentError(
                f"Uniform's low must not be above its high, but they were {self.low:g} and "
                f"{self.high:g}"
            )
        finite(self.high - self.low, "Uniform's high - low")

    def config(self) -> tuple[int, tuple[float, ...], int]:
        """Return the initial contents as the extension takes them."""
        return layout.INITIALS["Uniform"], (self.low, self.high), self.seed


@dataclass(frozen=True, slots=True)
class Normal(Initial):
    """Numbers of a normal distribution.

    ``mean + stddev * quantile((word + 0.5) * 2**-32)``, with the words of the module's docstring.
    ``quantile`` is for the standard normal distribution: Wichura's algorithm AS 241 (PPND16), with
    the coefficients of Python's ``statistics.NormalDist``, to 18 digits. ``near`` (the numerator)
    and ``near_divisor`` are polynomials in ``r``, evaluated from the highest power down; likewise
    ``far`` and ``far_divisor``::

        q = p - 0.5
        if abs(q) <= 0.425:
            r = 0.180625 - q * q
            quantile = near(r) * q / near_divisor(r)
        else:
            r = sqrt(-log(p if q < 0 else 1 - p)) - 1.6
            quantile = far(r) / far_divisor(r)      # negated if q < 0

    ``log(x)``, with ``x = mantissa * 2**exponent`` and the mantissa from 0.75 to below 1.5, is a
    series in ``s = (mantissa - 1) / (mantissa + 1)``, computed from the innermost term::

        total = 1 / 21
        for k in (19, 17, 15, 13, 11, 9, 7, 5, 3, 1):
            total = total * (s * s) + 1 / k
        log = exponent * 0.6931471805599453 + 2 * s * total

    Attributes:
        mean: The mean.
        stddev: The standard deviation, not negative.
        seed: Another seed gives other numbers.
    """

    mean: float
    stddev: float
    seed: int = 0

    def __post_init__(self) -> None:
        self._keep(mean=self.mean, stddev=self.stddev)
        self._keep_seed(self.seed)
        if self.stddev < 0:
            raise InvalidArgumentError(
                f"Normal's stddev must not be negative, but was {self.stddev:g}"
            )

    def config(self) -> tuple[int, tuple[float, ...], int]:
        """Return the initial contents as the extension takes them."""
        return layout.INITIALS["Normal"], (self.mean, self.stddev), self.seed


def of_config(number: int, numbers: list[float], seed: int) -> Initial:
    """Return the initial contents that a segment has for a table.

    Raises:
        InvalidArgumentError: The numbers are out of range.
    """
    if number == layout.INITIALS["Constant"]:
        return Constant(numbers[0])
    if number == layout.INITIALS["Uniform"]:
        return Uniform(numbers[0], numbers[1], seed)
    return Normal(numbers[0], numbers[1], seed)
