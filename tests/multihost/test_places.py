"""Where shards are: on hosts that live, and what was sent to one that moves is sent again."""

from __future__ import annotations

from collections import Counter

import pytest
from helpers.multihost_table import Table
from helpers.multihost_world import TIMING

from shmacc._multihost import forwarder as act
from shmacc._multihost.messages import Opened, Waiting
from shmacc._multihost.owner import OwnerCore
from shmacc._multihost.places import Places

pytestmark = pytest.mark.threads


def test_shards_stay_where_they_are_as_long_as_their_host_lives() -> None:
    places = Places(4)
    assert places.settle({"a", "b"}, even=True) == {0, 1, 2, 3}
    before = places.hosts
    assert Counter(before) == {"a": 2, "b": 2}
    assert places.settle({"a", "b", "c"}, even=False) == set()
    assert places.settle(set(), even=False) == set(), "there is nowhere to go"
    assert places.hosts == before
    moved = places.settle({"b", "c"}, even=False)
    assert moved == {shard for shard, host in enumerate(before) if host == "a"}
    assert "a" not in places.hosts


def test_a_host_that_joins_gets_shards_when_nothing_has_been_sent_to_them() -> None:
    places = Places(3)
    places.settle({"a"}, even=True)
    places.settle({"a", "b", "c"}, even=True)
    assert sorted(places.hosts) == ["a", "b", "c"]


def with_two_shards() -> Table:
    """Three hosts with a gradient each; the shards, as the first grant shows, are at a and b."""
    table = Table("a", "b", "c")
    table.owner = OwnerCore(1, 0, TIMING, 2)
    for host in "abc":
        table.add(host, table.hosts[host][1])
    table.settle()
    for contributor, host in enumerate("abc"):
        assert table.apply(host, contributor)
    table.settle()
    return table


def test_a_lost_host_with_a_shard_ends_the_grant_and_the_next_one_has_it_elsewhere() -> None:
    table = with_two_shards()
    table.ask(2)
    table.hear()
    assert table.hosts["a"][0].places == ("a", "b")
    # Nobody gets its pieces to b, which is dead: no host ships.
    for _ in range(15):
        table.pass_time(0.1, "a", "c")
        assert isinstance(table.ask(2), Waiting)
    assert table.owner.lost == {"b"}
    assert table.owner.counters.withdrawn == 1
    table.settle("a", "c")
    opened = table.ask(2)
    assert isinstance(opened, Opened)
    assert opened.places == ("a", "c")
    assert opened.contributors.tolist() == [0, 2]


def test_what_was_sent_to_a_shard_that_moves_is_sent_again_under_another_name() -> None:
    table = with_two_shards()
    first = table.opened(3)
    assert first.places == ("a", "b")
    assert table.owner.leave("t", table.now, consume=False) is False
    table.pass_time(TIMING.lease + 0.2, "b", "c")  # a, where all pieces are, is lost
    table.ask(2, "u")
    table.hear("b", "c")
    assert act.Ship(2) in table.act("b")
    table.settle("b", "c")
    again = table.ask(2, "u")
    assert isinstance(again, Opened)
    assert "a" not in again.places
    assert not {member.key for member in first.members} & {member.key for member in again.members}
    assert again.contributors.tolist() == [1, 2], "what a had itself is gone with its shard"
    # It was only cut off, and comes back: it has what it had, and no shard.
    assert table.owner.leave("u", table.now, consume=False) is False
    table.settle()
    table.ask(3, "v")
    table.settle()
    whole = table.ask(3, "v")
    assert isinstance(whole, Opened)
    assert whole.places == again.places
    assert whole.contributors.tolist() == [0, 1, 2]
