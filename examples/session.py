"""A training run from prepared data to report: what rank 0 shows, what every rank does."""

from __future__ import annotations

import contextlib
import importlib.metadata
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state

import megatron_patch
from comm_core.runtime import trace
from comm_core.runtime.errors import UsageError
from examples import checkpoint, model, report
from examples.agree import on_rank_zero
from examples.config import Config
from examples.data import Batch, batch, build_datasets, microbatch_indices
from examples.prepare_data import Prepared, prepare
from examples.progress import Progress, Row
from examples.training import ExpertLoad, Trainer, imbalance


@dataclass(slots=True)
class Session:
    """Everything one rank holds during a run."""

    config: Config
    device: torch.device
    prepared: Prepared
    trainer: Trainer
    load: ExpertLoad
    first_step: int
    progress: Progress | None

    @classmethod
    def start(cls, config: Config, device: torch.device, *, resume: bool) -> Session:
        """Prepares data, builds the model and, on resume, loads the newest checkpoint; collective."""
        prepared = on_rank_zero(
            lambda: prepare(
                config.data.file,
                config.data_folder,
                config.model.vocab_size,
                min_tokens=config.train.seq_length + 1,
            )
        )
        model.setup_parallel(config)
        samples, _ = build_datasets(prepared, seq_length=config.train.seq_length, seed=config.train.seed)
        ranks = parallel_state.get_data_parallel_world_size()
        rank = parallel_state.get_data_parallel_rank()

        def batches(step: int, microbatch: int) -> Batch:
            indices = microbatch_indices(
                step=step,
                microbatch=microbatch,
                rank=rank,
                num_ranks=ranks,
                num_microbatches=config.train.num_microbatches,
                micro_batch_size=config.train.micro_batch_size,
            )
            tokens, labels, loss_mask, position_ids = (part.to(device) for part in batch(samples, indices))
            return tokens, labels, loss_mask, position_ids

        trainer = Trainer.build(config, device, batches)
        load = ExpertLoad(trainer.model, config.model.num_layers, config.model.num_experts, device)
        folder, done = config.run_folder / "checkpoints", 0
        if resume:
            shared = must_be_equal(config, prepared)
            done = on_rank_zero(lambda: checkpoint.newest(folder, shared, config.train.steps))
            checkpoint.load(folder, done, trainer.model, trainer.optimizer)
        progress = open_progress(config, done + 1)
        if not resume:
            on_rank_zero(lambda: checkpoint.clear(folder))
        return cls(config, device, prepared, trainer, load, done + 1, progress)

    def train(self) -> None:
        """Runs the remaining steps, writes checkpoints, then the report and the trace on rank 0."""
        config = self.config
        recorder = trace.Recorder(dist.get_rank(), self.device)
        recorded = config.traced_steps(self.first_step)
        total_load = torch.zeros(config.model.num_layers, config.model.num_experts)
        with self.progress or contextlib.nullcontext() as progress:
            for step in range(self.first_step, config.train.steps + 1):
                began = time.monotonic()
                with trace.recording(recorder if step in recorded else None), trace.span("step", "step", step=step):
                    loss = self.trainer.forward_backward(step)
                    grad_norm = self.trainer.update(step)
                load = self.load.take()
                total_load += load
                if progress is not None:
                    tokens_per_s = self._tokens_a_step / (time.monotonic() - began)
                    progress.step(Row(step, loss, grad_norm, tokens_per_s, imbalance(load)))
                if step % config.checkpoint.interval == 0 or step == config.train.steps:
                    self._save(step)
            self._finish(recorder, progress, total_load)

    def _save(self, step: int) -> None:
        trainer, keep = self.trainer, self.config.checkpoint.keep
        settings = must_be_equal(self.config, self.prepared)
        checkpoint.save(self._checkpoints, step, trainer.model, trainer.optimizer, keep=keep, settings=settings)

    @property
    def _checkpoints(self) -> Path:
        return self.config.run_folder / "checkpoints"

    @property
    def _tokens_a_step(self) -> int:
        train = self.config.train
        ranks = parallel_state.get_data_parallel_world_size()
        return train.num_microbatches * train.micro_batch_size * train.seq_length * ranks

    def _finish(self, recorder: trace.Recorder, progress: Progress | None, total_load: torch.Tensor) -> None:
        world = dist.get_world_size()
        events: list[Any] = [None] * world
        dist.all_gather_object(events, recorder.events())
        names: list[Any] = [None] * world
        dist.all_gather_object(names, self._rank_name())
        if progress is not None:
            folder = self.config.run_folder
            report.write_trace(folder / "trace.json", events, names)
            report.write_report(
                folder / "report.html",
                config=self.config.model_dump(),
                metrics=progress.rows,
                trace_events=events,
                expert_load=total_load.tolist(),
                versions=versions(self.device),
                names=names,
            )
            progress.finish(
                [folder / "report.html", folder / "trace.json", folder / "metrics.jsonl", self._checkpoints]
            )
        dist.barrier()

    def leave(self) -> None:
        """Gives up all communication; collective."""
        self.trainer.close()
        dist.destroy_process_group()

    @staticmethod
    def _rank_name() -> str:
        return (
            f"rank {dist.get_rank()} (pp {parallel_state.get_pipeline_model_parallel_rank()}, "
            f"ep {parallel_state.get_expert_model_parallel_rank()})"
        )


def open_progress(config: Config, first_step: int) -> Progress | None:
    """Screen and metrics on rank 0, None elsewhere; what is wrong with the folder is raised on all ranks."""
    path = config.run_folder / "metrics.jsonl"
    made: list[Progress] = []

    def make() -> None:
        try:
            made.append(Progress(path, total_steps=config.train.steps, start_step=first_step))
        except OSError as error:
            raise UsageError(
                f"run folder {str(path.parent)!r}: {error.strerror or error}",
                allowed="a folder that can be written",
                fix="change output or --name",
            ) from None

    on_rank_zero(make)
    return made[0] if made else None


def must_be_equal(config: Config, prepared: Prepared) -> dict[str, Any]:
    """What a run must share with the one it continues: the model, the data and its order. Layouts may differ."""
    train, ranks = config.train, parallel_state.get_data_parallel_world_size()
    return {
        "data": prepared.content_hash,
        **{f"model.{name}": value for name, value in config.model.model_dump().items()},
        **{f"train.{name}": getattr(train, name) for name in ("dtype", "seed", "seq_length")},
        "sequences a step": train.num_microbatches * train.micro_batch_size * ranks,
    }


def versions(device: torch.device) -> dict[str, str]:
    """What the run was made with, for the report."""
    return {
        "mt-moe": importlib.metadata.version("mt-moe") if _installed("mt-moe") else "source tree",
        "megatron-core": megatron_patch.megatron_version(),
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "device": str(device),
        "machine": f"{platform.system()} {platform.machine()}",
    }


def _installed(name: str) -> bool:
    try:
        importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True
