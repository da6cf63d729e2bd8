"""Tensors that live on the played device: `device.type` is "musa", the memory is the host's.

torch has one device type that is free for others, and a registration from Python. Its tensors here are wrappers around
tensors of the CPU: every operation on them is carried out on those, and what it reads and writes is checked against the
streams. `data_ptr()` is the address of the memory, as for any device.
"""

from __future__ import annotations

import ctypes
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils import backend_registration

from comm_core.shmem import foreign
from tests.twin.memory import numbers_at
from tests.twin.order import Order, Span
from tests.twin.streams import KIND, Device

# Operations that give memory its shape and touch none.
_FRESH = {
    "empty_like",
    "new_empty",
    "new_empty_strided",
    "new_zeros",
    "new_ones",
    "new_full",
    "zeros_like",
    "ones_like",
}
# kDLExtDev of dlpack.h.
_DLPACK = 12
# Operations that are a view or a copy; in inference mode they come here as they are.
_MAY_COPY = {"to", "reshape", "contiguous", "flatten"}


class Block:
    """One allocation. It ends with the last tensor in it, and is then checked as torch's allocator would use it again.

    Memory that is not torch's has no stream.

    Attributes:
        host: a tensor of the CPU over all of it; queued work keeps it.
        recorded: streams that `record_stream` has named.
    """

    def __init__(
        self, order: Order, host: torch.Tensor, stream: int | None, given: Callable[[], None] | None = None
    ) -> None:
        self.host, self.recorded = host, set[int]()
        storage = host.untyped_storage()
        self.start, self.num_bytes = storage.data_ptr(), storage.nbytes()
        order.allocated(self.start, self.num_bytes, stream)
        if given is not None:
            weakref.finalize(self, given)
        if stream is not None:
            weakref.finalize(self, order.freed, self.start, self.num_bytes, stream, self.recorded)


class Memory:
    """The allocations that are alive, and where new ones come from.

    Attributes:
        device: whose streams are checked.
        chosen: of each thread, `place` where its new tensors come from a pool: gives them their memory.
        given: what gives memory of a pool back, by address.
    """

    def __init__(self, device: Device) -> None:
        self.device = device
        self.chosen = threading.local()
        self.given: dict[int, Callable[[], None]] = {}
        self._blocks: weakref.WeakSet[Block] = weakref.WeakSet()

    def allocated(self, host: torch.Tensor, index: int) -> PlayedTensor:
        """A tensor in an allocation of its own, written by work of the current stream."""
        lane = self.device.current(index).lane
        block = Block(self.device.order, host, lane.number, self.given.pop(host.data_ptr(), None))
        self._blocks.add(block)
        return PlayedTensor(host, block, torch.device(KIND, index), self)

    def imported(self, capsule: object) -> PlayedTensor:
        """A tensor over memory of another owner, as torch makes it of a DLPack capsule."""
        point = ctypes.pythonapi.PyCapsule_GetPointer
        point.restype, point.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
        given = foreign.Managed.from_address(point(capsule, b"dltensor"))
        if given.device_type != _DLPACK or (given.code, given.bits, given.lanes, given.ndim) != (1, 8, 1, 1):
            raise RuntimeError(f"no memory of the played device in a capsule of device type {given.device_type}")
        assert not given.deleter, "torch would call it"
        host = numbers_at(given.data, given.shape[0], torch.uint8)
        block = Block(self.device.order, host, None)
        self._blocks.add(block)
        return PlayedTensor(host, block, torch.device(KIND, given.device_id), self)

    @staticmethod
    def watch(tensor: PlayedTensor) -> Callable[[], bool]:
        """What foreign.watch gives: tensors here have no storage in common but a block."""
        block = weakref.ref(tensor.block)
        return lambda: block() is None

    def make(self, index: int, make: Callable[[], torch.Tensor]) -> PlayedTensor:
        """A tensor that `make` makes on the CPU, its memory taken from the thread's pool where it has chosen one."""
        host = make()
        place = getattr(self.chosen, "place", None)
        return self.allocated(host if place is None else place(host), index)

    def block_of(self, address: int) -> Block | None:
        """The allocation in which an address lies."""
        return next((item for item in self._blocks if item.start <= address < item.start + item.num_bytes), None)


class PlayedTensor(torch.Tensor):
    """A tensor of the played device."""

    host: torch.Tensor
    block: Block
    memory: Memory

    @staticmethod
    def __new__(cls, host: torch.Tensor, block: Block, device: torch.device, memory: Memory) -> PlayedTensor:
        made: PlayedTensor = torch.Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=device,
        )
        made.host, made.block, made.memory = host, block, memory
        return made

    def __repr__(self, **_: Any) -> str:
        return f"{self.device}: {self.cpu()!r}"

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def record_stream(self, stream: Any) -> None:
        self.block.recorded.add(stream.lane.number)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Results are of the class that the operation says, not of this one."""
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Every operation, on the host tensors, behind the current stream's work."""
        kwargs = dict(kwargs or {})
        tensors = [item for item in _flat((args, *kwargs.values())) if isinstance(item, PlayedTensor)]
        memory, device = tensors[0].memory, tensors[0].device
        asked = next((item for item in (*args, *kwargs.values()) if isinstance(item, torch.device)), device)
        to_host = asked.type != KIND
        device = device if to_host else _indexed(asked, memory.device)
        lane = memory.device.current(device.index).lane
        lane.at_once(str(func), _spans(func, args, kwargs))
        out = func(*_host(args), **{name: _host(value) for name, value in kwargs.items()})
        if any(item.shape != item.host.shape for item in tensors):
            raise NotImplementedError(f"{func} changes the shape of a tensor, which the played device can not")
        if to_host or not all(isinstance(item, torch.Tensor) for item in _flat(out)) or _writes_host(func, args):
            lane.synchronize()
        return _wrapped(out, tensors, memory, device, to_host)


def _flat(items: Any) -> list[Any]:
    if isinstance(items, tuple | list):
        return [item for inner in items for item in _flat(inner)]
    return [items]


def _indexed(device: torch.device, played: Device) -> torch.device:
    return device if device.index is not None else torch.device(KIND, played.index)


def _host(item: Any) -> Any:
    if isinstance(item, tuple | list):
        return type(item)(_host(inner) for inner in item)
    if isinstance(item, torch.device):
        return torch.device("cpu")
    return item.host if isinstance(item, PlayedTensor) else item


def _wrapped(item: Any, tensors: list[PlayedTensor], memory: Memory, device: torch.device, to_host: bool) -> Any:
    """A result: an argument written in place, a view of one, a new tensor, or one of the host."""
    if isinstance(item, tuple | list):
        return type(item)(_wrapped(inner, tensors, memory, device, to_host) for inner in item)
    if not isinstance(item, torch.Tensor):
        return item
    if to_host:  # a copy, though both are on the host in truth
        return item.clone() if any(item is given.host for given in tensors) else item
    for given in tensors:
        if item is given.host:
            return given
    start = item.untyped_storage().data_ptr()
    for given in tensors:
        if start and start == given.host.untyped_storage().data_ptr():
            return PlayedTensor(item, given.block, given.device, memory)
    return memory.make(device.index, lambda: item)


def _writes_host(func: Any, args: Any) -> bool:
    """True for a copy to the host."""
    return func._schema.name.startswith("aten::copy_") and not isinstance(args[0], PlayedTensor)


def _spans(func: Any, args: Any, kwargs: Any) -> list[Span]:
    """What an operation accesses; views, and operations that only shape new memory, access nothing."""
    schema = func._schema
    name = schema.name.partition("::")[2]
    aliased = [item.alias_info for item in schema.returns if item.alias_info is not None]
    if name in _FRESH or (name not in _MAY_COPY and any(not item.is_write for item in aliased)):
        return []
    found = []
    for place, argument in enumerate(schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(argument.name)
        write = argument.alias_info is not None and argument.alias_info.is_write
        found += [span_of(item, write) for item in _flat(value) if isinstance(item, PlayedTensor)]
    return found


def span_of(tensor: PlayedTensor, write: bool) -> Span:
    """The bytes between the first and the last element."""
    host = tensor.host
    last = sum((size - 1) * stride for size, stride in zip(host.shape, host.stride(), strict=True))
    return Span(host.data_ptr(), (last + 1) * host.element_size() if host.numel() else 0, write)


# What torch is told once a process: there is no way back, and without `torch.musa` it means nothing.
_memory: list[Memory] = []
_kept: list[Any] = []


def register(memory: Memory) -> None:
    """Makes torch know the device type; its tensors come from `memory` from now on."""
    _memory[:] = [memory]
    if _kept:
        return
    torch.utils.rename_privateuse1_backend(KIND)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    for overload in ("arange", "arange.start", "arange.start_step"):
        library.impl(overload, _arange, "PrivateUse1")
    hook, guard = backend_registration._DummyPrivateUse1Hook(), backend_registration._DummyDeviceGuard()
    torch._C._acc.register_python_privateuseone_hook(hook)
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    _kept.extend([library, hook, guard])


def without_dtensor() -> None:
    """Makes torch look for DTensor now, and find nothing.

    It asks for that class at the first operation on a tensor like ours; to import it takes longer than most tests.
    """
    name = "torch.distributed.tensor"
    if name not in sys.modules and name not in _kept:
        _kept.append(name)
        stub: Any = types.ModuleType(name)
        stub.DTensor = type("DTensor", (), {})
        sys.modules[name] = stub
        torch.empty(1, device=torch.device(KIND, 0)).add_(1)
        del sys.modules[name]


def _empty(
    size: Any,
    dtype: Any = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: Any = None,
    memory_format: Any = None,
) -> PlayedTensor:
    memory = _memory[0]
    return memory.make(_indexed(torch.device(device), memory.device).index, lambda: torch.empty(size, dtype=dtype))


def _empty_strided(
    size: Any, stride: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> PlayedTensor:
    memory = _memory[0]
    index = _indexed(torch.device(device), memory.device).index
    return memory.make(index, lambda: torch.empty_strided(size, stride, dtype=dtype))


def _arange(
    *bounds: Any, dtype: Any = None, layout: Any = None, device: Any = None, pin_memory: Any = None
) -> PlayedTensor:
    memory = _memory[0]
    return memory.make(_indexed(torch.device(device), memory.device).index, lambda: torch.arange(*bounds, dtype=dtype))


def _copy_from(source: torch.Tensor, to: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """The copy by which torch.tensor(..., device=) fills what it has made."""
    _host(to).copy_(_host(source))
    return to
