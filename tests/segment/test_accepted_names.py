"""Which names are accepted, and how each leads to its own file in a namespace."""

import contextlib
import enum
import os
import pickle
import re
from itertools import product
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from helpers.opening import KINDS, in_shared_memory
from helpers.support import refused

import shmacc
from shmacc import ConditionalAccumulator, errors, inspection, testing
from shmacc._base import names

NAMESPACE: Final = "SHMACC_NAMESPACE"


def test_bad_names_are_refused(namespace: str) -> None:
    name: Any
    too_long = ("x" * 201, "x" * 199 + ":", "ï" * 34, "%" * 67)  # after escaping
    for name in (*too_long, "a\0b", "\0", "\ud800", "a\udcffb", 5, b"a", 0, False, []):
        for kind in KINDS:
            with refused():
                kind(np.float32, shared_name=name)
        if isinstance(name, str):
            with refused():
                shmacc.attach(name)
        assert in_shared_memory(namespace) == []


def test_good_names_are_accepted(namespace: str) -> None:
    for name in ("a", "A.b_c-9", ".", "..", "-", "x" * 200):
        with ConditionalAccumulator(np.float32, shared_name=name, unlink_on_close=True) as acc:
            assert acc.shared_name == name
            # The names of the files show the library, the namespace and the segment's name.
            files = [file.name for file in in_shared_memory(namespace)]
            assert all(file.startswith(("shmacc.", "sem.shmacc.")) for file in files)
            assert any(name in file for file in files)
            shmacc.attach(name).close()
        assert in_shared_memory(namespace) == []


ODD: Final = {
    "w:0/grad_accum": "w%3A0%2Fgrad_accum",  # like names in TensorFlow
    "a b": "a%20b",
    "%41": "%2541",
    "%": "%25",
    "a\n\x1b[31m\x7f": "a%0A%1B%5B31m%7F",
    "../x": "..%2Fx",
    "head~0123456789abcdef": "head%7E0123456789abcdef",
    "na\u00efve": "na%C3%AFve",
    "nai\u0308ve": "nai%CC%88ve",
    "\u0661\uff21\u212a": "%D9%A1%EF%BC%A1%E2%84%AA",  # letters and digits outside ASCII
    "\U0001f600": "%F0%9F%98%80",
    "*": "%2A",
    "w[0]": "w%5B0%5D",
    "A:": "A%3A",
    "a:": "a%3A",
    ":" * 66 + "xx": "%3A" * 66 + "xx",
}


@pytest.mark.parametrize("prefix", ["", "n" * 60])
def test_other_characters_are_escaped(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No two names share a file, however long they are; each is shown as it was given."""
    namespace = f"{prefix or 'odd'}{os.getpid()}"[-60:]
    monkeypatch.setenv(NAMESPACE, namespace)
    with contextlib.ExitStack() as all_of_them:
        for number, (name, written) in enumerate(ODD.items()):
            kind: Any = KINDS[number % len(KINDS)]
            acc = all_of_them.enter_context(
                kind(np.float32, shared_name=name, unlink_on_close=True)
            )
            assert acc.shared_name == name
            assert repr(name) in repr(acc)
            acc.set_global_step(number)
            system_name = f"shmacc.{namespace}:{written}"
            assert (
                acc._segment_name.system_name == system_name or "~" in acc._segment_name.system_name
            )
        for number, name in enumerate(ODD):
            with shmacc.attach(name) as again, pickle.loads(pickle.dumps(again)) as pickled:
                assert again.global_step == pickled.global_step == number
                assert pickled.shared_name == name
        listed = inspection.list_segments(namespace=namespace)
        assert {summary.name.shared_name for summary in listed} == ODD.keys()
        for name in ODD:
            assert inspection.describe(name).summary.name.shared_name == name
        with pytest.raises(errors.NotFoundError, match=re.escape(repr("w:0/nothing"))):
            shmacc.attach("w:0/nothing")
        with pytest.raises(errors.InvalidArgumentError, match=re.escape(repr("a b"))):
            ConditionalAccumulator(np.float64, shared_name="a b")
    assert testing.leaked_names(namespace) == ()


NO_NAMES: Final = (
    "%41 w%3a0 %00 % %4 a%2 %ED%A0%80 %C3 %C0%AF %FF a%25% é a~b a~0123456789ABCDEF "
    "%C3~0123456789abcdef ~0123456789abcdef"
)


@pytest.mark.parametrize("written", [*NO_NAMES.split(), "a b"])
def test_a_file_with_an_impossible_segment_name_is_ignored(written: str, namespace: str) -> None:
    for file_name in (
        f"shmacc.{namespace}:{written}",
        f"sem.shmacc.{namespace}:{written}.{'0' * 16}",
    ):
        path = Path("/dev/shm", file_name)  # noqa: S108
        path.touch()
        try:
            assert inspection.list_names(namespace=namespace) == ()
            assert inspection.leftovers(namespace=namespace) == ()
            assert inspection.check_all(namespace=namespace) == ()
            assert testing.leaked_names(namespace) == ()
            with refused():
                inspection.resolve(f"shmacc.{namespace}:{written}")
        finally:
            path.unlink()


def test_each_name_has_its_own_file() -> None:
    alphabet = [
        "a", "A", "%", "4", "1", "~", ":", ".", "é", "e\u0301", "\n", "\U0001f600", "\ud7ff",
    ]  # fmt: skip
    texts = [
        "".join(letters) for length in (1, 2, 3) for letters in product(alphabet, repeat=length)
    ]
    written = [names.written(text) for text in texts]
    assert len(set(written)) == len(set(texts))
    assert [names.given(each) for each in written] == texts
    for namespace in (None, "x", "n" * 60):
        for each in written[:200]:
            long = (each * 70)[: 200 // len(each) * len(each)]
            name = names.name_under(namespace, long)
            assert len(f"sem.{name.system_name}.0123456789abcdef") <= 255
            parsed = names.parse_segment_file(name.system_name)
            assert parsed is not None
            assert parsed.shared_name == name.shared_name or parsed.is_cut


class Name(str, enum.Enum):  # noqa: UP042  StrEnum is shown as its string
    """An enum whose members are strings, although f-strings show them differently."""

    MODEL = "model"


def test_a_name_may_be_a_member_of_an_enum_of_strings(namespace: str) -> None:
    with ConditionalAccumulator(np.float32, shared_name=Name.MODEL, unlink_on_close=True) as acc:
        assert type(acc.shared_name) is str
        assert f"shmacc.{namespace}:model" in [file.name for file in in_shared_memory(namespace)]
        shmacc.attach("model").close()
        shmacc.attach(Name.MODEL).close()


def test_long_names_that_differ_at_their_end_are_different(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a long namespace, such names do not fit into a file's name and are cut."""
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
def test_the_error_for_a_missing_name_names_the_namespace(attach: Any, namespace: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"in the namespace '{namespace}'") as caught:
        attach("nobody")
    error = pickle.loads(pickle.dumps(caught.value))
    assert type(error) is errors.NotFoundError
    assert (error.shared_name, error.namespace) == ("nobody", namespace)
    assert str(error) == str(caught.value)
    assert in_shared_memory(namespace) == []


def test_bad_namespaces_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for bad in ("a/b", "x" * 61, "a b", "ä"):
        monkeypatch.setenv(NAMESPACE, bad)
        with refused():
            ConditionalAccumulator(np.float32)
        with refused():
            shmacc.SparseConditionalAccumulator(np.float32, shared_name="a")
        with refused():
            shmacc.attach("a")


def test_namespace_is_read_at_each_opening(namespace: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ConditionalAccumulator(np.float32, shared_name="same", unlink_on_close=True) as here:
        here.apply_grad(1.0)
        frozen = pickle.dumps(here)
        with monkeypatch.context() as patch:
            patch.setenv(NAMESPACE, namespace + "-2")
            with pytest.raises(errors.NotFoundError):
                shmacc.attach("same")
            with ConditionalAccumulator(np.float64, shared_name="same") as there:
                assert there.num_accumulated() == 0
                there.unlink()
            # A pickled handle contains its whole system name.
            with pickle.loads(frozen) as again:
                assert again.num_accumulated() == 1
