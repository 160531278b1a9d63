"""A job whose segment was removed under it is wrong, with a metric; an `unlink()` is a note."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.inspect_tool import ask, idle, path_of, run, semaphore_of, start

import shmacc
from shmacc import ConditionalAccumulator, Parameters, SharedArrays, inspection

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from helpers.apart import Crew

NAME: Final = "split"
MAKERS: Final[list[Callable[[], Any]]] = [
    lambda: ConditionalAccumulator(np.float32, [2], NAME),
    lambda: shmacc.AccumulatorGroup({"w": shmacc.TensorSpec((2,))}, NAME),
    lambda: Parameters({"w": np.zeros(2, np.float32)}, NAME),
    lambda: SharedArrays({"w": np.zeros(2, np.float32)}, NAME),
]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """What took the name since is removed, too."""
    yield
    run("clean", "--yes")


def finding(status: int) -> dict[str, Any]:
    """What `check` finds about uses of what has no name."""
    findings: list[dict[str, Any]] = ask("check", status=status)["findings"]
    (found,) = [each for each in findings if each["kind"] == "removed_in_use"]
    return found


def split() -> float:
    """The metric of this name; 0: it has none."""
    metrics = {metric["name"]: metric["samples"] for metric in ask("metrics")["metrics"]}
    of_all = metrics["shmacc_removed_under_users"]
    return sum(float(each["value"]) for each in of_all if each["labels"]["name"] == NAME)


@pytest.mark.parametrize("make", MAKERS)
def test_a_job_that_rm_has_split_is_wrong(make: Callable[[], Any], crew: Crew) -> None:
    with make():
        old = start(crew, idle, NAME)
        semaphore_of(NAME).unlink()
        path_of(NAME).unlink()
        alone = run("check", NAME)  # there is no such name
        assert (alone.returncode, "still use" in alone.stdout) == (1, True)
        with make():
            found = finding(1)
            assert found["severity"] == "wrong"
            assert f"{old.pid}" in found["problem"]
            assert "the job is split" in found["problem"]
            assert "still use" in run("check", "--quiet").stdout
            kinds = [each.kind for each in inspection.check(NAME)]
            assert kinds.count("removed_in_use") == 1
            assert split() == 2


def by_command() -> None:
    assert run("remove", NAME, "--yes", "--force").returncode == 0


@pytest.mark.parametrize("remove", [None, by_command])
@pytest.mark.parametrize("make", MAKERS)
def test_what_was_removed_on_purpose_is_a_note(
    make: Callable[[], Any], remove: Callable[[], None] | None
) -> None:
    with make() as made:
        (remove or made.unlink)()
        assert finding(0)["severity"] == "note"
        assert split() == 0
        assert run("check", NAME).returncode == 3
