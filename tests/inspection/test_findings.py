"""Inspection finds all segments, blames nothing without proof, and removes only what is unused."""

import fcntl
import itertools
import mmap
import os
import pickle
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers import inspect_tool, own_shm
from helpers import segment_layout as layout
from helpers.apart import Apart, Crew, Pipe, needs_own_shm, needs_root, run_apart
from helpers.inspect_tool import ask, path_of, run, scribble, semaphore_of
from helpers.support import run_to_end
from helpers.training import training
from prometheus_client.openmetrics.parser import text_string_to_metric_families

import shmacc
from shmacc import _core, errors, inspection, optim
from shmacc.inspection import SegmentState, Severity, _contents, _index_check, _soundness, _unlinked

HOUR: Final = 3600.0
STRANGER: Final = 61003
MIB: Final = 1 << 20


def orphan(name: str) -> Path:
    """Make a segment that nobody has attached; return its file."""
    shmacc.ConditionalAccumulator(np.float32, [2], name).close()
    return path_of(name)


def wrong_kinds(name: str) -> list[str]:
    return [each.kind for each in inspection.check(name) if each.severity is Severity.WRONG]


def test_another_programs_file_under_our_prefix_is_not_removed(namespace: str) -> None:
    """A mapped file without a lock whose first page is zero may be another program's."""
    path = path_of("foreign")
    with path.open("w+b") as file:
        file.truncate(2 * mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), 0) as memory:
            memory[mmap.PAGESIZE] = 1
            assert [left["file_name"] for left in ask("clean")["left"]] == [path.name]
            assert ask("clean", "--yes")["removed"] == []
            assert path.exists()
            (listed,) = ask("list", "foreign")["segments"]
            assert listed["state"] == "damaged"
            assert "unfinished" in listed["detail"]
    (leftover,) = inspection.leftovers(namespace=namespace)
    assert not leftover.removable
    assert inspection.clean(leftover) == ()
    assert run("remove", "foreign", "--yes").returncode == 1
    assert ask("remove", "foreign", "--yes", "--force")["removed"] == [path.name]


def _make_and_unlink(number: int, *, pipe: Pipe) -> None:
    pipe.say()
    while not pipe.poll():
        for i in range(20):
            with shmacc.ConditionalAccumulator("f4", [4], f"churn-{number}-{i}") as made:
                made.apply_grad(np.ones(4, "f4"))
                made.unlink()


def test_check_finds_no_fault_while_segments_come_and_go(crew: Crew, namespace: str) -> None:
    crowd = [crew.start(_make_and_unlink, number) for number in range(2)]
    for process in crowd:
        process.hear()
    for _ in range(10):
        found = inspection.check_all(namespace=namespace)
        assert [each for each in found if each.severity is Severity.WRONG] == []
    for process in crowd:
        process.say()
        process.result()


def test_reused_descriptors_are_not_taken_for_closed_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process closes a segment and opens another while inspection looks at its files."""
    with shmacc.ConditionalAccumulator("f4", [4], "new") as acc, open(path_of("new")) as new:  # noqa: PTH123
        link = f"/proc/self/fd/{new.fileno()}"
        found = [(os.getpid(), link, f"{path_of('old')} (deleted)")]
        monkeypatch.setattr(_unlinked, "_some_memory_has_no_name", lambda: True)
        monkeypatch.setattr(_unlinked, "open_files", lambda _: found)
        assert inspection.unlinked_uses() == ()
        path_of("new").unlink()
        assert [use.under_users for use in inspection.unlinked_uses()] == [True]

        def view_of_the_next(_: str) -> bool:
            with open(os.devnull) as other:  # noqa: PTH123
                os.dup2(other.fileno(), new.fileno())
            return False

        monkeypatch.setattr(_unlinked, "_is_marked", view_of_the_next)
        assert inspection.unlinked_uses() == ()
        acc.unlink()


def _open_only(*, pipe: Pipe) -> None:
    """Stop where a process has opened the segment, but has no entry in it yet."""
    handle: Any = _core.open(str(path_of("left")), None)[2]
    pipe.say()
    pipe.hear()
    handle.close()


def test_a_segment_that_a_process_is_attaching_is_not_orphaned() -> None:
    """Attaching may take long on a busy machine."""
    orphan("left")
    with Apart(_open_only) as process:
        process.hear()
        assert inspection.check("left") == ()
        process.say()
        process.result()
    assert [finding.kind for finding in inspection.check("left")] == ["orphaned"]
    inspection.remove("left")


def test_an_orphan_is_found_while_another_inspector_has_it_open_for_a_moment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    orphan("left")
    with Apart(_open_only) as process:
        process.hear()
        # `check` sleeps between its two looks: then the other inspector closes the file.
        monkeypatch.setattr(time, "sleep", lambda _: process.status is None and process.finish())
        assert [finding.kind for finding in inspection.check("left")] == ["orphaned"]
    inspection.remove("left")


def _hold(path: str, *, pipe: Pipe) -> None:
    with open(path, "r+b") as file:  # noqa: PTH123
        fcntl.lockf(file, fcntl.LOCK_EX, 1, layout.lane_byte())
        pipe.say()
        pipe.hear()


def _compare_holders(directory: str) -> None:
    with shmacc.ConditionalAccumulator("f4", [2], "mine") as acc:
        own_shm.mount("tmpfs", directory, "tmpfs", options="size=1m")
        inode, number = path_of("mine").stat().st_ino, 0
        while True:  # each tmpfs numbers its files on its own
            namesake = Path(directory, str(number))
            namesake.touch()
            if namesake.stat().st_ino >= inode:
                break
            number += 1
        assert namesake.stat().st_ino == inode
        with Apart(_hold, str(namesake)) as innocent:
            innocent.hear()
            assert not inspection.describe("mine").lock.held
            with Apart(_hold, str(path_of("mine"))) as holder:
                holder.hear()
                lock = inspection.describe("mine").lock
                assert (lock.held, lock.pid) == (True, holder.pid)
        acc.unlink()


@needs_own_shm
def test_a_lock_on_another_file_with_the_same_inode_number_is_ignored(tmp_path: Path) -> None:
    run_apart(_compare_holders, str(tmp_path), shm=4 * MIB)


def test_rows_and_values_shown_during_an_apply_are_the_committed_ones(crew: Crew) -> None:
    """A process is stopped in the middle of an apply."""
    with shmacc.SparseConditionalAccumulator(np.float32, [200_000, 16], "table") as table:
        for rows in (100_000, 50_000, 50_000):
            table.apply_grad(np.arange(rows), np.ones((rows, 16), np.float32))
        with inspect_tool.stopped_with_the_lock(crew, "table"):
            gradients = inspection.describe("table").stats.num_accumulated
            shown = ask("show", "table", "--rows", "100000", "--values")
            rows, values = shown["most_touched"], shown["values"]
            assert (shown["most_touched_still"], values["still"]) == (True, True)
            # Half of the rows are in all gradients, half in the first one alone.
            counts = np.array([row["count"] for row in rows])
            assert np.bincount(counts).nonzero()[0].tolist() == [1, gradients]
            assert np.count_nonzero(counts == gradients) == 50_000
            assert (values["numbers"], values["largest"]) == (16 * counts.size, gradients)
            want = np.sqrt(16 * np.sum(counts.astype(np.float64) ** 2))
            assert values["norm"] == pytest.approx(want, rel=1e-9)
            found = inspection.check("table")
            assert not [f for f in found if f.kind in {"inconsistent", "not_compared"}]
        table.unlink()


def test_a_later_operations_undo_log_is_no_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    """The log is read after the state, so a later operation may have written it."""
    real = _contents._committed_places
    misfits: list[int] = []
    with shmacc.SparseConditionalAccumulator(np.float32, [100, 2], "busy") as acc:

        def read(*of: Any) -> Any:
            if misfits:
                misfits.pop()
                acc.apply_grad([acc.num_accumulated()], np.ones((1, 2), np.float32))
                raise errors.DataLossError("The segment is damaged: an undo record is out of range")
            return real(*of)

        monkeypatch.setattr(_contents, "_committed_places", read)
        acc.apply_grad([0], np.ones((1, 2), np.float32))
        for times, calm in ((1, True), (2, True), (8, False)):  # after 8 times, no log fits
            misfits[:] = range(times)
            rows, still = inspection.most_touched("busy", 100)
            assert (len(rows), still) == (acc.num_accumulated(), calm)
        acc.unlink()


def test_copies_links_and_renamed_files_are_shown_by_their_own_names() -> None:
    original = orphan("original")
    subprocess.run(["cp", "--sparse=always", original, path_of("copy")], check=True)
    path_of("link").hardlink_to(original)
    orphan("before")
    path_of("before").rename(path_of("after"))
    try:
        listed = {segment["name"]: segment for segment in ask("list")["segments"]}
        assert sorted(listed) == ["after", "copy", "link", "original"]
        for name, segment in listed.items():
            assert run("show", name).returncode == 0
            assert segment["system_name"] == path_of(name).name
            assert ("made as" in segment["detail"]) == (name != "original")
        metrics = run("metrics").stdout
        families = list(text_string_to_metric_families(metrics))  # type: ignore[no-untyped-call]
        names = [s.labels["name"] for f in families if f.name == "shmacc_step" for s in f.samples]
        assert sorted(names) == ["after", "copy", "link", "original"]
        kinds = {name: sorted(wrong_kinds(name)) for name in listed}
        assert kinds == {
            "after": ["misnamed"],
            "copy": ["misnamed"],
            "link": ["linked"],
            "original": ["orphaned"],
        }
    finally:
        for name in ("copy", "link", "after"):
            path_of(name).unlink(missing_ok=True)
        inspection.remove("original")
        for semaphore in original.parent.glob(f"sem.{path_of('before').name}.*"):
            semaphore.unlink()


def test_clean_keeps_a_renamed_segments_semaphore_while_it_is_used() -> None:
    with shmacc.ConditionalAccumulator(np.float32, [2], "before") as acc:
        semaphore = semaphore_of("before")
        path_of("before").rename(path_of("after"))
        try:
            kinds = {each["subject"]: each["kind"] for each in ask("check", status=1)["findings"]}
            assert kinds[path_of("after").name] == "misnamed"
            assert semaphore.name not in kinds
            assert ask("clean")["would_remove"] == ask("clean", "--yes")["removed"] == []
            assert semaphore.exists()
            acc.close()
            removed = ask("clean", "--yes")["removed"]
            assert set(removed) == {semaphore.name, path_of("after").name}
        finally:
            path_of("after").unlink(missing_ok=True)
            semaphore.unlink(missing_ok=True)


def test_removing_a_link_does_not_remove_the_segment() -> None:
    with shmacc.ConditionalAccumulator(np.float32, [2], "kept") as acc:
        path_of("link").hardlink_to(path_of("kept"))
        assert run("remove", "link", "--yes").returncode == 1
        assert ask("remove", "link", "--force", "--yes")["removed"] == [path_of("link").name]
        acc.apply_grad([1, 2])
        with shmacc.attach("kept") as again:
            assert again.num_accumulated() == 1
        acc.unlink()


@needs_root
def test_a_user_who_may_only_read_can_list_show_and_check() -> None:
    with shmacc.SparseConditionalAccumulator("f4", [100, 4], "read", mode=0o640) as acc:
        os.chown(path_of("read"), 0, STRANGER)
        acc.apply_grad([3], np.full((1, 4), 2, "f4"))
        assert run_apart(_read_all, uid=STRANGER) == (1, 4.0, 3, [])
        acc.unlink()


def _read_all() -> tuple[int, float, int, list[str]]:
    (summary,) = inspection.list_segments(namespace=os.environ["SHMACC_NAMESPACE"])
    assert summary.state is SegmentState.SOUND
    seen = inspection.describe("read")
    ((row, _),) = [(row.row, row.count) for row in inspection.most_touched("read", 1)[0]]
    found = inspection.check("read")
    norm = inspection.summarise_values("read").norm
    wrong = [each.kind for each in found if each.severity is Severity.WRONG]
    return seen.stats.num_accumulated, norm, row, wrong


def test_another_threads_operation_is_not_taken_for_a_death() -> None:
    """The kernel does not show a process its own locks."""
    rows = np.arange(300_000), np.ones((300_000, 16), np.float32)
    with shmacc.SparseConditionalAccumulator(np.float32, [300_000, 16], "own") as acc:
        acc.apply_grad(*rows)
        name, ended = inspection.resolve("own"), threading.Event()

        def work() -> None:
            while not ended.is_set():
                acc.apply_grad(*rows, local_step=shmacc.NEVER_STALE)

        worker = threading.Thread(target=work)
        worker.start()
        try:
            for _ in range(100):  # look as `check` does, but not at rows
                looks = _soundness._look(name.system_name, inspection.Look())
                assert list(_soundness._lock(name, looks)) == []
        finally:
            ended.set()
            worker.join()
        acc.unlink()


def test_check_notes_rows_that_it_could_not_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    """The exit status is that of "could not be read"."""
    looks = []

    def problems(view: _core.SegmentView) -> None:
        looks.append(view.state()["generation"])
        time.sleep(1.0)

    monkeypatch.setattr(_index_check, "_problems", problems)
    with shmacc.SparseConditionalAccumulator(np.float32, [2, 2], "busy") as acc:
        acc.apply_grad([1], np.ones((1, 2), np.float32))
        answer = ask("check", "busy", status=4)
        assert (answer["not_compared"], answer["wrong"], answer["notes"]) == (1, 0, 1)
        assert [each["kind"] for each in answer["findings"]] == ["not_compared"]
        assert 1 <= len(looks) <= 3
        acc.unlink()
    shmacc.ConditionalAccumulator(np.float32, [2], "left").close()
    assert run("check").returncode == 1
    inspection.remove("left")


def test_check_needs_less_memory_than_the_segment() -> None:
    """This must hold for any number of rows, even a false number in a damaged segment."""
    number = 500_000
    with shmacc.SparseConditionalAccumulator(np.float32, [number, 1], "large") as acc:
        acc.apply_grad(np.arange(number), np.ones((number, 1), np.float32))
        peak = _peak_of("inspection.check('large')") - _peak_of("inspection.describe('large')")
        assert peak < number * 16 * 1.5
        acc.unlink()


def _peak_of(statement: str) -> int:
    """Return a new process's peak memory in bytes; getrusage would include its parent's."""
    program = (
        "import pathlib, re, numpy\nfrom shmacc import inspection\n"
        f"found = {statement}\nassert found is not None\n"
        "status = pathlib.Path('/proc/self/status').read_text()\n"
        "print(re.search('VmHWM:.*?([0-9]+) kB', status)[1])"
    )
    done = run_to_end([sys.executable, "-P", "-c", program])
    return int(done.stdout) * 1024


ROWS: Final = 100_000
ALL: Final = (np.arange(ROWS), np.ones((ROWS, 4), np.float32))


def _apply(acc: Any, _params: Any) -> Iterator[None]:
    while True:
        acc.apply({"user": (ALL[0][:1000], ALL[1][:1000])}, shmacc.NEVER_STALE)
        yield


def _take(acc: Any, _params: Any) -> Iterator[None]:
    """Take rounds of all rows, one after the other."""
    for step in itertools.count(acc.global_step):
        acc.apply({"user": ALL}, step)
        yield acc.take(1)


def _update(acc: Any, params: Any) -> Iterator[None]:
    """Make rounds that add rows and remove old ones, so that places are reused all the time."""
    for step in itertools.count(acc.global_step):
        ids = np.arange(step * 1000, ROWS + (step + 1) * 1000)
        acc.apply({"user": (ids[::7], np.ones((ids[::7].size, 4), np.float32))}, step)
        with acc.round(1) as taken:
            yield params.update(taken, remove={"user": ids[:1000]})


def _without_end(work: Any, *, pipe: Pipe) -> None:
    with shmacc.attach("busy") as acc, shmacc.Parameters.attach("busy.params") as params:
        for times, _ in enumerate(work(acc, params)):
            if times == 1:
                pipe.say()


@pytest.mark.parametrize(
    ("work", "damaged"), [(_apply, "busy"), (_take, "busy.params"), (_update, "busy.params")]
)
def test_check_finds_the_damage_of_a_busy_segment(crew: Crew, work: Any, damaged: str) -> None:
    contents = {"user": shmacc.TableSpec((4,))}
    with training(contents, optim.SGD(0.1), ("busy.params", "busy")) as (params, acc):
        acc.apply({"user": ALL}, 0)
        with acc.round(1) as taken:
            params.update(taken)
        acc.apply({"user": ALL}, 1)
        process = crew.start(_without_end, work)
        process.hear()
        for _ in range(3):
            found = inspection.check_all(namespace=os.environ["SHMACC_NAMESPACE"])
            kinds = {each.kind for each in found}
            assert not kinds & {"not_compared", "inconsistent"}, found
        # A fault is found however busy the segment is.
        for number in (0, 1):
            index = layout.region(f"index {number}")
            scribble(path_of(damaged), index + 64 * 100, b"\0" * 64 * 100)
        assert "inconsistent" in wrong_kinds(damaged)
        process.kill()
        acc.unlink()
        params.unlink()


def test_an_open_round_is_shown_with_its_process() -> None:
    with shmacc.ConditionalAccumulator("f4", [2], "there") as acc:
        acc.apply_grad([1.0, 2.0])
        with acc.round(1):
            seen, own = inspection.describe("there").stats, acc.stats()
            assert (seen.round_pid, seen.round_since) == (os.getpid(), own.round_since)
        acc.unlink()


def test_parameters_are_described_without_shmacc_optim(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {"w": np.zeros(2, np.float32)}
    with shmacc.Parameters(made, "there", optimizer=shmacc.optim.Adam(0.1)) as params:
        monkeypatch.setitem(sys.modules, "shmacc.optim", None)
        (member,) = inspection.describe("there").members
        assert (member.name, member.optimizer, member.slots) == ("w", None, ())
        params.unlink()


def test_remove_and_cancel_raise_errors_for_missing_and_used_segments() -> None:
    for verb in (inspection.remove, inspection.cancel):
        with pytest.raises(errors.NotFoundError):
            verb("nothing", rehearse=True)
    with shmacc.ConditionalAccumulator("f4", [2], "there") as acc:
        with pytest.raises(errors.FailedPreconditionError, match="in use") as caught:
            inspection.remove("there", rehearse=True)
        assert pickle.loads(pickle.dumps(caught.value)).pids == (os.getpid(),)
        assert len(inspection.remove("there", rehearse=True, force=True)) == 2
        acc.unlink()
