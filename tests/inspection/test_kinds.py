"""`shmacc-inspect` on shared arrays, events and tables, and its reports of `sealed`."""

import json
import os
import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from typing import Any

import numpy as np
import pytest
from helpers import inspect_tool
from helpers.apart import Crew, run_apart
from helpers.inspect_tool import COMMAND, Terminal, ask, path_of, run, start, stopped_with_the_lock
from helpers.segment_file import SegmentFile
from helpers.support import LONG, until

import shmacc
from shmacc import errors, init, inspection, optim


@pytest.fixture
def parameters() -> Iterator[shmacc.SharedArrays]:
    """Two arrays of 520 bytes in all, removed after the test."""
    contents = {"w": np.zeros((10, 12), np.float32), "on": np.ones(40, np.bool_)}
    with shmacc.SharedArrays(contents, "p") as it:
        yield it
        it.unlink()


def test_arrays_of_one_integer_are_shown_with_their_values() -> None:
    contents: dict[str, Any] = {"many": np.int64(2**40), "less": np.int8(-3)}
    contents |= {"top": np.uint64(2**64 - 1), "real": np.float64(1.5), "row": np.arange(3)}
    contents["small"] = np.array((-1,), [("qint8", np.int8)])
    with shmacc.SharedArrays(contents, "counts") as arrays:
        values = [one["value"] for one in ask("show", "counts")["members"]]
        assert values == [2**40, -3, 2**64 - 1, None, None, -1]
        arrays["many"][...] += 1
        said = run("show", "counts").stdout
        [line] = [line for line in said.splitlines() if line.strip().startswith("many")]
        assert line.split()[-1] == str(2**40 + 1)
        arrays.unlink()


@pytest.mark.usefixtures("parameters")
def test_larger_arrays_are_shown_with_their_sizes_only() -> None:
    [segment] = ask("list")["segments"]
    for field in ("global_step", "num_accumulated", "rows", "waiting_for"):
        assert segment[field] is None
    assert (segment["kind"], segment["members"], segment["reduction_type"]) == ("arrays", 2, None)
    titles, row = (line.split() for line in run("list").stdout.splitlines())
    cells = dict(zip(titles, row, strict=True))
    assert [cells[title] for title in ("SHAPE", "REDUCE", "STEP", "GRADS", "ROWS")] == ["-"] * 5
    shown = ask("show", "p")
    assert {one["name"]: one["bytes_used"] for one in shown["members"]} == {"w": 480, "on": 40}
    [used] = [region["used"] for region in shown["regions"] if region["name"] == "rows 0"]
    assert used == 520
    said = run("show", "p").stdout
    assert "2 shared arrays, 520 B" in said
    for word in ("GRADIENTS", "APPLIED", "TOOK", "waits", "undo"):
        assert word not in said
    metrics = {metric["name"] for metric in ask("metrics")["metrics"] if metric["samples"]}
    assert "shmacc_bytes_used" in metrics
    assert not metrics & {"shmacc_step", "shmacc_gradients", "shmacc_applied"}


def test_a_single_array_is_summarised_like_an_accumulator() -> None:
    """Its dtype may be one that accumulators do not have."""
    with shmacc.SharedArrays({"flags": np.ones(3, bool)}, "flags", unlink_on_close=True):
        summary = inspection.summarise(inspection.resolve("flags"))
        assert (summary.kind, summary.dtype, summary.shape) == ("arrays", "bool", (3,))
        assert inspection.check("flags") == ()
        assert run("clean", "--yes").stdout == ""


@pytest.mark.usefixtures("parameters")
def test_verbs_for_gradients_refuse_arrays() -> None:
    for refusal in (inspection.cancel, inspection.summarise_values):
        with pytest.raises(errors.InvalidArgumentError, match="shared arrays"):
            refusal("p")
    lines = "wait p --for step=1; wait p --for count=1; show p --rows 1; show p --values"
    for line in f"{lines}; cancel p; cancel p --yes".split("; "):
        done = run(*line.split())
        assert (done.returncode, "shared arrays" in done.stderr) == (2, True), line


def test_wait_waits_for_the_step_of_parameters() -> None:
    """A glob includes parameters, too. A wait for their gradients is refused: they have none."""
    with (
        shmacc.Parameters(
            {"w": np.zeros(3, np.float32)}, "run.params", optimizer=optim.SGD(1)
        ) as params,
        shmacc.AccumulatorGroup(params.member_specs(), "run") as group,
    ):
        process = subprocess.Popen([COMMAND, "wait", "run*", "--for", "step=1"])
        assert run("wait", "run.params", "--for", "step=1", "--timeout", "0.1").returncode == 124
        group.apply({"w": np.ones(3, np.float32)}, local_step=0)
        with group.round(1) as taken:
            params.update(taken)
        assert process.wait(LONG) == 0
        assert run("wait", "run.params", "--for", "step=1").returncode == 0
        refused = run("wait", "run.params", "--for", "count=1")
        assert (refused.returncode, "parameters have no gradients" in refused.stderr) == (2, True)
        assert run("cancel", "run.params", "--yes").returncode == 2
        assert inspection.summarise(inspection.resolve("run.params")).num_accumulated is None
        group.unlink()
        params.unlink()


def test_a_glob_skips_segments_that_the_verb_is_not_for(crew: Crew) -> None:
    """But if such a segment is given by its name, the verb acts on no segment at all."""
    with (
        shmacc.SharedArrays({"a": np.zeros(3)}, "c1") as arrays,
        shmacc.ConditionalAccumulator(np.float32, [2], "c0") as first,
        shmacc.ConditionalAccumulator(np.float32, [2], "c2") as last,
    ):
        takers = [start(crew, inspect_tool.wait_in_queue, name, 3) for name in ("c0", "c2")]
        until(lambda: first.stats().waiting == last.stats().waiting == 1)
        named = run("cancel", "c0", "c1", "--yes")
        assert (named.returncode, named.stdout) == (2, "")
        assert "nobody takes from shared arrays" in named.stderr
        assert first.stats().waiting == 1, "nothing was done"
        path_of("c1x").write_bytes(b"damaged")
        done = run("cancel", "c*", "--yes")
        assert (done.returncode, done.stdout.count("cancelled the take")) == (1, 2)
        assert f"{path_of('c1x').name}: The segment is damaged" in done.stderr
        path_of("c1x").unlink()
        for taker in takers:
            taker.result()
        assert run("cancel", "c*", "--yes").returncode == 0
        assert run("wait", "c*", "--for", "count=0", "--timeout", "10").returncode == 0
        assert run("show", "c*", "--values").returncode == 0
        assert [run("show", glob, "--rows", "1").returncode for glob in ("c*", "c1*")] == [2, 2]
        for acc in (first, last, arrays):
            acc.unlink()


@pytest.mark.usefixtures("parameters")
def test_watch_shows_arrays() -> None:
    [line] = run("watch", "--count", "1", "--interval", "0.05").stdout.splitlines()
    assert line.endswith(" p state=sound")
    with Terminal("watch", "p", "--interval", "0.1") as terminal:
        seen = terminal.wait_for("2 shared arrays, 520 B")
        for word in ("nobody waits", "APPLIED", "steps/s"):
            assert word not in seen


def test_show_prints_the_memory_of_each_member_of_a_group() -> None:
    specs = {"a": shmacc.TensorSpec([4], np.float32), "b": shmacc.TensorSpec([2], "f8")}
    with shmacc.AccumulatorGroup(specs, "g") as it:
        it.apply({"a": np.ones(4, np.float32)}, local_step=0)
        members = {one["name"]: one["bytes_used"] for one in ask("show", "g")["members"]}
        assert members["a"] >= 16
        assert members["b"] == 0
        it.unlink()


def test_watch_shows_events(crew: Crew) -> None:
    with shmacc.ConditionalAccumulator(np.float32, [2], "acc") as acc:
        acc.cancel()
        with Terminal("watch", "acc", "--interval", "0.1", rows=24) as terminal:
            terminal.wait_for("WHEN", "cancelled")
            dead = start(crew, inspect_tool.idle, "acc")
            dead.kill()
            with shmacc.ConditionalAccumulator.attach("acc"):  # attaching finds the death
                terminal.wait_for("died", str(dead.pid))
            screen = terminal.text()
            assert screen.index("died") < screen.index("cancelled")  # the latest event first
            terminal.resize(100, 10)
            terminal.wait_for("dead" if "dead" in screen else "idle")
        events = [(one["kind"], one["reason"]) for one in ask("show", "acc")["events"]]
        assert events == [("cancelled", ""), ("died", "")]
        acc.unlink()


def test_watch_in_a_pipe_prints_events(crew: Crew) -> None:
    with shmacc.SparseConditionalAccumulator(np.float32, [50_000, 16], "acc") as acc:
        acc.cancel()  # before the watch, which must not print it
        with stopped_with_the_lock(crew, "acc"):
            command = [str(COMMAND), "watch", "acc", "--json", "--interval", "0.2"]
            watching = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
            assert watching.stdout is not None
            assert json.loads(watching.stdout.readline())["events"] == []
        acc.cancel()
        acc.apply_grad([1], np.ones((1, 16), np.float32))  # this undoes the interrupted apply
        seen: dict[str, int] = {}
        while not seen.keys() >= {"cancelled", "recovered"}:
            for event in json.loads(watching.stdout.readline())["events"]:
                assert event["kind"] not in seen
                seen[event["kind"]] = event["pid"]
        assert seen["cancelled"] == seen["recovered"] == os.getpid()
        watching.kill()
        watching.communicate()
        remembered = ask("show", "acc")["events"]
        assert [event["kind"] for event in remembered].count("recovered") == 1
        acc.unlink()


def test_a_segment_remembers_the_last_64_events() -> None:
    with shmacc.ConditionalAccumulator(np.float32, [2], "acc") as acc:
        for step in range(70):
            acc.set_global_step(step)
            acc.cancel()
        assert [event["step"] for event in ask("show", "acc")["events"]] == list(range(6, 70))
        acc.unlink()


# -- parameters that have tables ------------------------------------------------------------------

IDS = np.arange(40) * 2**50


@pytest.fixture
def params() -> Iterator[shmacc.Parameters]:
    """Parameters with an array, and a table that had 40 rows and now has 30."""
    made = _make()
    with made:
        yield made


def _make() -> shmacc.Parameters:
    table = shmacc.TableSpec((4,), initial=init.Uniform(-1, 1, seed=3), max_rows=50)
    params = shmacc.Parameters(
        {"user": table, "fc": np.zeros((4, 2))},
        "params",
        optimizer={"user": optim.Adagrad(0.1)},
        unlink_on_close=True,
    )
    with shmacc.AccumulatorGroup(
        {"user": params.member_specs()["user"]}, unlink_on_close=True
    ) as group:
        group.apply({"user": (IDS, np.ones((len(IDS), 4), np.float32))}, 0)
        with group.round(1) as taken:
            params.update(taken, remove={"user": IDS[:10]})
    return params


FIELDS = ("rows", "max_rows", "rows_added", "rows_removed", "initial")
INITIAL = "Uniform(low=-1.0, high=1.0, seed=3)"


def test_a_tables_rows_are_shown(params: shmacc.Parameters) -> None:
    assert len(params["user"]) == 30
    assert inspection.check("params") == inspection.damage("params") == ()
    summary = inspection.describe("params").summary
    assert (summary.kind, summary.rows) == ("parameters", 30)
    titles, row = (line.split() for line in run("list", "params").stdout.splitlines())
    assert row[titles.index("ROWS")] == "30"
    shown = run("show", "params").stdout
    assert re.search(r"^kind +1 parameter array and 1 table, ", shown, re.MULTILINE)
    said = "user: 30 rows of at most 50; 40 were added and 10 removed in all; at first "
    assert said + INITIAL in shown
    table, array = ask("show", "params")["members"]
    assert (table["kind"], table["shape"], table["bytes_used"]) == ("table", [4], 30 * 16)
    assert [slot["name"] for slot in table["slots"]] == ["accumulator"]
    assert [table[field] for field in FIELDS] == [30, 50, 40, 10, INITIAL]
    assert [array[field] for field in FIELDS] == [0, None, None, None, None]
    samples = {each["name"]: each for m in ask("metrics")["metrics"] for each in m["samples"]}
    for name, value in {"rows": 30, "rows_added_total": 40, "rows_removed_total": 10}.items():
        sample = samples[f"shmacc_table_{name}"]
        assert (sample["labels"]["name"], sample["value"]) == ("params", value)


def test_parameters_without_tables_have_no_rows() -> None:
    with shmacc.Parameters({"fc": np.zeros(3)}, "params", unlink_on_close=True):
        titles, row = (line.split() for line in run("list", "params").stdout.splitlines())
        assert row[titles.index("ROWS")] == "-"
        assert "1 parameter array," in run("show", "params").stdout
        assert 'shmacc_table_rows{name="params"' not in run("metrics").stdout


def test_a_table_whose_rows_were_all_removed_shows_no_rows(params: shmacc.Parameters) -> None:
    with shmacc.AccumulatorGroup(
        {"user": params.member_specs()["user"]}, unlink_on_close=True
    ) as group:
        group.advance_step(1)
        group.apply({}, 1)
        with group.round(1) as taken:
            params.update(taken, remove={"user": params["user"].ids()})
    [table, _] = ask("show", "params")["members"]
    fields = ("rows", "rows_added", "rows_removed", "bytes_used")
    assert [table[field] for field in fields] == [0, 40, 40, 0]


def _index(file: SegmentFile) -> tuple[int, int]:
    """Return the offset of the index, and the number of its buckets."""
    member = file.committed("member")
    return file.table.region(f"index {int(bool(member.index))}"), int(member.index_buckets)


def _lose_all(file: SegmentFile) -> None:
    """Empty the index, so that it leads to no row."""
    start, buckets = _index(file)
    file.write(start, bytes(64 * buckets))


def _lose_some(file: SegmentFile) -> None:
    start, _ = _index(file)
    file.write(start + 64, bytes(20))


def _fill_up(file: SegmentFile) -> None:
    """Fill every entry of the index with an invalid row: a search would never end."""
    start, buckets = _index(file)
    for bucket in range(buckets):
        file.write(start + 64 * bucket, b"\xff" * 20 + struct.pack("<I", 1) + b"\xff" * 40)
    stamp = struct.pack("<I", int(file.committed("member").index_stamp))
    for bucket in range(buckets):
        file.write(start + 64 * bucket + 20, stamp)


def _repeat_an_id(file: SegmentFile) -> None:
    """Give two places in use the same id."""
    first = file.table.region("slots")
    file.write(first + 20 * 16, file.read(first + 21 * 16, 8))


def _bring_one_back(file: SegmentFile) -> None:
    """Give a removed row's place the stamp of a place that is in use."""
    first = file.table.region("slots")
    file.write(first + 8, struct.pack("<q", 1 << 1))


def _told(damage: Any) -> tuple[list[inspection.Finding], str, float, bool]:
    """Return what `check`, `show` and `metrics` report, and whether the remedy saves all rows."""
    with _make() as params, SegmentFile(str(inspect_tool.path_of("params"))) as file:
        before = params.snapshot()[1]["user"]
        file.look_at(0, 0)
        damage(file)
        found = list(inspection.check("params"))
        shown = " ".join(run("show", "params").stdout.split())
        metrics = {each["name"]: each["samples"] for each in ask("metrics", "params")["metrics"]}
        mended = False
        for program in re.findall(r"`(params\..*?)`", found[0].remedy):
            eval(program, {"params": params})  # noqa: S307 - our own
            after = params.snapshot()[1]["user"]
            mended = inspection.check("params") == ()
            mended &= np.array_equal(after.indices, before.indices)
            mended &= np.array_equal(params["user"][before.indices], before.values)
        return found, shown, metrics["shmacc_table_faults"][0]["value"], mended


@pytest.mark.parametrize(("damage", "said", "mended"), [
    (_lose_all, "30 of 30 rows cannot be found through the index", True),
    (_lose_some, "of 30 rows cannot be found through the index", True),
    (_fill_up, "30 of 30 rows cannot be found through the index", True),
    (_repeat_an_id, "a row stands in the table twice", False),
    (_bring_one_back, "it has 30 rows, but 31 of its places are in use", False),
])  # fmt: skip
def test_every_verb_reports_a_damaged_table_and_the_remedy_saves_its_rows(
    damage: Any, said: str, mended: bool
) -> None:
    """If only the index is damaged, nothing is lost."""
    found, shown, faults, is_mended = run_apart(_told, damage)
    assert any(said in each.problem for each in found), found
    assert said in shown
    assert found[0].remedy in shown
    assert "fine" not in shown
    assert faults == len([each for each in found if each.severity == "wrong"])
    assert is_mended == mended
    assert ("`shmacc.load`" in found[0].remedy, "--force" in found[0].remedy) == (True, False)


# -- `sealed` has one meaning: an apply at the step is refused ------------------------------------


class _LeftError(Exception):
    pass


def leave(group: shmacc.AccumulatorGroup, params: shmacc.Parameters | None) -> None:
    """Leave a round by an exception; before that, update the parameters, if there are any."""
    with suppress(_LeftError), group.round(1) as taken:
        if params is not None:
            params.update(taken)
        raise _LeftError


def end(group: shmacc.AccumulatorGroup, params: shmacc.Parameters) -> None:
    with group.round(1) as taken:
        params.update(taken)


@pytest.mark.parametrize(("refused", "deed"), [
    (True, lambda group, _, stack: stack.enter_context(group.round(1))),
    (True, lambda group, params, stack: params.update(stack.enter_context(group.round(1)))),
    (True, lambda group, params, _: leave(group, params)),
    (True, lambda group, *_: group.take_partial(1, seal=True)),
    (False, lambda group, *_: leave(group, None)),
    (False, lambda group, params, _: end(group, params)),
    (False, lambda group, *_: (group.take_partial(1, seal=True), group.unseal())),
])  # fmt: skip
def test_sealed_shows_whether_applies_at_the_step_are_refused(
    refused: bool, deed: Callable[[shmacc.AccumulatorGroup, shmacc.Parameters, ExitStack], object]
) -> None:
    with (
        shmacc.Parameters({"a": np.zeros(3)}, optimizer=optim.SGD(1.0)) as params,
        shmacc.AccumulatorGroup(params.member_specs(), "group") as group,
        ExitStack() as stack,
    ):
        group.apply({"a": np.ones(3)}, 0)
        deed(group, params, stack)
        assert group.stats().sealed is refused
        assert inspection.describe("group").stats.sealed is refused
        assert ask("show", "group")["stats"]["sealed"] is refused
        metrics = {metric["name"]: metric for metric in ask("metrics", "group")["metrics"]}
        assert metrics["shmacc_sealed"]["samples"][0]["value"] == refused
        assert group.apply({"a": np.ones(3)}, group.global_step) is not refused
        stack.close()
        group.unlink()
