"""What buffers have of this process and this host: memory, files, sockets, threads. All of it must be given back."""

from __future__ import annotations

import os
import threading
from pathlib import Path

import psutil

NOTHING = {"maps": 0, "files": 0, "sockets": 0, "threads": 0, "names": 0, "children": 0}


def left_behind() -> dict[str, int]:
    """What a closed buffer may leave in this process and this host: nothing."""
    maps = Path("/proc/self/maps").read_text()
    files = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if os.path.lexists(path)]
    ours = [line.split()[6] for line in Path("/proc/net/unix").read_text().splitlines() if "@mt-moe-" in line]
    return {
        "maps": maps.count("memfd:mt-moe"),
        "files": sum("memfd:mt-moe" in name or "pidfd" in name for name in files),
        "sockets": sum(f"socket:[{inode}]" in files for inode in ours),
        "threads": sum(item.name.startswith(("ep-", "ask-")) for item in threading.enumerate()),
        "names": sum("mt-moe" in name for name in os.listdir("/dev/shm")),
        "children": len(psutil.Process().children()),
    }
