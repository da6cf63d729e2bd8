"""Megatron-core meets this project: apply(), revert(), report(). Importing this package imports no Megatron.

import megatron_patch
megatron_patch.apply(device="cpu")        # or "cuda", "musa"; once, before megatron.core is imported
from megatron_patch.moe_spec import use_mt_moe
from megatron_patch.placement import VLayout
from megatron_patch.schedule import PipelineSchedule
"""

from __future__ import annotations

import importlib.metadata

from comm_core.runtime import device as devices
from comm_core.runtime.errors import MissingPackageError, UsageError
from megatron_patch.patches import Patch, PatchSet

__all__ = ["apply", "megatron_version", "report", "revert"]

_PATCHES = PatchSet()
_device = ""
_SUPPORTED = ((0, 16), (0, 20))


def megatron_version() -> str:
    """Version of the installed megatron-core.

    Raises:
        MissingPackageError: it is not installed.
    """
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise MissingPackageError(
            "megatron-core", needed_for="the Megatron integration", install="pip install 'mt-moe[megatron]'"
        ) from None


def apply(device: str, *, split_weight_grad: bool = True) -> None:
    """Puts the patches for a device and the installed Megatron version in force. Calling it again adds nothing.

    Args:
        device: kind of device that Megatron will run on, one of `comm_core.runtime.device.KINDS`.
        split_weight_grad: let Megatron's own linears hand their weight gradients to the pipeline schedule, so that a
            schedule can run backward for inputs (I) and for weights (W) apart. Without a schedule that collects them,
            weight gradients are computed at once, as before.

    Raises:
        MissingPackageError: megatron-core is not installed.
        UsageError: an unknown device, or a Megatron version that was not tested.
    """
    version = megatron_version()
    numbers = tuple(int(part) for part in version.split(".")[:2])
    if not _SUPPORTED[0] <= numbers < _SUPPORTED[1]:
        raise UsageError(
            f"megatron-core {version}",
            allowed=">=0.16, <0.20 (0.16.1 and 0.19.2 are tested)",
            fix="install one of these versions",
        )
    if device not in devices.KINDS:
        raise UsageError(f"device {device!r}", allowed=" or ".join(devices.KINDS), fix="pass the kind of device in use")
    global _device
    if _PATCHES.report() and device != _device:
        raise UsageError(
            f"apply({device!r}) while the patches for {_device!r} are in force",
            allowed="one kind of device a process",
            fix="call revert() first",
        )
    _device = device
    from megatron_patch import platform

    _PATCHES.apply(platform.before_import(device), version)
    _PATCHES.apply(platform.after_import(device), version)
    if split_weight_grad:
        from megatron_patch import weight_grad

        _PATCHES.apply(weight_grad.patches(), version)


def revert() -> None:
    """Puts everything back that apply() replaced.

    Raises:
        patches.PatchError: somebody else replaced a target after us; everything else is reverted.
    """
    _PATCHES.revert()


def report() -> list[Patch]:
    """The patches in force: target, versions and reason of each."""
    return _PATCHES.report()
