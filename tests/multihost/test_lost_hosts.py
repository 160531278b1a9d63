"""Hosts and workers are lost; their contributors go on at another host, or are refused."""

import pytest
from helpers.multihost_table import Table, with_a_gradient_each

from shmacc._multihost.messages import Conflict, Died, Ended, Loss, Opened, Waiting
from shmacc_hosts.memory import Segment
from shmacc_hosts.world import TIMING

pytestmark = pytest.mark.threads


def test_a_step_with_too_few_gradients_after_a_loss_is_void() -> None:
    table = Table("a", "b", "c")
    for contributor, host in enumerate("abc"):
        table.apply(host, contributor)
    table.settle()
    table.ask(3)
    table.settle("a", "b")  # c is dead
    assert table.ask(3) == Waiting(3, 0, ("a", "b", "c"), late=("c",))
    table.pass_time(TIMING.lease + 0.2, "a", "b")
    table.settle("a", "b")
    waiting = table.ask(3)
    assert isinstance(waiting, Waiting)
    assert (waiting.hosts, waiting.lost, waiting.step) == (("a", "b"), ("c",), 1)
    assert table.owner.counters.voided == 1
    for contributor, host in enumerate("aba"):  # c's worker was started again at a
        assert table.apply(host, contributor)
    table.settle("a", "b")
    assert table.opened(3, "t", "a", "b").contributors.tolist() == [0, 1, 2]
    assert table.owner.leave("t", table.now, consume=True)
    table.settle("a", "b")
    for gone in (), ("c",):  # c is named while it may still come back
        table.owner.gone.update(gone)
        waiting = table.ask(3, "u")
        assert isinstance(waiting, Waiting)
        assert waiting.lost == (() if gone else ("c",))


def test_a_grant_with_enough_gradients_after_a_loss_becomes_a_round() -> None:
    table = with_a_gradient_each("a", "b", "c")
    table.ask(2)
    table.settle("a", "b")
    assert table.apply("a", 7) is False
    table.pass_time(TIMING.lease + 0.2, "a", "b")
    table.settle("a", "b")
    assert table.opened(2, "t", "a", "b").contributors.tolist() == [1, 2]
    assert table.owner.counters.voided == 0


def test_a_chief_that_wants_to_be_told_hears_of_a_lost_host_once() -> None:
    table = Table("a", "b")
    assert isinstance(table.owner.ask("t", 1, table.now, tell=True), Waiting)
    for _ in range(15):
        table.pass_time(0.1, "a")
        table.owner.ask("t", 1, table.now, tell=True)
    assert table.owner.answer("t") == Died((Loss("b"),))
    table.owner.leave("t", table.now, consume=False, told=1)
    assert isinstance(table.owner.ask("u", 1, table.now, tell=True), Waiting)


def test_a_chief_that_wants_to_be_told_hears_of_dead_workers_once() -> None:
    table = Table("a", "b")
    table.apply("a", 1)
    table.owner.ask("t", 3, table.now, tell=True)
    forwarder, _ = table.hosts["b"]
    forwarder.died((17, 18), (2,))
    assert forwarder.report_due(table.now) == table.now, "worth a report at once"
    table.settle()
    table.settle()  # reports go on saying it
    assert table.owner.answer("t") == Died((Loss("b", (17, 18), (2,)),))
    table.owner.leave("t", table.now, consume=False, told=1)
    assert isinstance(table.owner.ask("u", 3, table.now, tell=True), Waiting), "it was told once"
    assert table.owner.counters.died_workers == 2


def test_a_death_ends_neither_a_grant_nor_a_wait_in_the_next_step() -> None:
    table = with_a_gradient_each("a", "b")
    forwarder, _ = table.hosts["b"]
    assert isinstance(table.owner.ask("t", 2, table.now, tell=True), Waiting)  # the grant is made
    forwarder.died((17,), (2,))
    table.hear()
    assert isinstance(table.owner.answer("t"), Waiting)
    table.settle()
    assert isinstance(table.owner.answer("t"), Opened)
    assert table.owner.leave("t", table.now, consume=True)
    forwarder.died((18,), ())  # before the host learns of the next step
    table.settle()
    assert isinstance(table.owner.ask("u", 2, table.now, tell=True), Waiting)


def test_the_next_chief_is_told_of_a_death_that_a_dead_chief_missed() -> None:
    table = Table("a", "b")
    table.owner.ask("dead", 3, table.now, tell=True)
    table.owner.ask("t", 3, table.now, tell=True)
    table.hosts["b"][0].died((17,), (2,))
    table.settle()
    assert isinstance(table.owner.answer("t"), Waiting)
    while table.owner.counters.lost_chiefs == 0:
        table.pass_time(0.5, "a", "b")
        table.owner.ask("t", 3, table.now, tell=True)
    assert table.owner.answer("t") == Died((Loss("b", (17,), (2,)),))
    table.owner.leave("t", table.now, consume=False, told=1)
    assert isinstance(table.owner.ask("u", 3, table.now, tell=True), Waiting), "it was told once"


@pytest.mark.parametrize("leaves", [True, False], ids=["interrupted", "killed"])
def test_the_next_chief_is_told_of_a_death_whose_first_report_was_lost(*, leaves: bool) -> None:
    """The owner answers a waiting call, but the chief is dead or has timed out."""
    table = Table("a", "b")
    table.owner.ask("t", 3, table.now, tell=True)
    table.hosts["b"][0].died((17,), (2,))
    table.settle()
    assert table.owner.answer("t") == Died((Loss("b", (17,), (2,)),))
    if leaves:
        table.owner.leave("t", table.now, consume=False)
    else:
        table.pass_time(TIMING.chief_lease + 0.2, "a", "b")
        assert table.owner.counters.lost_chiefs == 1
    assert table.owner.ask("u", 3, table.now, tell=True) == Died((Loss("b", (17,), (2,)),))


def test_the_next_chief_is_told_of_a_death_during_a_grant_that_the_last_chief_left() -> None:
    table = with_a_gradient_each("a", "b")
    table.owner.ask("t", 2, table.now, tell=True)  # the grant is made
    table.hosts["b"][0].died((17,), (2,))
    table.hear()
    assert isinstance(table.owner.answer("t"), Waiting)
    table.owner.leave("t", table.now, consume=False)  # its timeout is over
    table.settle()
    assert table.owner.ask("u", 3, table.now, tell=True) == Died((Loss("b", (17,), (2,)),))


def test_cancel_ends_waits_but_no_block() -> None:
    table = with_a_gradient_each("a")
    assert table.opened(1).count == 1
    table.ask(1, "u")
    table.owner.cancel(table.now)
    assert isinstance(table.owner.answer("u"), Ended)
    assert isinstance(table.ask(1, "u"), Ended), "its next call does not put it in the queue again"
    assert isinstance(table.owner.answer("t"), Opened)
    assert table.owner.leave("t", table.now, consume=True)
    table.settle()
    table.apply("a", 1)
    table.ask(1, "v")
    table.settle()
    assert isinstance(table.ask(1, "v"), Opened), "the queue goes on"


def test_a_contributor_at_two_hosts_makes_the_step_void(caplog: pytest.LogCaptureFixture) -> None:
    table = Table("a", "b")
    table.apply("a", 1)
    table.apply("b", 1)  # its worker was started again, but a has its gradient
    table.ask(2)
    table.settle()
    assert isinstance(table.ask(2), Waiting)
    assert "hosts a and b have both accepted contributor 1" in caplog.text
    assert table.owner.step == 1
    assert table.owner.counters.voided == 1
    assert table.hosts["a"][1].taken == 0, "what was dropped does not count as taken"
    # The worker at a has ended meanwhile: it had moved to b.
    table.settle()
    assert table.apply("b", 1)
    assert table.apply("a", 2)
    assert table.opened(2).contributors.tolist() == [1, 2]


def test_a_contributor_that_stays_at_two_hosts_is_an_error_at_the_chief() -> None:
    table = Table("a", "b", "c")
    for step in range(2):
        assert not isinstance(table.ask(3), Conflict)
        for host, contributor in (("a", 7), ("b", 7), ("c", 1), ("c", 2)):
            assert table.apply(host, contributor)
        table.settle()
        assert table.owner.step == step + 1
    assert table.ask(3) == Conflict(7, ("a", "b"))
    table.owner.leave("t", table.now, consume=False)
    # One of the two workers of contributor 7 is ended, but it has already applied in this step.
    table.ask(3, "s")
    for host, contributor in (("a", 7), ("b", 7), ("c", 1), ("c", 2)):
        assert table.apply(host, contributor)
    table.settle()
    assert isinstance(table.ask(3, "s"), Waiting)
    table.owner.leave("s", table.now, consume=False)
    for host, contributor in (("b", 7), ("c", 1), ("c", 2)):
        assert table.apply(host, contributor)
    table.settle()
    assert table.opened(3, "u").contributors.tolist() == [1, 2, 7]
    assert table.owner.leave("u", table.now, consume=True)
    table.settle()
    table.ask(2, "v")
    table.apply("a", 1)
    table.apply("b", 1)
    table.settle()
    assert isinstance(table.ask(2, "v"), Waiting), "after a round it is a void step again"


def test_a_worker_that_moves_from_a_lost_host_counts_where_it_is() -> None:
    """Its earlier gradients are on the lost host, which does not count."""
    table = with_a_gradient_each("a", "b")
    table.opened(2)
    table.owner.leave("t", table.now, consume=False)
    table.pass_time(TIMING.lease + 0.2, "b")
    table.settle("b")
    table.apply("b", 1)
    table.settle("b")
    opened = table.opened(2, "u", "b")
    assert [member.key.host for member in opened.members] == ["b"]
    assert table.owner.counters.voided == 0


def test_workers_refused_for_a_withdrawn_grant_go_on() -> None:
    """They wait for the next step, so the missing gradients never come: the step is void."""
    table = with_a_gradient_each("a", "b")
    table.ask(2)
    table.settle("a")
    assert table.apply("a", 3) is False
    table.pass_time(TIMING.lease + 0.2, "a")  # b is lost in the middle of the grant
    table.settle("a")
    assert table.owner.step == 1
    assert table.hosts["a"][1].step == 1
    assert table.apply("a", 3)


def test_workers_of_an_emptied_segment_go_on() -> None:
    """The segment's step stays, but its workers wait for a next step, which must come."""
    table = Table("a", step=3)
    table.apply("a", 1)
    segment = table.hosts["a"][1]
    table.owner.advance_step(4, table.now)
    table.owner.set_global_step(3, "set", table.now)  # the host learns of both at once
    table.settle()
    assert (segment.step, segment.content) == (3, [])
    for _ in range(int(TIMING.chief_lease * 10) + 1):
        assert segment.step == 3
        table.ask(1)
        table.pass_time(0.1, "a")
    table.settle()
    assert segment.step == 4


def test_workers_refused_for_a_round_that_was_given_up_go_on_when_a_host_is_lost() -> None:
    table = with_a_gradient_each("a", "b")
    table.opened(2)
    assert table.apply("a", 3) is False  # it waits for the next step
    table.owner.leave("t", table.now, consume=False)
    table.settle()
    assert table.owner.step == 0
    for _ in range(int((TIMING.lease + TIMING.chief_lease) * 10) + 3):  # b is lost
        assert not isinstance(table.ask(2, "u"), Opened)
        table.pass_time(0.1, "a")
    table.settle("a")
    assert (table.owner.step, table.hosts["a"][1].step) == (1, 1)


def test_workers_refused_for_a_round_that_a_new_step_ended_go_on() -> None:
    table = with_a_gradient_each("a", "b")
    table.opened(2)
    assert table.apply("a", 3) is False  # it waits for the next step
    table.owner.set_global_step(0, "set", table.now)
    for _ in range(int(TIMING.chief_lease * 10) + 3):
        table.settle()
        assert not isinstance(table.ask(3, "u"), Opened)
        table.pass_time(0.1, "a", "b")
    table.settle()
    assert table.owner.step == table.hosts["a"][1].step == 1


def test_a_round_that_was_given_up_makes_no_step_void() -> None:
    table = with_a_gradient_each("a", "b")
    table.opened(2)
    table.owner.leave("t", table.now, consume=False)
    for _ in range(int(TIMING.chief_lease * 20)):
        table.ask(3, "u")
        table.pass_time(0.1, "a", "b")
        table.settle()
    assert (table.owner.step, table.owner.accumulated) == (0, 2)


def test_gradients_applied_before_a_host_hears_of_advance_step_are_old() -> None:
    """They come into no round, as if applied just before `advance_step` on one host."""
    table = Table("a", "b")
    assert table.owner.advance_step(5, table.now) == 0
    _, segment = table.hosts["a"]
    assert table.apply("a", 1), "the segment is at step 0 until its forwarder hears of step 5"
    assert table.apply("b", 2)
    table.settle()
    assert (segment.step, segment.content, segment.dropped) == (5, [], 1)
    assert table.owner.accumulated == 0
    assert table.apply("a", 1)
    assert table.apply("b", 2)
    opened = table.opened(2)
    assert (opened.step, opened.count) == (5, 2)
    assert table.owner.counters.voided == 0


def test_gradients_that_a_new_segment_accepts_before_its_first_order_are_dropped() -> None:
    """A new host's segment begins at step 0, and follows the owner with its first order."""
    table = Table("a", step=7)
    table.add("late", Segment())
    assert table.apply("late", 2)
    assert table.hosts["late"][1].step == 0
    table.settle()
    assert (table.hosts["late"][1].step, table.hosts["late"][1].content) == (7, [])
    assert table.apply("late", 2)
    assert table.opened(1).contributors.tolist() == [2]
