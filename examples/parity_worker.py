"""What one process of the parity check runs: a few training steps, every gradient kept."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import megatron_patch
from comm_core.runtime import device as devices
from examples.config import Config
from examples.parity import STEPS, Record, Setting
from examples.quiet import quiet


def run(role: str, setting: Setting, folder: Path) -> None:
    """Runs a role (`reference` or `ours`) in this process and saves one file a rank and run into `folder`."""
    quiet()
    torch.set_num_threads(1)
    device = devices.local(setting.device)
    kind = device.type
    megatron_patch.apply(kind, split_weight_grad=False)
    dist.init_process_group(devices.collective_backend(kind), **({} if kind == "cpu" else {"device_id": device}))
    try:
        if role == "reference":
            _save(folder, "reference", train(setting.reference(), [None] * STEPS, device))
            return
        # The stock runs come first, while Megatron's linears are the original ones.
        for counts in setting.microbatches:
            _save(folder, f"stock-{_key(counts)}", train(setting.stock(), list(counts), device))
        megatron_patch.apply(kind, split_weight_grad=True)
        if setting.fault:
            _plant_fault()
        _save(folder, "ours", train(setting.ours(clip=True), [None] * STEPS, device))
        for counts in setting.microbatches:
            _save(folder, f"v-{_key(counts)}", train(setting.ours(clip=False), list(counts), device))
    finally:
        dist.destroy_process_group()


def _key(counts: tuple[int, ...]) -> str:
    return "-".join(map(str, counts))


def _save(folder: Path, name: str, record: Record) -> None:
    torch.save(record, folder / f"{name}.{dist.get_rank()}.pt")


def _plant_fault() -> None:
    """Routing weights of the drop-in layer become 1 % too large."""
    from megatron_patch import moe_spec

    original: Callable[..., Any] = moe_spec.topk_from_map

    def faulty(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
        idx, weights = original(*args)
        return idx, weights * 1.01

    moe_spec.topk_from_map = faulty


def train(config: Config, microbatches: list[int | None], device: torch.device) -> Record:
    """Trains one step for each entry (a number of microbatches; None: the configured one)."""
    from megatron.core import parallel_state

    from examples import model as models
    from examples.training import Trainer
    from megatron_patch.schedule import PipelineSchedule

    models.setup_parallel(config)
    ranks, rank = parallel_state.get_data_parallel_world_size(), parallel_state.get_data_parallel_rank()

    def batches(step: int, microbatch: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, labels, mask, positions = synthetic_batch(config, step, microbatch * ranks + rank)
        return tokens.to(device), labels.to(device), mask.to(device), positions.to(device)

    trainer = Trainer.build(config, device, batches)
    record = Record([], [], [], [])
    for step, count in enumerate(microbatches, start=1):
        record.losses.append(trainer.forward_backward(step, count))
        record.gradients.append({name: p.main_grad.cpu().clone() for name, p in trainer.model.parameters.items()})
        if isinstance(trainer.schedule, PipelineSchedule):
            record.peaks.append(trainer.schedule.peak_live)
        record.norms.append(trainer.update(step))
    trainer.close()
    return record


def synthetic_batch(
    config: Config, step: int, index: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random tokens that depend on (step, index) alone, index counted over all data-parallel ranks."""
    train = config.train
    generator = torch.Generator().manual_seed(train.seed * 1_000_003 + step * 1_009 + index)
    shape = (train.micro_batch_size, train.seq_length + 1)
    tokens = torch.randint(0, config.model.vocab_size, shape, generator=generator)
    positions = torch.arange(train.seq_length).expand(train.micro_batch_size, -1).contiguous()
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous(), torch.ones(positions.shape), positions
