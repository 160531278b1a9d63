"""Forwarders, machines and owners are restarted; the end of a run reaches all of them."""

import pytest
from helpers.multihost_table import Table, with_a_gradient_each

from shmacc._multihost.messages import Fence, Finished, NotReady, Opened, Report, Waiting
from shmacc._multihost.owner import OwnerCore
from shmacc_hosts.memory import Segment
from shmacc_hosts.world import TIMING

pytestmark = pytest.mark.threads


def test_a_restarted_forwarder_goes_on_with_the_segment() -> None:
    table = with_a_gradient_each("a")
    old, segment = table.hosts["a"]
    table.add("a", segment)
    table.owner.report(old.report(table.now), table.now)
    assert table.owner.counters.refused_reports == 1
    assert table.owner.order("a", 1 << 32 | 1).refused
    assert table.opened(1).contributors.tolist() == [1]


@pytest.mark.parametrize("dies", ["before", "granted", "held", "shipped", "missing"])
def test_a_round_waits_for_a_restarted_forwarders_segment(dies: str) -> None:
    """The other host alone has too few gradients, but the step does not become void."""
    table = with_a_gradient_each("a", "b")
    _, segment = table.hosts["a"]
    if dies != "before":
        table.ask(2)
    if dies == "granted":
        table.settle("b")
    elif dies == "held":
        table.hear("a")
        table.act("a")
    elif dies in {"shipped", "missing"}:
        table.settle()
        assert isinstance(table.ask(2), Opened)
    segment.held = False  # the forwarder that held it has died
    table.add("a", segment)
    if dies == "missing":
        table.owner.missing("t", table.now)
    for _ in range(3):
        opened = table.opened(2)
    assert opened.contributors.tolist() == [1, 2]
    assert (opened.step, table.owner.counters.voided) == (0, 0)


def test_a_restarted_forwarder_that_never_reports_is_lost_after_its_lease() -> None:
    table = with_a_gradient_each("a", "b")
    table.ask(2)
    table.settle("b")
    table.owner.enrol("a", table.now)
    table.pass_time(TIMING.lease / 2, "b")
    assert table.owner.counters.voided == 0
    table.pass_time(TIMING.lease, "b")
    assert table.owner.counters.voided == 1
    assert table.owner.step == 1


def test_a_segment_that_was_left_behind_is_emptied() -> None:
    """Its gradients were in a round that the new forwarder does not know."""
    table = with_a_gradient_each("a")
    table.opened(1)
    assert table.owner.leave("t", table.now, consume=True)
    _, segment = table.hosts["a"]
    segment.held = False  # the forwarder is dead
    table.add("a", segment)
    table.settle()
    assert (segment.step, segment.content) == (1, [])


def test_a_restarted_machine_has_lost_old_gradients_and_new_ones_count() -> None:
    table = with_a_gradient_each("a", "b")
    table.opened(2)
    table.owner.leave("t", table.now, consume=False)
    table.add("b", Segment())
    table.settle()
    assert table.owner.accumulated == 1
    assert table.apply("b", 3)
    table.settle()
    assert table.opened(2, "u").contributors.tolist() == [1, 3]
    assert table.owner.leave("u", table.now, consume=True)
    table.settle()
    assert table.steps == [1, 1]
    assert table.owner.accumulated == 0


def test_a_restarted_owner_goes_on_though_workers_wait_for_the_next_step() -> None:
    """The first owner's grant refused the workers' gradients, which do not come again."""
    table = with_a_gradient_each("a", "b")
    table.ask(2)
    table.settle("a")
    assert table.apply("a", 3) is False
    table.owner = OwnerCore(2, None, TIMING)
    table.owner.set_global_step(0, "set", table.now)
    table.settle()
    for _ in range(int(TIMING.chief_lease * 10) + 2):
        assert isinstance(table.ask(3), Waiting)
        table.pass_time(0.1, "a", "b")
    table.settle()
    assert table.steps == [1, 1]
    assert table.owner.counters.voided == 1
    for _ in range(int(TIMING.chief_lease * 20)):
        table.ask(3)
        table.pass_time(0.1, "a", "b")
    assert table.owner.step == 1, "once: now nobody waits for what does not come"


def test_a_step_that_is_set_again_does_not_bring_its_gradients_back() -> None:
    """Gradients of step 0 were consumed, step 0 is set again, and a forwarder starts."""
    table = Table("a", "b")
    table.apply("b", 1)
    table.ask(1)
    table.settle()
    assert table.owner.leave("t", table.now, consume=True)
    table.owner.set_global_step(0, "set", table.now)
    _, segment = table.hosts["b"]
    assert segment.step == 0
    assert segment.content
    segment.held = False
    table.add("b", segment)
    table.settle()
    assert segment.content == []
    assert table.owner.accumulated == 0


def test_a_restarted_owner_refuses_rounds_until_a_step_is_set() -> None:
    table = Table("a", "b")
    table.apply("a", 1)
    table.settle()
    table.owner = OwnerCore(2, None, TIMING)
    assert isinstance(table.ask(1), NotReady)
    table.settle()
    assert isinstance(table.ask(1), NotReady)
    table.hosts["b"][1].reset(7)
    table.apply("b", 2)
    table.owner.set_global_step(0, "set", table.now)
    table.settle()
    assert table.opened(1).contributors.tolist() == [1], (
        "those of the step that was set, and no others"
    )


def test_a_restarted_owner_reports_no_step_until_one_is_set() -> None:
    """But it reports at once that the run is finished, since no step will follow."""
    owner = OwnerCore(2, None, TIMING)
    assert owner.step_past(-1, 0.0) == NotReady()
    owner.set_global_step(3, "set", 0.0)
    assert (owner.step_past(2, 0.0), owner.step_past(3, 0.0)) == (3, None)
    owner.finish(0.0)
    assert (owner.step_past(2, 0.0), owner.step_past(3, 0.0)) == (3, Finished())
    owner = OwnerCore(3, None, TIMING)
    owner.finish(0.0)
    assert owner.step_past(-1, 0.0) == owner.ask("t", 1, 0.0) == Finished()
    owner = OwnerCore(4, None, TIMING)
    owner.advance_step(7, 0.0)
    assert owner.step_past(6, 0.0) == 7


def test_a_chief_that_is_in_its_block_gets_no_round_of_the_next_owner() -> None:
    """The chief has a round of the first owner; its heartbeats must not ask for another round."""
    table = with_a_gradient_each("a", "b")
    table.opened(2)
    table.owner = OwnerCore(2, None, TIMING)
    table.owner.set_global_step(0, "set", table.now)
    table.settle()
    assert table.apply("a", 3)
    for _ in range(3):
        table.owner.hear("t", table.now)
        table.settle()
    assert table.owner.accumulated == 3
    assert not table.owner.leave("t", table.now, consume=True)
    assert table.owner.step == 0


def test_an_owner_whose_clock_is_behind_goes_on_in_a_later_term() -> None:
    """Hosts follow the latest term that they know; a term is the time on the owner's node."""
    table = Table("a", "b", term=9)
    table.apply("a", 1)
    table.settle()
    table.owner = OwnerCore(2, None, TIMING)
    table.add("b", table.hosts["b"][1])  # b enrols before the owner knows the last term
    table.owner.set_global_step(0, "set", table.now)
    table.settle()
    assert table.apply("b", 2)
    opened = table.opened(2)
    assert opened.fence.term > 9
    assert opened.contributors.tolist() == [1, 2]
    assert table.owner.leave("t", table.now, consume=True)
    table.settle()
    assert table.steps == [1, 1]


def test_a_batch_for_an_earlier_owners_grant_does_not_count() -> None:
    table = with_a_gradient_each("a")
    table.ask(1)
    table.settle()
    late = table.hosts["a"][0].report(table.now)
    assert late.batch
    table.owner = OwnerCore(2, 3, TIMING)
    table.owner.report(Report("b", 1, 1, Fence(2, 0), 3, 1), table.now)
    table.ask(1)  # the first grant of this owner
    table.owner.report(late, table.now)
    assert table.owner.accumulated == 1, "what b has reported, and nothing of a's"
    assert isinstance(table.ask(1), Waiting)


def test_a_finish_ends_every_segment_and_opens_no_more_rounds() -> None:
    table = with_a_gradient_each("a", "b")
    assert isinstance(table.ask(3), Waiting)
    table.owner.finish(table.now)
    assert isinstance(table.ask(3), Finished), "the one that waits"
    assert isinstance(table.ask(1, "later"), Finished)
    table.settle()
    assert all(segment.finished for segment in table.segments)
    assert [len(segment.content) for segment in table.segments] == [1, 1], "can be read"
    assert table.apply("a", 5) is False


def test_a_finish_waits_for_the_end_of_an_open_block() -> None:
    table = with_a_gradient_each("a", "b")
    table.opened(2)
    table.owner.finish(table.now)
    table.settle()
    assert not any(segment.finished for segment in table.segments)
    assert table.owner.leave("t", table.now, consume=True)
    table.settle()
    assert all(segment.finished for segment in table.segments)
    assert table.steps == [1, 1]
    assert isinstance(table.ask(1, "u"), Finished)


def test_a_finish_withdraws_a_grant_that_has_not_become_a_block() -> None:
    table = with_a_gradient_each("a", "b")
    table.ask(2)
    assert table.owner.counters.grants == 1
    table.owner.finish(table.now)
    table.settle()
    assert all(segment.finished and not segment.held for segment in table.segments)
    assert isinstance(table.ask(2), Finished)


def test_a_process_of_one_host_ends_the_run_of_all() -> None:
    table = with_a_gradient_each("a", "b")
    table.hosts["a"][1].finished = True
    table.settle()
    assert all(segment.finished for segment in table.segments)
    assert isinstance(table.ask(1), Finished)


def test_a_reset_on_its_way_does_not_undo_a_processs_finish() -> None:
    table = with_a_gradient_each("a", "b")
    table.owner.advance_step(3, table.now)
    core, segment = table.hosts["a"]
    core.receive(table.owner.order("a", core.report(table.now).incarnation))
    segment.finished = True  # before the forwarder has looked again
    assert table.act("a") == []
    table.settle()
    assert all(segment.finished for segment in table.segments)
    assert table.steps == [3, 3]


def test_a_host_that_joins_later_learns_that_the_run_has_finished() -> None:
    table = Table("a")
    table.owner.finish(table.now)
    table.add("b", Segment())
    table.settle()
    assert all(segment.finished for segment in table.segments)


def test_a_restarted_forwarder_leaves_a_finished_segment_as_it_is() -> None:
    table = with_a_gradient_each("a")
    table.owner.finish(table.now)
    table.settle()
    table.add("a", table.hosts["a"][1])
    table.settle()
    (segment,) = table.segments
    assert segment.finished
    assert len(segment.content) == 1


@pytest.mark.parametrize("step", [0, 3])
def test_the_run_ends_if_a_process_finishes_it_while_its_forwarder_is_dead(step: int) -> None:
    """The next forwarder knows no fence, and its first order may be to reset the segment."""
    table = with_a_gradient_each("a", "b")
    segment = table.hosts["a"][1]
    segment.finished = True
    table.owner.advance_step(step, table.now)
    table.add("a", segment)
    table.settle()
    assert all(segment.finished for segment in table.segments)
    assert isinstance(table.ask(1), Finished)


def test_the_run_ends_if_a_process_finishes_it_while_another_owner_takes_over() -> None:
    table = with_a_gradient_each("a", "b")
    table.owner = OwnerCore(2, None, TIMING)
    table.owner.advance_step(3, table.now)
    table.hear("a")
    table.hosts["a"][1].finished = True  # before its forwarder follows
    assert table.act("a") == []
    table.settle()
    assert all(segment.finished for segment in table.segments)
    assert isinstance(table.ask(1), Finished)


def test_another_owner_learns_of_the_finish_from_the_hosts() -> None:
    table = with_a_gradient_each("a")
    table.owner.finish(table.now)
    table.settle()
    term = table.owner.fence.term
    table.owner = OwnerCore(term + 1, None, TIMING)
    table.owner.set_global_step(0, "set", table.now)
    table.settle()
    assert table.hosts["a"][1].finished
    assert isinstance(table.ask(1, "u"), Finished)
