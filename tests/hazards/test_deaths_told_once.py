"""Each death or failure of a worker ends exactly one wait for gradients.

Only waits with ``on_death="raise"`` report it.
"""

import contextlib
from collections.abc import Callable
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from helpers.apart import Apart, Pipe, run_apart
from helpers.departures import NAME, fail_in_a_block, news, worker
from helpers.departures import acc as acc
from helpers.lock_holder import activity
from helpers.support import LONG, until

import shmacc
from shmacc import AccumulatorGroup, ConditionalAccumulator, TensorSpec, _core, errors
from shmacc._base import names
from shmacc._segment import removal


def fail_before_a_gradient() -> None:
    """Run a worker that fails before it applies a gradient."""
    with suppress(ValueError), ConditionalAccumulator.attach(NAME) as own:
        own.num_accumulated()
        raise ValueError("bad")


def test_a_timeout_names_the_dead_and_the_failed_of_its_round(acc: ConditionalAccumulator) -> None:
    def message() -> str:
        with pytest.raises(errors.DeadlineExceededError) as caught:
            acc.take(2**40, timeout=0.01)
        return str(caught.value)

    assert "gone" not in message()
    with Apart(fail_before_a_gradient) as failed:
        failed.result()
    with worker() as killed:
        killed.kill()
    gone = f"pid {failed.pid}, ValueError: bad; pid {killed.pid}, killed"
    assert f"gradients had arrived; gone: {gone}; " in message()
    assert news(acc) == ((killed.pid,), ("killed",), ()), "a timeout tells nobody of the death"
    for _ in range(3):
        with worker() as later:
            later.kill()
    assert f"pid {later.pid}, killed; and 2 earlier; " in message()
    acc.take(1)
    assert f"pid {later.pid}, killed" in message(), "they would have gone on to this round"
    acc.apply_grad(1.0, shmacc.NEVER_STALE)
    acc.take(1)
    assert "gone" not in message()


def test_a_failure_before_the_first_apply_ends_no_wait(acc: ConditionalAccumulator) -> None:
    with Apart(fail_before_a_gradient) as process:
        process.result()
        assert news(acc) is None
    with inspection_view() as view:
        failed = [event for event in view.events() if event["kind"] == _core.EVENTS["failed"]]
    assert [(each["pid"], each["reason"]) for each in failed] == [(process.pid, "ValueError: bad")]


FIRST_APPLIES: dict[str, Callable[[AccumulatorGroup, ConditionalAccumulator], Any]] = {
    "another shape": lambda group, _: group.apply({"a": [1.0, 2.0]}, 0, contributor=3),
    "no such member": lambda group, _: group.apply({"b": 1.0}, 0, contributor=3),
    "no mapping": lambda group, _: group.apply([1.0], 0, contributor=3),  # type: ignore[arg-type]
    "a bad weight": lambda group, _: group.apply({"a": 1.0}, 0, contributor=3, weight=0),
    "a bad step": lambda group, _: group.apply({}, "1", contributor=3),  # type: ignore[arg-type]
    "stale, and fails after it": lambda group, _: group.apply({}, -1, contributor=3) or 1 // 0,
    "rows that are none": lambda group, _: group.apply({"r": ([1], [])}, 0, contributor=3),
    "dense": lambda _, acc: acc.apply_grad([1.0], contributor=3),
    "dense, of some weight": lambda _, acc: acc.apply_grad("1", 0, contributor=3, weight=2),
}


@pytest.mark.parametrize("call", FIRST_APPLIES)
def test_a_failure_after_an_apply_with_a_contributor_is_reported(call: str) -> None:
    """This holds even if the apply is refused, but not for a process without a contributor."""

    def fail(how: str, *, pipe: Pipe) -> None:
        with (
            suppress(errors.InvalidArgumentError, ZeroDivisionError),
            AccumulatorGroup.attach(NAME) as group,
            ConditionalAccumulator.attach(f"{NAME}.acc") as acc,
        ):
            if how == "unnamed":
                group.apply([1.0], 0)  # type: ignore[arg-type]
            FIRST_APPLIES[call](group, acc)
        pipe.turn()

    members = {"a": TensorSpec(()), "r": shmacc.IndexedSlicesSpec((None, 1))}
    with (
        AccumulatorGroup(members, NAME, unlink_on_close=True) as group,
        ConditionalAccumulator("f8", (), f"{NAME}.acc", unlink_on_close=True) as acc,
        Apart(fail, "named").ready() as process,
        Apart(fail, "unnamed").ready() as unnamed,
    ):
        found = [told for told in (news(group), news(acc)) if told]
        assert [(pids, contributors) for pids, _, contributors in found] == [((process.pid,), ())]
        assert "Error: " in found[0][1][0]
        assert news(group) is news(acc) is None, "each ends one wait"
        of_it = NAME if call[:5] != "dense" else f"{NAME}.acc"
        with contextlib.closing(removal.view(names.segment_name(of_it))) as view:
            told = {event["pid"]: event["contributor"] for event in view.events()}
        assert told == {process.pid: 3, unnamed.pid: -1}


def test_a_kill_while_the_first_apply_waits_is_reported() -> None:
    """The worker's apply waits for the end of a round."""

    def apply(*, pipe: Pipe) -> None:
        with AccumulatorGroup.attach(NAME) as own:
            pipe.hear()
            own.apply({}, 1, contributor=3)

    with (
        AccumulatorGroup({"a": TensorSpec(())}, NAME, unlink_on_close=True) as group,
        Apart(apply) as process,
        ExitStack() as stack,
    ):
        group.apply({}, 0)
        stack.enter_context(group.round(1))
        process.say()
        until(lambda: activity(NAME, process.pid).startswith("waits for"))
        process.kill()
        stack.close()
        with pytest.raises(errors.WorkerDiedError) as caught:
            group.take(2, timeout=LONG, on_death="raise")
        assert (caught.value.pids, caught.value.contributors) == ((process.pid,), ())
        assert news(group) is None


def inspection_view() -> Any:
    return contextlib.closing(removal.view(names.segment_name(NAME)))


def test_a_death_is_reported_whatever_others_did_before(acc: ConditionalAccumulator) -> None:
    """The report names contributors only if their round has not been taken."""
    for taken in (False, True):
        with worker(7) as dead:
            dead.kill()
            for _ in range(200):
                acc.cancel()
                ConditionalAccumulator.attach(NAME).close()  # finds the dead worker's entry
            if taken:
                assert acc.take(1, timeout=0).count == 1
                acc.take_partial(0)
            assert news(acc) == ((dead.pid,), ("killed",), () if taken else (7,))
        assert news(acc) is None
        if not taken:
            acc.take(1, timeout=0)


def test_eighty_deaths_and_a_failure_are_reported_in_one_error(acc: ConditionalAccumulator) -> None:
    with ExitStack() as stack:
        failed = stack.enter_context(Apart(fail_in_a_block, ValueError("bad"), 80))
        failed.hear()
        workers = [stack.enter_context(worker(number)) for number in range(80)]
        for process in workers:
            process.kill()
        pids, reasons, contributors = news(acc) or ((), (), ())
        expected = {process.pid: "killed" for process in workers} | {failed.pid: "ValueError: bad"}
        assert dict(zip(pids, reasons, strict=True)) == expected
        assert contributors == tuple(range(81))
    assert news(acc) is None
    assert acc.take(81, timeout=0).count == 81


def test_a_death_names_the_contributors_that_are_in_the_round(acc: ConditionalAccumulator) -> None:
    def apply(*, pipe: Pipe) -> None:
        with ConditionalAccumulator.attach(NAME) as own:
            for contributor in (9, 2, 30):
                own.apply_grad(1.0, shmacc.NEVER_STALE, contributor=contributor)
            pipe.turn()
            own.apply_grad(1.0, shmacc.NEVER_STALE, contributor=4)
            pipe.turn()

    with worker(5), Apart(apply).ready() as process:
        acc.take(4, timeout=0)  # contributors 5, 9, 2 and 30 are in no round now
        acc.apply_grad(1.0, 1, contributor=8)
        process.turn()
        process.kill()
        assert news(acc) == ((process.pid,), ("killed",), (4,))


def test_contributors_of_a_restored_state_belong_to_no_process(acc: ConditionalAccumulator) -> None:
    with worker(5) as dead:
        acc.restore(acc.state())
        dead.kill()
        assert news(acc) == ((dead.pid,), ("killed",), ())
    assert acc.take(1, timeout=0).contributors.tolist() == [5]


def fail_again_and_again(count: int) -> None:
    """Fail `count` times; each attachment counts like a process of its own."""
    for number in range(count):
        with suppress(ValueError), ConditionalAccumulator.attach(NAME) as own:
            own.apply_grad(1.0, shmacc.NEVER_STALE)
            raise ValueError(number)


def test_the_last_1024_deaths_are_kept(acc: ConditionalAccumulator) -> None:
    """A further death replaces the record of the process that was least recently active."""
    most, more = 1024, 20
    run_apart(fail_again_and_again, most + more)
    _, reasons, _ = news(acc) or ((), (), ())
    assert set(reasons) == {f"ValueError: {number}" for number in range(more, most + more)}
    assert len(reasons) == most
    assert news(acc) is None
    ConditionalAccumulator.attach(NAME).close()
    with inspection_view() as view:
        assert view.departures() == []
