"""The demo job: exact, unharmed by deaths, and gone without a trace when it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest
from typer.testing import CliRunner

from shmacc import testing
from shmacc_demo import corpus as text
from shmacc_demo import plot
from shmacc_demo.batches import Recipe, Sampler
from shmacc_demo.chief import Chief
from shmacc_demo.main import INTERRUPTED, app
from shmacc_demo.model import FIGURES, Parameters, gradient
from shmacc_demo.plan import Plan
from shmacc_demo.sequential import Sequential

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from shmacc_demo.corpus import Corpus
    from shmacc_demo.ledger import Ledger
    from shmacc_demo.plan import Outcome

DEMO = Path(__file__).parent.parent / "tools" / "demo.py"
LONG = 60.0
SMALL = Recipe(spans=4, span=32, draws=32)
TABLES = ("inputs", "outputs", "bias")


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return text.read(None)


def train(
    run: Chief | Sequential, each_step: Callable[[int], None] = lambda _: None
) -> tuple[Outcome, list[float]]:
    losses = []
    with run:
        for progress in run.train():
            losses.append(progress.loss)
            each_step(progress.step)
        return run.outcome(), losses


def books(outcome: Outcome) -> Ledger:
    assert outcome.ledger is not None
    assert outcome.ledger.balanced, outcome.ledger
    return outcome.ledger


def same_within_rounding(got: Outcome, want: Outcome) -> None:
    for table in TABLES:
        np.testing.assert_allclose(
            getattr(got.parameters, table),
            getattr(want.parameters, table),
            rtol=1e-4,
            atol=1e-5,
            err_msg=table,
        )


def test_a_batch_is_a_function_of_seed_step_and_worker(corpus: Corpus) -> None:
    one, other = (Sampler(corpus.stream, corpus.counts, SMALL) for _ in range(2))
    other.draw(7, 0, 0)  # what was drawn before does not matter
    for numbers in ((7, 3, 1), (7, 3, 2), (7, 4, 1), (8, 3, 1)):
        first, again = one.draw(*numbers), other.draw(*numbers)
        for array in ("centers", "targets", "pairs", "noise"):
            np.testing.assert_array_equal(getattr(first, array), getattr(again, array))
    assert not np.array_equal(one.draw(7, 3, 1).centers, one.draw(7, 3, 2).centers)
    assert not np.array_equal(one.draw(7, 3, 1).centers, one.draw(7, 4, 1).centers)
    assert not np.array_equal(one.draw(7, 3, 1).centers, one.draw(8, 3, 1).centers)


@pytest.mark.parametrize("table", TABLES)
def test_the_gradient_is_the_slope_of_the_loss(corpus: Corpus, table: str) -> None:
    batch = Sampler(corpus.stream, corpus.counts, SMALL).draw(1, 0, 0)
    parameters = Parameters.new(len(corpus.words), 8)
    random = np.random.default_rng(1)
    for name in TABLES:
        values = getattr(parameters, name)
        values[:] = random.normal(0, 0.5, values.shape)
    found = gradient(parameters, batch)
    moved = getattr(parameters, table)
    slopes = np.zeros_like(moved)
    if table == "bias":
        slopes[:] = found.rest[:-FIGURES]
    else:
        rows = getattr(found, table)
        slopes[rows.indices] = rows.values

    direction = random.normal(0, 1, moved.shape).astype(np.float32)
    start, width = moved.copy(), np.float32(1e-2)
    moved[:] = start + width * direction
    ahead = gradient(parameters, batch).rest[-FIGURES]
    moved[:] = start - width * direction
    behind = gradient(parameters, batch).rest[-FIGURES]
    slope = float(ahead - behind) / (2 * float(width))
    assert slope == pytest.approx(float(np.vdot(direction, slopes)), rel=0.02)


def test_processes_come_to_the_parameters_of_one_process(corpus: Corpus) -> None:
    plan = Plan(workers=3, steps=20, recipe=SMALL)
    want, want_losses = train(Sequential(plan, corpus))
    got, got_losses = train(Chief(plan, corpus))
    same_within_rounding(got, want)
    np.testing.assert_allclose(got_losses, want_losses, rtol=1e-4)
    assert [account.taken for account in books(got).accounts] == [60, 60, 60]
    assert books(got).deaths == 0


def test_workers_killed_while_applying_change_nothing(corpus: Corpus) -> None:
    plan = Plan(workers=2, steps=24, kill=True, recipe=Recipe(spans=12, draws=64))
    got, _ = train(Chief(plan, corpus))
    assert books(got).deaths > 0
    assert [account.taken for account in books(got).accounts] == [48, 48, 48]
    same_within_rounding(got, train(Sequential(plan, corpus))[0])


def test_all_workers_killed_at_once_change_nothing(corpus: Corpus) -> None:
    plan = Plan(workers=2, steps=8, recipe=SMALL)
    chief = Chief(plan, corpus)

    def kill_all(step: int) -> None:
        if step == 3:
            for worker in range(plan.workers):
                chief._crew.kill(worker)

    got, _ = train(chief, kill_all)
    assert books(got).deaths == 2
    same_within_rounding(got, train(Sequential(plan, corpus))[0])


def test_backups_let_the_chief_go_on_without_stragglers(corpus: Corpus) -> None:
    plan = Plan(workers=3, backup=1, steps=60, recipe=SMALL)
    got, losses = train(Chief(plan, corpus))
    assert np.mean(losses[-5:]) < losses[0]
    for account in books(got).accounts:
        assert 2 * plan.steps <= account.taken <= 3 * plan.steps


def test_a_worker_that_fails_ends_the_run(corpus: Corpus, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shmacc_demo.chief.PARTS", ("inputs", "no such part"))
    with pytest.raises(RuntimeError, match=r"worker 0 ended with status 1(.|\n)*ValueError"):
        train(Chief(Plan(workers=1, steps=2, recipe=SMALL), corpus))


def workers_of(chief: int) -> list[int]:
    """List the living workers of a chief, whoever their parent is by now."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            command = (folder / "cmdline").read_bytes()
        except OSError:
            continue
        if b"shmacc_demo.worker" in command and f"/proc/{chief}/fd/".encode() in command:
            found.append(int(folder.name))
    return found


@contextmanager
def demo(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    """Start a long demo in a process group of its own, and wait until it has taken a step."""
    with subprocess.Popen(
        [sys.executable, str(DEMO), "--steps", "1000000", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        process_group=0,
    ) as process:
        try:
            assert process.stdout is not None
            lines = []
            for line in process.stdout:
                lines.append(line)
                if line.startswith("step"):
                    break
            else:
                pytest.fail("".join(lines))
            yield process
        finally:
            process.kill()


def until(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + LONG
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_demo_leaves_nothing(namespace: str, number: signal.Signals) -> None:
    with demo("--workers", "2") as process:
        assert len(workers_of(process.pid)) == 2
        if number == signal.SIGINT:  # as the terminal does it: to the whole group
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        output, _ = process.communicate(timeout=LONG)
    assert process.returncode == INTERRUPTED, output
    assert "Interrupted" in output
    assert "Traceback" not in output
    assert workers_of(process.pid) == []
    assert testing.leaked_names(namespace) == ()


def test_workers_whose_chief_is_killed_tidy_up_and_go(namespace: str) -> None:
    with demo("--workers", "2") as process:
        assert len(workers_of(process.pid)) == 2
        process.kill()
        process.communicate(timeout=LONG)
    assert until(lambda: not workers_of(process.pid))
    assert testing.leaked_names(namespace) == ()


def test_a_whole_run_tells_what_it_did(namespace: str, tmp_path: Path) -> None:
    picture = tmp_path / "loss.png"
    arguments = ["--workers", "2", "--steps", "10", "--plot", str(picture), "--word", "class"]
    done = subprocess.run(
        [sys.executable, str(DEMO), *arguments],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for words in ("step 10/10", "words/s", "Loss of a pair", "class", "taken", "books balance"):
        assert words in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert testing.leaked_names(namespace) == ()


def test_it_learns_which_words_keep_company() -> None:
    done = subprocess.run(
        [sys.executable, str(DEMO), "--sequential", "--steps", "150", "--word", "except"],
        capture_output=True,
        text=True,
        timeout=LONG,
        check=True,
    )
    (near,) = (line for line in done.stdout.splitlines() if line.startswith(" except"))
    assert "clause" in near or "try" in near or "exceptiongroup" in near


def test_a_text_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text(
        "one sheep two sheep three sheep and more sheep than one could count all day long " * 40
    )
    done = CliRunner().invoke(
        app, ["--sequential", "--corpus", str(file), "--steps", "3", "--word", "cow"]
    )
    assert done.exit_code == 0, done.output
    assert "not in the text" in done.output


def test_help_names_every_option() -> None:
    done = CliRunner().invoke(app, ["--help"])
    assert done.exit_code == 0
    for option in ("corpus", "workers", "backup", "steps", "kill", "sequential", "plot", "seed"):
        assert f"--{option}" in done.output


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--workers", "0"], "--workers"),
        (["--workers", "3", "--backup", "3"], "at most 2"),
        (["--steps", "0"], "--steps"),
        (["--sequential", "--kill"], "no workers"),
        (["--corpus", "/nonexistent"], "does not exist"),
        (["--corpus", __file__, "--plot", "loss.what"], "must end in"),
        (["--plot", "/nonexistent/loss.png"], "no folder"),
        (["--corpus", os.devnull], "0 different words"),
    ],
)
def test_what_makes_no_sense_is_refused_at_once(arguments: list[str], words: str) -> None:
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 2, done.output
    assert words in " ".join(done.output.replace("│", " ").split())


def test_without_matplotlib_a_picture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    with pytest.raises(plot.PlotError, match="pip install matplotlib"):
        plot.check(Path("loss.png"))
