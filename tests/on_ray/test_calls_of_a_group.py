"""A group over hosts answers as a group on one host does, and its hosts show what they do."""

import itertools
import json
import os
import pickle
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from helpers.at_every_point import FOLDER, Points, coming_between
from on_ray.nodes import Nodes, wait_for

import shmacc
import shmacc.ray
from shmacc._multihost.columns import ALIGNED
from shmacc.errors import (
    CancelledError,
    DeadlineExceededError,
    FailedPreconditionError,
    NotFoundError,
    WorkerDiedError,
)
from shmacc.ray._parts import find_actor
from shmacc.ray._round import OPEN

MEMBERS = {
    "rows": shmacc.IndexedSlicesSpec((100, 2), "float32"),
    "rest": shmacc.TensorSpec((5,), "float64", reduction_type="SUM"),
}
HOSTS = range(3)


@pytest.fixture(scope="module")
def group(nodes: Nodes) -> Iterator[shmacc.ray.AccumulatorGroup]:  # noqa: ARG001
    made = shmacc.ray.AccumulatorGroup(MEMBERS, "asked", shards=2, lanes=2, capacity=50)
    yield made
    made.unlink()


@pytest.fixture
def local(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup
) -> Iterator[list[shmacc.AccumulatorGroup]]:
    """Yield the hosts' segments, empty and at the owner's step."""
    step = group.global_step + 1
    group.advance_step(step)
    made = []
    for node in HOSTS:
        with nodes.on(node):
            made.append(shmacc.AccumulatorGroup.attach("asked", timeout=60))
    for each in made:
        wait_for(lambda each=each: each.global_step == step)
    yield made
    for each in made:
        each.close()


def gradient(row: int) -> dict[str, Any]:
    return {"rows": ([row, 99], np.full((2, 2), row, np.float32)), "rest": np.full(5, row)}


def wait_in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    failures: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, failures


def test_a_snapshot_equals_the_next_take(
    group: shmacc.ray.AccumulatorGroup, local: list[shmacc.AccumulatorGroup]
) -> None:
    empty = group.snapshot()
    assert (empty.count, dict(empty), group.contributors().tolist()) == (0, {}, [])
    for number, each in enumerate(local):
        assert each.apply(gradient(number + 1), group.global_step, contributor=number, weight=2)
    shown = group.snapshot()
    assert group.contributors().tolist() == [0, 1, 2]
    assert all(each.apply(gradient(7), group.global_step) for each in local), "nothing is sealed"
    assert group.snapshot().count == 6
    with group.round(6, timeout=60) as taken:
        sealed = group.snapshot()
    assert sealed.count == 6
    assert np.array_equal(sealed["rows"].values, taken["rows"].values)
    assert shown.step == taken.step
    assert shown.contributors.tolist() == taken.contributors.tolist() == [0, 1, 2]
    assert sealed["rows"].indices.tolist() == taken["rows"].indices.tolist()
    assert (shown.count, shown.weight) == (3, 6)
    assert shown["rows"].indices.tolist() == [1, 2, 3, 99]
    assert shown["rest"].value.tolist() == [2.0 * (1 + 2 + 3)] * 5
    assert taken["rest"].value.tolist() == [2.0 * (1 + 2 + 3) + 3 * 7] * 5


def test_parameters_of_one_host_are_not_updated_from_a_round_over_hosts(
    local: list[shmacc.AccumulatorGroup], group: shmacc.ray.AccumulatorGroup
) -> None:
    """A round over hosts is not final: after a death the next chief may get other gradients."""
    contents = {"rows": np.ones((100, 2), np.float32), "rest": np.ones(5)}
    step = group.global_step
    assert local[1].apply(gradient(1), step)
    with (
        shmacc.Parameters(contents, optimizer=shmacc.optim.SGD(0.1)) as params,
        group.round(1, timeout=60) as taken,
    ):
        for call in (params.update, params.skip):
            with pytest.raises(FailedPreconditionError, match=r"only its shmacc\.ray\."):
                call(taken)
        assert params.step == 0
        np.testing.assert_array_equal(params["rows"], contents["rows"])
    assert group.global_step == step + 1


def test_cancel_ends_the_waits_of_all_chiefs(group: shmacc.ray.AccumulatorGroup) -> None:
    other = shmacc.ray.AccumulatorGroup.attach("asked")
    waits = [wait_in_thread(partial(each.take, 9, timeout=60)) for each in (group, other)]
    for thread, failures in waits:
        while thread.is_alive():  # the take may not have begun to wait yet
            group.cancel()
            thread.join(0.05)
        assert [type(failure) for failure in failures] == [CancelledError]
    with pytest.raises(DeadlineExceededError):
        group.take(9, timeout=0.2)


def test_wait_step_returns_the_next_step_or_raises_at_its_timeout(
    group: shmacc.ray.AccumulatorGroup, local: list[shmacc.AccumulatorGroup]
) -> None:
    step = group.global_step
    with pytest.raises(DeadlineExceededError) as caught:
        group.wait_step(step, timeout=0.1)
    assert (caught.value.step, caught.value.accumulated, caught.value.required) == (step, 0, None)
    assert group.wait_step(step - 1) == step
    steps: list[int] = []
    thread, failures = wait_in_thread(lambda: steps.append(group.wait_step(step, timeout=60)))
    assert local[0].apply(gradient(1), step)
    group.take(1, timeout=60)
    thread.join()
    assert (steps, failures) == ([step + 1], [])


def test_a_group_is_found_by_its_name_and_by_its_pickle(
    group: shmacc.ray.AccumulatorGroup,
) -> None:
    again = pickle.loads(pickle.dumps(group))
    assert (again.shared_name, repr(again.members)) == (group.shared_name, repr(group.members))
    assert (again.lanes, again.capacity) == (2, 50)

    def ask(given: shmacc.ray.AccumulatorGroup) -> tuple[int, str]:
        return given.global_step, repr(given)

    # Ray unpickles the group in a thread where a call to Ray would never end.
    asked = ray.remote(num_cpus=0)(ask).remote(group)
    assert ray.get(asked, timeout=50) == (group.global_step, repr(group))
    gone = shmacc.ray.AccumulatorGroup.attach("asked")
    gone.__setstate__("never")
    with pytest.raises(NotFoundError):
        _ = gone.members
    assert shmacc.ray.AccumulatorGroup.attach("asked", timeout=0).shared_name == "asked"
    with pytest.raises(NotFoundError):
        shmacc.ray.AccumulatorGroup.attach("never")
    with pytest.raises(DeadlineExceededError, match="no group 'never'"):
        shmacc.ray.AccumulatorGroup.attach("never", timeout=0.1)


def test_a_replaced_chief_removes_nothing_of_the_next_one(
    nodes: Nodes, caplog: pytest.LogCaptureFixture
) -> None:
    members = {"m": shmacc.TensorSpec((), "float64")}
    with nodes.on(0):
        first = shmacc.ray.AccumulatorGroup(members, "replaced", unlink_on_close=True)
        third = shmacc.ray.AccumulatorGroup.attach("replaced")
        with shmacc.ray.AccumulatorGroup(
            members, "replaced", if_exists="replace", unlink_on_close=True
        ) as second:
            first.close()
            assert "is another chief's now" in caplog.text
            assert second.running
            with pytest.raises(FailedPreconditionError, match="another chief has made one of"):
                third.set_global_step(7)
            assert second.global_step == 0
            with shmacc.attach("replaced", timeout=60) as local:
                assert local.running


def test_a_close_in_the_block_gives_the_round_up_and_the_group_can_be_removed(
    nodes: Nodes,
) -> None:
    members = {"m": shmacc.TensorSpec((), "float64")}
    with nodes.on(0), shmacc.ray.AccumulatorGroup(members, "closed") as other:
        first = shmacc.ray.AccumulatorGroup.attach("closed")
        with shmacc.AccumulatorGroup.attach("closed", timeout=60) as local:
            assert local.apply({"m": np.float64(2)}, 0)
        with pytest.raises(FailedPreconditionError, match="is closed"), first.round(1, timeout=60):
            first.close()
        assert other.take(1, timeout=other._link.config.timing.chief_lease / 2).count == 1
        other.close()
        other.unlink()
        wait_for(lambda: find_actor("closed/owner") is None)


def test_a_wait_longer_than_the_chiefs_lease_goes_on(nodes: Nodes) -> None:
    """The test tries several times: a busy machine may silence this process for longer."""
    members, timing = {"m": shmacc.TensorSpec((), "float64")}, shmacc.ray.Timing(chief_lease=0.8)

    def goes_on() -> bool:
        with pytest.raises((DeadlineExceededError, CancelledError)) as ended:
            short.take(1, timeout=2)
        return ended.type is DeadlineExceededError

    with (
        nodes.on(0),
        shmacc.ray.AccumulatorGroup(members, "short", timing=timing, unlink_on_close=True) as short,
    ):
        assert any(goes_on() for _ in range(5))


def test_a_take_that_fails_leaves_the_round_of_another_thread_open(
    group: shmacc.ray.AccumulatorGroup, local: list[shmacc.AccumulatorGroup]
) -> None:
    """The other thread may be in its block: its update must still find the round."""
    assert local[1].apply(gradient(1), group.global_step)
    with group.round(1, timeout=60):
        thread, failures = wait_in_thread(lambda: group.take(1, timeout=0.2))
        thread.join()
        assert [type(error) for error in failures] == [DeadlineExceededError]
        assert [block.link for block in OPEN.values()] == [group._link]
        with pytest.raises(FailedPreconditionError, match="round of this group open"):
            group.take(1, timeout=60)
        assert [block.link for block in OPEN.values()] == [group._link]
    assert OPEN == {}


def test_stats_are_given_for_each_hosts_segment(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup, local: list[shmacc.AccumulatorGroup]
) -> None:
    assert local[1].apply(gradient(1), group.global_step)
    found = group.stats()
    assert sorted(found) == sorted(nodes.id(node) for node in HOSTS)
    for node, each in zip(HOSTS, local, strict=True):
        assert found[nodes.id(node)].applied == each.stats().applied
    assert [found[nodes.id(node)].num_accumulated for node in HOSTS] == [0, 1, 0]


_WORKER = """
import sys, time
import numpy as np
import shmacc
group = shmacc.attach("asked", timeout=60)
assert group.apply({"rest": np.ones(5)}, int(sys.argv[1]), contributor=7)
print("applied", flush=True)
time.sleep(600)
"""


def test_the_death_of_a_worker_on_any_host_ends_a_wait_with_on_death(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup, local: list[shmacc.AccumulatorGroup]
) -> None:
    before = group.counters()["died_workers"]
    with subprocess.Popen(
        [sys.executable, "-P", "-c", _WORKER, str(group.global_step)],
        env=nodes.environment(2),
        stdout=subprocess.PIPE,
    ) as worker:
        assert worker.stdout is not None
        assert worker.stdout.readline() == b"applied\n"
        thread, failures = wait_in_thread(lambda: group.take(2, timeout=60, on_death="raise"))
        worker.kill()
        thread.join()
    [error] = failures
    assert isinstance(error, WorkerDiedError)
    assert (error.pids, error.contributors) == ((worker.pid,), (7,))
    assert re.search(nodes.shown(2), str(error))
    with pytest.raises(DeadlineExceededError):  # a death is reported once
        group.take(2, timeout=1, on_death="raise")
    assert local[0].apply(gradient(1), group.global_step, contributor=1)
    taken = group.take(2, timeout=60, on_death="raise")
    assert taken.contributors.tolist() == [1, 7], "what was applied before the death counts"
    assert group.counters()["died_workers"] == before + 1


_FAILING = """
import sys
import numpy as np
import shmacc
with shmacc.attach("asked", timeout=60) as group:
    rows = [7, 99], np.ones((2, 2), np.float32)
    group.apply({"rows": rows, "rest": np.ones(5)}, group.global_step, contributor=7)
    raise ValueError("a bad batch")
"""


def test_the_chief_is_told_why_a_worker_of_another_host_has_failed(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup, local: list[shmacc.AccumulatorGroup]
) -> None:
    assert local[0].apply(gradient(1), group.global_step, contributor=1)
    command = [sys.executable, "-P", "-c", _FAILING]
    worker = subprocess.Popen(command, env=nodes.environment(1), stderr=subprocess.DEVNULL)
    with pytest.raises(WorkerDiedError, match="ValueError: a bad batch") as caught:
        group.take(3, timeout=60, on_death="raise")
    assert worker.wait() == 1
    error = caught.value
    assert error.reasons == ("ValueError: a bad batch",)
    assert (error.pids, error.contributors) == ((worker.pid,), (7,))
    assert re.search(nodes.shown(1), str(error))
    assert group.take(2, timeout=60, on_death="raise").contributors.tolist() == [1, 7]


def test_shmacc_inspect_shows_a_forwarders_work_on_its_host(
    nodes: Nodes, group: shmacc.ray.AccumulatorGroup, local: list[shmacc.AccumulatorGroup]
) -> None:
    def shown(node: int) -> dict[str, int]:
        inspect = Path(sys.executable).parent / "shmacc-inspect"
        command = [str(inspect), "show", "--json", "asked.forwarder"]
        made = subprocess.run(
            command, env=nodes.environment(node), capture_output=True, check=True, text=True
        )
        return {one["name"]: one["value"] for one in json.loads(made.stdout)["members"]}

    before = shown(0), shown(1)
    assert before[0]["starts"] == before[1]["starts"] == 1
    for _ in range(2):
        step = group.global_step
        assert local[0].wait_step(step - 1, timeout=60) == step
        assert local[0].apply(gradient(1), step)
        assert local[0].apply(gradient(2), step)
        group.take(2, timeout=60)
    wait_for(lambda: local[0].global_step == local[1].global_step == group.global_step)
    wait_for(lambda: shown(0)["rounds"] == before[0]["rounds"] + 2)
    after = shown(0), shown(1)
    grown = [
        {key: new[key] - old[key] for key in new} for old, new in zip(before, after, strict=True)
    ]
    assert (grown[0]["batches"], grown[0]["gradients"]) == (2, 4)
    sums = 2 * (3 * (8 + 8 + 2 * 4) + 5 * 8)
    assert sums <= grown[0]["bytes"] < sums + 4 * ALIGNED, "and what is between members' parts"
    assert (grown[1]["gradients"], grown[1]["bytes"]) == (0, 0)
    assert [each["step"] for each in grown] == [2, 2]
    for each in grown:
        assert each["reports"] > 0
        assert each["orders"] > 0
        assert each["seals"] >= 2
        assert (each["starts"], each["resent"], each["refused"]) == (0, 0, 0)


class AlarmError(Exception):
    """Raised by a signal's handler."""


def alarm() -> None:
    raise AlarmError


def test_an_exception_at_any_line_leaves_no_round_open_and_loses_no_gradient(
    group: shmacc.ray.AccumulatorGroup, local: list[shmacc.AccumulatorGroup]
) -> None:
    """The round's heartbeats end, too, when its block ends."""
    for number in itertools.count(1, 2):
        step = group.global_step
        assert local[0].apply(gradient(1), shmacc.NEVER_STALE, timeout=60)
        kept: BaseException | None = None
        where = (f"{FOLDER}ray{os.sep}_round.py",)
        with coming_between(alarm, Points.LINES, number, where) as between:
            try:
                with group.round(1, timeout=60):
                    pass
            except AlarmError as error:
                kept = error
        assert not OPEN
        wait_for(lambda: all(each.name != "shmacc chief" for each in threading.enumerate()))
        if group.global_step == step:
            with group.round(1, timeout=60) as taken:
                assert taken.count == 1
        assert group.global_step == step + 1
        assert group.num_accumulated() == 0
        if not between.came:
            break
        assert kept is not None


def test_what_a_signals_handler_raises_while_ray_gets_an_answer_is_raised(
    group: shmacc.ray.AccumulatorGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a hundred Ctrl-C in a round, Ray makes a SystemError of about two."""

    def get(*_: Any, **__: Any) -> None:
        raise SystemError("returned a result with an exception set") from KeyboardInterrupt()

    monkeypatch.setattr(ray, "get", get)
    with pytest.raises(KeyboardInterrupt):
        group.counters()
