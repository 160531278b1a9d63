"""What hosts, networks and calls cost."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final


@dataclass(frozen=True)
class Rates:
    """Bytes a second that one process gets done, of the work on rows.

    Attributes:
        seal: A forwarder copies what its segment has, divided among the shards.
        reduce: A shard adds up pieces: bytes that come in.
        join: A chief puts parts together: bytes of the mean.
    """

    seal: float
    reduce: float
    join: float


@dataclass(frozen=True)
class Machine:
    """A cluster's hosts and network.

    Attributes:
        bandwidth: Bytes a second of a NIC, each way.
        latency: Seconds from one host to another.
        call: Seconds that one call or answer takes in a process that sends or gets it.
        owner_call: The same of a report or a chief's call at the owner, with its answer.
        sparse: Of sparse rows.
        dense: Of dense members.
        retry: Seconds until a call to a shard that is gone is made again.
    """

    bandwidth: float
    latency: float
    call: float
    owner_call: float
    sparse: Rates
    dense: Rates
    retry: float = 0.2


# Measured on the machine of docs/many-hosts.md; `owner_call` and the bandwidth by `make bench-ray`:
# 870 reports a second; and, in 125 ms by bare Ray calls, half of each host's 50.5 MB to the other
# one, then half of 91.5 MB to the chief.
MEASURED: Final = Machine(
    bandwidth=(50.5e6 / 2 + 91.5e6 / 2) / 0.125,
    latency=0.0,
    call=0.13e-3,
    owner_call=1 / 870,
    sparse=Rates(seal=7.1e9, reduce=6.3e9, join=8.0e9),
    dense=Rates(seal=1.37e10, reduce=8.7e9, join=1.0e10),
)

# The same software on hosts of their own, with NICs of 25 Gb/s.
CLUSTER: Final = replace(MEASURED, bandwidth=25e9 / 8, latency=50e-6)
