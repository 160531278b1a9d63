"""Each host's copy of the parameters gets every update; a host that missed one catches up."""

import logging

import pytest
from helpers.copies_table import CopiesTable

from shmacc._base.lineage import NO_COPY, Copy, Lineage
from shmacc._multihost.forwarder import Get
from shmacc._multihost.messages import (
    LAST_STEP,
    AtLastStep,
    Died,
    Ended,
    Fence,
    Loss,
    NotReady,
    Opened,
    Order,
    Refusal,
    Refused,
    Stage,
    Staging,
    Told,
    Waiting,
)
from shmacc.errors import FailedPreconditionError, ResourceExhaustedError
from shmacc_hosts.memory import Segment
from shmacc_hosts.world import TIMING

pytestmark = pytest.mark.threads


def with_gradients(*hosts: str) -> CopiesTable:
    """Return a table whose hosts have the first parameters and one gradient each."""
    table = CopiesTable(*hosts)
    for contributor, host in enumerate(hosts, 1):
        assert table.apply(host, contributor)
    table.settle()
    return table


def wanted_stage(table: CopiesTable, host: str) -> Stage:
    """Return the change that a host's forwarder wants to get next."""
    found = table.hosts[host][0].next_change()
    assert found is not None
    assert found[1].stage is not None
    return found[1].stage


def keep_alive(table: CopiesTable, seconds: float) -> None:
    """Let time pass, while all hosts and the updating chief send messages to the owner."""
    end = table.now + seconds
    while table.now < end:
        table.owner.hear("t", table.now)
        table.pass_time(0.1, *table.hosts)


def with_a_host_that_lacks_the_update(*hosts: str) -> CopiesTable:
    """Return a table in which all hosts have made an update, except the last, which is busy."""
    table = with_gradients(*hosts)
    table.busy.add(hosts[-1])
    table.open_block("a", len(hosts))
    table.update()
    keep_alive(table, TIMING.lease + 0.1)
    table.settle()
    assert isinstance(table.update(), Told)
    return table


def test_hosts_are_not_ready_until_the_first_parameters_are_restored() -> None:
    table = CopiesTable("a", "b", restored=False)
    assert table.steps == [-1, -1]
    assert isinstance(table.ask_from("a"), NotReady)
    table.restore("first", 0, only_first=True)
    table.settle()
    assert table.steps == [0, 0]
    assert isinstance(table.restore("first", 0, only_first=True), Told)
    assert isinstance(table.restore("another chief's", 0, only_first=True), Told)
    assert table.numbers == [1, 1]


def test_a_chief_is_told_of_its_update_only_when_every_host_has_made_it() -> None:
    table = with_gradients("a", "b")
    assert isinstance(table.open_block("a", 2), Opened)
    assert table.update() == Staging(("a", "b"), committed=False)
    assert isinstance(table.update("another"), Ended)
    assert isinstance(table.owner.withdraw("another", table.now), Ended)
    table.settle("a")
    assert table.update() == Staging(("b",), committed=False)
    table.hear("b")
    table.act("b")
    table.hear("b")
    assert table.owner.withdraw("u", table.now) == Staging(("a", "b"), committed=True)
    table.settle("a")
    keep_alive(table, TIMING.lease + 0.1)
    assert (table.update(), table.numbers) == (Staging(("b",), committed=True), [2, 1])
    table.settle("b")
    assert (table.update(), table.numbers) == (Told(), [2, 2])
    assert table.steps == [0, 0]
    assert table.owner.leave("t", table.now, consume=True)
    table.settle()
    assert table.steps == [1, 1]


def test_an_update_that_one_host_refuses_changes_nothing_and_the_round_stays_open() -> None:
    table = with_gradients("a", "b")
    table.open_block("a", 2)
    table.errors["b"] = ValueError("bad row")
    refused = table.settled_update("one")
    assert refused == Refused("b", table.errors.pop("b"))
    assert table.update("one") == refused, "as often as it asks"
    assert (table.numbers, table.owner.step) == ([1, 1], 0)
    assert isinstance(table.ask_from("a", 2), Opened)
    assert isinstance(table.settled_update("another"), Told)
    assert table.update("one") == refused, "also if it was late"
    assert table.owner.leave("t", table.now, consume=True)
    assert (table.numbers, table.owner.step) == ([3, 3], 1)


@pytest.mark.parametrize("consume", [False, True])
def test_a_chief_that_leaves_before_the_commit_leaves_its_gradients_to_the_next(
    *, consume: bool
) -> None:
    table = with_gradients("a", "b")
    table.open_block("a", 2)
    table.busy.add("b")
    table.update()
    table.settle("a")
    assert not table.owner.leave("t", table.now, consume=consume)
    table.busy.clear()
    assert isinstance(table.update(), Ended)
    opened = table.open_block("b", 2, "next")
    assert isinstance(opened, Opened)
    assert opened.contributors.tolist() == [1, 2]
    table.ask_from("a", 1, "waits")
    assert isinstance(table.update("too early", "waits"), Ended)
    assert isinstance(table.settled_update("another", "next"), Told)
    assert table.numbers == [3, 3], "number 2 was the other chief's"


@pytest.mark.parametrize("dies", [True, False])
def test_a_round_is_completed_though_its_chief_leaves_or_dies_after_the_commit(
    *, dies: bool
) -> None:
    table = with_gradients("a", "b")
    table.open_block("a", 2)
    table.update()
    table.follow()
    table.hear()
    assert table.update() == Staging(("a", "b"), committed=True)
    if dies:
        table.pass_time(TIMING.chief_lease + 0.2, "a", "b")
    else:
        assert not table.owner.leave("t", table.now, consume=True)
    assert table.owner.step == 0, "no host has the update yet"
    table.settle()
    assert (table.owner.step, table.steps, table.numbers) == (1, [1, 1], [2, 2])
    assert isinstance(table.update(), Ended)


def test_a_round_counts_though_its_block_raises_after_the_commit() -> None:
    table = with_gradients("a", "b")
    table.open_block("a", 2)
    assert isinstance(table.settled_update(), Told)
    assert not table.owner.leave("t", table.now, consume=False)
    table.settle()
    assert (table.owner.step, table.owner.counters.rounds) == (1, 1)


def test_a_block_without_an_update_leaves_the_copies_as_they_are() -> None:
    table = with_gradients("a", "b")
    table.open_block("a", 2)
    assert table.owner.leave("t", table.now, consume=True)
    table.settle()
    assert (table.steps, table.numbers) == ([1, 1], [1, 1])
    assert table.apply("a", 1)
    table.settle()
    assert isinstance(table.open_block("a", 1, "next"), Opened)


@pytest.mark.parametrize("step", [0, 7])
def test_a_restore_raises_the_step(step: int) -> None:
    table = with_gradients("a", "b")
    table.settled_restore("back", step)
    assert table.steps == [max(1, step)] * 2
    assert table.numbers == [2, 2]
    assert table.owner.accumulated == 0
    assert table.apply("a", 1, 0) is False, "it was computed from what was there before"
    table.owner.set_global_step(0, "down", table.now)
    assert (table.owner.step, table.owner.counters.voided) == (max(1, step), 0)


def test_a_restore_waits_for_open_rounds_other_restores_and_a_new_owner() -> None:
    table = with_gradients("a", "b")
    waits = Staging((), committed=False)
    table.ask_from("a", 2)
    assert table.restore("in a grant", 0) == waits
    table.settle()
    assert table.restore("in a block", 0) == waits
    table.owner.leave("t", table.now, consume=False)
    assert table.restore("one", 0) == Staging(("a", "b"), committed=False)
    assert table.restore("another", 0) == waits
    table.settle()
    assert isinstance(table.restore("one", 0), Told)
    table.take_over(2 << 20, "a", "b")
    assert table.restore("of a new owner", 0) == waits
    with pytest.raises(FailedPreconditionError):
        table.owner.advance_step(9, table.now)
    table.settle()
    assert table.numbers == [2, 2]


def test_a_restore_takes_a_step_above_a_segment_that_has_moved_ahead_meanwhile() -> None:
    table = with_gradients("a", "b")
    table.restore("back", 0)
    table.follow()
    table.hear()
    assert table.owner.step == 1
    segment = table.hosts["b"][1]
    segment.reset(1)  # after another owner made a step void
    assert table.act("b") == []
    table.add("b", segment)
    table.settle()
    assert isinstance(table.restore("back", 0), Told)
    assert (table.numbers, table.steps) == ([2, 2], [2, 2])


def test_a_restarted_forwarder_does_not_get_a_restore_that_its_host_has_made() -> None:
    table = with_gradients("a", "b")
    table.restore("back", 0)
    table.follow()
    table.hear()
    table.settle("b")
    table.add("b", table.hosts["b"][1])
    table.hear("b")
    assert Get.STAGE not in table.act("b")


def test_a_restore_call_that_is_sent_again_late_changes_nothing() -> None:
    table = with_gradients("a", "b")
    table.settled_restore("one", 0)
    table.settled_restore("two", 0)
    table.restore("three", 0)
    assert isinstance(table.owner.withdraw("three", table.now), Ended)
    for call, answer in [("one", Told), ("two", Told), ("three", Ended)]:
        assert isinstance(table.restore(call, 0), answer)
        table.settle()
    assert (table.numbers, table.owner.step) == ([3, 3], 2)


def test_a_restore_that_is_withdrawn_before_it_begins_does_not_begin() -> None:
    """The owner was stopped and the chief gave up, so call and withdrawal arrive together."""
    table = with_gradients("a", "b")
    assert isinstance(table.open_block("a", 1, "round"), Opened)
    assert isinstance(table.restore("back", 0), Staging), "it waits for the end of the round"
    assert isinstance(table.owner.withdraw("back", table.now), Ended)
    table.owner.leave("round", table.now, consume=False)
    assert isinstance(table.restore("back", 0), Ended)
    table.settle()
    assert table.owner.step == 0


def test_a_restore_whose_chief_falls_silent_ends_and_rounds_go_on() -> None:
    table = with_gradients("a", "b")
    table.restore("staged", 0)
    table.pass_time(TIMING.chief_lease + 0.2, "a", "b")
    assert isinstance(table.restore("staged", 0), Ended)
    table.restore("committed", 0)
    for _ in range(2):
        table.follow()
    table.memory.pop("a"), table.hosts.pop("a")
    table.pass_time(TIMING.chief_lease + 0.2, "b")
    table.settle()
    assert table.apply("b", 2)
    table.settle()
    assert isinstance(table.open_block("b"), Opened)


@pytest.mark.parametrize("whole", [False, True])
def test_a_large_change_is_waited_for_as_long_as_its_chief_lives(*, whole: bool) -> None:
    table = with_gradients("a", "b")
    table.busy.add("b")
    if not whole:
        table.open_block("a", 2)

    def call() -> object:
        size = int(40e6 * TIMING.chief_lease)
        if not whole:
            return table.owner.update("u", "t", "source", size, table.now)
        return table.owner.restore("r", "a", "source", size, 0, table.now, only_first=False)

    call()
    table.settle("a")
    while table.now < 1.5 * TIMING.chief_lease:
        if whole:
            assert call() == Staging(("b",), committed=False)
            table.ask_from("a")
            assert table.owner.counters.grants == 0, "a restore is outside of rounds"
        table.owner.hear("t", table.now)
        table.pass_time(0.2, "a", "b")
    with pytest.raises(FailedPreconditionError):
        table.owner.advance_step(9, table.now)
    table.busy.clear()
    table.settle()
    assert isinstance(call(), Told)


def test_a_large_update_goes_to_no_more_hosts_at_a_time_than_already_have_it() -> None:
    table = with_gradients(*"abcdefgh")
    table.open_block("c", 8)

    def call() -> object:
        return table.owner.update("u", "t", "source", 40_000_000, table.now)

    def asked() -> str:
        table.hear()
        orders = {host: core._order for host, (core, _) in table.hosts.items()}
        return "".join(host for host, order in orders.items() if order and order.stage)

    call()
    assert asked() == "ac", "the chief's has it already, and one gets it"
    table.act("c")
    table.hear("c")
    assert asked() == "ac"
    table.act("a")
    table.hear("a")
    assert asked() == "abcd", "two have it"
    table.act("b")
    table.hear("b")
    assert asked() == "abcdef", "three have it, and one gets it"
    keep_alive(table, TIMING.lease + 2.1)
    assert asked() == "abcdefgh", "those that get it are too late, and others have their turn"
    table.settle("c", "g", "h")
    assert call() == Staging(tuple("def"), committed=False)
    keep_alive(table, TIMING.lease + 2.1)
    assert call() == Staging(tuple("abcgh"), committed=True)
    table.settle(*"abcgh")
    assert isinstance(call(), Told)
    assert table.numbers == [2, 2, 2, 1, 1, 1, 2, 2]


@pytest.mark.parametrize("others", ["b", ""])
def test_a_chiefs_host_gets_a_checked_update_only_at_the_commit_if_others_have_it(
    others: str,
) -> None:
    """If there is no other host, it gets the update earlier: the chief's death must not lose it."""
    table = with_gradients("a", *others)
    table.open_block("a")

    def call() -> object:
        lineage = table.copy("a").lineage
        return table.owner.update("u", "t", "source", 0, table.now, checked=lineage)

    assert call() == Staging(tuple(others or "a"), committed=False)
    table.hear("a")
    order = table.hosts["a"][0]._order
    assert order is not None
    assert (order.stage is None) == bool(others)
    table.hear()
    for host in others or "a":
        table.act(host)
        table.hear(host)
    assert table.owner.update("u", "t", "source", 0, table.now) == Staging(
        tuple(sorted({"a", *others})), committed=True
    )
    table.hear("a")
    table.act("a")
    table.settle()
    assert isinstance(table.update(), Told)
    assert set(table.numbers) == {2}


def test_a_host_gets_an_order_only_if_there_is_something_new_to_do() -> None:
    """Each needless order would cost every host a message and another report."""
    table = with_gradients("a", "b")
    table.open_block("a", 2)

    def news() -> str:
        orders = {host: core._order for host, (core, _) in table.hosts.items()}
        serials = {host: order.serial for host, order in orders.items() if order}
        return "".join(
            host for host, serial in serials.items() if table.owner.has_news(host, serial)
        )

    assert news() == "", "the block is open"
    table.update()
    assert news() == "ab", "they get the update"
    table.follow()
    table.hear("a")
    assert news() == ""
    table.hear("b")
    assert news() == "a", "it is committed"
    table.settle()
    assert isinstance(table.update(), Told)
    table.owner.ask("another", 1, table.now, host="a")
    assert news() == ""
    assert table.owner.leave("t", table.now, consume=True)
    assert news() == "ab", "the step moves on"


@pytest.mark.parametrize("error", [None, MemoryError()])
def test_a_chief_whose_host_cannot_make_the_update_is_told_so_and_the_round_ends(
    error: Exception | None,
) -> None:
    table = with_gradients("a", "b")
    table.open_block("a", 2)
    table.update()
    table.follow()
    table.hear("b", "a")
    core = table.hosts["a"][0]
    found = core.next_change()
    assert found is not None
    assert found[0] is Get.MAKE
    assert core.stage is not None
    core.refused(core.stage.update, error)
    table.hear("a")
    answer = table.update()
    assert isinstance(answer, Refused)
    assert (answer.host, answer.committed) == ("a", True)
    assert error in {None, answer.error}
    table.busy.add("a")
    table.settle()
    assert (table.owner.step, table.numbers) == (1, [1, 2])
    table.busy.clear()
    table.settle()
    assert (table.steps, table.numbers) == ([1, 1], [2, 2])


def test_a_chief_whose_host_has_another_result_is_told_so_and_the_round_ends() -> None:
    """The host was silent when the owner accepted the other hosts' result."""
    table = with_gradients("a", "b", "c")
    table.open_block("a", 3)
    table.update()
    table.follow()
    table.hear()
    table.pass_time(TIMING.lease + 0.2, "b", "c")
    table.settle("b", "c")
    table.digests["a"] = 2
    for _ in range(2):
        table.update()
        table.settle("a")
    answer = table.update()
    assert isinstance(answer, Refused)
    assert (answer.host, answer.committed) == ("a", True)
    table.settle()
    assert table.owner.step == 1
    assert len({copy.lineage for copy, _ in table.memory.values()}) == 1


def test_a_host_whose_result_differs_gets_the_copy_of_the_chiefs_host(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.ERROR, "shmacc")
    table = with_gradients("a", "b", "c")
    table.digests["a"] = 2
    for step, problems in [(1, []), (2, ["a"])]:
        table.round("b", ticket=f"round {step}")
        assert [copy.lineage.digest for copy, _ in table.memory.values()] == [1, 1, 1]
        assert table.steps == [step] * 3
        assert list(table.owner.copies.problems) == problems
        assert table.apply("c", 1)
        table.settle()


def test_a_chief_whose_host_lacks_the_newest_copy_is_served_after_another_chief() -> None:
    table = with_gradients("a", "b")
    table.memory["c"] = NO_COPY, 0
    table.add("c", Segment(step=-1))
    table.busy.add("c")
    table.hear("c")
    table.act("c")
    table.hosts["c"][0].gets_whole()
    table.hear("c")
    assert isinstance(table.ask_from("c", 1, "of c"), Waiting)
    assert isinstance(table.ask_from("a", 1, "of a"), Waiting)
    table.settle("a", "b")
    table.pass_time(TIMING.grace + 0.2, "a", "b", "c")
    assert isinstance(table.ask_from("a", 1, "of a"), Waiting)
    for _ in range(60):  # at first the owner waits for c, which gets a copy
        table.owner.ask("of c", 1, table.now, host="c")
        table.owner.ask("of a", 1, table.now, host="a")
        table.pass_time(0.1, "a", "b", "c")
    table.settle()
    assert isinstance(table.ask_from("a", 1, "of a"), Opened)
    assert isinstance(table.ask_from("c", 1, "of c"), Waiting)
    assert table.owner.leave("of a", table.now, consume=True)
    table.settle()
    assert table.apply("a", 1)
    assert isinstance(table.open_block("a", 1, "again"), Opened), "without a wait"
    assert table.owner.leave("again", table.now, consume=True)
    table.busy.clear()
    table.settle()
    assert table.apply("c", 3)
    table.settle()
    assert isinstance(table.open_block("c", 1, "of c"), Opened)


def test_a_chief_whose_host_is_behind_the_step_is_served_after_another_chief() -> None:
    table = with_gradients("a", "b")
    table.owner.advance_step(1, table.now)
    table.settle("a")
    assert table.apply("a", 1)
    table.hear()
    table.ask_from("b", 1, "of b")
    table.ask_from("a", 1, "of a")
    table.settle("a")
    table.pass_time(TIMING.grace + 0.2, "a", "b")
    assert isinstance(table.ask_from("a", 1, "of a"), Opened)


def test_a_round_waits_for_a_newly_started_forwarder_no_longer_than_the_grace() -> None:
    table = with_gradients("a", "b")
    table.add("b", table.hosts["b"][1])
    table.ask_from("a", 1)
    table.settle("a")
    assert isinstance(table.ask_from("a", 1), Waiting)
    table.pass_time(TIMING.grace + 0.2, "a")
    assert isinstance(table.ask_from("a", 1), Opened)


def test_an_update_does_not_wait_for_a_host_that_cannot_get_it_and_copies_it_later() -> None:
    table = with_gradients("a", "b")
    table.open_block("a", 2)
    table.busy.add("b")
    table.update()
    table.settle()
    assert table.update() == Staging(("b",), committed=False)
    keep_alive(table, TIMING.lease + 0.1)
    table.settle()
    assert isinstance(table.update(), Told)
    assert table.owner.leave("t", table.now, consume=True)
    table.busy.clear()
    table.hear()
    assert Get.REPLACE in table.act("b")
    table.settle()
    assert (table.numbers, table.steps) == ([2, 2], [1, 1])


@pytest.mark.parametrize("whole", [False, True])
def test_rounds_wait_for_a_host_that_is_behind_only_if_it_gets_a_whole_copy(*, whole: bool) -> None:
    """While it gets the copy, more updates may come than other hosts keep: so rounds wait."""
    table = with_a_host_that_lacks_the_update("a", "b")
    assert table.owner.leave("t", table.now, consume=True)
    table.settle()
    assert table.apply("a", 1)
    core = table.hosts["b"][0]
    found = core.next_change()
    assert found is not None
    assert found[0] is Get.REPLACE
    if whole:
        core.gets_whole()
    table.settle()
    table.ask_from("a", 1, "next")
    table.settle("a")
    table.pass_time(TIMING.grace + 0.2, "a", "b")
    assert isinstance(table.ask_from("a", 1, "next"), Waiting if whole else Opened)
    core.changed(table.copy("b"))
    table.settle()
    assert isinstance(table.ask_from("a", 1, "next"), Opened), "it has not got it: it tries again"


def test_an_update_does_not_wait_for_a_host_that_stages_it_after_the_commit() -> None:
    table = with_gradients("a", "b")
    table.open_block("a", 2)
    table.busy.add("b")
    table.update()
    table.settle()
    keep_alive(table, TIMING.lease + 0.1)
    table.hear()
    table.hosts["b"][0].staged(wanted_stage(table, "b"))
    table.settle()
    assert (table.numbers, isinstance(table.update(), Told)) == ([2, 1], True)
    table.busy.clear()
    table.settle()
    assert table.numbers == [2, 2], "made from what it has got"


def test_a_host_without_room_for_a_copy_reports_a_problem_until_it_has_the_copy() -> None:
    table = with_a_host_that_lacks_the_update("a", "b")
    assert table.owner.leave("t", table.now, consume=True)
    table.hear()
    core = table.hosts["b"][0]
    found = core.next_change()
    assert found is not None
    get, order = found
    assert get is Get.REPLACE
    assert order.lineage is not None
    refusal = Refusal(Fence(*order.lineage[:2]), ResourceExhaustedError("no room"))
    core.changed(table.copy("b"), refusal)
    table.settle()
    assert table.owner.problems() == {"b": "ResourceExhaustedError: no room"}
    table.busy.clear()
    table.settle()
    assert table.numbers == [2, 2]
    assert table.owner.problems() == {}


def test_a_host_whose_actor_dies_after_the_commit_gets_the_update_again() -> None:
    table = with_gradients("a", "b", "c")
    table.open_block("a", 3)
    table.busy.add("c")
    table.update()
    table.hear()
    table.act("a"), table.act("b")
    keep_alive(table, TIMING.lease + 0.1)
    assert table.update() == Staging(("a", "b"), committed=True)
    table.add("b", table.hosts["b"][1])
    table.hear("b")
    table.settle("a")
    assert table.update() == Staging(("b",), committed=True)
    table.settle("b")
    assert (table.update(), table.numbers) == (Told(), [2, 2, 1])


def test_an_update_does_not_wait_for_a_host_that_refuses_it_without_an_error() -> None:
    """The host cannot get the update: its link to the chief's host is cut."""
    table = with_gradients("a", "b")
    table.open_block("a", 2)
    table.busy.add("b")
    table.update()
    table.settle()
    table.hosts["b"][0].refused(wanted_stage(table, "b").update, None)
    table.settle()
    assert isinstance(table.update(), Told)


def test_a_host_that_gets_no_copy_is_sent_to_another_host_for_it() -> None:
    table = with_a_host_that_lacks_the_update("a", "b", "c")
    sources = set()
    for _ in range(3):
        table.hear("c")
        order = table.hosts["c"][0]._order
        assert order is not None
        sources.add(order.source)
    assert sources == {"a", "b"}


def test_the_owner_follows_a_segment_that_is_ahead_but_reports_one_too_far_ahead() -> None:
    table = with_gradients("a", "b")
    table.hosts["b"][1].reset(9)
    assert table.apply("b", 2)
    table.settle()
    assert (table.owner.step, table.steps) == (9, [9, 9])
    assert table.owner.accumulated == 1, "of this step and this copy"
    table.hosts["b"][1].step = 9 + 2**32 + 1
    table.settle()
    assert table.owner.step == 9
    assert list(table.owner.copies.problems) == ["b"]


def test_no_restore_and_no_new_copy_moves_past_the_last_step() -> None:
    table = with_gradients("a", "b")
    table.settled_restore("to the end", LAST_STEP)
    table.set_copy("b", Copy(Lineage(1, 7 << 32, 7), 0, 0))
    table.add("b", table.hosts["b"][1])
    table.settle()
    assert isinstance(table.restore("further", 0), AtLastStep)
    assert (table.owner.step, table.steps) == (LAST_STEP, [LAST_STEP] * 2)


def test_a_copy_is_replaced_only_together_with_a_higher_step() -> None:
    """A host has another copy at the owner's step, so the owner takes a higher step."""
    table = with_gradients("a", "b")
    assert isinstance(table.open_block("a"), Opened)
    table.set_copy("b", Copy(Lineage(1, 7 << 32, 7), 0, 0))
    table.add("b", table.hosts["b"][1])
    table.update()
    table.hear("b")
    assert table.act("b") == [], "not during a block; nor is an update of the other copy for it"
    table.owner.leave("t", table.now, consume=False)
    table.settle()
    assert (table.numbers, table.steps) == ([1, 1], [1, 1])


def test_the_owner_takes_no_higher_step_while_hosts_hold_gradients_for_a_round() -> None:
    table = with_gradients("a", "b")
    table.ask_from("a", 1)
    table.hear("a")
    table.act("a")
    table.hosts["b"][1].reset(1)  # after another owner made a step void
    table.pass_time(TIMING.grace + 0.2, "b", "a")
    assert table.owner.step == 0
    assert isinstance(table.ask_from("a", 1), Opened)


def test_a_copy_is_not_changed_under_a_segment_that_is_ahead() -> None:
    """The segment's gradients of the later step were computed from the unchanged copy."""
    table = with_gradients("a", "b")
    table.open_block("a", 2)
    segment = table.hosts["b"][1]
    segment.held = False
    segment.reset(1)  # after another owner made a step void
    table.add("b", segment)
    assert table.apply("b", 2)
    table.settle()
    assert isinstance(table.settled_update(), Told)
    assert table.numbers == [2, 1]
    assert table.owner.leave("t", table.now, consume=True)
    table.settle()
    assert (table.numbers, table.steps) == ([2, 2], [2, 2])
    assert table.owner.accumulated == 0


def test_an_owner_that_hears_of_a_higher_term_resigns() -> None:
    table = with_gradients("a", "b")
    old = table.owner
    table.take_over(2 << 20, "a", "b")
    table.settle()
    report = table.hosts["a"][0].report(table.now)
    old.report(report, table.now)
    assert old.has_resigned


def test_a_returning_host_gets_the_copy_of_the_group_that_began_anew() -> None:
    """The host had answered a higher term before: the clock of the new owner is behind."""
    table = CopiesTable("a", term=9 << 20)
    (_, segment), memory = table.hosts.pop("a"), table.memory.pop("a")
    table.take_over(1 << 20, "b")
    table.add("b", Segment(step=-1))
    table.settle()
    table.settled_restore("anew", 0, "b")
    assert table.apply("b", 1)
    table.settle()
    assert isinstance(table.open_block("b"), Opened)
    table.memory["a"] = memory
    table.add("a", segment)
    table.hear("a")
    assert isinstance(table.settled_update(), Told), "its round ends first"
    assert table.owner.leave("t", table.now, consume=True)
    table.settle()
    assert (table.numbers, table.steps) == ([2, 2], [1, 1])
    assert table.owner.fence.term > 9 << 20
    assert not table.owner.has_resigned


def test_a_learning_owner_that_hears_of_a_higher_term_takes_a_still_higher_one() -> None:
    table = with_gradients("a", "b")
    table.take_over(2 << 20, "a", "b")
    table.settle()
    learners = [table.new_owner(1 << 20) for _ in range(9)]
    for learner in learners:
        learner.report(table.hosts["a"][0].report(table.now), table.now)
    terms = {learner.fence.term for learner in learners}
    assert min(terms) > 2 << 20
    assert len(terms) > 1, "no two owners have the same"
    assert not any(learner.has_resigned for learner in learners)


def test_a_host_obeys_no_earlier_owner_even_if_its_forwarder_is_replaced() -> None:
    table = with_gradients("a", "b")
    old = table.owner
    table.take_over(2 << 20, "a", "b")
    table.settle()
    table.add("a", table.hosts["a"][1])
    core = table.hosts["a"][0]
    core.receive(old.order("a", core._incarnation))
    assert core._order is None
    old.report(core.report(table.now), table.now)
    assert old.has_resigned


def test_a_new_owner_leads_only_after_every_host_has_answered() -> None:
    table = with_gradients("a", "b")
    table.open_block("a", 2)
    table.update()
    table.follow()
    table.hear("b")
    table.hear("a")
    table.act("a")  # it has the update; b has it staged only
    table.take_over(2 << 20, "a", "b")
    table.settle("b")
    assert table.hosts["b"][0].stage is None, "that was another owner's"
    assert table.owner.unanswered() == {"a"}
    assert isinstance(table.ask_from("a", 1, "next"), Waiting)
    table.settle()
    assert not table.owner.is_learning
    assert (table.owner.step, table.numbers) == (1, [2, 2])


def test_a_host_that_reports_counts_though_it_is_not_listed() -> None:
    table = with_gradients("a", "b")
    table.set_copy("b", Copy(Lineage(1, 7 << 32, 7), 3, 3))
    table.hosts["b"][1].step = 3
    table.add("b", table.hosts["b"][1])
    table.take_over(2 << 20, "a")
    table.hear("b")
    table.settle("a")
    assert table.owner.unanswered() == {"b"}
    table.settle()
    assert table.numbers == [7, 7]
    table.owner.list_hosts(frozenset({"a"}), table.now)
    table.settle()
    assert table.owner.is_ready


def test_a_new_owner_takes_the_copy_of_the_highest_term_not_of_the_highest_step() -> None:
    """The copy at the highest step is from a machine that was declared dead and went on alone."""
    table = with_gradients("a", "b")
    table.set_copy("a", Copy(Lineage(1, 9 << 32, 9), 9, 9))
    table.hosts["a"][1].step = 9
    table.set_copy("b", Copy(Lineage(5, 1, 1), 3, 3))
    table.hosts["b"][1].step = 3
    table.add("a", table.hosts["a"][1], copies=3)  # these 3 hosts are not waited for
    table.add("b", table.hosts["b"][1])
    table.take_over(6 << 20, "a", "b")
    table.settle()
    assert {copy.lineage for copy, _ in table.memory.values()} == {Lineage(5, 1, 1)}
    assert table.steps == [10, 10], "past every step that gradients may be of"
    assert table.owner.counters.voided == 0


@pytest.mark.parametrize("ended", [False, True])
def test_an_owner_learns_again_if_no_host_has_its_lineage(*, ended: bool) -> None:
    table = with_gradients("a", "b")
    table.pass_time(31, "a", "b")  # longer than an owner waits for unlisted hosts
    table.busy.add("b")
    table.open_block("a", 2)
    table.update()
    keep_alive(table, TIMING.lease + 0.1)
    table.settle("a")
    assert table.numbers == [2, 1]
    if ended:
        assert isinstance(table.update(), Told)
        assert table.owner.leave("t", table.now, consume=True)
    table.memory.pop("a"), table.hosts.pop("a")
    table.busy.clear()
    table.pass_time(TIMING.lease + 0.2, "b")
    assert not table.owner.is_learning, "a may come back"
    table.owner.list_hosts(frozenset({"b"}), table.now)
    table.settle()
    assert not table.owner.is_ready, "it waits for the host that is not listed now"
    table.pass_time(31, "b")
    table.settle()
    assert (table.owner.is_ready, table.numbers) == (True, [1])
    assert table.owner.fence.term > 1
    assert isinstance(table.open_block("b", 1, "next"), Opened)


def test_segments_move_past_the_step_of_a_change_that_was_begun() -> None:
    """The forwarder died in the change, so a worker may have read a half-changed copy."""
    table = with_gradients("a", "b")
    table.set_copy("b", table.copy("b")._replace(begun=1))
    table.add("b", table.hosts["b"][1])
    table.settle()
    assert (table.owner.step, table.steps) == (1, [1, 1])
    assert table.owner.accumulated == 0


def test_a_gradient_of_a_half_changed_copy_is_in_no_round() -> None:
    """The owner moves past the begun step, but only after the round that is being opened."""
    table = with_gradients("a", "b")
    table.ask_from("a", 1)
    table.hear("a")
    table.act("a")
    table.set_copy("b", table.copy("b")._replace(begun=1))
    table.add("b", table.hosts["b"][1])
    table.settle("b")
    table.pass_time(TIMING.grace + 0.2, "a", "b")
    opened = table.ask_from("a", 1)
    assert isinstance(opened, Opened)
    assert opened.contributors.tolist() == [1]


def test_no_order_of_a_later_owner_is_followed_while_the_copy_changes() -> None:
    table = with_gradients("a", "b")
    table.open_block("a", 2)
    table.update()
    table.hear()
    table.act("b")
    core = table.hosts["a"][0]
    later = Order(2 << 20, 1, core._incarnation)
    found = core.next_change()
    assert found is not None
    assert found[0] is Get.STAGE
    assert core.may_follow(later), "that may take long, and changes nothing"
    assert core.next_change() is None, "one thing at a time"
    stage = found[1].stage
    assert stage is not None
    assert core.wants(stage)
    core.staged(stage)
    table.hear("b", "a")
    table.hear("a")
    found = core.next_change()
    assert found is not None
    assert found[0] is Get.MAKE
    assert not core.may_follow(later)
    assert core.follows(found[1])
    core.changed(Copy(Lineage(1, 2, 1), 1, 1))
    assert core.may_follow(later)
    core.receive(later)
    assert not core.wants(stage)
    assert not core.follows(found[1])


def _with_a_block_of_a_dead_owner(*, updated: bool) -> tuple[CopiesTable, Opened]:
    table = with_gradients("a", "b")
    opened = table.open_block("a", 2)
    assert isinstance(opened, Opened)
    if updated:
        assert isinstance(table.settled_update(), Told)
    table.take_over(2 << 20, "a", "b")
    assert table.owner.resume("t", opened, table.now, host="a") is None, "it learns"
    table.settle()
    return table, opened


def test_the_next_owner_resumes_a_block_if_no_other_round_came_in_between() -> None:
    table, opened = _with_a_block_of_a_dead_owner(updated=False)
    assert not table.owner.leave("t", table.now, consume=True), "the chief has not noticed it yet"
    found = table.owner.resume("t", opened, table.now, host="a")
    assert isinstance(found, Opened)
    assert table.owner.resume("t", opened, table.now, host="a") == found
    assert isinstance(table.settled_update(), Told)
    assert table.owner.leave("t", table.now, consume=True)
    table.settle()
    assert (table.owner.step, table.steps) == (1, [1, 1])


def test_the_next_owner_tells_a_resuming_chief_that_its_update_was_made() -> None:
    table, opened = _with_a_block_of_a_dead_owner(updated=True)
    assert table.owner.resume("t", opened, table.now, host="a") == Told()
    assert table.owner.resume("other", opened, table.now, host="a") == Ended()
    assert table.owner.step == 1


def test_the_next_owner_resumes_no_block_whose_gradients_another_chief_has() -> None:
    table, opened = _with_a_block_of_a_dead_owner(updated=False)
    assert isinstance(table.open_block("b", 2, "other"), Opened)
    assert table.owner.resume("t", opened, table.now, host="a") == Ended()


def test_the_next_owner_does_not_tell_of_a_death_again() -> None:
    table = with_gradients("a", "b")

    def ask(ticket: str) -> object:
        return table.owner.ask(ticket, 3, table.now, host="a", tell=True)

    ask("t")
    for pid in 7, 8:
        table.hosts["b"][0].died((pid,), (pid,), ("killed",))
    table.settle()
    assert ask("t") == Died(tuple(Loss("b", (pid,), (pid,), ("killed",)) for pid in (7, 8)))
    table.owner.leave("t", table.now, consume=False, told=1)
    table.settle()
    table.take_over(2 << 20, "a", "b")
    ask("u")
    table.settle()
    assert ask("u") == Died((Loss("b", (8,), (8,), ("killed",)),)), "of that nobody was told"
