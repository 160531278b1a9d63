"""Bad arguments of groups over hosts are refused at once, and leave nothing behind."""

from typing import Any

import pytest
from on_ray.nodes import Nodes

import shmacc
import shmacc.ray
from shmacc.errors import InvalidArgumentError
from shmacc.ray import Timing
from shmacc.ray._parts import find_actor

_SPECS = {"m": shmacc.TensorSpec((), "float64")}


@pytest.mark.parametrize(
    "asked",
    [
        {"lanes": 0},
        {"capacity": -1},
        {"mode": 0o7777777},
        {"owners": "theirs"},
        {"if_exists": "maybe"},
        {"hosts": []},
        {"hosts": "abc"},
        {"hosts": 5},
        {"hosts": ["no node"]},
        {"shards": 0},
        {"timing": 5},
        {"members": {"m": shmacc.IndexedSlicesSpec((), "float64")}},
        {"shared_name": "a\0b"},
        {"shared_name": "refused" + 185 * "d"},
    ],
)
def test_a_bad_argument_is_refused_before_anything_is_made(
    nodes: Nodes, asked: dict[str, Any]
) -> None:
    with pytest.raises(InvalidArgumentError):
        shmacc.ray.AccumulatorGroup(**{"members": _SPECS, "shared_name": "refused"} | asked)
    assert not [name for name in nodes.left() if "refused" in name]
    assert find_actor("refused/owner") is None


@pytest.mark.parametrize("bad", [{"lease": 0}, {"heartbeat": "2"}, {"grace": float("inf")}])
def test_a_timing_without_positive_finite_numbers_is_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(bad))):
        Timing(**bad)


@pytest.mark.parametrize("name", [None, "", 5, "a\0b"])
def test_attaching_to_a_bad_name_is_refused_at_once(nodes: Nodes, name: Any) -> None:  # noqa: ARG001
    with pytest.raises(InvalidArgumentError, match="shared_name"):
        shmacc.ray.AccumulatorGroup.attach(name, timeout=60)
