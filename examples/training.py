"""One training step of a configuration, shared by the pretraining example and the parity check."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import get_forward_backward_func

from comm_core.runtime import errors
from examples import model as models
from examples.config import Config
from examples.data import Batch
from megatron_patch.moe_spec import close_buffers
from megatron_patch.schedule import PipelineSchedule


class ExpertLoad:
    """Counts how many tokens each expert of each MoE layer was given, over the microbatches of a step.

    Args:
        model: its routers are observed.
        num_layers, num_experts: shape of the table.
    """

    def __init__(self, model: models.Model, num_layers: int, num_experts: int, device: torch.device) -> None:
        self._table = torch.zeros(num_layers, num_experts, dtype=torch.float64, device=device)
        for layer, router in model.routers():
            router.register_forward_hook(self._hook(layer))

    def _hook(self, layer: int) -> Callable[..., None]:
        def count(module: Any, inputs: Any, output: tuple[torch.Tensor, torch.Tensor]) -> None:
            self._table[layer] += output[1].detach().sum(0)

        return count

    def take(self) -> torch.Tensor:
        """Tokens [layer, expert] over all ranks since the last call; a row of zeros for a dense layer."""
        total = self._table.to(torch.float32)
        dist.all_reduce(total)
        self._table.zero_()
        return total.cpu()


def imbalance(load: torch.Tensor) -> float:
    """Largest over mean number of tokens of an expert, averaged over the MoE layers; 1 is perfect balance."""
    rows = load[load.sum(1) > 0]
    return float((rows.amax(1) / rows.mean(1)).mean()) if len(rows) else 1.0


@dataclass(slots=True)
class Trainer:
    """Model, optimizer and schedule of one rank.

    Attributes:
        batches: (step, microbatch) -> the batch of this rank's data-parallel share; step counts from 1.
    """

    config: Config
    device: torch.device
    model: models.Model
    optimizer: Any
    batches: Callable[[int, int], Batch]
    schedule: Callable[..., list[dict[str, torch.Tensor]]]

    @classmethod
    def build(cls, config: Config, device: torch.device, batches: Callable[[int, int], Batch]) -> Trainer:
        """Builds everything for a configuration; collective over all ranks, `models.setup_parallel` comes first."""
        model = models.build(config, device)
        optimizer = models.build_optimizer(config, model)
        schedule: Any = (
            PipelineSchedule("dualpipev", split_weight_grad=config.parallel.split_weight_grad)
            if config.parallel.schedule == "dualpipev"
            else get_forward_backward_func()
        )
        return cls(config, device, model, optimizer, batches, schedule)

    def forward_backward(self, step: int, num_microbatches: int | None = None) -> float:
        """Gradients of one step into the DDP buffers, finalised. Returns the mean loss over all ranks."""
        count = self.config.train.num_microbatches if num_microbatches is None else num_microbatches
        for chunk in self.model.chunks:
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        iterators = [self._iterate(step, count) for _ in self.model.chunks]
        single = len(self.model.chunks) == 1
        losses = self.schedule(
            forward_step_func=models.forward_step,
            data_iterator=iterators[0] if single else iterators,
            model=self.model.chunks[0] if single else self.model.chunks,
            num_microbatches=count,
            seq_length=self.config.train.seq_length,
            micro_batch_size=self.config.train.micro_batch_size,
            forward_only=False,
        )
        return _mean_loss(losses, self.device)

    def _iterate(self, step: int, num_microbatches: int) -> Iterator[Batch]:
        return (self.batches(step, microbatch) for microbatch in range(num_microbatches))

    def update(self, step: int) -> float:
        """Optimizer step with the learning rate of `step`. Returns the gradient norm before clipping."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.config.train.learning_rate(step)
        _, norm, _ = self.optimizer.step()
        if not math.isfinite(norm):
            # The norm is the same on all ranks, so all of them end here, before a checkpoint is written.
            raise errors.MTMoEError(f"step {step}: the gradient norm is {norm}; lower train.lr or look at the data")
        return float(norm)

    def close(self) -> None:
        """Gives up pipeline and EP communication and Megatron's groups; collective."""
        if isinstance(self.schedule, PipelineSchedule):
            self.schedule.close()
        close_buffers()
        parallel_state.destroy_model_parallel()


def _mean_loss(losses: list[dict[str, torch.Tensor]], device: torch.device) -> float:
    """Mean over microbatches and data-parallel ranks; only loss ranks hold values."""
    total = torch.zeros(2, dtype=torch.float64, device=device)
    for entry in losses:
        total += torch.tensor([float(entry["lm loss"]), 1.0], dtype=torch.float64, device=device)
    dist.all_reduce(total)
    return float(total[0] / total[1])
