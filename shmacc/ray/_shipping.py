"""A host's pieces on their way to the shards: sent again until each one has arrived."""

import logging
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from shmacc._multihost.columns import Piece
from shmacc._multihost.messages import BatchKey, Fence
from shmacc.ray._parts import LOST

if TYPE_CHECKING:
    from concurrent.futures import Future

_logger = logging.getLogger("shmacc")

_AGAIN = 0.2  # seconds until a piece for a lost shard is sent again


class Shipping:
    """Pieces on their way to the shards.

    Args:
        fence: The fence that the batch belongs to.
        key: The batch's name.
        pieces: Each with its shard.
        stage: Sends a shard the fence, the key and a piece; None: there is no such shard now.
        lost: Is told of a shard that was lost.

    Attributes:
        key: The batch's name.
        gradients: How many gradients the batch has.
        bytes: The bytes of all its arrays.
        resent: How many pieces were sent again.
    """

    def __init__(
        self,
        fence: Fence,
        key: BatchKey,
        pieces: Iterable[tuple[int, Piece]],
        stage: "Callable[..., Future[None] | None]",
        lost: Callable[[int], None],
    ) -> None:
        self.key = key
        self.gradients = self.bytes = self.resent = 0
        self._fence, self._stage, self._lost = fence, stage, lost
        self._pieces: dict[int, Piece] = {}
        self._calls: dict[Future[None], int] = {}
        self._again: list[tuple[float, int]] = []
        self._refused: set[int] = set()  # shards that could not keep their pieces
        for shard, piece in pieces:
            self.gradients = piece.count
            self.bytes += piece.columns.nbytes
            self._pieces[shard] = piece
            self._send(shard)

    @property
    def left(self) -> frozenset[int]:
        """The shards whose pieces have not arrived."""
        return frozenset(self._pieces)

    def is_done(self) -> bool:
        """Whether all pieces have arrived; sends those again whose shard was lost meanwhile."""
        for call in [call for call in self._calls if call.done()]:
            shard = self._calls.pop(call)
            try:
                call.result()
                del self._pieces[shard]
            except Exception as error:  # noqa: BLE001  a shard's, of this node or of another
                if not isinstance(error, LOST) and shard not in self._refused:
                    self._refused.add(shard)
                    why = getattr(error, "cause", error)
                    _logger.warning("Shard %d does not keep its piece: %s", shard, why)
                self._lost(shard)
                self._send_later(shard)
        for due in [due for due in self._again if due[0] <= time.monotonic()]:
            self._again.remove(due)
            self.resent += 1
            self._send(due[1])
        return not self._pieces

    def _send(self, shard: int) -> None:
        call = self._stage(shard, self._fence, self.key, self._pieces[shard])
        if call is None:
            self._send_later(shard)
        else:
            self._calls[call] = shard

    def _send_later(self, shard: int) -> None:
        self._again.append((time.monotonic() + _AGAIN, shard))
