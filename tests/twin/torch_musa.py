"""A double of torch_musa: `torch.musa` with the calls that this project makes of it, on the CPU.

    with played(count=2) as musa:                   # in a rank
        ElasticBuffer(group, backend="gpu", device="musa:1")
        ...
    # raises where something was not ordered by streams and events

Names are those of torch_musa (notes of its public source). What it does not have, this has not: `torch.musa` is a plain
module with the functions listed here.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from comm_core.backends import gpu_channel
from comm_core.kernels import build
from comm_core.runtime.errors import BuildError
from comm_core.shmem import foreign
from tests.twin import tensors
from tests.twin.library import TwinLibrary
from tests.twin.streams import KIND, Device, Event, Stream

# Of an MTT S5000.
CAPABILITY = (3, 1)
NAME = "played MTT S5000"


class OrderError(AssertionError):
    """Work that nothing orders, or memory used wrongly; one line each."""


@dataclass(frozen=True, slots=True)
class Played:
    """What a test may look at and meddle with."""

    device: Device
    library: TwinLibrary

    @property
    def failures(self) -> list[str]:
        """What was not ordered up to now."""
        return self.device.order.failures


def why_not() -> str | None:
    """Why this torch can not be played with; None where it can."""
    if hasattr(getattr(torch._C, "_acc", None), "register_python_privateuseone_device_guard"):
        return None
    return f"torch {torch.__version__} takes no device from Python"


def _index(device: Device, given: Any) -> int:
    if given is None:
        return device.index
    if isinstance(given, int):
        return given
    given = torch.device(given)
    assert given.type == KIND, given
    return device.index if given.index is None else int(given.index)


def _set_device(device: Device, given: Any) -> None:
    index = _index(device, given)
    if not 0 <= index < device.count:
        raise RuntimeError(f"invalid device ordinal {index}")
    device.index = index


class _Allocator:
    """torch.musa.memory.MUSAPluggableAllocator, of the twin's functions alone."""

    def __init__(self, path: str, alloc: str, free: str) -> None:
        if (path, alloc, free) != (str(TwinLibrary.path), "mt_pool_alloc", "mt_pool_free"):
            raise RuntimeError(f"{path} has no {alloc} or {free}")

    def allocator(self) -> _Allocator:
        return self


def _allocation(memory: tensors.Memory, library: TwinLibrary) -> types.ModuleType:
    """The module `torch.musa.memory`."""

    @contextlib.contextmanager
    def use_mem_pool(pool: Any, device: Any = None) -> Iterator[None]:
        assert isinstance(pool, tuple) and isinstance(pool[0], _Allocator), pool
        memory.chosen.place = library.placed
        try:
            yield
        finally:
            memory.chosen.place = None

    found: Any = types.ModuleType(f"torch.{KIND}.memory")
    found.MUSAPluggableAllocator, found.MemPool, found.use_mem_pool = _Allocator, lambda made: (made,), use_mem_pool
    return found


def _module(device: Device) -> types.ModuleType:
    """The module `torch.musa`."""
    found = types.ModuleType(f"torch.{KIND}")

    def stream(device_: Any = None, priority: int = 0) -> Stream:
        return Stream(device, _index(device, device_))

    functions: dict[str, Callable[..., Any]] = {
        "device_count": lambda: device.count,
        "is_available": lambda: device.count > 0,
        "is_initialized": lambda: True,
        "current_device": lambda: device.index,
        "set_device": lambda given: _set_device(device, given),
        "current_stream": lambda given=None: device.current(_index(device, given)),
        "default_stream": lambda given=None: Stream(device, _index(device, given), 0),
        "stream": device.use,
        "synchronize": lambda given=None: device.synchronize(_index(device, given)),
        "get_device_capability": lambda given=None: CAPABILITY,
        "get_device_name": lambda given=None: NAME,
        "is_current_stream_capturing": lambda: False,
        "can_device_access_peer": lambda one, other: True,
        "Stream": lambda device=None, priority=0: stream(device, priority),
        "Event": lambda enable_timing=False, blocking=False, interprocess=False: Event(device, enable_timing),
        # What torch itself asks of such a module.
        "_is_in_bad_fork": lambda: False,
        "_lazy_init": lambda: None,
        "manual_seed_all": lambda seed: None,
    }
    for name, function in functions.items():
        setattr(found, name, function)
    return found


def _why_not(platform: str) -> str | None:
    return None if platform == KIND else f"this device takes kernels of platform {KIND}, not {platform}"


def _loader(library: TwinLibrary) -> Callable[..., TwinLibrary]:
    def load(platform: str, arch: str | None = None) -> TwinLibrary:
        wanted = (KIND, f"mp_{CAPABILITY[0]}{CAPABILITY[1]}")
        if (platform, arch) != wanted:
            raise BuildError(f"no kernels of platform {platform} for {arch}; this device takes {wanted}")
        return library

    return load


def _mccl(store: Any, rank: int, num_ranks: int, timeout: Any) -> Any:
    """torch.distributed's backend of the device; only its name is used here."""
    return dist.ProcessGroupGloo(store, rank, num_ranks, timeout)


@contextlib.contextmanager
def played(count: int = 2) -> Iterator[Played]:
    """Context in which this process has `count` devices of the kind "musa" and kernels for them.

    Raises:
        OrderError: at the end, where something was not ordered; not where the block raised.
    """
    device = Device(count, handle="musa_stream")
    memory = tensors.Memory(device)
    tensors.register(memory)
    if "mccl" not in dist.Backend.backend_list:
        dist.Backend.register_backend("mccl", _mccl, devices=[KIND])
    library, loaded, asked = TwinLibrary(device, memory), gpu_channel.load, build.why_not
    imported, watched = foreign.from_dlpack, foreign.watch
    foreign.from_dlpack, foreign.watch = memory.imported, memory.watch  # type: ignore[assignment]
    module: Any = _module(device)
    module.memory = _allocation(memory, library)
    torch._register_device_module(KIND, module)
    tensors.without_dtensor()
    gpu_channel.load, build.why_not = _loader(library), _why_not  # type: ignore[assignment]
    made = Played(device, library)
    try:
        yield made
    finally:
        gpu_channel.load, build.why_not = loaded, asked
        foreign.from_dlpack, foreign.watch = imported, watched
        delattr(torch, KIND)
        sys.modules.pop(f"torch.{KIND}", None)
        device.close()
    if made.failures:
        raise OrderError("\n".join(dict.fromkeys(made.failures)))
