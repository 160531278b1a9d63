"""Copies of the same parameters on several hosts: all copies get the same updates, in order.

Rounds span all hosts. So an update is prepared once, sent to all hosts, and made in each copy. The
commit of an update also stores the update's lineage in the copy. So each copy makes an update only
once, even if asked repeatedly, and only if the copy's last update is the new update's parent.
"""

import math
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from shmacc import _core, optim
from shmacc._base.array_types import ValueArray
from shmacc._base.lineage import Copy, Lineage
from shmacc._parameters import changes, states
from shmacc._parameters.change_checks import ArrayChange, Asked, Change
from shmacc._parameters.members import BOOL, ParameterTable
from shmacc._parameters.new_arrays import new_members, with_slots
from shmacc._parameters.parameters import Parameters
from shmacc._segment.options import Options
from shmacc._values.specs import TensorSpec


class Update(NamedTuple):
    """An update that any copy of these parameters can make; it pickles.

    Attributes:
        step: The step of the update's round.
        changes: The changes. They contain learning rates and bias corrections, so that every host
            gets the same results to the bit.
    """

    step: int
    changes: list[Change]

    @property
    def size(self) -> int:
        """The size of the changes' values, in bytes."""
        parts = [
            each.values if isinstance(each, ArrayChange) else [each.values] for each in self.changes
        ]
        return sum(values.nbytes for own in parts for values in own)


class Recipe(NamedTuple):
    """What the parameters of another host need to be made like these; it pickles.

    Attributes:
        contents: A mapping from name to a spec, or to an array of zeros.
        optimizers: A mapping from name to optimizer.
    """

    contents: dict[str, Any]
    optimizers: dict[str, optim.Optimizer]


def recipe(params: Parameters) -> Recipe:
    """Return how to make parameters like these on another host."""
    contents: dict[str, Any] = {}
    for member in _opened(params)[1]:
        if isinstance(member, ParameterTable):
            contents[member.name] = member.table
        elif member.dtype is BOOL:
            contents[member.name] = np.zeros(member.shape, bool)
        else:
            contents[member.name] = TensorSpec(member.shape, member.dtype.numpy)
    found = params.optimizers.items()
    return Recipe(contents, {name: each for name, each in found if each is not None})


def open_copy(
    recipe: Recipe, shared_name: str, options: Options, state: Mapping[str, ValueArray] | None
) -> Parameters:
    """Attach to a host's copy, or make a copy, which `replace` then completes.

    A new copy has the state's arrays and slots at once: if this process dies before `replace`,
    other processes find no zeros there. `replace` adds the rows of tables.

    Args:
        recipe: The properties of the copy; a result of `recipe`.
        shared_name: The copy's name.
        options: The same as for `Parameters`.
        state: The same as for `replace`; None: a new copy has zeros.

    Raises:
        The errors of `Parameters`.
    """
    new = new_members(recipe.contents)
    asked = tuple(each.parameter(number, recipe.optimizers) for number, each in enumerate(new))

    def contents() -> list[list[tuple[int, ValueArray | None]]]:
        if state is None:
            return list(map(with_slots, new, asked))
        return [
            [(values.nbytes, values) for values in each.values]
            if isinstance(each, ArrayChange)
            else []
            for each in states.of_state(asked, state)[0]
        ]

    params = Parameters.__new__(Parameters)  # its constructor takes patterns, not names
    params._open(asked, shared_name, options, own=False, contents=contents)  # noqa: SLF001
    return params


def look(params: Parameters, timeout: float | None = None) -> Copy:
    """Wait for a running update, undo a dead process's half update, and return a copy's facts.

    Raises:
        DeadlineExceededError: The timeout passed.
    """
    handle, _ = _opened(params)
    step, _, _, known = _core.read_parameters(handle, [], [], whole=False, timeout=timeout)
    return _copy(known, step)


def is_removed(params: Parameters) -> bool:
    """Return whether a copy has lost its name, so that no other process can attach to it."""
    return _opened(params)[0].unlinked or not os.path.lexists(params._segment_name.path)  # noqa: SLF001


def prepare(
    params: Parameters,
    means: Mapping[str, Any],
    step: int,
    asked: Asked | None = None,
    rates: Mapping[str, float] | None = None,
    timeout: float | None = None,
    *,
    members: Mapping[str, Any] | None = None,
) -> Update:
    """Check a round's means as `Parameters.update` does, and return the update that they make.

    Args:
        params: The copy from which the chief trains.
        means: The round's means, by array.
        step: The round's step.
        asked: What the update is to change besides.
        rates: Learning rates, by array. Other arrays use their optimizer's rate.
        timeout: Seconds to wait for the copy's lock; None: for ever.
        members: All members of the round; None: the members of `means`.

    Raises:
        InvalidArgumentError: The means or `asked` do not fit, as in `Parameters.update`.
        DeadlineExceededError: The timeout passed.
    """
    handle, own = _opened(params)
    found = changes.OpenRound(step, means, means if members is None else members)
    made = changes.of_update(own, found, asked or Asked(), rates or {})
    _, updates, _, _ = _core.read_parameters(handle, [], [], whole=False, timeout=timeout)
    corrections = [
        _corrections(own[change.number].optimizer, updates[change.number] + 1) for change in made
    ]
    return Update(
        step,
        [change._replace(corrections=of) for change, of in zip(made, corrections, strict=True)],
    )


def make(
    params: Parameters,
    update: Update,
    lineage: tuple[int, int],
    parent: Lineage,
    timeout: float | None = None,
    *,
    begun: int = 0,
    only_check: bool = False,
) -> tuple[bool, Lineage]:
    """Make an update in a copy. This is atomic, like every update.

    Args:
        params: The copy.
        update: A result of `prepare`.
        lineage: The update's term and number.
        parent: The lineage that the copy must have.
        timeout: Seconds to wait for another process's use of the copy; None: for ever.
        begun: The step to which the copy's accumulator is moved before its gradients count, because
            older ones may come from half an update; at least the step after the update's step.
        only_check: Whether only to check that the update fits, and that there is memory for it.

    Returns:
        True if the update was made now, False if it was there already; and the copy's lineage.

    Raises:
        FailedPreconditionError: The copy has another lineage, or is half loaded.
        InvalidArgumentError: The update does not fit the parameters.
        ResourceExhaustedError: Shared memory is full. Nothing was changed.
        DeadlineExceededError: The timeout passed. Nothing was changed.
    """
    after = update.step + 1
    handle, _ = _opened(params)
    made, digest = _core.change_copy(
        handle, (*lineage, 0), parent, after, max(after, begun), update.changes, [], timeout,
        only_check,
    )  # fmt: skip
    return made, Lineage(*lineage, digest)


def state(params: Parameters, timeout: float | None = None) -> tuple[Copy, dict[str, ValueArray]]:
    """Return the facts about a copy, and its state at the same instant, for `replace`.

    Raises:
        DeadlineExceededError: The timeout passed.
        ResourceExhaustedError: This process has no memory for the state.
    """
    saved, known = states.to_state(*_opened(params), timeout)
    return _copy(known, int(saved["step"])), saved


def check(params: Parameters, state: Mapping[str, ValueArray]) -> None:
    """Check that `state` is a state of `params`.

    Raises:
        InvalidArgumentError: `state` is no state, or a state of other parameters.
    """
    states.of_state(_opened(params)[1], state)


def replace(
    params: Parameters,
    state: Mapping[str, ValueArray],
    lineage: Lineage,
    begun: int,
    step: int | None = None,
    timeout: float | None = None,
    *,
    only_check: bool = False,
) -> bool:
    """Replace all of a copy by the state of another copy or a checkpoint. This is atomic.

    Args:
        params: The copy; it may have any lineage, and may be half loaded.
        state: A result of `state`, or of `Parameters.state`.
        lineage: The lineage of the copy afterwards.
        begun: The step to which the copy's accumulator is moved before its gradients count.
        step: The parameters' step; None: the state's step.
        timeout: Seconds to wait for another process's use of the copy; None: for ever.
        only_check: Whether only to check that the state fits, and that there is memory for it.

    Returns:
        False if the copy already has this lineage, so that nothing was changed.

    Raises:
        InvalidArgumentError: The value is no state, or other parameters' state.
        ResourceExhaustedError: Shared memory is full. Nothing was changed.
        DeadlineExceededError: The timeout passed. Nothing was changed.
    """
    handle, own = _opened(params)
    contents, of_state, updates = states.of_state(own, state)
    after = of_state if step is None else step
    made, _ = _core.change_copy(
        handle, lineage, None, after, begun, contents, updates, timeout, only_check
    )
    return made


def _opened(params: Parameters) -> tuple[_core.Handle, states.Own]:
    return params._opened()  # noqa: SLF001


def _copy(known: tuple[int, int, int, int], step: int) -> Copy:
    term, number, digest, begun = known
    return Copy(Lineage(term, number, digest), begun, step)


def _corrections(optimizer: optim.Optimizer | None, updates: int) -> tuple[float, float] | None:
    """Return Adam's bias corrections after `updates` updates, by this host's C library.

    On another processor, ``pow`` may return another last bit.
    """
    if not isinstance(optimizer, optim.Adam):
        return None
    first, second = (math.pow(beta, updates) for beta in (optimizer.beta_1, optimizer.beta_2))
    return 1 - first, math.sqrt(1 - second)
