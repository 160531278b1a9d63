"""Which names are accepted, and in which namespace they lead to a segment."""

from __future__ import annotations

import enum
import pickle
from typing import Any, Final

import numpy as np
import pytest
from helpers.opening import KINDS, in_shared_memory
from helpers.support import refused

import shmacc
from shmacc import ConditionalAccumulator, errors

NAMESPACE: Final = "SHMACC_NAMESPACE"


def test_names_refused(namespace: str) -> None:
    name: Any
    for name in ("a/b", "/a", "a b", "naïve", "x" * 201, "a\n", "a\0b", "*", 5, b"a", 0, False, []):
        for kind in KINDS:
            with refused():
                kind(np.float32, shared_name=name)
        if isinstance(name, str):
            with refused():
                shmacc.attach(name)
        assert in_shared_memory(namespace) == []


def test_names_accepted(namespace: str) -> None:
    for name in ("a", "A.b_c-9", ".", "..", "-", "x" * 200):
        with ConditionalAccumulator(np.float32, shared_name=name) as acc:
            assert acc.shared_name == name
            # Attributable: this library's, under its namespace, with the name in clear.
            files = [file.name for file in in_shared_memory(namespace)]
            assert all(file.startswith(("shmacc.", "sem.shmacc.")) for file in files)
            assert any(name in file for file in files)
            shmacc.attach(name).close()
            acc.unlink()
        assert in_shared_memory(namespace) == []


class Name(str, enum.Enum):  # noqa: UP042  StrEnum is shown as its string
    """Its members are strings, but f-strings show them in another way."""

    MODEL = "model"


def test_the_name_of_an_enum_is_its_string(namespace: str) -> None:
    with ConditionalAccumulator(np.float32, shared_name=Name.MODEL) as acc:
        assert type(acc.shared_name) is str
        assert f"shmacc.{namespace}:model" in [file.name for file in in_shared_memory(namespace)]
        shmacc.attach("model").close()
        shmacc.attach(Name.MODEL).close()
        acc.unlink()


def test_long_names_that_differ_at_their_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """Together with a long namespace they do not fit a file's name, and are cut."""
    monkeypatch.setenv(NAMESPACE, "n" * 60)
    one, other = (
        ConditionalAccumulator("f4", (), "x" * 199 + last, unlink_on_close=True) for last in "ab"
    )
    with one, other:
        one.apply_grad(1.0)
        assert (one.num_accumulated(), other.num_accumulated()) == (1, 0)
        with ConditionalAccumulator.attach(one.shared_name) as again:
            assert again.num_accumulated() == 1


@pytest.mark.parametrize("attach", [shmacc.attach, shmacc.SharedArrays.attach])
def test_attach_of_nothing_names_the_namespace(attach: Any, namespace: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"in the namespace '{namespace}'") as caught:
        attach("nobody")
    error = pickle.loads(pickle.dumps(caught.value))
    assert type(error) is errors.NotFoundError
    assert (error.shared_name, error.namespace) == ("nobody", namespace)
    assert str(error) == str(caught.value)
    assert in_shared_memory(namespace) == []


def test_bad_namespace(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in ("a/b", "x" * 61, "a b", "ä"):
        monkeypatch.setenv(NAMESPACE, bad)
        with refused():
            ConditionalAccumulator(np.float32)
        with refused():
            shmacc.SparseConditionalAccumulator(np.float32, shared_name="a")
        with refused():
            shmacc.attach("a")


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
