"""A group over the nodes of a Ray cluster acts as one group, for workers and for chiefs."""

import contextlib
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from on_ray.journals import MEMBERS, Journals
from on_ray.nodes import Nodes, kill, pid_of, wait_for

import shmacc
import shmacc.ray
from shmacc.errors import (
    AlreadyExistsError,
    DeadlineExceededError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
)
from shmacc.ray import _making
from shmacc.ray._head import living_nodes

# Deaths are noticed early, and the owner soon gives up a killed chief's round.
QUICK = shmacc.ray.Timing(lease=3.0, grace=1.0, chief_lease=4.0)
RANKS = 6


@pytest.fixture(scope="module")
def one_group(nodes: Nodes) -> Iterator[shmacc.ray.AccumulatorGroup]:  # noqa: ARG001
    made = shmacc.ray.AccumulatorGroup(MEMBERS, "model", shards=2, timing=QUICK)
    yield made
    made.unlink()


@pytest.fixture
def group(one_group: shmacc.ray.AccumulatorGroup) -> shmacc.ray.AccumulatorGroup:
    """Return the group without gradients of earlier tests, even if its owner has no step."""
    try:
        step = one_group.global_step
    except FailedPreconditionError:
        step = 10**6
    one_group.advance_step(step + 1)
    return one_group


@pytest.fixture
def journals(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup, tmp_path: Path
) -> Iterator[Journals]:
    made = Journals(nodes, group.shared_name, tmp_path, group.global_step)
    for rank in range(RANKS):
        made.start(rank, rank % 3)
    yield made
    made.end()


def rounds(
    group: shmacc.ray.AccumulatorGroup, journals: Journals, number: int, required: int = RANKS
) -> None:
    for _ in range(number):
        with group.round(required, timeout=60) as taken:
            journals.enter(taken, required)


def test_rounds_have_each_gradient_once_and_whole(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup, journals: Journals
) -> None:
    step, before = group.global_step, group.counters()
    rounds(group, journals, 5)
    assert group.global_step == step + 5
    assert journals.lost() == []
    assert group.counters()["rounds"] == before["rounds"] + 5
    assert group.counters()["gradients"] == before["gradients"] + 5 * RANKS
    hosts = group.hosts()
    assert all(hosts[nodes.id(number)].alive for number in range(3))


def test_the_reduction_equals_one_group(nodes: Nodes) -> None:
    """One host gets all gradients: more bytes than Ray sends within one message."""
    members = {
        "table": shmacc.IndexedSlicesSpec((10**6, 8), "float32"),
        "half": shmacc.TensorSpec((300, 100), "float16", reduction_type="CMEAN"),
        "sum": shmacc.TensorSpec((), "int64", reduction_type="SUM"),
    }
    random = np.random.default_rng(0)
    with (
        shmacc.ray.AccumulatorGroup(
            members, "flat", hosts=[nodes.id(0)], shards=3, unlink_on_close=True
        ) as group,
        shmacc.AccumulatorGroup(members) as flat,
    ):
        local = shmacc.AccumulatorGroup.attach("flat", timeout=60)
        for contributor in range(4):
            values = random.integers(-9, 9, (20_000, 8)).astype(np.float32)
            gradient = {
                "table": (random.integers(0, 10**6, 20_000), values),
                "half": random.integers(-9, 9, (300, 100)).astype(np.float16),
                "sum": contributor,
            }
            for each in local, flat:
                assert each.apply(gradient, 0, contributor=contributor, weight=contributor + 1)
        taken, expected = group.take(4, timeout=60), flat.take(4)
        for name, part in expected.items():
            for field in type(part).__slots__:
                ours, theirs = getattr(taken[name], field), getattr(part, field)
                assert np.array_equal(ours, theirs), (name, field)
                assert np.asarray(ours).dtype == np.asarray(theirs).dtype
            assert getattr(taken[name], "values", taken["half"].value).flags.writeable
        assert local.wait_step(0, timeout=60) == 1
        assert local.stats().taken == 4
        local.close()


def test_errors_are_as_on_one_host(
    group: shmacc.ray.AccumulatorGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DeadlineExceededError, match="0 of the 3 required") as caught:
        group.take(3, timeout=0.2)
    assert (caught.value.accumulated, caught.value.required, caught.value.step) == (
        0,
        3,
        group.global_step,
    )
    with pytest.raises(InvalidArgumentError, match="must be positive"):
        group.take(0)
    with pytest.raises(NotFoundError):
        shmacc.ray.AccumulatorGroup.attach("no-such-group")
    for looks in True, False:  # False: another chief makes it after the look
        with monkeypatch.context() as patch:
            if not looks:
                patch.setattr(_making, "find_config", lambda *_: None)
            with pytest.raises(AlreadyExistsError, match="has a group 'model' already"):
                shmacc.ray.AccumulatorGroup(MEMBERS, "model", if_exists="error")
    with pytest.raises(InvalidArgumentError, match="'rest'"):
        shmacc.ray.AccumulatorGroup({"rows": MEMBERS["rows"]}, "model")
    for option in ({"lanes": 7}, {"capacity": 7}):
        with pytest.raises(InvalidArgumentError, match=f"{next(iter(option))} .*, but 7 was asked"):
            shmacc.ray.AccumulatorGroup(MEMBERS, "model", **option)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="needs a shape"):
        shmacc.ray.AccumulatorGroup({"m": shmacc.TensorSpec(None)}, "other")


def test_after_a_block_that_raises_the_next_has_the_same_gradients(
    group: shmacc.ray.AccumulatorGroup, journals: Journals
) -> None:
    contents = []
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), group.round(RANKS, timeout=60) as taken:
            contents.append(taken["rows"].indices.tolist())
            _ = 1 / 0
    assert contents[0] == contents[1]
    rounds(group, journals, 2)
    assert journals.lost() == []


def test_workers_and_host_actors_are_killed_and_no_gradient_is_lost(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup, journals: Journals
) -> None:
    rounds(group, journals, 2)
    for number in range(3):
        journals.kill(number)
        journals.start(number, number)  # on the same host, so its contributor counts once
        rounds(group, journals, 2)
    assert journals.lost() == []
    for number in range(3):
        kill(f"model/host {nodes.id(number)}")
        rounds(group, journals, 2)
    # If a forwarder dies right after its batch was added to a round, later gradients are lost.
    assert len(journals.lost()) <= RANKS


def test_a_host_actor_that_dies_while_a_round_is_made_costs_no_step(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup, journals: Journals
) -> None:
    """The gradients of its segment count as soon as the next actor has reported them."""
    rounds(group, journals, 2)
    before = group.counters()
    for number in range(6):
        part = f"model/host {nodes.id(number % 3)}"
        death = threading.Timer(0.005 * number, kill, (part,))
        death.start()
        rounds(group, journals, 1)
        death.join()
        rounds(group, journals, 1)
    counted = {name: number - before[name] for name, number in group.counters().items()}
    assert counted["voided"] <= counted["lost_hosts"]  # on a busy machine an actor may start late
    assert len(journals.lost()) <= RANKS


@pytest.mark.parametrize("is_there", [True, False], ids=["and is there", "and is not there yet"])
def test_unlink_removes_the_names_of_a_node_whose_actor_is_started_again(
    nodes: Nodes, *, is_there: bool
) -> None:
    """This process still knows the dead actor: `unlink` must look for its successor."""
    group = shmacc.ray.AccumulatorGroup(MEMBERS, "remade")
    assert len(group.stats()) >= 3
    part = f"remade/host {nodes.id(1)}"
    before = pid_of(part)
    kill(part)
    if is_there:
        wait_for(lambda: pid_of(part) not in {None, before})
    group.unlink()
    assert not [name for name in nodes.left() if "remade" in name]


def test_a_segment_whose_name_is_removed_is_made_again(nodes: Nodes) -> None:
    members = {"m": shmacc.TensorSpec((), "float64")}
    with (
        shmacc.ray.AccumulatorGroup(members, "nameless", unlink_on_close=True) as group,
        nodes.on(1),
        shmacc.SharedArrays.attach("nameless.forwarder") as counters,
    ):
        with shmacc.AccumulatorGroup.attach("nameless", timeout=60) as worker:
            worker.unlink()
            wait_for(lambda: "name of its segment" in (group.hosts()[nodes.id(1)].problem or ""))
            assert worker.apply({"m": 1.0}, shmacc.NEVER_STALE), "who has it goes on"
            assert group.take(1, timeout=60).count == 1
            assert worker.wait_step(0, timeout=60) == 1
        wait_for(lambda: counters["starts"] == 2 and group.hosts()[nodes.id(1)].alive)
        with shmacc.AccumulatorGroup.attach("nameless", timeout=60) as worker:
            assert worker.wait_step(0, timeout=60) == 1, "its first order drops what came before"
            assert worker.apply({"m": 1.0}, shmacc.NEVER_STALE)
            assert group.take(1, timeout=60).count == 1


@pytest.mark.parametrize("with_parameters", [False, True])
def test_a_contributor_on_two_hosts_ends_the_round_with_an_error_that_names_both(
    nodes: Nodes, *, with_parameters: bool
) -> None:
    with contextlib.ExitStack() as stack:
        members: Any = {"m": shmacc.TensorSpec((2,), "float64")}
        if with_parameters:
            sgd = shmacc.optim.SGD(1.0)
            params = shmacc.ray.Parameters(
                {"m": np.zeros(2)}, "both.p", optimizer=sgd, unlink_on_close=True
            )
            members = stack.enter_context(params).member_specs()
        made = shmacc.ray.AccumulatorGroup(members, "both", unlink_on_close=True)
        group = stack.enter_context(made)

        def work(worker: shmacc.AccumulatorGroup) -> None:
            for step in worker.steps(timeout=60):
                worker.apply({"m": np.ones(2)}, step, contributor=7)

        workers = []
        for node in 1, 2:
            with nodes.on(node):
                worker = stack.enter_context(shmacc.AccumulatorGroup.attach("both", timeout=60))
            workers.append(threading.Thread(target=work, args=[worker]))
            workers[-1].start()
        try:
            with pytest.raises(AlreadyExistsError, match="Contributor 7 was accepted on") as caught:
                group.take(2, timeout=60)
        finally:
            group.finish()
            for thread in workers:
                thread.join()
        assert all(re.search(nodes.shown(node), str(caught.value)) for node in (1, 2))


def test_a_dead_node_delays_rounds_by_its_lease_and_not_until_ray_sees_it(nodes: Nodes) -> None:
    """The dead node has a shard, which moves to another node."""
    wait_for(lambda: len(living_nodes(None)) == 3, 120)  # without dead nodes of other tests
    late = nodes.add()
    rows = {"m": shmacc.IndexedSlicesSpec((1000,), "float32")}
    with (
        shmacc.ray.AccumulatorGroup(rows, "bereft", unlink_on_close=True) as group,
        shmacc.AccumulatorGroup.attach("bereft", timeout=60) as local,
    ):
        gradient = {"m": (np.arange(1000), np.ones(1000, np.float32))}  # at every shard
        assert local.apply(gradient, 0)
        group.take(1, timeout=60)
        assert local.apply(gradient, local.wait_step(0, timeout=60))
        nodes.remove(late)
        assert group.take(1, timeout=120)["m"].values.tolist() == [1.0] * 1000
        assert nodes.id(late) in living_nodes(None), "Ray has not seen it yet"
    # So a new group waits for that node's segment until Ray sees that the node is dead.
    members = {"m": shmacc.TensorSpec((), "float32")}
    with shmacc.ray.AccumulatorGroup(members, "beside", unlink_on_close=True) as group:
        alive = {host for host, state in group.hosts().items() if state.alive}
        assert {nodes.id(number) for number in range(3)} <= alive
        assert nodes.id(late) not in alive


def test_an_owner_that_died_refuses_rounds_until_the_step_is_set(
    group: shmacc.ray.AccumulatorGroup, journals: Journals, caplog: pytest.LogCaptureFixture
) -> None:
    """All calls that need the step raise, even a wait that has begun; other calls go on."""
    step = group.global_step
    rounds(group, journals, 2)
    calls: list[Callable[[], object]] = [
        lambda: group.wait_step(step + 2, timeout=60),  # the owner dies during this wait
        lambda: group.wait_step(0),
        lambda: group.global_step,
        lambda: next(group.steps(timeout=60)),
        group.snapshot,
        lambda: group.take(RANKS, timeout=60),
    ]
    death = threading.Timer(0.5, kill, ("model/owner",))
    death.start()
    said = set()
    for call in calls:
        with pytest.raises(FailedPreconditionError, match="does not know the step") as caught:
            call()
        said.add(str(caught.value))
    assert len(said) == 1
    death.join()
    assert group.num_accumulated() == 0, "which step they are of is not known"
    assert group.contributors().tolist() == []
    wait_for(lambda: sum(host.alive for host in group.hosts().values()) >= 3)
    assert group.counters()["rounds"] == 0
    assert group.running
    group.set_global_step(step + 2)
    assert group.global_step == step + 2
    assert "global_step" not in caplog.text
    rounds(group, journals, 1)
    assert group.wait_step(step + 2, timeout=60) == step + 3


_CHIEF = """
import os, signal, sys
said = os.fdopen(os.dup(1), "w", 1)
os.dup2(2, 1)  # Ray prints what its nodes report: that processes were killed
os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
import ray, shmacc.ray
ray.init(address=sys.argv[1], _node_ip_address="127.0.0.2", log_to_driver=False)
group = shmacc.ray.AccumulatorGroup.attach("model")
with group.round(int(sys.argv[2]), timeout=60) as taken:
    print(*sorted(taken["rows"].indices.tolist()), file=said)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_after_a_chief_dies_in_its_block_the_next_has_the_same_gradients(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup, journals: Journals
) -> None:
    rounds(group, journals, 1)
    address = nodes.cluster.address
    command = [sys.executable, "-P", "-c", _CHIEF, address, str(RANKS)]
    chief = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert chief.returncode == -signal.SIGKILL, chief.stderr
    with group.round(RANKS, timeout=60) as taken:
        assert taken["rows"].indices.tolist() == [int(row) for row in chief.stdout.split()]
        journals.enter(taken, RANKS)
    rounds(group, journals, 1)
    assert journals.lost() == []


def test_a_new_step_ends_a_block(group: shmacc.ray.AccumulatorGroup, journals: Journals) -> None:
    ended = pytest.raises(FailedPreconditionError, match="ended before its block")
    with ended, group.round(RANKS, timeout=60):
        group.advance_step(group.global_step + 50)
    step = group.global_step
    rounds(group, journals, 1)
    assert group.global_step == step + 1


@pytest.mark.usefixtures("group", "journals")
def test_two_chiefs_have_their_blocks_in_turn() -> None:
    steps = []

    def lead() -> None:
        other = shmacc.ray.AccumulatorGroup.attach("model")
        for _ in range(3):
            with other.round(RANKS, timeout=60) as taken:
                steps.append(taken.step)
                time.sleep(0.05)
                assert steps[-1] == taken.step, "two chiefs in their blocks at once"

    threads = [threading.Thread(target=lead) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert steps == list(range(steps[0], steps[0] + 6))
