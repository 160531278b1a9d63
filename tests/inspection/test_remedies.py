"""The remedies of `check` work, and destroy nothing that the user did not agree to."""

import os
import re
import shlex
import subprocess
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers.apart import Crew
from helpers.inspect_tool import ask, idle, path_of, run, semaphore_of, start
from helpers.support import until

import shmacc
from shmacc import ConditionalAccumulator, Parameters, errors, inspection
from shmacc.optim import SGD

NAMES: Final = tuple(f"job{number}" for number in range(7))
ACC, PARAMS = NAMES[:2]


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    yield
    for name in NAMES:
        path = path_of(name)
        if path.is_dir():
            path.rmdir()
        elif path.exists():
            inspection.remove(name, force=True)
    run("clean", "--yes")


def make_parameters(name: str, **how: Any) -> Parameters:
    return Parameters({"w": np.zeros(4, np.float32)}, name, optimizer=SGD(0.5), **how)


def orphans() -> None:
    """Make segments of a job whose processes are dead, but which will be started again."""
    for name in NAMES[:3]:
        ConditionalAccumulator(np.float32, [2], name).close()
    make_parameters(NAMES[3]).close()


def damaged() -> None:
    """Write a file of another program under a segment's name."""
    path_of(NAMES[0]).write_bytes(b"not a segment" * 1000)


def other_version() -> None:
    path_of(NAMES[0]).write_bytes(layout.header_of_version(1))
    os.truncate(path_of(NAMES[0]), layout.FILE_SIZE)


def renamed() -> None:
    """Rename a segment, as a user may who wants to keep it."""
    orphans()
    path_of(NAMES[0]).rename(path_of(NAMES[5]))


def linked() -> None:
    """Make a hard link to a segment, as a user may."""
    orphans()
    path_of(NAMES[5]).hardlink_to(path_of(NAMES[0]))


def no_semaphore() -> None:
    """Write another file under a semaphore's name."""
    orphans()
    semaphore_of(NAMES[0]).write_bytes(b"somebody's")


def only_a_semaphore() -> None:
    """Leave a semaphore whose segment was removed by `rm`."""
    orphans()
    path_of(NAMES[0]).unlink()


def directory() -> None:
    path_of(NAMES[0]).mkdir()


EVERYTHING: Final = (
    *(orphans, damaged, other_version, renamed),
    *(linked, no_semaphore, only_a_semaphore, directory),
)


def names_there(namespace: str) -> list[str]:
    return sorted(path.name for path in path_of(NAMES[0]).parent.glob(f"*shmacc.{namespace}:*"))


@pytest.mark.parametrize("make", EVERYTHING)
def test_commands_of_check_destroy_nothing_and_commands_in_remedies_work(
    make: Callable[[], None], namespace: str
) -> None:
    """docs/inspect-json.md: "`command` can be pasted into a shell, and destroys no data"."""
    make()
    before = names_there(namespace)
    findings = ask("check", status=1)["findings"]
    for finding in findings:
        if finding["command"]:
            words = shlex.split(finding["command"])
            assert words[0] != "rm"
            if words[0] == "shmacc-inspect":
                run(*words[1:])
    assert names_there(namespace) == before
    wrong = [each for each in findings if each["severity"] == "wrong"]
    assert wrong
    for finding in reversed(wrong):  # semaphores first: a segment's removal includes its semaphore
        named = re.search(r"`([^`]+)`", finding["remedy"])
        assert named or make is directory, finding
        if named:
            program, *words = shlex.split(named[1])
            if program == "shmacc-inspect":  # the whole name works in any namespace
                done = run(*words, SHMACC_NAMESPACE=f"{namespace}-other")
                assert done.returncode == 0, done.stderr
            else:
                subprocess.run([program, *words], check=True)
            assert not (path_of(NAMES[0]).parent / finding["subject"]).exists()


def test_many_orphans_are_reported_in_one_line() -> None:
    for name in NAMES:
        ConditionalAccumulator(np.float32, [2], name).close()
    said = run("check", "job*").stdout.splitlines()
    assert len(said) == 2
    assert said[0].startswith("WRONG  ")
    assert said[0].endswith(" and 2 more: no living process has it attached")
    assert "`shmacc-inspect remove NAME --yes`" in said[1]
    assert ask("check", "job*", status=1)["wrong"] == len(NAMES)


def test_the_remedy_for_a_directory_does_not_use_remove() -> None:
    directory()
    (finding,) = ask("check", NAMES[0], status=1)["findings"]
    assert finding["remedy"].endswith("shmacc removes no directories")
    assert run("remove", NAMES[0], "--force", "--yes").returncode == 1


def test_the_command_that_an_error_names_removes_the_segment() -> None:
    ConditionalAccumulator(np.float32, [2], ACC).close()
    with pytest.raises(errors.InvalidArgumentError) as refused:
        ConditionalAccumulator(np.float32, [3], ACC)
    named = re.search(r"`shmacc-inspect (remove [^`]+)` removes it", str(refused.value))
    assert named
    assert run(*named[1].split()).returncode == 0
    assert not path_of(ACC).exists()


def use_both(accumulator: str, parameters: str) -> None:
    with shmacc.attach(accumulator) as acc, Parameters.attach(parameters):
        acc.wait_step(10**6)


def noted(kind: str) -> bool:
    """Whether `check` reports this kind, both for this segment and for all of the test."""
    own = os.environ["SHMACC_NAMESPACE"]  # other tests have such segments, too
    found = inspection.check(ACC), inspection.check_all(namespace=own)
    (said,) = {kind in [each.kind for each in findings] for findings in found}
    return said


@pytest.mark.parametrize(("step", "far"), [(0, True), (5, True), (6, False), (7, False)])
def test_parameters_ahead_of_their_group_are_noted(crew: Crew, step: int, far: bool) -> None:
    """With such parameters every new chief would fail. Parameters of other jobs are not noted."""
    with ConditionalAccumulator(np.float32, [4], ACC) as acc, make_parameters(PARAMS) as params:
        params.restore({**params.state(), "step": np.array(7)})
        acc.set_global_step(step)
    start(crew, idle, ACC)
    assert not noted("steps_apart"), "nobody uses them together"
    start(crew, use_both, ACC, PARAMS)
    until(lambda: inspection.describe(PARAMS).summary.attached_alive == 1)
    assert noted("steps_apart") == far


@pytest.mark.parametrize(("alive", "replaced"), [(True, True), (False, True), (True, False)])
def test_a_group_of_replaced_parameters_is_noted(crew: Crew, alive: bool, replaced: bool) -> None:
    """The new parameters are refused each time that the job is started."""
    with (
        make_parameters(PARAMS) as params,
        shmacc.AccumulatorGroup(params.member_specs(), ACC) as group,
    ):
        group.apply({"w": np.ones(4, np.float32)}, 0)
        with group.round(1) as taken:
            assert params.update(taken)
    if replaced:
        make_parameters(PARAMS, if_exists="replace").close()
    if alive:
        start(crew, use_both, ACC, PARAMS)
        until(lambda: inspection.describe(PARAMS).summary.attached_alive == 1)
    assert noted("of_other_parameters") == replaced
