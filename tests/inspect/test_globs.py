"""A glob means what the verb is for, and what is still there; and all is judged before anything."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

import numpy as np
import pytest
from helpers import inspect_tool
from helpers.apart import Apart, forks, needs_root
from helpers.inspect_tool import WITHOUT_ROOTS_POWERS, ask, path_of, run, start
from helpers.support import until

from shmacc import ConditionalAccumulator, SharedArrays, SparseConditionalAccumulator

if TYPE_CHECKING:
    from collections.abc import Iterator

    from helpers.apart import Crew, Pipe

STRANGER = 61004


@pytest.fixture
def job() -> Iterator[ConditionalAccumulator]:
    """Shared arrays between two accumulators, by name."""
    with (
        ConditionalAccumulator(np.float32, [2], "job.a") as first,
        SharedArrays({"w": np.zeros(3)}, "job.b") as arrays,
        SparseConditionalAccumulator(np.float32, [9, 2], "job.c") as last,
    ):
        yield first
        for each in (first, arrays, last):
            each.unlink()


def test_cancel_of_a_glob_skips_shared_arrays(job: ConditionalAccumulator, crew: Crew) -> None:
    takers = [start(crew, inspect_tool.wait_in_line, name, 5) for name in ("job.a", "job.c")]
    until(lambda: job.stats().waiting == 1)
    until(lambda: ask("show", "job.c")["line"] != [])
    done = run("cancel", "job.*", "--yes")
    assert (done.returncode, done.stdout.count("cancelled the take")) == (0, 2), done.stderr
    for taker in takers:
        taker.result()
    refused = run("cancel", "job.b*", "--yes")
    assert refused.returncode == 3
    assert "is of a kind that this is for" in refused.stderr


def test_cancel_judges_all_before_it_cancels_one(job: ConditionalAccumulator, crew: Crew) -> None:
    taker = start(crew, inspect_tool.wait_in_line, "job.a", 5)
    until(lambda: job.stats().waiting == 1)
    assert run("cancel", "job.a", "job.b", "--yes").returncode == 2
    assert job.stats().waiting == 1
    job.cancel()
    taker.result()


def test_wait_for_a_glob_skips_shared_arrays(job: ConditionalAccumulator) -> None:
    job.set_global_step(1)
    done = run("wait", "job.[ab]", "--for", "step=1", "--timeout", "5")
    assert done.returncode == 0, done.stderr
    assert run("wait", "job.b", "--for", "step=1").returncode == 2


def test_show_of_a_glob_skips_what_has_no_rows_or_sums(job: ConditionalAccumulator) -> None:
    for options, names in ((["--rows", "3"], ["job.c"]), (["--values"], ["job.a", "job.c"])):
        done = run("show", "job.*", *options)
        assert done.returncode == 0, done.stderr
        shown = [line.split()[1] for line in done.stdout.splitlines() if line.startswith("name ")]
        assert shown == names
        assert run("show", "job.c", "job.b", *options).stdout == ""
    assert job.stats().attached == 1


def _come_and_go(*, pipe: Pipe) -> None:
    pipe.say()
    while not pipe.poll():
        for i in range(20):
            with ConditionalAccumulator("f4", [4], f"churn-{i}") as made:
                made.unlink()


@forks
def test_what_a_glob_found_and_lost_is_skipped() -> None:
    with ConditionalAccumulator("f4", [4], "churn-stays") as acc, Apart(_come_and_go) as churn:
        churn.hear()
        for verb in ("show", "cancel", "remove", "list"):
            for _ in range(5):
                done = run(verb, "churn-*", *(["--force"] if verb == "remove" else []))
                assert done.returncode == 0, (verb, done.stderr)
        churn.say()
        churn.result()
        acc.unlink()


def test_a_name_that_is_not_there_is_not_clean(job: ConditionalAccumulator) -> None:
    typo = run("clean", "job.d", "--yes")
    assert (typo.returncode, typo.stdout) == (3, "")
    assert "There is no segment named 'job.d'; there is job." in typo.stderr
    assert run("clean", "nothing*").returncode == 0
    used = run("clean", "job.a", "--yes")
    assert (used.returncode, used.stdout) == (0, "")
    assert "job.a is in use, and stays" in used.stderr
    assert job.stats().attached == 1


def test_what_could_not_be_read_is_not_checked(job: ConditionalAccumulator) -> None:
    ConditionalAccumulator("f4", [4], "old").close()
    inspect_tool.other_version(path_of("old"))
    said = ask("check", status=1)
    assert (said["checked"], said["not_checked"]) == (3, 1)
    assert "1 could not be read: not checked" in run("check").stderr
    (listed,) = ask("list", "old")["segments"]
    assert (listed["created"], listed["age_seconds"]) == (None, None)
    assert "made          unknown" in run("show", "old").stdout
    assert len(ask("remove", "old", "--force", "--yes")["removed"]) == 2
    assert job.stats().attached == 1


@needs_root
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_a_strangers_segment_is_not_checked(crew: Crew) -> None:
    crew.start(inspect_tool.make_as, STRANGER, "theirs").result()
    checked = run("check", before=WITHOUT_ROOTS_POWERS)
    assert checked.returncode == 1
    assert "0 segments checked: nothing wrong, 1 note; 1 could not be read: not checked" in (
        checked.stderr
    )
    assert len(ask("clean", "--yes")["removed"]) == 2
