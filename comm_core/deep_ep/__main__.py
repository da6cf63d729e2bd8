"""python -m comm_core.deep_ep SCRIPT [ARGUMENTS]: runs a script in which `import deep_ep` means this package.

The script replaces this process, with a folder on PYTHONPATH whose deep_ep.py calls install(). So processes that it
starts (multiprocessing, torchrun) have it too, before their first import.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from comm_core.runtime import env


def main(arguments: list[str]) -> int:
    """Starts the script; returns only where there is none."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: python -m comm_core.deep_ep SCRIPT [ARGUMENTS]", file=sys.stderr)
        return 0 if arguments else 2
    here = Path(__file__).resolve().parent
    environment = env.for_child()
    folders = [str(here / "on_path"), str(here.parents[1]), environment.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(folder for folder in folders if folder)
    os.execve(sys.executable, [sys.executable, *arguments], environment)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
