"""When an opener makes a segment, finds one or is refused, and what removes a name."""

from __future__ import annotations

import os
import pickle
import stat
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers import interpreter
from helpers.apart import Apart, Pipe, forks, needs_root, run_apart
from helpers.support import SHM_DIRECTORY, refused

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors, inspection

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = forks

KINDS: Final = (ConditionalAccumulator, SparseConditionalAccumulator)
NAMESPACE: Final = "SHMACC_NAMESPACE"
NAME: Final = "opened"


def make(**keywords: Any) -> ConditionalAccumulator:
    """Construct under the name of these tests."""
    return ConditionalAccumulator("f4", None, NAME, **keywords)


def apply(acc: Any) -> bool:
    """Apply a gradient."""
    if type(acc) is ConditionalAccumulator:
        return acc.apply_grad(np.ones((3, 2)))
    accepted: bool = acc.apply_grad([0], np.ones((1, 2)))
    return accepted


def in_shared_memory(namespace: str) -> list[Path]:
    """List what stands in /dev/shm for this namespace."""
    return [p for p in Path(SHM_DIRECTORY).iterdir() if namespace in p.name]


def exists() -> bool:
    """Whether the name leads to anything."""
    return os.path.lexists(path())


def path() -> Path:
    """The segment's file."""
    return Path(inspection.resolve(NAME).path)


def hold(*, pipe: Pipe) -> None:
    """Have it attached until told to end."""
    with shmacc.attach(NAME):
        pipe.say()
        pipe.hear()


def race(if_exists: str, *, pipe: Pipe) -> None:
    """Construct when told to; keep the handle until told to end."""
    pipe.say()
    pipe.hear()
    try:
        with make(if_exists=if_exists):
            pipe.say("made it")
            pipe.hear()
    except errors.ShmaccError as error:
        pipe.say(type(error).__name__)
        pipe.hear()


def outcomes_of_two(if_exists: str) -> list[str]:
    """Let two processes construct at once, and say what each met."""
    with Apart(race, if_exists) as one, Apart(race, if_exists) as other:
        for racer in (one, other):
            racer.hear()
        for racer in (one, other):
            racer.say()
        met = [racer.hear() for racer in (one, other)]
        for racer in (one, other):
            racer.say()
            racer.result()
    return sorted(met)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "bad", ["a/b", "/a", "a b", "naïve", "x" * 201, "a\n", "a\0b", "*", 5, b"a"], ids=repr
)
def test_names_refused(kind: Any, bad: Any, namespace: str) -> None:
    with refused():
        kind(np.float32, shared_name=bad)
    if isinstance(bad, str):
        with refused():
            shmacc.attach(bad)
    assert in_shared_memory(namespace) == []


@pytest.mark.parametrize("name", ["a", "A.b_c-9", ".", "..", "-", "x" * 200])
def test_names_accepted(name: str, namespace: str) -> None:
    with ConditionalAccumulator(np.float32, shared_name=name) as acc:
        assert acc.shared_name == name
        files = in_shared_memory(namespace)
        assert files
        # Attributable: this library's, under its namespace, with the name in clear.
        for file in files:
            assert file.name.startswith(("shmacc.", "sem.shmacc."))
        assert any(name in file.name for file in files)
        shmacc.attach(name).close()
        acc.unlink()
        assert in_shared_memory(namespace) == []


def test_attach_of_nothing_names_the_namespace(namespace: str) -> None:
    for _ in range(2):
        with pytest.raises(FileNotFoundError, match=f"in the namespace '{namespace}'") as caught:
            shmacc.attach("nobody")
        error = pickle.loads(pickle.dumps(caught.value))
        assert type(error) is errors.NotFoundError
        assert (error.shared_name, error.namespace) == ("nobody", namespace)
        assert str(error) == str(caught.value)
    assert in_shared_memory(namespace) == []


@pytest.mark.parametrize("bad", ["a/b", "x" * 61, "a b", "ä"])
def test_bad_namespace(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NAMESPACE, bad)
    calls: tuple[Callable[[], Any], ...] = (
        lambda: ConditionalAccumulator(np.float32),
        lambda: SparseConditionalAccumulator(np.float32, shared_name="a"),
        lambda: shmacc.attach("a"),
    )
    for call in calls:
        with refused():
            call()


def test_namespace_is_read_when_a_name_is_opened(
    namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ConditionalAccumulator(np.float32, shared_name="same") as here:
        here.apply_grad(1.0)
        frozen = pickle.dumps(here)
        with monkeypatch.context() as patch:
            patch.setenv(NAMESPACE, namespace + "-2")
            with pytest.raises(errors.NotFoundError):
                shmacc.attach("same")
            with ConditionalAccumulator(np.float64, shared_name="same") as there:
                assert there.num_accumulated() == 0
                there.unlink()
            # A pickled handle carries its whole system name.
            with pickle.loads(frozen) as again:
                assert again.num_accumulated() == 1
        here.unlink()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("umask", [0o000, 0o077, 0o177])
@pytest.mark.parametrize("mode", [0o600, 0o660, 0o666])
def test_mode_is_exact_whatever_the_umask(kind: Any, umask: int, mode: int, namespace: str) -> None:
    before = os.umask(umask)
    try:
        with kind(np.float32, mode=mode):
            modes = {stat.S_IMODE(p.stat().st_mode) for p in in_shared_memory(namespace)}
    finally:
        os.umask(before)
    assert modes == {mode}


@pytest.mark.parametrize("bad", [-1, 0o10000, 6.0, "600", 0o400], ids=repr)
def test_mode_refused(bad: Any, namespace: str) -> None:
    with refused():
        ConditionalAccumulator(np.float32, mode=bad)
    assert in_shared_memory(namespace) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("other", "what", "existing", "asked"),
    [
        ({"dtype": "f8"}, "dtype", "float32", "float64"),
        ({"reduction_type": "SUM"}, "reduction_type", "MEAN", "SUM"),
        ({"shape": (3, 4)}, "shape", "[3,2]", "[3,4]"),
        ({"shape": (3,)}, "shape", "[3,2]", "[3]"),
        ({"shape": (None, 2)}, "shape", "[3,2]", "[?,2]"),
        ({"shape": ()}, "shape", "[3,2]", "[]"),
        ({"mode": 0o666}, "mode", "0600", "0666"),
    ],
)
def test_a_disagreement_names_both_values_and_how_to_get_rid_of_the_old_one(
    kind: Any, other: dict[str, Any], what: str, existing: str, asked: str
) -> None:
    first = {"dtype": "f4", "shape": (3, 2), "shared_name": NAME}
    with kind(**first) as acc:
        apply(acc)
        with refused() as caught:
            kind(**first | other)
        error = pickle.loads(pickle.dumps(caught.value))
        assert (error.what, error.existing, error.asked) == (what, existing, asked)
        assert f"exists with {what} {existing}, but {asked} was asked for" in str(error)
        assert f"shmacc-inspect remove {error.segment}" in str(error)
        with kind(**first) as same:
            assert same.num_accumulated() == 1
        acc.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_disagreement_of_kind(kind: Any) -> None:
    (other,) = set(KINDS) - {kind}
    with kind(np.float32, shared_name="one") as acc:
        with pytest.raises(errors.InvalidArgumentError) as caught:
            other(np.float32, shared_name="one")
        message = str(caught.value).lower()
        assert "sparse" in message
        assert "dense" in message or "conditionalaccumulator" in message.replace(
            "sparseconditionalaccumulator", ""
        )
        with shmacc.attach("one") as attached:
            assert type(attached) is kind
        acc.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_no_shape_agrees_with_any_shape(kind: Any) -> None:
    with kind(np.float32, (3, 2), "one") as acc:
        with kind(np.float32, None, "one") as taken_over, kind.attach("one") as attached:
            assert acc.shape == taken_over.shape == attached.shape == (3, 2)
        acc.unlink()
    with kind(np.float32, None, "two") as acc:
        # The other way round it is a disagreement: the segment's own is "unknown".
        with refused():
            kind(np.float32, (3, 2), "two")
        acc.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_private_ones(kind: Any, namespace: str) -> None:
    with kind(np.float32) as one, kind(np.float32, None, "") as two:
        assert one.shared_name
        assert one.shared_name != two.shared_name
        apply(one)
        with shmacc.attach(one.shared_name) as same, pickle.loads(pickle.dumps(one)) as again:
            assert same.num_accumulated() == again.num_accumulated() == 1
            assert two.num_accumulated() == 0
        assert one.num_accumulated() == 1
    assert in_shared_memory(namespace) == []


@pytest.mark.parametrize("kind", KINDS)
def test_a_name_without_a_shared_name_warns_that_it_is_private(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """TensorFlow's users expect other processes to find it by its name."""
    with (
        kind(np.float32, name="grads") as private,
        kind(np.float32),
        kind(np.float32, shared_name="one", name="grads") as shared,
        kind(np.float32, shared_name="one", name="other"),
        pickle.loads(pickle.dumps(private)),
    ):
        (record,) = caplog.records
        assert (record.name, record.levelname) == ("shmacc", "WARNING")
        for part in ("name='grads'", kind.__name__, "private", "shared_name='grads'"):
            assert part in record.getMessage()
        shared.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_what_an_earlier_run_left_is_one_line_in_the_log(
    kind: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Whose it is, since when, at which step."""
    caplog.set_level("INFO", "shmacc")
    started = datetime.now(UTC) - timedelta(seconds=1)
    kind(np.float32, shared_name="one").close()
    kind(np.float32, shared_name="one").close()
    assert caplog.records == [], "nothing is left in it"
    with kind.attach("one") as left:
        apply(left)
    kind(np.float32, shared_name="one").close()
    with kind.attach("one") as again:
        again.take(1)
    shmacc.attach("one").close()
    lines = [record.getMessage() for record in caplog.records]
    assert {(record.name, record.levelname) for record in caplog.records} == {("shmacc", "INFO")}
    since = f"made by uid {os.geteuid()} at"
    assert [("'one'" in line, since in line) for line in lines] == [(True, True)] * 3
    assert [line.split(": ", 1)[1] for line in lines] == [
        "its step is 0, gradients pending: 1",
        "its step is 0, gradients pending: 1",
        "its step is 1, gradients pending: 0",
    ]
    (made,) = {line.split(": ", 1)[0].split(" at ")[1] for line in lines}
    assert started <= datetime.fromisoformat(made) <= datetime.now(UTC)
    with kind.attach("one") as last:
        last.unlink()


@pytest.mark.parametrize("kind", KINDS)
def test_two_handles_in_one_process_are_independent(kind: Any) -> None:
    first = kind(np.float32, shared_name="one")
    second = kind(np.float32, shared_name="one")
    apply(first)
    first.close()
    first.close()
    with pytest.raises(errors.FailedPreconditionError):
        apply(first)
    assert second.num_accumulated() == 1
    assert apply(second)
    assert second.take(2).count == 2
    second.unlink()
    second.close()


@pytest.mark.parametrize("kind", KINDS)
def test_unlink_is_as_with_files(kind: Any, namespace: str) -> None:
    old = kind(np.float32, shared_name="one")
    frozen = pickle.dumps(old)
    old.unlink()
    old.unlink()
    assert in_shared_memory(namespace) == []
    with pytest.raises(errors.NotFoundError):
        shmacc.attach("one")
    with pytest.raises(errors.NotFoundError):
        pickle.loads(frozen)
    # Who still has it goes on; a new opener makes a new one, which the old handle does not touch.
    assert apply(old)
    with kind(np.float64, shared_name="one") as new:
        assert new.num_accumulated() == 0
        assert old.num_accumulated() == 1
        old.unlink()
        shmacc.attach("one").close()
        new.unlink()
    old.close()


CLOSED: Final[list[Callable[[Any], Any]]] = [
    apply,
    lambda acc: acc.take(1, timeout=0),
    lambda acc: acc.take_grad(1, timeout=0),
    lambda acc: acc.take_partial(0),
    lambda acc: acc.unseal(),
    lambda acc: acc.advance_step(4),
    lambda acc: acc.wait_step(-1),
    lambda acc: acc.num_accumulated(),
    lambda acc: acc.set_global_step(1),
    lambda acc: acc.global_step,
    lambda acc: acc.stats(),
    lambda acc: acc.cancel(),
]


@pytest.mark.parametrize("kind", KINDS)
def test_a_closed_handle(kind: Any) -> None:
    acc = kind(np.float32, (3, 2), "one")
    with acc:
        acc.unlink()
    for call in CLOSED:
        with pytest.raises(errors.FailedPreconditionError):
            call(acc)
    # What it was can still be said, as for a closed file's name.
    assert (acc.dtype, acc.shape, acc.reduction_type) == (np.float32, (3, 2), "MEAN")
    assert acc.shared_name == "one"
    assert "one" in repr(acc)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("wrong", ["ATTACH", "", None, 1, b"error", True])
def test_another_word_is_refused(kind: Any, wrong: Any) -> None:
    for name in (NAME, None):
        with refused(f'if_exists must be "attach", "error" or "replace", but was {wrong!r}'):
            kind("f4", shared_name=name, if_exists=wrong)
    assert not exists()


def test_error_names_what_is_there(namespace: str) -> None:
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


def test_error_is_also_for_what_is_no_segment() -> None:
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
def test_an_empty_file_of_another_program_is_nothing(word: Any) -> None:
    path().touch()
    with make(if_exists=word) as acc:
        assert acc.apply_grad(1.0)
        acc.unlink()


@pytest.mark.parametrize("word", ["error", "replace"])
def test_a_removal_that_died_on_the_way_is_finished(word: Any) -> None:
    """A remover was killed between the mark and the name: nothing exists but a name."""
    with make():
        at = path()
        spare = at.with_name(at.name + "x")
        os.link(at, spare)
        inspection.remove(NAME, force=True)
        spare.rename(at)
    with make(if_exists=word) as acc:
        assert acc.num_accumulated() == 0
        acc.unlink()


def test_replace_makes_a_new_one_of_another_shape() -> None:
    with make() as acc:
        acc.apply_grad([1.0, 2.0])
        acc.set_global_step(7)
    with SparseConditionalAccumulator("f8", [None, 3], NAME, if_exists="replace") as new:
        assert (new.num_accumulated(), new.global_step) == (0, 0)
        assert new.stats().attached == 1
        new.unlink()
    assert not exists()


def test_replace_without_an_old_one_makes_one() -> None:
    with make(if_exists="replace") as acc:
        assert exists()
        acc.unlink()


def test_replace_is_refused_while_a_process_uses_it() -> None:
    with make() as acc:
        pid = os.getpid()
        with pytest.raises(RuntimeError, match=f"in use by living processes: pid {pid}") as own:
            make(if_exists="replace")
        error = pickle.loads(pickle.dumps(own.value))
        assert type(error) is errors.FailedPreconditionError
        assert error.pids == (pid,)
        assert acc.apply_grad(1.0)
    with Apart(hold) as holder:
        holder.hear()
        with pytest.raises(errors.FailedPreconditionError) as others:
            make(if_exists="replace")
        assert others.value.pids == (holder.pid,)
        holder.kill()
        with make(if_exists="replace") as acc:
            assert acc.num_accumulated() == 0
            acc.unlink()


@needs_root
def test_replace_leaves_what_is_another_users() -> None:
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


def test_of_two_that_replace_at_once_one_wins() -> None:
    for _ in range(10):
        make().close()
        assert outcomes_of_two("replace") == ["FailedPreconditionError", "made it"]
    inspection.remove(NAME)


def test_of_two_that_make_it_at_once_one_does() -> None:
    for _ in range(10):
        assert outcomes_of_two("error") == ["AlreadyExistsError", "made it"]
        inspection.remove(NAME)


@pytest.mark.parametrize("kind", KINDS)
def test_private_ones_are_always_new(kind: Any, namespace: str) -> None:
    for word in ("attach", "error", "replace"):
        for unlink_on_close in (False, True):
            with kind("f4", if_exists=word, unlink_on_close=unlink_on_close) as acc:
                assert acc.num_accumulated() == 0
            assert in_shared_memory(namespace) == []


def test_the_creators_close_removes_the_name(namespace: str) -> None:
    acc = make(unlink_on_close=True)
    with shmacc.attach(NAME) as attached, pickle.loads(pickle.dumps(acc)):
        assert not inspection.describe(NAME).summary.private
        acc.close()
        assert in_shared_memory(namespace) == []
        attached.set_global_step(3)  # it goes on using it
        assert attached.global_step == 3
    acc.close()


def test_it_leaves_what_took_the_name_since() -> None:
    with make(unlink_on_close=True) as old:
        old.unlink()
        make().close()
    assert exists()
    with make(unlink_on_close=True):
        pass  # attached, which takes nothing away
    assert exists()
    inspection.remove(NAME)
    with make(unlink_on_close=True):
        inspection.remove(NAME, force=True)
        make().close()
    inspection.remove(NAME)


def test_only_the_creators_close_does() -> None:
    def close_it(acc: Any) -> None:
        acc.close()

    with make(unlink_on_close=True) as acc:
        with make(unlink_on_close=True), shmacc.attach(NAME):
            pass
        pickle.loads(pickle.dumps(acc)).close()
        assert exists()
        run_apart(close_it, acc)
        assert exists()
    assert not exists()


END_IN_ORDER: Final = {
    "without a close": "",
    "by an exception": "raise SystemExit(0)",
    "with daemons at work": "daemon(lambda: acc.take_grad(1)); until(lambda: acc.stats().waiting)",
}


@pytest.mark.parametrize("end", list(END_IN_ORDER))
def test_the_creators_end_removes_the_name(end: str, namespace: str) -> None:
    script = f"""
    acc = shmacc.ConditionalAccumulator("f4", None, "{NAME}", unlink_on_close=True)
    assert shmacc.testing.leaked_names("{namespace}")
    {END_IN_ORDER[end]}
    """
    status, _, complaints = interpreter.run(script)
    assert (status, complaints) == (0, "")
    assert in_shared_memory(namespace) == []


def test_a_killed_creator_leaves_the_name() -> None:
    def create(*, pipe: Pipe) -> None:
        acc = make(unlink_on_close=True)
        acc.apply_grad(1.0)
        pipe.say()
        pipe.hear()

    with Apart(create) as creator:
        creator.hear()
        creator.kill()
    with shmacc.attach(NAME) as left:
        assert left.num_accumulated() == 1
        left.unlink()
