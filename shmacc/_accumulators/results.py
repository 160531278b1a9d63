"""Makes the results of takes from the extension's rounds.

Do not use ``f(*args)`` or a generator expression here: CPython 3.11 to 3.13 may crash if memory
runs out during either.
"""

import numpy as np

from shmacc._accumulators.members import AccumulatedMember
from shmacc._accumulators.taken import (
    DensePartial,
    DenseTaken,
    GroupPartial,
    GroupTaken,
    SparsePartial,
    SparseTaken,
)
from shmacc._base.array_types import ValueArray
from shmacc._base.signals import pass_on
from shmacc._core import RoundResult
from shmacc._values import arrays
from shmacc._values.dtypes import DType
from shmacc.errors import ResourceExhaustedError


def to_dtype(dtype: DType, results: ValueArray) -> ValueArray:
    """Convert results from the type of sums to an accumulator's dtype.

    Raises:
        ResourceExhaustedError: There is no memory for the results.
    """
    if dtype.sums_as_is:
        return results
    try:
        return dtype.narrow(results)
    except MemoryError as error:
        pass_on(error)
        raise ResourceExhaustedError(
            f"This process has no memory for the result as {dtype.name}; "
            "this object's next take hands it out"
        ) from error


def sparse_taken(taken: RoundResult, spec: AccumulatedMember) -> SparseTaken:
    """Return the result of a sparse accumulator; a snapshot without gradients has no rows."""
    if taken.count == 0:
        none = _no_rows(taken, spec)
        values = to_dtype(spec.dtype, none.values)
        return SparseTaken(
            none.indices, values, none.shape, none.row_counts, 0, taken.step, 0, taken.contributors
        )
    return _sparse_taken(taken, 0, spec, taken.count, taken.weight)


def dense_taken(taken: RoundResult, spec: AccumulatedMember) -> DenseTaken:
    """Return the result of a dense accumulator; a snapshot without gradients has zeros."""
    if taken.count == 0:
        value = to_dtype(spec.dtype, dense_partial(taken, spec).value)
        return DenseTaken(value, 0, taken.step, 0, taken.contributors)
    return _dense_taken(taken, 0, spec, taken.count, taken.weight)


def sparse_partial(taken: RoundResult, spec: AccumulatedMember) -> SparsePartial:
    if taken.count == 0:
        return _no_rows(taken, spec)
    return _sparse_partial(taken, 0, taken.count, taken.weight)


def dense_partial(taken: RoundResult, spec: AccumulatedMember) -> DensePartial:
    """Return the partial of a dense accumulator; without gradients it has zeros."""
    if taken.count == 0:
        shape = (0,) if spec.shape is None else [dim or 0 for dim in spec.shape]
        value = arrays.zeros(shape, spec.dtype.partial)
        return DensePartial(value, 0, taken.step, 0, taken.contributors)
    return _dense_partial(taken, 0, taken.count, taken.weight)


def group_taken(
    taken: RoundResult, specs: tuple[AccumulatedMember, ...], names: tuple[str, ...]
) -> GroupTaken:
    """Return the result of a group; `names` has the members' names in the order of `specs`."""
    members: dict[str, SparseTaken | DenseTaken] = {}
    for i, (number, count, weight) in enumerate(taken.members()):
        spec = specs[number]
        make = _sparse_taken if spec.kind == "sparse" else _dense_taken
        members[spec.name] = make(taken, i, spec, count, weight)
    made = GroupTaken(members, taken.count, taken.step, taken.weight, taken.contributors)
    return made._of_group(names)  # noqa: SLF001


def group_partial(taken: RoundResult, specs: tuple[AccumulatedMember, ...]) -> GroupPartial:
    members: dict[str, SparsePartial | DensePartial] = {}
    for i, (number, count, weight) in enumerate(taken.members()):
        spec = specs[number]
        make = _sparse_partial if spec.kind == "sparse" else _dense_partial
        members[spec.name] = make(taken, i, count, weight)
    return GroupPartial(members, taken.count, taken.step, taken.weight, taken.contributors)


def _sparse_taken(
    taken: RoundResult, i: int, spec: AccumulatedMember, count: int, weight: int
) -> SparseTaken:
    return SparseTaken(
        taken.indices(i),
        to_dtype(spec.dtype, taken.values(i)),
        taken.shape(i),
        taken.row_counts(i),
        count,
        taken.step,
        weight,
        taken.contributors,
    )


def _dense_taken(
    taken: RoundResult, i: int, spec: AccumulatedMember, count: int, weight: int
) -> DenseTaken:
    return DenseTaken(
        to_dtype(spec.dtype, taken.values(i)), count, taken.step, weight, taken.contributors
    )


def _sparse_partial(taken: RoundResult, i: int, count: int, weight: int) -> SparsePartial:
    return SparsePartial(
        taken.indices(i),
        taken.values(i),
        taken.shape(i),
        taken.row_counts(i),
        count,
        taken.step,
        weight,
        taken.contributors,
    )


def _dense_partial(taken: RoundResult, i: int, count: int, weight: int) -> DensePartial:
    return DensePartial(taken.values(i), count, taken.step, weight, taken.contributors)


def _no_rows(taken: RoundResult, spec: AccumulatedMember) -> SparsePartial:
    first, *rest = spec.shape or (None,)
    dims = [dim or 0 for dim in rest]
    shape = [-1 if first is None else first]
    shape.extend(dims)
    none = arrays.zeros((0,), np.dtype(np.int64))
    values = arrays.zeros([0, *dims], spec.dtype.partial)
    return SparsePartial(
        none, values, np.array(shape, dtype=np.int64), none, 0, taken.step, 0, taken.contributors
    )
