"""Which host has which shard."""

from collections import Counter
from collections.abc import Collection


class Places:
    """Where the shards are: on hosts that live, about as many on each.

    A shard stays where it is as long as its host lives. What hosts had sent to one that moves is
    lost with its place; the owner has them send it again.

    Args:
        shards: How many there are.
    """

    def __init__(self, shards: int) -> None:
        self._hosts = [""] * shards  # at first of no host

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host of each shard."""
        return tuple(self._hosts)

    def settle(self, living: Collection[str], *, even: bool) -> frozenset[int]:
        """Find places for shards whose hosts do not live; return which shards have moved.

        Args:
            living: The hosts that live. If there is none, all shards stay where they were.
            even: Whether shards move to hosts with few, as well: nothing has been sent to them.
        """
        if not living:
            return frozenset()
        most = -(-len(self._hosts) // len(living)) if even else len(self._hosts)
        taken: Counter[str] = Counter()
        moved = []
        for shard, host in enumerate(self._hosts):
            if host in living and taken[host] < most:
                taken[host] += 1
            else:
                moved.append(shard)
        for shard in moved:
            host = min(sorted(living), key=lambda host: taken[host])
            taken[host] += 1
            self._hosts[shard] = host
        return frozenset(moved)
