"""Search all histories of a few simulated hosts: a fault appears only without one of the rules.

Guards shmacc/_multihost: the rules of parameters over many hosts.
"""

import logging

import pytest

from shmacc_hosts.cases import CASES, Case
from shmacc_hosts.rules import RULES, without
from shmacc_hosts.search import begun, nexts
from shmacc_hosts.states import copied, key

QUICK = [case for case in CASES if case.size == "quick"]


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "shmacc")


@pytest.mark.parametrize("case", QUICK, ids=lambda case: case.without or f"all {case.kinds}")
def test_a_fault_is_found_if_and_only_if_a_rule_is_left_out(case: Case) -> None:
    found = case.find(20_000)
    assert not found.limited
    expected = case.without not in {"", "held"}  # without "held" it is only slower
    assert bool(found.fault) == expected, found


def test_each_rule_is_left_out_in_some_case() -> None:
    assert {case.without for case in CASES} == {"", *RULES}


def test_a_rule_that_was_left_out_is_restored() -> None:
    functions = [function for rule in RULES.values() for function, _, _ in rule.changes]
    before = [function.__code__ for function in functions]
    for rule in RULES:
        with without(rule):
            changed = {function.__code__ for function, _, _ in RULES[rule].changes}
            assert changed.isdisjoint(before)
        assert [function.__code__ for function in functions] == before


def test_a_step_on_a_copy_of_a_world_leaves_the_world_as_it_was() -> None:
    world = begun()
    world.last_step, world.kinds, world.failures = 1, frozenset({"actor", "lost", "owner"}), 9
    for _ in range(40):
        before = key(world)
        steps = list(nexts(world))
        for step in steps:
            other = copied(world)
            assert key(other) == before
            other.do(step)
            other.settle()
        assert key(world) == before
        world.do(steps[len(steps) // 2])
        world.settle()
