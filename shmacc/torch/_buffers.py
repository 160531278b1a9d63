"""The buffers of a chief's model. What a block writes to them is part of the round's update.

With an optimizer of `shmacc.optim`, the model has copies of the shared buffers, renewed in each
round; otherwise it has the shared buffers themselves.
"""

from typing import Any

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from shmacc._parameters.shared_arrays import SharedArrays
from shmacc.errors import FailedPreconditionError, InvalidArgumentError
from shmacc.torch import _model as on_model

_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Buffers:
    """A model's buffers, and copies of them from the end of the last round.

    Attributes:
        own: The buffers by name. The model always gets these back, even if others were assigned.
        changing: Whether a block may change the buffers. If not, `check` undoes that, and raises.
    """

    def __init__(self, model: nn.Module, shared: SharedArrays, *, placed: bool) -> None:
        """Begin with the model's buffers; `placed` says whether they are in shared memory."""
        self.own: dict[str, torch.Tensor] = on_model.buffers(model)
        self._model, self._shared, self._placed = model, shared, placed
        self._path = {on_model.plain(path): path for path, _ in model.named_buffers()}
        self._before: dict[str, torch.Tensor] = {}
        self._versions: dict[str, int] = {}
        self._undone: list[str] = []
        self.changing = True

    def follow(self) -> None:
        """Undo writes outside of a block, and take over the shared buffers."""
        if not self.changing and not self._placed:
            self._undone += self.written()
        self.changing = True  # set before the loop, which an exception may end
        for name, own in self.own.items():
            module, attribute = self._home(name)
            if getattr(module, attribute, None) is not own:
                setattr(module, attribute, own)
            if not self._placed:
                own.copy_(on_model.in_memory(self._shared[name]))
            if name in self._before:
                self._before[name].copy_(own)
            else:
                self._before[name] = own.detach().clone()
            self._versions[name] = own._version  # noqa: SLF001
        self.changing = False

    def check(self) -> None:
        """Do what `follow` does, and raise if a write was undone.

        Raises:
            FailedPreconditionError: A buffer was written outside of a block.
        """
        self.follow()
        undone, self._undone = self._undone, []
        if undone:
            raise FailedPreconditionError(
                f"Buffer {undone[0]!r} was written outside of a round's block, which others would "
                "not see; it has its contents again. Write it in the block, as a part of the "
                "round's update; and compute outputs between blocks in model.eval(), which leaves "
                "running statistics alone"
            )

    def written(self) -> list[str]:
        """Return the names of the buffers that were written since `follow`.

        A tensor that was assigned to a buffer's name is copied into the buffer.

        Raises:
            InvalidArgumentError: The assigned value is no tensor of the buffer's shape and dtype.
        """
        return [name for name, own in self.own.items() if self._is_written(name, own)]

    def _is_written(self, name: str, own: torch.Tensor) -> bool:
        module, attribute = self._home(name)
        now: Any = getattr(module, attribute, None)
        if now is own:
            same = own._version == self._versions[name] and alike(own, self._before[name])  # noqa: SLF001
            passes = name.removesuffix(attribute) + "num_batches_tracked"
            return not same and not self._has_passed_forward(passes, module)
        kind = (own.shape, own.dtype)
        if not isinstance(now, torch.Tensor) or (now.shape, now.dtype) != kind:
            raise InvalidArgumentError(
                f"What was assigned to buffer {name!r} must be a tensor like the shared one, "
                f"{own.dtype} of shape {tuple(own.shape)}"
            )
        with torch.no_grad():
            own.copy_(now)
        setattr(module, attribute, own)
        return True

    def _has_passed_forward(self, passes: str, module: nn.Module) -> bool:
        """Return whether a forward pass in training mode has changed a module's statistics.

        Such changes are not the block's. The next round replaces them by the replicas' mean.

        Args:
            passes: The name of the buffer, if any, that counts the module's passes.
            module: The module.
        """
        before: Any = self._before.get(passes)
        if before is None or not isinstance(module, _NormBase):
            return False
        return bool((self.own[passes] > before).item())

    def put_back(self) -> None:
        """Undo the block's writes, since the round is skipped."""
        for name in self.written():
            self.own[name].copy_(self._before[name])

    def _home(self, name: str) -> tuple[nn.Module, str]:
        path, _, attribute = self._path[name].rpartition(".")
        return self._model.get_submodule(path), attribute


def alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape and dtype are equal to the bit."""
    same: bool = torch.equal(_bits(one), _bits(other))
    return same


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view as integers, in which a NaN equals itself, and 0.0 differs from -0.0."""
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor)
    return tensor.detach().view(_BITS[tensor.element_size()])
