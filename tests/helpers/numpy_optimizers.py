"""Computes optimizers' updates in NumPy from their docstrings; the library must give these bits."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from shmacc import TableSpec, optim

Array = npt.NDArray[Any]


class Reference:
    """An array and its slots, updated by NumPy.

    Args:
        optimizer: The array's optimizer.
        contents: The array's initial contents.
    """

    def __init__(self, optimizer: optim.Optimizer, contents: Array) -> None:
        self.optimizer = optimizer
        self.array = constrained(optimizer.constraint, contents)
        self.updates = 0
        self.slots = {
            slot.name: np.full(
                contents.shape[:-1] if slot.rowwise else contents.shape,
                slot.initial,
                contents.dtype,
            )
            for slot in optimizer.slots()
        }

    def update(self, gradient: Array, rows: Array | None = None, rate: float | None = None) -> None:
        """Apply a gradient of these rows; None: of all rows."""
        as_torch = getattr(self.optimizer, "as_torch", False)
        if rows is not None and len(rows) == 0:
            self.updates += as_torch
            return
        self.updates += 1
        where: Any = ... if rows is None else rows
        array, slots = self.array[where], {name: slot[where] for name, slot in self.slots.items()}
        if rows is None:
            array, slots = array.copy(), {name: slot.copy() for name, slot in slots.items()}
        learning_rate = self.optimizer.learning_rate if rate is None else rate
        formula = _FORMULAS[type(self.optimizer)]
        if decay := getattr(self.optimizer, "weight_decay", 0):
            number = array.dtype.type
            if self.optimizer.decoupled:
                array = array * number(1 - learning_rate * decay)
            else:
                gradient = gradient + number(decay) * array
        if formula is _adam and as_torch and rows is None:
            slots["correction"] = math.sqrt(1 - self.optimizer.beta_2**self.updates)  # type: ignore[attr-defined]
        array = formula(self.optimizer, learning_rate, self.updates, array, slots, gradient)
        slots.pop("correction", None)
        self.array[where] = constrained(self.optimizer.constraint, array)
        for name, slot in slots.items():
            self.slots[name][where] = slot


def by_name(optimizer: optim.Optimizer, contents: Mapping[str, Any]) -> dict[str, optim.Optimizer]:
    """Return each member's optimizer; without a norm constraint if rows are single numbers."""
    plain = dataclasses.replace(optimizer, constraint=None)
    of_norms = isinstance(optimizer.constraint, optim.UnitNorm | optim.MaxNorm)
    found = {}
    for name, each in contents.items():
        has_rows = each.row_shape if isinstance(each, TableSpec) else each.shape[1:]
        found[name] = optimizer if has_rows or not of_norms else plain
    return found


def constrained(by: optim.Constraint | None, p: Array) -> Array:
    """Apply a constraint to rows; a row is everything behind the first dimension."""
    limits = np.array(dataclasses.astuple(by) if by else (), p.dtype)
    if isinstance(by, optim.NonNeg):
        return np.where(p < 0, p.dtype.type(0), p)
    if isinstance(by, optim.Clip):
        low, high = limits
        return np.where(p < low, low, np.where(p > high, high, p))
    if by is None or p.size == 0:
        return p.copy()
    norm = np.zeros((len(p), *[1] * (p.ndim - 1)))
    with np.errstate(all="ignore"):
        for column in p.reshape(len(p), -1).astype(np.float64).T:
            norm += (column * column).reshape(norm.shape)
        norm = np.sqrt(norm)
        if isinstance(by, optim.MaxNorm):
            scaled = p * (by.max_value / norm).astype(p.dtype)
            return np.where((norm > by.max_value) & (norm < math.inf), scaled, p)
        norm = norm.astype(p.dtype)
        return np.where((norm > 0) & (norm < math.inf), p / norm, p)


def _sgd(of: Any, rate: float, _: int, p: Any, slots: dict[str, Any], g: Any) -> Any:
    rate, decay = p.dtype.type(rate), p.dtype.type(of.momentum)
    if not of.momentum:
        return p - rate * g
    slots["momentum"] = m = slots["momentum"] * decay + g
    return p - (g * rate + m * decay * rate if of.nesterov else m * rate)


def _adagrad(of: Any, rate: float, _: int, p: Any, slots: dict[str, Any], g: Any) -> Any:
    rate, epsilon = p.dtype.type(rate), p.dtype.type(of.epsilon)
    if not of.rowwise:
        slots["accumulator"] = a = slots["accumulator"] + g * g
        return p - rate * g / (np.sqrt(a) + epsilon)
    slots["accumulator"] = a = slots["accumulator"] + _mean_of_squares(g)
    return p - (rate / (np.sqrt(a) + epsilon))[..., None] * g


def _mean_of_squares(g: Any) -> Any:
    width = g.shape[-1]
    squares = np.zeros((*g.shape[:-1], -(-width // 8) * 8), g.dtype)
    squares[..., :width] = g * g
    s = np.zeros((8, *g.shape[:-1]), g.dtype)
    for j in range(squares.shape[-1]):
        s[j % 8] += squares[..., j]
    return (((s[0] + s[4]) + (s[2] + s[6])) + ((s[1] + s[5]) + (s[3] + s[7]))) / g.dtype.type(width)


def _rmsprop(of: Any, rate: float, _: int, p: Any, slots: dict[str, Any], g: Any) -> Any:
    number = p.dtype.type
    slots["rms"] = r = slots["rms"] + (g * g - slots["rms"]) * number(1 - of.rho)
    if of.as_torch:
        root = np.sqrt(r) + number(of.epsilon)
        if not of.momentum:
            return p - number(rate) * g / root
        slots["momentum"] = m = slots["momentum"] * number(of.momentum) + g / root
        return p - number(rate) * m
    step = number(rate) * g / np.sqrt(r + number(of.epsilon))
    if of.momentum:
        slots["momentum"] = step = slots["momentum"] * number(of.momentum) + step
    return p - step


def _adam(of: Any, rate: float, t: int, p: Any, slots: dict[str, Any], g: Any) -> Any:
    number = p.dtype.type
    corrected = number(rate * math.sqrt(1 - of.beta_2**t) / (1 - of.beta_1**t))
    epsilon = number(of.epsilon * slots.get("correction", 1))
    slots["m"] = m = slots["m"] + (g - slots["m"]) * number(1 - of.beta_1)
    slots["v"] = v = slots["v"] + (g * g - slots["v"]) * number(1 - of.beta_2)
    return p - corrected * m / (np.sqrt(v) + epsilon)


def _ftrl(of: Any, rate: float, _: int, p: Any, slots: dict[str, Any], g: Any) -> Any:
    number = p.dtype.type

    def raised(a: Any) -> Any:
        if of.learning_rate_power == -0.5:
            return np.sqrt(a)
        power = -of.learning_rate_power
        return np.vectorize(lambda x: math.pow(x, power), otypes=[np.float64])(a).astype(a.dtype)

    total = slots["accumulator"] + g * g
    root = raised(total)
    linear = slots["linear"] + (g - (root - raised(slots["accumulator"])) / number(rate) * p)
    with np.errstate(divide="ignore", invalid="ignore"):
        shrunk = (np.copysign(number(of.l1), linear) - linear) / (
            root / number(rate) + number(2 * of.l2)
        )
    slots["accumulator"], slots["linear"] = total, linear
    return np.where(np.abs(linear) > number(of.l1), shrunk, number(0))


_FORMULAS: dict[type[optim.Optimizer], Any] = {
    optim.SGD: _sgd, optim.Adagrad: _adagrad, optim.RMSprop: _rmsprop, optim.Adam: _adam,
    optim.AdamW: _adam, optim.Ftrl: _ftrl,
}  # fmt: skip

ALL = (
    optim.SGD(0.1), optim.SGD(0.1, 0.9), optim.SGD(0.1, 0.9, nesterov=True),
    optim.SGD(0.1, weight_decay=0.01),
    optim.SGD(0.1, 0.9, nesterov=True, weight_decay=0.01), optim.Adagrad(0.05),
    optim.Adagrad(0.05, 0.0, 1e-7), optim.Adagrad(0.05, rowwise=True),
    optim.Adagrad(0.05, rowwise=True, weight_decay=0.01), optim.Adagrad(0.05, weight_decay=0.01),
    optim.RMSprop(0.01), optim.RMSprop(0.01, 0.8, 0.5, 1e-7), optim.RMSprop(0.01, as_torch=True),
    optim.RMSprop(0.01, 0.8, 0.5, 1e-3, 0.01, as_torch=True), optim.Adam(0.01),
    optim.Adam(0.1, 0.8, 0.99, 1e-3), optim.Adam(0.1, 0.8, 0.99, 1e-3, 0.01),
    optim.Adam(0.1, 0.8, 0.99, 1e-3, as_torch=True), optim.AdamW(0.1),
    optim.AdamW(0.1, 0.8, 0.99, 1e-3, 0.1, as_torch=True), optim.Ftrl(0.1),
    optim.Ftrl(0.1, l1=0.01, l2=0.1), optim.Ftrl(0.1, -0.7, 0.2, 0.01),
    optim.SGD(0.1, constraint=optim.Clip(-0.5, 0.75)), optim.AdamW(0.1, constraint=optim.NonNeg()),
)  # fmt: skip
"""Every optimizer, with options that select each of its formulas. Arrays may have any shape."""

OF_ROWS = (
    optim.SGD(0.1, constraint=optim.UnitNorm()),
    optim.Adagrad(0.05, rowwise=True, weight_decay=0.01, constraint=optim.MaxNorm(1.5)),
    optim.Adam(0.1, constraint=optim.MaxNorm(0.5)),
    optim.AdamW(0.1, constraint=optim.UnitNorm()),
)
"""Optimizers with norm constraints. Arrays must have at least two dimensions."""
