"""Read access to tables of parameters: rows by id, without a lock."""

from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np

from shmacc import _core, init
from shmacc._base.array_types import IndexArray, ValueArray
from shmacc._parameters.members import ParameterTable, checked_ids
from shmacc._values import arguments, arrays
from shmacc.errors import InvalidArgumentError


class TableRows:
    """The rows of a table or of one of its slots: ``rows[ids]`` returns copies."""

    __slots__ = ("_access", "_known", "_part")

    def __init__(self, known: Any, access: Callable[[], Any], part: int = 0) -> None:
        self._known: ParameterTable = known
        self._access: Callable[[], _core.TableAccess] = access
        self._part = part

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the rows."""
        return self._known.dtype.numpy

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of a row of the table, or of the slot."""
        return self._known.shape_of(self._part)

    def __getitem__(self, ids: Any) -> ValueArray:
        """Return copies of the rows of these ids, of shape ``ids.shape + row_shape``.

        Uses no lock, and never waits. Ids that are not in the table give the initial contents, and
        are not added. Ids may be repeated, in any order.

        Raises:
            InvalidArgumentError: The ids are not integers from 0 to below 2**63.
            FailedPreconditionError: The parameters are closed.
            ResourceExhaustedError: This process has no memory for the rows.
        """
        numbers = self._numbers(ids)
        rows = arrays.empty((*numbers.shape, *self.row_shape), self.dtype)
        self._access().rows(numbers.reshape(-1), self._part, arrays.bytes_of(rows))
        return rows

    def _numbers(self, ids: Any) -> IndexArray:
        return checked_ids(ids, f"the ids of table {self._known.name!r}")

    def _refuse(self, what: str) -> NoReturn:
        raise InvalidArgumentError(f"Table {self._known.name!r} {what}")

    def __setitem__(self, ids: Any, rows: Any) -> NoReturn:
        """Refuse to set rows: only updates change them."""
        self._refuse(
            f"is changed by updates only: params.update(taken, values={{{self._known.name!r}: "
            "(ids, rows)})"
        )

    def __delitem__(self, ids: Any) -> NoReturn:
        """Refuse to remove rows: only updates remove them."""
        self._refuse(
            f"is changed by updates only: params.update(taken, remove={{{self._known.name!r}: "
            "ids})"
        )

    # Without this, reversed() would treat the table as a sequence.
    __reversed__ = None

    def __iter__(self) -> NoReturn:
        """Refuse to iterate: rows have ids, not places."""
        self._refuse("has no order: table.ids() are its ids, table.contains(ids) looks for some")

    def __array__(self, *_: object, **__: object) -> NoReturn:
        """Refuse the conversion: a table is no array."""
        self._refuse("is no array: table[ids] are rows, params.snapshot() has ids and rows of all")

    def __reduce__(self) -> NoReturn:
        """Refuse pickling a table: pickle its parameters instead."""
        self._refuse("is neither pickled nor copied: pickle its parameters")


class Table(TableRows):
    """Rows in shared memory by ids that need not be known in advance; a member of `Parameters`.

    ``table[ids]`` returns copies of rows. An id that is not in the table has its initial row. The
    first update of an id adds it to the table. Between two updates, reads are exact. During an
    update, each number that is read is either old or new; an id that is being added or removed may
    be found or not; all other ids are found. Reads use no lock and never wait, even if the process
    that updates is stopped or dead.
    """

    __slots__ = ()

    @property
    def initial(self) -> init.Initial:
        """The contents of a row before anything changes it."""
        return self._known.table.initial

    @property
    def max_rows(self) -> int | None:
        """How many rows there may be; None: any number."""
        return self._known.table.max_rows

    def __len__(self) -> int:
        return self._access().state()[0]

    def __bool__(self) -> bool:
        """Return True, even without rows: ``if table`` asks whether there is a table."""
        return True

    def __repr__(self) -> str:
        return f"<Table {self._known.name!r}: {self._known.table!r}>"

    @property
    def nbytes(self) -> int:
        """How many bytes of shared memory the table uses: rows, slots, ids, index."""
        return self._access().state()[3]

    def contains(self, ids: Any) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """Return for each id whether it is in the table.

        Raises:
            The errors of ``table[ids]``.
        """
        numbers = self._numbers(ids)
        found = arrays.empty(numbers.shape, np.dtype(np.bool_))
        # reshape makes a view of `found`, which the extension fills.
        self._access().contains(numbers.reshape(-1), found.reshape(-1))
        return found

    def last_updated(self, ids: Any) -> IndexArray:
        """Return for each id the step of the round that last updated or set its row.

        It is -1 for ids that are not in the table.

        Raises:
            The errors of ``table[ids]``.
        """
        numbers = self._numbers(ids)
        steps = arrays.empty(numbers.shape, np.dtype(np.int64))
        self._access().last_steps(numbers.reshape(-1), steps.reshape(-1))
        return steps

    def ids(self, *, updated_before: int | None = None) -> IndexArray:
        """Return the ids that are in the table, ascending.

        Args:
            updated_before: Only ids whose rows were last updated before this step.

        Raises:
            InvalidArgumentError: `updated_before` is no integer.
            FailedPreconditionError: The parameters are closed.
        """
        before = None
        if updated_before is not None:
            before = arguments.int64(updated_before, "updated_before")
        return self._access().ids(before)
