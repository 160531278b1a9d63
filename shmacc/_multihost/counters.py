"""Counters of the owner, for its statistics."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Counters of one owner; an owner that is started again begins with zeros."""

    rounds: int = 0  # rounds consumed
    gradients: int = 0  # gradients in them
    grants: int = 0  # how often hosts were asked to send their gradients to the shards
    withdrawn: int = 0  # grants that led to no round, since hosts were lost or late
    voided: int = 0  # steps that moved on without a round
    lost_hosts: int = 0  # how often a host was silent for too long
    died_workers: int = 0  # workers that died, not counting workers of lost hosts
    lost_blocks: int = 0  # rounds that were made again, since shards had lost pieces
    lost_chiefs: int = 0  # chiefs that were silent for too long
    refused_reports: int = 0  # reports that were late, doubled, or of an earlier incarnation
