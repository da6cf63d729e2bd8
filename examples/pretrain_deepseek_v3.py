"""Pretrains a DeepSeek-V3-style model with Megatron-core, our MoE layer and DualPipeV.

    torchrun --nproc-per-node 4 examples/pretrain_deepseek_v3.py --config examples/configs/tiny_cpu.yaml

Only light imports stand at the top: checkpoint writers start helper processes that import this file again.
"""

from __future__ import annotations

import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from torch.distributed import HashStore

from comm_core.runtime import device as devices
from comm_core.runtime import env
from comm_core.runtime.errors import MissingPackageError, UsageError
from examples.config import Config, parse

if TYPE_CHECKING:
    from examples.session import Session


GRACE_SECONDS = 3.0


def main(argv: list[str] | None = None) -> int:
    """Trains. Returns the exit status: 0, or 2 for a mistake in the settings, which rank 0 prints in one line."""
    try:
        config, arguments = parse(argv, description=__doc__)
        config.validate_layout(env.world_size())
        kind = devices.choose(arguments.device, num_local_ranks=env.local_world_size())
        session = _start(config, kind, resume=arguments.resume)
    except (UsageError, MissingPackageError) as error:
        # Up to here a mistake is found by all ranks alike.
        if env.rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        else:
            # torchrun ends all ranks as soon as one has ended, which must not be before rank 0 has spoken.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(GRACE_SECONDS)
        return 2
    try:
        session.train()
    except (UsageError, MissingPackageError) as error:
        print(f"error on rank {env.rank()}: {error}", file=sys.stderr, flush=True)
        return 2
    except KeyboardInterrupt:
        if env.rank() == 0:
            print("stopped; --resume continues from the newest checkpoint", file=sys.stderr, flush=True)
        return 130
    # Not after an error: a peer may never come, and the wait would hide the traceback.
    session.leave()
    return 0


def _start(config: Config, kind: str, *, resume: bool) -> Session:
    import torch.distributed as dist

    import megatron_patch
    from examples.agree import on_rank_zero
    from examples.prepare_data import read_documents
    from examples.quiet import quiet

    megatron_patch.megatron_version()
    device = devices.of(kind, env.local_rank())
    dist.init_process_group(
        devices.collective_backend(kind),
        timeout=timedelta(seconds=env.timeout_seconds()),
        **_rendezvous(),
        **({} if kind == "cpu" else {"device_id": device}),
    )
    # A wrong file is told now, not after Megatron has been imported, which takes longer than everything before.
    on_rank_zero(lambda: len(read_documents(config.data.file)))
    quiet()
    megatron_patch.apply(kind, split_weight_grad=config.parallel.split_weight_grad)
    from examples.session import Session

    return Session.start(config, device, resume=resume)


def _rendezvous() -> dict[str, Any]:
    """How processes find each other: as torchrun says, or, started by hand, a world of one."""
    if env.has_launcher():
        return {}
    return {"store": HashStore(), "rank": 0, "world_size": 1}


if __name__ == "__main__":
    sys.exit(main())
