"""How the accelerators of this host are connected, asked of the driver's library and of torch; no program is started.

NVML, which comes with the driver, knows NVLink. Without it, and on MUSA, torch says whether one device can read
another's memory, not over what. Verified with a stand-in for NVML; on MUSA never run.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from itertools import combinations
from typing import Any

from comm_core.runtime import device as devices
from comm_core.runtime.errors import MTMoEError

_MOST_LINKS = 18  # of one device, as NVML numbers them
_P2P_BY_NVLINK = 2  # NVML_P2P_CAPS_INDEX_NVLINK


class LinkError(MTMoEError, RuntimeError):
    """The driver's library is not there or does not answer."""


class Nvml:
    """The few calls of libnvidia-ml that tell links apart.

    Args:
        library: the loaded library; found by its name by default.

    Raises:
        LinkError: it is not there or does not start.
    """

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = ctypes.CDLL("libnvidia-ml.so.1") if library is None else library
        except OSError as error:
            raise LinkError(f"NVML is not there: {error}") from error
        self._call("nvmlInit_v2")

    def device(self, uuid: str) -> ctypes.c_void_p:
        """The handle of the device with this UUID."""
        handle = ctypes.c_void_p()
        name = uuid if uuid.startswith("GPU-") else f"GPU-{uuid}"
        self._call("nvmlDeviceGetHandleByUUID", name.encode(), ctypes.byref(handle))
        return handle

    def num_links(self, handle: ctypes.c_void_p) -> int:
        """Links of a device that are up; 0 where it has none."""
        total = 0
        for link in range(_MOST_LINKS):
            up = ctypes.c_uint()
            try:
                self._call("nvmlDeviceGetNvLinkState", handle, ctypes.c_uint(link), ctypes.byref(up))
            except LinkError:  # no such link
                break
            total += int(up.value)
        return total

    def linked(self, one: ctypes.c_void_p, other: ctypes.c_void_p) -> bool:
        """True where two devices reach each other over NVLink."""
        status = ctypes.c_uint()
        self._call("nvmlDeviceGetP2PStatus", one, other, ctypes.c_uint(_P2P_BY_NVLINK), ctypes.byref(status))
        return status.value == 0

    def _call(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise LinkError(f"{name} returned {code}")


def between(kind: str, nvml: Callable[[], Nvml] = Nvml) -> dict[str, str]:
    """Links of the devices of a kind: "0" what device 0 has, "0-1" how the two are connected.

    Args:
        kind: cuda or musa.
        nvml: opens NVML.
    """
    module, count = devices.accelerator(kind), devices.count(kind)
    library, handles, reason = None, [], ""
    if devices.collective_backend(kind) == "nccl":  # NVML and NCCL belong to the same devices
        try:
            library = nvml()
            handles = [library.device(str(module.get_device_properties(index).uuid)) for index in range(count)]
        except (LinkError, AttributeError) as error:
            library, reason = None, f"; {error}"
    found = {}
    if library is not None:
        found = {str(index): f"{library.num_links(handle)} NVLink links up" for index, handle in enumerate(handles)}
    for one, other in combinations(range(count), 2):
        if not module.can_device_access_peer(one, other):
            told = "no peer access"
        elif library is None:
            told = f"peer access, over what is not told{reason}"
        else:
            told = f"peer access over {'NVLink' if library.linked(handles[one], handles[other]) else 'PCIe'}"
        found[f"{one}-{other}"] = told
    return found
