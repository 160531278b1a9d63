"""Optimizers of `Parameters`: how an update changes arrays by their gradients.

The arithmetic is that of TensorFlow's training ops; but Adam treats rows as torch's ``SparseAdam``
does. Each class gives its formula in the order of the operations. ``p`` is an element of an array,
``g`` its gradient; the other names are slots and the optimizer's numbers. An update computes in the
array's dtype, float32 or float64. Numbers that do not change during an update, such as ``1 - rho``,
are computed in float64 and then rounded. A sparse gradient changes its rows and their slots, and no
others.

``weight_decay`` is torch's: an l2 penalty, which replaces ``g`` by ``g + weight_decay * p``. In a
``decoupled`` optimizer, such as `AdamW`, ``p *= 1 - learning_rate * weight_decay`` comes first.
With the same numbers, SGD and Adagrad compute as torch's do. Where TensorFlow and torch differ,
``as_torch=True`` computes as torch; `shmacc.torch.optimizer_of` translates torch's optimizers.

``constraint`` limits the rows that an update changes: `UnitNorm`, `MaxNorm`, `NonNeg` or `Clip`. It
is applied last, after a decoupled decay too, and in the same commit. A dense gradient changes all
rows. A row is everything behind the first dimension of an array or a table. The first contents of
arrays and tables are constrained as well. New contents (``values=``) and restored contents are
stored as they are given, until an update changes the rows.

The segment keeps optimizers with the parameters. Optimizers are frozen. Two optimizers of one class
are equal if all their numbers are equal.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from shmacc._base import layout
from shmacc._base.shown import shown
from shmacc._values import constraints
from shmacc._values.constraints import Clip, Constraint, MaxNorm, NonNeg, UnitNorm
from shmacc._values.numbers import finite, flag
from shmacc.errors import InvalidArgumentError

__all__ = [
    "SGD", "Adagrad", "Adam", "AdamW", "Clip", "Constraint", "Ftrl", "MaxNorm", "NonNeg",
    "Optimizer", "RMSprop", "UnitNorm", "clip_by_global_norm",
]  # fmt: skip


_DECAY = 4  # the index of the weight decay in an optimizer's numbers
_LIMITS = 5  # the index of a constraint's first number among the same numbers


class Slot(NamedTuple):
    """A number that an optimizer keeps for each element of an array.

    Attributes:
        name: TensorFlow's name of the slot.
        initial: The value that the slot starts with.
        rowwise: Whether all elements along the last dimension share one number.
    """

    name: str
    initial: float = 0.0
    rowwise: bool = False


@dataclass(frozen=True, slots=True, repr=False)
class Optimizer:
    """The common base of optimizers.

    Attributes:
        learning_rate: The step size.
        constraint: The limit for rows after an update; None: no limit. By keyword only.
    """

    learning_rate: float
    constraint: Constraint | None = field(default=None, kw_only=True)

    _at_most: ClassVar[dict[str, float]] = {}
    """The numbers with an upper bound, and the bounds. No number may be below 0."""

    def __repr__(self) -> str:
        fields = [each.name for each in dataclasses.fields(self) if each.name != "constraint"]
        if self.constraint is not None:
            fields.append("constraint")
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in fields)
        return f"{type(self).__name__}({shown})"

    @property
    def decoupled(self) -> bool:
        """Whether ``weight_decay`` multiplies elements, instead of being added to gradients."""
        return type(self).__name__ in layout.DECOUPLED

    def __post_init__(self) -> None:
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            if each.name == "constraint":
                checked: object = constraints.check(value, f"{type(self).__name__}'s constraint")
            # `type` is a class, not a string: this module must not import `annotations`.
            elif each.type is bool:
                checked = flag(value, each.name)
            else:
                checked = self._number(value, each.name)
            object.__setattr__(self, each.name, checked)

    def _number(self, value: object, what: str) -> float:
        number = finite(value, f"{type(self).__name__}'s {what}")
        most = self._at_most.get(what, math.inf)
        if not 0 <= number <= most:
            bounds = "not be negative" if most == math.inf else f"be between 0 and {most:g}"
            raise InvalidArgumentError(
                f"{type(self).__name__}'s {what} must {bounds}, but was {shown(value)}"
            )
        return number

    def slots(self) -> tuple[Slot, ...]:
        """Return the slots of this optimizer, in order."""
        return ()

    def check_rate(
        self,
        rate: float,
        smallest: float,  # noqa: ARG002  Ftrl's
        largest: float = math.inf,
    ) -> None:
        """Refuse a learning rate that an array's dtype cannot represent.

        Args:
            rate: The learning rate, not negative.
            smallest: The smallest normal number of the dtype.
            largest: The largest number of the dtype.

        Raises:
            InvalidArgumentError: The rate is too large, or its product with a decoupled weight
                decay is; or it is too small for `Ftrl`, which divides by it.
        """
        if rate > largest:
            raise InvalidArgumentError(
                f"learning_rate must be at most {largest:.3g} in the array's dtype, but was "
                f"{rate:g}"
            )
        decay = getattr(self, "weight_decay", 0.0)
        if self.decoupled and rate * decay > largest:
            raise InvalidArgumentError(
                f"learning_rate times weight_decay must be at most {largest:.3g} in the array's "
                f"dtype, but was {rate:g} * {decay:g}"
            )

    def check_numbers(self, smallest: float, largest: float) -> None:
        """Refuse numbers of this optimizer that the arrays' dtype cannot represent.

        Args:
            smallest: The smallest normal number of the dtype.
            largest: The largest number of the dtype.

        Raises:
            InvalidArgumentError: A number is too large, or `check_rate` refuses the learning rate.
        """
        self.check_rate(self.learning_rate, smallest, largest)
        for owner in (self, self.constraint) if self.constraint else (self,):
            for each in dataclasses.fields(owner):
                number = getattr(owner, each.name)
                if each.name != "constraint" and abs(number) > largest:
                    bound = f"at least {-largest:.3g}" if number < 0 else f"at most {largest:.3g}"
                    raise InvalidArgumentError(
                        f"{type(owner).__name__}'s {each.name} must be {bound} in the array's "
                        f"dtype, but was {number:g}"
                    )

    def config(self) -> tuple[int, tuple[float, ...]]:
        """Return what the extension takes: the kind with bits for options, and the numbers."""
        kind = layout.OPTIMIZERS[type(self).__name__]
        numbers = [float(getattr(self, name)) for name in _numbers(type(self))]
        if decay := getattr(self, "weight_decay", 0.0):
            kind |= layout.OPTIMIZER_OPTIONS["weight_decay"]
            # The weight decay is always at index _DECAY; zeros fill the gap before it.
            numbers += [0.0] * (_DECAY - len(numbers)) + [decay]
        if getattr(self, "as_torch", False):
            kind |= layout.OPTIMIZER_OPTIONS["as_torch"]
        if self.constraint is not None:
            bits, limits = self.constraint.config()
            kind |= bits
            numbers += [0.0] * (_LIMITS - len(numbers)) + limits
        return kind, tuple(numbers)


@dataclass(frozen=True, slots=True, repr=False)
class SGD(Optimizer):
    """Gradient descent, with momentum if that is not 0.

    Without momentum: ``p -= learning_rate * g`` (TensorFlow's ``ResourceApplyGradientDescent``).
    With momentum (``ResourceApplyMomentum``, ``ResourceSparseApplyMomentum``)::

        momentum = momentum * decay + g         # the slot; decay: the argument `momentum`
        p -= momentum * learning_rate
        # nesterov, in place of the last line:
        p -= g * learning_rate + momentum * decay * learning_rate

    Attributes:
        learning_rate: The step size.
        momentum: How much of the last change is kept, 0 to 1; 0: there is no slot.
        nesterov: Whether the momentum is Nesterov's, which looks one step ahead.
        weight_decay: The strength of the l2 penalty.
        constraint: The limit for rows after an update; None: no limit. By keyword only.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    _at_most: ClassVar[dict[str, float]] = {"momentum": 1}

    def slots(self) -> tuple[Slot, ...]:
        """Return the slot ``momentum`` if momentum is used."""
        return (Slot("momentum"),) if self.momentum else ()


@dataclass(frozen=True, slots=True, repr=False)
class Adagrad(Optimizer):
    """Adagrad: an element's steps become shorter with the squares of its gradients.

    TensorFlow's ``ResourceApplyAdagradV2`` and ``ResourceSparseApplyAdagradV2``::

        accumulator += g * g
        p -= learning_rate * g / (sqrt(accumulator) + epsilon)

    ``rowwise`` keeps one accumulator for each row, the n elements along the last dimension. So it
    needs 1/n of the memory, as FBGEMM's ``exact_rowwise_adagrad`` and PyTorch-BigGraph's
    ``RowAdagrad``::

        accumulator += mean(g * g)
        p -= learning_rate / (sqrt(accumulator) + epsilon) * g

    For the mean, the squares are added in eight sums: sum k has the elements k, k + 8, ... in
    order. These sums are added as ``((0 + 4) + (2 + 6)) + ((1 + 5) + (3 + 7))``, then divided by n.
    An array of one dimension is then a single row, so its gradient must be dense. Gradients are
    squared with the penalty of ``weight_decay``, as with FBGEMM's ``WeightDecayMode.L2``.

    Attributes:
        learning_rate: The step size.
        initial_accumulator_value: The value that accumulators start with.
        epsilon: Added to the square root.
        rowwise: Whether each row has one accumulator.
        weight_decay: The strength of the l2 penalty.
        constraint: The limit for rows after an update; None: no limit. By keyword only.
    """

    initial_accumulator_value: float = 0.1
    epsilon: float = 0.0
    rowwise: bool = False
    weight_decay: float = 0.0

    def slots(self) -> tuple[Slot, ...]:
        """Return ``accumulator``."""
        return (Slot("accumulator", self.initial_accumulator_value, self.rowwise),)


@dataclass(frozen=True, slots=True, repr=False)
class RMSprop(Optimizer):
    """RMSprop: like Adagrad, but with a decaying mean of the squares.

    TensorFlow's ``ResourceApplyRMSProp`` and ``ResourceSparseApplyRMSProp``; ``rms`` starts at 0,
    as in Keras. The argument `momentum` is ``decay`` here::

        rms += (g * g - rms) * (1 - rho)
        p -= learning_rate * g / sqrt(rms + epsilon)
        # with momentum, in place of the last line:
        momentum = momentum * decay + learning_rate * g / sqrt(rms + epsilon)
        p -= momentum

    With ``as_torch``, ``rms`` is the same, then::

        p -= learning_rate * g / (sqrt(rms) + epsilon)
        # with momentum, in place of the last line:
        momentum = momentum * decay + g / (sqrt(rms) + epsilon)
        p -= learning_rate * momentum

    Attributes:
        learning_rate: The step size.
        rho: How much of the mean is kept, 0 to 1.
        momentum: How much of the last change is kept, 0 to 1; 0: there is no slot `momentum`.
        epsilon: Added under the square root; with `as_torch` to the root.
        weight_decay: The strength of the l2 penalty.
        as_torch: Whether to compute as torch's RMSprop does.
        constraint: The limit for rows after an update; None: no limit. By keyword only.
    """

    rho: float = 0.9
    momentum: float = 0.0
    epsilon: float = 1e-10
    weight_decay: float = 0.0
    as_torch: bool = False

    _at_most: ClassVar[dict[str, float]] = {"rho": 1, "momentum": 1}

    def slots(self) -> tuple[Slot, ...]:
        """Return the slots: ``rms``, and ``momentum`` if momentum is used."""
        return (Slot("rms"), Slot("momentum")) if self.momentum else (Slot("rms"),)


@dataclass(frozen=True, slots=True, repr=False)
class Adam(Optimizer):
    """Adam: steps by the moments of an element's gradients.

    TensorFlow's ``ResourceApplyAdam``; for rows torch's ``SparseAdam``, so the moments of other
    rows stay as they are. ``t`` is how often the array was updated, this update included. An update
    with no rows of the array does not count (``SparseAdam`` counts it, unless ``.grad`` is None)::

        rate = learning_rate * sqrt(1 - beta_2**t) / (1 - beta_1**t)      # in float64
        m += (g - m) * (1 - beta_1)
        v += (g * g - v) * (1 - beta_2)
        p -= rate * m / (sqrt(v) + epsilon)

    With ``as_torch``, dense gradients have ``epsilon * sqrt(1 - beta_2**t)`` in place of
    ``epsilon``, and an update without rows counts.

    Attributes:
        learning_rate: The step size.
        beta_1: How much of the first moment is kept; below 1.
        beta_2: How much of the second moment is kept; below 1.
        epsilon: Added to the square root.
        weight_decay: The strength of the l2 penalty.
        as_torch: Whether to compute as torch's Adam does, and for rows as its SparseAdam.
        constraint: The limit for rows after an update; None: no limit. By keyword only.
    """

    beta_1: float = 0.9
    beta_2: float = 0.999
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    as_torch: bool = False

    _at_most: ClassVar[dict[str, float]] = {
        # Below 1: the corrections divide by 1 - beta**t.
        "beta_1": math.nextafter(1, 0),
        "beta_2": math.nextafter(1, 0),
    }

    def slots(self) -> tuple[Slot, ...]:
        """Return ``m`` and ``v``."""
        return Slot("m"), Slot("v")

    def check_rate(self, rate: float, smallest: float, largest: float = math.inf) -> None:
        """Refuse a `rate` that bias correction may raise above `largest`; ignore `smallest`."""
        Optimizer.check_rate(self, rate, smallest, largest)
        if rate / (1 - self.beta_1) > largest:
            raise InvalidArgumentError(
                f"learning_rate must be at most {largest * (1 - self.beta_1):.3g} for this Adam in "
                f"the array's dtype, but was {rate:g}"
            )


@dataclass(frozen=True, slots=True, repr=False)
class AdamW(Adam):
    """Adam with decoupled weight decay: ``p *= 1 - learning_rate * weight_decay`` comes first.

    So the moments do not contain the decay. A sparse gradient decays its rows, and no others.

    Attributes:
        learning_rate: The step size.
        beta_1: How much of the first moment is kept; below 1.
        beta_2: How much of the second moment is kept; below 1.
        epsilon: Added to the square root.
        weight_decay: An update reduces each element by the part ``learning_rate * weight_decay``.
        as_torch: Whether to compute as torch's AdamW does, in the ways that `Adam` describes.
        constraint: The limit for rows after an update; None: no limit. By keyword only.
    """

    weight_decay: float = 0.01


@dataclass(frozen=True, slots=True, repr=False)
class Ftrl(Optimizer):
    """Follow the regularized leader, proximal: sparse models by l1.

    TensorFlow's ``ResourceApplyFtrlV2`` and ``ResourceSparseApplyFtrlV2`` without shrinkage::

        total = accumulator + g * g
        linear += g - (total**-power - accumulator**-power) / learning_rate * p
        p = (sign(linear) * l1 - linear) / (total**-power / learning_rate + 2 * l2)
        p = p if abs(linear) > l1 else 0
        accumulator = total

    With a power of -0.5, ``sqrt`` computes the powers; else C's ``pow``, in float64, then rounded.

    Attributes:
        learning_rate: The step size, above 0.
        learning_rate_power: How the step size falls with the accumulator: 0 or less.
        initial_accumulator_value: The value that accumulators start with.
        l1: The strength of the l1 penalty.
        l2: The strength of the l2 penalty.
        constraint: The limit for rows after an update; None: no limit. By keyword only.
    """

    learning_rate_power: float = -0.5
    initial_accumulator_value: float = 0.1
    l1: float = 0.0
    l2: float = 0.0

    def _number(self, value: object, what: str) -> float:
        number = finite(value, f"Ftrl's {what}")
        if what == "learning_rate_power":
            if number > 0:
                raise InvalidArgumentError(
                    f"Ftrl's {what} must not be positive, but was {shown(value)}"
                )
            return number
        if what == "learning_rate" and number <= 0:
            raise InvalidArgumentError(f"Ftrl's {what} must be positive, but was {shown(value)}")
        return Optimizer._number(self, value, what)  # noqa: SLF001  super() needs the class cell

    def slots(self) -> tuple[Slot, ...]:
        """Return ``accumulator`` and ``linear``."""
        return Slot("accumulator", self.initial_accumulator_value), Slot("linear")

    def check_rate(self, rate: float, smallest: float, largest: float = math.inf) -> None:
        """Refuse a `rate` above `largest`, or below `smallest`: its reciprocal may overflow."""
        Optimizer.check_rate(self, rate, smallest, largest)
        if rate < smallest:
            raise InvalidArgumentError(
                f"learning_rate must be positive for Ftrl, and at least {smallest:.3g} in the "
                f"array's dtype, but was {rate:g}"
            )


KINDS: tuple[type[Optimizer], ...] = (SGD, Adagrad, RMSprop, Adam, AdamW, Ftrl)
"""The classes of all optimizers."""


def of_config(config: tuple[int, Sequence[float]]) -> Optimizer | None:
    """Return the optimizer that a segment has for an array; None: the array has none.

    Raises:
        InvalidArgumentError: The optimizer's numbers are out of range.
    """
    number, numbers = config
    options = {name: number & bit for name, bit in layout.OPTIMIZER_OPTIONS.items()}
    constraint = number & constraints.BITS
    base = number - sum(options.values()) - constraint
    for kind in KINDS:
        if layout.OPTIMIZERS[kind.__name__] == base:
            fields = {each.name: each.type for each in dataclasses.fields(kind)}
            # A segment has five numbers for each optimizer, whether it uses them or not.
            made: dict[str, Any] = dict(zip(_numbers(kind), numbers, strict=False))
            if "weight_decay" in fields:
                made["weight_decay"] = numbers[_DECAY] if options["weight_decay"] else 0.0
            if "as_torch" in fields:
                made["as_torch"] = options["as_torch"]
            made = {n: bool(v) if fields[n] is bool else v for n, v in made.items()}
            made["constraint"] = constraints.of_config(constraint, numbers[_LIMITS:])
            return kind(**made)
    return None


def _numbers(kind: type[Optimizer]) -> list[str]:
    """Return the fields that are stored as numbers, in the segment's order; options are bits."""
    names = [each.name for each in dataclasses.fields(kind)]
    return [name for name in names if name not in {*layout.OPTIMIZER_OPTIONS, "constraint"}]


def clip_by_global_norm(taken: Mapping[str, Any], clip_norm: float) -> tuple[dict[str, Any], float]:
    """Scale gradients so that their norm, taken together, is at most `clip_norm`.

    As in TensorFlow, each gradient is multiplied by ``clip_norm / max(norm, clip_norm)``. Rows that
    a sparse gradient or a table's gradient does not have count as zeros::

        with group.round(n) as taken:
            clipped, norm = shmacc.optim.clip_by_global_norm(taken.without("loss"), 1.0)
            params.update(taken.only(), gradients=clipped)

    The sums of squares are float64. If the norm is no finite number, all numbers become NaN, as
    TensorFlow's do: look at ``math.isfinite(norm)`` before the update.

    Args:
        taken: The result of a group's round; or a mapping from names to such results:
            ``{"emb": taken}`` for a single accumulator. All values are floats, and not changed.
        clip_norm: The largest norm, 0 or more; ``math.inf`` only measures.

    Returns:
        The gradients by name, for ``gradients=`` of `Parameters.update`: an array, or
        `IndexedSlices`, in the dtype of the given part; and the norm before clipping.

    Raises:
        InvalidArgumentError: `clip_norm` is negative or NaN; `taken` is no mapping to parts of a
            round; or a part is not of floats, such as a count (leave it out by ``taken.without``).
    """
    from shmacc._values import clipping  # late: optimizers alone need no NumPy

    return clipping.clip_by_global_norm(taken, clip_norm)
