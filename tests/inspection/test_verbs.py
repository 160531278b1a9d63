"""Each verb of `shmacc-inspect` in pipes, on living, orphaned and busy segments."""

import json
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.apart import Crew
from helpers.inspect_tool import COMMAND, ask, path_of, run, semaphore_of, start, wait_in_queue
from helpers.standing_still import begin, pause
from helpers.stepping_calls import NAMES, Calling, needs_failures
from helpers.stepping_tracer import Mark
from helpers.support import LONG, until

from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, inspection, testing


@pytest.fixture
def embeddings() -> Iterator[SparseConditionalAccumulator]:
    with SparseConditionalAccumulator(np.float32, [100, 4], "embeddings") as acc:
        yield acc
        acc.unlink()


@pytest.fixture
def bias() -> Iterator[ConditionalAccumulator]:
    with ConditionalAccumulator(np.float64, [3], "bias", reduction_type="SUM") as acc:
        yield acc
        acc.unlink()


def orphan(name: str) -> None:
    ConditionalAccumulator(np.float32, [2], name).close()


def apply(acc: Any, step: int = 0) -> None:
    assert acc.apply_grad([1], np.ones((1, 4), np.float32), local_step=step)


def test_list_shows_all_segments(
    embeddings: SparseConditionalAccumulator, bias: ConditionalAccumulator
) -> None:
    embeddings.apply_grad([3, 5], np.ones((2, 4), np.float32))
    bias.apply_grad([1, 2, 3])
    orphan("left")
    by_name = {segment["name"]: segment for segment in ask("list")["segments"]}
    assert sorted(by_name) == ["bias", "embeddings", "left"]
    said = by_name["embeddings"]
    assert (said["kind"], said["dtype"], said["shape"]) == ("sparse", "float32", [100, 4])
    assert (said["num_accumulated"], said["rows"], said["global_step"]) == (1, 2, 0)
    assert (said["attached_alive"], said["attached_dead"], said["waiting_for"]) == (1, 0, [])
    assert (said["owner_uid"], said["mode"], said["state"]) == (os.getuid(), 0o600, "sound")
    assert 0 < said["bytes_used"] <= said["bytes_reserved"]
    assert 0 <= time.time() - said["created"] < 60
    assert by_name["left"]["state"] == "orphaned"

    lines = run("list", "--sort", "rows").stdout.splitlines()
    assert lines[0].split()[0] == "NAME"
    assert [line.split()[0] for line in lines[1:]] == ["embeddings", "bias", "left"]
    assert run("list", "--orphaned", "--mine").stdout.splitlines()[1].split()[0] == "left"
    assert [s["name"] for s in ask("list", "e*")["segments"]] == ["embeddings"]
    assert run("list", "--quiet", "e*").stdout == run("list", "-q", "e*").stdout == "embeddings\n"
    assert run("clean", "--yes", "left").returncode == 0


def test_show_prints_all_facts(embeddings: SparseConditionalAccumulator, crew: Crew) -> None:
    for _ in range(2):
        embeddings.apply_grad([3, 5], np.full((2, 4), 2, np.float32))
    embeddings.apply_grad([3], np.full((1, 4), np.nan, np.float32))
    taker = start(crew, wait_in_queue, "embeddings", 7)
    until(lambda: embeddings.stats().waiting == 1)
    said = ask("show", "embeddings", "--rows", "1", "--values")
    assert "error" not in said
    assert said["stats"]["applied"] == 3
    assert said["stats"]["applied_bytes"] == 5 * 4 * 4
    assert said["most_touched"] == [{"row": 3, "count": 3}]
    assert said["most_touched_still"]
    assert (said["values"]["numbers"], said["values"]["nan"]) == (8, 4)
    assert said["values"]["norm"] == pytest.approx(8.0)
    (waiting,) = said["queue"]
    assert (waiting["num_required"], waiting["alive"], waiting["pid"]) == (7, True, taker.pid)
    processes = {process["pid"]: process for process in said["processes"]}
    own = processes[os.getpid()]
    assert (own["applied"], own["last_applied_step"]) == (3, said["stats"]["global_step"])
    program, *_ = Path("/proc/self/cmdline").read_text().split("\0")
    assert own["command"].startswith(f"{program} ")
    assert processes[taker.pid]["activity"] == "waits in the queue"
    assert not said["lock"]["held"]
    regions = {region["name"]: region for region in said["regions"]}
    assert regions.keys() >= {"slots", "rows 0", "undo log"}
    for always in ("header", "directory", "states"):
        assert 0 < regions[always]["used"] <= regions[always]["reserved"]
    reserved = sum(region["reserved"] for region in regions.values())
    assert reserved == said["summary"]["bytes_reserved"]

    text = run("show", "embeddings", "--rows", "2", "--values", "--layout").stdout
    assert "3 of the 7 gradients" in text
    for part in ("Processes", "Line", "Layout", "Most touched rows", "Values", "NaN"):
        assert part in text


def test_show_refuses_rows_of_a_dense_accumulator(bias: ConditionalAccumulator) -> None:
    bias.apply_grad([1, 2, 2])
    assert ask("show", "bias", "--values")["values"]["norm"] == 3.0
    refused = run("show", "bias", "--rows", "3")
    assert (refused.returncode, "dense" in refused.stderr) == (2, True)


def test_watch_in_a_pipe_prints_a_line_each_time(embeddings: SparseConditionalAccumulator) -> None:
    watched = run("watch", "embeddings", "--json", "--interval", "0.05", "--count", "3")
    assert (watched.returncode, len(watched.stdout.splitlines())) == (0, 3)
    command = [str(COMMAND), "watch", "embeddings", "--json", "--interval", "0.2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        first, *_ = lines = [json.loads(process.stdout.readline())]
        apply(embeddings)
        while not lines[-1]["gradients_per_second"]:
            lines.append(json.loads(process.stdout.readline()))
        process.terminate()
    assert not first["gradients_per_second"]
    rate = lines[-1]["gradients_per_second"]
    assert rate > 0
    assert lines[-1]["bytes_per_second"] == pytest.approx(16 * rate)
    assert lines[-1]["steps_per_second"] == 0


def test_watch_names_the_stragglers(embeddings: SparseConditionalAccumulator, crew: Crew) -> None:
    quick, dead = (begin(crew, apply, pause, name="embeddings") for _ in range(2))
    until(lambda: embeddings.num_accumulated() == 2)
    embeddings.take_grad(2)
    dead.kill()
    apply(embeddings, step=1)
    [said] = run("watch", "embeddings", "--count", "1", "--interval", "0.1").stdout.splitlines()
    assert " embeddings step=1 gradients=1 " in said
    assert f"behind={quick.pid}:" in said
    said = json.loads(run("watch", "--count", "1", "--interval", "0.1", "--json").stdout)
    assert [straggler["pid"] for straggler in said["stragglers"]] == [quick.pid]


def test_watch_goes_on_when_a_segment_is_removed(bias: ConditionalAccumulator) -> None:
    command = [str(COMMAND), "watch", "bias", "--interval", "0.05"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        read = process.stdout.readline  # type: ignore[union-attr]
        assert "step=0" in read()
        bias.unlink()
        until(lambda: "state=gone" in read())
        with ConditionalAccumulator(np.float32, [1], "bias") as again:
            until(lambda: "step=0" in read())
            again.unlink()
        process.kill()


def test_remove_is_a_dry_run_without_yes(bias: ConditionalAccumulator, namespace: str) -> None:
    in_use = run("remove", "bias", "--yes")
    assert (in_use.returncode, str(os.getpid()) in in_use.stderr) == (1, True)
    answer = ask("remove", "bias", "--yes", status=1)
    assert (answer["refused"], answer["removed"], answer["dry_run"]) == (True, [], True)
    assert "in use" in answer["obstacle"]
    for each in (answer, ask("remove", "bias", "--force")):
        assert each["dry_run"]
        assert [process["pid"] for process in each["attached"]] == [os.getpid()]
    assert inspection.list_segments("bias", namespace=namespace)
    assert len(ask("remove", "bias", "--force", "--yes")["removed"]) == 2
    assert not inspection.list_segments("bias", namespace=namespace)
    assert bias.apply_grad([1, 2, 3])  # a process that has it open goes on
    assert run("remove", "bias", "--yes").returncode == 3


def test_remove_removes_all_names_or_none(bias: ConditionalAccumulator, namespace: str) -> None:
    orphan("alone")
    assert run("remove", "alone", "bias", "--yes").returncode == 1
    there = [each.shared_name for each in inspection.list_names(namespace=namespace)]
    assert there == ["alone", bias.shared_name]
    assert run("remove", "alone", "bias", "--yes", "--force").returncode == 0


def test_cancel_ends_waiting_takes(embeddings: SparseConditionalAccumulator, crew: Crew) -> None:
    waiting = [start(crew, wait_in_queue, "embeddings", 9) for _ in range(2)]
    until(lambda: embeddings.stats().waiting == 2)
    rehearsal = run("cancel", "embeddings")
    assert rehearsal.returncode == 0
    assert rehearsal.stdout.count("would cancel") == 2
    assert embeddings.stats().waiting == 2
    assert ask("cancel", "embeddings", "--yes")["cancelled"] == 2
    for taker in waiting:
        assert taker.result() is None
    assert "no take waits" in run("cancel", "embeddings").stderr


def test_clean_removes_only_unused_segments(bias: ConditionalAccumulator) -> None:
    for name in ("old", "older", "other"):
        orphan(name)
    semaphore, unfinished = semaphore_of("other"), path_of("half")
    path_of("other").unlink()
    unfinished.touch()

    rehearsal = ask("clean")
    assert rehearsal["dry_run"]
    planned = {leftover["file_name"] for leftover in rehearsal["would_remove"]}
    assert planned == {path_of("old").name, path_of("older").name, semaphore.name}
    assert [left["file_name"] for left in rehearsal["left"]] == [unfinished.name]
    assert ask("clean", "--older-than", "1h")["would_remove"] == []

    done = run("clean", "--yes", "old")
    assert done.returncode == 0
    assert len(done.stdout.splitlines()) == 2  # the segment and its semaphore
    assert path_of("older").exists()
    assert semaphore.name in ask("clean", "--yes")["removed"]
    assert run("clean", "--yes").stdout == ""
    assert unfinished.exists()  # no version makes an empty file
    assert ask("remove", "half", "--force", "--yes")["removed"] == [unfinished.name]
    assert bias.apply_grad([1, 2, 3])
    assert path_of("bias").exists()


def test_a_killed_worker_is_no_fault(embeddings: SparseConditionalAccumulator, crew: Crew) -> None:
    worker = begin(crew, apply, pause, name="embeddings")
    until(lambda: embeddings.num_accumulated() == 1)
    worker.kill()
    said = ask("check", "embeddings")
    assert (said["wrong"], said["notes"]) == (0, 1)
    assert str(worker.pid) in said["findings"][0]["problem"]
    [dead] = [p for p in ask("show", "embeddings")["processes"] if not p["alive"]]
    assert (dead["pid"], dead["condition"], dead["command"]) == (worker.pid, "", "")


# -- two cleaners that meet over one segment ------------------------------------------------------


def clean_up() -> list[str]:
    found = inspection.leftovers(namespace=os.environ["SHMACC_NAMESPACE"])
    return [name for leftover in found for name in inspection.clean(leftover)]


def clean_and_tell(said: int, mark: Mark) -> None:
    mark()
    removed = clean_up()
    mark()
    os.write(said, json.dumps(removed).encode())


@pytest.mark.beyond_asan
@needs_failures
@pytest.mark.parametrize("unlinked", [1, 2])
def test_two_cleaners_at_once_remove_each_name_once(unlinked: int, namespace: str) -> None:
    ConditionalAccumulator("float32", [2], "left").close()
    expected = sorted(testing.leaked_names(namespace))
    reader, writer = os.pipe()
    with Calling(lambda mark: clean_and_tell(writer, mark)) as first:
        first.run_to_mark()
        seen = 0
        for call in first.calls_to_mark():
            seen += call.before and NAMES.get(call.number) == "unlink"
            if seen == unlinked and not call.before:
                break
        removed = clean_up()
        first.finish()
    os.close(writer)
    removed += json.loads(os.read(reader, 1000))
    os.close(reader)
    assert sorted(removed) == expected
    assert len(expected) == 2


# -- `wait` returns when its condition holds, and not before --------------------------------------

SHORT = "0.2s"
_CLOCK_NANOSLEEP = {"x86_64": 230, "aarch64": 115}[platform.machine()]


def started(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [COMMAND, "wait", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def has_looked(process: subprocess.Popen[str]) -> None:
    """Return when the command sleeps until its next look."""
    call = Path(f"/proc/{process.pid}/syscall")
    until(lambda: call.read_text(encoding="ascii").startswith(f"{_CLOCK_NANOSLEEP} "))


def ended(process: subprocess.Popen[str]) -> int:
    out, talk = process.communicate(timeout=LONG)
    assert (out, "Traceback" in talk) == ("", False)
    return process.returncode


def test_wait_waits_for_a_step(bias: ConditionalAccumulator) -> None:
    process = started("bias", "--for", "step=2")
    for step in range(2):
        assert process.poll() is None
        bias.apply_grad([1, 2, 3], local_step=step)
        bias.take_grad(1)
    assert ended(process) == 0
    assert run("wait", "bias", "--for", "step=1").returncode == 0  # the step is past that


@pytest.mark.usefixtures("bias")
def test_wait_for_gone_ends_when_another_segment_takes_the_name() -> None:
    process = started("bias", "--for", "gone")
    has_looked(process)
    assert run("wait", "bias", "--for", "gone", "--timeout", SHORT).returncode == 124
    with ConditionalAccumulator(np.float64, [3], "other") as other:
        path_of("other").replace(path_of("bias"))
        assert ended(process) == 0
        other.unlink()
        path_of("bias").unlink()
        for semaphore in path_of("bias").parent.glob(f"sem.{path_of('other').name}.*"):
            semaphore.unlink()
    for semaphore in path_of("bias").parent.glob(f"sem.{path_of('bias').name}.*"):
        semaphore.unlink()


def test_wait_for_a_step_fails_when_the_segment_is_gone(bias: ConditionalAccumulator) -> None:
    gone, never = started("bias", "--for", "gone"), started("bias", "--for", "step=5")
    for process in (gone, never):
        has_looked(process)
    bias.unlink()
    assert (ended(gone), ended(never)) == (0, 3)


def test_wait_waits_for_all_names(bias: ConditionalAccumulator) -> None:
    with ConditionalAccumulator(np.float64, [3], "brother") as other:
        process = started("b*", "--for", "count=1")
        bias.apply_grad([1, 2, 3])
        late = run("wait", "bias", "brother", "--for", "count=1", "--timeout", SHORT)
        assert late.returncode == 124
        assert "not so for 1 segment" in late.stderr
        assert process.poll() is None
        other.apply_grad([1, 2, 3])
        assert ended(process) == 0
        other.unlink()


def test_wait_answers_in_json(bias: ConditionalAccumulator) -> None:
    assert ask("wait", "bias", "--for", "step=0")["reached"]
    late = run("wait", "bias", "--for", "step=1", "--timeout", SHORT, "--json")
    assert late.returncode == 124
    assert not json.loads(late.stdout)["reached"]
    assert json.loads(late.stdout)["waited_seconds"] >= 0.2
    assert bias.stats().attached == 1
