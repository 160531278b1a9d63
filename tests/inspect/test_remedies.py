"""What `check` advises does what it says, and destroys nothing that somebody did not choose to."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest
from helpers import segment_layout as layout
from helpers.inspect_tool import (
    COMMAND,
    WITHOUT_ROOTS_POWERS,
    ask,
    idle,
    make_as,
    path_of,
    run,
    semaphore_of,
    start,
)
from helpers.support import until

import shmacc
from shmacc import ConditionalAccumulator, Parameters, errors, inspection
from shmacc.optim import SGD

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from helpers.apart import Crew

NAMES: Final = tuple(f"job{number}" for number in range(7))
NOBODY: Final = 65534


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """What the tests leave under the names is removed."""
    yield
    for name in NAMES:
        path = path_of(name)
        if path.is_dir():
            path.rmdir()
        elif path.exists():
            inspection.remove(name, force=True)
    run("clean", "--yes")


def orphans() -> None:
    """Jobs whose processes are all dead, and will be started again."""
    for name in NAMES[:3]:
        ConditionalAccumulator(np.float32, [2], name).close()
    Parameters({"w": np.zeros(4, np.float32)}, NAMES[3], optimizer=SGD(0.5)).close()


def damaged() -> None:
    """Another program's file, say."""
    path_of(NAMES[0]).write_bytes(b"not a segment" * 1000)


def other_version() -> None:
    """A segment that another version reads."""
    path_of(NAMES[0]).write_bytes(layout.header_of_version_1(NAMES[0].encode()))
    os.truncate(path_of(NAMES[0]), layout.FILE_SIZE)


def renamed() -> None:
    """A copy that somebody keeps."""
    orphans()
    path_of(NAMES[0]).rename(path_of(NAMES[5]))


def linked() -> None:
    """Another name of a segment, which somebody made."""
    orphans()
    path_of(NAMES[5]).hardlink_to(path_of(NAMES[0]))


def no_semaphore() -> None:
    """Another file in the place of a semaphore."""
    orphans()
    semaphore_of(NAMES[0]).write_bytes(b"somebody's")


def directory() -> None:
    """A directory under a name."""
    path_of(NAMES[0]).mkdir()


EVERYTHING: Final = (orphans, damaged, other_version, renamed, linked, no_semaphore, directory)


def names_there(namespace: str) -> list[str]:
    """What has a name in this test's namespace."""
    return sorted(path.name for path in path_of(NAMES[0]).parent.glob(f"*shmacc.{namespace}:*"))


@pytest.mark.parametrize("make", EVERYTHING)
def test_the_commands_of_check_all_run_destroy_nothing(
    make: Callable[[], None], namespace: str
) -> None:
    """docs/inspect-json.md: "`command` can be pasted into a shell, and destroys no data"."""
    make()
    before = names_there(namespace)
    assert before
    for finding in ask("check", status=1)["findings"]:
        if finding["command"]:
            words = shlex.split(finding["command"])
            assert words[0] != "rm"
            if words[0] == "shmacc-inspect":
                run(*words[1:])
    assert names_there(namespace) == before


@pytest.mark.parametrize("make", EVERYTHING)
def test_the_command_that_the_words_name_does_what_they_say(make: Callable[[], None]) -> None:
    make()
    findings = [each for each in ask("check", status=1)["findings"] if each["severity"] == "wrong"]
    assert findings
    for finding in reversed(findings):  # a semaphore before its segment, which takes it along
        named = re.search(r"`([^`]+)`", finding["remedy"])
        assert named or make is directory, finding
        if named:
            program, *words = shlex.split(named[1])
            done = run(*words, command=(shutil.which(program) or str(COMMAND),))
            assert done.returncode == 0, done.stderr
            assert not (path_of(NAMES[0]).parent / finding["subject"]).exists()


def test_many_orphans_are_one_line() -> None:
    for name in NAMES:
        ConditionalAccumulator(np.float32, [2], name).close()
    said = run("check", "job*").stdout.splitlines()
    assert len(said) == 2
    assert said[0].startswith("WRONG  ")
    assert said[0].endswith(" and 2 more: no living process has it attached")
    assert "`shmacc-inspect remove NAME --yes`" in said[1]
    assert ask("check", "job*", status=1)["wrong"] == len(NAMES)


def test_a_directory_is_not_to_be_removed_by_what_removes_none() -> None:
    directory()
    (finding,) = ask("check", NAMES[0], status=1)["findings"]
    assert finding["remedy"].endswith("shmacc removes no directories")
    assert run("remove", NAMES[0], "--force", "--yes").returncode == 1


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be somebody else")
@pytest.mark.skipif(shutil.which("setpriv") is None, reason="needs setpriv")
def test_what_only_its_owner_can_remove_is_said_to_be_so(crew: Crew) -> None:
    crew.start(make_as, NOBODY, NAMES[0]).result()
    path = path_of(NAMES[0])
    os.truncate(path, 100)
    path.chmod(0o644)
    (finding,) = [
        each
        for each in ask("check", NAMES[0], status=1, before=WITHOUT_ROOTS_POWERS)["findings"]
        if each["severity"] == "wrong"
    ]
    assert "as its owner or as root" in finding["remedy"]


def test_what_an_error_says_removes_it_removes_it() -> None:
    ConditionalAccumulator(np.float32, [2], NAMES[0]).close()
    with pytest.raises(errors.InvalidArgumentError) as refused:
        ConditionalAccumulator(np.float32, [3], NAMES[0])
    named = re.search(r"`shmacc-inspect (remove [^`]+)` removes it", str(refused.value))
    assert named
    assert run(*named[1].split()).returncode == 0
    assert not path_of(NAMES[0]).exists()


def use_both(accumulator: str, parameters: str) -> None:
    """Be a worker: have both attached, and wait for the step."""
    with shmacc.attach(accumulator) as acc, Parameters.attach(parameters):
        acc.wait_step(10**6)


@pytest.mark.parametrize(("step", "noted"), [(0, True), (5, True), (6, False), (7, False)])
def test_parameters_past_the_rounds_beside_them_are_noted(
    crew: Crew, step: int, noted: bool
) -> None:
    """Before a chief fails by it, each time that it is started."""
    acc_name, params_name = NAMES[:2]
    with (
        ConditionalAccumulator(np.float32, [4], acc_name) as acc,
        Parameters({"w": np.zeros(4, np.float32)}, params_name, optimizer=SGD(0.5)) as params,
    ):
        params.restore({**params.state(), "step": np.array(7)})
        acc.set_global_step(step)
    start(crew, use_both, acc_name, params_name)
    until(lambda: inspection.describe(acc_name).summary.attached_alive == 1)
    for found in (inspection.check(acc_name), inspection.check_all()):
        kinds = [each.kind for each in found]
        assert ("steps_apart" in kinds) == noted


def test_parameters_of_others_are_not_noted(crew: Crew) -> None:
    """Nobody uses them together; nor does who uses others that fit."""
    acc_name, params_name = NAMES[:2]
    ConditionalAccumulator(np.float32, [4], acc_name).close()
    with Parameters({"w": np.zeros(4, np.float32)}, params_name, optimizer=SGD(0.5)) as params:
        params.restore({**params.state(), "step": np.array(9)})
        start(crew, idle, acc_name)
        assert "steps_apart" not in [each.kind for each in inspection.check_all()]


def train(params: Parameters, group: shmacc.AccumulatorGroup) -> None:
    """Make one update."""
    group.apply({"w": np.ones(4, np.float32)}, group.global_step)
    with group.round(1) as taken:
        assert params.update(taken)


@pytest.mark.parametrize("alive", [True, False])
@pytest.mark.parametrize("replaced", [True, False])
def test_a_group_of_replaced_parameters_is_noted(
    crew: Crew, *, alive: bool, replaced: bool
) -> None:
    """Others are refused each time that the job is started."""
    acc_name, params_name = NAMES[:2]
    arrays, optimizer = {"w": np.zeros(4, np.float32)}, SGD(0.5)
    with (
        Parameters(arrays, params_name, optimizer=optimizer) as params,
        shmacc.AccumulatorGroup(params.member_specs(), acc_name) as group,
    ):
        train(params, group)
    if replaced:
        Parameters(arrays, params_name, optimizer=optimizer, if_exists="replace").close()
    if alive:
        start(crew, use_both, acc_name, params_name)
        until(lambda: inspection.describe(acc_name).summary.attached_alive == 1)
    for found in (inspection.check(acc_name), inspection.check_all()):
        assert ("of_other_parameters" in [each.kind for each in found]) == replaced
