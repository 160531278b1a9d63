"""Gradients for the tests: hypothesis draws shapes, a seed gives ordinary or odd contents."""

from typing import Any, Final

import numpy as np
from helpers.elements import Element
from helpers.numpy_model import Array, Shape
from hypothesis import strategies as st

# Small numbers reveal wrong sums. Mixed magnitudes reveal a wrong order of addition. Special values
# (such as NaN) must get no special treatment by a kernel. Extreme integers wrap.
KINDS: Final = ("small", "mixed", "special", "extreme")


def numbers(element: Element, shape: tuple[int, ...], kind: str, seed: int) -> Array:
    """Make an array of this dtype with this kind of contents."""
    rng = np.random.default_rng(seed)
    plain = element.plain
    if element.integral:
        made = _integers(rng, plain, shape, kind)
    elif plain.kind == "c":
        real = np.dtype(f"f{plain.itemsize // 2}")
        parts = [_floats(rng, real, shape, kind) for _ in range(2)]
        made = np.empty(shape, dtype=plain)
        made.real, made.imag = parts
    else:
        made = _floats(rng, plain, shape, kind)
    return made.view(element.dtype) if element.quantised else made


def _integers(
    rng: np.random.Generator, plain: np.dtype[Any], shape: tuple[int, ...], kind: str
) -> Array:
    limits = np.iinfo(plain)
    low, high = (max(limits.min, -9), 9) if kind != "extreme" else (limits.min, limits.max)
    made: Array = rng.integers(low, high, size=shape, dtype=plain, endpoint=True)
    return np.asarray(made, dtype=plain)


def _floats(
    rng: np.random.Generator, plain: np.dtype[Any], shape: tuple[int, ...], kind: str
) -> Array:
    if kind == "small":
        return np.asarray(rng.integers(-9, 10, size=shape)).astype(plain)
    mixed = np.asarray(rng.normal(size=shape) * 10.0 ** rng.integers(-4, 5, size=shape))
    if kind == "mixed":
        return mixed.astype(plain)
    tiny = {2: 6e-8, 4: 1e-45, 8: 5e-324}[plain.itemsize]
    large = {2: 6e4, 4: 3e38, 8: 1.7e308}[plain.itemsize]
    odd = [0.0, -0.0, tiny, -tiny, large, -large]
    if kind == "special":
        odd += [np.inf, -np.inf, np.nan]
    chosen = np.asarray(rng.choice(odd, size=shape))
    with np.errstate(all="ignore"):
        return np.asarray(np.where(rng.random(size=shape) < 0.5, chosen, mixed)).astype(plain)


def shapes(max_dims: int = 3) -> st.SearchStrategy[Shape]:
    """Draw declared shapes: unknown, partly known or known."""
    dims = st.one_of(st.none(), st.integers(1, 4))
    return st.one_of(st.none(), st.lists(dims, max_size=max_dims).map(tuple))


@st.composite
def filled(draw: st.DrawFn, declared: tuple[int | None, ...], wrong: int = 10) -> tuple[int, ...]:
    """Draw dims that agree with the declared dims; about one draw in ``wrong`` may disagree."""
    dims = [draw(st.integers(0, 3)) if d is None else d for d in declared]
    if draw(st.integers(0, wrong)) == wrong:
        how = draw(st.sampled_from(["longer", "shorter", "other"]))
        if how == "longer":
            dims.append(draw(st.integers(1, 2)))
        elif dims and how == "shorter":
            dims.pop()
        elif dims:
            dims[draw(st.integers(0, len(dims) - 1))] += 1
    return tuple(dims)
