"""The owner grants a chief a round (hosts hold their gradients), opens it and ends it."""

import pytest
from helpers.multihost_table import Table, with_a_gradient_each

from shmacc._multihost import forwarder as act
from shmacc._multihost.messages import LAST_STEP, AtLastStep, Chiefless, Ended, Opened, Waiting
from shmacc._multihost.owner import OwnerCore
from shmacc_hosts.world import TIMING

pytestmark = pytest.mark.threads


def test_the_number_required_counts_gradients_of_all_hosts() -> None:
    table = Table("a", "b")
    assert table.apply("a", 1)
    assert table.apply("a", 2)
    assert table.apply("b", 3)
    table.settle()
    waiting = table.ask(4)
    assert isinstance(waiting, Waiting)
    assert waiting.accumulated == 3
    assert waiting.hosts == ("a", "b")
    assert table.apply("b", 4)
    table.settle()
    opened = table.opened(4)
    assert opened.count == 4
    assert opened.contributors.tolist() == [1, 2, 3, 4]


def test_a_segment_without_gradients_is_held_too() -> None:
    """If it were not held, a gradient that it accepts after the grant would be in no round."""
    table = Table("a", "b")
    assert table.apply("a", 1)
    table.ask(1)
    table.hear()  # the grant is made, and both hosts have got it
    table.hear()
    assert (act.Do.HOLD, 0) in table.act("b")
    assert table.apply("b", 2) is False
    table.settle()
    assert isinstance(table.ask(1), Opened)


def test_a_round_waits_for_hosts_that_have_reported_nothing_yet() -> None:
    """Such a host may have accepted a gradient since its last report."""
    table = Table("a", "b")
    assert table.apply("a", 1)
    table.hear("a")
    table.ask(1)
    assert table.apply("b", 2)  # accepted, and not reported
    table.settle("a")
    assert isinstance(table.ask(1), Waiting)
    assert table.opened(1).count == 2


def test_an_order_contains_both_a_new_step_and_a_grant() -> None:
    """A host that has heard of neither must follow both by one order."""
    table = Table("a", "b")
    table.apply("a", 1)
    table.opened(1)
    assert table.owner.leave("t", table.now, consume=True)
    table.settle("a")  # b hears nothing
    table.apply("a", 1)
    table.settle("a")
    table.ask(1, "u")  # the grant: b is told of step and grant at once
    table.settle("a")
    assert isinstance(table.ask(1, "u"), Waiting)
    table.settle()
    assert isinstance(table.ask(1, "u"), Opened)


def test_a_grant_expires_if_a_host_ignores_it_though_the_host_sends_heartbeats() -> None:
    table = with_a_gradient_each("a", "b")
    table.ask(2)
    table.settle("a")  # b never follows the order, but reports all the time
    table.pass_time(TIMING.grace + 0.2, "a", "b")
    assert isinstance(table.ask(2), Waiting), "too few: nothing but time ends the grant"
    table.pass_time(TIMING.expiry, "a", "b")
    assert table.owner.counters.withdrawn == 1
    table.ask(2, "u")
    table.settle()
    assert isinstance(table.ask(2, "u"), Opened)


def test_a_host_that_does_not_answer_is_not_waited_for_beyond_the_grace() -> None:
    table = with_a_gradient_each("a", "b")
    table.ask(1)
    table.settle("a")
    assert isinstance(table.ask(1), Waiting)
    table.pass_time(TIMING.grace + 0.2, "a", "b")
    assert table.opened(1, "t", "a").count == 1


def test_a_block_that_raises_consumes_nothing() -> None:
    table = with_a_gradient_each("a", "b")
    first = table.opened(2)
    assert table.owner.leave("t", table.now, consume=False) is False
    table.settle()
    assert [segment.held for _, segment in table.hosts.values()] == [False, False]
    assert table.apply("a", 3)
    table.settle()
    again = table.opened(3, "u")
    assert again.step == first.step
    assert again.contributors.tolist() == [1, 2, 3]


def test_a_chief_that_is_silent_in_its_block_loses_its_round() -> None:
    table = with_a_gradient_each("a")
    table.opened(1)
    table.ask(1, "next")
    for _ in range(30):
        table.pass_time(0.1, "a")
        table.ask(1, "next")
        table.act("a")
    assert isinstance(table.ask(1), Ended)
    assert table.owner.leave("t", table.now, consume=True) is False, "it comes too late"
    assert table.opened(1, "next").contributors.tolist() == [1]


def test_no_round_closes_the_last_step() -> None:
    """As on one host, nothing is taken at the last step. Rounds go on after a lower step is set."""
    table = Table("a", step=LAST_STEP - 1)
    assert table.apply("a", 1)
    table.settle()
    table.opened(1)
    assert table.owner.leave("t", table.now, consume=True)
    table.settle()
    assert isinstance(table.ask(1, "u"), Waiting)
    assert table.apply("a", 1)
    table.settle()
    assert (table.ask(1, "u"), table.steps) == (AtLastStep(), [LAST_STEP])
    table.owner.set_global_step(7, "set", table.now)
    table.settle()
    assert table.opened(1, "u").contributors.tolist() == [1]
    owner = OwnerCore(1, None, TIMING, copies=True)
    owner.copies.is_learning = False
    owner.step = LAST_STEP
    assert owner.restore("call", "a", None, 0, 7, 0.0, only_first=False) == AtLastStep()


def test_the_end_of_a_block_counts_once_however_often_it_is_sent() -> None:
    table = with_a_gradient_each("a")
    table.opened(1)
    assert table.owner.leave("t", table.now, consume=True)
    assert table.owner.leave("t", table.now, consume=True)
    assert table.owner.leave("t", table.now, consume=False), "a late message of its changes nothing"
    assert table.owner.step == 1
    assert isinstance(table.ask(1), Ended), "a late message of its does not join the queue again"


def test_shards_that_lost_their_pieces_get_them_again() -> None:
    table = with_a_gradient_each("a")
    opened = table.opened(1)
    table.owner.missing("t", table.now)
    assert table.hosts["a"][1].held, "what it has is held for the next grant without a break"
    assert isinstance(table.ask(1), Waiting)
    table.settle()
    again = table.ask(1)
    assert isinstance(again, Opened)
    assert again.count == 1
    assert again.members[0].key > opened.members[0].key, "shipped anew, under a new name"


def test_a_lost_host_with_a_shard_ends_the_grant_and_the_shard_moves() -> None:
    table = with_a_gradient_each("a", "b", "c", shards=2)
    table.ask(2)
    table.hear()
    assert table.hosts["a"][0].shard_hosts == ("a", "b")
    # No host can send pieces to b, which is dead.
    for _ in range(15):
        table.pass_time(0.1, "a", "c")
        assert isinstance(table.ask(2), Waiting)
    assert table.owner.lost == {"b"}
    assert table.owner.counters.withdrawn == 1
    opened = table.opened(2, "t", "a", "c")
    assert opened.shard_hosts == ("a", "c")
    assert opened.contributors.tolist() == [1, 3]


def test_each_grant_puts_its_shards_on_hosts_that_report() -> None:
    """A loss or a new host changes the shards at the next grant; all pieces get new names."""
    table = with_a_gradient_each("a", "b", "c", shards=2)
    first = table.opened(3)
    assert first.shard_hosts == ("a", "b")
    assert table.owner.leave("t", table.now, consume=False) is False
    table.pass_time(TIMING.lease + 0.2, "b", "c")  # a, where pieces are, is lost
    again = table.opened(2, "u", "b", "c")
    assert again.shard_hosts == ("b", "c")
    assert not {member.key for member in first.members} & {member.key for member in again.members}
    assert again.contributors.tolist() == [2, 3], "what a had itself is out of reach"
    # Host a was only cut off. It comes back with its gradients, and gets a shard again.
    assert table.owner.leave("u", table.now, consume=False) is False
    table.settle()
    whole = table.opened(3, "v")
    assert whole.shard_hosts == ("a", "b")
    assert whole.contributors.tolist() == [1, 2, 3]


def test_more_shards_than_hosts_are_given_to_the_hosts_in_turn() -> None:
    table = with_a_gradient_each("a", "b", "c", shards=2)
    table.owner = OwnerCore(1, 0, TIMING, 5)
    for host in "ab":
        table.add(host, table.hosts[host][1])
    table.settle("a", "b")
    assert table.opened(2).shard_hosts == ("a", "b", "a", "b", "a")


def test_a_chief_that_asks_again_for_fewer_gradients_gets_a_round_of_them() -> None:
    table = Table("a", "b")
    table.apply("a", 1)
    assert isinstance(table.ask(3), Waiting)
    table.settle()
    assert isinstance(table.ask(3), Waiting)
    assert table.opened(1).contributors.tolist() == [1]


def test_a_wait_for_a_step_that_asks_to_be_told_ends_when_the_last_chief_is_lost() -> None:
    table = Table("a")
    table.ask(1)
    assert table.owner.step_past(0, table.now, tell=True) is None
    table.pass_time(TIMING.chief_lease + 1)
    assert table.owner.step_past(0, table.now) is None
    assert table.owner.step_past(0, table.now, tell=True) == Chiefless()
    table.ask(1, "next")
    assert table.owner.step_past(0, table.now, tell=True) is None
