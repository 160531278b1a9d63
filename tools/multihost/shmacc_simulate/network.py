"""The network: a NIC for each host, which sends and receives at the same time, each in order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from shmacc_simulate.events import Clock


@dataclass(slots=True)
class _Nic:
    out_free: float = 0.0
    in_free: float = 0.0


class Network:
    """Carries messages between hosts, and counts them.

    Large messages take their time at both NICs, one after the other: first come, first served.
    The switches between are never the limit. Small ones (reports, orders, answers) do not wait
    behind large ones, since they would not in a network that divides its bandwidth among streams;
    their bytes are counted all the same. What a host sends to itself is no message between hosts.

    Args:
        clock: The time.
        hosts: How many.
        bandwidth: Bytes a second of a NIC, each way.
        latency: Seconds.
    """

    def __init__(self, clock: Clock, hosts: int, bandwidth: float, latency: float) -> None:
        self._clock = clock
        self._nics = [_Nic() for _ in range(hosts)]
        self._bandwidth = bandwidth
        self._latency = latency
        self.messages = 0
        self.large_bytes = 0.0
        self.small_bytes = 0.0

    def small(self, sender: int, receiver: int, size: float, arrive: Callable[[], None]) -> None:
        """Send a small message."""
        if sender == receiver:
            self._clock.after(0.0, arrive)
            return
        self.messages += 1
        self.small_bytes += size
        self._clock.after(self._latency + size / self._bandwidth, arrive)

    def large(
        self, sender: int, receiver: int, size: float, ready: float, arrive: Callable[[], None]
    ) -> None:
        """Send a large message that is ready at a time."""
        if sender == receiver:
            self._clock.at(ready, arrive)
            return
        self.messages += 1
        self.large_bytes += size
        seconds = size / self._bandwidth
        nic = self._nics[sender]
        began = max(ready, nic.out_free)
        nic.out_free = began + seconds
        self._clock.at(
            began + self._latency, lambda: self._receive(receiver, began, seconds, arrive)
        )

    def _receive(
        self, receiver: int, began: float, seconds: float, arrive: Callable[[], None]
    ) -> None:
        """Take a message in, whose first byte has come."""
        nic = self._nics[receiver]
        nic.in_free = max(nic.in_free, self._clock.now) + seconds
        self._clock.at(max(nic.in_free, began + seconds + self._latency), arrive)
