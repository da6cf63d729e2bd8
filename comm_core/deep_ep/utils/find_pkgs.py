"""Where NVIDIA's packages lie; nothing here needs them, programs that ask get an answer."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from comm_core.runtime.errors import MissingPackageError

__all__ = ["find_nccl_root", "find_nvshmem_root", "find_pkg_root"]


def find_pkg_root(name: str, lib_name: str | None = None, optional: bool = False) -> str | None:
    """The folder of an installed package nvidia-NAME...: the one above `lib` where a library is named.

    Args:
        name: such as "nccl".
        lib_name: part of the name of a file that must be in it.
        optional: return None instead of raising.

    Raises:
        MissingPackageError: it is not installed.
    """
    for found in importlib.metadata.distributions():
        if not (found.metadata["Name"] or "").lower().replace("_", "-").startswith(f"nvidia-{name}"):
            continue
        for file in found.files or []:
            place = Path(str(found.locate_file(file)))
            if lib_name is None and place.parent.name == name:
                return str(place.parent)
            if lib_name is not None and lib_name in place.name:
                return str(place.parent.parent if place.parent.name == "lib" else place.parent)
    if optional:
        return None
    raise MissingPackageError(f"nvidia-{name}", needed_for=f"its folder ({name})", install=f"pip install nvidia-{name}")


def find_nccl_root(optional: bool = False) -> str | None:
    """The folder of NCCL."""
    return find_pkg_root("nccl", "libnccl.so", optional)


def find_nvshmem_root(optional: bool = False) -> str | None:
    """The folder of NVSHMEM."""
    return find_pkg_root("nvshmem", None, optional)
