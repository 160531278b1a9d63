"""Parameters that are one copy of several, on several hosts: all get the same updates, in order.

No host has a round of its own. So an update is prepared once, sent to all hosts, and made in each
copy. The commit that makes an update also names it in the copy (its lineage). So each copy makes an
update once, however often it is asked for, and only if its last update is the update's parent.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from shmacc import _core, optim
from shmacc._base.array_types import ValueArray
from shmacc._parameters import changes, states
from shmacc._parameters.change_checks import Asked, Change
from shmacc._parameters.parameters import Parameters


class Lineage(NamedTuple):
    """The name of the last update that a copy has; it has those before it, too.

    Attributes:
        term: The term of the owner that has named the update; 0: it is no copy, or was changed by
            something else.
        number: A number that this owner gave to no other update.
        digest: A digest of all that the updates have changed; each NaN counts as the same number.
    """

    term: int
    number: int
    digest: int = 0


class Copy(NamedTuple):
    """What is known of a copy.

    Attributes:
        lineage: Its lineage.
        begun: The step that its last change leads to, even if that change is not complete. A
            gradient of an earlier step may be computed from half a change.
        step: The parameters' step.
    """

    lineage: Lineage
    begun: int
    step: int


class Update(NamedTuple):
    """An update that any copy of these parameters can make; it pickles.

    Attributes:
        step: The step of its round.
        changes: The changes, with learning rates and corrections of the bias: the results are the
            same to the bit on every host.
    """

    step: int
    changes: list[Change]


def look(params: Parameters, timeout: float | None = None) -> Copy:
    """Return what is known of a copy. Waits for a running update, and undoes a dead process's.

    Raises:
        DeadlineExceededError: The timeout passed.
    """
    handle, _ = _opened(params)
    step, _, _, known = _core.read_parameters(handle, [], [], timeout)
    return _copy(known, step)


def prepare(
    params: Parameters,
    means: Mapping[str, Any],
    step: int,
    asked: Asked | None = None,
    rates: Mapping[str, float] | None = None,
    timeout: float | None = None,
) -> Update:
    """Return the update that a round's means make, checked as `Parameters.update` does.

    Args:
        params: The copy from which the chief trains.
        means: The round's means, by array.
        step: The round's step.
        asked: What else the update is asked for.
        rates: Learning rates, by array. Other arrays use their optimizers' own.
        timeout: Seconds to wait for the copy's lock; None: for ever.

    Raises:
        InvalidArgumentError: As for `Parameters.update`.
        DeadlineExceededError: The timeout passed.
    """
    handle, own = _opened(params)
    found = changes.OpenRound(step, means, means)
    made = changes.of_update(own, found, asked or Asked(), rates or {})
    _, updates, _, _ = _core.read_parameters(handle, [], [], timeout)
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
) -> tuple[bool, Lineage]:
    """Make an update in a copy. Atomic, as every update is.

    Args:
        params: The copy.
        update: A result of `prepare`.
        lineage: The update's term and number.
        parent: The lineage that the copy must have.
        timeout: Seconds to wait for another process's use of the copy; None: for ever.

    Returns:
        Whether the update was made now, or was there already; and the copy's lineage.

    Raises:
        FailedPreconditionError: The copy has another lineage, or is half loaded.
        InvalidArgumentError: The update does not fit the parameters.
        ResourceExhaustedError: Shared memory is full. Nothing was changed.
        DeadlineExceededError: The timeout passed. Nothing was changed.
    """
    after = update.step + 1
    handle, _ = _opened(params)
    made, digest = _core.change_copy(
        handle, (*lineage, 0), parent, after, after, update.changes, [], timeout
    )
    return made, Lineage(*lineage, digest)


def state(params: Parameters, timeout: float | None = None) -> tuple[Copy, dict[str, ValueArray]]:
    """Return a copy's state, for `replace`, with what is known of the copy at that instant.

    Raises:
        DeadlineExceededError: The timeout passed.
        ResourceExhaustedError: This process has no memory for it.
    """
    saved, known = states.to_state(*_opened(params), timeout)
    return _copy(known, int(saved["step"])), saved


def replace(
    params: Parameters,
    state: Mapping[str, ValueArray],
    lineage: Lineage,
    begun: int,
    timeout: float | None = None,
) -> bool:
    """Replace all of a copy by another one's state, or by a checkpoint's. Atomic.

    Args:
        params: The copy; it may have any lineage, and may be half loaded.
        state: A result of `state`, or of `Parameters.state`.
        lineage: What the copy is afterwards.
        begun: The step that the copy's accumulator must reach before its gradients count.
        timeout: Seconds to wait for another process's use of the copy; None: for ever.

    Returns:
        False: the copy has this lineage already, and nothing was changed.

    Raises:
        InvalidArgumentError: It is no state, or that of other parameters.
        ResourceExhaustedError: Shared memory is full. Nothing was changed.
        DeadlineExceededError: The timeout passed. Nothing was changed.
    """
    handle, own = _opened(params)
    contents, step, updates = states.of_state(own, state)
    made, _ = _core.change_copy(handle, lineage, None, step, begun, contents, updates, timeout)
    return made


def _opened(params: Parameters) -> tuple[_core.Handle, states.Own]:
    return params._opened()  # noqa: SLF001


def _copy(known: tuple[int, int, int, int], step: int) -> Copy:
    term, number, digest, begun = known
    return Copy(Lineage(term, number, digest), begun, step)


def _corrections(optimizer: optim.Optimizer | None, updates: int) -> tuple[float, float] | None:
    """Return Adam's corrections of the bias after so many updates, by the C library of this host.

    Raising to a power is not the same to the bit on every processor.
    """
    if not isinstance(optimizer, optim.Adam):
        return None
    first, second = (math.pow(beta, updates) for beta in (optimizer.beta_1, optimizer.beta_2))
    return 1 - first, math.sqrt(1 - second)
