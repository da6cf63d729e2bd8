"""Pretrains a DeepSeek-V3-style model with Megatron-core, our MoE layer and DualPipeV.

    torchrun --nproc-per-node 4 examples/pretrain_deepseek_v3.py --config examples/configs/tiny_cpu.yaml

Only light imports stand at the top: checkpoint writers start helper processes that import this file again.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from comm_core.runtime import device as devices
from comm_core.runtime import env
from comm_core.runtime.errors import MissingPackageError, UsageError
from examples.config import Config, parse


def main(argv: list[str] | None = None) -> int:
    """Trains. Returns the exit status: 0, or 2 for a mistake in the settings, which rank 0 prints in one line."""
    try:
        config, arguments = parse(argv, description=__doc__)
        config.validate_layout(env.world_size())
        kind = devices.choose(arguments.device, num_local_ranks=env.local_world_size())
        _run(config, kind, resume=arguments.resume)
    except (UsageError, MissingPackageError) as error:
        if env.rank() == 0:
            print(f"error: {error}", file=sys.stderr, flush=True)
        return 2
    return 0


def _run(config: Config, kind: str, *, resume: bool) -> None:
    import megatron_patch
    from examples.quiet import quiet

    quiet()
    megatron_patch.apply(kind, split_weight_grad=config.parallel.split_weight_grad)
    import torch.distributed as dist

    device = devices.of(kind, env.local_rank())
    dist.init_process_group(
        devices.collective_backend(kind),
        init_method="env://" if env.has_launcher() else "tcp://127.0.0.1:0",
        rank=env.rank(),
        world_size=env.world_size(),
        timeout=timedelta(seconds=env.timeout_seconds()),
        **({} if kind == "cpu" else {"device_id": device}),
    )
    from examples.session import Session

    try:
        session = Session.start(config, device, resume=resume)
        session.train()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
