"""Each death or failure of a worker ends one wait for gradients, exactly one.

Waits ask for it by ``on_death="raise"``. The death of the chief ends all waits for the step.
"""

from __future__ import annotations

import contextlib
import os
import threading
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any

import pytest
from helpers.apart import Apart, run_apart
from helpers.departures import NAME, fail_in_a_block, make, news, worker
from helpers.lock_holder import activity
from helpers.stepping_calls import Calling, needs_failures
from helpers.support import LONG, until

import shmacc
from shmacc import AccumulatorGroup, ConditionalAccumulator, TensorSpec, _core, errors
from shmacc._base import names
from shmacc._segment import removal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from helpers.apart import Pipe
    from helpers.stepping_tracer import Mark

    Look = Callable[[Any], tuple[Any, ...] | None]


@pytest.fixture
def acc() -> Iterator[ConditionalAccumulator]:
    with make() as made:
        yield made
        made.unlink()


def fail_before_a_gradient() -> None:
    """Be a worker with an error in its first lines."""
    with suppress(ValueError), ConditionalAccumulator.attach(NAME) as own:
        own.num_accumulated()
        raise ValueError("bad")


def test_a_timeout_names_the_dead_whose_gradients_may_be_missing(
    acc: ConditionalAccumulator,
) -> None:
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
def test_a_failure_after_an_apply_that_named_a_contributor_is_told(call: str) -> None:
    """Even if that apply was refused. A process that named no contributor does not count."""

    def fail(how: str, *, pipe: Pipe) -> None:
        with (
            suppress(errors.InvalidArgumentError, ZeroDivisionError),
            AccumulatorGroup.attach(NAME) as group,
            ConditionalAccumulator.attach(f"{NAME}.acc") as acc,
        ):
            if how == "unnamed":
                group.apply([1.0], 0)  # type: ignore[arg-type]
            FIRST_APPLIES[call](group, acc)
        pipe.say()
        pipe.hear()

    members = {"a": TensorSpec(()), "r": shmacc.IndexedSlicesSpec((None, 1))}
    with (
        AccumulatorGroup(members, NAME, unlink_on_close=True) as group,
        ConditionalAccumulator("f8", (), f"{NAME}.acc", unlink_on_close=True) as acc,
        Apart(fail, "named") as process,
        Apart(fail, "unnamed") as unnamed,
    ):
        process.hear()
        unnamed.hear()
        found = [told for told in (news(group), news(acc)) if told]
        assert [(pids, contributors) for pids, _, contributors in found] == [((process.pid,), ())]
        assert "Error: " in found[0][1][0]
        assert news(group) is news(acc) is None, "each ends one wait"
        of_it = NAME if call[:5] != "dense" else f"{NAME}.acc"
        with contextlib.closing(removal.view(names.segment_name(of_it))) as view:
            told = {event["pid"]: event["contributor"] for event in view.events()}
        assert told == {process.pid: 3, unnamed.pid: -1}


def test_a_worker_killed_while_its_first_apply_waits_is_told() -> None:
    """Its apply waits for the end of a round."""

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


def test_a_death_is_told_whatever_others_did_before(acc: ConditionalAccumulator) -> None:
    """With its contributors, until its round is taken."""
    for taken in (False, True):
        with worker(7) as dead:
            dead.kill()
            for _ in range(200):
                acc.cancel()
                ConditionalAccumulator.attach(NAME).close()  # finds the dead one's entry
            if taken:
                assert acc.take(1, timeout=0).count == 1
                acc.take_partial(0)
            assert news(acc) == ((dead.pid,), ("killed",), () if taken else (7,))
        assert news(acc) is None
        if not taken:
            acc.take(1, timeout=0)


def test_eighty_deaths_and_a_failure_are_told_in_one_error(acc: ConditionalAccumulator) -> None:
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
            pipe.say()
            pipe.hear()
            own.apply_grad(1.0, shmacc.NEVER_STALE, contributor=4)
            pipe.say()
            pipe.hear()

    with worker(5), Apart(apply) as process:
        process.hear()
        acc.take(4, timeout=0)  # these are in no round any more
        acc.apply_grad(1.0, 1, contributor=8)
        process.say()
        process.hear()
        process.kill()
        assert news(acc) == ((process.pid,), ("killed",), (4,))


def test_contributors_of_a_restored_state_belong_to_no_process(acc: ConditionalAccumulator) -> None:
    with worker(5) as dead:
        acc.restore(acc.state())
        dead.kill()
        assert news(acc) == ((dead.pid,), ("killed",), ())
    assert acc.take(1, timeout=0).contributors.tolist() == [5]


def fail_again_and_again(count: int) -> None:
    """Fail like many processes: each attachment counts as one."""
    for number in range(count):
        with suppress(ValueError), ConditionalAccumulator.attach(NAME) as own:
            own.apply_grad(1.0, shmacc.NEVER_STALE)
            raise ValueError(number)


def test_the_last_1024_deaths_are_kept(acc: ConditionalAccumulator) -> None:
    """Then a new one replaces the least recently active."""
    most, more = 1024, 20
    run_apart(fail_again_and_again, most + more)
    _, reasons, _ = news(acc) or ((), (), ())
    assert set(reasons) == {f"ValueError: {number}" for number in range(more, most + more)}
    assert len(reasons) == most
    assert news(acc) is None
    ConditionalAccumulator.attach(NAME).close()
    with inspection_view() as view:
        assert view.departures() == []


def chief_died(acc: Any) -> tuple[Any, ...] | None:
    """What waits for the step are told of the chief."""
    step = acc.global_step
    told: list[tuple[Any, ...] | None] = []
    for wait in (
        lambda: acc.wait_step(step, timeout=0, on_death="raise"),
        lambda: [None for _ in acc.steps(timeout=0, on_death="raise")],
    ):
        try:
            wait()
        except errors.ChiefDiedError as error:
            told.append((error.pids, error.reasons))
        except errors.DeadlineExceededError:
            told.append(None)
    assert told[0] == told[1]
    return told[0]


def lead(how: str = "take", *, pipe: Pipe) -> None:
    """Be a chief; stay until told how to end."""
    own = ConditionalAccumulator.attach(NAME)
    own.apply_grad(1.0, shmacc.NEVER_STALE)
    if how == "take":
        own.take(1)
    else:
        with own.round(1):
            if how == "in the block":
                pipe.say()
                pipe.hear()
    pipe.say()
    if pipe.hear() == "fail":
        with suppress(ValueError), own:
            raise ValueError("diverged")
    own.close()
    pipe.say()


def chief(how: str = "take") -> Apart:
    """Start a chief, whose round is over or not."""
    process = Apart(lead, how)
    process.hear()
    return process


@pytest.mark.parametrize("how", ["take", "round", "in the block"])
def test_the_death_of_the_chief_ends_all_waits_for_the_step(
    acc: ConditionalAccumulator, how: str
) -> None:
    assert chief_died(acc) is None
    with chief(how) as leader:
        assert chief_died(acc) is None
        leader.kill()
        for _ in range(2):
            assert chief_died(acc) == ((leader.pid,), ("killed",))
        ConditionalAccumulator.attach(NAME).close()
        assert news(acc) is not None  # it had applied, too
        assert chief_died(acc) == ((leader.pid,), ("killed",))
    # A step that has moved on comes first, and so does the end.
    assert acc.wait_step(acc.global_step - 1, on_death="raise") == acc.global_step
    for wait in (acc.wait_step, lambda _, timeout: list(acc.steps(timeout=timeout))):
        with pytest.raises(errors.DeadlineExceededError):
            wait(9, timeout=0.01)
    acc.finish()
    with pytest.raises(errors.FinishedError):
        acc.wait_step(9, on_death="raise")


def test_the_failure_of_the_chief_is_told(acc: ConditionalAccumulator) -> None:
    with chief() as leader:
        leader.say("fail")
        leader.hear()
        assert chief_died(acc) == ((leader.pid,), ("ValueError: diverged",))


def test_a_wait_for_the_step_goes_on_if_a_chief_lives_or_left_in_order(
    acc: ConditionalAccumulator,
) -> None:
    with chief() as leader:
        leader.say()
        leader.result()
    assert chief_died(acc) is None
    with chief() as dead:
        dead.kill()
        with chief() as leader:
            assert chief_died(acc) is None  # somebody alive has taken
            leader.say()
            leader.result()
        assert chief_died(acc) == ((dead.pid,), ("killed",))
        with Apart(lambda: ConditionalAccumulator.attach(NAME).take(99)) as waiting:
            until(lambda: acc.stats().waiting == 1)
            assert chief_died(acc) is None  # somebody waits to take
            waiting.kill()
        assert chief_died(acc) == ((dead.pid,), ("killed",))


def leave_while_asked(acc: Any, process: Callable[[], Apart], look: Look, place: int) -> bool:
    """Let a process leave in order just before another asks the kernel for the n-th time who lives.

    Returns whether it asks that often.
    """

    def look_twice(mark: Mark) -> None:
        look(acc)  # the forked child attaches
        mark()
        assert look(acc) is None
        mark()

    with process() as leaver, Calling(look_twice) as child:
        child.run_to_mark()
        asked = 0
        for call in child.calls_to_mark():
            asked += child.asks(call)
            if child.asks(call) and asked == place:
                leaver.say()
                leaver.result()
        child.finish()
    return asked >= place


@needs_failures
@pytest.mark.parametrize(("process", "look"), [(worker, news), (chief, chief_died)])
def test_a_process_that_leaves_in_order_during_a_look_is_not_dead(
    acc: ConditionalAccumulator, process: Callable[[], Apart], look: Look
) -> None:
    place = 1
    while leave_while_asked(acc, process, look, place):
        place += 1
    assert place > 1


def follow(*, pipe: Pipe) -> None:
    """Be a chief that attaches before the first one dies, and takes after that."""
    own = ConditionalAccumulator.attach(NAME)
    own.apply_grad(1.0, shmacc.NEVER_STALE)
    pipe.say()
    pipe.hear()
    own.take(1)
    pipe.say()
    pipe.hear()


def serve_while_asked(acc: ConditionalAccumulator, place: int) -> bool:
    """Give a new chief its round just before another process asks for the n-th time who lives.

    Returns whether it asks that often.
    """

    def wait_twice(mark: Mark) -> None:
        acc.wait_step(-1)  # the forked child attaches, before there is a death to be swept
        mark()
        with suppress(errors.DeadlineExceededError):
            acc.wait_step(acc.global_step, timeout=0, on_death="raise")
        mark()

    with Apart(follow) as new, Calling(wait_twice) as child:
        new.hear()
        child.run_to_mark()
        with chief() as old:
            old.kill()
        new.say()
        until(lambda: acc.stats().waiting == 1)
        asked = 0
        for call in child.calls_to_mark():
            asked += child.asks(call)
            if child.asks(call) and asked == place:
                acc.apply_grad(1.0, shmacc.NEVER_STALE)
                new.hear()
        child.finish()
    return asked >= place


@needs_failures
def test_a_new_chief_may_take_while_another_process_looks() -> None:
    asked, place = True, 1
    while asked:
        with make() as acc:
            asked = serve_while_asked(acc, place)
            acc.unlink()
        place += 1
    assert place > 2


def test_the_death_of_the_chief_ends_a_wait_that_has_begun(acc: ConditionalAccumulator) -> None:
    told: list[Any] = []

    def wait() -> None:
        try:
            acc.wait_step(99, timeout=LONG, on_death="raise")
        except errors.ChiefDiedError as error:
            told.append(error.pids)

    with chief() as leader:
        thread = threading.Thread(target=wait)
        thread.start()
        until(lambda: activity(NAME, os.getpid()) == "waits for the step")
        leader.kill()
        thread.join(LONG)
        assert told == [(leader.pid,)]


def test_a_failure_in_a_group_is_told_as_workers_and_as_chiefs() -> None:
    def fail(*, pipe: Pipe) -> None:
        with suppress(ValueError), AccumulatorGroup.attach(NAME) as own:
            own.apply({"a": 1.0}, 0, contributor=9)
            with own.round(1) as taken:
                assert taken.count == 1
            own.apply({"a": 1.0}, 1, contributor=9)
            raise ValueError("bad")
        pipe.say()
        pipe.hear()

    with (
        AccumulatorGroup({"a": TensorSpec(())}, NAME, unlink_on_close=True) as group,
        Apart(fail) as process,
    ):
        process.hear()
        assert chief_died(group) == ((process.pid,), ("ValueError: bad",))
        assert news(group) == ((process.pid,), ("ValueError: bad",), (9,))
        assert chief_died(group) == ((process.pid,), ("ValueError: bad",))
