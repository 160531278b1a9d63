"""``if_exists`` decides: attach to an existing segment, raise, or replace it."""

import os
import pickle
from typing import Any

import pytest
from helpers.apart import Apart, Pipe, needs_root, run_apart
from helpers.departures import bystander
from helpers.opening import NAME, apply, exists, make, path

from shmacc import SparseConditionalAccumulator, _core, errors, inspection


def race(if_exists: str, *, pipe: Pipe) -> None:
    """Construct at the first message, and keep the handle until the second."""
    pipe.turn()
    try:
        with make(if_exists=if_exists):
            pipe.turn("made it")
    except errors.ShmaccError as error:
        pipe.turn(type(error).__name__)


def outcomes_of_two(if_exists: str) -> list[str]:
    """Let two processes construct at once; return the outcome of each."""
    with Apart(race, if_exists) as one, Apart(race, if_exists) as other:
        for racer in (one, other):
            racer.hear()
        for racer in (one, other):
            racer.say()
        met = [racer.hear() for racer in (one, other)]
        for racer in (one, other):
            racer.finish()
    return sorted(met)


def test_error_names_the_existing_segment(namespace: str) -> None:
    with make(if_exists="error") as acc:
        acc.apply_grad(1.0)
        with pytest.raises(FileExistsError, match=f"in the namespace '{namespace}'") as caught:
            make(if_exists="error")
        error = pickle.loads(pickle.dumps(caught.value))
        assert type(error) is errors.AlreadyExistsError
        assert (error.shared_name, error.namespace) == (NAME, namespace)
        assert str(error) == str(caught.value)
        assert acc.num_accumulated() == 1
        with make() as same:
            assert same.num_accumulated() == 1
        acc.unlink()
    with make(if_exists="error") as acc:
        acc.unlink()


def test_error_is_also_raised_for_a_file_that_is_no_segment() -> None:
    with make():
        at = path()
        inspection.remove(NAME, force=True)
    at.write_bytes(b"no segment" * 1000)
    try:
        with pytest.raises(errors.AlreadyExistsError):
            make(if_exists="error")
        with pytest.raises(errors.DataLossError):
            make(if_exists="replace")
        assert at.exists()
    finally:
        at.unlink()


@pytest.mark.parametrize("word", ["error", "replace"])
def test_another_programs_empty_file_counts_as_no_segment(word: Any) -> None:
    path().touch()
    with make(if_exists=word) as acc:
        assert acc.apply_grad(1.0)
        acc.unlink()


@pytest.mark.parametrize("word", ["error", "replace"])
def test_an_interrupted_removal_is_finished(word: Any) -> None:
    """A process marked the segment as removed, and was killed before it removed the name."""
    with make():
        at = path()
        spare = at.with_name(at.name + "x")
        os.link(at, spare)
        inspection.remove(NAME, force=True)
        spare.rename(at)
    with make(if_exists=word) as acc:
        assert acc.num_accumulated() == 0
        acc.unlink()


def test_replace_makes_a_new_segment_of_another_shape() -> None:
    with make() as acc:
        acc.apply_grad([1.0, 2.0])
        acc.set_global_step(7)
    with SparseConditionalAccumulator("f8", [None, 3], NAME, if_exists="replace") as new:
        assert (new.num_accumulated(), new.global_step) == (0, 0)
        assert new.stats().attached == 1
        new.unlink()
    assert not exists()


def test_replace_is_refused_while_a_process_uses_it() -> None:
    with make() as acc:
        pid = os.getpid()
        with pytest.raises(RuntimeError, match=f"in use by living processes: pid {pid}") as own:
            make(if_exists="replace")
        error = pickle.loads(pickle.dumps(own.value))
        assert type(error) is errors.FailedPreconditionError
        assert error.pids == (pid,)
        assert acc.apply_grad(1.0)

    with bystander(NAME) as holder:
        with pytest.raises(errors.FailedPreconditionError) as others:
            make(if_exists="replace")
        assert others.value.pids == (holder.pid,)
        holder.kill()
        with make(if_exists="replace") as acc:
            assert acc.num_accumulated() == 0
            acc.unlink()


@needs_root
def test_replace_leaves_another_users_segment() -> None:
    def replace() -> str:
        with pytest.raises(errors.PermissionDeniedError):
            make(if_exists="replace")
        with pytest.raises(errors.AlreadyExistsError):
            make(if_exists="error")
        return "refused"

    make().close()
    assert run_apart(replace, uid=65534) == "refused"
    with make() as acc:
        acc.unlink()


def test_one_of_two_processes_that_replace_at_once_succeeds() -> None:
    for _ in range(10):
        make().close()
        assert outcomes_of_two("replace") == ["FailedPreconditionError", "made it"]
    inspection.remove(NAME)


def test_a_segment_replaced_while_opened_is_not_attached(monkeypatch: pytest.MonkeyPatch) -> None:
    look = _core.open

    def replaced_after(*args: Any) -> Any:
        monkeypatch.setattr(_core, "open", look)
        found = look(*args)
        make(if_exists="replace").close()
        return found

    with make() as acc:
        apply(acc)
    monkeypatch.setattr(_core, "open", replaced_after)
    with make() as acc:
        assert acc.num_accumulated() == 0
        acc.unlink()


def test_one_of_two_processes_that_create_at_once_succeeds() -> None:
    for _ in range(10):
        assert outcomes_of_two("error") == ["AlreadyExistsError", "made it"]
        inspection.remove(NAME)
