"""The experimental calls as methods of ElasticBuffer, with DeepEP's names and meanings.

Beyond DeepEP: the three parts have memory of their own, which does not overlap with each other's or with that of
dispatch and combine, and is taken when a part is configured. The size hints are what calls are held to where the
buffer was built with `num_bytes`, so that they fit where everything shares one buffer.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from comm_core import sizes, validate
from comm_core.backends.base import Backend
from comm_core.experimental import sessions
from comm_core.experimental.context import Context
from comm_core.experimental.engram import Engram, Fetched
from comm_core.experimental.pipeline import Pipeline
from comm_core.layout import align

Shapes = Sequence[int] | Sequence[Sequence[int]]


class Experimental:
    """Base of ElasticBuffer."""

    _engram: Engram
    _pipeline: Pipeline
    _sessions: sessions.Sessions

    def _start_experimental(self, backend: Backend, num_bytes: int | None, num_cpu_bytes: int) -> None:
        context = Context(backend, num_bytes, num_cpu_bytes, self._check_open)
        self._engram, self._pipeline = Engram(context), Pipeline(context)
        self._sessions = sessions.Sessions(context)

    def _check_open(self) -> None:
        raise NotImplementedError

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int, hidden: int, num_max_tokens_per_rank: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[int, int]:
        """Bytes for stored entries, each a multiple of 2 MiB: build the buffer with their sum and `num_cpu_bytes`.

        Args:
            num_entries: entries a rank stores.
            hidden: values of an entry.
            num_max_tokens_per_rank: entries a rank fetches in one call.
            dtype: of the entries.

        Returns:
            (bytes for fetched entries, num_cpu_bytes).
        """
        given = {"num_entries": num_entries, "hidden": hidden, "num_max_tokens_per_rank": num_max_tokens_per_rank}
        for name, value in given.items():
            validate.whole(name, value)
        return sizes.engram_bytes(num_entries, hidden, num_max_tokens_per_rank, dtype.itemsize)

    def engram_write(self, storage: torch.Tensor, sf: torch.Tensor | None = None) -> None:
        """Stores this rank's entries; returns when all ranks have stored theirs. Collective.

        Fetches issued before it are done first, on all ranks.

        Args:
            storage: [num_entries, hidden], bf16 or float8_e4m3fn, contiguous; the same shape and dtype on all ranks.
                Entry g of all is row g % num_entries of rank g // num_entries.
            sf: with FP8, and only then, the scales of the entries of all ranks: fp32 or int32 (packed)
                [num_ranks * num_entries, any number of columns], contiguous. Kept, not copied.

        Raises: UsageError, CommError, CommTimeoutError, ClosedError: as `dispatch`.
        """
        self._engram.write(storage, sf)

    def engram_fetch(
        self, indices: torch.Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False
    ) -> Callable[[], Fetched]:
        """Starts to fetch entries by number.

        One rank may fetch by itself where the backend reads memory of others (`Capabilities.one_sided_reads`:
        gpu and posix do, collective does not); elsewhere all ranks make the call, each with its own indices.

        Args:
            indices: int32 [num_tokens, num_entries_per_token], contiguous.
            num_qps: hint.
            use_tma_aligned_col_major_sf: scales lie column by column (`fp8.empty_column_major`).

        Returns:
            A function that waits and returns (data, sf): data [num_tokens, num_entries_per_token * hidden], the
            entries of a token side by side; sf [num_tokens, num_entries_per_token * columns], None without FP8. Data
            are a view of the buffer that the next fetch overwrites.

        Raises: as `dispatch`; UsageError: an index out of range; the function: of a fetch that is not the last.
        """
        return self._engram.fetch(indices, column_major=use_tma_aligned_col_major_sf)

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """`num_bytes` for pipeline messages of this size and number, a multiple of 2 MiB."""
        validate.whole("num_max_tensor_bytes", num_max_tensor_bytes)
        validate.whole("num_max_inflight_tensors", num_max_inflight_tensors)
        return align(sizes.pipeline_bytes(num_max_tensor_bytes, num_max_inflight_tensors), sizes.STEP)

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Prepares `pp_send` and `pp_recv`, behind all work of all ranks. Collective; two ranks at least.

        Args:
            num_max_tensor_bytes: of one tensor, rounded up to 32.
            num_max_inflight_tensors: sent to one neighbour and not yet received there.

        Raises: UsageError, CommError, CommTimeoutError, ClosedError: as `dispatch`.
        """
        self._pipeline.configure(num_max_tensor_bytes, num_max_inflight_tensors)

    def pp_send(self, t: torch.Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        """Sends a tensor to a neighbour in the ring of ranks, in order with others to it.

        The tensor may change after the call. It waits where num_max_inflight_tensors are not yet received.

        Args:
            t: contiguous, of a multiple of 32 bytes.
            dst_rank_idx: the rank before or behind this one.
            num_sms: hint.

        Raises: UsageError: t can not be sent; the receiver's matching call raises too. CommTimeoutError: no place
            became free. CommError, ClosedError: as `dispatch`.
        """
        self._pipeline.send(t, dst_rank_idx)

    def pp_recv(self, t: torch.Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        """Receives the next tensor from a neighbour in the ring of ranks; waits for it.

        Args:
            t: written to; contiguous, as many bytes as sent, a multiple of 32.
            src_rank_idx: the rank before or behind this one.
            num_sms: hint.

        Raises: UsageError: t can not be received into (nothing was received), or another size was sent (it is
            dropped). CommError: the sender could not send it. CommTimeoutError: nothing came. ClosedError.
        """
        self._pipeline.recv(t, src_rank_idx)

    @staticmethod
    def get_agrs_num_max_session_bytes(group: dist.ProcessGroup | None, shapes: Shapes, dtype: torch.dtype) -> int:
        """Bytes of a session that gathers tensors of these shapes: one shape or several, each before gathering."""
        num_ranks = dist.get_world_size(validate.member_of(group))
        tensor_bytes = [math.prod(shape) * dtype.itemsize for shape in sessions.shapes_of(shapes)]
        return sizes.session_bytes(tensor_bytes, num_ranks)

    @staticmethod
    def get_agrs_buffer_size_hint(group: dist.ProcessGroup | None, num_max_session_bytes: int) -> int:
        """`num_bytes` for sessions of so many bytes, a multiple of 2 MiB."""
        return align(validate.whole("num_max_session_bytes", num_max_session_bytes), sizes.STEP)

    def agrs_set_config(self, num_max_session_bytes: int, num_max_all_gathers_per_session: int) -> None:
        """Prepares all-gather sessions, behind all work of all ranks. Collective.

        Args:
            num_max_session_bytes: of the gathered tensors of one session, each rounded up to 32.
            num_max_all_gathers_per_session: calls of `all_gather` in one session, 32 at most.

        Raises: UsageError, CommError, CommTimeoutError, ClosedError: as `dispatch`.
        """
        self._sessions.configure(num_max_session_bytes, num_max_all_gathers_per_session)

    def create_agrs_session(self) -> None:
        """Begins a session of all-gathers, on all ranks; one at a time."""
        self._sessions.begin()

    def destroy_agrs_session(self) -> None:
        """Ends the session, on all ranks: its tensors are views of memory that the next session overwrites."""
        self._sessions.end()

    @contextmanager
    def agrs_new_session(self, enabled: bool = True) -> Iterator[None]:
        """A session for the length of a block; nothing where not `enabled`.

        Where the block fails its session ends on this rank alone, without waiting for ranks that may not come.
        """
        if not enabled:
            yield
            return
        self.create_agrs_session()
        try:
            yield
        except BaseException:
            self._sessions.give_up()
            raise
        self.destroy_agrs_session()

    def agrs_get_inplace_tensor(self, shapes: Shapes, dtype: torch.dtype) -> Any:
        """This rank's part of the buffer for the next `all_gather`, to be written before it.

        Args:
            shapes: one shape, or several that one call or several calls will gather, in this order.
            dtype: of the tensors.

        Returns:
            A tensor, or a tuple of them for several shapes; uninitialised views of the buffer.

        Raises: as `all_gather`.
        """
        return self._sessions.inplace(shapes, dtype)

    def all_gather(self, t: torch.Tensor | Sequence[torch.Tensor]) -> tuple[Any, ...]:
        """Gathers a tensor, or several, of all ranks within a session. All ranks make the same calls.

        Args:
            t: contiguous, the same number of bytes on all ranks; of other memory, not to be changed until the handle
                was called, or in-place tensors, gathered in the order in which they were handed out.

        Returns:
            (gathered, handle), or (*gathered, handle) for a sequence. gathered [num_ranks, *shape of t], a view of the
            buffer, valid from handle() to the end of the session. handle() makes the current stream wait for it.

        Raises: UsageError: this rank's arguments are wrong, or more than the session has room for. CommError: another
            rank's are, or the ranks disagree (at the handle). CommTimeoutError: a rank did not answer (at the handle).
            ClosedError: after close().
        """
        out, handle = self._sessions.gather(t)
        return (*out, handle)
