"""Parameters: arrays in shared memory that only updates change."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Self

from shmacc import _core, optim
from shmacc._accumulators.taken import DenseTaken, GroupTaken, SparseTaken
from shmacc._base.array_types import ValueArray
from shmacc._base.reports import MemberConfig
from shmacc._parameters import changes, patterns, states
from shmacc._parameters.change_checks import Asked
from shmacc._parameters.members import (
    ParameterArray,
    ParameterMember,
    ParameterTable,
    gradient_specs,
    parameter_of_config,
)
from shmacc._parameters.new_arrays import Optimizers, new_members, with_slots
from shmacc._parameters.patterns import LearningRate
from shmacc._parameters.shared_arrays import SharedArrays
from shmacc._parameters.tables import Table, TableRows
from shmacc._segment.options import IfExists, Options, Owners
from shmacc._segment.spec import Spec
from shmacc._values import arguments
from shmacc._values.slices import IndexedSlices
from shmacc._values.specs import TensorSpec


class Parameters(SharedArrays):
    """Named arrays in shared memory that only updates change, atomically.

    Like `SharedArrays`, this is a mapping from name to array. All arrays are read-only in every
    process. In the block of an accumulator's round, `update` applies each array's optimizer to its
    gradient, in place, and touches only the rows that the gradients have::

        params = shmacc.Parameters({"emb": table}, "params", optimizer=shmacc.optim.Adagrad(0.05))
        group = shmacc.AccumulatorGroup(params.member_specs(sparse=["emb"]), "grads")
        with group.round(n) as taken:
            params.update(taken)

    An update is atomic, and made once a round, even if processes die. When an update has begun, its
    round is final: it accepts no more gradients. If its block then ends by an exception or a death,
    the next round has the same gradients, to the bit. So a chief that replaces a dead chief runs
    the same lines. During an update, a worker may read half of it. But gradients that it computes
    from these numbers belong to a sealed step, and are dropped.

    Use as a context manager to close at the end of the block; an object that is collected unclosed
    is closed with a ResourceWarning. Pickles: another process that unpickles it attaches.
    """

    __slots__ = ("_accesses", "_members")

    _KIND = "parameters"
    _NOUN = "parameters"
    _COPY = "snapshot() has copies of the arrays, and state() of all that an optimizer needs"

    def __init__(
        self,
        contents: Mapping[str, Any],
        shared_name: str | None = None,
        *,
        optimizer: Optimizers = None,
        mode: int | None = None,
        owners: Owners = "mine",
        if_exists: IfExists = "attach",
        unlink_on_close: bool = False,
    ) -> None:
        """Create the parameters, or attach to the existing parameters of this shared_name.

        Args:
            contents: A mapping from names, as for `SharedArrays`. An array is copied into the new
                array. A `TensorSpec` makes an array of zeros. A `TableSpec` makes a table, still
                without rows, for ids that need not be known in advance.
            shared_name: The name; None: private, removed with this object.
            optimizer: The optimizer of all arrays; or a mapping from patterns of names to
                optimizers, as in ``{"emb*": Adagrad(0.05), "*": Adam(1e-3)}``: an array has the
                optimizer of the first pattern that its name matches. An array with an optimizer
                must be float32 or float64. An array without optimizer is changed by ``values``
                only, and may have any dtype of `SharedArrays`. Optimizers are stored with the
                arrays, and must equal those of existing arrays.
            mode: Permission bits.
            owners: Whose parameters may be attached.
            if_exists: What to do with existing parameters.
            unlink_on_close: Whether their creator removes the name.

        Raises:
            InvalidArgumentError: A bad argument, an optimizer for an array that is not float32 or
                float64, or existing parameters disagree (the message names both values).
            All other errors are those of `SharedArrays`.
        """
        new = new_members(contents)
        if isinstance(optimizer, Mapping):
            names = [each.spec.name for each in new]
            optimizer = patterns.by_name(optimizer, names, "an optimizer")
        asked = tuple(each.parameter(number, optimizer) for number, each in enumerate(new))
        self._open(
            asked,
            shared_name,
            Options(mode=mode, owners=owners, if_exists=if_exists, unlink_on_close=unlink_on_close),
            own=False,
            contents=lambda: list(map(with_slots, new, asked)),
        )

    @classmethod
    def attach(  # type: ignore[override]  # no `writable`: nobody may write
        cls, shared_name: str, *, timeout: float | None = None, owners: Owners = "mine"
    ) -> Self:
        """Return the parameters of that name.

        Args:
            shared_name: The name.
            timeout: How many seconds to wait until the parameters exist; None: do not wait. (In
                `update` and every other call, None means to wait for ever.)
            owners: The same as in the constructor.

        Raises:
            NotFoundError: There are no such parameters, and no timeout.
            DeadlineExceededError: The timeout passed, and there were still no such parameters.
            InvalidArgumentError: An impossible name, a bad timeout, or the name of something else.
            PermissionDeniedError: The parameters are another user's.
            DataLossError: The file under the name is no valid segment of this version.
        """
        return cls._attach(shared_name, owners, timeout, own=False)

    def _member_of_config(self, number: int, config: MemberConfig) -> ParameterMember:
        return parameter_of_config(number, config)

    def _examine(self, existing: Spec[Any], own: bool | None) -> None:
        super()._examine(existing, own)
        self._accesses: dict[int, _core.TableAccess] = {}
        self._members: tuple[ParameterArray | ParameterTable, ...] = existing.members

    def _check_tables(self) -> None:
        """Accept tables, which shared arrays must not have."""

    @property
    def _arrays(self) -> list[ParameterArray]:
        return [member for member in self._members if isinstance(member, ParameterArray)]

    @property
    def _tables(self) -> list[ParameterTable]:
        return [member for member in self._members if isinstance(member, ParameterTable)]

    def _access(self, table: ParameterTable) -> Callable[[], _core.TableAccess]:
        """Return a function that gives access to a table while this object is open."""

        def access() -> _core.TableAccess:
            self._check_open()
            found = self._accesses.get(table.number)
            if found is None:
                found = _core.TableAccess(self._handle, table.number)
                self._accesses[table.number] = found
            return found

        return access

    def __getitem__(self, name: str) -> Any:
        """Return the array of that name, as an ndarray on the shared memory; or the `Table`.

        Raises:
            The errors of `SharedArrays`.
        """
        member = self._members[self._numbers[name]]
        if isinstance(member, ParameterTable):
            self._check_open()
            return Table(member, self._access(member))
        return super().__getitem__(name)

    def close(self) -> None:
        """Detach. Idempotent. Arrays that were read before remain valid, but tables do not."""
        self._accesses.clear()
        super().close()

    @property
    def step(self) -> int:
        """The arrays' step: 0 at first; after a round's update or skip, the round's step + 1."""
        self._check_open()
        return self._handle.step

    @property
    def optimizers(self) -> dict[str, optim.Optimizer | None]:
        """Each array's optimizer, by name; None: the array has none."""
        return {member.name: member.optimizer for member in self._members}

    @property
    def slots(self) -> Mapping[str, Mapping[str, Any]]:
        """The optimizers' slots, by array and slot: ``params.slots["emb"]["accumulator"]``.

        A slot is a read-only array on the shared memory; a table's slot has rows by id, as in
        ``params.slots["user"]["accumulator"][ids]``. Slots have TensorFlow's names: momentum,
        accumulator, rms, m, v, linear.
        """
        self._check_open()

        def slot(member: ParameterArray | ParameterTable, which: int) -> Any:
            if isinstance(member, ParameterTable):
                return TableRows(member, self._access(member), which)
            return self._mapped.array(member.number, self, which)

        return {
            member.name: {
                made.name: slot(member, which) for which, made in enumerate(member.slots, 1)
            }
            for member in self._members
        }

    def member_specs(self, sparse: Iterable[str] = ()) -> dict[str, TensorSpec]:
        """Return specs of the arrays' gradients, from which an `AccumulatorGroup` is made.

        A group made from them belongs to these parameters. An existing group that belongs to other
        parameters is refused.

        Args:
            sparse: The names of arrays whose gradients are rows. Gradients of tables always are.

        Raises:
            InvalidArgumentError: There is no array of such a name, or it has no rows.
        """
        specs = gradient_specs(self._members, sparse)
        for spec in specs.values():
            spec.parameters = self._token, self._shared_name
        return specs

    def update(
        self,
        taken: GroupTaken | SparseTaken | DenseTaken | Mapping[str, SparseTaken | DenseTaken],
        values: Mapping[str, Any] | None = None,
        *,
        gradients: Mapping[str, Any] | None = None,
        remove: Mapping[str, Any] | None = None,
        forget: Mapping[str, int] | None = None,
        learning_rate: LearningRate = None,
        timeout: float | None = None,
    ) -> bool:
        """Make the update of an open round: apply each array's optimizer to its gradient.

        The update is atomic, and made once a round. When it begins, the round becomes final: the
        block can end normally only after the whole update. After an exception or a death, the next
        round has the same gradients.

        Args:
            taken: The value of the round's block; or a part of the value: ``taken.without("loss")``
                leaves out members that are no parameters; ``taken.only()`` has no members, for an
                update by `gradients` and `values` alone. The value of a single accumulator's round
                is the gradient of the only array. If there are several arrays, pass a mapping that
                names the array: ``{"emb": taken}``. (A mapping may also have parts of a group's
                value. An empty mapping means this process's only open round.)
            values: New contents, by array, instead of the optimizer's result: an array, or
                ``(indices, rows)`` with distinct indices; for a table ``(ids, rows)``. The slots of
                these arrays stay as they are. Arrays with neither gradient nor contents stay, too.
            gradients: Gradients, by array, that replace the round's means; for instance, if the
                chief has clipped them. They go through the optimizers. They are checked and
                converted as in an apply: an array, or rows as ``(indices, values)`` or
                `IndexedSlices`, where repeated rows are added up. The round need not have the
                array.
            remove: Ids, by table, whose rows are removed in the same commit, after the other
                changes. Ids that are not in the table are ignored.
            forget: Numbers of steps, by table: the same commit removes rows whose last update is
                more than this number of steps before this round. Rows that the round or this call
                has are not removed. This reads all rows of the table.
            learning_rate: Replaces the optimizers' learning rates in this update, for schedules: a
                number for all arrays, or a mapping from patterns of names, as for optimizers.
            timeout: Seconds to wait for another process's snapshot, restore or update, or its
                operation on the accumulator; None: for ever.

        Returns:
            True; False if the round is in the parameters already, because a chief made the update
            and died before the end of its block. Then nothing is changed.

        Raises:
            InvalidArgumentError: A member is no array, or its array has no optimizer; a row is out
                of range; a shape or dtype disagrees; an array is in `values` and in `gradients`.
                Nothing was changed, and the round is not final.
            FailedPreconditionError: `taken` does not come from an open round of this process; the
                block has made its update already; the parameters are past the round's step; or a
                checkpoint is being loaded into them, or a process died while it loaded one (then
                load it again).
            DeadlineExceededError: The timeout passed. Nothing was changed.
            ResourceExhaustedError: Shared memory is full, or a table would have more rows than its
                ``max_rows``. Nothing was changed, and the round was not made final: try again with
                rows to remove, or without the table (`taken.without`).
            DataLossError: The index of a table does not lead to one of its rows; the message says
                how to save them. Nothing was changed, and the round was not made final.
        """
        asked = Asked.checked(values=values, gradients=gradients, remove=remove, forget=forget)
        block, found = self._round_of(taken)
        rates = patterns.learning_rates(learning_rate, self.optimizers)
        return self._commit(block, found, asked, rates, arguments.timeout(timeout))

    def skip(
        self,
        taken: GroupTaken | SparseTaken | DenseTaken | Mapping[str, SparseTaken | DenseTaken],
        values: Mapping[str, Any] | None = None,
        *,
        timeout: float | None = None,
    ) -> bool:
        """Move `step` past an open round, without applying its gradients.

        If a dead process has left half an update, its changes are undone.

        Args:
            taken: The same as for `update`.
            values: New contents, as for `update`; for instance, of arrays without optimizer.
            timeout: Seconds to wait, as for `update`; None: for ever.

        Returns:
            True; False if the round is in the parameters already.

        Raises:
            InvalidArgumentError, FailedPreconditionError, DeadlineExceededError: See `update`.
        """
        asked = Asked.checked(values=values)
        block, found = self._round_of(taken)
        found = found._replace(means={}, members={})
        return self._commit(block, found, asked, {}, arguments.timeout(timeout))

    def _round_of(self, taken: Any) -> tuple[Any, changes.OpenRound]:
        return changes.round_of(taken, self, _core.open_rounds())

    def _commit(
        self,
        block: _core.BlockAccess,
        found: changes.OpenRound,
        asked: Asked,
        rates: Mapping[str, float],
        timeout: float | None,
    ) -> bool:
        made = changes.of_update(self._members, found, asked, rates)
        self._check_open()
        return _core.update(
            self._handle, block.handle, block.taken.serial, block.taken.step, made, timeout
        )

    def snapshot(self, *, timeout: float | None = None) -> tuple[int, dict[str, Any]]:
        """Return ``(step, {name: copy})``, all of one instant, even while updates run.

        The copy of a table is an `IndexedSlices` of all its rows, with ascending ids.

        Waits for a running update. If a dead process has left half an update, undoes it.

        Args:
            timeout: Seconds to wait; None: for ever.

        Raises:
            DeadlineExceededError: The timeout passed.
            ResourceExhaustedError: This process has no memory for the copies.
        """
        seconds = arguments.timeout(timeout)
        copies: dict[str, Any] = {array.name: array.empty(0) for array in self._arrays}
        read = [(array.number, 0, copies[array.name]) for array in self._arrays]
        step, _, tables, _ = states.read(*self._opened(), read, seconds, whole=False)
        for table, (ids, numbers, _) in zip(self._tables, tables, strict=True):
            rows = numbers.view(table.dtype.numpy).reshape(len(ids), *table.shape)
            copies[table.name] = IndexedSlices(rows, ids)
        return step, {member.name: copies[member.name] for member in self._members}

    def state(self, *, timeout: float | None = None) -> dict[str, ValueArray]:
        """Return arrays, slots and step of one instant, as a dict of arrays for ``np.savez``.

        Args:
            timeout: Seconds to wait; None: for ever.

        Raises:
            The errors of `snapshot`.
        """
        seconds = arguments.timeout(timeout)
        saved, _ = states.to_state(*self._opened(), seconds)
        return saved

    def _opened(self) -> tuple[_core.Handle, states.Own]:
        """Return the handle and the members; FailedPreconditionError if this object is closed."""
        self._check_open()
        return self._handle, self._members

    def restore(self, state: Mapping[str, ValueArray], *, timeout: float | None = None) -> None:
        """Replace everything by a result of `state`, from these parameters or equal ones.

        One commit replaces arrays, slots and step, also while other processes are attached. A
        restore needs twice the memory while it runs. An accumulator that belongs to the parameters
        must get a state of the same step: `shmacc.load` restores both, and makes sure that no
        update is made in between.

        Args:
            state: The dict, or the same from ``np.load``.
            timeout: Seconds to wait for another process's update, snapshot or restore, which may be
                stopped; None: for ever.

        Raises:
            InvalidArgumentError: The value is no state, or has other arrays, shapes, dtypes or
                optimizers. Nothing was changed.
            ResourceExhaustedError: Shared memory is full. Nothing was changed.
            DeadlineExceededError: The timeout passed. Nothing was changed.
        """
        seconds = arguments.timeout(timeout)
        _core.load([self._to_load(state)], [], seconds)

    def _to_load(self, state: Mapping[str, ValueArray]) -> tuple[Any, ...]:
        """Return the arguments for the extension's `load`: handle, step, changes, updates."""
        handle, own = self._opened()
        made, step, updates = states.of_state(own, state)
        return handle, step, made, updates

    @property
    def _half_loaded(self) -> bool:
        self._check_open()
        return self._handle.state()["sealed"]
