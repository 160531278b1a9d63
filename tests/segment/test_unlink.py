"""``unlink`` removes a name, and so does the end of a creator with ``unlink_on_close``."""

import contextlib
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
from helpers import interpreter
from helpers.apart import Apart, Pipe, run_apart
from helpers.opening import KINDS, NAME, apply, exists, in_shared_memory, make

import shmacc
from shmacc import errors, inspection
from shmacc._base.names import SegmentName
from shmacc._segment import removal


@pytest.mark.parametrize("kind", KINDS)
def test_an_unlinked_segment_lives_until_its_last_handle_closes(kind: Any, namespace: str) -> None:
    old = kind(np.float32, shared_name="one")
    frozen = pickle.dumps(old)
    old.unlink()
    old.unlink()
    assert in_shared_memory(namespace) == []
    with pytest.raises(errors.NotFoundError):
        shmacc.attach("one")
    with pytest.raises(errors.NotFoundError):
        pickle.loads(frozen)
    # Old handles go on; the next opener makes a new segment, which they do not touch.
    assert apply(old)
    with kind(np.float64, shared_name="one") as new:
        assert new.num_accumulated() == 0
        assert old.num_accumulated() == 1
        old.unlink()
        shmacc.attach("one").close()
        new.unlink()
    old.close()


def test_unlink_removes_the_name_though_another_thread_closes(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The close happens after `unlink` has checked that the handle is open."""
    acc, may_remove = make(), removal.may_remove

    def close_first(name: SegmentName) -> None:
        acc.close()
        may_remove(name)

    monkeypatch.setattr(removal, "may_remove", close_first)
    acc.unlink()
    assert in_shared_memory(namespace) == []


def test_the_creators_close_removes_the_name(namespace: str) -> None:
    acc = make(unlink_on_close=True)
    with shmacc.attach(NAME) as attached, pickle.loads(pickle.dumps(acc)):
        assert not inspection.describe(NAME).summary.private
        acc.close()
        assert in_shared_memory(namespace) == []
        attached.set_global_step(3)  # the attached handle still works
        assert attached.global_step == 3
    acc.close()


def test_the_creators_close_leaves_a_new_segment_of_the_name() -> None:
    with make(unlink_on_close=True) as old:
        old.unlink()
        make().close()
    assert exists()
    with make(unlink_on_close=True):
        pass  # this handle only attached, so its close removes nothing
    assert exists()
    inspection.remove(NAME)
    with make(unlink_on_close=True):
        inspection.remove(NAME, force=True)
        make().close()
    inspection.remove(NAME)


def test_only_the_creators_close_removes_the_name() -> None:
    with make(unlink_on_close=True) as acc:
        with make(unlink_on_close=True), shmacc.attach(NAME):
            pass
        pickle.loads(pickle.dumps(acc)).close()
        assert exists()
        run_apart(acc.close)
        assert exists()
        assert acc.running
    assert not exists()


def test_the_creators_end_removes_the_name(namespace: str) -> None:
    script = f"""
    acc = shmacc.ConditionalAccumulator("f4", None, "{NAME}", unlink_on_close=True)
    assert shmacc.testing.leaked_names("{namespace}")
    raise SystemExit(0)
    """
    status, _, complaints = interpreter.run(script)
    assert (status, complaints) == (0, "")
    assert in_shared_memory(namespace) == []


def _make_and_stay(*, kept: bool = True, pipe: Pipe) -> None:
    made = make(unlink_on_close=kept)
    pipe.turn("made")
    made.close()


def _make_and_die(*, kept: bool = True) -> None:
    with Apart(partial(_make_and_stay, kept=kept)) as maker:
        assert maker.hear() == "made"


def test_a_process_that_reopens_a_dead_creators_segment_removes_the_name() -> None:
    """Even after several creators were killed, a normal end leaves no name."""
    for _ in range(3):
        _make_and_die()
        assert exists()
    with shmacc.attach(NAME) as worker, make(unlink_on_close=True) as chief:
        with make(unlink_on_close=True):
            pass  # `chief` already has the duty to remove the name
        assert exists()
        run_apart(chief.close)
        assert exists()
        chief.close()
        assert not exists()
        assert not worker.running  # as after the creator's close


def test_other_openings_do_not_take_over_the_duty_to_remove_the_name() -> None:
    _make_and_die()
    shmacc.attach(NAME).close()
    make().close()
    with pytest.raises(errors.InvalidArgumentError, match="dtype"):
        shmacc.ConditionalAccumulator("f8", None, NAME, unlink_on_close=True)
    with make() as attached, pickle.loads(pickle.dumps(attached)) as unpickled:
        assert unpickled.running
    assert exists()
    with Apart(_make_and_stay).ready() as living:  # `living` has the duty now
        make(unlink_on_close=True).close()
        assert exists()
        living.say()
        living.wait()
    assert not exists()


def test_a_name_without_unlink_on_close_stays() -> None:
    _make_and_die(kept=False)
    make(unlink_on_close=True).close()
    assert exists()
    inspection.remove(NAME)


_OF_EACH_KIND: dict[str, Callable[[], Any]] = {
    "dense": partial(shmacc.ConditionalAccumulator, "f4", (3,), NAME, unlink_on_close=True),
    "sparse": partial(shmacc.SparseConditionalAccumulator, "f4", (3,), NAME, unlink_on_close=True),
    "group": partial(
        shmacc.AccumulatorGroup, {"w": shmacc.TensorSpec((3,))}, NAME, unlink_on_close=True
    ),
    "arrays": partial(shmacc.SharedArrays, {"w": np.zeros(3)}, NAME, unlink_on_close=True),
    "parameters": partial(shmacc.Parameters, {"w": np.zeros(3)}, NAME, unlink_on_close=True),
}


def _hold(constructor: Callable[[], Any], pipe: Pipe) -> None:
    opened = constructor()
    pipe.turn("open")
    opened.close()


@pytest.mark.parametrize("dies", ["before", "meanwhile"])
@pytest.mark.parametrize("kind", _OF_EACH_KIND)
def test_every_kind_passes_on_the_duty_to_remove_its_name(kind: str, dies: str) -> None:
    """A standby takes over the duty, whether it attached before or after the maker's death."""
    constructor = _OF_EACH_KIND[kind]
    with contextlib.ExitStack() as last:
        with Apart(partial(_hold, constructor)).ready():
            if dies == "meanwhile":
                standby = last.enter_context(Apart(partial(_hold, constructor)))
                standby.hear()
                constructor().close()
                assert exists()  # its maker is alive
        assert exists()
        if dies == "before":
            standby = last.enter_context(Apart(partial(_hold, constructor)))
            standby.hear()
        with shmacc.attach(NAME) as worker:
            standby.say()
            assert standby.wait() == 0
            assert not exists()
            assert not getattr(worker, "running", False)


def test_the_duty_to_remove_the_name_passes_through_many_standbys(namespace: str) -> None:
    """Each standby is killed before the next; the last one's close removes the name."""
    constructor = _OF_EACH_KIND["group"]
    with contextlib.ExitStack() as living:
        line = [living.enter_context(Apart(partial(_hold, constructor))) for _ in range(4)]
        for each in line:
            each.hear()
        for each in line[:-1]:
            each.kill()
        assert exists()
        line[-1].say()
        assert line[-1].wait() == 0
    assert in_shared_memory(namespace) == []
