"""Runs within runs leave no names but those of a named run that can go on."""

import pytest
from helpers.guest import Guests

INNER = """
    def fail():
        shmacc.ConditionalAccumulator("f4", (), "kept")
        raise ValueError("inner")
    def inner():
        shmacc.ConditionalAccumulator("f4", (), "kept")
        return 1
    def inner_lead():
        # The first time it is killed with its own run; then it goes on with that.
        shmacc.run(inner_inner, context=WAY, name="digits")
    def inner_inner():
        acc = shmacc.ConditionalAccumulator("f4", (), "kept", reduction_type="MEAN")
        if once("begun"):
            acc.apply_grad(1.0)
            os.kill(os.getppid(), signal.SIGKILL)
            time.sleep(600)
        mark("found", acc.num_accumulated())
"""


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_named_run_that_fails_in_an_unnamed_one_leaves_nothing(way: str, guest: Guests) -> None:
    program = guest(
        INNER
        + """
    def lead():
        shmacc.run(fail, context=WAY, name="digits")
""",
        "start(lead)",
        way=way,
    )
    ended = program.ends(1)
    assert (ended["error"], ended["text"]) == ("ValueError", "inner")


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_named_run_within_an_unnamed_one_goes_on_after_a_kill(way: str, guest: Guests) -> None:
    program = guest(INNER, "start(inner_lead)", way=way)
    program.ends()
    assert (guest.folder / "found").read_text() == "1"


def test_an_unnamed_run_within_a_named_one_leaves_nothing(guest: Guests) -> None:
    program = guest(
        INNER
        + """
    def lead():
        with suppress(ValueError):
            shmacc.run(fail, context=WAY)
        return shmacc.run(inner, context=WAY)
""",
        'start(lead, name="outer")',
    )
    assert program.ends()["result"] == 1


def test_a_killed_program_leaves_nothing_of_named_runs_within_an_unnamed_one(guest: Guests) -> None:
    program = guest(
        """
        def stay():
            shmacc.ConditionalAccumulator("f4", (), "kept")
            mark("ready")
            time.sleep(600)
        def lead():
            shmacc.ConditionalAccumulator("f4", (), "kept")
            shmacc.run(stay, context=WAY, name="digits")
        """,
        "start(lead)",
    )
    program.marked("ready")
    program.process.kill()
    program.ends(-9)
