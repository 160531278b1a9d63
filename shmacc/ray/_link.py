"""What a chief's group and its rounds have in common: the way to the owner."""

import contextlib
import functools
import time
from typing import Any

import ray

from shmacc._multihost.pieces import Plan
from shmacc.errors import FailedPreconditionError
from shmacc.ray._parts import LOST, NAMESPACE, Config, find

PARKED = 1.0
"""Seconds that a call waits at the owner: also the chief's heartbeat."""


class Link:
    """A chief's way to the owner.

    Attributes:
        owner: The actor.
        config: What the group was made with.
        plan: Which row is at which shard.
        closed: Whether the chief has let go of the group.
    """

    def __init__(self, owner: Any) -> None:
        self.owner = owner
        self.config: Config = ray.get(owner.config.remote())
        self.plan = Plan(self.config.members, self.config.shards)
        self.closed = False

    @functools.cached_property
    def shards(self) -> list[Any]:
        """The actors of the shards. Ray starts one that has died again, as the same actor."""
        return [find(self.config, f"shard {number}") for number in range(self.config.shards)]

    def lost_shard(self, error: Exception) -> None:
        """Find the shards again, if Ray has given one up: an owner may have made another one."""
        if isinstance(error, ray.exceptions.ActorDiedError):
            self.__dict__.pop("shards", None)

    def call(self, method: str, *args: Any, timeout: float = 60.0, **options: Any) -> Any:
        """Call the owner; again if it is being started again. All its methods may be repeated.

        Raises:
            FailedPreconditionError: The handle is closed, or the owner does not come back.
        """
        if self.closed:
            raise FailedPreconditionError("The group is closed")
        end = time.monotonic() + timeout
        while True:
            try:
                return ray.get(getattr(self.owner, method).remote(*args, **options))
            except LOST as error:
                if time.monotonic() > end or isinstance(error, ray.exceptions.ActorDiedError):
                    raise FailedPreconditionError(
                        f"The owner of {self.config.name!r} is not there: {error}"
                    ) from error
                time.sleep(0.1)


def find_owner(name: str) -> Any | None:
    """Return the owner of the cluster's group of that name."""
    try:
        return ray.get_actor(f"{name}/owner", namespace=NAMESPACE)
    except ValueError:
        return None


def end(owner: Any) -> None:
    """Remove the group that an owner has, and the owner."""
    with contextlib.suppress(*LOST):
        ray.get(owner.end.remote())
    ray.kill(owner, no_restart=True)
