"""When hosts report, and what the owner and shards do with late reports and batches."""

import pytest
from helpers.multihost_table import Table, with_a_gradient_each

from shmacc._multihost import forwarder as act
from shmacc._multihost.forwarder import ForwarderCore
from shmacc._multihost.messages import (
    Batch,
    BatchKey,
    Fence,
    Opened,
    Order,
    Report,
    Timing,
    Waiting,
)
from shmacc._multihost.shard import ShardCore
from shmacc_hosts.world import TIMING

pytestmark = pytest.mark.threads


def test_many_hosts_report_more_rarely_and_are_waited_for_longer() -> None:
    """Together they send no more heartbeats than the owner can handle."""
    names = [f"host{number}" for number in range(60)]
    pace = len(names) / (TIMING.heartbeats * TIMING.heartbeat)
    assert pace == 3
    table = Table(*names)
    table.hear()
    core, _ = table.hosts["host0"]
    assert core.report_due(table.now) == pytest.approx(table.now + 3 * TIMING.heartbeat)
    patience = 4 * 3 * TIMING.heartbeat
    assert patience > TIMING.lease
    heard, table.now = table.now, table.now + (TIMING.lease + patience) / 2
    table.owner.tick(table.now)
    assert table.owner.counters.lost_hosts == 0
    table.now = heard + patience + 0.01
    table.hear("host0")
    assert table.owner.counters.lost_hosts == len(names) - 1
    assert core.report_due(table.now) == table.now, "a new pace is worth a report at once"
    table.hear("host0")
    assert core.report_due(table.now) == pytest.approx(table.now + TIMING.heartbeat)


def test_one_report_says_that_a_segment_is_held_and_its_pieces_have_arrived() -> None:
    table = with_a_gradient_each("a")
    table.ask(1)
    table.hear()
    core, segment = table.hosts["a"]
    core.observe(segment.step, 1)
    assert core.next_action() == (act.Do.HOLD, 0)
    assert core.report_due(table.now) > table.now
    began, table.now = table.now, table.now + 0.05
    core.held(segment.hold(), began)
    assert core.report_due(table.now) == began + TIMING.grace / 4, "slow pieces: before grace"
    assert core.has_answer_to_come
    ship = core.next_action()
    assert ship is not None
    assert ship[0] == act.Do.SHIP
    core.shipped(ship[1])
    assert core.report_due(table.now) == table.now
    table.hear()
    assert not core.has_answer_to_come
    assert isinstance(table.owner.answer("t"), Opened)


def test_a_count_that_grows_before_the_first_order_is_reported_soon() -> None:
    core = ForwarderCore("a", 1, TIMING)
    core.observe(0, 0)
    core.report(1.0)
    core.observe(0, 1)
    assert core.report_due(1.0) == 1.0 + TIMING.announce


def test_one_report_says_that_a_round_is_over_and_how_many_gradients_the_next_one_has() -> None:
    table, lag = with_a_gradient_each("a", "b"), 0.03
    core, segment = table.hosts["a"]
    gathers = []
    for ticket in "first", "second", "third":
        table.opened(2, ticket)
        table.owner.leave(ticket, table.now, consume=True)
        table.follow()
        core.observe(segment.step, 0)
        gathers.append(core.report_due(table.now) - table.now)
        assert core.has_answer_to_come, "the owner need not keep a call meanwhile"
        table.now += lag
        assert table.apply("a", 1)
        assert table.apply("b", 2)
        core.observe(segment.step, 1)
        assert core.report_due(table.now) == table.now, "as many as in the last round"
        table.hear()
    assert gathers == pytest.approx([0.0, 2 * lag, 2 * lag]), "none may come"
    core.died((1,), ())
    assert core.report_due(table.now) == table.now


def test_a_report_is_due_at_once_when_as_many_gradients_came_as_in_the_last_round() -> None:
    table = Table("a")
    for contributor in 1, 2, 3:
        assert table.apply("a", contributor)
    assert table.opened(3).count == 3
    table.owner.leave("t", table.now, consume=True)
    table.settle()
    core, segment = table.hosts["a"]
    due = []
    for count in 1, 2, 3:
        table.now += 0.001
        assert table.apply("a", count)
        core.observe(segment.step, count)
        due.append(core.report_due(table.now) - table.now)
    assert due == pytest.approx([TIMING.announce, TIMING.announce - 0.001, 0.0])


def test_a_host_that_sends_pieces_reports_before_its_lease_ends() -> None:
    timing = Timing(grace=30.0)
    core = ForwarderCore("a", 1, timing)
    core.receive(Order(1, 1, 1, ready=True, hold=True, grant=1, fence=Fence(1, 0), adopt=True))
    core.observe(0, 1)
    assert core.next_action() == (act.Do.HOLD, 0)
    core.report(5.0)
    core.held(Batch(1, 1), 5.1)
    assert core.report_due(5.1) == 5.0 + timing.lease / 4


def test_a_host_that_sends_pieces_slowly_reports_in_time_and_is_waited_for() -> None:
    table = with_a_gradient_each("a", "b")
    table.ask(1)
    table.settle("b")
    table.hear("a")
    core, segment = table.hosts["a"]
    core.observe(segment.step, 1)
    core.held(segment.hold(), table.now)
    while core.report_due(table.now) > table.now:
        table.now += TIMING.grace / 16
    table.hear("a")
    assert not core.has_answer_to_come
    table.pass_time(3 * TIMING.grace, "a", "b")
    assert isinstance(table.ask(1), Waiting), "what it ships is waited for"
    ship = core.next_action()
    assert ship is not None
    assert ship[0] == act.Do.SHIP
    core.shipped(ship[1])
    assert table.opened(1).count == 2


def test_only_hosts_outside_a_round_are_told_that_its_block_is_open() -> None:
    table = Table("a", "b")
    table.apply("a", 1)
    table.settle()
    table.ask(1)
    table.settle("a")
    table.hear("b")
    serials = {host: core._order.serial for host, (core, _) in table.hosts.items() if core._order}
    table.now += TIMING.grace + 0.1  # b does not answer, and is late
    assert isinstance(table.ask(1), Opened)
    assert not table.owner.has_news("a", serials["a"])
    assert table.owner.has_news("b", serials["b"])
    assert table.owner.has_news("a", serials["a"] - 1)
    table.owner.leave("t", table.now, consume=True)
    assert table.owner.has_news("a", serials["a"])


@pytest.mark.parametrize("hosts", [4, 60])
def test_many_hosts_are_told_after_how_many_gradients_to_report(hosts: int) -> None:
    """With few hosts the number is 1. Orders contain it even while no chief waits."""
    names = [f"host{number}" for number in range(hosts)]
    table = Table(*names)
    for number, name in enumerate(names):
        for worker in range(8):
            assert table.apply(name, 8 * number + worker)
    assert table.opened(8 * hosts).count == 8 * hosts
    table.owner.leave("t", table.now, consume=True)
    table.settle()
    slack = {
        table.owner.order(name, core._incarnation).slack for name, (core, _) in table.hosts.items()
    }
    assert slack == {4 if hosts > 50 else 1}


def test_a_shard_finds_the_last_batch_of_each_host() -> None:
    shard: ShardCore[str] = ShardCore()
    assert shard.latest(["a", "b"]) == {}
    for key in BatchKey("a", 1, 1), BatchKey("b", 2, 9), BatchKey("a", 1, 2):
        shard.stage(Fence(1, 0), key, "piece")
    assert list(shard.latest(["b", "a"])) == [BatchKey("b", 2, 9), BatchKey("a", 1, 2)]
    assert shard.latest(["a", "c"]) == {}
    assert shard.latest([]) == {}
    shard.forget(Fence(1, 1))
    assert shard.latest(["a"]) == {}


def test_a_shard_keeps_nothing_of_rounds_that_are_over() -> None:
    shard: ShardCore[str] = ShardCore()
    key = BatchKey("a", 1, 1)
    assert shard.stage(Fence(1, 0), key, "old")
    assert shard.stage(Fence(1, 1), BatchKey("b", 1, 1), "new")
    assert len(shard) == 1
    assert not shard.stage(Fence(1, 0), key, "late")
    both = (key, BatchKey("b", 1, 1))
    assert shard.pieces(Fence(1, 1), both) is None
    assert shard.pieces(Fence(1, 1), both[1:]) == ["new"]
    for grant in range(2, 9):
        assert shard.stage(Fence(1, 1), BatchKey("b", 1, grant), f"again {grant}")
    assert not shard.stage(Fence(1, 1), both[1], "late")
    assert len(shard) == 1
    assert shard.pieces(Fence(1, 1), (BatchKey("b", 1, 8),)) == ["again 8"]
    assert shard.pieces(Fence(1, 1), (BatchKey("b", 1, 7),)) is None


def test_late_and_doubled_reports_change_nothing() -> None:
    table = Table("a")
    core, _ = table.hosts["a"]
    early = core.report(table.now)
    table.apply("a", 1)
    table.hear()
    table.owner.report(early, table.now)
    assert table.owner.accumulated == 1
    zombie = Report("a", 1, 10**6, Fence(1, 0), 0, 99)
    table.owner.report(zombie, table.now)
    assert table.owner.accumulated == 1
