"""The only reader of os.environ. Each variable has one function, one default and one meaning; there are ten at most.

Four are torchrun's, MT_MOE_LIBRARY is ours. The others are DeepEP's settings, read when they are needed, never at
import: its variables by their names, and its two timeouts, which are arguments there. What else DeepEP reads
(`DEEPEP_UNUSED`) has no meaning here; the doctor lists what is set of it.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from comm_core.runtime.errors import UsageError

# What this package reads, with the value where it is not set; the doctor prints it.
DEFAULTS = {
    "EP_CPU_TIMEOUT_SECS": "300",
    "EP_GPU_TIMEOUT_SECS": "the bound of host waits",
    "EP_AVOID_RECORD_STREAM": "0",
    "EP_JIT_CACHE_DIR": "the user's cache folder",
    "EP_NUM_TOPK_IDX_BITS": "64",
    "MT_MOE_LIBRARY": "compiled at first use",
}
# DeepEP's variables without a meaning here: other transports, another compiler's output, its own build and tests.
DEEPEP_UNUSED = (
    "EP_BUFFER_DEBUG", "EP_SUPPRESS_NCCL_CHECK", "EP_REUSE_NCCL_COMM", "EP_DISABLE_GIN", "EP_OVERRIDE_RDMA_SL",
    "EP_NIC_NAME", "EP_NUM_MAX_LOCAL_RANKS", "EP_GIN_GDAKI_DEBUG", "EP_JIT_DEBUG", "EP_JIT_NVCC_COMPILER",
    "EP_JIT_CPP_STANDARD", "EP_JIT_PRINT_COMPILER_COMMAND", "EP_JIT_PTXAS_VERBOSE", "EP_JIT_PTXAS_CHECK",
    "EP_JIT_WITH_LINEINFO", "EP_JIT_DUMP_ASM", "EP_JIT_DUMP_PTX", "EP_JIT_DUMP_SASS", "EP_USE_NVIDIA_TOOLS",
    "EP_DISABLE_BARRIER_PROFILING", "EP_NCCL_ROOT_DIR", "EP_NVSHMEM_ROOT_DIR", "NCCL_DIR", "NVSHMEM_DIR",
    "TOPK_IDX_BITS", "DISABLE_SM90_FEATURES", "DISABLE_AGGRESSIVE_PTX_INSTRS", "NVSHMEM_QP_DEPTH", "NVSHMEM_IB_SL",
)  # fmt: skip


def local_rank() -> int:
    """Index of this process on its host, as torchrun sets it (LOCAL_RANK); 0 outside torchrun."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def local_world_size() -> int:
    """Processes on this host (LOCAL_WORLD_SIZE); 1 outside torchrun."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1"))


def rank() -> int:
    """Rank of this process before a process group exists (RANK); 0 outside torchrun."""
    return int(os.environ.get("RANK", "0"))


def world_size() -> int:
    """Number of processes before a process group exists (WORLD_SIZE); 1 outside torchrun."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def has_launcher() -> bool:
    """True where torchrun (or a launcher with its variables) started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def timeout_seconds() -> float:
    """Bound of every host wait in seconds (EP_CPU_TIMEOUT_SECS): num_cpu_timeout_secs where no argument gives it."""
    return _seconds("EP_CPU_TIMEOUT_SECS", os.environ.get("EP_CPU_TIMEOUT_SECS", DEFAULTS["EP_CPU_TIMEOUT_SECS"]))


def device_timeout_seconds() -> float | None:
    """Bound of every wait inside a kernel (EP_GPU_TIMEOUT_SECS); None, where it is not set: that of host waits."""
    text = os.environ.get("EP_GPU_TIMEOUT_SECS", "")
    return _seconds("EP_GPU_TIMEOUT_SECS", text) if text else None


def avoid_record_stream() -> bool:
    """Keep tensors of an asynchronous call alive by its event instead of record_stream (EP_AVOID_RECORD_STREAM)."""
    text = os.environ.get("EP_AVOID_RECORD_STREAM", DEFAULTS["EP_AVOID_RECORD_STREAM"])
    if text not in ("", "0", "1"):
        raise UsageError(f"EP_AVOID_RECORD_STREAM={text!r}", allowed="0 or 1", fix="set it to one of these or unset it")
    return text == "1"


def kernel_cache_dir() -> Path | None:
    """Where compiled kernels are kept (EP_JIT_CACHE_DIR); None, where it is not set, leaves that to the builder."""
    text = os.environ.get("EP_JIT_CACHE_DIR", "")
    return Path(text).expanduser() if text else None


def kernel_library() -> Path | None:
    """A library that `python -m comm_core build` made, to use as it is (MT_MOE_LIBRARY); None: compile one."""
    text = os.environ.get("MT_MOE_LIBRARY", "")
    return Path(text).expanduser() if text else None


def topk_idx_dtypes() -> tuple[torch.dtype, ...]:
    """Element types of expert ids, `topk_idx_t` first: int64; with EP_NUM_TOPK_IDX_BITS=32 int32, then int64."""
    text = os.environ.get("EP_NUM_TOPK_IDX_BITS", DEFAULTS["EP_NUM_TOPK_IDX_BITS"])
    if text not in ("", "0", "32", "64"):  # 0 is DeepEP's "automatic"
        raise UsageError(f"EP_NUM_TOPK_IDX_BITS={text!r}", allowed="32 or 64", fix="set it to one of these or unset it")
    return (torch.int32, torch.int64) if text == "32" else (torch.int64,)


def __getattr__(name: str) -> torch.dtype:
    """`topk_idx_t`, as the environment is at its use."""
    if name != "topk_idx_t":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return topk_idx_dtypes()[0]


def in_use() -> dict[str, str]:
    """The variables of `DEFAULTS` that are set, as they are."""
    return {name: os.environ[name] for name in DEFAULTS if name in os.environ}


def unused() -> list[str]:
    """The variables of DeepEP that are set and change nothing here."""
    return [name for name in DEEPEP_UNUSED if name in os.environ]


def for_child(**defaults: str) -> dict[str, str]:
    """The environment for a process that this one starts; `defaults` hold where the user set nothing."""
    return {**defaults, **os.environ}


def _seconds(name: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < float("inf"):
        raise UsageError(f"{name}={text!r}", allowed="seconds, above 0", fix="set it to a number or unset it")
    return seconds
