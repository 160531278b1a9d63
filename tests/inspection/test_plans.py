"""All remedies for one job are shown together, and none is cut off."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import needs_own_shm, run_apart
from helpers.inspect_tool import path_of, run, scribble

import shmacc
from shmacc import AccumulatorGroup, Parameters, TableSpec, inspection
from shmacc.inspection import Severity
from shmacc.optim import SGD, Adam

GROUP: Final = "run"
PARAMS: Final = "run.params"
MIB: Final = 2**20
ANEW: Final = "load a checkpoint into both, or begin both anew"


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    """A group and its parameters after a round; all processes have ended."""
    with make(Parameters({"w": np.zeros(4, np.float32)}, PARAMS, optimizer=SGD(0.5))):
        pass
    yield
    for name in (GROUP, PARAMS):
        if Path(inspection.resolve(name).path).exists():
            inspection.remove(name, force=True)


def make(params: Parameters) -> AccumulatorGroup:
    with params, AccumulatorGroup(params.member_specs(), GROUP) as group:
        one_round(group, params)
        return group


def one_round(group: Any, params: Any) -> None:
    group.apply({"w": np.ones(4, np.float32)}, group.global_step)
    with group.round(1) as taken:
        assert params.update(taken)


def start_again() -> None:
    """Be that job's chief, and go on."""
    with Parameters.attach(PARAMS) as params, AccumulatorGroup.attach(GROUP) as group:
        one_round(group, params)


def remedies(name: str = GROUP) -> dict[str, str]:
    found = {each.kind: each.remedy for each in inspection.check(name)}
    subject = inspection.resolve(name).system_name
    of_all = [each for each in inspection.check_all() if each.subject == subject]
    everything = {each.kind: each.remedy for each in of_all}
    assert everything == found, "one plan, whatever was asked"
    return found


def test_a_sound_job_can_just_be_started_again() -> None:
    assert remedies()["orphaned"].startswith("start its job again, which goes on with it")
    assert remedies(PARAMS)["orphaned"].startswith("start its job again, which goes on with it")
    shown = run("show", GROUP).stdout
    assert "no living process has it attached" in shown.partition("orphaned ")[2]
    assert "nothing is known that makes it stand still" not in shown
    start_again()


def test_a_job_whose_parameters_are_gone_is_not_just_started_again() -> None:
    inspection.remove(PARAMS)
    found = remedies()
    assert found["of_other_parameters"].startswith(ANEW)
    assert found["orphaned"].startswith(ANEW)
    assert "only then start its job again; or, if no job" in found["orphaned"]
    assert "goes on with it" not in found["orphaned"]


def test_a_job_whose_parameters_are_damaged_is_not_just_started_again() -> None:
    scribble(path_of(PARAMS), 64, b"\xff" * 64)
    found = remedies()["orphaned"]
    assert found.startswith(
        f"see to {inspection.resolve(PARAMS).system_name}, which cannot be read"
    )
    assert "goes on with it" not in found


@pytest.mark.parametrize("name", [GROUP, PARAMS])
def test_a_job_whose_steps_do_not_fit_is_not_just_started_again(name: str) -> None:
    with Parameters.attach(PARAMS) as params:
        params.restore({**params.state(), "step": np.array(7)})
    with pytest.raises(shmacc.errors.FailedPreconditionError):
        start_again()
    assert remedies(name)["orphaned"].startswith(ANEW)


def test_the_plan_after_a_death_is_the_same() -> None:
    """A chief died in its round, and workers wait."""
    with Parameters.attach(PARAMS) as params:
        params.restore({**params.state(), "step": np.array(7)})

    def die_in_a_round() -> None:
        with AccumulatorGroup.attach(GROUP) as group:
            group.apply({"w": np.ones(4, np.float32)}, group.global_step)
            group.round(1).__enter__()
            raise ValueError("the first of its kind")

    with pytest.raises(ValueError, match="its kind"):
        run_apart(die_in_a_round)
    found = remedies()
    assert found["failed"].startswith(f"first {ANEW}")
    assert "then see the log of it; start it again" in found["failed"]


def fill_a_table() -> None:
    many = np.arange(600), np.ones((600, 1024), np.float32)
    with AccumulatorGroup.attach("full") as group, Parameters.attach("full.params") as params:
        group.apply({"t": many}, 0)
        with group.round(1) as taken:
            params.update(taken)


def _fill_a_table() -> tuple[list[str], str, str]:
    """Let a chief fail because its table cannot grow; return what is reported, and its error."""
    spec = TableSpec((1024,), "float32")
    with (
        Parameters({"t": spec}, "full.params", optimizer=Adam(0.1)) as params,
        AccumulatorGroup(params.member_specs(), "full") as group,
    ):
        pid = os.fork()
        if pid == 0:
            try:
                fill_a_table()
            except shmacc.errors.ResourceExhaustedError:
                os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
        found = [each for each in inspection.check("full") if each.kind == "failed"]
        said = [f"{each.problem} do: {each.remedy}" for each in inspection.check("full")]
        shown = run("check", "full").stdout
        group.unlink()
        params.unlink()
        return said, found[0].problem, shown


@needs_own_shm
def test_the_report_of_a_table_that_cannot_grow_says_what_to_do() -> None:
    said, failed, shown = run_apart(_fill_a_table, shm=7 * MIB)
    assert failed.endswith("`mount -o remount,size=... /dev/shm`")
    assert failed in shown
    assert not [each for each in said if " do: nothing" in each], said
    assert any("do: make room, as its error says; then start it again" in each for each in said)


def test_no_remedy_is_cut_off() -> None:
    inspection.remove(PARAMS)
    shown = run("check", GROUP, COLUMNS="40").stdout
    for each in inspection.check(GROUP):
        assert each.remedy in shown
        assert each.severity in {Severity.WRONG, Severity.NOTE}
