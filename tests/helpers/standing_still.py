"""A segment that stands still, and checks that every verb shows the cause."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from helpers import support
from helpers.inspect_tool import ask, run

import shmacc
from shmacc import SparseConditionalAccumulator, inspection
from shmacc.inspection import Severity, StallKind

NAME: Final = "still"


def stop(child: Any) -> int:
    """Stop a child; its pid."""
    pid: int = child.pid
    support.stop(pid)
    return pid


def kill(child: Any) -> int:
    """Kill a child; the pid that it had."""
    pid: int = child.pid
    child.kill()
    return pid


def kinds() -> list[StallKind]:
    """Return the kinds of the segment's stalls."""
    return [stall.kind for stall in inspection.describe(NAME).summary.stalls]


def problem() -> str:
    """Return the only stall's cause, in words."""
    (stall,) = inspection.describe(NAME).summary.stalls
    return stall.problem


def seen_in_every_verb(kind: StallKind, command: str | None) -> None:
    """Check that all verbs show this cause, and the remedy."""
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


def apply_and_wait_for_the_step(name: str) -> None:
    """Act as a worker of a synchronous job."""
    with shmacc.attach(name) as acc:
        assert isinstance(acc, SparseConditionalAccumulator)
        acc.apply_grad([1], np.ones((1, 16), np.float32))
        acc.wait_step(0)


def apply_one(name: str) -> None:
    """Apply a gradient, and leave in order."""
    with shmacc.attach(name) as acc:
        assert isinstance(acc, SparseConditionalAccumulator)
        acc.apply_grad([1], np.ones((1, 16), np.float32), local_step=shmacc.NEVER_STALE)
