"""The simulation runs the library's own protocol, and its figures agree with hand calculations."""

import dataclasses
import logging
from typing import Any

import pytest

from shmacc._multihost.forwarder import ForwarderCore
from shmacc._multihost.messages import BatchKey, Fence, HostBatch, Opened
from shmacc._multihost.owner import OwnerCore
from shmacc._multihost.shard import ShardCore
from shmacc_simulate.job import Job
from shmacc_simulate.ledger import BrokenPromiseError, Gradient, Ledger, Segment
from shmacc_simulate.popularity import Table
from shmacc_simulate.scenario import Scenario
from shmacc_simulate.world import Clock, Network, Processor, Steps

SMALL = Scenario("small", 4, 4, 4, Table(1_000_000, 1.0, 1_000), rounds=12, compute=0.1)
DYING = dataclasses.replace(SMALL, name="dying", need=0.5, deaths=0.3, away=3.0)


def test_the_simulation_uses_the_librarys_protocol() -> None:
    job = Job(SMALL)
    job.run()
    assert type(job.owner.core) is OwnerCore
    assert {type(host.core) for host in job.hosts} == {ForwarderCore}
    shards = [shard for of_host in job.world.shards.values() for shard in of_host.values()]
    assert {type(shard.core) for shard in shards} == {ShardCore}
    assert job.owner.core.counters.gradients == sum(entry.count for entry in job.chief.rounds)


@pytest.mark.parametrize("scenario", [SMALL, DYING], ids=lambda scenario: scenario.name)
def test_a_job_repeats_by_its_seed_and_survives_deaths(
    scenario: Scenario, caplog: pytest.LogCaptureFixture
) -> None:
    """Only deaths lose gradients."""
    caplog.set_level(logging.ERROR, "shmacc")
    one = Job(scenario).run()
    assert one == Job(scenario).run()
    assert one.rounds != Job(dataclasses.replace(scenario, seed=2)).run().rounds
    assert len(one.rounds) == scenario.rounds
    assert all(entry.count >= scenario.required for entry in one.rounds)
    if scenario is SMALL:
        assert (one.lost, one.regrants, one.voided, one.lost_hosts) == (0, 0, 0, 0)
    else:
        assert min(one.died, one.lost_hosts) > 0


def test_hosts_without_gradients_ship_nothing_and_nobody_waits_for_it() -> None:
    # One gradient of three is enough; the other hosts are often held before they have one.
    scenario = dataclasses.replace(SMALL, hosts=3, workers=1, shards=3, need=1 / 3, limit=10.0)
    result = Job(scenario).run()
    assert min(entry.count for entry in result.rounds) == scenario.required == 1
    assert (len(result.rounds), result.lost, result.regrants) == (scenario.rounds, 0, 0)


def test_bytes_of_dense_rounds_are_those_computed_by_hand() -> None:
    # Of 1,000 x 64 float32 each host sends the other one half, and gets the other half.
    dense = Scenario("dense", 2, 1, 2, Table(1_000, None), need=1.0, rounds=3)
    assert Job(dense).run().gigabytes * 1e9 == pytest.approx(2 * 1_000 * 64 * 4 / 2)
    # The chief, on the first host, gets the whole mean, too: half of it from the other host.
    whole = dataclasses.replace(dense, whole=True)
    assert Job(whole).run().gigabytes * 1e9 == pytest.approx(3 * 1_000 * 64 * 4 / 2)


def test_bytes_of_sparse_rounds_are_those_computed_by_hand() -> None:
    # One gradient at each of three hosts, 500 rows of 64 float32, an index and a count; one shard.
    sparse = Scenario("sparse", 3, 1, 1, Table(10_000, 0.0, 500), need=1.0, rounds=3)
    assert Job(sparse).run().gigabytes * 1e9 == pytest.approx(2 * 500 * (64 * 4 + 16))


def test_messages_are_those_computed_by_hand() -> None:
    # 100 MB at 1 GB/s, with a latency of 1 ms; two transfers to one host are not parallel.
    clock = Clock()
    network = Network(clock, 3, 1e9, 1e-3)
    arrived: list[float] = []

    def carry(sender: int, receiver: int) -> Steps[None]:
        yield from network.large(sender, receiver, 1e8, 0.0)
        arrived.append(clock.now)

    for sender in (1, 2):
        clock.start(carry(sender, 0))
    clock.start(carry(0, 1))  # the other way: not delayed
    clock.start(carry(0, 0))  # to itself: no message
    clock.run(10, lambda: False)
    assert arrived == pytest.approx([0.0, 0.101, 0.101, 0.201])
    assert (network.messages, network.large_bytes) == (3, 3e8)
    processor = Processor(Clock())  # does one thing at a time
    assert [processor.done(0.5), processor.done(0.5)] == [0.5, 1.0]


def test_sizes_of_unions_agree_with_random_draws() -> None:
    uniform = Table(1_000_000, 0.0, 50_000)
    assert uniform.union(1) == pytest.approx(50_000)
    assert uniform.union(4) == pytest.approx(1_000_000 * (1 - 0.95**4))
    zipf = Table(1_000_000, 1.0, 50_000)
    assert zipf.union(1) == pytest.approx(50_000)
    assert 50_000 < zipf.union(32) < uniform.union(32)
    assert Table(7, None).union(32) == 7


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


def test_a_job_that_is_given_up_has_no_figures_of_half_a_round() -> None:
    result = Job(dataclasses.replace(SMALL, limit=1.0)).run()
    assert (result.rounds, result.seconds, result.gradients) == ([], float("inf"), 0)
