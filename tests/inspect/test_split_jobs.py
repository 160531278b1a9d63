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
    from contextlib import AbstractContextManager

    from helpers.apart import Crew

NAME: Final = "split"


def accumulator(**how: Any) -> AbstractContextManager[Any]:
    return ConditionalAccumulator(np.float32, [2], NAME, **how)


def group(**how: Any) -> AbstractContextManager[Any]:
    return shmacc.AccumulatorGroup({"w": shmacc.TensorSpec((2,))}, NAME, **how)


def parameters(**how: Any) -> AbstractContextManager[Any]:
    return Parameters({"w": np.zeros(2, np.float32)}, NAME, **how)


def arrays(**how: Any) -> AbstractContextManager[Any]:
    return SharedArrays({"w": np.zeros(2, np.float32)}, NAME, **how)


every_kind = pytest.mark.parametrize("make", [accumulator, group, parameters, arrays])


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """What took the name since is removed, too."""
    yield
    run("clean", "--yes")


def findings() -> list[dict[str, Any]]:
    """What `check` finds about uses of what has no name."""
    found: list[dict[str, Any]] = []
    for status in (0, 1):
        done = run("check", "--json")
        if done.returncode == status:
            found = [
                each
                for each in ask("check", status=status)["findings"]
                if each["kind"] == "removed_in_use"
            ]
    return found


def split() -> float:
    """The metric of this name; 0: it has none."""
    metrics = {metric["name"]: metric["samples"] for metric in ask("metrics")["metrics"]}
    of_name: list[float] = [
        each["value"]
        for each in metrics["shmacc_removed_under_users"]
        if each["labels"]["name"] == NAME
    ]
    return sum(of_name)


@every_kind
def test_a_job_that_rm_has_split_is_wrong(
    make: Callable[..., AbstractContextManager[Any]], crew: Crew
) -> None:
    with make():
        old = start(crew, idle, NAME)
        semaphore_of(NAME).unlink()
        path_of(NAME).unlink()
        alone = run("check", NAME)  # there is no such name
        assert alone.returncode == 1
        assert "still use" in alone.stdout
        with make():
            (found,) = findings()
            assert found["severity"] == "wrong"
            assert f"{old.pid}" in found["problem"]
            assert "the job is split" in found["problem"]
            assert "still use" in run("check", "--quiet").stdout
            assert [
                each.kind for each in inspection.check(NAME) if each.kind == "removed_in_use"
            ] == ["removed_in_use"]
            assert split() == 2


@every_kind
def test_what_was_removed_on_purpose_is_a_note(
    make: Callable[..., AbstractContextManager[Any]],
) -> None:
    with make() as made:
        made.unlink()
        (found,) = findings()
        assert found["severity"] == "note"
        assert split() == 0
        assert run("check", NAME).returncode == 3


def test_what_the_command_removed_is_a_note() -> None:
    with accumulator():
        assert run("remove", NAME, "--yes", "--force").returncode == 0
        (found,) = findings()
        assert found["severity"] == "note"
        assert split() == 0
