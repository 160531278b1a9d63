"""`shmacc-inspect` on damaged segments, stopped or killed processes, and other versions."""

import math
import os
import signal
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from helpers import inspect_tool
from helpers import segment_layout as layout
from helpers.apart import Crew, run_apart
from helpers.damage import SetField
from helpers.inspect_tool import ask, path_of, run, scribble, start
from helpers.segment_file import SegmentFile
from helpers.support import until

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors, inspection


@pytest.fixture
def table() -> Iterator[SparseConditionalAccumulator]:
    with SparseConditionalAccumulator(np.float32, [200_000, 16], "table") as acc:
        acc.apply_grad(np.arange(100), np.ones((100, 16), np.float32))
        yield acc
        path_of("table").unlink(missing_ok=True)
        for semaphore in path_of("table").parent.glob(f"sem.{path_of('table').name}.*"):
            semaphore.unlink()


def problems(name: str) -> str:
    findings = ask("check", name, status=1)["findings"]
    return "; ".join(f["problem"] for f in findings if f["severity"] == "wrong")


def test_rows_missing_from_the_index_are_reported(table: SparseConditionalAccumulator) -> None:
    assert ask("check", "table")["findings"] == []
    for name in ("index 0", "index 1"):
        used = {r.name: r.used for r in inspection.describe("table").regions}
        if used[name]:
            scribble(path_of("table"), layout.region(name), bytes(64))
    assert "cannot be found through the index" in problems("table")
    assert table.num_accumulated() == 1


def test_overwritten_rows_are_reported(table: SparseConditionalAccumulator) -> None:
    scribble(path_of("table"), layout.region("slots"), np.array([7, 99], np.int64).tobytes())
    found = problems("table")
    assert "stands in the table twice" in found
    assert "count is not between 1 and its gradients' weight, 1" in found
    assert table.num_accumulated() == 1


def test_an_overwritten_state_is_reported(table: SparseConditionalAccumulator) -> None:
    # Change the number of rows in use, in both copies of the state.
    rows, more = np.int64(100).tobytes(), np.int64(101).tobytes()
    start = layout.region("states")
    with path_of("table").open("rb") as file:
        states = os.pread(file.fileno(), 4096, start)
    scribble(path_of("table"), start, states.replace(rows, more))
    assert ask("list", "table")["segments"][0]["state"] == "damaged"
    shown = ask("show", "table", status=1)
    assert "checksum" in shown["error"]
    assert shown["summary"]["owner_uid"] == os.getuid()
    assert "checksum" in problems("table")
    left = ask("clean")["left"]
    assert path_of("table").name in [leftover["file_name"] for leftover in left]
    assert run("remove", "table", "--yes").returncode == 1
    assert len(ask("remove", "table", "--yes", "--force")["removed"]) == 2
    del table


def _count_a_taken_one_twice(path: str) -> None:
    with SegmentFile(path) as file:
        SetField("round", "taken", 1, relative=True).do(file, file)


def test_a_gradient_taken_twice_is_reported(table: SparseConditionalAccumulator) -> None:
    table.take_grad(1)
    run_apart(_count_a_taken_one_twice, str(path_of("table")))
    found = "1 gradients were applied, but 2 taken, 0 discarded and 0 are there"
    assert found in problems("table")


def test_a_directory_is_neither_removed_nor_reported_as_removed() -> None:
    ConditionalAccumulator(np.float32, [2], "folder").close()
    semaphore = inspect_tool.semaphore_of("folder")
    path_of("folder").unlink()
    path_of("folder").mkdir()
    for options in (), ("--force",), ("--force", "--yes"):
        done = run("remove", "folder", *options)
        assert (done.returncode, done.stdout) == (1, "")
    assert "is a directory, which shmacc does not remove" in done.stderr
    assert semaphore.exists()
    path_of("folder").rmdir()
    assert run("clean", "--yes", "folder").returncode == 0


def _give_no_learning_rate(path: str, rate: float) -> None:
    with SegmentFile(path) as file:
        config = file.record_at(layout.Config, 0)
        place = file.table.region("directory")
        old, new = (struct.pack("<d", number) for number in (rate, math.nan))
        directory = file.read(place, config.directory_bytes).replace(old, new)
        file.write(place, directory)
        config.directory_checksum = layout.mix_words(directory)
        config.checksum = layout.checksum_of(config)
        file.write(0, bytes(config))


def test_numbers_out_of_range_with_a_valid_checksum_are_reported() -> None:
    """A forged file must not break looks at other segments."""
    rate = 0.372
    with shmacc.Parameters({"w": np.ones(2)}, "forged", optimizer=shmacc.optim.SGD(rate)):
        pass
    ConditionalAccumulator(np.float32, [2], "sound").close()
    run_apart(_give_no_learning_rate, str(path_of("forged")), rate)
    listed = {segment["name"]: segment["state"] for segment in ask("list")["segments"]}
    assert listed == {"forged": "damaged", "sound": "orphaned"}
    assert "learning_rate must be a finite number" in problems("forged")
    assert len(ask("clean")["would_remove"]) == 1
    for verb in ("show forged", "metrics --json", "watch --count 1 --interval 0.1"):
        assert run(*verb.split()).returncode == verb.startswith("show")
    assert run("remove", "forged", "--force", "--yes").returncode == 0
    with shmacc.attach("sound") as sound:
        sound.unlink()


def test_a_stop_in_an_apply_is_reported(table: SparseConditionalAccumulator, crew: Crew) -> None:
    taker = start(crew, inspect_tool.wait_in_queue, "table", 10**9)
    until(lambda: table.stats().waiting == 1)
    with inspect_tool.stopped_with_the_lock(crew, "table") as pid:
        # No verb may wait for the lock: it would wait until the end of the test.
        shown = ask("show", "table", "--rows", "1", "--values")
        assert (shown["lock"]["held"], shown["lock"]["pid"]) == (True, pid)
        assert shown["lock"]["condition"] == "stopped"
        assert "without the lock" in run("show", "table").stdout
        [line] = run("watch", "table", "--count", "1", "--interval", "0.1").stdout.splitlines()
        assert f"lock={pid}" in line
        assert 'name="table"' in run("metrics").stdout
        assert ask("cancel", "table", "--yes")["cancelled"] == 1
        assert taker.result() is None
        assert ask("clean")["would_remove"] == []
    # The process was killed in an operation. The next operation undoes it.
    notes = [finding["problem"] for finding in ask("check", "table")["findings"]]
    assert any("interrupted by the death" in note for note in notes)
    assert table.apply_grad([1], np.ones((1, 16), np.float32), local_step=2**40)
    assert ask("check", "table")["wrong"] == 0


def test_a_bad_or_missing_semaphore_is_reported(table: SparseConditionalAccumulator) -> None:
    semaphore = inspect_tool.semaphore_of("table")
    semaphore.write_bytes(b"")
    assert "not a semaphore" in problems("table")
    assert ask("show", "table")["lock"]["tokens"] is None
    semaphore.unlink()
    said = ask("check", "table")
    assert ("missing" in said["findings"][0]["problem"], said["wrong"]) == (True, 0)
    assert table.num_accumulated() == 1


def test_a_private_segment_whose_creator_was_killed_is_reported(crew: Crew) -> None:
    ConditionalAccumulator(np.float32, [2], "named").close()
    child = crew.start(_make_private)
    until(lambda: sorted(s["attached_alive"] for s in ask("list")["segments"]) == [0, 1])
    assert ask("clean", "--private")["would_remove"] == []
    child.kill()
    said = {s["private"]: s for s in ask("list", "--orphaned")["segments"]}
    assert (said[True]["attached_alive"], said[True]["attached_dead"]) == (0, 1)
    (would,) = ask("clean", "--private")["would_remove"]
    assert would["private"]
    done = ask("clean", "--private", "--yes")
    assert len(done["removed"]) == 2
    assert done["bytes_freed"] == would["bytes_reserved"] > 0
    assert "KiB)" in run("clean", "--yes").stderr
    assert not path_of("named").exists()


def _make_private() -> None:
    with ConditionalAccumulator(np.float32, [2]):
        signal.pause()


ADDED_UP = ("count", "weight", "applied", "dropped", "applied_bytes")


def _forge(path: str) -> None:
    with SegmentFile(path) as file:
        for lane in range(2):
            file.look_at(lane, 0)
            for field in ADDED_UP:
                SetField("lane", field, (1 << 63) - 1).do(file, file)


def test_inspection_and_handle_report_the_same_sums_over_lanes() -> None:
    with ConditionalAccumulator("f4", (), "lanes", lanes=2) as acc:
        for contributor in range(2):
            acc.apply_grad(1.0, contributor=contributor)
        run_apart(_forge, str(path_of("lanes")))
        assert inspection.describe("lanes").stats == acc.stats()
        (listed,) = ask("list", "lanes")["segments"]
        shown = ask("show", "lanes")["summary"]
        assert listed["num_accumulated"] == shown["num_accumulated"] == acc.num_accumulated()
        acc.unlink()


def _interrupt(path: str) -> None:
    with SegmentFile(path) as file:
        file.look_at(1, 0)
        generation = file.record("lane_generation").word
        SetField("journal", "generation", generation + 1, number=0).do(file, file)


def test_an_operation_interrupted_in_a_later_lane_is_reported() -> None:
    with ConditionalAccumulator("f4", (), "lanes", lanes=2) as acc:
        assert not inspection.describe("lanes").lock.in_operation
        run_apart(_interrupt, str(path_of("lanes")))
        assert inspection.describe("lanes").lock.in_operation
        assert [each.kind for each in inspection.check("lanes")] == ["operation_interrupted"]
        acc.unlink()


# -- other versions -------------------------------------------------------------------------------


@pytest.fixture
def old() -> Iterator[Path]:
    path = path_of("old")
    path.write_bytes(layout.header_of_version(1))
    os.truncate(path, layout.FILE_SIZE)
    yield path
    path.unlink(missing_ok=True)


def test_a_segment_of_version_1_is_reported(old: Path) -> None:
    words = f"layout version 1; this one reads version {layout.VERSION}"
    (listed,) = ask("list", "old")["segments"]
    assert listed["state"] == "other version"
    assert words in listed["detail"]
    assert words in problems("old")
    assert words in ask("show", "old", status=1)["error"]
    refused = run("remove", "old", "--yes")
    assert refused.returncode == 1
    assert words in refused.stderr
    (left,) = ask("clean", "old")["left"]
    assert words in left["why"]
    assert ask("remove", "old", "--yes", "--force")["removed"] == [old.name]
    assert not old.exists()


def hold_open(path: str, read: int) -> None:
    assert os.open(path, os.O_RDONLY)
    os.close(read)
    signal.pause()


def test_users_of_a_segment_of_another_version_are_named(crew: Crew, old: Path) -> None:
    waiting, theirs = os.pipe()
    user = crew.start(hold_open, str(old), theirs)
    os.close(theirs)
    assert os.read(waiting, 1) == b"", "it has opened the file"
    os.close(waiting)
    who = f"pid {user.pid} has it open"
    (listed,) = ask("list", "old")["segments"]
    assert who in listed["detail"]
    findings = ask("check", "old", status=1)["findings"]
    (found,) = [one for one in findings if one["severity"] == "wrong"]
    assert who in found["problem"]
    remedy = f"shmacc-inspect remove {old.name} --force --yes"
    assert found["remedy"].endswith(f"end its users, then remove it: `{remedy}`")
    assert who in run("remove", "old").stderr
    user.kill()
    assert "has it open" not in ask("list", "old")["segments"][0]["detail"]


def test_the_refusal_of_another_version_says_what_to_do(old: Path) -> None:
    with pytest.raises(errors.DataLossError) as refused:
        ConditionalAccumulator(np.float32, [2], "old")
    said = str(refused.value)
    assert "an older version of shmacc" in said
    assert "another name or namespace (SHMACC_NAMESPACE)" in said
    assert f"shmacc-inspect remove {old.name} --force --yes" in said
    assert (refused.value.version, refused.value.segment) == (1, old.name)
    inspect_tool.other_version(old)
    with pytest.raises(errors.DataLossError, match="a newer version of shmacc"):
        ConditionalAccumulator(np.float32, [2], "old")
