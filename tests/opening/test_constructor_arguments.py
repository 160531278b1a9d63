"""What a constructor and ``attach`` take and refuse, and when two openers agree."""

from __future__ import annotations

import os
import pickle
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import ml_dtypes
import numpy as np
import pytest
from helpers.elements import ELEMENTS
from helpers.support import SHM_DIRECTORY, refused

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors

if TYPE_CHECKING:
    from collections.abc import Callable

KINDS: Final = (ConditionalAccumulator, SparseConditionalAccumulator)
NAMESPACE: Final = "SHMACC_NAMESPACE"


def in_shared_memory(namespace: str) -> list[Path]:
    """List what stands in /dev/shm for this namespace."""
    return [p for p in Path(SHM_DIRECTORY).iterdir() if namespace in p.name]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ELEMENTS)
def test_all_dtypes_by_name_and_by_type(kind: Any, name: str) -> None:
    for given in (name, ELEMENTS[name].dtype, ELEMENTS[name].dtype.type):
        if given is np.void:
            continue
        with kind(given) as acc:
            assert isinstance(acc.dtype, np.dtype)
            assert acc.dtype == ELEMENTS[name].dtype


def test_dtypes_of_other_spellings() -> None:
    for given, dtype in (("<f4", np.float32), (">f8", np.float64), (ml_dtypes.bfloat16, None)):
        with ConditionalAccumulator(given) as acc:
            assert acc.dtype == np.dtype(dtype or ml_dtypes.bfloat16)
            assert acc.dtype.isnative


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "bad",
    [None, "string", "nonsense", bool, "bool", str, object, "datetime64[s]", "S4", "f16", "V8",
     [("x", np.int8)], [("qint8", np.int16)], ml_dtypes.float8_e5m2, 3.5, []],
    ids=repr,
)  # fmt: skip
def test_dtypes_refused(kind: Any, bad: Any) -> None:
    with refused():
        kind(bad)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("given", "normal"),
    [
        (None, None),
        ((), ()),
        ([], ()),
        (7, (7,)),
        ([3, None], (3, None)),
        ((0, 2), (0, 2)),
        (np.array([3, 2]), (3, 2)),
        ([np.int32(3), np.uint8(2)], (3, 2)),
        ([None], (None,)),
    ],
)
def test_shapes(kind: Any, given: Any, normal: Any) -> None:
    with kind(np.float32, given) as acc:
        assert acc.shape == normal
        if normal:
            assert all(d is None or type(d) is int for d in acc.shape)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "bad",
    [
        *(-1, [-1], [3, -2], [1.0], 2.5, "3", ["3"], [2**63], [True], [[1, 2]], [1j]),
        *([1] * 65, range(2**62), np.broadcast_to(1, 2**40)),
    ],
    ids=lambda bad: f"{type(bad).__name__} {bad!r:.20}",
)
def test_shapes_refused(kind: Any, bad: Any) -> None:
    with refused():
        kind(np.float32, bad)


@pytest.mark.parametrize("row", [(2**36 + 1,), (2**40,), (2**31, None, 2**31), (0, 2**63 - 1)])
def test_shapes_of_what_could_never_be_added_are_refused(row: Any) -> None:
    with refused():
        ConditionalAccumulator("f4", row)
    with refused():
        SparseConditionalAccumulator("f4", (3, *row))


@pytest.mark.parametrize("rows", [2**31, 2**40, 2**63 - 1])
def test_as_many_rows_as_there_are_numbers(rows: int) -> None:
    with SparseConditionalAccumulator("f4", (rows, 2)) as acc:
        acc.apply_grad([rows - 1], [[1.0, 2.0]])
        assert acc.take_grad(1).shape.tolist() == [rows, 2]
        assert acc.take_partial(0).shape.tolist() == [rows, 2]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("given", "normal"),
    [("MEAN", "MEAN"), ("SUM", "SUM"), ("CMEAN", "CMEAN"), (b"SUM", "SUM"), (None, "MEAN")],
)
def test_reductions(kind: Any, given: Any, normal: str) -> None:
    with kind(np.float32, reduction_type=given) as acc:
        assert acc.reduction_type == normal


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", ["Invalid", "mean", "", "MEAN ", 3, [], b"sum"], ids=repr)
def test_reductions_refused(kind: Any, bad: Any) -> None:
    with pytest.raises(errors.InvalidArgumentError) as caught:
        kind(np.float32, reduction_type=bad)
    if isinstance(bad, str) and bad:
        assert bad in str(caught.value)
        assert '"MEAN", "SUM"' in str(caught.value)


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


def test_attach_of_nothing(namespace: str) -> None:
    for _ in range(2):
        with pytest.raises(FileNotFoundError) as caught:
            shmacc.attach("nobody")
        assert isinstance(caught.value, errors.NotFoundError)
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


DIFFERENT: Final = [
    ({"dtype": np.float64}, ("float32", "float64")),
    ({"reduction_type": "SUM"}, ("MEAN", "SUM")),
    ({"shape": (3, 4)}, ("2", "4")),
    ({"shape": (3,)}, ("3",)),
    ({"shape": (None, 2)}, ("3", "2")),
    ({"shape": ()}, ("3", "2")),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("other", "named"), DIFFERENT)
def test_disagreement_names_both_values(
    kind: Any, other: dict[str, Any], named: tuple[str, ...]
) -> None:
    first = {"dtype": np.float32, "shape": (3, 2), "shared_name": "one"}
    with kind(**first) as acc:
        acc.apply_grad(*_gradient(kind))
        with pytest.raises(errors.InvalidArgumentError) as caught:
            kind(**{**first, **other})
        for value in named:
            assert value in str(caught.value)
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


def _gradient(kind: Any) -> tuple[Any, ...]:
    return (np.ones((3, 2)),) if kind is ConditionalAccumulator else ([0], np.ones((1, 2)))


@pytest.mark.parametrize("kind", KINDS)
def test_private_ones(kind: Any, namespace: str) -> None:
    with kind(np.float32) as one, kind(np.float32, None, "") as two:
        assert one.shared_name
        assert one.shared_name != two.shared_name
        one.apply_grad(*_gradient(kind))
        with shmacc.attach(one.shared_name) as same, pickle.loads(pickle.dumps(one)) as again:
            assert same.num_accumulated() == again.num_accumulated() == 1
            assert two.num_accumulated() == 0
        assert one.num_accumulated() == 1
    assert in_shared_memory(namespace) == []


@pytest.mark.parametrize("kind", KINDS)
def test_two_handles_in_one_process_are_independent(kind: Any) -> None:
    first = kind(np.float32, shared_name="one")
    second = kind(np.float32, shared_name="one")
    first.apply_grad(*_gradient(kind))
    first.close()
    first.close()
    with pytest.raises(errors.FailedPreconditionError):
        first.apply_grad(*_gradient(kind))
    assert second.num_accumulated() == 1
    assert second.apply_grad(*_gradient(kind))
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
    assert old.apply_grad(*_gradient(kind))
    with kind(np.float64, shared_name="one") as new:
        assert new.num_accumulated() == 0
        assert old.num_accumulated() == 1
        old.unlink()
        shmacc.attach("one").close()
        new.unlink()
    old.close()


CLOSED: Final[list[Callable[[Any], Any]]] = [
    lambda acc: acc.apply_grad(*_gradient(type(acc))),
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
