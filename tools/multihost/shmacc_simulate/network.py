"""The network between hosts, and objects in Ray's store that hosts get over it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import random

    from shmacc_simulate.clock import Clock, Steps

SMALL_BYTES = 300  # a report, an order, a call without rows; each contributor adds 8


class Network:
    """Carries messages between hosts, each with a NIC that sends and receives at the same time.

    Large messages queue at both NICs: first come, first served. Switches are never the limit. Small
    messages (reports, orders, answers) do not wait behind large ones, since they would not in a
    network that divides its bandwidth among streams. A message from a host to itself takes no time.
    """

    def __init__(self, clock: Clock, hosts: int, bandwidth: float, latency: float) -> None:
        self._clock = clock
        self._out_free, self._in_free = [0.0] * hosts, [0.0] * hosts  # when each NIC is free
        self._bandwidth, self._latency = bandwidth, latency
        self.sent = [0.0] * hosts  # bytes of large messages, by sender

    def small(self, sender: int, receiver: int, size: float = SMALL_BYTES) -> float:
        """Send a small message; return when it arrives."""
        seconds = 0.0 if sender == receiver else self._latency + size / self._bandwidth
        return self._clock.now + seconds

    def large(self, sender: int, receiver: int, size: float, ready: float) -> Steps[None]:
        """Carry a large message, which can be sent from the time `ready` on."""
        if sender == receiver:
            yield ready
            return
        self.sent[sender] += size
        seconds = size / self._bandwidth
        began = max(ready, self._out_free[sender])
        self._out_free[sender] = began + seconds
        yield began + self._latency  # the first byte has come
        free = max(self._in_free[receiver], self._clock.now) + seconds
        self._in_free[receiver] = free
        yield max(free, began + seconds + self._latency)

    def arrival(self, sender: int, size: float, ready: float) -> float:
        """Return when a large message would arrive, if nothing else does."""
        return max(ready, self._out_free[sender]) + size / self._bandwidth + self._latency


class Stored:
    """An object in Ray's store, which hosts get from hosts that have it.

    A host asks one of those that have it whole at that time, chosen at random, as Ray does it. At
    best (`shared`) it asks the one that can send first, also one that has still to get it.
    """

    def __init__(self, network: Network, clock: Clock, home: int, size: float) -> None:
        self._network, self._clock, self._size = network, clock, size
        self._whole_at = {home: clock.now}  # when each host has it whole; it may be to come
        self.last = 0.0  # seconds of the transfer that has ended last

    def pull(self, at: int, random: random.Random, *, shared: bool) -> Steps[None]:
        """Get it to a host."""
        network, whole_at, began = self._network, self._whole_at, self._clock.now
        if at in whole_at:
            return
        if shared:
            sender = min(whole_at, key=lambda s: network.arrival(s, self._size, whole_at[s]))
        else:
            sender = random.choice([host for host, time in whole_at.items() if time <= began])
        ready = max(network.small(at, sender), whole_at[sender])
        whole_at[at] = network.arrival(sender, self._size, ready)
        yield from network.large(sender, at, self._size, ready)
        self.last = self._clock.now - began
