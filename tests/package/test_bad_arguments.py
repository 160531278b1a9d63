"""A bad argument of any public call is refused at once: an error names it, and nothing changes.

BAD has the bad values of each parameter, for all calls that have this parameter. OTHERS has the
parameters that are left out here. Each parameter must be in one of them.
"""

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import partial
from typing import Any, Final

import ml_dtypes
import numpy as np
import pytest

import shmacc
from shmacc import errors

_NO_INTEGERS: Final = (
    *(True, np.True_, 1.0, 1.9, np.float32(1), math.nan, "1", None, 1j, [1], ()),
    *(np.ones(1, np.int64), np.ones((), np.float64), np.ones((), np.bool_)),
    *(2**63, -(2**63) - 1, np.uint64(2**63)),
)
_NO_WAYS: Final = ("ignore", "ATTACH", "", None, True, 1, b"raise")
BAD: Final[dict[str, tuple[Any, ...]]] = {
    "timeout": (-1, -1e-9, -math.inf, math.nan, "1", b"1", True, [1.0], 1j),
    "on_death": _NO_WAYS,
    "num_required": (-1, *_NO_INTEGERS),
    "at_least": (0, -1, 4, 1.5, True, "2", int),
    **dict.fromkeys(("local_step", "new_global_step", "step", "after"), _NO_INTEGERS),
    "contributor": (-1, 2**63, 1.0, True, "me", [1], np.float32(1)),
    "weight": (0, -1, 2**48 + 1, *_NO_INTEGERS),
    "capacity": (0, -1, 1.5, True, "4", 2**63),
    "lanes": (0, -1, 1.5, True, "4", 33),
    "mode": (-1, 0o10000, 6.0, "600", 0o400),
    "owners": (*("", "everybody", b"mine", None, 0, ["root"], [-1], [2**32 - 1]), np.array([1, 2])),
    "if_exists": _NO_WAYS,
    "dtype": (
        *(None, "string", "nonsense", bool, "bool", str, object, "datetime64[s]", "S4", "f16"),
        *("V8", [("x", np.int8)], [("qint8", np.int16)], ml_dtypes.float8_e5m2, 3.5, []),
    ),
    "shape": (
        *(-1, [-1], [3, -2], [1.0], 2.5, "3", ["3"], [2**63], [True], [[1, 2]], [1j], [1] * 65),
        *(range(2**62), np.broadcast_to(1, 2**40)),
        *((3, 2**36 + 1), (3, 2**31, None, 2**31), (3, 0, 2**63 - 1)),  # too large ever to be added
    ),
    "reduction_type": ("Invalid", "mean", "Sum", "", "MEAN ", 3, [], b"sum"),
}
# Parameters that this test leaves out. Some take any truth value or object. For the rest (names,
# gradients, contents, results) there are other tests.
OTHERS: Final = {
    *("seal", "unlink_on_close", "writable", "default", "key", "name", "shared_name", "gradient"),
    *("grad", "grad_indices", "grad_values", "grad_shape", "partial", "state", "members"),
    *("contents", "optimizer", "sparse", "taken", "values", "gradients", "remove", "forget"),
    "learning_rate",
}
GOOD: Final[dict[str, Any]] = {
    "num_required": 3, "new_global_step": 1, "step": 1, "local_step": 0, "after": 0, "grad": [1.0],
    "grad_indices": [0], "grad_values": [[1.0]], "gradient": {"a": [1.0]}, "dtype": "f4",
    "shared_name": "made", "members": {"a": shmacc.TensorSpec((1,))}, "path": "no file", "what": {},
    "contents": {"a": np.ones(1, np.float32)},
}  # fmt: skip


KINDS: Final[dict[str, Callable[[], Any]]] = {
    "dense": lambda: shmacc.ConditionalAccumulator("f4", (1,), "it"),
    "sparse": lambda: shmacc.SparseConditionalAccumulator("f4", (9, 1), "it"),
    "group": lambda: shmacc.AccumulatorGroup({"a": shmacc.TensorSpec((1,))}, "it"),
    "parameters": lambda: shmacc.Parameters(GOOD["contents"], "it"),
    "arrays": lambda: shmacc.SharedArrays(GOOD["contents"], "it"),
}


def calls(made: Any) -> Iterator[tuple[str, list[str]]]:
    """Yield "__class__" and the name of each public method, each with its parameters."""
    for name in ("__class__", *(name for name in dir(made) if not name.startswith("_"))):
        call = type(made) if name == "__class__" else getattr(type(made), name, None)
        if callable(call):
            yield name, [each for each in inspect.signature(call).parameters if each != "self"]


def finish(call: Callable[[], Any]) -> None:
    """Make the call, and wait for its answer if it is a coroutine."""
    answer = call()
    if inspect.iscoroutine(answer):
        asyncio.run(answer)


def refused(call: Callable[..., Any], arguments: dict[str, Any], parameter: str) -> None:
    said = "shape|[Dd]imension" if parameter == "shape" else parameter  # TensorFlow's words
    with pytest.raises(errors.InvalidArgumentError, match=rf"\b({said})\b"):
        finish(partial(call, **arguments))


@pytest.mark.parametrize("kind", KINDS)
def test_a_bad_argument_is_refused_and_named(kind: str) -> None:
    with KINDS[kind]() as made, ExitStack() as stack:
        good = dict(GOOD)
        if kind == "parameters":
            group = stack.enter_context(shmacc.AccumulatorGroup(made.member_specs()))
            group.apply({"a": [1.0]}, 0)
            good |= {"state": made.state(), "taken": stack.enter_context(group.round(1))}
        elif kind != "arrays":
            good |= {"state": made.state(), "partial": made.take_partial(0)}
        if kind == "sparse":
            good["grad"] = shmacc.IndexedSlices([[1.0]], [0])
        stats = getattr(made, "stats", lambda: None)
        before = stats()
        for name, parameters in calls(made):
            assert OTHERS | BAD.keys() >= set(parameters), name
            given = {each: good[each] for each in parameters if each in good}
            for parameter in BAD.keys() & set(parameters):
                for value in BAD[parameter]:
                    refused(getattr(made, name), given | {parameter: value}, parameter)
        assert stats() == before
        made.unlink()


def test_a_function_refuses_a_bad_timeout() -> None:
    for call in (shmacc.attach, partial(shmacc.save, what={}), partial(shmacc.load, what={})):
        for value in BAD["timeout"]:
            refused(partial(call, "it"), {"timeout": value}, "timeout")
