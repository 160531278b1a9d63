"""A process that dies while it loads a checkpoint leaves nothing that anybody trains on."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator  # noqa: TC003  a fixture's return type is looked at
from contextlib import suppress
from pathlib import Path  # noqa: TC003  likewise
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.apart import Apart, Pipe

import shmacc
from shmacc import AccumulatorGroup, Parameters, errors, optim

if TYPE_CHECKING:
    from collections.abc import Callable

Both = dict[str, Any]
NOT_LOADED: Final = "load of a checkpoint into them has not come to its end"


@pytest.fixture
def both() -> Iterator[Both]:
    """Parameters and a group of their gradients, under names."""
    with (
        Parameters({"a": np.zeros(3)}, "params", optimizer=optim.SGD(1, 0.5)) as params,
        Parameters({"b": np.zeros(2)}, "more", optimizer=optim.SGD(1)) as more,
        AccumulatorGroup(params.member_specs(), "grads") as group,
    ):
        yield {"grads": group, "params": params, "more": more}
        for one in (group, params, more):
            one.unlink()


@pytest.fixture
def path(both: Both, tmp_path: Path) -> Path:
    """What was saved after a round; by now there was another one."""
    saved = tmp_path / "checkpoint.npz"
    one_round(both)
    shmacc.save(saved, both)
    one_round(both)
    return saved


def one_round(both: Both) -> bool:
    """Make a round of one gradient."""
    step = both["grads"].global_step
    assert both["grads"].apply({"a": np.full(3, step + 1.0)}, step)
    with both["grads"].round(1) as taken:
        updated = both["params"].update(taken)
        assert isinstance(updated, bool)
        return updated


def everything(both: Both) -> dict[str, bytes]:
    """All that is saved."""
    return {
        f"{name}.{key}": saved.tobytes()
        for name, one in both.items()
        for key, saved in one.state().items()
    }


def load_until(path: Path, both: Both, what: str, reach: Callable[[], object]) -> None:
    """Load, and do something else where one of the restores would begin."""
    kind: Any = AccumulatorGroup if what == "restore" else Parameters
    setattr(kind, what, lambda *_: reach())
    shmacc.load(path, both)


def die() -> None:
    """As by the kernel."""
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("what", ["restore", "_end_load"])
def test_no_update_is_made_until_it_is_loaded_again(both: Both, path: Path, what: str) -> None:
    """Also if steps alone would allow it: the parameters are older than the group, or as old."""
    with Apart(load_until, path, both, what, die) as loader:
        assert os.WTERMSIG(loader.wait()) == signal.SIGKILL
    group, params = both["grads"], both["params"]
    assert params.step == 1
    assert group.global_step == (2 if what == "restore" else 1)
    group.apply({"a": np.ones(3)}, group.global_step)
    with group.round(1) as taken:
        for call in (params.update, params.skip):
            with pytest.raises(errors.FailedPreconditionError, match=NOT_LOADED):
                call(taken)
    with pytest.raises(errors.FailedPreconditionError, match="load again"):
        shmacc.save(path.with_name("torn.npz"), both)
    shmacc.load(path, both)
    _is_as_saved(both)


def _is_as_saved(both: Both) -> None:
    assert (both["params"].step, both["grads"].global_step, both["more"].step) == (1, 1, 0)
    np.testing.assert_array_equal(both["params"]["a"], [-1] * 3)
    assert one_round(both)
    np.testing.assert_array_equal(both["params"]["a"], [-1 - 2 - 0.5] * 3)


def test_a_second_death_changes_nothing(both: Both, path: Path) -> None:
    for what in ("_end_load", "restore", "restore"):
        with Apart(load_until, path, both, what, die) as loader:
            loader.wait()
    shmacc.load(path, both)
    _is_as_saved(both)


def test_what_fails_after_a_death_leaves_the_mark(both: Both, path: Path) -> None:
    """It can only put back what the dead one left, which is not to be trained on."""
    with Apart(load_until, path, both, "restore", die) as loader:
        loader.wait()

    def fail(*, pipe: Pipe) -> None:
        def refuse() -> None:
            raise errors.ResourceExhaustedError("full")

        with suppress(errors.ResourceExhaustedError):
            load_until(path, both, "restore", refuse)
        pipe.say()

    with Apart(fail) as loader:
        loader.hear()
    with pytest.raises(errors.FailedPreconditionError, match=NOT_LOADED):
        one_round(both)
    shmacc.load(path, both)
    _is_as_saved(both)


def test_a_chief_whose_round_is_open_makes_no_update(
    both: Both, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It began with parameters that are others by now."""
    group, params = both["grads"], both["params"]
    group.apply({"a": np.ones(3)}, group.global_step)
    real = AccumulatorGroup.restore
    round_ = group.round(1)
    taken = round_.__enter__()

    def refuse() -> None:
        with pytest.raises(errors.FailedPreconditionError, match="is loading a checkpoint"):
            params.update(taken)

    def restore(self: AccumulatorGroup, state: Any) -> None:
        refuse()
        real(self, state)
        refuse()

    with monkeypatch.context() as patched:
        patched.setattr(AccumulatorGroup, "restore", restore)
        shmacc.load(path, both)
    with pytest.raises(errors.FailedPreconditionError, match="ended before its update"):
        params.update(taken)
    with pytest.raises(errors.FailedPreconditionError, match="ended before its block"):
        round_.__exit__(None, None, None)
    _is_as_saved(both)


def _load_and_wait(path: Path, both: Both, *, pipe: Pipe) -> None:
    def reach() -> None:
        pipe.say()
        pipe.hear()

    load_until(path, both, "restore", reach)


def test_two_processes_do_not_load_at_once(both: Both, path: Path) -> None:
    with Apart(_load_and_wait, path, both) as loader:
        loader.hear()
        before = everything(both)
        with pytest.raises(errors.FailedPreconditionError, match=f"pid {loader.pid} is loading"):
            shmacc.load(path, both)
        assert everything(both) == before
    shmacc.load(path, both)  # for it is dead
    _is_as_saved(both)


def test_a_restore_by_another_meanwhile_is_an_error(
    both: Both, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, params = everything(both), both["params"]
    state, real = params.state(), AccumulatorGroup.restore

    def restore(self: AccumulatorGroup, of_group: Any) -> None:
        params.restore(state)
        real(self, of_group)

    with monkeypatch.context() as patched:
        patched.setattr(AccumulatorGroup, "restore", restore)
        with pytest.raises(errors.FailedPreconditionError, match="restored by somebody else"):
            shmacc.load(path, both)
    assert everything(both) == before
    shmacc.load(path, both)
    _is_as_saved(both)
