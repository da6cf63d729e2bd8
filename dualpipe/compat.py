"""The names of the `dualpipe` 1.0.0 package, with its meanings, over this package's executor.

    from dualpipe import DualPipe, DualPipeV, WeightGradStore, set_p2p_tensor_dtype, set_p2p_tensor_shapes

    set_p2p_tensor_shapes([(rows, hidden)])
    set_p2p_tensor_dtype(torch.float32)
    pipeline = DualPipeV((first, second))
    loss, outputs = pipeline.step(x, num_chunks=20, criterion=criterion, labels=(y,))

A program written for that package runs unchanged, on any device. These differ, all to the better: messages go over
groups of their own instead of the default group; waits are bounded; DualPipeV takes any number of chunks; wrong
arguments raise `UsageError` instead of an assertion. Shapes, dtype and the store of weight gradients are global here
as they are there; new code uses `dualpipe.Pipeline` and `dualpipe.weight_grad.WeightGradStore`, which are not.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from comm_core.runtime.errors import UsageError
from dualpipe.compat_stages import TupleStages
from dualpipe.delayed import delayed_in
from dualpipe.edges import Edge
from dualpipe.executor import Executor
from dualpipe.schedule import Schedule, build, forward_only

_shapes: list[tuple[int, ...]] | None = None
_dtype: torch.dtype | None = None


def set_p2p_tensor_shapes(shapes: Sequence[Sequence[int]]) -> None:
    """Sets the shapes of the tensors between two stages for one chunk, for every pipeline of this process."""
    global _shapes
    _shapes = [tuple(shape) for shape in shapes]


def set_p2p_tensor_dtype(dtype: torch.dtype) -> None:
    """Sets the dtype of these tensors."""
    global _dtype
    _dtype = dtype


class WeightGradStore:
    """Deferred weight gradients of the whole process.

    A layer's backward calls `put` with a closure that adds to `weight.grad` where `enabled` is True, and computes the
    gradient at once where it is False. The pipelines here run the closures of a chunk when the schedule says W; `flush`
    and `pop` are for pairs that do so by themselves.
    """

    enabled: bool = False
    cache: list[Callable[[], Any]] = []  # noqa: RUF012 - class state, as in the package this stands for
    funcs_queue: queue.Queue[list[Callable[[], Any]]] = queue.Queue()

    @classmethod
    def put(cls, func: Callable[[], Any]) -> None:
        """Adds a closure to the open chunk."""
        cls.cache.append(func)

    @classmethod
    def flush(cls) -> None:
        """Closes the open chunk and queues it."""
        cls.funcs_queue.put(cls.cache)
        cls.cache = []

    @classmethod
    def pop(cls) -> None:
        """Runs the closures of the oldest queued chunk.

        Raises:
            UsageError: no chunk is queued.
        """
        if cls.funcs_queue.empty():
            raise UsageError("WeightGradStore.pop()", allowed="one pop for each flush", fix="call flush() first")
        for func in cls.funcs_queue.get():
            func()

    @classmethod
    def clear(cls) -> None:
        """Forgets everything."""
        cls.cache = []
        cls.funcs_queue = queue.Queue()

    @classmethod
    def take(cls) -> list[Callable[[], Any]]:
        """Takes the open chunk out."""
        taken, cls.cache = cls.cache, []
        return taken


class _Pipe(nn.Module):
    """What `DualPipe` and `DualPipeV` share."""

    _schedule_name: str

    def __init__(
        self,
        modules: Sequence[nn.Module],
        batch_dim: int = 0,
        process_group: dist.ProcessGroup | None = None,
        rank_mapping: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        if len(modules) != 2:
            raise UsageError(f"{len(modules)} modules", allowed="two, one a phase", fix="pass a pair of modules")
        if any(isinstance(child, DistributedDataParallel) for module in modules for child in module.modules()):
            raise UsageError(
                "a module under DistributedDataParallel: it would reduce the gradients of the first chunk alone",
                allowed="plain modules",
                fix="reduce the gradients after the step, or use dualpipe.Pipeline, which reduces at the last W",
            )
        if process_group is None and dist.is_initialized():
            process_group = dist.group.WORLD
        self.module = nn.ModuleList(modules)
        self.batch_dim = batch_dim
        self.group = process_group
        self.num_ranks = 1 if process_group is None else dist.get_world_size(process_group)
        group_rank = 0 if process_group is None else dist.get_rank(process_group)
        self.rank_mapping = list(range(self.num_ranks) if rank_mapping is None else rank_mapping)
        if sorted(self.rank_mapping) != list(range(self.num_ranks)):
            raise UsageError(
                f"rank_mapping {self.rank_mapping}",
                allowed=f"each of 0 to {self.num_ranks - 1} once: the place in the pipeline of each rank of the group",
                fix="correct it, or leave it out",
            )
        self.rank = self.rank_mapping[group_rank]
        self.is_first_rank, self.is_last_rank = self.rank == 0, self.rank == self.num_ranks - 1
        same_type = type(modules[0]) is type(modules[1])
        self._hook = getattr(type(modules[0]), "overlapped_forward_backward", None) if same_type else None
        self.overlapped_forward_backward = self._hook is not None
        self._executor: Executor | None = None
        # The sizes are checked here, so that a mistake shows before the first step.
        self._stage_keys = build(self._schedule_name, self.num_ranks, 2 * self.num_ranks).stages_of(self.rank)

    def _start(self) -> Executor:
        """The executor, made at the first step: its groups are made by all ranks together."""
        if self._executor is None:
            parameter = next(self.parameters(), None)
            device = None if parameter is None else parameter.device
            self._executor = Executor(self.group, device=device, rank_mapping=self.rank_mapping)
            for delayed in delayed_in(self.module):
                self._executor.store.watch(delayed)
        return self._executor

    def step(
        self,
        *inputs: Tensor | None,
        num_chunks: int = 0,
        criterion: Callable[..., Tensor] | None = None,
        labels: Tensor | Sequence[Tensor | None] | None = (),
        return_outputs: bool = False,
    ) -> tuple[Tensor | None, Tensor | tuple[Tensor, ...] | None]:
        """One training step, or inference under `torch.no_grad()`.

        Args:
            inputs: arguments of stage 0 for the whole batch, on ranks that hold a stage 0 (DualPipe: the first and the
                last rank, half of the chunks each; DualPipeV: the first rank). Ignored elsewhere.
            num_chunks: microbatches of the step; the batch is split along batch_dim.
            criterion: `criterion(*outputs, *labels) -> scalar`, on ranks that hold a last stage.
            labels: arguments of the criterion for the whole batch. In DualPipe the labels on one end belong to the
                inputs given on the other end.
            return_outputs: also return the outputs of the model.

        Returns:
            (loss, outputs): loss (chunks of this rank,), outputs concatenated along batch_dim, a tuple where the model
            has several; each None on ranks without a last stage, or if not asked for. Gradients are summed over chunks.
        """
        inference = not torch.is_grad_enabled()
        schedule = build(self._schedule_name, self.num_ranks, num_chunks, allow_few=True)
        edge, shapes = self._edge()
        last = schedule.num_stages - 1
        stages = TupleStages(
            dict(zip(self._stage_keys, self.module, strict=True)),
            num_stages=schedule.num_stages,
            shapes=shapes,
            edge=edge,
            inputs=self._chunks(inputs, schedule, stage=0),
            labels=self._chunks((labels,) if isinstance(labels, Tensor) else labels or (), schedule, stage=last),
            criterion=criterion,
            keep_outputs=return_outputs,
        )
        if criterion is None and not inference and any(key.stage == last for key in self._stage_keys):
            raise UsageError("criterion None", allowed="a loss function on this rank", fix="pass criterion=")
        executor = self._start()
        stages.defer_to(executor.store, WeightGradStore)
        if self._hook is not None:
            stages.pair_with(self._hook)
        try:
            executor.run(forward_only(schedule) if inference else schedule, stages)
        finally:
            WeightGradStore.enabled = False
            WeightGradStore.cache = []
        losses = [stages.losses[chunk] for chunk in sorted(stages.losses)]
        outputs = [stages.outputs[chunk] for chunk in sorted(stages.outputs)]
        whole = tuple(torch.cat(parts, self.batch_dim) for parts in zip(*outputs, strict=True))
        return torch.stack(losses) if losses else None, (whole[0] if len(whole) == 1 else whole) if whole else None

    def _edge(self) -> tuple[Edge, list[tuple[int, ...]]]:
        if _shapes is None or _dtype is None:
            raise UsageError(
                "a step without the shapes and the dtype of what goes between stages",
                allowed="both set",
                fix="call set_p2p_tensor_shapes and set_p2p_tensor_dtype first",
            )
        parameter = next(self.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        if len(_shapes) == 1:
            return Edge(_shapes[0], _dtype, device), _shapes
        # Several tensors travel as one.
        return Edge((sum(torch.Size(shape).numel() for shape in _shapes),), _dtype, device), _shapes

    def _chunks(
        self, tensors: Sequence[Tensor | None], schedule: Schedule, *, stage: int
    ) -> dict[int, list[Tensor | None]]:
        """What this rank was given for its stage `stage`, by microbatch."""
        direction = next((key.direction for key in self._stage_keys if key.stage == stage), None)
        if direction is None:
            return {}
        share = schedule.microbatches_of(direction)
        parts = [
            [None] * len(share) if tensor is None else tensor.tensor_split(len(share), dim=self.batch_dim)
            for tensor in tensors
        ]
        return {chunk: [part[i] for part in parts] for i, chunk in enumerate(share)}

    def close(self) -> None:
        """Gives the pipeline's own groups back."""
        if self._executor is not None:
            self._executor.close()


class DualPipe(_Pipe):
    """Two copies of the model, one in each direction.

    Each copy of a stage gets the gradients of its half of the chunks; those of the whole batch, on both:
    `dualpipe.add_mirrored_gradients(pipe.module, group=pipe.group, rank_mapping=pipe.rank_mapping)`.

    Args:
        modules: this rank's stages: stage r, and stage P-1-r of the other direction.
        batch_dim: dimension that is split in chunks.
        process_group: the ranks of the pipeline; the default group by default.
        rank_mapping: `rank_mapping[rank in the group]` is the rank's place in the pipeline.

    Raises:
        UsageError: an odd number of ranks.
    """

    _schedule_name = "dualpipe"


class DualPipeV(_Pipe):
    """One copy of the model, folded to a V; the arguments are those of `DualPipe`, with stages r and 2P-1-r."""

    _schedule_name = "dualpipev"
