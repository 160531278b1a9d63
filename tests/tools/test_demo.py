"""The demo's result is exact, even after kills, and the demo leaves nothing when it ends."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from helpers.support import LONG, run_to_end, until

import demo
from shmacc import inspection, testing
from shmacc_demo import model
from shmacc_demo.model import TABLES, Arrays, Batches, Plan
from shmacc_demo.training import train

TOOLS = Path(__file__).parents[2] / "tools" / "demo"
INTERRUPTED = 128 + signal.SIGINT


@pytest.fixture(scope="module")
def text() -> Arrays:
    return model.read(None)[1]


def run(*arguments: str) -> str:
    done = run_to_end([sys.executable, str(TOOLS / "demo.py"), *arguments], timeout=100)
    assert done.stderr == ""
    assert "books balance" in done.stdout
    return done.stdout


def number_of(what: str, output: str) -> int:
    return int(output.partition(f" {what}")[0].split()[-1].replace(",", ""))


def test_a_gradient_depends_only_on_seed_step_worker_and_state(text: Arrays) -> None:
    state = model.start(len(text["counts"]), Plan())
    one, other, another = (Batches(text, Plan(seed=seed)) for seed in (7, 7, 8))
    other.gradient(state, 0, 0)  # what was drawn before does not matter
    wanted = one.gradient(state, 3, 1)
    same = other.gradient(state, 3, 1)
    for table in TABLES:
        for mine, its in zip(wanted[table], same[table], strict=True):
            np.testing.assert_array_equal(mine, its)
    for batches, step, worker in ((one, 3, 2), (one, 4, 1), (another, 3, 1)):
        its = batches.gradient(state, step, worker)
        assert not np.array_equal(wanted["inputs"][0], its["inputs"][0])


@pytest.mark.parametrize("table", TABLES)
def test_the_gradient_along_a_direction_is_the_slope_of_the_loss(text: Arrays, table: str) -> None:
    plan = Plan(width=8, spans=4, span=32, draws=32)
    batches, state = Batches(text, plan), model.start(len(text["counts"]), plan)
    random = np.random.default_rng(1)
    for values in state.values():
        values[:] = random.normal(0, 0.5, values.shape)
    moved = state[table]
    rows, values = batches.gradient(state, 0, 0)[table]
    slopes = np.zeros_like(moved)
    slopes[rows] = values

    direction = random.normal(0, 1, moved.shape)
    start, width = moved.copy(), 1e-2
    moved[:] = start + width * direction
    ahead = batches.gradient(state, 0, 0)["figures"][0]
    moved[:] = start - width * direction
    behind = batches.gradient(state, 0, 0)["figures"][0]
    slope = float(ahead - behind) / (2 * width)
    assert slope == pytest.approx(float(np.vdot(direction, slopes)), rel=0.02)


def test_killed_workers_change_no_parameter() -> None:
    output = run("--workers", "2", "--steps", "12", "--check", "--kill", "--word", "class")
    assert "the same vectors, to the bit" in output
    assert number_of("taken", output) == 24
    for words in ("words of text", " s: ", "loss ", "  class: ", "24 gradients accepted"):
        assert words in output


def test_killed_chiefs_change_no_parameter() -> None:
    # With fewer steps, the run might end before a chief is killed within a round.
    output = run("--workers", "1", "--steps", "40", "--kill-chief", "--check")
    assert "the same vectors, to the bit" in output
    assert number_of("rounds handed out again", output) > 0
    assert number_of("taken", output) == 40


def test_backups_let_the_chief_go_on_without_stragglers(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text(
        "one sheep two sheep three sheep and more sheep than one could count all day long " * 40
    )
    more = ("--corpus", str(file), "--word", "cow", "--kill", "--kill-chief")
    output = run("--workers", "3", "--backup", "1", "--steps", "16", *more)
    assert 32 <= number_of("taken", output) <= 48
    assert "not in the text" in output


def test_a_worker_that_fails_ends_the_run(text: Arrays) -> None:
    longer_than_the_text = Plan(workers=1, steps=2, span=10**7)
    with pytest.raises(ValueError, match="In worker 0"):
        train(longer_than_the_text, text, demo.show)


@contextmanager
def long_demo(namespace: str) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    """Start a demo in its own process group; yield it, and the pids attached after some steps."""
    with subprocess.Popen(
        [sys.executable, str(TOOLS / "demo.py"), "--steps", "1000000", "--workers", "2"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    ) as process:
        try:
            until(lambda: any(name.endswith(":group") for name in testing.leaked_names(namespace)))
            (name,) = {
                name
                for name in testing.leaked_names(namespace)
                if name.startswith("shmacc.") and name.endswith(":group")
            }
            until(lambda: inspection.describe(name).stats.global_step >= 2)
            everybody = inspection.describe(name).processes
            attached = {one.pid for one in everybody}
            assert len(attached) == 3
            yield process, sorted(attached)
        finally:
            process.kill()


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if Path(f"/proc/{pid}/exe").exists()]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(namespace: str, number: signal.Signals) -> None:
    with long_demo(namespace) as (process, others):
        if number == signal.SIGINT:  # as the terminal does it: to the whole group
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        output, _ = process.communicate(timeout=LONG)
    assert process.returncode == INTERRUPTED, output
    assert "Interrupted" in output
    assert "Traceback" not in output
    assert living(others) == []
    assert testing.leaked_names(namespace) == ()


def test_processes_whose_parent_is_killed_clean_up_and_end(namespace: str) -> None:
    with long_demo(namespace) as (process, others):
        process.kill()
        process.communicate(timeout=LONG)
    until(lambda: not living(others) and not testing.leaked_names(namespace))


def test_the_demo_learns_which_words_occur_together() -> None:
    output = run("--workers", "1", "--steps", "150", "--word", "except")
    (near,) = re.findall(r"except: (.*)", output)
    assert {"clause", "try", "exceptiongroup"} & set(near.split(", "))


@pytest.mark.parametrize(("arguments", "words"), [
    (["--workers", "0"], "more workers than backups"),
    (["--workers", "3", "--backup", "3"], "more workers than backups"),
    (["--steps", "0"], "a step"),
    (["--check", "--backup", "1"], "--check is impossible"),
    (["--corpus", "/nonexistent"], "No such file"), (["--corpus", os.devnull], "0 words"),
])  # fmt: skip
def test_bad_arguments_are_refused_at_once(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main(arguments)
    assert words in capsys.readouterr().err
