"""Where shards are: for each grant on hosts that live, to which everything is sent anew."""

from __future__ import annotations

import pytest
from helpers.multihost_actors import TIMING
from helpers.multihost_table import Table

from shmacc._multihost.messages import Opened, Waiting
from shmacc._multihost.owner import OwnerCore

pytestmark = pytest.mark.threads


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


def test_each_grant_has_the_shards_on_hosts_that_report() -> None:
    """A host that is lost, or joins, changes that at the next grant; all pieces get new names."""
    table = with_two_shards()
    first = table.opened(3)
    assert first.places == ("a", "b")
    assert table.owner.leave("t", table.now, consume=False) is False
    table.pass_time(TIMING.lease + 0.2, "b", "c")  # a, where pieces are, is lost
    table.ask(2, "u")
    table.settle("b", "c")
    again = table.ask(2, "u")
    assert isinstance(again, Opened)
    assert again.places == ("b", "c")
    assert not {member.key for member in first.members} & {member.key for member in again.members}
    assert again.contributors.tolist() == [1, 2], "what a had itself is out of reach"
    # It was only cut off, and comes back: it has what it had, and a shard again.
    assert table.owner.leave("u", table.now, consume=False) is False
    table.settle()
    table.ask(3, "v")
    table.settle()
    whole = table.ask(3, "v")
    assert isinstance(whole, Opened)
    assert whole.places == ("a", "b")
    assert whole.contributors.tolist() == [0, 1, 2]


def test_there_may_be_more_shards_than_hosts() -> None:
    table = with_two_shards()
    table.owner = OwnerCore(1, 0, TIMING, 5)
    for host in "ab":
        table.add(host, table.hosts[host][1])
    table.settle("a", "b")
    assert table.opened(2).places == ("a", "b", "a", "b", "a")
