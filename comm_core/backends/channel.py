"""Private groups and comm queues of one process group, and the comparison of settings before data moves.

Every call on the buffers of a group is one line in a table that all ranks fill together: which call it is, its
settings, how many rows go to whom, and whether the rank found a mistake in its own arguments. The table is gathered on
the control group (gloo, host memory) in front of the data. So a call that differs between ranks, or that is wrong on
one, raises on every rank at the same call and nothing is left half sent; the buffer works on.

A collective that fails or times out is another matter: the group's connections are gone, the channel is broken, and
every later call says so at once instead of waiting again.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import torch
import torch.distributed as dist

from comm_core import fp8
from comm_core.backends.roll_call import RollCall
from comm_core.event import CommQueue, EventHandle
from comm_core.runtime import device as devices
from comm_core.runtime.errors import CommError, PeerTimeout, UsageError
from comm_core.runtime.groups import private_groups, store_of

# Settings that must agree, in the order they are sent and reported; -1 where a call has no such setting.
SETTINGS = (
    "call", "buffer", "handle", "num_experts", "num_topk", "expert_alignment", "do_expand", "num_max_tokens_per_rank",
    "hidden", "dtype", "topk_weights", "num_bias", "num_scales", "scale_dtype",
    "num_entries", "num_max_tensor_bytes", "num_max_inflight_tensors", "num_max_session_bytes",
    "num_max_all_gathers_per_session", "session", "all_gather", "num_tensors", "tensor_bytes", "tensor_sizes",
)  # fmt: skip
CALLS = (
    "prepare", "dispatch", "cached dispatch", "combine", "close", "barrier", "engram_write", "engram_fetch",
    "pp_set_config", "agrs_set_config", "create_agrs_session", "destroy_agrs_session", "agrs_get_inplace_tensor",
    "all_gather",
)  # fmt: skip
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ROW_DTYPES = (*DTYPES, *fp8.DTYPES)
_TEXT_BYTES = 512


@dataclass(frozen=True, slots=True)
class Agreement:
    """What all ranks said about one call.

    Attributes:
        number: number of the call on this channel.
        num_tokens: tokens of each rank.
        rows: rows[i][j] go from rank i to rank j.
    """

    number: int
    num_tokens: list[int]
    rows: list[list[int]]


def describe(setting: str, value: int) -> str:
    """A setting as the user knows it."""
    if setting == "call":
        return CALLS[value] if 0 <= value < len(CALLS) else "none"
    if setting == "dtype":
        return str(ROW_DTYPES[value]) if 0 <= value < len(ROW_DTYPES) else "none"
    if setting == "num_scales":
        return "none given" if value < 0 else str(value)
    if setting == "scale_dtype":
        return str(fp8.SCALE_DTYPES[value]) if 0 <= value < len(fp8.SCALE_DTYPES) else "none given"
    if setting == "do_expand":
        return str(bool(value))
    if setting == "topk_weights":
        return str(DTYPES[value]) if 0 <= value < len(DTYPES) else "none given"
    return str(value)


class Scratch:
    """Memory for one step of the data queue at a time, kept between calls: fresh pages cost as much as sending them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kept: dict[str, torch.Tensor] = {}

    def take(self, name: str, num_rows: int, like: torch.Tensor) -> torch.Tensor:
        """An uninitialised [num_rows, columns of `like`] of its dtype, valid until the name is taken again."""
        num_bytes = num_rows * like.shape[1] * like.element_size()
        kept = self._kept.get(name)
        if kept is None or kept.shape[0] < num_bytes:
            with torch.inference_mode(False):  # it outlives the caller's mode
                kept = self._kept[name] = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return kept[:num_bytes].view(like.dtype).view(num_rows, like.shape[1])


class Channel:
    """The private side of one process group on one device. Use `Channel.acquire` and `release`.

    Attributes:
        data_queue: moves data, in the order of the calls.
        control_queue: exchanges counts and settings on the host; on the CPU the same queue.
        scratch: memory for the work of the data queue.
    """

    _shared: ClassVar[dict[tuple[dist.ProcessGroup, torch.device, float], Channel]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()
    # False where torch.distributed moves no rows: the data group is the control group then.
    has_data_group: ClassVar[bool] = True

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: float) -> None:
        self.device, self.timeout = device, timeout
        self.ranks = dist.get_process_group_ranks(group)
        self.rank, self.num_ranks = dist.get_rank(group), len(self.ranks)
        self.broken: CommError | None = None
        self.scratch = Scratch(device)
        self._users, self._next_buffer, self._calls = 0, 0, 0
        self._agreed: weakref.WeakSet[Exception] = weakref.WeakSet()
        self._unread_checks: deque[EventHandle] = deque()
        kinds = ("gloo", devices.collective_backend(device.type)) if self.has_data_group else ("gloo",)
        try:
            groups = private_groups(group, len(kinds), timeout=timedelta(seconds=timeout), backends=kinds)
            self.control_group, self.data_group = groups[0], groups[-1]
        except CommError:
            raise
        except RuntimeError as error:
            raise self._translated("building private groups", error, "another rank") from error
        self._roll_call = RollCall(store_of(self.control_group), self.rank, self.num_ranks)
        self.control_queue = CommQueue(torch.device("cpu"), f"ep-comm-{self.rank}", uses=device)
        self.data_queue = self.control_queue if device.type == "cpu" else CommQueue(device, f"ep-data-{self.rank}")

    @classmethod
    def acquire(cls, group: dist.ProcessGroup, device: torch.device, timeout: float) -> Channel:
        """The channel of a group, made with all its ranks where none is in use (a collective call)."""
        key = (group, device, timeout)
        with cls._lock:
            channel = cls._shared.get(key)
            if channel is None or channel.broken is not None:
                channel = cls._shared[key] = cls(group, device, timeout)
            channel._users += 1
            return channel

    def release(self, *, wait: bool) -> None:
        """Gives the channel back; the last user frees groups and queues.

        Args:
            wait: let queued work finish first; otherwise work that waits for another rank is left to its timeout.
        """
        with self._lock:
            self._users -= 1
            if self._users:
                return
            for key in [key for key, channel in self._shared.items() if channel is self]:
                del self._shared[key]
        if not wait:
            self._roll_call.say("has left without closing its buffers together with the others")
        seconds = self.timeout if wait else 0.5
        ended = self.data_queue.close(seconds) and self.control_queue.close(seconds)
        # A group that a thread still waits in must stay; the thread's reference goes with its timeout.
        if ended and dist.is_initialized():
            # gloo closes its connections when nobody holds the group: then ranks that wait for this one hear of it.
            if self.has_data_group:
                dist.destroy_process_group(self.data_group)
                del self.data_group
            dist.destroy_process_group(self.control_group)
            del self.control_group

    def next_buffer_id(self) -> int:
        """Numbers the buffers of this channel; the same on all ranks, as they are built in the same order."""
        self._next_buffer += 1
        return self._next_buffer

    def at(self, call: str) -> str:
        """A step of the call under way, as messages name it: with its number on this channel."""
        return f"{call} (call {self._calls})"

    def agree(
        self, call: str, settings: dict[str, int], problem: UsageError | None, num_tokens: int, rows: list[int]
    ) -> Agreement:
        """Compares a call across ranks. Runs on the control queue.

        Raises:
            UsageError: `problem`, on the rank that has one.
            CommError: another rank has a problem, or the settings differ; the message names ranks and values.
            PeerTimeout: a rank did not call.
        """
        self._calls += 1
        where = self.at(call)
        given = {**settings, "call": CALLS.index(call)}
        line = [given.get(name, -1) for name in SETTINGS]
        mine = torch.tensor([*line, int(problem is not None), num_tokens, *rows], dtype=torch.int64)
        lines = self._gather(where, mine).tolist()
        width = len(SETTINGS)
        error = self._problem(where, problem) if any(line[width] for line in lines) else None
        error = error or self._difference(where, [line[:width] for line in lines])
        if error is not None:
            self._agreed.add(error)
            raise error
        return Agreement(self._calls, [line[width + 1] for line in lines], [line[width + 2 :] for line in lines])

    def finish(self, where: str, *starts: Callable[[], Any]) -> None:
        """Starts collectives and waits for all; the interpreter lock is free while waiting.

        Raises:
            PeerTimeout: a rank did not come, has ended or has given up; names it. The channel is broken from here on.
            CommError: they failed in another way; the channel is broken as well.
        """
        self.check_alive()
        try:
            for work in [start() for start in starts]:
                work.wait()
        except RuntimeError as error:
            self.broken = self._translated(where, error, self._roll_call.missing(where))
            raise self.broken from error

    @contextlib.contextmanager
    def alone_with(self, peer: int, where: str) -> Iterator[None]:
        """Context of a transport call that one other rank alone takes part in: its errors name that rank."""
        self.check_alive()
        try:
            yield
        except RuntimeError as error:
            self.broken = self._translated(where, error, f"rank {peer}")
            raise self.broken from error

    def check_alive(self) -> None:
        """Raises CommError where an earlier collective failed, or where a call that nobody waited for was refused."""
        if self.broken is not None:
            raise CommError(
                f"rank {self.rank} of group {self.ranks} cannot communicate any more: {self.broken}; "
                "close the buffer and build a new one"
            ) from self.broken
        while self._unread_checks and self._unread_checks[0].query():
            self._unread_checks.popleft().synchronize()

    def note_failure(self, error: BaseException) -> None:
        """Breaks the channel unless all ranks have the error: this rank left a call in which the others still are."""
        if self.broken is None and error not in self._agreed:
            what = f"{type(error).__name__}: {error}"
            self.broken = CommError(f"rank {self.rank} could not finish a call ({what})")
            self._roll_call.say(f"has given up ({what})")

    def all_to_all(self, out: torch.Tensor, out_rows: list[int], rows: torch.Tensor, in_rows: list[int]) -> Any:
        """Starts moving rows as bytes on the data group: `rows` in rank order, `in_rows` to each; returns the work."""
        return dist.all_to_all_single(
            _as_bytes(out), _as_bytes(rows), out_rows, in_rows, group=self.data_group, async_op=True
        )

    def all_to_all_host(self, out: torch.Tensor, out_rows: list[int], rows: torch.Tensor, in_rows: list[int]) -> Any:
        """The same for host tensors on the control group."""
        return dist.all_to_all_single(out, rows, out_rows, in_rows, group=self.control_group, async_op=True)

    def submit_agreed(
        self,
        call: str,
        settings: dict[str, int],
        problem: UsageError | None,
        num_tokens: int,
        *,
        after: EventHandle | None = None,
    ) -> EventHandle:
        """Queues the comparison for a call that needs no counts, behind `after`."""
        rows = [0] * self.num_ranks
        check = self.control_queue.submit(
            lambda: self.agree(call, settings, problem, num_tokens, rows), after=[after], on_failure=self.note_failure
        )
        if self.data_queue is not self.control_queue:
            self._unread_checks.append(check)
        return check

    def _gather(self, where: str, line: torch.Tensor) -> torch.Tensor:
        """Every rank's line [num_ranks, length]. An all-to-all of copies takes half the time of gloo's all-gather."""
        copies = line.expand(self.num_ranks, -1).contiguous()
        table = torch.empty_like(copies)
        self.finish(where, lambda: dist.all_to_all_single(table, copies, group=self.control_group, async_op=True))
        return table

    def _problem(self, where: str, problem: UsageError | None) -> UsageError | CommError:
        text = torch.zeros(_TEXT_BYTES, dtype=torch.uint8)
        if problem is not None:
            raw = str(problem).encode()[:_TEXT_BYTES]
            text[: len(raw)] = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        texts = self._gather(where, text)
        if problem is not None:
            return problem
        said = [bytes(line.tolist()).rstrip(b"\0").decode(errors="replace") for line in texts]
        reasons = "; ".join(f"rank {rank}: {reason}" for rank, reason in enumerate(said) if reason)
        return CommError(f"{where} was refused on every rank of group {self.ranks} because of {reasons}")

    def _difference(self, where: str, lines: list[list[int]]) -> CommError | None:
        for index, setting in enumerate(SETTINGS):
            values = [line[index] for line in lines]
            if len(set(values)) > 1:
                shown = ", ".join(f"rank {rank} {describe(setting, value)}" for rank, value in enumerate(values))
                return CommError(
                    f"{where}: the ranks of group {self.ranks} disagree on {setting}: {shown}; "
                    "make the same calls with the same settings, in the same order, on every rank"
                )
        return None

    def _translated(self, where: str, error: Exception, missing: str) -> CommError:
        """The error of a transport as one of ours; `missing` are the ranks it is about."""
        who = f"{where} on rank {self.rank} of group {self.ranks}"
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        if any(word in text.lower() for word in ("timed out", "timeout")):
            return PeerTimeout(
                f"{who} got no answer from {missing} within {self.timeout:g} s ({text}); check that every rank is "
                "alive and makes the same calls, or raise num_cpu_timeout_secs"
            )
        if any(word in text.lower() for word in ("closed", "reset", "refused", "broken pipe", "not connected")):
            return PeerTimeout(f"{who} lost the connection to {missing} ({text}); look at its own error first")
        return CommError(f"{who} failed: {text}")


def _as_bytes(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.uint8) if rows.dtype != torch.uint8 else rows
