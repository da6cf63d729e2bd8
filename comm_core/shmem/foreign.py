"""Tensors over device memory that torch has not allocated.

Torch takes such memory as it takes that of other libraries: by DLPack, whose struct is written here. It is the same for
every vendor, but for one number. Torch does not give the memory back: its owner asks whether a tensor is left over it,
and frees it then, or later.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

from comm_core.runtime import device as devices

# DLPack's number of unsigned integers among the types of elements, and the name of a capsule not taken yet.
_UINT = 1
_NAME = b"dltensor"


class Managed(ctypes.Structure):
    """DLManagedTensor of dlpack.h, with its DLTensor written out."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
        ("manager_ctx", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
    )


def tensor_over(device: torch.device, address: int, num_bytes: int) -> tuple[torch.Tensor, Callable[[], bool]]:
    """A tensor over device memory, and a function that says whether all tensors over it are gone.

    Args:
        device: whose memory it is.
        address: where it begins.
        num_bytes: its size, not 0.

    Returns:
        (uint8 [num_bytes], function). Views share its storage, so they count as well.
    """
    shape, stride = (ctypes.c_int64 * 1)(num_bytes), (ctypes.c_int64 * 1)(1)
    managed = Managed(
        data=address,
        device_type=devices.vendor_of(device.type).dlpack,
        device_id=device.index,
        ndim=1,
        code=_UINT,
        bits=8,
        lanes=1,
        shape=shape,
        strides=stride,
    )
    # Torch reads it when the last tensor goes, which may be behind everything else of Python: it stays for good.
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(managed))
    new_capsule = ctypes.pythonapi.PyCapsule_New
    new_capsule.restype, new_capsule.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
    tensor: torch.Tensor = from_dlpack(new_capsule(ctypes.addressof(managed), _NAME, None))
    return tensor, watch(tensor)


def watch(tensor: torch.Tensor) -> Callable[[], bool]:
    """A function that says whether the storage of a tensor is gone."""
    kept: Any = StorageWeakRef(tensor.untyped_storage())
    expired: Callable[[], bool] = kept.expired
    return expired
