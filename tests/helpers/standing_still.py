"""Processes of a job that stands still, and checks that every verb shows the cause."""

import contextlib
import signal
from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest
from helpers import support
from helpers.apart import Apart, Crew
from helpers.inspect_tool import ask, run, start

import shmacc
from shmacc import errors, inspection
from shmacc.inspection import Severity, StallKind, _stall_facts

NAME: Final = "still"

# -- what a process does with the accumulator that it has attached --------------------------------


def begin(crew: Crew, *deeds: Callable[[Any], Any], name: str = NAME) -> Apart:
    """Start a process that attaches, calls each deed and leaves; return once it is attached."""
    return start(crew, do, name, *deeds)


def once(crew: Crew, *deeds: Callable[[Any], Any], name: str = NAME) -> None:
    """Run a process that attaches, calls each deed and leaves."""
    crew.start(do, name, *deeds).result()


def do(name: str, *deeds: Callable[[Any], Any]) -> None:
    """Attach, call each deed with the accumulator, in order, and leave."""
    with shmacc.attach(name) as acc:
        for deed in deeds:
            deed(acc)


def pause(_: Any) -> None:
    signal.pause()


def apply(acc: Any, step: int = shmacc.NEVER_STALE) -> bool:
    """Apply a gradient of ones to an accumulator of any kind."""
    if isinstance(acc, shmacc.AccumulatorGroup):
        return acc.apply({"w": np.ones(2, np.float32)}, step)
    if isinstance(acc, shmacc.SparseConditionalAccumulator):
        return acc.apply_grad([1], np.ones((1, 16), np.float32), local_step=step)
    return bool(acc.apply_grad(np.ones(acc.shape, np.float32), step))


def work(acc: Any) -> None:
    """Act as a worker of a synchronous job for one round."""
    step = acc.global_step
    apply(acc, step)
    acc.wait_step(step)


def take(number: int) -> Callable[[Any], Any]:
    """Return a function that takes `number` gradients, or returns if the take is cancelled."""

    def deed(acc: Any) -> None:
        with contextlib.suppress(errors.CancelledError):
            acc.take(number)

    return deed


def wait_for_ever(acc: Any) -> None:
    """Wait for a step that never comes."""
    acc.wait_step(10**6)


def hold_a_round(acc: Any) -> None:
    """Open a round, and stay in its block for ever."""
    with acc.round(1):
        signal.pause()


# -- checks of what is reported -------------------------------------------------------------------


def patience(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set how many seconds a standstill must have lasted before it is reported."""
    for name in ("AFTER_TAKES", "AT_THE_START", "AFTER_GRADIENTS", "AFTER_A_DEATH"):
        monkeypatch.setattr(_stall_facts, name, seconds)


@pytest.fixture
def impatience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let every standstill be reported at once."""
    patience(monkeypatch, 0.0)


impatient = pytest.mark.usefixtures("impatience")


def doing(activity: str) -> int:
    """Return how many living processes have this activity."""
    processes = inspection.describe(NAME).processes
    return sum(each.alive and each.activity == activity for each in processes)


def stop(child: Any) -> int:
    """Stop a child; return its pid."""
    pid: int = child.pid
    support.stop(pid)
    return pid


def kill(child: Any) -> int:
    """Kill a child; return the pid that it had."""
    pid: int = child.pid
    child.kill()
    return pid


def kinds() -> list[StallKind]:
    """Return the kinds of the segment's stalls."""
    return [stall.kind for stall in inspection.describe(NAME).summary.stalls]


def named(kind: StallKind) -> None:
    """Wait until this is the segment's only stall."""
    support.until(lambda: kinds() == [kind])


def problem() -> str:
    """Return the only stall's cause, in words."""
    (stall,) = inspection.describe(NAME).summary.stalls
    return stall.problem


def seen_in_every_verb(kind: StallKind, command: str | None) -> None:
    """Check that the library and all verbs of the command show this cause, and the remedy."""
    seen(kind, command)
    (listed,) = ask("list", NAME)["segments"]
    assert [stall["kind"] for stall in listed["stalls"]] == [kind]
    assert listed["stalls"][0]["command"] == command
    table = [line.split() for line in run("list", NAME).stdout.splitlines()]
    assert kind in table[1]
    found = [f for f in ask("check", NAME, status=1)["findings"] if f["severity"] == "wrong"]
    assert [(f["kind"], f["command"]) for f in found] == [(kind, command)]
    assert found[0]["problem"] in run("check", NAME).stdout
    if command is not None:
        assert f"do: {found[0]['remedy']}: {command}\n" in run("check", NAME).stdout
    shown = run("show", NAME).stdout
    assert "stands still" in shown
    assert found[0]["problem"] in shown
    assert f"stall={kind}" in run("watch", NAME, "--interval", "0.1", "--count", "1").stdout
    samples = {
        (sample["name"], sample["labels"].get("kind")): sample["value"]
        for metric in ask("metrics")["metrics"]
        for sample in metric["samples"]
    }
    assert samples["shmacc_stalled", None] == 1
    assert samples["shmacc_stall", kind] == 1


def seen(kind: StallKind, command: str | None) -> None:
    """Check that the library reports this cause, and the remedy."""
    (stall,) = inspection.describe(NAME).summary.stalls
    assert (stall.kind, stall.command) == (kind, command)
    found = [each for each in inspection.check(NAME) if each.severity is Severity.WRONG]
    assert [(each.kind, each.problem) for each in found] == [(kind, stall.problem)]
