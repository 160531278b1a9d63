"""All verbs agree on which processes are attached, what they do, and what is wrong.

Each scene is played alone, beside processes that came before, and beside processes that came later.
Such bystanders idle, or read and save again and again. The answer names only the process at fault.
"""

import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pytest
from helpers import standing_still as job
from helpers.apart import Apart, Crew
from helpers.inspect_tool import ask, run
from helpers.support import until

import shmacc
from shmacc import ConditionalAccumulator, inspection
from shmacc.inspection import Severity, Stall, StallKind, _stall_facts
from shmacc_inspect.progress import Watch
from shmacc_inspect.sorting import SORTS

FINE: Final = "fine"
OFTEN: Final = 0.02  # seconds
A_TICK: Final = 0.02  # seconds: at least two ticks of the segments' clock


@pytest.fixture(autouse=True)
def segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make two segments, one of them healthy; let standstills be reported at once."""
    job.patience(monkeypatch, 0.0)
    monkeypatch.setattr(_stall_facts, "LONG_IDLE", 0.3)
    with ConditionalAccumulator(np.float32, [2], FINE) as fine:
        ConditionalAccumulator(np.float32, [2], job.NAME).close()
        yield
        inspection.remove(job.NAME, force=True)
        fine.unlink()


# -- bystanders ------------------------------------------------------------------------------------


def look_in(acc: Any) -> None:
    while True:
        acc.snapshot()
        acc.state()  # like `save`
        acc.stats()
        time.sleep(OFTEN)


def look_in_from_a_thread(acc: Any) -> None:
    threading.Thread(target=look_in, args=(acc,), daemon=True).start()


def bystanders(crew: Crew) -> None:
    for deed in (job.pause, job.pause, look_in, look_in):
        job.begin(crew, deed)
    # The segments' clock is coarse: wait until it shows a later time.
    came = time.monotonic()
    until(lambda: time.monotonic() > came + A_TICK)


# -- processes that act ----------------------------------------------------------------------------


class Stage:
    """Starts a scene's processes; each method returns when its processes have come to rest."""

    def __init__(self, crew: Crew) -> None:
        self.crew = crew

    def chief(self, *deeds: Callable[[Any], Any]) -> Apart:
        """Start a process that takes once, then acts; return after the take."""
        before = inspection.describe(job.NAME).stats.takes
        chief = job.begin(self.crew, job.take(1), *deeds)
        job.once(self.crew, job.apply)
        until(lambda: inspection.describe(job.NAME).stats.takes == before + 1)
        return chief

    def hung_chief(self) -> Apart:
        chief = self.chief(job.pause)
        until(lambda: self.does(chief, "idle"))
        return chief

    def does(self, one: Apart, what: str) -> bool:
        processes = inspection.describe(job.NAME).processes
        return [each.activity for each in processes if each.pid == one.pid] == [what]

    def wait(self, number: int = 2) -> None:
        """Start workers that apply and then wait for the step."""
        before = job.doing("waits for the step")
        for _ in range(number):
            job.begin(self.crew, job.apply, job.wait_for_ever)
        until(lambda: job.doing("waits for the step") == before + number)

    def head(self, number: int, *deeds: Callable[[Any], Any]) -> Apart:
        """Start a chief that takes once, then waits for `number` gradients; return its worker."""
        chief = job.begin(self.crew, job.take(1), job.take(number))
        worker = self.crew.start(job.do, job.NAME, job.work, *deeds)
        until(lambda: inspection.describe(job.NAME).stats.takes == 1)
        until(lambda: self.does(chief, "waits in the queue"))
        if deeds:
            until(lambda: self.does(worker, "idle"))
        return worker


# Each function returns the process at fault, if any. A scene may then stop or kill this process.


def chief_hangs(stage: Stage) -> Apart:
    chief = stage.hung_chief()
    stage.wait()
    return chief


def chief_hangs_and_looks_in(stage: Stage) -> Apart:
    chief = stage.chief(look_in_from_a_thread, job.pause)
    stage.wait()
    return chief


def chief_leaves(stage: Stage) -> None:
    stage.chief().result()
    stage.wait()


def chief_hangs_in_its_block(stage: Stage) -> Apart:
    chief = job.begin(stage.crew, job.apply, job.hold_a_round)
    until(lambda: inspection.describe(job.NAME).round_holder is not None)
    for _ in range(2):
        job.begin(stage.crew, job.wait_for_ever)
    until(lambda: job.doing("waits for the step") == 2)
    return chief


def chief_hangs_in_its_block_before_another(stage: Stage) -> Apart:
    chief = chief_hangs_in_its_block(stage)
    job.begin(stage.crew, job.take(1))
    until(lambda: len(inspection.describe(job.NAME).queue) == 1)
    return chief


def first_chief_hangs(stage: Stage) -> Apart:
    chief = job.begin(stage.crew, job.pause)
    stage.wait()
    return chief


def first_chief_never_comes(stage: Stage) -> None:
    stage.wait()


def second_chief_hangs(stage: Stage) -> Apart:
    """The first chief took, and a second chief has replaced it."""
    stage.hung_chief()
    return chief_hangs(stage)


def second_chief_of_a_dead_one_hangs(stage: Stage) -> Apart:
    job.kill(stage.hung_chief())
    return chief_hangs(stage)


def second_chief_of_one_that_works_now_hangs(stage: Stage) -> Apart:
    stage.chief(job.apply, job.wait_for_ever)
    return chief_hangs(stage)


def chief_hangs_while_others_apply(stage: Stage) -> Apart:
    def apply_now_and_then(acc: Any) -> None:
        while True:
            job.apply(acc)
            time.sleep(OFTEN)

    chief = stage.hung_chief()
    job.begin(stage.crew, apply_now_and_then)
    for _ in range(2):
        job.begin(stage.crew, job.wait_for_ever)
    until(lambda: job.doing("waits for the step") == 2)
    return chief


def worker_hangs(stage: Stage) -> Apart:
    worker = stage.head(2, job.pause)
    stage.wait(1)
    return worker


def worker_leaves(stage: Stage) -> None:
    stage.head(2).result()
    stage.wait(1)


def workers_never_come(stage: Stage) -> None:
    job.begin(stage.crew, job.take(3))
    until(lambda: len(inspection.describe(job.NAME).queue) == 1)
    stage.wait()


@dataclass(frozen=True)
class Scene:
    """A situation of processes, and the stall that must be found in it.

    Attributes:
        play: Sets the situation up.
        strike: What is then done to the process at fault: `kill`, `stop`, or nothing.
        kind: The kind of the stall.
        proved: Whether the stall is proved, not only suspected.
        beside: What is found beside processes that came before: (kind, proved, whether the
            process at fault is named). None: the same as without them.
        later: What is found beside processes that came later, likewise.
    """

    play: Callable[[Stage], Apart | None]
    strike: Callable[[Apart], Any] | None
    kind: StallKind
    proved: bool
    beside: tuple[StallKind, bool, bool] | None = None
    later: tuple[StallKind, bool, bool] | None = None


TAKER, APPLIER = StallKind.TAKER_IDLE, StallKind.APPLIER_IDLE
NOBODY, QUORUM = StallKind.NOBODY_TAKES, StallKind.QUORUM_OUT_OF_REACH
_NAMED: Final = (TAKER, False, True)
_UNNAMED: Final = (TAKER, False, False)  # nobody can know which process should take
_WORKERS: Final = (APPLIER, False, False)
SCENES: Final = (
    Scene(chief_hangs, job.kill, NOBODY, proved=True),
    Scene(chief_hangs, None, TAKER, proved=False),
    Scene(chief_hangs_and_looks_in, None, TAKER, proved=False),
    Scene(chief_hangs, job.stop, NOBODY, proved=True),
    Scene(chief_leaves, None, NOBODY, proved=True),
    Scene(chief_hangs_in_its_block, None, TAKER, proved=False),
    Scene(chief_hangs_in_its_block_before_another, None, TAKER, proved=False),
    Scene(chief_hangs_in_its_block, job.stop, StallKind.ROUND_HOLDER_STOPPED, proved=True),
    Scene(first_chief_hangs, None, TAKER, proved=False, beside=_UNNAMED, later=_UNNAMED),
    Scene(first_chief_hangs, job.stop, NOBODY, proved=True, beside=_NAMED, later=_NAMED),
    Scene(first_chief_hangs, job.kill, NOBODY, proved=True, beside=_NAMED, later=_NAMED),
    Scene(first_chief_never_comes, None, NOBODY, proved=True, beside=_UNNAMED, later=_UNNAMED),
    Scene(second_chief_hangs, None, TAKER, proved=False),
    Scene(second_chief_hangs, job.kill, NOBODY, proved=True),
    Scene(second_chief_of_a_dead_one_hangs, None, TAKER, proved=False),
    Scene(second_chief_of_one_that_works_now_hangs, job.kill, NOBODY, proved=True),
    Scene(chief_hangs_while_others_apply, job.kill, NOBODY, proved=True),
    Scene(worker_hangs, None, APPLIER, proved=False),
    Scene(worker_hangs, job.stop, StallKind.APPLIERS_STOPPED, proved=True),
    Scene(worker_hangs, job.kill, QUORUM, proved=True),
    Scene(worker_leaves, None, QUORUM, proved=True, later=_WORKERS),
    Scene(workers_never_come, None, QUORUM, proved=True, beside=_WORKERS, later=_WORKERS),
)


@pytest.mark.parametrize(
    ("scene", "beside"),
    [
        pytest.param(
            scene,
            beside,
            id=f"{scene.play.__name__}-{getattr(scene.strike, '__name__', '')}-{beside}",
        )
        for scene in SCENES
        for beside in ("nobody", "before", "later")
        # If bystanders make no difference, other tests have the scene without them.
        if beside != "nobody" or scene.beside or scene.later
    ],
)
def test_the_process_at_fault_is_named_and_no_other(crew: Crew, scene: Scene, beside: str) -> None:
    kind, proved, named = scene.kind, scene.proved, True
    if beside == "before":
        bystanders(crew)
        kind, proved, named = scene.beside or (kind, proved, True)
    culprit = scene.play(Stage(crew))
    if culprit is not None and scene.strike is not None:
        scene.strike(culprit)
    if beside == "later":
        bystanders(crew)
        kind, proved, named = scene.later or (kind, proved, True)
    becomes(job.NAME, kind, proved=proved)
    # Wait: a process that has just attached may not have recorded the culprit's death yet.
    at_fault = {culprit.pid} if named and culprit is not None else set()
    until(lambda: accused(the_stall()) == at_fault)
    if beside == "before":
        every_verb_says(the_stall(), proved=proved)


def accused(stall: Stall) -> set[int]:
    return {int(found) for found in re.findall(r"\d{3,}", blame(stall))}


def becomes(name: str, kind: StallKind, *, proved: bool) -> None:
    """Wait until exactly this standstill of a segment is reported."""
    try:
        until(lambda: stalled(name) == [(kind, proved)])
    except AssertionError:
        seen = inspection.describe(name)
        raise AssertionError((seen.summary.stalls, seen.suspected, seen.processes)) from None


def stalled(name: str) -> list[tuple[StallKind, bool]]:
    """Return what is reported of a segment, and whether it is proved."""
    summary = inspection.describe(name).summary
    perhaps = [(summary.suspected.kind, False)] if summary.suspected else []
    return [(stall.kind, True) for stall in summary.stalls] + perhaps


def the_stall() -> Stall:
    for _ in range(100):  # a look during a commit judges nothing
        summary = inspection.describe(job.NAME).summary
        if found := (*summary.stalls, summary.suspected)[0]:
            return found
    raise AssertionError("it is judged no more")


def blame(stall: Stall) -> str:
    """Return the problem without its beginning, which names who waits."""
    return re.sub(r"^pid \d+ waits|waits since \d+ s|for \d+ s", "", stall.problem)


def every_verb_says(stall: Stall, *, proved: bool) -> None:
    """Check that show, list, check, metrics and the order of watch report the stall."""

    def says_it() -> bool:
        shown = run("show", job.NAME).stdout
        listed = ask("list", "--stalled")["segments"]
        found = {
            each["kind"]: each for each in ask("check", job.NAME, status=int(proved))["findings"]
        }
        samples = {
            (each["name"], each["labels"].get("kind")): each["value"]
            for metric in ask("metrics")["metrics"]
            for each in metric["samples"]
            if each["labels"].get("name") == job.NAME
        }
        first = min(Watch([], everywhere=False).look(), key=SORTS["state"])
        return (
            ("stands still" if proved else "perhaps") in shown
            and [one["name"] for one in listed] == [job.NAME]
            and stall.kind in found
            and found[stall.kind]["severity"] == (Severity.WRONG if proved else Severity.NOTE)
            and samples["shmacc_stalled", None] == proved
            and samples["shmacc_perhaps_stalled", None] == (not proved)
            and samples["shmacc_stall", stall.kind] == 1
            and (first.summary is not None and first.summary.name.shared_name == job.NAME)
        )

    until(says_it)


# -- waits across several segments -----------------------------------------------------------------

OTHER: Final = "other"
THIRD: Final = "third"


@pytest.fixture
def others() -> Iterator[None]:
    for name in (OTHER, THIRD):
        ConditionalAccumulator(np.float32, [2], name).close()
    yield
    for name in (OTHER, THIRD):
        inspection.remove(name, force=True)


def attach_all(*names: str) -> dict[str, Any]:
    attached = {name: shmacc.attach(name) for name in names}
    for acc in attached.values():
        acc.snapshot()  # an accumulator attaches at its first call
    return attached


def in_a_circle(wait: Callable[[Any], Any], *names: str) -> Callable[..., None]:
    """Return a function that attaches to all segments, and waits in the first."""

    def process() -> None:
        attached = attach_all(*names)
        wait(attached[names[0]])

    return process


@pytest.mark.usefixtures("others")
@pytest.mark.parametrize(
    "waits", [(job.take(1), job.take(1)), (job.wait_for_ever, job.wait_for_ever)]
)
@pytest.mark.parametrize("beside", ["nobody", "bystanders"])
def test_a_circle_of_waits_is_a_deadlock(crew: Crew, waits: Any, beside: str) -> None:
    first = crew.start(in_a_circle(waits[0], job.NAME, OTHER))
    second = crew.start(in_a_circle(waits[1], OTHER, job.NAME))
    if beside == "bystanders":
        bystanders(crew)
    for name, one, other in ((job.NAME, first, second), (OTHER, second, first)):
        becomes(name, StallKind.DEADLOCK, proved=True)
        (stall,) = inspection.describe(name).summary.stalls
        found = {int(pid) for pid in re.findall(r"pid (\d+)", stall.problem)}
        assert found == {one.pid, other.pid}
        wrong = [each for each in inspection.check(name) if each.severity is Severity.WRONG]
        assert [each.kind for each in wrong] == [StallKind.DEADLOCK]
    first.kill()
    until(lambda: (StallKind.DEADLOCK, True) not in stalled(OTHER))


@pytest.mark.usefixtures("others")
def test_a_circle_of_three_segments_is_a_deadlock(crew: Crew) -> None:
    names = [job.NAME, OTHER, THIRD]
    for first in range(3):
        crew.start(in_a_circle(job.take(1), names[first], names[first - 1]))
    for name in names:
        becomes(name, StallKind.DEADLOCK, proved=True)


@pytest.mark.usefixtures("others")
def test_a_standstill_behind_another_segments_dead_chief_names_both_chiefs(crew: Crew) -> None:
    """The chief of one segment waits for the step of another, whose chief is dead."""
    stage = Stage(crew)

    def as_a_worker_elsewhere(_: Any) -> None:
        with shmacc.attach(OTHER) as other:
            job.wait_for_ever(other)

    dead = job.begin(crew, job.take(1), job.pause, name=OTHER)
    job.once(crew, job.apply, name=OTHER)
    until(lambda: inspection.describe(OTHER).stats.takes == 1)
    chief = stage.chief(as_a_worker_elsewhere)
    stage.wait()
    assert stalled(job.NAME) in ([], [(TAKER, False)])
    pid = job.kill(dead)
    becomes(job.NAME, StallKind.WAITS_ELSEWHERE, proved=True)
    (stall,) = inspection.describe(job.NAME).summary.stalls
    assert f"pid {chief.pid}, which could end that, waits in " in stall.problem
    assert stall.problem.endswith(f"pid {pid}, which did, is dead")
    assert stall.remedy.startswith("start the process that takes")
    assert stalled(OTHER) == [(NOBODY, True)]


@pytest.mark.usefixtures("others")
def test_a_suspected_chief_that_waits_in_another_segment_is_said_to_wait_there(crew: Crew) -> None:
    stage = Stage(crew)

    def take_elsewhere(_: Any) -> None:
        with shmacc.attach(OTHER) as other:
            other.take(1)

    job.begin(crew, job.pause, name=OTHER)  # this process may apply
    chief = stage.chief(take_elsewhere)
    stage.wait()
    becomes(job.NAME, TAKER, proved=False)
    problem = the_stall().problem
    assert f"pid {chief.pid}, which took before, is alive" in problem
    assert "waits in shmacc." in problem
    assert "in no call" not in problem
