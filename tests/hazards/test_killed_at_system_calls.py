"""A process killed before or after any system call has done its operation fully or not at all."""

import errno
import mmap
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Final

import pytest
from helpers import killing_scenes
from helpers.apart import Apart, Pipe
from helpers.killing_calls import Fails, deaths
from helpers.killing_deeds import CREATING, DEEDS, SCENE, Deed, create, judge
from helpers.killing_scenes import NAME, Record, path
from helpers.stepping_calls import NAMES, Call, needs_calls, needs_failures
from helpers.stepping_tracer import Traced, needs_ptrace

import shmacc
from shmacc import errors, inspection, testing
from shmacc._base import names

pytestmark = pytest.mark.beyond_asan

UNNAMED: Final = {
    *("updating", "updating a table", "creating a private one", "creating shared arrays"),
    "closing a private one",
}


def at_every_call(
    deed: Deed, expected: tuple[Any, Any], record: Record, fails: Fails | None = None
) -> None:
    """Kill at every stop; check that the old state is found, and from some stop on the new one."""
    before, after = expected
    done, stops = False, []
    for stop in deaths(deed, fails):
        found = judge()
        # Other processes, which come and go, decide how many calls a cleaner makes in /proc.
        done = found == after or (done and deed.name != "cleaning")
        assert found == (after if done else before), f"torn at stop {stop}"
        stops.append(stop)
    assert done
    record("stops", stops)


def expected(deed: Deed) -> tuple[killing_scenes.Testimony | None, killing_scenes.Testimony | None]:
    """Return what must be found before the operation, and after it."""
    one = SCENE.testimony(SCENE.prepare())
    match deed.name:
        case "creating":
            create().close()
            return None, SCENE.testify()
        case "a child's first operation" | "applying behind the dead":
            return one, SCENE.testimony(SCENE.perform())
        case "taking behind the dead":
            return one, SCENE.testimony(replace(SCENE, operation=deed.act).perform())
        case "unlinking" | "cleaning":
            return one, None
    # The next process looks for NAME only, which these operations do not make.
    return (None, None) if deed.name in UNNAMED else (one, one)


@pytest.fixture
def tight_umask() -> Iterator[None]:
    """Let this process and its children create files that nobody else can open."""
    before = os.umask(0o077)
    yield
    os.umask(before)


@needs_calls
@pytest.mark.usefixtures("tight_umask")
@pytest.mark.parametrize("deed", DEEDS, ids=str)
def test_a_kill_at_any_system_call_is_all_or_nothing(deed: Deed, record_property: Record) -> None:
    at_every_call(deed, expected(deed), record_property)


class _FirstMappingAfterTheName:
    """Lets the maker's first mapping fail after the segment has got its name."""

    def __init__(self) -> None:
        self.names = 0

    def __call__(self, call: Call) -> int | None:
        name = NAMES.get(call.number)
        self.names += name == "linkat"
        shared = name == "mmap" and call.arguments[3] & mmap.MAP_SHARED
        return errno.ENOMEM if self.names == 2 and shared else None


def _create_in_vain() -> None:
    with pytest.raises(errors.ResourceExhaustedError):
        create()


@needs_failures
def test_a_maker_killed_while_it_gives_up_leaves_nothing_or_all(record_property: Record) -> None:
    """The maker removes the new segment if no other process has attached."""
    create().close()
    new = SCENE.testify()
    vain = replace(CREATING, act=lambda _: _create_in_vain())
    at_every_call(vain, (new, None), record_property, fails=_FirstMappingAfterTheName)


def create_and_say_so(pipe: Pipe) -> None:
    with create():
        pipe.turn()


def test_entries_of_killed_processes_are_reused() -> None:
    """However many die, the list of processes does not fill up."""
    for _ in range(10):
        with Apart(create_and_say_so) as process:
            process.hear()
    with create() as acc:
        assert [process.alive for process in inspection.describe(NAME).processes] == [True]
        acc.unlink()


@needs_ptrace
def test_a_cleaner_leaves_a_semaphore_whose_segment_is_being_made() -> None:
    """The semaphore has its name before the segment has."""
    namespace = names.current_namespace()
    with Traced(lambda _: create()) as creator:
        creator.run_until(lambda: testing.leaked_names(namespace) != ())
        assert not os.path.lexists(path())
        assert inspection.leftovers(namespace=namespace) == ()
        creator.finish()
    with shmacc.attach(NAME) as made:
        made.unlink()
