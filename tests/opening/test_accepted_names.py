"""Which names are accepted, and in which namespace they lead to a segment."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pytest
from helpers.opening import KINDS, in_shared_memory
from helpers.support import refused

import shmacc
from shmacc import ConditionalAccumulator, SparseConditionalAccumulator, errors

if TYPE_CHECKING:
    from collections.abc import Callable

NAMESPACE: Final = "SHMACC_NAMESPACE"


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
