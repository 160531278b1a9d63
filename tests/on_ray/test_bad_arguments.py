"""Bad arguments of groups over hosts are refused at once, and leave nothing behind."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import shmacc
import shmacc.ray
from shmacc.errors import FailedPreconditionError, InvalidArgumentError
from shmacc.ray import Timing
from shmacc.ray._parts import find_actor

if TYPE_CHECKING:
    from on_ray.nodes import Nodes

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
def test_a_timing_has_positive_numbers(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidArgumentError, match=next(iter(bad))):
        Timing(**bad)


@pytest.mark.parametrize("name", [None, "", 5, "a\0b"])
def test_attaching_to_a_bad_name_is_refused_at_once(nodes: Nodes, name: Any) -> None:  # noqa: ARG001
    with pytest.raises(InvalidArgumentError, match="shared_name"):
        shmacc.ray.AccumulatorGroup.attach(name, timeout=60)


@pytest.mark.parametrize("rows", [[True, False, True], [1.9], ["first"]])
def test_rows_that_are_no_numbers_are_not_published(nodes: Nodes, rows: Any) -> None:  # noqa: ARG001
    contents = {"a": np.zeros(3)}
    with shmacc.ray.PublishedArrays(contents, "rows.arrays", unlink_on_close=True) as arrays:
        with pytest.raises(InvalidArgumentError, match="rows of 'a' must be integers"):
            arrays.publish({"a": rows})
        with pytest.raises(InvalidArgumentError, match="must map arrays"):
            arrays.publish(["a"])  # type: ignore[arg-type]
        arrays.publish({"a": []})
        arrays.publish({"a": [0, 0, 2]})


def test_tables_are_not_published(nodes: Nodes) -> None:
    contents: Any = {"a": np.zeros(3), "user": shmacc.TableSpec((4,))}
    with pytest.raises(InvalidArgumentError, match="'user', is no shared array, nor is it publish"):
        shmacc.ray.PublishedArrays(contents, "table.arrays")
    assert not [name for name in nodes.left() if "table" in name]


@pytest.mark.parametrize("hosts", [[], "abc", ["no node"]])
def test_publishing_to_a_missing_node_is_refused(nodes: Nodes, hosts: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="hosts"):
        shmacc.ray.PublishedArrays({"a": np.zeros(3)}, "nowhere.arrays", hosts=hosts)
    assert not [name for name in nodes.left() if "nowhere" in name]


def test_the_error_of_a_node_that_cannot_have_the_arrays_names_it(nodes: Nodes) -> None:
    with nodes.on(2):
        shmacc.SharedArrays({"a": np.zeros(5)}, "odd.arrays").close()
    for ends in (False, True):
        with pytest.raises(InvalidArgumentError, match=f"Node {nodes.id(2)}"):
            shmacc.ray.PublishedArrays({"a": np.zeros(3)}, "odd.arrays", unlink_on_close=ends)
        left = [name for name in nodes.left() if name.endswith("odd.arrays")]
        assert len(left) == (1 if ends else 3)
    contents = {"a": np.ones(3)}
    arrays = shmacc.ray.PublishedArrays(contents, "odd.arrays", if_exists="replace")
    with nodes.on(2), shmacc.SharedArrays.attach("odd.arrays") as found:
        assert np.array_equal(found["a"], [1, 1, 1])
    arrays.unlink()
    with pytest.raises(FailedPreconditionError, match="removed"):
        arrays.publish()
    arrays.close()
    assert not [name for name in nodes.left() if "odd" in name]
