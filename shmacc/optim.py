"""Optimizers of `Parameters`: what an update makes of gradients, by rows.

The arithmetic is that of TensorFlow's training ops, and for rows of Adam that of torch's
``SparseAdam``; each class gives its formula in the order of its operations. ``p`` is an element of
an array, ``g`` its gradient, the others are its slots. All of it is computed in the array's dtype,
float32 or float64; numbers that do not change during an update, such as ``1 - rho``, in float64 and
then rounded. A sparse gradient changes its rows and their slots, and no others.

Optimizers are kept in the segment, with the parameters. They are frozen, and equal if all their
numbers are.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

from shmacc._layout import layout
from shmacc.errors import InvalidArgumentError

__all__ = ["SGD", "Adagrad", "Adam", "Ftrl", "Optimizer", "RMSprop"]


class Slot(NamedTuple):
    """What an optimizer keeps of each element of an array.

    Attributes:
        name: TensorFlow's.
        initial: What it starts as.
        rowwise: Whether it has one number for all elements along the last dimension.
    """

    name: str
    initial: float = 0.0
    rowwise: bool = False


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The common base of optimizers.

    Attributes:
        learning_rate: The step size.
    """

    learning_rate: float

    _at_most: ClassVar[dict[str, float]] = {}
    """Upper bounds of numbers, which are not below 0."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type is bool:
                checked: object = _flag(value, field.name)
            else:
                checked = self._number(value, field.name)
            object.__setattr__(self, field.name, checked)

    def _number(self, value: object, what: str) -> float:
        number = _finite(value, f"{type(self).__name__}'s {what}")
        most = self._at_most.get(what, math.inf)
        if not 0 <= number <= most:
            bounds = "not be negative" if most == math.inf else f"be between 0 and {most:g}"
            raise InvalidArgumentError(
                f"{type(self).__name__}'s {what} must {bounds}, but was {value!r}"
            )
        return number

    def slots(self) -> tuple[Slot, ...]:
        """Return what it keeps of each element, in order."""
        return ()

    def check_rate(
        self,
        rate: float,
        smallest: float,  # noqa: ARG002  Ftrl's
        largest: float = math.inf,
    ) -> None:
        """Refuse a learning rate that an array's dtype does not have.

        Args:
            rate: Not negative.
            smallest: The smallest normal number of the dtype.
            largest: The largest one.

        Raises:
            InvalidArgumentError: It is too large; or too small for `Ftrl`, which divides by it.
        """
        if rate > largest:
            raise InvalidArgumentError(
                f"learning_rate must be at most {largest:.3g} in the array's dtype, but was "
                f"{rate:g}"
            )

    def check_numbers(self, smallest: float, largest: float) -> None:
        """Refuse numbers of this optimizer that the arrays' dtype cannot represent.

        Args:
            smallest: The smallest normal number of the dtype.
            largest: The largest one.

        Raises:
            InvalidArgumentError: A number is too large; or as for `check_rate`.
        """
        self.check_rate(self.learning_rate, smallest, largest)
        for field in dataclasses.fields(self):
            number = getattr(self, field.name)
            if abs(number) > largest:
                raise InvalidArgumentError(
                    f"{type(self).__name__}'s {field.name} must be at most {largest:.3g} in the "
                    f"array's dtype, but was {number:g}"
                )

    def config(self) -> tuple[int, tuple[float, ...]]:
        """Return it as the extension takes it: its number, and its fields in order."""
        numbers = tuple(float(getattr(self, field.name)) for field in dataclasses.fields(self))
        return layout.OPTIMIZERS[type(self).__name__], numbers


@dataclass(frozen=True, slots=True)
class SGD(Optimizer):
    """Gradient descent, with momentum if that is not 0.

    Without: ``p -= learning_rate * g`` (TensorFlow's ``ResourceApplyGradientDescent``). With
    (``ResourceApplyMomentum``, ``ResourceSparseApplyMomentum``)::

        momentum = momentum * decay + g         # the slot; decay: the argument `momentum`
        p -= momentum * learning_rate
        # nesterov, in place of that:
        p -= g * learning_rate + momentum * decay * learning_rate

    Attributes:
        learning_rate: The step size.
        momentum: How much of the last change is kept, 0 to 1; 0: there is no slot.
        nesterov: Whether the momentum is looked at ahead.
    """

    momentum: float = 0.0
    nesterov: bool = False

    _at_most: ClassVar[dict[str, float]] = {"momentum": 1}

    def slots(self) -> tuple[Slot, ...]:
        """Return ``momentum``, unless there is none."""
        return (Slot("momentum"),) if self.momentum else ()


@dataclass(frozen=True, slots=True)
class Adagrad(Optimizer):
    """Adagrad: an element's steps become shorter with the squares of its gradients.

    TensorFlow's ``ResourceApplyAdagradV2`` and ``ResourceSparseApplyAdagradV2``::

        accumulator += g * g
        p -= learning_rate * g / (sqrt(accumulator) + epsilon)

    ``rowwise`` keeps one accumulator a row: for all elements along the last dimension, n of them.
    So it needs 1/n of the memory, as FBGEMM's ``exact_rowwise_adagrad`` and PyTorch-BigGraph's
    ``RowAdagrad``::

        accumulator += mean(g * g)
        p -= learning_rate / (sqrt(accumulator) + epsilon) * g

    The squares of the mean are added in eight sums, each of every eighth element, in order; these
    as ``((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7))``; the sum is divided by n. An array of one
    dimension is one row then, of which a gradient must have all.

    Attributes:
        learning_rate: The step size.
        initial_accumulator_value: What accumulators start as.
        epsilon: Added to the square root.
        rowwise: Whether there is one accumulator a row.
    """

    initial_accumulator_value: float = 0.1
    epsilon: float = 0.0
    rowwise: bool = False

    def slots(self) -> tuple[Slot, ...]:
        """Return ``accumulator``."""
        return (Slot("accumulator", self.initial_accumulator_value, self.rowwise),)


@dataclass(frozen=True, slots=True)
class RMSprop(Optimizer):
    """RMSprop: as Adagrad, with a decaying mean of the squares.

    TensorFlow's ``ResourceApplyRMSProp`` and ``ResourceSparseApplyRMSProp``; ``rms`` starts at 0,
    as in Keras. The argument `momentum` is ``decay`` here::

        rms += (g * g - rms) * (1 - rho)
        p -= learning_rate * g / sqrt(rms + epsilon)
        # with momentum, in place of that:
        momentum = momentum * decay + learning_rate * g / sqrt(rms + epsilon)
        p -= momentum

    Attributes:
        learning_rate: The step size.
        rho: How much of the mean is kept, 0 to 1.
        momentum: How much of the last change is kept, 0 to 1; 0: there is no such slot.
        epsilon: Added under the square root.
    """

    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-10

    _at_most: ClassVar[dict[str, float]] = {"rho": 1, "momentum": 1}

    def slots(self) -> tuple[Slot, ...]:
        """Return ``rms``, and ``momentum`` unless there is none."""
        return (Slot("rms"), Slot("momentum")) if self.momentum else (Slot("rms"),)


@dataclass(frozen=True, slots=True)
class Adam(Optimizer):
    """Adam: steps by the moments of an element's gradients.

    TensorFlow's ``ResourceApplyAdam``; of rows torch's ``SparseAdam``: the moments of other rows
    stay as they are. ``t`` is how often the array was updated, this update included. One in
    which the array has no rows is none; ``SparseAdam`` counts it, unless ``.grad`` is None::

        rate = learning_rate * sqrt(1 - beta_2**t) / (1 - beta_1**t)      # in float64
        m += (g - m) * (1 - beta_1)
        v += (g * g - v) * (1 - beta_2)
        p -= rate * m / (sqrt(v) + epsilon)

    Attributes:
        learning_rate: The step size.
        beta_1: How much of the first moment is kept; below 1.
        beta_2: How much of the second moment is kept; below 1.
        epsilon: Added to the square root.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8

    _at_most: ClassVar[dict[str, float]] = {
        "beta_1": math.nextafter(1, 0),
        "beta_2": math.nextafter(1, 0),
    }

    def slots(self) -> tuple[Slot, ...]:
        """Return ``m`` and ``v``."""
        return Slot("m"), Slot("v")

    def check_rate(self, rate: float, smallest: float, largest: float = math.inf) -> None:
        """Refuse a `rate` whose correction may exceed `largest`; any number is above `smallest`."""
        Optimizer.check_rate(self, rate, smallest, largest)
        if rate / (1 - self.beta_1) > largest:
            raise InvalidArgumentError(
                f"learning_rate must be at most {largest * (1 - self.beta_1):.3g} for this Adam in "
                f"the array's dtype, but was {rate:g}"
            )


@dataclass(frozen=True, slots=True)
class Ftrl(Optimizer):
    """Follow the regularized leader, proximal: sparse models by l1.

    TensorFlow's ``ResourceApplyFtrlV2`` and ``ResourceSparseApplyFtrlV2`` without shrinkage::

        total = accumulator + g * g
        linear += g - (total**-power - accumulator**-power) / learning_rate * p
        p = (sign(linear) * l1 - linear) / (total**-power / learning_rate + 2 * l2)
        p = p if abs(linear) > l1 else 0
        accumulator = total

    For the power -0.5 the roots are ``sqrt``; for others they are C's ``pow`` in float64, rounded.

    Attributes:
        learning_rate: The step size, above 0.
        learning_rate_power: How it falls with the accumulator: 0 or less.
        initial_accumulator_value: What accumulators start as.
        l1: The strength of the l1 penalty.
        l2: The strength of the l2 penalty.
    """

    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1: float = 0.0
    l2: float = 0.0

    def _number(self, value: object, what: str) -> float:
        number = _finite(value, f"Ftrl's {what}")
        if what == "learning_rate_power":
            if number > 0:
                raise InvalidArgumentError(f"Ftrl's {what} must not be positive, but was {value!r}")
            return number
        if what == "learning_rate" and number <= 0:
            raise InvalidArgumentError(f"Ftrl's {what} must be positive, but was {value!r}")
        return Optimizer._number(self, value, what)  # noqa: SLF001  super() needs the class cell

    def slots(self) -> tuple[Slot, ...]:
        """Return ``accumulator`` and ``linear``."""
        return Slot("accumulator", self.initial_accumulator_value), Slot("linear")

    def check_rate(self, rate: float, smallest: float, largest: float = math.inf) -> None:
        """Refuse a `rate` above `largest`, or below `smallest`, which has no reciprocal there."""
        Optimizer.check_rate(self, rate, smallest, largest)
        if rate < smallest:
            raise InvalidArgumentError(
                f"learning_rate must be positive for Ftrl, and at least {smallest:.3g} in the "
                f"array's dtype, but was {rate:g}"
            )


def of_config(config: tuple[int, Sequence[float]]) -> Optimizer | None:
    """Return the optimizer that a segment has for an array; None: none.

    Raises:
        InvalidArgumentError: Its numbers are out of range.
    """
    number, numbers = config
    for kind in (SGD, Adagrad, RMSprop, Adam, Ftrl):
        if layout.OPTIMIZERS[kind.__name__] == number:
            fields = dataclasses.fields(kind)
            given = zip(fields, numbers, strict=False)
            made: Any = [bool(value) if field.type is bool else value for field, value in given]
            return kind(*made)
    return None


def learning_rate(value: object) -> float | None:
    """Return the rate of one update, checked; None: the optimizers' own.

    Raises:
        InvalidArgumentError: It is no number, negative or infinite.
    """
    if value is None:
        return None
    rate = _finite(value, "learning_rate")
    if rate < 0:
        raise InvalidArgumentError(f"learning_rate must not be negative, but was {value!r}")
    return rate


def _finite(value: object, what: str) -> float:
    try:
        number = math.nan if isinstance(value, str) or _is_flag(value) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidArgumentError(f"{what} must be a finite number, but was {value!r}")
    return number


def _flag(value: object, what: str) -> bool:
    if not _is_flag(value):
        raise InvalidArgumentError(f"{what} must be True or False, but was {value!r}")
    return bool(value)


def _is_flag(value: object) -> bool:
    return type(value).__name__ in {"bool", "bool_"}  # NumPy's, too, without it
