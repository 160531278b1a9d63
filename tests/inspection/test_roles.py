"""A process's entry lists its roles, what it has begun to do. So does the event of its death."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
from helpers.apart import Crew
from helpers.inspect_tool import ask, stopped_with_the_lock
from helpers.standing_still import NAME, apply, begin, kill, once, pause, take, wait_for_ever
from helpers.support import until

import shmacc
from shmacc import ConditionalAccumulator, Parameters, errors, inspection
from shmacc.optim import SGD

PARAMS: Final = "still.params"


@pytest.fixture(autouse=True)
def segments() -> Iterator[None]:
    ConditionalAccumulator(np.float32, [2], NAME).close()
    Parameters({"w": np.zeros(2, np.float32)}, PARAMS, optimizer=SGD(0.5)).close()
    yield
    for name in (NAME, PARAMS):
        inspection.remove(name, force=True)


def roles(name: str = NAME) -> list[list[str]]:
    return [list(each.roles) for each in inspection.describe(name).processes if each.alive]


def snapshot(acc: Any) -> None:
    acc.snapshot()


def state(acc: Any) -> None:
    acc.state()


def set_step(acc: Any) -> None:
    acc.set_global_step(3)


def apply_in_vain(acc: Any) -> None:
    assert not apply(acc, -1)


def take_in_vain(acc: Any) -> None:
    with pytest.raises(errors.DeadlineExceededError):
        acc.take(10, timeout=0.01)


DEEDS: Final[dict[Callable[[Any], Any], str]] = {
    apply_in_vain: "applies", take_in_vain: "takes", set_step: "updates", snapshot: "looks on",
    state: "saves",
}  # fmt: skip


@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_a_process_has_the_role_of_what_it_has_done(deed: Callable[[Any], Any]) -> None:
    with shmacc.attach(NAME) as acc:
        acc.num_accumulated()
        assert roles() == [[]]
        deed(acc)
        assert roles() == [[DEEDS[deed]]]
        assert ask("show", NAME)["processes"][0]["roles"] == [DEEDS[deed]]
    with shmacc.attach(NAME) as acc:
        acc.num_accumulated()
        assert roles() == [[]], "a new entry of the same process has none"


def test_the_roles_of_a_process_accumulate() -> None:
    with shmacc.attach(NAME) as acc:
        for deed in (*DEEDS, *DEEDS):
            deed(acc)
        assert roles() == [["applies", "takes", "updates", "looks on", "saves"]]


def test_snapshot_looks_on_state_saves_and_update_updates() -> None:
    with shmacc.attach(NAME) as acc, Parameters.attach(PARAMS) as params:
        params.snapshot()
        assert roles(PARAMS) == [["looks on"]]
        params.state()
        assert roles(PARAMS) == [["looks on", "saves"]]
        apply(acc)
        with acc.round(1) as taken:
            params.update(taken)
        assert roles(PARAMS) == [["updates", "looks on", "saves"]]
        assert roles() == [["applies", "takes"]]


def test_a_process_has_its_role_before_it_gets_the_lock(crew: Crew) -> None:
    with stopped_with_the_lock(crew, NAME, changes=False):
        begin(crew, apply)
        until(lambda: ["applies"] in roles())
    with shmacc.attach(NAME) as acc:
        until(lambda: acc.num_accumulated() > 0)


@pytest.mark.parametrize(
    ("deeds", "found"), [((pause,), []), ((take(5),), ["takes"]), ((wait_for_ever,), ["looks on"])]
)
def test_a_death_is_recorded_with_the_roles(
    crew: Crew, deeds: tuple[Callable[[Any], Any], ...], found: list[str]
) -> None:
    """This includes a process whose calls have never returned."""
    child = begin(crew, *deeds)
    until(lambda: roles() == [found])
    pid = kill(child)
    once(crew, apply)  # this finds the death
    (event,) = [each for each in inspection.describe(NAME).events if each.kind == "died"]
    assert (event.pid, list(event.roles)) == (pid, found)
