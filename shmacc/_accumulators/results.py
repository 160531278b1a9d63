"""The results of takes, made of what the extension took.

No call with a star and no generator expression here: CPython 3.11 to 3.13 may crash if memory runs
out while they are made.
"""

import numpy as np

from shmacc._core import TakenRound
from shmacc._gradients import arrays
from shmacc._gradients.dtypes import DType
from shmacc._gradients.spec import MemberSpec
from shmacc._records.records import (
    DensePartial,
    DenseTaken,
    GroupPartial,
    GroupTaken,
    SparsePartial,
    SparseTaken,
    ValueArray,
)
from shmacc.errors import ResourceExhaustedError


def to_dtype(dtype: DType, results: ValueArray) -> ValueArray:
    """Convert results from the type of sums to an accumulator's dtype.

    Raises:
        ResourceExhaustedError: There is no memory for them.
    """
    if dtype.sums_as_is:
        return results
    try:
        return dtype.narrow(results)
    except MemoryError as error:
        raise ResourceExhaustedError(
            f"This process has no memory for the result as {dtype.name}; "
            "this object's next take hands it out"
        ) from error


def sparse_taken(place: TakenRound, spec: MemberSpec) -> SparseTaken:
    """Return what was taken of a sparse accumulator; of no gradients (a snapshot): no rows."""
    if place.count == 0:
        none = _no_rows(place, spec)
        values = to_dtype(spec.dtype, none.values)
        return SparseTaken(
            none.indices, values, none.shape, none.row_counts, 0, place.step, 0, place.contributors
        )
    return _sparse_taken(place, 0, spec, place.count, place.weight)


def dense_taken(place: TakenRound, spec: MemberSpec) -> DenseTaken:
    """Return what was taken of a dense accumulator; of no gradients (a snapshot): zeros."""
    if place.count == 0:
        value = to_dtype(spec.dtype, dense_partial(place, spec).value)
        return DenseTaken(value, 0, place.step, 0, place.contributors)
    return _dense_taken(place, 0, spec, place.count, place.weight)


def sparse_partial(place: TakenRound, spec: MemberSpec) -> SparsePartial:
    """Return the partial of a sparse accumulator."""
    if place.count == 0:
        return _no_rows(place, spec)
    return _sparse_partial(place, 0, place.count, place.weight)


def dense_partial(place: TakenRound, spec: MemberSpec) -> DensePartial:
    """Return the partial of a dense accumulator; of no gradients: zeros."""
    if place.count == 0:
        shape = (0,) if spec.shape is None else [dim or 0 for dim in spec.shape]
        value = arrays.zeros(shape, spec.dtype.partial)
        return DensePartial(value, 0, place.step, 0, place.contributors)
    return _dense_partial(place, 0, place.count, place.weight)


def group_taken(place: TakenRound, specs: tuple[MemberSpec, ...]) -> GroupTaken:
    """Return what was taken of a group."""
    taken: dict[str, SparseTaken | DenseTaken] = {}
    for i, (number, count, weight) in enumerate(place.members()):
        spec = specs[number]
        make = _sparse_taken if spec.kind == "sparse" else _dense_taken
        taken[spec.name] = make(place, i, spec, count, weight)
    return GroupTaken(taken, place.count, place.step, place.weight, place.contributors)


def group_partial(place: TakenRound, specs: tuple[MemberSpec, ...]) -> GroupPartial:
    """Return the partial of a group."""
    taken: dict[str, SparsePartial | DensePartial] = {}
    for i, (number, count, weight) in enumerate(place.members()):
        spec = specs[number]
        make = _sparse_partial if spec.kind == "sparse" else _dense_partial
        taken[spec.name] = make(place, i, count, weight)
    return GroupPartial(taken, place.count, place.step, place.weight, place.contributors)


def _sparse_taken(
    place: TakenRound, i: int, spec: MemberSpec, count: int, weight: int
) -> SparseTaken:
    return SparseTaken(
        place.indices(i),
        to_dtype(spec.dtype, place.values(i)),
        place.shape(i),
        place.row_counts(i),
        count,
        place.step,
        weight,
        place.contributors,
    )


def _dense_taken(
    place: TakenRound, i: int, spec: MemberSpec, count: int, weight: int
) -> DenseTaken:
    return DenseTaken(
        to_dtype(spec.dtype, place.values(i)), count, place.step, weight, place.contributors
    )


def _sparse_partial(place: TakenRound, i: int, count: int, weight: int) -> SparsePartial:
    return SparsePartial(
        place.indices(i),
        place.values(i),
        place.shape(i),
        place.row_counts(i),
        count,
        place.step,
        weight,
        place.contributors,
    )


def _dense_partial(place: TakenRound, i: int, count: int, weight: int) -> DensePartial:
    return DensePartial(place.values(i), count, place.step, weight, place.contributors)


def _no_rows(place: TakenRound, spec: MemberSpec) -> SparsePartial:
    first, *rest = spec.shape or (None,)
    dims = [dim or 0 for dim in rest]
    shape = [-1 if first is None else first]
    shape.extend(dims)
    none = arrays.zeros((0,), np.dtype(np.int64))
    values = arrays.zeros([0, *dims], spec.dtype.partial)
    return SparsePartial(
        none, values, np.array(shape, dtype=np.int64), none, 0, place.step, 0, place.contributors
    )
