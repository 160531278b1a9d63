"""What is seen of parameters from outside."""

from __future__ import annotations

import json

import numpy as np
from helpers.inspect_tool import run

from shmacc import AccumulatorGroup, Parameters, inspection, optim


def test_they_are_a_kind_of_their_own_with_a_step() -> None:
    with Parameters(
        {"a": np.zeros((4, 2)), "b": [1]}, "seen", optimizer={"a": optim.SGD(1)}
    ) as own:
        specs = own.member_specs(["a"])
        del specs["b"]
        with AccumulatorGroup(specs, "grads") as group:
            group.apply({"a": ([1], np.ones((1, 2)))}, 0)
            with group.round(1) as taken:
                own.update(taken)
            group.unlink()
        (summary,) = inspection.list_segments("seen")
        assert (summary.kind, summary.members, summary.global_step) == ("parameters", 2, 1)
        assert summary.num_accumulated is None
        assert inspection.check("seen") == ()
        shown = run("show", "seen")
        assert shown.returncode == 0
        assert "2 parameter arrays" in shown.stdout
        assert "step" in shown.stdout
        described = json.loads(run("show", "seen", "--json").stdout)
        assert described["summary"]["kind"] == "parameters"
        for verb in (["list"], ["metrics"]):
            assert run(*verb).returncode == 0
        assert run("cancel", "seen", "--yes").returncode != 0
        own.unlink()
