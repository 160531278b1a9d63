"""A group may accumulate what is no parameter, a loss or a count; an update leaves that out."""

from __future__ import annotations

from collections.abc import Iterator  # noqa: TC003  a fixture's return type is looked at
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from shmacc import (
    AccumulatorGroup,
    ConditionalAccumulator,
    Parameters,
    TensorSpec,
    errors,
    optim,
)

if TYPE_CHECKING:
    from collections.abc import Mapping


@pytest.fixture
def params() -> Iterator[Parameters]:
    """A table and a vector."""
    with Parameters({"t": np.zeros((4, 2)), "v": np.zeros(3)}, optimizer=optim.SGD(1)) as made:
        yield made


@pytest.fixture
def group(params: Parameters) -> Iterator[AccumulatorGroup]:
    """Of both, and of the loss."""
    specs = params.member_specs(["t"]) | {"loss": TensorSpec((), "f8"), "more": TensorSpec((3,))}
    with AccumulatorGroup(specs) as made:
        full = {"t": ([1], np.ones((1, 2))), "v": np.ones(3), "loss": 0.5, "more": np.ones(3)}
        made.apply(full, 0)
        yield made


def test_an_update_names_the_member_and_the_way_out(
    params: Parameters, group: AccumulatorGroup
) -> None:
    with group.round(1) as taken:
        with pytest.raises(
            errors.InvalidArgumentError, match=r"no array 'loss'.*for name in taken"
        ):
            params.update(taken)
        assert group.stats().update is None
        assert params.update({name: taken[name] for name in taken if name in params})
        assert taken["loss"].value == 0.5
    assert (params["t"][1].tolist(), params["v"].tolist()) == ([-1, -1], [-1] * 3)
    assert params.step == 1


@pytest.mark.parametrize("call", ["update", "skip"])
def test_a_mapping_of_some_members(params: Parameters, group: AccumulatorGroup, call: str) -> None:
    with group.round(1) as taken:
        assert getattr(params, call)({"v": taken["v"]})
        with pytest.raises(errors.FailedPreconditionError, match="has made its update"):
            getattr(params, call)({"t": taken["t"]})
    assert not params["t"].any()
    assert bool(params["v"].any()) == (call == "update")


def test_a_member_may_be_another_arrays_gradient() -> None:
    with (
        Parameters({"v": np.zeros(3, np.float32)}, optimizer=optim.SGD(2)) as others,
        AccumulatorGroup({"more": TensorSpec((3,))}) as group,
    ):
        group.apply({"more": np.ones(3)}, 0)
        with group.round(1) as taken:
            assert others.update({"v": taken["more"]})
        assert others["v"].tolist() == [-2] * 3


def test_only_what_one_open_round_has_is_updated_from(
    params: Parameters, group: AccumulatorGroup
) -> None:
    def refused(taken: Mapping[str, Any]) -> None:
        for call in params.update, params.skip:
            with pytest.raises(errors.FailedPreconditionError, match="not of a round"):
                call(taken)

    with ConditionalAccumulator("f8", (3,)) as other:
        other.apply_grad(np.ones(3))
        with group.round(1) as taken, other.round(1) as single:
            refused({})
            refused({"t": taken["t"], "v": single})
            refused({"v": np.ones(3)})
            refused({"t": taken["t"], "v": group.snapshot()["v"]})
            left = {"v": taken["v"]}
            params.skip(taken)
    refused(left)
