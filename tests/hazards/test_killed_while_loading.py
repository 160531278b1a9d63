"""A killed or interrupted load has restored everything or nothing, or it must be repeated.

`shmacc.load`: "Restore all states of a file that `save` has written, or none."
"""

import itertools
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers import killing_updates as killing
from helpers.apart import Apart, Pipe, run_apart
from helpers.at_every_point import Points, coming_between
from helpers.half_loads import half_loaded, loading
from helpers.killing_scenes import path as segment
from helpers.killing_updates import GROUP, PARAMS, TableScene, UpdateScene
from helpers.lock_holder import held
from helpers.stepping_tracer import needs_ptrace
from helpers.stepping_walk import instants, walk
from helpers.support import EVERY_INSTANT, AlarmError, everything

import shmacc
from shmacc import AccumulatorGroup, Parameters, errors, inspection, optim

Both = dict[str, Any]
NOT_LOADED: Final = "died before the end"
SCENE: Final = UpdateScene("a load", optim.SGD(0.5, 0.5), lanes=2)
OF_A_TABLE: Final = TableScene(
    "a load of a table",
    optim.SGD(0.5, 0.5),
    lanes=2,
    there=(1, 2, 3, 4, 2**40),
    gone=(3,),
    changed=(1, 5, 6, 7, 8, 9),
    removed=(2, 5),
)
# Each n-th line is interrupted.
_LINES: Final = 1 if EVERY_INSTANT else 13


def attach() -> Both:
    return {"group": AccumulatorGroup.attach(GROUP), "params": Parameters.attach(PARAMS)}


def make(scene: UpdateScene) -> Both:
    params, group = scene.make()
    return {"group": group, "params": params}


def leave(both: Both) -> None:
    for one in both.values():
        one.unlink()
        one.close()


def one_round(both: Both, scene: UpdateScene = SCENE) -> bool:
    """Make a round of one gradient; return whether its update was made."""
    both["group"].apply(scene.gradient(7), both["group"].global_step)
    return scene.one_round(both["params"], both["group"])


@pytest.fixture
def both() -> Iterator[Both]:
    made = make(SCENE)
    yield made
    leave(made)


@pytest.fixture
def path(both: Both, tmp_path: Path) -> Path:
    """Return a file that was saved one round ago."""
    saved = tmp_path / "checkpoint.npz"
    shmacc.save(saved, both)
    assert one_round(both)
    return saved


def _save(scene: UpdateScene, path: Path) -> tuple[dict[str, bytes], dict[str, bytes]]:
    """Save, and make a round; return the contents as saved and as they are now."""
    both = make(scene)
    shmacc.save(path, both)
    saved = everything(both)
    one_round(both, scene)
    before = everything(both)
    leave(both)
    return saved, before


def _judge(
    scene: UpdateScene, path: Path, saved: dict[str, bytes], before: dict[str, bytes]
) -> str:
    """Check what the next chief finds after a death, and that it can load again."""
    both = attach()
    try:
        if both["params"]._half_loaded:
            _is_refused(scene, both, path)
            found = "half"
        else:
            now = everything(both)
            assert now in (before, saved)
            found = "all" if now == saved else "nothing"
        shmacc.load(path, both)
        assert everything(both) == saved
        assert one_round(both, scene)
        assert inspection.check(PARAMS) == ()
    finally:
        leave(both)
    return found


def _is_refused(scene: UpdateScene, both: Both, path: Path) -> None:
    group, params = both["group"], both["params"]
    group.apply(scene.gradient(8), group.global_step)
    with group.round(1) as taken:
        for call in (params.update, params.skip):
            with pytest.raises(errors.FailedPreconditionError, match=NOT_LOADED):
                call(taken)
    with pytest.raises(errors.FailedPreconditionError, match="load again"):
        shmacc.save(path.with_name("torn.npz"), both)


@needs_ptrace
@pytest.mark.parametrize("scene", [SCENE, OF_A_TABLE], ids=str)
def test_a_killed_load_is_all_nothing_or_refused(scene: UpdateScene, tmp_path: Path) -> None:
    path = tmp_path / "checkpoint.npz"
    saved, was = run_apart(_save, scene, path)

    def update(params: Parameters, group: AccumulatorGroup) -> None:
        one_round({"group": group, "params": params}, scene)

    def load(params: Parameters, group: AccumulatorGroup) -> None:
        update(params, group)
        shmacc.load(path, {"group": group, "params": params})

    before = killing.images(scene, update)
    after = killing.images(scene, load)
    looks = walk(loading(path, attach), before, after, GROUP, to_mark=True)
    found = [_judge(scene, path, saved, was) for _ in instants(looks, part=4)]
    assert [kind for kind, _ in itertools.groupby(found)] == ["nothing", "half", "all"]


@needs_ptrace
def test_a_save_fails_if_a_load_died_half_done(
    both: Both, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = AccumulatorGroup.state

    def state(self: AccumulatorGroup, *, timeout: float | None = None) -> Any:
        monkeypatch.undo()
        with half_loaded(both["params"], loading(path, attach)) as loader:
            loader.kill()
        return real(self, timeout=timeout)

    monkeypatch.setattr(AccumulatorGroup, "state", state)
    with pytest.raises(errors.FailedPreconditionError, match="load again"):
        shmacc.save(path.with_name("torn.npz"), both)


@needs_ptrace
def test_a_chief_whose_round_was_open_before_a_load_makes_no_update(both: Both, path: Path) -> None:
    """The parameters have changed since its round began."""
    both["group"].apply(SCENE.gradient(9), both["group"].global_step)
    round_ = both["group"].round(1)
    taken = round_.__enter__()
    with half_loaded(both["params"], loading(path, attach)) as loader:
        with pytest.raises(errors.DeadlineExceededError):
            both["params"].update(taken, timeout=0)
        loader.finish()
    with pytest.raises(errors.FailedPreconditionError, match="ended before its update"):
        both["params"].update(taken)
    with pytest.raises(errors.FailedPreconditionError, match="ended before its block"):
        round_.__exit__(None, None, None)
    assert one_round(both)


@needs_ptrace
def test_a_load_waits_for_another_load(both: Both, path: Path) -> None:
    with half_loaded(both["params"], loading(path, attach)) as loader, Apart(_load, path) as other:
        other.hear()
        loader.finish()
        other.hear()
    assert not both["params"]._half_loaded
    assert one_round(both)


def _load(path: Path, *, pipe: Pipe) -> None:
    both = attach()
    pipe.say()
    shmacc.load(path, both)
    pipe.say()
    for one in both.values():
        one.close()


# An interrupt may come between a file's opening and its block; a collection closes the file.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_load_that_a_handler_interrupts_restores_all_or_nothing(both: Both, path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    state = {name: one.state() for name, one in both.items()}
    before = everything(both)
    shmacc.load(path, both)
    saved = everything(both)
    found = set()
    for number in itertools.count(1, _LINES):
        for name, one in both.items():
            one.restore(state[name])
        assert everything(both) == before
        with suppress(KeyboardInterrupt), coming_between(interrupt, Points.LINES, number) as it:
            shmacc.load(path, both)
        now = everything(both)
        assert now in (before, saved), f"at line {number}"
        assert not both["params"]._half_loaded
        found.add(now == saved)
        if not it.came:
            break
    assert found == {True, False}


@pytest.mark.parametrize("name", [PARAMS, GROUP])
def test_a_signal_ends_a_loads_wait_for_a_lock(both: Both, path: Path, name: str) -> None:
    """While a load waits for one segment's lock, it does not hold the other's."""
    before = everything(both)

    def ring(*_: object) -> None:
        other = both["group" if name == PARAMS else "params"]
        other.state(timeout=0)
        raise AlarmError

    old = signal.signal(signal.SIGALRM, ring)
    try:
        with held(name) as holder:
            signal.setitimer(signal.ITIMER_REAL, 0.05, 0.05)
            with pytest.raises(AlarmError):
                shmacc.load(path, both)
            signal.setitimer(signal.ITIMER_REAL, 0)
            holder.kill()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)
    assert everything(both) == before


def test_threads_load_one_after_the_other(both: Both, tmp_path: Path) -> None:
    paths, known = [], []
    for number in range(3):
        paths.append(tmp_path / f"{number}.npz")
        shmacc.save(paths[-1], both)
        known.append(everything(both))
        one_round(both)
    known.append(everything(both))
    start = threading.Barrier(3)
    told: list[errors.ShmaccError] = []

    def load(path: Path) -> None:
        start.wait()
        try:
            for _ in range(20):
                shmacc.load(path, both)
        except errors.ShmaccError as error:
            told.append(error)

    threads = [threading.Thread(target=load, args=(each,)) for each in paths]
    for thread in threads:
        thread.start()
    saved = tmp_path / "beside.npz"
    for _ in range(20):
        with suppress(errors.FailedPreconditionError):  # loads go on all the time
            shmacc.save(saved, both)
            with np.load(saved) as file:
                seen = {key.replace("/", "."): file[key].tobytes() for key in file.files}
            assert seen in known
    for thread in threads:
        thread.join()
    assert told == []
    assert everything(both) in known


@pytest.mark.parametrize("full", ["group", "params"])
def test_a_load_without_room_changes_nothing(tmp_path: Path, full: str) -> None:
    """The failed load keeps no memory, either."""
    path = tmp_path / "checkpoint.npz"
    table = np.ones((20_000, 8), np.float32)

    def make_large() -> Both:
        params = Parameters({"table": table}, PARAMS, optimizer=optim.SGD(1), if_exists="replace")
        specs = params.member_specs(["table"])
        return {"group": AccumulatorGroup(specs, GROUP, if_exists="replace"), "params": params}

    both = make_large()
    both["group"].apply({"table": (np.arange(len(table)), table)}, 0)
    shmacc.save(path, both)
    for one in both.values():
        one.close()
    both = make_large()
    both["params"].restore(both["params"].state() | {"step": np.array(5)})
    before, memory = everything(both), _memory()
    both[full]._handle.keep_free(1 << 47)
    with pytest.raises(errors.ResourceExhaustedError):
        shmacc.load(path, both)
    assert everything(both) == before
    assert not both["params"]._half_loaded
    assert _memory() <= memory + 200_000
    both[full]._handle.keep_free(0)
    shmacc.load(path, both)
    assert (both["params"].step, both["group"].num_accumulated()) == (0, 1)
    leave(both)


def _memory() -> int:
    return sum(os.stat(segment(name)).st_blocks * 512 for name in (PARAMS, GROUP))  # noqa: PTH116


def test_one_segment_under_two_names_is_refused(both: Both, path: Path) -> None:
    before = everything(both)
    with Parameters.attach(PARAMS) as again:
        for call in (shmacc.save, shmacc.load):
            with pytest.raises(errors.InvalidArgumentError, match="'params' and 'again' are the"):
                call(path, {**both, "again": again})
    assert everything(both) == before
