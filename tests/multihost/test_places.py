"""Where shards are: for each grant on hosts that live, to which everything is sent anew."""

from __future__ import annotations

import pytest
from helpers.multihost_actors import TIMING
from helpers.multihost_table import with_a_gradient_each

from shmacc._multihost.messages import Waiting
from shmacc._multihost.owner import OwnerCore

pytestmark = pytest.mark.threads


def test_a_lost_host_with_a_shard_ends_the_grant_and_the_next_one_has_it_elsewhere() -> None:
    table = with_a_gradient_each("a", "b", "c", shards=2)
    table.ask(2)
    table.hear()
    assert table.hosts["a"][0].places == ("a", "b")
    # Nobody gets its pieces to b, which is dead: no host ships.
    for _ in range(15):
        table.pass_time(0.1, "a", "c")
        assert isinstance(table.ask(2), Waiting)
    assert table.owner.lost == {"b"}
    assert table.owner.counters.withdrawn == 1
    opened = table.opened(2, "t", "a", "c")
    assert opened.places == ("a", "c")
    assert opened.contributors.tolist() == [1, 3]


def test_each_grant_has_the_shards_on_hosts_that_report() -> None:
    """A host that is lost, or joins, changes that at the next grant; all pieces get new names."""
    table = with_a_gradient_each("a", "b", "c", shards=2)
    first = table.opened(3)
    assert first.places == ("a", "b")
    assert table.owner.leave("t", table.now, consume=False) is False
    table.pass_time(TIMING.lease + 0.2, "b", "c")  # a, where pieces are, is lost
    again = table.opened(2, "u", "b", "c")
    assert again.places == ("b", "c")
    assert not {member.key for member in first.members} & {member.key for member in again.members}
    assert again.contributors.tolist() == [2, 3], "what a had itself is out of reach"
    # It was only cut off, and comes back: it has what it had, and a shard again.
    assert table.owner.leave("u", table.now, consume=False) is False
    table.settle()
    whole = table.opened(3, "v")
    assert whole.places == ("a", "b")
    assert whole.contributors.tolist() == [1, 2, 3]


def test_there_may_be_more_shards_than_hosts() -> None:
    table = with_a_gradient_each("a", "b", "c", shards=2)
    table.owner = OwnerCore(1, 0, TIMING, 5)
    for host in "ab":
        table.add(host, table.hosts[host][1])
    table.settle("a", "b")
    assert table.opened(2).places == ("a", "b", "a", "b", "a")
