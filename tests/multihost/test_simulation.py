"""The simulation runs the library's own protocol, and its figures agree with hand calculations."""

import dataclasses
import itertools
import zlib
from typing import Any

import pytest

from shmacc._multihost.forwarder import ForwarderCore
from shmacc._multihost.messages import BatchKey, Fence, HostBatch, Opened, Timing
from shmacc._multihost.owner import OwnerCore
from shmacc_hosts.costs import ROW_BYTES, SUM_BYTES, Costs, Network, Processor, Scenario, Work
from shmacc_hosts.in_time import InTime
from shmacc_hosts.memory import BrokenPromiseError, Gradient, Ledger, Segment
from shmacc_hosts.world import World

SMALL = Scenario(4, workers=4, touched=1_000, rounds=6, compute=0.1)
FREE = Costs(1e9, 0.0, 0.0, 0.0, 1e15, 1e15, 1e15)  # only network (1 GB/s) and updates take time


def test_the_simulation_uses_the_librarys_protocol() -> None:
    job = InTime(SMALL)
    job.finish()
    world, [owner] = job.world, job.world.owners
    assert isinstance(owner, OwnerCore)
    assert {type(machine.core) for machine in world.machines} == {ForwarderCore}
    assert owner.counters.rounds >= len(job.rounds) > SMALL.rounds
    assert owner.counters.gradients == owner.counters.rounds * 16
    faults = owner.counters.withdrawn, owner.counters.voided, owner.counters.lost_hosts
    assert faults == (0, 0, 0)


def test_all_hosts_make_the_same_updates() -> None:
    job = InTime(SMALL)
    job.finish()
    made = 1 + job.world.rounds  # with a restore; the next one may be under way
    paths = [machine.memory.path for machine in job.world.machines]
    assert {len(path) for path in paths} <= {made, made + 1}
    [line] = {path[:made] for path in paths}
    assert len(set(line)) == made


def test_a_host_with_another_result_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The owner orders the host to get another copy, and the simulation raises."""
    digests = itertools.count(1)
    monkeypatch.setattr(zlib, "crc32", lambda _: next(digests))
    with pytest.raises(RuntimeError, match="ordered at a host"):
        InTime(SMALL).finish()


def test_a_job_with_the_same_seed_gives_the_same_figures() -> None:
    one = InTime(SMALL).finish()
    assert one == InTime(SMALL).finish()
    assert one != InTime(dataclasses.replace(SMALL, seed=2)).finish()


@pytest.mark.parametrize(
    ("hosts", "best", "least", "most"), [(2, False, 1, 1), (8, False, 3, 5), (8, True, 3, 3)]
)
def test_updates_take_as_long_as_computed_by_hand(
    hosts: int, least: int, most: int, *, best: bool
) -> None:
    # At best each node that has the update sends it on: so in each turn twice as many nodes have
    # it. They check it between turns. With random senders, some send to two nodes at a time.
    scenario = Scenario(hosts, 1, 20_000, rounds=2, shared=best, costs=FREE)
    cost, rows = InTime(scenario).finish(), scenario.update
    update = cost.update
    assert cost.most <= 3 * rows * ROW_BYTES, "not all nodes get it from the chief's at once"
    assert update.put == pytest.approx(rows * ROW_BYTES / FREE.put)
    turns = (update.pull + update.check) / (rows * ROW_BYTES / 1e9 + update.check)
    assert least - 1e-3 < turns < most + 1e-3
    assert update.check == pytest.approx(rows * FREE.check)
    assert update.make == pytest.approx(rows * FREE.make)
    assert 0 <= update.messages < 1e-4


@pytest.mark.parametrize(("updates", "copies"), [(False, 0), (True, 2)])
def test_the_chiefs_node_sends_what_is_computed_by_hand(copies: int, *, updates: bool) -> None:
    # The chief's node sends two thirds of its sums, and the update, to the two other hosts.
    scenario = Scenario(3, 2, 500, 10_000, rounds=2, updates=updates, costs=FREE)
    sums, update = (10_000 * (1 - 0.95**of) * size for of, size in ((2, SUM_BYTES), (6, ROW_BYTES)))
    assert InTime(scenario).finish().out == pytest.approx(2 / 3 * sums + copies * update)


@pytest.mark.parametrize("workers", [1, 4])
def test_a_small_round_with_its_update_takes_ten_messages_on_two_nodes(workers: int) -> None:
    # Each node reports its count, its batch, that it has got the update, and that it has made it.
    # The chief's node skips the third report. The chief asks, updates, and leaves.
    small = Scenario(2, workers, touched=50, rounds=6, compute=0.05, spread=0.0)
    assert InTime(small).finish().calls == 4 + 3 + 3
    assert InTime(dataclasses.replace(small, updates=False)).finish().calls == 2 * 2 + 2


def test_large_messages_take_as_long_as_computed_by_hand() -> None:
    # 100 MB at 1 GB/s, with a latency of 1 ms; two transfers to one host are not parallel.
    job = InTime(Scenario(3))
    network = Network(job.world, 3, 1e9, 1e-3)
    arrived: list[float] = []

    def carry(sender: int, receiver: int) -> Work:
        yield from network.large(sender, receiver, 1e8, 0.0)
        arrived.append(job.world.now)

    for sender in (1, 2):
        job.start(carry(sender, 0))
    job.start(carry(0, 1))  # the other way: not delayed
    job.start(carry(0, 0))  # to itself: no message
    job.run(10, lambda: len(arrived) == 4)
    assert arrived == pytest.approx([0.0, 0.101, 0.101, 0.201])
    assert network.sent == [1e8, 1e8, 1e8]
    processor = Processor(World())  # does one thing at a time
    assert [processor.done(0.5), processor.done(0.5)] == [0.5, 1.0]


@pytest.mark.parametrize(
    ("fault", "gradients", "wrong"),
    [
        ("too few gradients", [(1, 5, 1)], {}),
        ("a stale gradient", [(1, 5, 1), (2, 4, 2)], {}),
        ("a gradient twice", [(1, 5, 1), (1, 5, 1)], {}),
        ("a gradient of an earlier round", [(7, 5, 1), (8, 5, 2)], {}),
        ("a contributor twice", [(1, 5, 1), (2, 5, 1)], {}),
        ("wrong counts", [(1, 5, 1), (2, 5, 2)], {"count": 3}),
        ("wrong counts", [(1, 5, 1), (2, 5, 2)], {"members": {"m": (2, 3)}}),
        ("wrong contributors", [(1, 5, 1), (2, 5, 2)], {"contributors": frozenset({1})}),
    ],
)
def test_a_round_that_breaks_a_promise_is_found(
    fault: str, gradients: list[tuple[int, int, int]], wrong: dict[str, Any]
) -> None:
    ledger, key = Ledger(required=2), BatchKey("host", 1, 1)
    ledger.consumed[7] = 4
    ledger.shipped[key] = [Gradient(*each) for each in gradients]
    batch = Segment(5, list(ledger.shipped[key])).hold()
    opened = Opened(Fence(1, 0), 5, (HostBatch(key, dataclasses.replace(batch, **wrong)),))
    with pytest.raises(BrokenPromiseError, match=fault):
        ledger.consume(opened, 5)


def test_a_simulation_beyond_its_time_limit_raises() -> None:
    with pytest.raises(RuntimeError, match="rounds have ended"):
        InTime(dataclasses.replace(SMALL, longest=0.5)).finish()


def test_a_lost_host_of_300_is_noticed_after_six_seconds() -> None:
    timing = Timing()  # as docs/many-hosts.md says
    assert [timing.patience(timing.pace(hosts)) for hosts in (50, 300)] == [timing.lease, 6.0]
