"""What a Buffer has of its own: memory of the size the caller asked for, and answers about where this rank is.

V1 allocates num_nvl_bytes and num_rdma_bytes and lets callers look into them. The backends here need neither, so the
memory is ordinary, taken when it is first asked for, and no call of the buffer touches it: what a caller writes stays.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from comm_core.runtime.errors import UsageError
from comm_core.validate import whole

if TYPE_CHECKING:
    from comm_core.legacy.buffer import Buffer


class LocalMemory:
    """One block of bytes, all views of which share it.

    Args:
        name: of the argument that gave its size.
        num_bytes: that size.
        device: where it lives.
    """

    def __init__(self, name: str, num_bytes: int, device: torch.device) -> None:
        self.name, self.num_bytes, self._device = name, num_bytes, device
        self._block: torch.Tensor | None = None

    def view(self, dtype: torch.dtype, size: torch.Size | None, offset: int) -> torch.Tensor:
        """Elements of `dtype` from byte `offset` on: all that fit, or those of a shape."""
        room, item = self.num_bytes - whole("offset", offset, least=0), dtype.itemsize
        if offset % item or room < item:
            raise UsageError(
                f"offset={offset} for {dtype} with {self.name}={self.num_bytes}",
                allowed=f"a multiple of {item}, with room for an element behind it",
                fix=f"build the buffer with a larger {self.name}, or correct offset",
            )
        if size is not None and torch.Size(size).numel() > room // item:
            raise UsageError(
                f"size={list(size)} of {dtype} from byte {offset} on",
                allowed=f"at most {room // item} elements, as {self.name}={self.num_bytes}",
                fix=f"build the buffer with a larger {self.name}",
            )
        if self._block is None:
            self._block = torch.zeros(self.num_bytes, dtype=torch.uint8, device=self._device)
        rest = self._block[offset : offset + room // item * item].view(dtype)
        return rest if size is None else rest[: torch.Size(size).numel()].view(size)


class Runtime:
    """The part of V1's extension object that callers ask questions of. There is one domain, of all ranks."""

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer

    def is_available(self) -> bool:
        """True until the buffer is destroyed."""
        return self._buffer.runtime is self

    def is_internode_available(self) -> bool:
        """The same: no call differs between hosts."""
        return self.is_available()

    def get_num_rdma_ranks(self) -> int:
        """Domains: 1."""
        return 1

    def get_rdma_rank(self) -> int:
        """The domain of this rank: 0."""
        return 0

    def get_root_rdma_rank(self, is_global: bool) -> int:
        """First rank of this rank's place in the domains."""
        return self._buffer.rank if is_global else 0

    def get_local_device_id(self) -> int:
        """Index of the device the tensors live on; 0 for the CPU."""
        return self._buffer.device.index or 0
