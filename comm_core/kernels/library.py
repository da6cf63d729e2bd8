"""The kernel library as Python sees it: structs of abi.h, and one method a function of launch.h.

Pointers and streams are plain integers. Calls go through ctypes, which releases the interpreter lock; every error code
becomes a CommError that says what the runtime said.
"""

from __future__ import annotations

import ctypes
from functools import cache
from pathlib import Path
from typing import ClassVar

from comm_core.kernels import build
from comm_core.runtime.errors import CommError

MAX_RANKS, MAX_TOPK, MAX_LOCAL_EXPERTS, MAX_POOLS = 64, 32, 768, 64
TOKENS, HEADER_WORDS = 256, 128
DONE_SLOTS, BLOCKS_EXPERTS, NEAR_RANKS = 256, 256, 8
CONTROL, RING, POOL, BLOCKS, SEGMENTS = 0, 1, 2, 3, 4
# Words of the record of a layout and of the fault record: see abi.h.
REC_SEQ, REC_STATUS, REC_DIFFERENT, REC_ROWS, REC_EXPANDED, REC_TABLES = 0, 1, 2, 3, 4, 8
FAULT_SET, FAULT_PEER, FAULT_NUMBER, FAULT_DIFFERENT, FAULT_WORDS = 0, 1, 2, 3, 16
OK, BAD_ID, REFUSED = 0, 1, 2
HANDLE_BYTES = 64

_U32, _I32, _U64, _I64 = ctypes.c_uint32, ctypes.c_int32, ctypes.c_uint64, ctypes.c_int64


def _struct(name: str, **fields: type) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


def _pointers(*names: str) -> dict[str, type]:
    return dict.fromkeys(names, _U64)


Channel = _struct(
    "Channel", state=_U64, peers=_U64, fault=_U64, timeout_ticks=_I64, rank=_I32, num_ranks=_I32, number=_U32,
    padding=_U32,
)  # fmt: skip
Place = _struct("Place", offset=_U64, segment=_U32, padding=_U32)
Layout = _struct(
    "Layout",
    **_pointers(
        "topk_idx", "lane_row", "last_lanes", "matrix", "row_base", "recv_token", "local_idx", "expand_row",
        "expert_counts", "expert_starts",
    ),
    num_tokens=_I32, num_topk=_I32, num_local=_I32, alignment=_I32, expand=_I32, room=_I32,
)  # fmt: skip
LayoutCall = _struct(
    "LayoutCall", channel=Channel, layout=Layout, ids=Place, tables=Place,
    **_pointers("given_idx", "own_counts", "record"),
    hash=_U32, status=_U32, num_blocks=_I32, table_blocks=_I32,
)  # fmt: skip
DispatchCall = _struct(
    "DispatchCall", channel=Channel, layout=Layout, x=Place, weights=Place, scales=Place,
    **_pointers("out_x", "out_idx", "out_weights", "out_scales"),
    scale_row_stride=_I64, scale_col_stride=_I64, num_out_rows=_I64, ticks_per_byte=ctypes.c_double,
    hash=_U32, lent=_U32, row_bytes=_I32, scale_words=_I32, weight_words=_I32, num_sms=_I32, threads=_I32,
    clears_rest=_I32,
)  # fmt: skip
CombineCall = _struct(
    "CombineCall", channel=Channel, layout=Layout, x=Place, weights=Place,
    **_pointers("local_x", "out_x", "out_weights", "bias0", "bias1"), ticks_per_byte=ctypes.c_double,
    hash=_U32, lent=_U32, hidden=_I32, dtype=_I32, weight_words=_I32, num_sms=_I32, threads=_I32, padding=_I32,
)  # fmt: skip
ReduceCall = _struct(
    "ReduceCall", layout=Layout, **_pointers("x", "rows", "weights", "lane_weights"),
    hidden=_I32, dtype=_I32, weight_words=_I32, num_ranks=_I32, num_sms=_I32,
)  # fmt: skip
BlocksPlaces = _struct(
    "BlocksPlaces",
    **_pointers(
        "headers", "done", "counts", "begins", "flags", "laid", "rows", "answers", "row_bytes", "answer_rows",
    ),
)  # fmt: skip
BlocksCall = _struct(
    "BlocksCall", channel=Channel, places=BlocksPlaces, near=_U64 * (2 * NEAR_RANKS), lent=Place,
    **_pointers(
        "x", "topk_idx", "topk_weights", "positions", "seq", "out_x", "out_scales", "src_info", "ranges", "counts",
        "stats",
    ),
    scale_expert_stride=_I64, scale_col_stride=_I64, hash=_U32, status=_U32, is_lent=_U32,
    **dict.fromkeys(
        (
            "num_tokens", "num_topk", "num_local", "max_tokens", "height", "hidden", "dtype", "fp8", "scale_words",
        ),
        _I32,
    ),
)  # fmt: skip
RegionWords = _struct(
    "RegionWords", channel=Channel, words=_U64 * MAX_RANKS, values=_U32 * MAX_RANKS, peers=_I32 * MAX_RANKS,
    count=_I32, heed=_I32,
)  # fmt: skip
RegionRead = _struct(
    "RegionRead", tables=_U64 * MAX_RANKS, **_pointers("owner", "row", "out"), count=_I64, num_rows=_I64,
    width=_I32, num_ranks=_I32, num_sms=_I32, padding=_I32,
)  # fmt: skip
BarrierCall = _struct("BarrierCall", channel=Channel, hash=_U32, status=_U32)
State = _struct("State", seq=_U32, ticket=_U32, aborted=_U32, status=_U32, differed=_U32,
    blocks_seq=_U32 * 2, left=_U32, rows_to=_U32 * MAX_RANKS,
)  # fmt: skip
AT_STATE = 2 * MAX_RANKS * HEADER_WORDS * 4 + MAX_RANKS * 4
AT_PEERS = AT_STATE + 4096
CONTROL_BYTES = AT_PEERS + 8 * SEGMENTS * MAX_RANKS + 4 * MAX_RANKS * 4096
_SIZES = [
    *(
        ctypes.sizeof(t)
        for t in (
            Channel,
            Layout,
            LayoutCall,
            DispatchCall,
            CombineCall,
            ReduceCall,
            BarrierCall,
            State,
            BlocksCall,
            RegionWords,
            RegionRead,
        )
    ),
    CONTROL_BYTES,
    AT_STATE,
]


def id_lanes(num_topk: int) -> int:
    """Lanes of a token's ids as a layout lays them down: those that kernels are made for."""
    return 8 if num_topk <= 8 else MAX_TOPK


def count_columns(num_local: int) -> int:
    """Counts of a block of tokens: one a local expert, one for the rank, in whole vectors of 8."""
    return (num_local + 8) // 8 * 8


class Library:
    """Functions of one shared library.

    Args:
        path: the library, as `build.library_path` gives it.

    Attributes:
        path: the library.

    Raises:
        CommError: it can not be loaded, or was built from other sources than these.
    """

    _calls: ClassVar[tuple[str, ...]] = (
        "layout", "dispatch", "combine", "barrier", "region_raise", "region_await", "region_read",
    )  # fmt: skip

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._lib = ctypes.CDLL(str(path))
        except OSError as error:
            raise CommError(f"the kernel library {path} can not be loaded: {error}; rebuild it") from error
        self._lib.mt_error_text.restype = ctypes.c_char_p
        sizes = (_I64 * len(_SIZES))()
        number = self._lib.mt_abi(sizes, _I32(len(_SIZES)))
        if number != len(_SIZES) or list(sizes) != _SIZES:
            raise CommError(f"the kernel library {path} was built from other sources than this package; rebuild it")

    def alloc(self, device: int, num_bytes: int) -> int:
        """Device memory of its own, cleared; its address."""
        return self._made("mt_alloc", _I32(device), _U64(num_bytes))

    def free(self, address: int) -> None:
        """Gives memory of `alloc` back."""
        self._checked("mt_free", _U64(address))

    def share(self, address: int) -> bytes:
        """A handle by which another process of this host opens memory of `alloc`."""
        handle = ctypes.create_string_buffer(HANDLE_BYTES)
        self._checked("mt_share", _U64(address), handle)
        return handle.raw

    def open(self, device: int, handle: bytes) -> int:
        """The memory of another process, seen from `device`; its address here."""
        return self._made("mt_open", _I32(device), ctypes.create_string_buffer(handle, HANDLE_BYTES))

    def close(self, address: int) -> None:
        """Closes memory of `open`."""
        self._checked("mt_close", _U64(address))

    def host_alloc(self, num_bytes: int) -> tuple[int, int]:
        """Mapped host memory, cleared: (address on the host, address on the device)."""
        host, device = ctypes.c_void_p(), ctypes.c_void_p()
        self._checked("mt_host_alloc", _U64(num_bytes), ctypes.byref(host), ctypes.byref(device))
        return int(host.value or 0), int(device.value or 0)

    def host_free(self, address: int) -> None:
        """Gives memory of `host_alloc` back."""
        self._checked("mt_host_free", _U64(address))

    def copy(self, to: int, source: int, num_bytes: int, stream: int) -> None:
        """Copies bytes behind the work of a stream, by the copy engine where the runtime uses it."""
        self._checked("mt_copy", _U64(to), _U64(source), _U64(num_bytes), _U64(stream))

    def clear(self, address: int, num_bytes: int, stream: int) -> None:
        """Sets bytes to 0 behind the work of a stream."""
        self._checked("mt_clear", _U64(address), _U64(num_bytes), _U64(stream))

    def synchronize(self) -> None:
        """Waits for all work of the current device."""
        self._checked("mt_synchronize")

    def set_pool(self, index: int, base: int, num_bytes: int) -> None:
        """Makes pool `index` (below MAX_POOLS) the range of memory given, or nothing with 0 bytes."""
        self._checked("mt_pool_set", _I32(index), _U64(base), _U64(num_bytes))

    def choose_pool(self, index: int) -> None:
        """What torch allocates through the pool's functions in this thread comes from pool `index`; -1 for none."""
        self._checked("mt_pool_choose", _I32(index))

    def properties(self, device: int) -> tuple[int, int]:
        """(multiprocessors, ticks of the kernels' timer a second) of a device."""
        sms, rate = _I64(), _I64()
        self._checked("mt_properties", _I32(device), ctypes.byref(sms), ctypes.byref(rate))
        return sms.value, rate.value

    def ceiling(self, to: int, source: int, num_bytes: int, num_sms: int, stream: int, *, threads: int = 1024) -> None:
        """Copies bytes, a multiple of 16, by plain loads and stores; either place may be another rank's. To measure."""
        self._checked("mt_ceiling", _U64(to), _U64(source), _U64(num_bytes), _I32(num_sms), _I32(threads), _U64(stream))

    def delay(self, ticks: int, stream: int) -> None:
        """Keeps a stream busy for some ticks of the kernels' timer, so that what comes behind is issued meanwhile."""
        self._checked("mt_delay", _I64(ticks), _U64(stream))

    def wait_word(self, word: int, fault: int, seconds: float) -> int:
        """Waits for a word of mapped host memory: 0 when it is set, 1 after `seconds`.

        2 and 3 where the fault record names a peer, or a call that differs, first.
        """
        return int(self._lib.mt_wait_word(_U64(word), _U64(fault), ctypes.c_double(seconds)))

    def launch(self, name: str, call: ctypes.Structure, stream: int) -> None:
        """Launches an operation, one of `_calls`, with its struct."""
        assert name in self._calls, name
        self._checked(f"mt_{name}", ctypes.byref(call), _U64(stream))

    def combine_reduced(self, call: ctypes.Structure, lay: ctypes.Structure, stream: int) -> None:
        """Launches a combine that lays its rows down as it goes: `lay.num_sms` blocks do, `call.num_sms` read."""
        self._checked("mt_combine_reduced", ctypes.byref(call), ctypes.byref(lay), _U64(stream))

    def launch_half(self, half: str, call: ctypes.Structure, kind: int, sms: int, stream: int) -> None:
        """Launches the first ("send") or second ("recv") half of a low-latency dispatch (0) or combine (1), or both.

        Args:
            half: or "whole", for both in one launch.
            call: BlocksCall.
            kind: 0 or 1.
            sms: blocks, at most DONE_SLOTS; both halves in one launch need that many multiprocessors.
            stream: raw handle.
        """
        assert half in ("send", "recv", "whole") and 0 < sms <= DONE_SLOTS, (half, sms)
        self._checked(f"mt_blocks_{half}", ctypes.byref(call), _I32(kind), _I32(sms), _U64(stream))

    def copy_by_kernel(self, to: int, source: int, num_bytes: int, num_sms: int, stream: int) -> None:
        """Copies bytes as `copy`, by loads and stores of some multiprocessors."""
        self._checked("mt_region_copy", _U64(to), _U64(source), _U64(num_bytes), _I32(num_sms), _U64(stream))

    def _made(self, function: str, *args: object) -> int:
        out = ctypes.c_void_p()
        self._checked(function, *args, ctypes.byref(out))
        return int(out.value or 0)

    def _checked(self, function: str, *args: object) -> None:
        code = getattr(self._lib, function)(*args)
        if code != 0:
            raise CommError(f"{function} failed: {self._lib.mt_error_text(code).decode()} (code {code})")


@cache
def load(platform: str, arch: str | None = None) -> Library:
    """The library of a platform ("cuda" or "musa"), built where it is not there yet."""
    return Library(build.library_path(platform, arch))
