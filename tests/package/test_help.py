"""`help(shmacc)` is about what users have, under the names that they have it by."""

from __future__ import annotations

import inspect
import pickle
import pydoc
import re
import subprocess
import sys

import shmacc

PUBLIC = [name for name in shmacc.__all__ if name != "__version__"]
CLASSES = [getattr(shmacc, name) for name in PUBLIC if inspect.isclass(getattr(shmacc, name))]


def test_it_shows_the_public_surface_and_no_private_modules() -> None:
    text = pydoc.render_doc(shmacc, renderer=pydoc.plaintext)  # type: ignore[attr-defined]
    text = re.sub(r"__orig_bases__ = .*", "", text)  # typing's own, of generic classes
    assert sorted(set(re.findall(r"shmacc\._\w+(?:\.\w+)*", text))) == []
    begins, rest = text.split("PACKAGE CONTENTS")  # whose list pydoc makes of the folder
    assert re.findall(r"(?<!\w)_\w+", begins) == []
    surface = rest.split("CLASSES", 1)[1]
    for name in PUBLIC:
        shown = getattr(shmacc, name)
        if inspect.isclass(shown):
            assert re.search(rf"^    class {name}\(", surface, re.MULTILINE), name
        elif callable(shown):
            assert re.search(rf"^    {name}\(", surface, re.MULTILINE), name
    for module in ("errors", "inspection", "optim", "raw_ops", "sparse", "testing", "torch", "jax"):
        assert f"`{module}`" in begins


def test_what_users_have_no_use_for_is_not_public() -> None:
    for cls in CLASSES:
        for name in ("of_handle", "of_name", "opened_by_user", "leave_at_exit"):
            assert not hasattr(cls, name), f"{cls.__name__}.{name}"


def test_classes_are_the_packages_and_pickle_as_such() -> None:
    for cls in CLASSES:
        assert cls.__module__ == "shmacc"
        assert pickle.loads(pickle.dumps(cls)) is cls
        assert b"shmacc._" not in pickle.dumps(cls)


def test_a_class_is_known_by_its_public_name_before_anybody_asked_for_it() -> None:
    """In a process that got an object of it by other ways."""
    code = """if True:
        import pickle, sys
        with_class = pickle.loads(sys.stdin.buffer.read())
        print(repr(type(with_class)), with_class.value.tolist())"""
    with shmacc.ConditionalAccumulator("i4") as acc:
        acc.apply_grad([1, 2])
        taken = acc.take(1)
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], input=pickle.dumps(taken), stdout=-1, check=True
    )
    assert done.stdout.decode() == "<class 'shmacc.DenseTaken'> [1, 2]\n"
