"""The remedies for all segments of one job agree, and are shown in full."""

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import needs_own_shm, run_apart
from helpers.inspect_tool import path_of, run, scribble
from helpers.support import until
from helpers.training import training

import shmacc
from shmacc import AccumulatorGroup, Parameters, TableSpec, errors, inspection
from shmacc.inspection import Severity
from shmacc.inspection._findings import START_AGAIN
from shmacc.optim import SGD, Adam

GROUP: Final = "run"
PARAMS: Final = "run.params"
MIB: Final = 2**20
ANEW: Final = "load a checkpoint into both, or begin both anew"


@pytest.fixture(autouse=True)
def job() -> Iterator[None]:
    """Make a group and its parameters, after one round; no process has them attached."""
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
    """Act as a new chief of the job, and make a round."""
    with Parameters.attach(PARAMS) as params, AccumulatorGroup.attach(GROUP) as group:
        one_round(group, params)


def remedies(name: str = GROUP) -> dict[str, str]:
    """Return the remedies by kind; a check of this name and a check of all must agree."""
    subject, found = inspection.resolve(name).system_name, {"": ""}

    def agree() -> bool:  # another look may have the segment open for a moment
        nonlocal found
        found = {each.kind: each.remedy for each in inspection.check(name)}
        of_all = [each for each in inspection.check_all() if each.subject == subject]
        return {each.kind: each.remedy for each in of_all} == found and "orphaned" in found

    until(agree)
    return found


def test_the_remedy_for_a_sound_job_is_to_start_it_again() -> None:
    assert remedies()["orphaned"].startswith("start its job again, which goes on with it")
    assert remedies(PARAMS)["orphaned"].startswith("start its job again, which goes on with it")
    shown = run("show", GROUP).stdout
    assert "no living process has it attached" in shown.partition("orphaned ")[2]
    assert "nothing is known that makes it stand still" not in shown
    start_again()


def test_the_remedy_for_missing_parameters_is_to_load_or_begin_anew() -> None:
    inspection.remove(PARAMS)
    found = remedies()
    assert found["of_other_parameters"].startswith(ANEW)
    assert found["orphaned"].startswith(ANEW)
    assert "only then start its job again; or, if no job" in found["orphaned"]
    assert "goes on with it" not in found["orphaned"]


def test_the_remedy_for_damaged_parameters_is_to_see_to_them_first() -> None:
    scribble(path_of(PARAMS), 64, b"\xff" * 64)
    found = remedies()["orphaned"]
    assert found.startswith(
        f"see to {inspection.resolve(PARAMS).system_name}, which cannot be read"
    )
    assert "goes on with it" not in found


@pytest.mark.parametrize("name", [GROUP, PARAMS])
def test_the_remedy_for_steps_that_do_not_fit_is_to_load_or_begin_anew(name: str) -> None:
    with Parameters.attach(PARAMS) as params:
        params.restore({**params.state(), "step": np.array(7)})
    with pytest.raises(shmacc.errors.FailedPreconditionError):
        start_again()
    assert remedies(name)["orphaned"].startswith(ANEW)


def _new_parameters(step: int) -> None:
    contents = {"w": np.zeros(4, np.float32)}
    Parameters(contents, PARAMS, optimizer=SGD(0.5), if_exists="replace").close()
    if step:
        _restore(step)


def _new_group(step: int) -> None:
    with (
        Parameters.attach(PARAMS) as params,
        AccumulatorGroup(params.member_specs(), GROUP, if_exists="replace") as group,
    ):
        if step:
            group.set_global_step(step)


def _finish() -> None:
    with AccumulatorGroup.attach(GROUP) as group:
        group.finish()


def _fill_table(rows: list[int]) -> None:
    """Leave a table that is full with 3 rows, and a round of these rows."""
    table = {"w": TableSpec((2,), max_rows=3)}
    inspection.remove(GROUP)
    with (
        Parameters(table, PARAMS, optimizer=SGD(0.5), if_exists="replace") as params,
        AccumulatorGroup(params.member_specs(), GROUP) as group,
    ):
        for ids in ([1, 2, 7], [2, 7], rows):
            group.apply({"w": (ids, np.ones((len(ids), 2), np.float32))}, group.global_step)
            if ids is not rows:
                with group.round(1) as taken:
                    assert params.update(taken, remove={"w": [7]} if len(ids) == 2 else None)


def _update_again() -> None:
    with Parameters.attach(PARAMS) as params, AccumulatorGroup.attach(GROUP) as group:
        done = False
        while not done:  # False: the parameters had this update already
            if group.num_accumulated() == 0:
                group.apply({"w": np.ones(4, np.float32)}, group.global_step)
            with group.round(1) as taken:
                done = params.update(taken)


def _replace(params: int | None = None, group: int | None = None) -> None:
    """Replace the parameters, the group or both by new ones at these steps."""
    if params is not None:
        _new_parameters(params)
    if group is not None:
        _new_group(group)


def _restore(step: int) -> None:
    with Parameters.attach(PARAMS) as params:
        params.restore({**params.state(), "step": np.array(step)})


def _remove(name: str) -> None:
    inspection.remove(name)


PLANS: Final[dict[str, tuple[list[Callable[[], None]], bool]]] = {
    "both, after a round": ([], True),
    "both, new": ([partial(_replace, 0, 0)], True),
    "both, restored to a step": ([partial(_replace, 7, 6)], True),
    "both, new, at one step": ([partial(_replace, 7, 7)], True),
    "both, new, of other steps": ([partial(_replace, 7, 2)], False),
    "the group has finished": ([_finish], False),
    "the group is gone": ([partial(_remove, GROUP)], False),
    "the group is gone, before a round": ([partial(_remove, GROUP), partial(_replace, 0)], True),
    "the parameters are gone": ([partial(_remove, PARAMS)], False),
    "the parameters are new": ([partial(_replace, 0)], False),
    "the parameters are new, at the step": ([partial(_replace, 1)], False),
    "the group is new": ([partial(_restore, 7), partial(_replace, None, 0)], False),
    "a round that fits the table": ([partial(_fill_table, [1, 2, 9])], True),
    "a round over max_rows": ([partial(_fill_table, [2, 8, 9])], False),
}


@pytest.mark.parametrize("plan", PLANS)
def test_check_says_start_again_exactly_if_the_job_can_go_on(plan: str) -> None:
    """Each plan changes the segments, and says if the job can go on; the test tries that, too."""
    changes, goes_on = PLANS[plan]
    for change in changes:
        change()
    there = [name for name in (GROUP, PARAMS) if Path(inspection.resolve(name).path).exists()]
    said = [remedies(name)["orphaned"] for name in there]
    assert [START_AGAIN in each for each in said] == [goes_on] * len(there), said
    if len(there) == 2:
        with contextlib.nullcontext() if goes_on else pytest.raises(errors.ShmaccError):
            _update_again()


def test_the_remedy_after_a_failed_round_is_to_load_or_begin_anew() -> None:
    """It is the remedy for steps that do not fit, although a chief has failed, too."""
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
    assert found["failed"].startswith(ANEW)
    assert "then see the log of it; then start it again" in found["failed"]


def fill_a_table() -> None:
    many = np.arange(600), np.ones((600, 1024), np.float32)
    with AccumulatorGroup.attach("full") as group, Parameters.attach("full.params") as params:
        group.apply({"t": many}, 0)
        with group.round(1) as taken:
            params.update(taken)


def _fill_a_table() -> tuple[list[str], str, str]:
    """Let a chief fail because its table cannot grow; return what is reported, and its error."""
    spec = TableSpec((1024,), "float32")
    with training({"t": spec}, Adam(0.1), ("full.params", "full")) as (params, group):
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
