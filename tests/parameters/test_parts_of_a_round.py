"""`only` and `without` give a part of a round, which an update accepts like the round."""

import pickle
import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import pytest
from helpers.training import training

import shmacc
from shmacc import errors, optim
from shmacc._accumulators.taken import GroupTaken

ONE: Final = np.ones(2)


@pytest.fixture(name="rounds")
def _rounds() -> Iterator[tuple[shmacc.Parameters, GroupTaken, GroupTaken]]:
    """Yield parameters and two open rounds, whose groups have members that are no parameters."""
    arrays = {"w": np.zeros(2), "state": np.zeros(2), "ids": shmacc.TableSpec((2,), "f8")}
    by: Any = {"state": None, "*": optim.SGD(1.0)}
    with shmacc.Parameters(arrays, optimizer=by) as params:
        others = {"loss": shmacc.TensorSpec((), "f8"), "seen": shmacc.TensorSpec((), "i8")}
        members = {**params.member_specs(), **others}
        with shmacc.AccumulatorGroup(members) as group, shmacc.AccumulatorGroup(members) as second:
            for each in (group, second):
                gradient = {"w": ONE, "state": ONE, "ids": ([7], ONE[None]), "loss": 3.0}
                assert each.apply(gradient, 0, contributor=4)
            with group.round(1) as taken, second.round(1) as other:
                yield params, taken, other
                if params.step == 0:
                    params.skip(taken)


def test_a_part_is_the_round_with_fewer_members(rounds: Any) -> None:
    _, taken, _ = rounds
    assert list(taken) == ["w", "state", "ids", "loss"]
    for part, names in (
        (taken.only("loss", "w"), ["w", "loss"]),
        (taken.only(), []),
        (taken.only("seen"), []),  # a member of the group without a gradient
        (taken.without("loss", "seen"), ["w", "state", "ids"]),
        (taken.without(), ["w", "state", "ids", "loss"]),
        (taken.without("loss").only("w", "loss"), ["w"]),
        (taken.only("w", "loss").without("w").only("w"), []),
    ):
        assert isinstance(part, GroupTaken)
        assert list(part) == names
        assert all(part[name] is taken[name] for name in names)
        assert (part.step, part.count, part.weight) == (0, 1, 1)
        assert part.contributors.tolist() == [4]
        assert list(pickle.loads(pickle.dumps(part)).only(*names)) == names


@pytest.mark.parametrize("way", ["only", "without"])
@pytest.mark.parametrize("bad", ["nothing", ("w", "loss"), 3, None])
def test_a_name_that_is_no_member_of_the_group_is_refused(rounds: Any, way: str, bad: Any) -> None:
    for part in (rounds[1], rounds[1].only("w")):
        with pytest.raises(errors.InvalidArgumentError, match="has no member"):
            getattr(part, way)("w", bad)


UPDATES: Final[dict[str, tuple[Callable[[Any, Any], bool], float]]] = {
    "without": (lambda params, taken: params.update(taken.without("loss", "state")), -1),
    "only": (lambda params, taken: params.update(taken.only("w", "ids")), -1),
    "gradients": (lambda params, taken: params.update(taken.only(), gradients={"w": 3 * ONE}), -3),
    "values": (lambda params, taken: params.update(taken.only("ids"), {"w": 5 * ONE}), 5),
    "skip": (lambda params, taken: params.skip(taken.only(), {"w": 6 * ONE}), 6),
    "a mapping": (lambda params, taken: params.update({"w": taken["w"]}), -1),
}


@pytest.mark.parametrize("case", UPDATES)
def test_an_update_accepts_a_part_of_a_round(rounds: Any, case: str) -> None:
    """Two rounds are open, and the part may have no members; the update still knows its round."""
    params, taken, _ = rounds
    update, expected = UPDATES[case]
    assert update(params, taken)
    assert params["w"].tolist() == [expected, expected]
    assert params["state"].tolist() == [0, 0]
    with pytest.raises(errors.FailedPreconditionError, match="This block has made its update"):
        update(params, taken)


def test_rows_of_a_member_that_the_part_omits_are_not_forgotten(rounds: Any) -> None:
    params, taken, _ = rounds
    assert params.update(taken.only("w"), {"ids": ([7, 8], np.ones((2, 2)))}, forget={"ids": 0})
    assert params["ids"].ids().tolist() == [7, 8]


def test_a_part_of_a_round_that_has_ended_is_refused() -> None:
    with training({"w": ONE}, optim.SGD(1.0)) as (params, group):
        group.apply({"w": ONE}, 0)
        part = group.take(1).only("w")
        with pytest.raises(errors.FailedPreconditionError, match="not of a round that this"):
            params.update(part)
        assert params["w"].tolist() == [1, 1]


REFUSED: Final[dict[str, tuple[Callable[[Any, Any], Any], str]]] = {
    "a member that is no parameter": (lambda params, taken: params.update(taken),
        "taken.without('loss')"),
    "one of a mapping": (lambda params, taken: params.update({"loss": taken["loss"]}),
        "taken.without('loss')"),
    "a parameter without optimizer": (lambda params, taken: params.update(taken.without("loss")),
        "taken.without('state')"),
    "nothing": (lambda params, _: params.update({}, gradients={"w": ONE}),
        "taken.only(), gradients="),
    "arrays": (lambda params, _: params.update({"w": ONE}), "taken.only(), gradients="),
    "a list": (lambda params, _: params.update([ONE]), "taken.only(), gradients="),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_names_the_call_that_works(rounds: Any, case: str) -> None:
    """No message proposes `skip`, which would end the round without its update."""
    params, taken, _ = rounds
    update, way = REFUSED[case]
    with pytest.raises((errors.InvalidArgumentError, errors.FailedPreconditionError)) as error:
        update(params, taken)
    assert way in str(error.value)
    assert "skip" not in str(error.value)
    assert params.step == 0
    assert params.update(taken.without("loss", "state"))


def test_an_empty_mapping_with_a_single_accumulators_round_names_the_remedy() -> None:
    sgd = optim.SGD(1.0)
    with (
        shmacc.Parameters({"w": np.zeros(2)}, optimizer=sgd) as params,
        shmacc.ConditionalAccumulator("f8", (2,)) as one,
        shmacc.ConditionalAccumulator("f8", (2,)) as two,
    ):
        one.apply_grad(ONE)
        two.apply_grad(ONE)
        with one.round(1) as taken, two.round(1):
            with pytest.raises(
                errors.FailedPreconditionError, match=re.escape('update({"name": taken})')
            ):
                params.update({}, gradients={"w": ONE})
            assert params.update({"w": taken}, gradients={"w": 4 * ONE})
        assert params["w"].tolist() == [-4, -4]
