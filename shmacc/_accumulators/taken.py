"""The results of takes: rounds, either reduced or as partials."""

from collections.abc import Collection, Iterator, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import FrozenInstanceError, dataclass
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from shmacc._base.array_types import IndexArray, ValueArray
from shmacc._values.slices import Undivided
from shmacc.errors import InvalidArgumentError

if TYPE_CHECKING:
    import jax
    import scipy.sparse
    import torch
    from jax.experimental.sparse import BCOO

_Record = TypeVar("_Record")


def _set(record: Any, name: str, value: object) -> None:
    """Allow ``record.values *= 0.1``: Python scales the array, then assigns it to the field."""
    before = getattr(record, name, None)
    # `before` is also None if there is no such field.
    if before is not value or before is None:
        what_to_do = (
            f": write into the array (`taken.{name}[...] = other`, `taken.{name} *= 0.1`), or give "
            "an update other gradients, as in params.update(taken, gradients={...})"
        )
        raise FrozenInstanceError(
            f"{name!r} of a {type(record).__name__} cannot be set"
            f"{what_to_do if isinstance(before, np.ndarray) else ''}"
        )


def _keeps_its_arrays(record: type[_Record]) -> type[_Record]:
    """Let an augmented assignment change the arrays of a frozen record in place."""
    record.__setattr__ = _set  # type: ignore[method-assign]
    return record


@_keeps_its_arrays
class SparseGradient(NamedTuple):
    """The result of a sparse ``take_grad``, as TensorFlow's op returns it.

    Attributes:
        indices: int64, shape ``(n,)``, ascending, each row once.
        values: The accumulator's dtype, shape ``(n, ...)``.
        shape: int64: the declared first dimension (-1 if unknown), then the row dimensions of
            ``values``.
    """

    indices: IndexArray
    values: ValueArray
    shape: IndexArray


@_keeps_its_arrays
@dataclass(frozen=True, slots=True, eq=False)
class SparseTaken:
    """The result of a take from a sparse accumulator, or of a group's sparse member.

    Attributes:
        indices: int64, shape ``(n,)``, ascending, each row once.
        values: Shape ``(n, ...)``: reduced; in a partial, sums (float32 for the half types, 64
            bits for integers).
        shape: int64: the declared first dimension (-1 if unknown), then the row dimensions of
            ``values``.
        row_counts: int64, shape ``(n,)``: for each row, the sum of the weights of the gradients
            that touched it (without weights: their number).
        count: How many gradients were reduced; for a member, how many gradients had it.
        step: The global step that this take closed (a partial: the step it belongs to).
        weight: The sum of these gradients' weights; without weights it equals ``count``.
        contributors: int64, ascending: the contributors that the round's gradients named.
    """

    indices: IndexArray
    values: ValueArray
    shape: IndexArray
    row_counts: IndexArray
    count: int
    step: int
    weight: int = None  # type: ignore[assignment]  # if not given: count
    contributors: IndexArray = None  # type: ignore[assignment]  # if not given: nobody

    def __post_init__(self) -> None:
        _complete(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> ValueArray:
        """Refuse the conversion: this object has only some rows of the tensor."""
        raise TypeError(
            f"{type(self).__name__} has rows of a tensor: its rows are .values, their numbers "
            ".indices; to_scipy().toarray() and to_torch().to_dense() make all of the tensor"
        )

    def to_torch(self) -> "torch.Tensor":
        """Return a coalesced sparse COO tensor on the same memory, as optimizers take it.

        Raises:
            FailedPreconditionError: The number of rows of the whole tensor was not declared.
        """
        from shmacc._values.conversions import torch  # loads a package

        return torch.sparse(self.indices, self.values, self.shape)

    def to_jax(self) -> "BCOO":
        """Return a ``jax.experimental.sparse.BCOO`` whose elements are rows.

        Numbers of 64 bits become 32 bits wide unless ``jax_enable_x64`` is set.

        Raises:
            FailedPreconditionError: The number of rows of the whole tensor was not declared.
            OutOfRangeError: An integer does not fit 32 bits.
        """
        from shmacc._values.conversions import jax  # loads a package

        return jax.sparse(self.indices, self.values, self.shape)

    def to_scipy(self) -> "scipy.sparse.csr_array":
        """Return a ``scipy.sparse.csr_array`` on the memory of the values.

        SciPy has no float16 and no bfloat16: these become float32.

        Raises:
            FailedPreconditionError: The number of rows of the whole tensor was not declared, or its
                rows are not vectors.
        """
        from shmacc._values.conversions import scipy  # loads a package

        return scipy.sparse(self.indices, self.values, self.shape)


@_keeps_its_arrays
@dataclass(frozen=True, slots=True, eq=False)
class DenseTaken:
    """The result of a take from a dense accumulator, or of a group's dense member.

    Attributes:
        value: The round's shape: reduced; in a partial, sums (float32 for the half types, 64 bits
            for integers).
        count: How many gradients were reduced; for a member, how many gradients had it.
        step: The global step that this take closed (a partial: the step it belongs to).
        weight: The sum of these gradients' weights; without weights it equals ``count``.
        contributors: int64, ascending: the contributors that the round's gradients named.
    """

    value: ValueArray
    count: int
    step: int
    weight: int = None  # type: ignore[assignment]  # if not given: count
    contributors: IndexArray = None  # type: ignore[assignment]  # if not given: nobody

    def __post_init__(self) -> None:
        _complete(self)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> ValueArray:
        """Return the value, for ``np.asarray``."""
        if copy is None:  # np.array accepts None only since NumPy 2
            return np.asarray(self.value, dtype)
        return np.array(self.value, dtype=dtype, copy=copy)

    def to_torch(self) -> "torch.Tensor":
        """Return a tensor on the same memory."""
        from shmacc._values.conversions import torch  # loads a package

        return torch.tensor(self.value)

    def to_jax(self) -> "jax.Array":
        """Return a JAX array. `SparseTaken.to_jax` documents errors and numbers of 64 bits."""
        from shmacc._values.conversions import jax  # loads a package

        return jax.array(self.value)

    def to_scipy(self) -> ValueArray:
        """Return the value: SciPy uses NumPy's arrays for dense data."""
        return self.value


def _complete(taken: SparseTaken | DenseTaken) -> None:
    if taken.weight is None:
        object.__setattr__(taken, "weight", taken.count)
    if taken.contributors is None:
        object.__setattr__(taken, "contributors", np.empty(0, np.int64))


@_keeps_its_arrays
@dataclass(frozen=True, slots=True, eq=False)
class SparsePartial(SparseTaken, Undivided):
    """Sums of a sparse accumulator, not divided, which another accumulator can add."""


@_keeps_its_arrays
@dataclass(frozen=True, slots=True, eq=False)
class DensePartial(DenseTaken, Undivided):
    """Sums of a dense accumulator, not divided, which another accumulator can add."""


_Member = TypeVar("_Member", bound=SparseTaken | DenseTaken)


class _Members(Mapping[str, _Member], Generic[_Member]):
    """The members that a round touched, by name."""

    __slots__ = ("_known", "_members", "_whole", "contributors", "count", "step", "weight")

    def __init__(
        self,
        members: Mapping[str, _Member],
        count: int,
        step: int,
        weight: int | None = None,
        contributors: IndexArray | None = None,
    ) -> None:
        self._members = dict(members)
        self._known: Collection[str] = tuple(members)
        self._whole: Self | None = None
        self.count: int = count
        self.step: int = step
        self.weight: int = count if weight is None else weight
        self.contributors: IndexArray = (
            np.empty(0, np.int64) if contributors is None else contributors
        )

    def __getitem__(self, name: str) -> _Member:
        return self._members[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def to_torch(self) -> "dict[str, torch.Tensor]":
        """Return tensors by member. Errors are those of a single member."""
        return {name: member.to_torch() for name, member in self._members.items()}

    def to_jax(self) -> "dict[str, jax.Array | BCOO]":
        """Return JAX arrays by member. Errors are those of a single member."""
        return {name: member.to_jax() for name, member in self._members.items()}

    def to_scipy(self) -> "dict[str, ValueArray | scipy.sparse.csr_array]":
        """Return SciPy's or NumPy's arrays by member. Errors are those of a single member."""
        return {name: member.to_scipy() for name, member in self._members.items()}

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._members!r}, count={self.count}, step={self.step}, "
            f"weight={self.weight}, contributors={self.contributors!r})"
        )


class GroupTaken(_Members[Any]):
    """The result of a take from a group: a mapping from member to its part of the round.

    The part of a sparse member is a `SparseTaken`, the part of a dense member a `DenseTaken`. (For
    type checkers it is Any, since they cannot know a member's kind by its name.) A member that no
    gradient had is absent.

    Attributes:
        count: How many gradients were reduced.
        step: The global step that this take closed.
        weight: The sum of these gradients' weights; without weights it equals ``count``.
        contributors: int64, ascending: the contributors that the round's gradients named.
    """

    __slots__ = ()

    def _of_group(self, names: Collection[str], whole: Self | None = None) -> Self:
        """Note all names of the group's members; and the `whole` round, if this is a part."""
        self._known, self._whole = names, whole
        return self

    def only(self, *names: str) -> Self:
        """Return the same round with these members only, as `Parameters.update` takes it.

        Without names, the result has no members, but still identifies the round:
        ``params.update(taken.only(), gradients={...})``.

        Args:
            names: Names of members. A member that no gradient of the round had stays absent.

        Raises:
            InvalidArgumentError: The group has no member of such a name.
        """
        return self._part(self._checked(names))

    def without(self, *names: str) -> Self:
        """Return the same round without these members, such as a loss, which is no parameter.

        Args:
            names: The same as for `only`.

        Raises:
            InvalidArgumentError: The group has no member of such a name.
        """
        return self._part(self._members.keys() - self._checked(names))

    def _checked(self, names: tuple[str, ...]) -> AbstractSet[str]:
        of_group = set(self._known)
        for name in names:
            if not isinstance(name, str) or name not in of_group:
                known = list(self._known)
                more = " ..." if len(known) > 8 else ""  # noqa: PLR2004
                raise InvalidArgumentError(
                    f"The group has no member {name!r}; it has "
                    f"{', '.join(map(repr, known[:8]))}{more}. Names are given one by one, as in "
                    'taken.only("emb", "fc")'
                )
        return set(names)

    def _part(self, names: AbstractSet[str]) -> Self:
        members = {name: part for name, part in self._members.items() if name in names}
        part = type(self)(members, self.count, self.step, self.weight, self.contributors)
        return part._of_group(self._known, self._round)  # noqa: SLF001

    @property
    def _round(self) -> Self:
        """The round with all its members."""
        return self if self._whole is None else self._whole


class GroupPartial(_Members[Any]):
    """Sums of a group, not divided, which another group can add: a mapping from member to partial.

    A member's partial is a `SparsePartial` or a `DensePartial`.

    Attributes:
        count: How many gradients were added up.
        step: The step that these gradients belong to.
        weight: The sum of these gradients' weights; without weights it equals ``count``.
        contributors: int64, ascending: the contributors that the gradients named.
    """

    __slots__ = ()
