"""What a device is called and how to reach its streams and events: cpu, cuda or musa.

This file (with the gpu backend and the platform layer of megatron_patch) is the only one that names a device
module. What differs between the vendors stands in one table; a tensor's vendor is its `device.type`, as `is_cuda` says
whatever a port has patched it to say. Modules are looked up at use: patches applied before or after work alike.

MUSA is prepared: torch_musa registers `torch.musa` with the calls used here. It has run over a double of torch_musa
alone (tests/twin), where each entry of the table is needed.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch

from comm_core.runtime import env
from comm_core.runtime.errors import MissingPackageError, UsageError


@dataclass(frozen=True, slots=True)
class Vendor:
    """What the accelerators of a vendor are called.

    Attributes:
        module: attribute of torch with its streams, events and devices.
        package: brings that module where torch has it not itself; "" where it has.
        install: what to install for that.
        collectives: its torch.distributed backend.
        stream_handle: attribute of a stream that is the runtime's handle.
        arch_prefix: of the architecture's name, before the numbers of the capability.
        platform: of the kernels' sources and compiler.
        dlpack: DLPack's number for its memory; torch's own extensions have one in common.
        allocator: class of the module's `memory` that makes an allocator from two functions of a library.
    """

    module: str
    package: str
    install: str
    collectives: str
    stream_handle: str
    arch_prefix: str
    platform: str
    dlpack: int
    allocator: str


VENDORS = {
    "cuda": Vendor(
        module="cuda",
        package="",
        install="",
        collectives="nccl",
        stream_handle="cuda_stream",
        arch_prefix="sm",
        platform="cuda",
        dlpack=2,
        allocator="CUDAPluggableAllocator",
    ),
    "musa": Vendor(
        module="musa",
        package="torch_musa",
        install="the wheel of the MUSA SDK for your torch version",
        collectives="mccl",
        stream_handle="musa_stream",
        arch_prefix="mp",
        platform="musa",
        dlpack=12,
        allocator="MUSAPluggableAllocator",
    ),
}
KINDS = ("cpu", *VENDORS)
# In the order in which a device is looked for. Ports for MUSA patch torch.cuda to answer for torch.musa, so it is last.
_SEARCHED = ("musa", "cuda")
# What has been run where; the doctor prints it.
STATUS = {
    "cpu": "verified: every test runs on CPU processes with gloo",
    "cuda": "verified on two H200 of one host: over NCCL, and EP kernels of our own over NVLink with 2 ranks, "
    "and with 8, four sharing a device",
    "musa": "prepared, not verified on hardware: torch_musa with MCCL, run over a double of it on the CPU alone",
}


def accelerator(kind: str) -> Any:
    """The torch module of an accelerator kind (`torch.cuda`, `torch.musa`).

    Raises:
        MissingPackageError: "musa" without torch_musa.
        UsageError: a kind that is no accelerator.
    """
    vendor = vendor_of(kind)
    if not hasattr(torch, vendor.module):
        if not vendor.package or importlib.util.find_spec(vendor.package) is None:
            raise MissingPackageError(
                vendor.package or "torch", needed_for=f"device {kind}", install=vendor.install or "torch"
            )
        importlib.import_module(vendor.package)
    return getattr(torch, vendor.module)


def vendor_of(kind: str) -> Vendor:
    """The entry of `VENDORS`.

    Raises:
        UsageError: a kind that is no accelerator.
    """
    if kind not in VENDORS:
        raise UsageError(f"device kind {kind!r}", allowed=" or ".join(VENDORS), fix="ask for an accelerator")
    return VENDORS[kind]


def count(kind: str) -> int:
    """Devices of a kind visible to this process; 0 where its software is missing. The CPU counts as one."""
    if kind == "cpu":
        return 1
    try:
        module = accelerator(kind)
    except (MissingPackageError, ImportError, OSError):
        return 0
    return int(module.device_count()) if module.is_available() else 0


def choose(requested: str, *, num_local_ranks: int) -> str:
    """Resolves `auto | cpu | cuda | musa` to a kind: an accelerator with a device a local rank, else the CPU.

    Raises:
        UsageError: an unknown kind, or fewer devices than local ranks for an explicit kind.
    """
    if requested == "auto":
        return next((kind for kind in _SEARCHED if count(kind) >= num_local_ranks), "cpu")
    if requested not in KINDS:
        raise UsageError(f"device {requested!r}", allowed="auto, cpu, cuda or musa", fix="choose one of them")
    if requested != "cpu" and count(requested) < num_local_ranks:
        raise UsageError(
            f"device {requested} with {num_local_ranks} processes on this host and {count(requested)} devices",
            allowed="at least one device a process",
            fix="start fewer processes or use --device cpu",
        )
    return requested


def local(requested: str) -> torch.device:
    """This process's device under torchrun: `choose` for the processes of this host, `of` its local rank."""
    return of(choose(requested, num_local_ranks=env.local_world_size()), env.local_rank())


def of(kind: str, index: int) -> torch.device:
    """The torch device of a local rank; an accelerator's becomes the current device."""
    if kind == "cpu":
        return torch.device("cpu")
    accelerator(kind).set_device(index)
    return torch.device(kind, index)


def collective_backend(kind: str) -> str:
    """The torch.distributed backend that moves tensors of a kind: gloo, nccl or mccl."""
    return "gloo" if kind == "cpu" else vendor_of(kind).collectives


def current_stream(device: torch.device) -> Any:
    """The stream that work on `device` is issued to now; None on the CPU."""
    return None if device.type == "cpu" else accelerator(device.type).current_stream(device)


def new_stream(device: torch.device, *, priority: int = 0) -> Any:
    """A stream of an accelerator; None on the CPU."""
    return None if device.type == "cpu" else accelerator(device.type).Stream(device=device, priority=priority)


def use_stream(device: torch.device, stream: Any) -> Any:
    """Context in which work on `device` goes to `stream`."""
    return accelerator(device.type).stream(stream)


def raw_stream(stream: Any) -> int:
    """The runtime's handle of a stream, for code outside torch; 0, the default stream, for None.

    Raises:
        UsageError: no stream of a vendor known here.
    """
    if stream is None:
        return 0
    for vendor in VENDORS.values():
        if hasattr(stream, vendor.stream_handle):
            return int(getattr(stream, vendor.stream_handle))
    handles = " or ".join(vendor.stream_handle for vendor in VENDORS.values())
    raise UsageError(f"a stream of class {type(stream).__name__}", allowed=f"one with {handles}", fix="pass such a one")


def is_capturing(device: torch.device) -> bool:
    """True while the current stream of `device` is recorded into a graph."""
    return device.type != "cpu" and bool(accelerator(device.type).is_current_stream_capturing())


def memory_pool(device: torch.device, library: str, alloc: str, free: str) -> Any:
    """A pool of torch's allocator that takes memory from two functions of a shared library. Use with `in_pool`."""
    memory = accelerator(device.type).memory
    allocator = getattr(memory, vendor_of(device.type).allocator)(library, alloc, free)
    pool = memory.MemPool(allocator.allocator())
    return allocator, pool


def in_pool(device: torch.device, pool: Any) -> Any:
    """Context in which this thread's tensors of `device` come from a pool of `memory_pool`."""
    return accelerator(device.type).memory.use_mem_pool(pool[1], device=device)


def architecture(device: torch.device) -> str:
    """What a compiler calls the device: sm_90, mp_31."""
    major, minor = accelerator(device.type).get_device_capability(device)
    return f"{vendor_of(device.type).arch_prefix}_{major}{minor}"


def platform(device: torch.device) -> str:
    """Which sources of the kernels are the device's: cuda or musa."""
    return vendor_of(device.type).platform


def keep_for_current_stream(*tensors: torch.Tensor) -> None:
    """Memory made on another stream is not reused before the current stream's work up to now; nothing on the CPU."""
    for tensor in tensors:
        if tensor.device.type != "cpu":
            tensor.record_stream(current_stream(tensor.device))


def new_event(device: torch.device, *, timing: bool = False) -> Any:
    """An unrecorded event of an accelerator."""
    return accelerator(device.type).Event(enable_timing=timing)


def synchronize(device: torch.device) -> None:
    """Waits until the work issued to `device` is done; nothing to do on the CPU."""
    if device.type != "cpu":
        accelerator(device.type).synchronize(device)


def synchronize_stream(device: torch.device) -> None:
    """Waits until the work of the current stream of `device` is done; nothing to do on the CPU."""
    if device.type != "cpu":
        current_stream(device).synchronize()


def current() -> torch.device:
    """The accelerator device that this process has begun to use, else the CPU. Starts no device runtime."""
    for kind in _SEARCHED:
        module = getattr(torch, VENDORS[kind].module, None)
        if module is not None and module.is_available() and module.is_initialized():
            return torch.device(kind, int(module.current_device()))
    return torch.device("cpu")


def of_collective_backend(name: str) -> torch.device:
    """The device whose tensors a torch.distributed backend ("gloo", "nccl", "cpu:gloo,cuda:nccl") moves.

    An accelerator named in it wins, as its current device; a name unknown here counts as the CPU's.
    """
    for kind, vendor in VENDORS.items():
        if vendor.collectives in name:
            return torch.device(kind, int(accelerator(kind).current_device()))
    return torch.device("cpu")


def indexed(device: torch.device | str) -> torch.device:
    """The device with its index: an accelerator named without one is the current device of its kind."""
    device = torch.device(device)
    if device.type == "cpu" or device.index is not None:
        return torch.device("cpu") if device.type == "cpu" else device
    return torch.device(device.type, int(accelerator(device.type).current_device()))


def names(kind: str) -> list[str]:
    """Product names of the devices of an accelerator kind that this process sees; none for the CPU."""
    return [] if kind == "cpu" else [str(accelerator(kind).get_device_name(index)) for index in range(count(kind))]


def why_no_collectives(kind: str) -> str | None:
    """Why torch.distributed can not move tensors of a kind here; None where it can."""
    if not torch.distributed.is_available():
        return "this torch is built without torch.distributed"
    if kind != "cpu" and count(kind) == 0:
        return f"no {kind} device is visible to torch {torch.__version__}"
    backend = collective_backend(kind)
    return None if torch.distributed.is_backend_available(backend) else f"torch has no {backend} backend"


def memory_used(device: torch.device) -> int:
    """Bytes of a device's memory in use, by whomever, as the driver counts them; 0 for the CPU."""
    if device.type == "cpu":
        return 0
    free, total = accelerator(device.type).mem_get_info(device)
    return int(total - free)


def release_cached(device: torch.device) -> None:
    """Gives memory that torch keeps for later back to the driver; nothing on the CPU."""
    if device.type != "cpu":
        accelerator(device.type).empty_cache()


def name(device: torch.device) -> str:
    """What the hardware calls itself; "CPU" for the CPU."""
    return "CPU" if device.type == "cpu" else str(accelerator(device.type).get_device_name(device))
