"""What an owner counts."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counters of one owner; an owner that is started again begins with zeros.

    Attributes:
        rounds: Rounds consumed.
        gradients: Gradients in them.
        grants: How often hosts were asked to ship.
        withdrawn: Grants that came to nothing, since hosts were lost or late.
        voided: Steps that moved on without a round.
        lost_hosts: How often a host was silent for too long.
        died_workers: Workers that died, without those of lost hosts.
        lost_blocks: Rounds that were granted once more, since shards had lost pieces of them.
        lost_chiefs: Chiefs that were silent for too long.
        refused_reports: Reports that were late, doubled, or of an earlier incarnation.
    """

    rounds: int = 0
    gradients: int = 0
    grants: int = 0
    withdrawn: int = 0
    voided: int = 0
    lost_hosts: int = 0
    died_workers: int = 0
    lost_blocks: int = 0
    lost_chiefs: int = 0
    refused_reports: int = 0
