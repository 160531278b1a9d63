"""One group over many hosts: the core holds to the semantics of one group on one host."""

from __future__ import annotations

import os
import pickle
import threading

import numpy as np
import pytest
from helpers.multihost_world import TIMING, Faults, Gradient, Segment, World
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmacc
from shmacc._multihost import forwarder as act
from shmacc._multihost.forwarder import ForwarderCore
from shmacc._multihost.host_group import HostGroup
from shmacc._multihost.messages import (
    Batch,
    BatchKey,
    Died,
    Ended,
    Fence,
    Loss,
    Member,
    NotReady,
    Opened,
    Order,
    Report,
    Sealed,
    Timing,
    Waiting,
)
from shmacc._multihost.owner import OwnerCore
from shmacc._multihost.pieces import Joining, Plan, rows_of, values_of
from shmacc._multihost.segment import LocalSegment, describe
from shmacc._multihost.shard import ShardCore
from shmacc._multihost.share import Share
from shmacc.errors import InvalidArgumentError, OutOfRangeError

pytestmark = pytest.mark.threads

# A longer run: SHMACC_MULTIHOST_EXAMPLES=2000 pytest tests/multihost/test_core.py
EXAMPLES = int(os.environ.get("SHMACC_MULTIHOST_EXAMPLES", "25"))

KINDS = {
    "messages": Faults(drop=0.2, double=0.2, late=0.1),
    "forwarders": Faults(drop=0.05, double=0.1, late=0.02, forwarders=2),
    "hosts": Faults(hosts=0.5),
    "reboots": Faults(reboots=0.5),
    "shards": Faults(shards=3),
    "owners": Faults(owners=0.5),
    "chiefs": Faults(chiefs=0.2, raises=0.3, drop=0.05),
    "moves": Faults(moves=1),
    "zombies": Faults(zombies=0.2),
    "steps": Faults(steps=2, forwarders=1),
    "advances": Faults(advances=2, drop=0.1, double=0.1, late=0.05),
    "everything": Faults(
        drop=0.1,
        double=0.1,
        late=0.05,
        forwarders=0.5,
        hosts=0.2,
        reboots=0.2,
        shards=0.5,
        owners=0.1,
        chiefs=0.05,
        raises=0.1,
        moves=0.3,
        zombies=0.05,
        steps=0.2,
    ),
}


def live_through(world: World, seconds: float = 4) -> None:
    """Let things go wrong for a while; then rounds must go on. The world checks each of them."""
    world.run(seconds)
    world.heal()
    world.run(6)  # leases end, forwarders come back
    before = len(world.rounds)
    world.run(10, until=lambda: len(world.rounds) >= before + 3)
    assert len(world.rounds) >= before + 3, f"stuck: {world.owner.hosts()} {world.owner.counters}"


# Schedules


def test_with_nothing_wrong_a_round_has_every_accepted_gradient() -> None:
    for seed in range(3):
        world = World(seed, hosts=4, workers=2)
        world.run(10)
        assert len(world.rounds) > 20
        assert world.lost() == []
        assert [step for step, _ in world.rounds] == list(range(len(world.rounds)))


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_goes_wrong_rounds_are_sound_and_go_on(kind: str) -> None:
    for seed in range(2):
        live_through(World(seed, faults=Faults(**vars(KINDS[kind]))))


@pytest.mark.parametrize("kind", ["messages", "shards", "chiefs", "advances"])
def test_what_loses_no_segment_loses_no_gradient(kind: str) -> None:
    """Messages, shards and chiefs may all get lost: what was accepted is in a round.

    Or `advance_step` has dropped it, and nothing else has.
    """
    for seed in range(3, 6):
        world = World(seed, faults=Faults(**vars(KINDS[kind])))
        live_through(world)
        assert world.lost() == []
        assert (world.happened["advances"] > 0) == (kind == "advances")


@given(
    seed=st.integers(0, 2**32),
    kinds=st.sets(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3),
    hosts=st.integers(1, 4),
    shards=st.integers(1, 3),
    part=st.sampled_from([1.0, 0.5]),
    follows=st.booleans(),
    contributors=st.booleans(),
)
@settings(
    max_examples=EXAMPLES,
    deadline=None,
    derandomize=EXAMPLES == 25,  # CI's run is the same each time; the longer one looks further
    suppress_health_check=list(HealthCheck),
)
def test_random_schedules(
    seed: int,
    kinds: set[str],
    hosts: int,
    shards: int,
    part: float,
    *,
    follows: bool,
    contributors: bool,
) -> None:
    mixed = {name: max(getattr(KINDS[kind], name) for kind in kinds) for name in vars(Faults())}
    required = max(1, int(hosts * 2 * part))
    world = World(
        seed,
        hosts=hosts,
        workers=2,
        shards=shards,
        required=required,
        contributors=contributors,
        # Who does not follow the step is never left waiting, and needs no more than one gradient.
        follows=follows,
        faults=Faults(**mixed),
    )
    live_through(world, 3)


# Single cases, step by step


class Table:
    """An owner with hosts that are moved by hand."""

    def __init__(self, *hosts: str, step: int | None = 0, term: int = 1) -> None:
        self.owner = OwnerCore(term, step, TIMING)
        self.now = 0.0
        self.hosts: dict[str, tuple[ForwarderCore, Segment]] = {}
        for host in hosts:
            self.add(host, Segment())

    def add(self, host: str, segment: Segment) -> None:
        incarnation = self.owner.enrol(host, self.now)
        core = ForwarderCore(host, incarnation, TIMING, segment.token)
        self.hosts[host] = core, segment

    def hear(self, *hosts: str) -> None:
        """Each host reports, and gets its order; it does not follow it yet."""
        for host in hosts or self.hosts:
            core, segment = self.hosts[host]
            present = frozenset(core.watched & segment.contributors())
            core.observe(segment.step, len(segment.content), segment.dropped, present)
            report = core.report(self.now)
            self.owner.report(report, self.now)
            core.receive(self.owner.order(host, report.incarnation))

    def act(self, host: str) -> list[object]:
        """A host does what its order says; shipping succeeds at once."""
        core, segment = self.hosts[host]
        done: list[object] = []
        while True:
            present = frozenset(core.watched & segment.contributors())
            core.observe(segment.step, len(segment.content), segment.dropped, present)
            action = core.next_action()
            if action is None:
                return done
            done.append(action)
            match action:
                case act.Seal():
                    core.sealed(segment.sealed(), self.now)
                case act.Ship(seq):
                    core.shipped(seq, frozenset({0}))
                case act.Release():
                    segment.held = False
                    core.released()
                case act.Consume():
                    segment.taken += len(segment.content)
                    segment.reset(segment.step + 1, frozenset())
                    core.moved()
                case act.Reset(step, listed):
                    segment.reset(step, listed)
                    core.moved()
                case act.SetStep(step):
                    segment.step, segment.held = step, False
                    core.step_set()
                case act.Stop():
                    return done

    def settle(self, *hosts: str) -> None:
        """Hosts report and act until nothing changes."""
        for _ in range(4):
            self.hear(*hosts)
            for host in hosts or list(self.hosts):
                self.act(host)

    def pass_time(self, seconds: float, *hosts: str) -> None:
        """These hosts go on reporting meanwhile."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.1
            for host in hosts:
                self.hear(host)
            self.owner.tick(self.now)

    def apply(self, host: str, contributor: int, local_step: int | None = None) -> bool | None:
        segment = self.hosts[host][1]
        step = segment.step if local_step is None else local_step
        return segment.apply(Gradient(contributor * 1000 + step, step, contributor, 1))

    def ask(self, required: int, ticket: str = "t") -> object:
        return self.owner.ask(ticket, required, self.now)

    def opened(self, required: int) -> Opened:
        """Ask, have the hosts ship, and get the round."""
        self.ask(required)
        self.settle()
        opened = self.ask(required)
        assert isinstance(opened, Opened)
        return opened


def with_a_gradient_each(*hosts: str) -> Table:
    """Hosts that have reported a gradient each, of the contributors 1, 2 and so on."""
    table = Table(*hosts)
    table.settle()
    for contributor, host in enumerate(hosts, 1):
        assert table.apply(host, contributor)
    table.settle()
    return table


def test_the_number_required_counts_gradients_of_all_hosts() -> None:
    table = Table("a", "b")
    table.settle()
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
    opened = table.ask(4)
    assert isinstance(opened, Opened)
    assert opened.count == 4
    assert opened.contributors.tolist() == [1, 2, 3, 4]


def test_a_segment_without_gradients_is_sealed_too() -> None:
    """Else a gradient that comes after the grant would be accepted, and be in no round."""
    table = Table("a", "b")
    table.settle()
    assert table.apply("a", 1)
    table.ask(1)
    table.hear()  # the grant is made, and both hosts have got it
    table.hear()
    assert act.Seal() in table.act("b")
    assert table.apply("b", 2) is False
    table.settle()
    assert isinstance(table.ask(1), Opened)


def test_a_round_waits_for_hosts_that_have_reported_nothing_yet() -> None:
    """A gradient may have been accepted since the last report."""
    table = Table("a", "b")
    table.settle()
    assert table.apply("a", 1)
    table.hear("a")
    table.ask(1)
    assert table.apply("b", 2)  # accepted, and not reported
    table.settle("a")
    assert isinstance(table.ask(1), Waiting)
    table.settle()
    opened = table.ask(1)
    assert isinstance(opened, Opened)
    assert opened.count == 2


def test_an_order_that_says_only_the_last_event_would_hide_a_grant() -> None:
    """The step moves on and a new grant is made before a host hears of either: it follows both."""
    table = Table("a", "b")
    table.settle()
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


def test_a_grant_expires_though_a_host_sends_heartbeats() -> None:
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
    opened = table.ask(1)
    assert isinstance(opened, Opened)
    assert opened.count == 1


def test_a_block_that_raises_consumes_nothing() -> None:
    table = Table("a", "b")
    table.settle()
    table.apply("a", 1)
    table.apply("b", 2)
    first = table.opened(2)
    assert table.owner.leave("t", table.now, consume=False) is False
    table.settle()
    assert [segment.held for _, segment in table.hosts.values()] == [False, False]
    assert table.apply("a", 3)
    table.settle()
    table.ask(3, "u")
    table.settle()
    again = table.ask(3, "u")
    assert isinstance(again, Opened)
    assert again.step == first.step
    assert again.contributors.tolist() == [1, 2, 3]
    # What is unchanged is not shipped again: b has the piece that it had.
    keys = {member.key.host: member.key for member in first.members}
    assert {member.key.host: member.key for member in again.members}["b"] == keys["b"]


def test_a_chief_that_is_silent_in_its_block_loses_it() -> None:
    table = Table("a")
    table.settle()
    table.apply("a", 1)
    table.opened(1)
    table.ask(1, "next")
    for _ in range(30):
        table.pass_time(0.1, "a")
        table.ask(1, "next")
        table.act("a")
    assert isinstance(table.ask(1), Ended)
    assert table.owner.leave("t", table.now, consume=True) is False, "it comes too late"
    opened = table.ask(1, "next")
    assert isinstance(opened, Opened)
    assert opened.contributors.tolist() == [1]


def test_the_end_of_a_block_counts_once_however_often_it_is_said() -> None:
    table = Table("a")
    table.settle()
    table.apply("a", 1)
    table.opened(1)
    assert table.owner.leave("t", table.now, consume=True)
    assert table.owner.leave("t", table.now, consume=True)
    assert table.owner.leave("t", table.now, consume=False), "a late message of its changes nothing"
    assert table.owner.step == 1
    assert isinstance(table.ask(1), Ended), "a late message of its does not join the line again"


def test_shards_that_lost_their_pieces_get_them_again() -> None:
    table = Table("a")
    table.settle()
    table.apply("a", 1)
    opened = table.opened(1)
    table.owner.missing("t", tuple(member.key for member in opened.members), table.now)
    assert isinstance(table.ask(1), Waiting)
    table.settle()
    again = table.ask(1)
    assert isinstance(again, Opened)
    assert again.count == 1
    assert again.members[0].key.seq > opened.members[0].key.seq, "shipped anew, under a new name"


def test_a_forwarder_that_is_started_again_goes_on_with_the_segment() -> None:
    table = with_a_gradient_each("a")
    old, segment = table.hosts["a"]
    table.add("a", segment)
    table.owner.report(old.report(table.now), table.now)
    assert table.owner.counters.refused_reports == 1
    assert table.owner.order("a", 1 << 32 | 1).refused
    opened = table.opened(1)
    assert opened.contributors.tolist() == [1]


def test_a_segment_that_was_left_behind_is_emptied() -> None:
    """Its gradients were in a round that its new forwarder knows nothing of."""
    table = Table("a")
    table.settle()
    table.apply("a", 1)
    table.opened(1)
    assert table.owner.leave("t", table.now, consume=True)
    _, segment = table.hosts["a"]
    segment.held = False  # the forwarder is dead
    table.add("a", segment)
    table.settle()
    assert (segment.step, segment.content) == (1, [])


def test_what_a_machine_had_shipped_before_it_was_started_again_counts_beside_the_rest() -> None:
    table = Table("a", "b")
    table.settle()
    table.apply("a", 1)
    table.apply("b", 2)
    table.opened(2)
    table.owner.leave("t", table.now, consume=False)
    table.add("b", Segment())
    table.settle()
    assert table.apply("b", 3)
    table.settle()
    table.ask(3, "u")
    table.settle()
    opened = table.ask(3, "u")
    assert isinstance(opened, Opened)
    assert opened.contributors.tolist() == [1, 2, 3]
    assert set(table.owner.hosts()) == {"a", "b"}
    assert table.owner.leave("u", table.now, consume=True)
    table.settle()
    assert [segment.step for _, segment in table.hosts.values()] == [1, 1]
    assert table.owner.accumulated == 0


def test_a_step_that_was_there_before_does_not_bring_its_gradients_back() -> None:
    """Gradients of step 0 were consumed, the step is set to 0 again, and a forwarder starts."""
    table = Table("a", "b")
    table.settle()
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


def test_an_owner_that_was_started_again_refuses_rounds_until_a_step_is_set() -> None:
    table = Table("a", "b")
    table.settle()
    table.apply("a", 1)
    table.settle()
    table.owner = OwnerCore(2, None, TIMING)
    assert isinstance(table.ask(1), NotReady)
    table.settle()
    assert isinstance(table.ask(1), NotReady)
    table.hosts["b"][1].reset(7, frozenset())
    table.apply("b", 2)
    table.owner.set_global_step(0, "set", table.now)
    table.settle()
    opened = table.opened(1)
    assert opened.contributors.tolist() == [1], "those of the step that was set, and no others"


def test_a_batch_for_an_earlier_owners_grant_of_the_same_number_does_not_count() -> None:
    table = Table("a")
    table.settle()
    table.apply("a", 1)
    table.ask(1)
    table.settle()
    late = table.hosts["a"][0].report(table.now)
    assert late.sealed_for == 1
    table.owner = OwnerCore(2, 3, TIMING)
    table.owner.report(Report("b", 1, 1, Fence(2, 0), 3, 1), table.now)
    table.ask(1)  # the first grant of this owner
    table.owner.report(late, table.now)
    assert table.owner.accumulated == 1, "what b has reported, and nothing of a's"
    assert isinstance(table.ask(1), Waiting)


def test_a_lost_host_does_not_count_but_what_it_has_shipped_does() -> None:
    table = Table("a", "b", "c")
    table.settle()
    for contributor, host in enumerate("abc"):
        table.apply(host, contributor)
    table.settle()
    table.ask(3)
    table.settle("a", "b")  # c is dead
    assert isinstance(table.ask(3), Waiting)
    table.pass_time(TIMING.lease + 0.2, "a", "b")
    table.settle("a", "b")
    waiting = table.ask(3)
    assert isinstance(waiting, Waiting)
    assert waiting.hosts == ("a", "b")
    table.apply("a", 2)  # c's worker was started again at a
    table.settle("a", "b")
    assert table.owner.leave("t", table.now, consume=False) is False
    table.ask(3, "u")
    table.settle("a", "b")
    opened = table.ask(3, "u")
    assert isinstance(opened, Opened)
    assert opened.contributors.tolist() == [0, 1, 2]


def test_a_chief_that_wants_to_know_learns_of_a_lost_host_once() -> None:
    table = Table("a", "b")
    table.settle()
    assert isinstance(table.owner.ask("t", 1, table.now, tell=True), Waiting)
    for _ in range(15):
        table.pass_time(0.1, "a")
        table.owner.ask("t", 1, table.now, tell=True)
    assert table.owner.answer("t") == Died((Loss("b"),))
    table.owner.leave("t", table.now, consume=False)
    assert isinstance(table.owner.ask("u", 1, table.now, tell=True), Waiting)


def test_a_chief_that_wants_to_know_learns_of_dead_workers_once() -> None:
    table = Table("a", "b")
    table.settle()
    table.apply("a", 1)
    table.owner.ask("t", 3, table.now, tell=True)
    forwarder, _ = table.hosts["b"]
    forwarder.died((17, 18), (2,))
    assert forwarder.report_due(table.now) == table.now, "worth a report at once"
    table.settle()
    table.settle()  # reports go on saying it
    assert table.owner.answer("t") == Died((Loss("b", (17, 18), (2,)),))
    table.owner.leave("t", table.now, consume=False)
    assert isinstance(table.owner.ask("u", 3, table.now, tell=True), Waiting), "it was told once"
    assert table.owner.counters.died_workers == 2


def test_a_death_ends_neither_a_round_that_is_being_granted_nor_a_wait_in_the_next_step() -> None:
    table = with_a_gradient_each("a", "b")
    forwarder, _ = table.hosts["b"]
    assert isinstance(table.owner.ask("t", 2, table.now, tell=True), Waiting)  # the grant is made
    forwarder.died((17,), (2,))
    table.hear()
    assert isinstance(table.owner.answer("t"), Waiting)
    table.settle()
    assert isinstance(table.owner.answer("t"), Opened)
    assert table.owner.leave("t", table.now, consume=True)
    table.settle()
    assert isinstance(table.owner.ask("u", 2, table.now, tell=True), Waiting)


def test_cancel_ends_waits_and_no_block() -> None:
    table = Table("a")
    table.settle()
    table.apply("a", 1)
    assert table.opened(1).count == 1
    table.ask(1, "u")
    table.owner.cancel(table.now)
    assert isinstance(table.owner.answer("u"), Ended)
    assert isinstance(table.ask(1, "u"), Ended), "its next call does not put it in the line again"
    assert isinstance(table.owner.answer("t"), Opened)
    assert table.owner.leave("t", table.now, consume=True)
    table.settle()
    table.apply("a", 1)
    table.ask(1, "v")
    table.settle()
    assert isinstance(table.ask(1, "v"), Opened), "the line goes on"


def test_a_contributor_at_two_hosts_makes_the_step_void(
    caplog: pytest.LogCaptureFixture,
) -> None:
    table = Table("a", "b")
    table.settle()
    table.apply("a", 1)
    table.apply("b", 1)  # started again there, while a has its gradient
    table.ask(2)
    table.settle()
    assert isinstance(table.ask(2), Waiting)
    assert "hosts a and b have both accepted contributor 1" in caplog.text
    assert table.owner.step == 1
    assert table.owner.counters.voided == 1
    assert table.hosts["a"][1].taken == 0, "what was dropped does not count as taken"
    # In the next step b is let in when the contributor has come at a, and with it listed.
    assert table.hosts["b"][1].step == 0
    assert table.apply("a", 1)
    table.settle()
    assert table.hosts["b"][1].step == 1
    assert table.apply("b", 1)
    assert table.hosts["b"][1].content == []
    assert table.apply("b", 2)
    table.settle()
    opened = table.ask(2)
    assert isinstance(opened, Opened)
    assert opened.contributors.tolist() == [1, 2]


def test_a_contributor_that_does_not_come_is_not_waited_for() -> None:
    table = Table("a", "b")
    table.settle()
    table.apply("a", 1)
    table.apply("b", 1)
    table.ask(2)
    table.settle()
    for _ in range(8):
        table.pass_time(0.1, "a", "b")
        table.ask(2)
    table.settle()
    assert table.hosts["b"][1].step == 1
    assert table.apply("b", 1)
    assert len(table.hosts["b"][1].content) == 1


def test_a_lost_host_gives_way_to_the_contributor_elsewhere() -> None:
    """Its batch is at the shards, but its contributor has been accepted at a living host."""
    table = Table("a", "b")
    table.settle()
    table.apply("a", 1)
    table.apply("b", 2)
    table.opened(2)
    table.owner.leave("t", table.now, consume=False)  # the batches count all the same
    table.pass_time(TIMING.lease + 0.2, "b")
    table.settle("b")
    table.apply("b", 1)
    table.settle("b")
    table.ask(2, "u")
    table.settle("b")
    opened = table.ask(2, "u")
    assert isinstance(opened, Opened)
    assert [member.key.host for member in opened.members] == ["b"]
    assert table.owner.counters.voided == 0


def test_workers_that_were_refused_for_a_grant_that_came_to_nothing_go_on() -> None:
    """They wait for the next step, and what is missing would never come: the step is void."""
    table = with_a_gradient_each("a", "b")
    table.ask(2)
    table.settle("a")
    assert table.apply("a", 3) is False
    table.pass_time(TIMING.lease + 0.2, "a")  # b is lost in the middle of the grant
    table.settle("a")
    assert table.owner.step == 1
    assert table.hosts["a"][1].step == 1
    assert table.apply("a", 3)


def test_workers_whose_gradients_an_emptied_segment_had_go_on() -> None:
    """Emptied at the same step, of an owner before this one: they wait for the next step."""
    table = Table("a", step=3)
    table.settle()
    table.apply("a", 1)
    segment = table.hosts["a"][1]
    table.owner.advance_step(4, table.now)
    table.owner.set_global_step(3, "set", table.now)  # the host learns of both at once
    table.settle()
    assert (segment.step, segment.content) == (3, [])
    table.ask(1)
    table.settle()
    assert segment.step == 4


def test_what_comes_before_a_host_has_followed_advance_step_is_of_the_step_that_was_left() -> None:
    """It was accepted, and is in no round: as on one host an apply right before `advance_step`."""
    table = Table("a", "b")
    table.settle()
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


def test_what_comes_before_a_new_segment_is_at_the_step_is_of_the_step_that_it_was_made_with() -> (
    None
):
    """A host that joins: its segment begins at step 0, and follows with the first order."""
    table = Table("a", step=7)
    table.settle()
    table.add("late", Segment())
    assert table.apply("late", 2)
    assert table.hosts["late"][1].step == 0
    table.settle()
    assert (table.hosts["late"][1].step, table.hosts["late"][1].content) == (7, [])
    assert table.apply("late", 2)
    assert table.opened(1).contributors.tolist() == [2]


def test_what_a_forwarder_does_not_know_stops_a_round_only_for_a_time() -> None:
    """A gradient may have been refused for a reason that its predecessor took to the grave."""
    table = Table("a", "b")
    table.settle()
    table.apply("a", 1)
    segment = table.hosts["a"][1]
    segment.dropped = 1
    table.add("a", segment)
    table.settle()
    for _ in range(int(TIMING.expiry * 10) - 5):
        table.ask(2)
        table.pass_time(0.1, "a", "b")
    assert table.owner.step == 0
    for _ in range(10):
        table.ask(2)
        table.pass_time(0.1, "a", "b")
    assert table.owner.step == 1
    table.settle()
    for _ in range(int(TIMING.expiry * 10) + 10):
        table.ask(2)
        table.pass_time(0.1, "a", "b")
    assert table.owner.step == 1, "once: now it is known"


def test_many_hosts_report_more_rarely_and_are_waited_for_longer() -> None:
    """All of them together send no more heartbeats than the owner can take."""
    names = [f"host{number}" for number in range(60)]
    pace = len(names) / (TIMING.heartbeats * TIMING.heartbeat)
    assert pace == 3
    table = Table(*names)
    table.settle()
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


def test_one_report_says_that_a_segment_is_sealed_and_that_its_pieces_have_arrived() -> None:
    table = with_a_gradient_each("a")
    table.ask(1)
    table.hear()
    core, segment = table.hosts["a"]
    core.observe(segment.step, 1, 0)
    assert core.next_action() == act.Seal()
    assert core.report_due(table.now) > table.now
    began, table.now = table.now, table.now + 0.05
    core.sealed(segment.sealed(), began)
    assert core.report_due(table.now) == began + TIMING.grace / 4, "slow pieces: before grace"
    assert core.has_answer_to_come
    assert core.next_action() == act.Ship(1)
    core.shipped(1, frozenset({0}))
    assert core.report_due(table.now) == table.now
    table.hear()
    assert not core.has_answer_to_come
    assert isinstance(table.owner.answer("t"), Opened)


def test_a_host_that_ships_is_heard_from_before_it_is_lost_however_long_the_grace_is() -> None:
    timing = Timing(grace=30.0)
    core = ForwarderCore("a", 1, timing, 7)
    core.receive(Order(1, 1, 1, ready=True, hold=True, grant=1, fence=Fence(1, 0), adopt=True))
    core.observe(0, 1, 0)
    assert core.next_action() == act.Seal()
    core.report(5.0)
    core.sealed(Sealed(1, 1), 5.1)
    assert core.report_due(5.1) == 5.0 + timing.lease / 4


def test_a_host_that_ships_slowly_says_in_time_that_it_has_the_grant() -> None:
    table = with_a_gradient_each("a", "b")
    table.ask(1)
    table.settle("b")
    table.hear("a")
    core, segment = table.hosts["a"]
    core.observe(segment.step, 1, 0)
    core.sealed(segment.sealed(), table.now)
    while core.report_due(table.now) > table.now:
        table.now += TIMING.grace / 16
    table.hear("a")
    assert not core.has_answer_to_come
    table.pass_time(3 * TIMING.grace, "a", "b")
    assert isinstance(table.ask(1), Waiting), "what it ships is waited for"
    core.shipped(1, frozenset({0}))
    assert table.opened(1).count == 2


def test_hosts_hear_that_a_block_is_open_only_if_they_are_not_in_it() -> None:
    table = Table("a", "b")
    table.settle()
    table.apply("a", 1)
    table.settle()
    table.ask(1)
    table.settle("a")
    table.hear("b")
    serials = {host: core._order.serial for host, (core, _) in table.hosts.items() if core._order}
    table.pass_time(TIMING.grace + 0.1, "a")  # b does not answer, and is late
    assert isinstance(table.ask(1), Opened)
    assert not table.owner.has_news("a", serials["a"])
    assert table.owner.has_news("b", serials["b"])
    assert table.owner.has_news("a", serials["a"] - 1)
    table.owner.leave("t", table.now, consume=True)
    assert table.owner.has_news("a", serials["a"])


@pytest.mark.parametrize("hosts", [4, 60])
def test_many_hosts_are_told_between_rounds_how_much_is_worth_a_report(hosts: int) -> None:
    """Most orders are given when nobody waits; few hosts report each gradient soon."""
    names = [f"host{number}" for number in range(hosts)]
    table = Table(*names)
    table.settle()
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
    assert shard.latest(["a", "b"]) == ()
    for key in BatchKey("a", 1, 1), BatchKey("b", 2, 9), BatchKey("a", 1, 2):
        shard.stage(Fence(1, 0), key, "piece")
    assert shard.latest(["b", "a"]) == (BatchKey("b", 2, 9), BatchKey("a", 1, 2))
    assert shard.latest(["a", "c"]) == ()
    assert shard.latest([]) == ()
    shard.forget(Fence(1, 1))
    assert shard.latest(["a"]) == ()


def test_a_shard_keeps_nothing_of_rounds_that_are_over() -> None:
    shard: ShardCore[str] = ShardCore()
    key = BatchKey("a", 1, 1)
    assert shard.stage(Fence(1, 0), key, "old")
    assert shard.stage(Fence(1, 1), BatchKey("b", 1, 1), "new")
    assert len(shard) == 1
    assert not shard.stage(Fence(1, 0), key, "late")
    assert shard.missing(Fence(1, 1), (key, BatchKey("b", 1, 1))) == (key,)
    for seq in range(2, 9):
        shard.stage(Fence(1, 1), BatchKey("b", 1, seq), "again")
    assert len(shard) == 2


def test_late_and_doubled_reports_change_nothing() -> None:
    table = Table("a")
    table.settle()
    core, _ = table.hosts["a"]
    early = core.report(table.now)
    table.apply("a", 1)
    table.hear()
    table.owner.report(early, table.now)
    assert table.owner.accumulated == 1
    zombie = Report("a", 1, 10**6, Fence(1, 0), 0, 99)
    table.owner.report(zombie, table.now)
    assert table.owner.accumulated == 1


# Real segments

SPECS = {
    "rows": shmacc.IndexedSlicesSpec((None, 4), "float32"),
    "sums": shmacc.IndexedSlicesSpec((50,), "int32", reduction_type="SUM"),
    "large": shmacc.TensorSpec((200, 100), "float16", reduction_type="CMEAN"),
    "scalar": shmacc.TensorSpec((), "float64"),
    "narrow": shmacc.IndexedSlicesSpec((9,), "float64", reduction_type="CMEAN"),
    "never": shmacc.TensorSpec((3,), "float32"),
}


@pytest.mark.parametrize("shards", [1, 3])
def test_the_reduction_over_hosts_and_shards_is_that_of_one_group(  # noqa: C901, PLR0912
    shards: int, request: pytest.FixtureRequest
) -> None:
    """To the bit, for gradients whose sums are exact; every member, count, weight, contributor."""
    random = np.random.default_rng(shards)
    flat = shmacc.AccumulatorGroup(SPECS)
    hosts = [HostGroup(SPECS, lanes=lanes) for lanes in (1, 2, 3)]
    plan = Plan(flat.members, shards)
    at_shards = [HostGroup(plan.at_shard(shard)) for shard in range(shards)]
    for group in flat, *hosts, *at_shards:
        request.addfinalizer(group.close)
    for step in range(2):
        for i in range(7):
            gradient: dict[str, object] = {}
            if i % 2:
                values = random.integers(-9, 9, (30, 4)).astype(np.float32)
                gradient["rows"] = random.integers(0, 1000, 30), values
            if i % 3:
                gradient["sums"] = random.integers(0, 50, 3), random.integers(-9, 9, 3)
            if i != 2:
                gradient["large"] = random.integers(-9, 9, (200, 100)).astype(np.float16)
            gradient["narrow"] = [i], [float(i + 1)]  # not every host has rows at every shard
            if i == 4:
                gradient["scalar"] = 3.0
                gradient["rows"] = np.empty(0, np.int64), np.empty((0, 4), np.float32)
            for group in flat, hosts[i % 3]:
                assert group.apply(gradient, step, contributor=i, weight=i % 2 + 1)
        segments = [LocalSegment(host, shards) for host in hosts]
        staged: list[dict[BatchKey, shmacc.GroupPartial]] = [{} for _ in range(shards)]
        members = []
        for number, segment in enumerate(segments):
            partial = segment.seal()
            pieces = dict(plan.split(partial, first=number))
            key = BatchKey(f"host{number}", 1, 1)
            members.append(Member(key, Batch(1, describe(partial), frozenset(pieces))))
            for shard, piece in pieces.items():
                staged[shard][key] = piece
        opened = Opened(Fence(1, step), step, tuple(members))
        parts = [
            group.reduce(staged[n].values(), Share.of(opened, n))
            for n, group in enumerate(at_shards)
        ]
        got, expected = join(plan, parts, opened), flat.take(1)
        assert set(got) == set(expected) == set(SPECS) - {"never"}
        assert (got.count, got.weight, got.step) == (7, expected.weight, step)
        assert got.contributors.tolist() == expected.contributors.tolist()
        for name, part in expected.items():
            for field in type(part).__slots__:
                ours, theirs = getattr(got[name], field), getattr(part, field)
                assert np.array_equal(ours, theirs), (name, field)
                assert np.asarray(ours).dtype == np.asarray(theirs).dtype, (name, field)
        for segment in segments:
            segment.consume()
            assert segment.group.global_step == step + 1


def test_what_is_shipped_is_hardly_more_than_the_sums() -> None:
    specs = {
        "rows": shmacc.IndexedSlicesSpec((10**6, 16), "float32"),
        "whole": shmacc.TensorSpec((100_000,), "float32"),
    }
    rows = np.random.default_rng(0).choice(10**6, 20_000, replace=False)
    with HostGroup(specs) as group:
        gradient = {"rows": (rows, np.ones((20_000, 16), np.float32)), "whole": np.ones(100_000)}
        assert group.apply(gradient, 0)
        partial = LocalSegment(group, 8).seal()
        pieces = dict(Plan(group.members, 8).split(partial))
    shipped = sum(len(pickle.dumps(piece)) for piece in pieces.values())
    assert set(pieces) == set(range(8))
    assert shipped <= 1.05 * len(pickle.dumps(partial))


def test_a_mean_over_all_gradients_counts_those_without_rows_at_a_shard() -> None:
    members = {"m": shmacc.IndexedSlicesSpec((None,), "float64", reduction_type="CMEAN")}
    plan = Plan(members, 2)
    rows = [
        0,
        next(row for row in range(1, 99) if set(plan_of(plan, row)) != set(plan_of(plan, 0))),
    ]
    opened = Opened(
        Fence(1, 0),
        0,
        tuple(
            Member(
                BatchKey(str(row), 1, 1),
                Batch(1, Sealed(1, 1, members={"m": (1, 1)}), frozenset(plan_of(plan, row))),
            )
            for row in rows
        ),
    )
    parts = []
    for shard in range(2):
        with HostGroup(plan.at_shard(shard)) as group:
            pieces = {
                BatchKey(str(row), 1, 1): plan_of(plan, row)[shard]
                for row in rows
                if shard in plan_of(plan, row)
            }
            assert len(pieces) == 1
            parts.append(group.reduce(pieces.values(), Share.of(opened, shard)))
    assert join(plan, parts, opened)["m"].values.tolist() == [3.0, 3.0]


def piece_of(rows: object, values: object, counts: object, count: int = 2) -> shmacc.GroupPartial:
    """A piece as a shard may get it, of a member "m" with rows of one number."""
    sums = shmacc.SparsePartial(
        np.array(rows, np.int64),
        np.array(values, np.int64),
        np.array([9], np.int64),
        np.array(counts, np.int64),
        count,
        0,
        count,
    )
    return shmacc.GroupPartial({"m": sums}, count, 0, count)


def share_of(pieces: int) -> Share:
    """What a shard has of a round of so many hosts, of two gradients each."""
    keys = tuple(BatchKey(str(host), 1, 1) for host in range(pieces))
    return Share(Fence(1, 0), keys, 2 * pieces, 2 * pieces, 0)


def test_pieces_that_a_shard_cannot_reduce_are_errors_that_say_why() -> None:
    members = {"m": shmacc.IndexedSlicesSpec((9,), "int32", reduction_type="SUM")}
    good = piece_of([1, 5], [10, 20], [1, 2])
    wrong: list[tuple[shmacc.GroupPartial, type[Exception], str]] = [
        (shmacc.GroupPartial({"x": good["m"]}, 2, 0, 2), InvalidArgumentError, "'x'"),
        (piece_of([5, 1], [1, 1], [1, 1]), InvalidArgumentError, "must ascend"),
        (piece_of([1, 1], [1, 1], [1, 1]), InvalidArgumentError, "'m'"),
        (piece_of([1, 9], [1, 1], [1, 1]), InvalidArgumentError, "9"),
        (piece_of([1, 5], [1, 1], [1, 0]), InvalidArgumentError, "'m'"),
        (piece_of([1, 5], [[1], [1]], [1, 1]), InvalidArgumentError, "[Ss]hape"),
        (piece_of([1], [1], [1], 3), InvalidArgumentError, "more gradients than the round has"),
        (piece_of([1], [2**31 - 10], [1]), OutOfRangeError, "does not fit"),
        (piece_of([1], [2**63 - 9], [1]), OutOfRangeError, "does not fit"),
        (piece_of([1], [1], [1], 2**62), InvalidArgumentError, "count"),
    ]
    with HostGroup(members) as group:
        for piece, kind, said in wrong:
            for pieces in ([good, piece], [piece, good]):
                with pytest.raises(kind, match=said):
                    group.reduce(pieces, share_of(2))
        taken = group.reduce([good, piece_of([5, 8], [1, -1], [1, 1]), good], share_of(3))
        assert taken["m"].indices.tolist() == [1, 5, 8]
        assert taken["m"].values.tolist() == [20, 41, -1]
        assert taken["m"].row_counts.tolist() == [2, 5, 1]
        assert (taken.count, group.num_accumulated(), group.global_step) == (6, 0, 0)


def plan_of(plan: Plan, row: int) -> dict[int, shmacc.GroupPartial]:
    """The pieces of a gradient that has 6.0 in one row."""
    with HostGroup(plan.members) as group:
        assert group.apply({"m": ([row], [6.0])}, 0)
        return dict(plan.split(LocalSegment(group, plan.shards).seal()))


def join(plan: Plan, parts: list[shmacc.GroupTaken], opened: Opened) -> shmacc.GroupTaken:
    """Put a round together, the last shard's values first."""
    rows = {shard: rows_of(part) for shard, part in enumerate(parts)}
    joining = Joining(plan, opened, rows)
    for shard in reversed(range(len(parts))):
        joining.add(shard, values_of(parts[shard]))
    return joining.taken()


def test_a_sealed_segment_keeps_its_gradients_until_the_step_moves() -> None:
    with HostGroup({"m": shmacc.TensorSpec((), "float64")}) as group:
        segment = LocalSegment(group)
        assert segment.seal().count == 0
        assert not group.apply({"m": 1.0}, 0), "sealed, though it is empty"
        segment.release()
        assert group.apply({"m": 1.0}, 0, contributor=1)
        first, again = segment.seal(), segment.seal()
        assert first["m"].value == again["m"].value == 1.0
        assert describe(first) == describe(again) == Sealed(1, 1, frozenset({1}), {"m": (1, 1)})
        assert segment.dropped() == 1
        segment.reset(5, frozenset({3}))
        assert (group.global_step, segment.pending(frozenset({3}))) == (5, 0)
        assert group.apply({"m": 1.0}, 5, contributor=3), "as one that is in already"
        assert segment.pending(frozenset({3})) == 0
        assert segment.present(frozenset({3, 4})) == {3}
        assert group.apply({"m": 7.0}, 5, contributor=4)
        sealed = segment.seal(frozenset({3}))
        assert sealed["m"].value == 7.0
        assert describe(sealed) == Sealed(1, 1, frozenset({4}), {"m": (1, 1)})
        segment.set_step(2)
        assert group.apply({"m": 1.0}, 2)
        assert segment.pending(frozenset({3})) == 2


def test_a_new_forwarder_ends_the_seal_of_one_that_is_stopped() -> None:
    with (
        HostGroup({"m": shmacc.TensorSpec((), "float64")}, "shared") as group,
        HostGroup.attach("shared") as other,
    ):
        assert group.apply({"m": 1.0}, 0)
        stopped, new = LocalSegment(other), LocalSegment(group)
        stopped.seal()
        assert new.seal().count == 1
        stopped.release()  # it wakes up: its round is no more
        assert not group.apply({"m": 1.0}, 0)
        group.unlink()


def test_threads_of_one_process_neither_lose_nor_double_a_gradient() -> None:
    """Two threads apply while a third seals, releases and consumes."""
    with HostGroup({"m": shmacc.TensorSpec((), "int64")}) as group:
        accepted = [0, 0]

        def work(number: int) -> None:
            for _ in range(400):
                accepted[number] += group.apply({"m": 1}, shmacc.NEVER_STALE)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        segment, taken = LocalSegment(group), 0
        while any(thread.is_alive() for thread in threads) or group.num_accumulated():
            partial = segment.seal()
            if partial.count % 2:
                segment.release()
            else:
                taken += partial.count
                assert partial.count == (partial["m"].value if partial.count else 0)
                segment.consume()
            if not any(thread.is_alive() for thread in threads) and group.num_accumulated() % 2:
                assert group.apply({"m": 1}, shmacc.NEVER_STALE)
                accepted[0] += 1
        assert taken == sum(accepted) == group.stats().applied


def test_a_group_over_hosts_needs_declared_shapes() -> None:
    members = {"m": shmacc.TensorSpec((None, 3), "float32")}
    with pytest.raises(InvalidArgumentError, match=r"'m'.*needs a shape"):
        Plan(members, 2)
