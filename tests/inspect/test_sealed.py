"""`sealed` has one meaning, here and in the metrics: an apply at the step is refused."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final

import numpy as np
import pytest
from helpers.inspect_tool import ask

from shmacc import AccumulatorGroup, Parameters, inspection, optim

if TYPE_CHECKING:
    from collections.abc import Callable


class _LeftError(Exception):
    pass


def _open_a_round(group: AccumulatorGroup, _: Parameters, stack: ExitStack) -> None:
    stack.enter_context(group.round(1))


def _update_in_a_round(group: AccumulatorGroup, params: Parameters, stack: ExitStack) -> None:
    params.update(stack.enter_context(group.round(1)))


def _leave_after_the_update(group: AccumulatorGroup, params: Parameters, _: ExitStack) -> None:
    with suppress(_LeftError), group.round(1) as taken:
        params.update(taken)
        raise _LeftError


def _leave_a_round(group: AccumulatorGroup, _: Parameters, __: ExitStack) -> None:
    with suppress(_LeftError), group.round(1):
        raise _LeftError


def _end_a_round(group: AccumulatorGroup, params: Parameters, _: ExitStack) -> None:
    with group.round(1) as taken:
        params.update(taken)


def _seal(group: AccumulatorGroup, _: Parameters, __: ExitStack) -> None:
    group.take_partial(1, seal=True)


def _seal_and_unseal(group: AccumulatorGroup, _: Parameters, __: ExitStack) -> None:
    group.take_partial(1, seal=True)
    group.unseal()


DEEDS: Final[dict[Callable[[AccumulatorGroup, Parameters, ExitStack], None], bool]] = {
    _open_a_round: True,
    _update_in_a_round: True,
    _leave_after_the_update: True,
    _seal: True,
    _leave_a_round: False,
    _end_a_round: False,
    _seal_and_unseal: False,
}


@pytest.mark.parametrize("deed", DEEDS, ids=lambda deed: deed.__name__)
def test_sealed_is_whether_an_apply_at_the_step_is_refused(
    deed: Callable[[AccumulatorGroup, Parameters, ExitStack], None],
) -> None:
    with (
        Parameters({"a": np.zeros(3)}, optimizer=optim.SGD(1.0)) as params,
        AccumulatorGroup(params.member_specs(), "group") as group,
        ExitStack() as stack,
    ):
        group.apply({"a": np.ones(3)}, 0)
        deed(group, params, stack)
        refused = DEEDS[deed]
        assert group.stats().sealed is refused
        assert inspection.describe("group").stats.sealed is refused
        assert ask("show", "group")["stats"]["sealed"] is refused
        metrics = {metric["name"]: metric for metric in ask("metrics", "group")["metrics"]}
        assert metrics["shmacc_sealed"]["samples"][0]["value"] == refused
        assert group.apply({"a": np.ones(3)}, group.global_step) is not refused
        stack.close()
        group.unlink()
