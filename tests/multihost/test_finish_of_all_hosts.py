"""The end of a run reaches every host, whoever says it, and what is open goes on to its end."""

from __future__ import annotations

import pytest
from helpers.multihost_actors import TIMING
from helpers.multihost_table import Table, with_a_gradient_each

from shmacc._multihost.messages import Finished, Waiting
from shmacc._multihost.owner import OwnerCore
from shmacc_simulate.books import Segment

pytestmark = pytest.mark.threads


def test_every_segment_is_finished_and_no_round_is_opened() -> None:
    table = with_a_gradient_each("a", "b")
    assert isinstance(table.ask(3), Waiting)
    table.owner.finish(table.now)
    assert isinstance(table.ask(3), Finished), "the one that waits"
    assert isinstance(table.ask(1, "later"), Finished)
    table.settle()
    assert all(segment.finished for segment in table.segments)
    assert [len(segment.content) for segment in table.segments] == [1, 1], "can be read"
    assert table.apply("a", 5) is False


def test_a_block_that_is_open_goes_on_to_its_end_first() -> None:
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


def test_a_grant_that_has_not_become_a_block_is_withdrawn() -> None:
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


def test_a_host_that_joins_later_hears_of_it() -> None:
    table = Table("a")
    table.owner.finish(table.now)
    table.add("b", Segment())
    table.settle()
    assert all(segment.finished for segment in table.segments)


def test_a_forwarder_that_is_started_again_leaves_it_finished_with_what_it_has() -> None:
    table = with_a_gradient_each("a")
    table.owner.finish(table.now)
    table.settle()
    table.add("a", table.hosts["a"][1])
    table.settle()
    (segment,) = table.segments
    assert segment.finished
    assert len(segment.content) == 1


def test_a_segment_of_an_earlier_run_that_was_finished_begins_anew() -> None:
    """It has the step at which the new run begins, and would end that at once."""
    left = Segment(finished=True)
    table = Table("a")
    table.add("b", left)
    table.settle()
    assert not left.finished
    assert not table.owner.finished
    assert table.apply("b", 2)


def test_another_owner_learns_it_from_the_hosts() -> None:
    table = with_a_gradient_each("a")
    table.owner.finish(table.now)
    table.settle()
    term = table.owner.fence.term
    table.owner = OwnerCore(term + 1, None, TIMING)
    table.owner.set_global_step(0, "set", table.now)
    table.settle()
    assert table.hosts["a"][1].finished
    assert isinstance(table.ask(1, "u"), Finished)
