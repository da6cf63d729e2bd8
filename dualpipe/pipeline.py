"""A pipeline over plain modules: give each rank its stages, call `step`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn

from comm_core.runtime.errors import UsageError
from dualpipe import data_parallel
from dualpipe.actions import StageKey
from dualpipe.edges import Form, Value, tensors_of
from dualpipe.executor import Executor, RunStats
from dualpipe.module_stages import Criterion, EdgeOf, ModuleStages
from dualpipe.replicas import add_mirrored_gradients
from dualpipe.schedule import BackwardSplit, Schedule, build, forward_only
from dualpipe.split_modules import SplitWeightGrads


def stages_of_rank(
    schedule: str, num_ranks: int, rank: int, stages_per_rank: int | None = None
) -> tuple[StageKey, ...]:
    """The stages that `rank` must hold, in the order in which `Pipeline` takes their modules.

    dualpipev, zbv: stages r and 2P-1-r; dualpipe: stage r of direction 0 and stage P-1-r of direction 1; interleaved:
    stages r, P+r, 2P+r, ... (`stages_per_rank` of them, 2 by default); the others: stage r.
    """
    return build(schedule, num_ranks, 2 * num_ranks, stages_per_rank=stages_per_rank).stages_of(rank)


class Pipeline:
    """Trains or evaluates a model whose stages lie on the ranks of a group.

        pipeline = Pipeline([first, second], schedule="dualpipev", edge_shape=(microbatch, hidden))
        loss, _ = pipeline.step(x, num_microbatches=8, criterion=criterion, labels=[y])

    Gradients are the sum over microbatches, in `parameter.grad`; scale the criterion for a mean.

    Args:
        modules: this rank's stages, in the order of `stages_of_rank`; plain, or under DistributedDataParallel, whose
            gradients are then reduced once a step (`data_parallel`).
        schedule: a name of `dualpipe.schedule.SCHEDULES`.
        stages_per_rank: stages a rank of the interleaved schedules.
        group: the pipeline's ranks in order; the default group, or a single process without one, by default.
        edge_shape: shape of the tensor between two stages for one microbatch, or a list of shapes where stages return
            tuples; or a function (payload, stage key, microbatch) -> what `StagePrograms.edge` returns. Without it
            shapes and dtypes may be any, and differ from microbatch to microbatch and from step to step: the ranks
            tell each other (`hops`), which costs one small message between hosts for each activation.
        edge_dtype: dtype of that tensor, or a list of dtypes.
        device: where tensors live; the device of the first parameter by default.
        batch_dim: dimension of inputs and labels that is split in microbatches.
        backward_split: defer the weight gradients of nn.Linear as the schedule says; "before_cooldown" keeps none for
            the end of the step, False runs full backwards.
        timeout: bound of every wait.

    With `dualpipe` the two ranks that hold the same stage each see half of the microbatches: call
    `add_mirrored_gradients` after each step.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        schedule: str = "dualpipev",
        stages_per_rank: int | None = None,
        group: dist.ProcessGroup | None = None,
        edge_shape: Sequence[int] | Sequence[Sequence[int]] | EdgeOf | None = None,
        edge_dtype: torch.dtype | Sequence[torch.dtype] = torch.float32,
        device: torch.device | None = None,
        batch_dim: int = 0,
        backward_split: bool | BackwardSplit = True,
        timeout: timedelta | None = None,
    ) -> None:
        if group is None and dist.is_initialized():
            group = dist.group.WORLD
        num_ranks = 1 if group is None else dist.get_world_size(group)
        rank = 0 if group is None else dist.get_rank(group)
        keys = stages_of_rank(schedule, num_ranks, rank, stages_per_rank)
        if len(modules) != len(keys):
            raise UsageError(
                f"{len(modules)} modules on rank {rank}",
                allowed=f"{len(keys)} for {schedule}",
                fix="pass one module a stage",
            )
        parameter = next((p for module in modules for p in module.parameters()), None)
        self.device = device or (torch.device("cpu") if parameter is None else parameter.device)
        self._edge = _edge_of(edge_shape, edge_dtype, self.device)
        self._modules = dict(zip(keys, modules, strict=True))
        self._name, self._stages_per_rank = schedule, stages_per_rank
        self._group, self._timeout = group, timeout
        self._split, self._batch_dim = backward_split, batch_dim
        self._schedules: dict[tuple[int, bool], Schedule] = {}
        self._executor = Executor(group, timeout=timeout, device=self.device)
        self._patches: list[SplitWeightGrads] = []
        try:
            data_parallel.refuse_unsupported(modules)
            whole = backward_split in (False, "never")
            for module in modules:
                self._patches.append(SplitWeightGrads(module, self._executor.store, whole=whole))
        except UsageError:
            self._revert()
            self._executor.close(abort=True)
            raise
        self.stats = RunStats(peak_live=0)

    def _schedule(self, num_microbatches: int, inference: bool) -> Schedule:
        key = num_microbatches, inference
        if key not in self._schedules:
            schedule = build(
                self._name,
                self._executor.num_ranks,
                num_microbatches,
                backward_split=True if inference else self._split,
                stages_per_rank=self._stages_per_rank,
                allow_few=True,
            )
            self._schedules[key] = forward_only(schedule) if inference else schedule
        return self._schedules[key]

    def step(
        self,
        *inputs: Tensor,
        num_microbatches: int,
        criterion: Criterion | None = None,
        labels: Sequence[Tensor] = (),
        return_outputs: bool = False,
    ) -> tuple[Tensor | None, Value | None]:
        """One pass over all microbatches; under `torch.no_grad()` the forwards alone.

        Args:
            inputs: (batch, ...) arguments of stage 0, on the ranks that hold a stage 0: rank 0; with dualpipe the
                first and the last rank, each half of the microbatches.
            num_microbatches: microbatches of the whole step.
            criterion: `criterion(output, *labels) -> scalar`, on the ranks that hold a last stage.
            labels: (batch, ...) arguments of the criterion, there. With dualpipe those on rank 0 belong to the inputs
                given on the last rank, and the other way round.
            return_outputs: also return the model's output.

        Returns:
            (loss, outputs): loss (microbatches on this rank,) in their order, and outputs (batch, ...), a tuple where
            the model returns one; each None on ranks without a last stage, loss also without criterion, outputs also
            if not asked for.
        """
        inference = not torch.is_grad_enabled()
        schedule = self._schedule(num_microbatches, inference)
        try:
            stages = ModuleStages(
                self._modules,
                num_stages=schedule.num_stages,
                edge=self._edge,
                inputs=self._microbatches("inputs", inputs, schedule, stage=0),
                labels=self._microbatches("labels", labels, schedule, stage=schedule.num_stages - 1),
                criterion=criterion,
                keep_outputs=return_outputs,
            )
            if criterion is None and not inference and self._holds(schedule.num_stages - 1):
                raise UsageError("criterion None", allowed="a loss function", fix="pass criterion=, or use no_grad")
        except UsageError:
            self._executor.close(abort=True)  # peers of this rank fail at once instead of waiting for it
            raise
        self.stats = self._executor.run(schedule, stages)
        loss = torch.stack([stages.losses[i] for i in sorted(stages.losses)]) if stages.losses else None
        kept = [stages.outputs[i] for i in sorted(stages.outputs)]
        whole = tuple(torch.cat(parts, self._batch_dim) for parts in zip(*map(tensors_of, kept), strict=True))
        return loss, None if not kept else whole[0] if isinstance(kept[0], Tensor) else whole

    def add_mirrored_gradients(self) -> None:
        """With `dualpipe` makes gradients those of the whole batch (see `replicas`); nothing to do with the others.

        Collective over the group. Call it once after each training step.
        """
        if self._name == "dualpipe":
            modules = list(self._modules.values())
            add_mirrored_gradients(modules, group=self._group, timeout=self._timeout)

    def _holds(self, stage: int) -> bool:
        return any(key.stage == stage for key in self._modules)

    def _microbatches(
        self, what: str, tensors: Sequence[Tensor], schedule: Schedule, *, stage: int
    ) -> Mapping[int, Sequence[Tensor]]:
        """Splits what this rank was given for its stage `stage` over the microbatches of that stage's direction."""
        direction = next((key.direction for key in self._modules if key.stage == stage), None)
        if direction is None:
            if tensors:
                raise UsageError(f"{len(tensors)} {what}", allowed="none on this rank", fix=f"pass {what} elsewhere")
            return {}
        if what == "inputs" and not tensors:
            raise UsageError("no inputs", allowed="inputs on a rank with stage 0", fix="pass the batch to step()")
        share = schedule.microbatches_of(direction)
        for tensor in tensors:
            if tensor.shape[self._batch_dim] < len(share):
                raise UsageError(
                    f"{what} with {tensor.shape[self._batch_dim]} samples for {len(share)} microbatches",
                    allowed="at least one sample a microbatch",
                    fix="use a larger batch or fewer microbatches",
                )
        parts = [tensor.tensor_split(len(share), dim=self._batch_dim) for tensor in tensors]
        return {microbatch: [part[i] for part in parts] for i, microbatch in enumerate(share)}

    def close(self) -> None:
        """Restores the modules' own forwards and gives the groups back."""
        self._revert()
        self._executor.close()

    def _revert(self) -> None:
        for patch in self._patches:
            patch.revert()

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _edge_of(
    shape: Sequence[int] | Sequence[Sequence[int]] | EdgeOf | None,
    dtype: torch.dtype | Sequence[torch.dtype],
    device: torch.device,
) -> EdgeOf | None:
    if shape is None or callable(shape):
        return shape
    form = Form.fixed(shape, dtype, device)
    return lambda payload, key, microbatch: form.edges[0] if form.bare else form.edges
