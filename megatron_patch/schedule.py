"""DualPipeV as Megatron's forward-backward function.

    schedule = PipelineSchedule("dualpipev")
    losses = schedule(forward_step_func=..., data_iterator=[...], model=[chunk0, chunk1], num_microbatches=..., ...)

An instance takes the place of what `get_forward_backward_func()` returns. The model is a list of two chunks in the V
placement (`megatron_patch.placement`). The executor of `dualpipe` runs the action list; this file only says what a
forward and a backward are in Megatron, and keeps the rest of Megatron's contract: loss scaling, token counts, gradient
synchronisation for the last microbatch of each chunk, finalising gradients once. Import after `megatron_patch.apply()`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.pipeline_parallel import schedules as stock
from megatron.core.utils import get_attr_wrapped_model, get_model_config
from torch.autograd.graph import GradientEdge, get_gradient_edge

from comm_core.runtime.errors import UsageError
from dualpipe.actions import Payload, StageKey
from dualpipe.delayed import delayed_in, refuse_undelayed
from dualpipe.edges import Edge
from dualpipe.executor import Executor
from dualpipe.schedule import Schedule, build, forward_only
from dualpipe.weight_grad import Delayed
from megatron_patch import weight_grad


@dataclass(slots=True)
class _Programs:
    """What the stages of one rank compute during one call (dualpipe's StagePrograms)."""

    forward_step_func: Callable[..., Any]
    iterators: Sequence[Iterator[Any] | None]
    chunks: Sequence[Any]
    schedule: Schedule
    config: Any
    shape: tuple[int, ...]
    device: torch.device
    cp_size: int
    no_syncs: Sequence[Callable[[], AbstractContextManager[Any]]]
    collect_non_loss_data: bool
    first_val_step: bool | None
    losses: list[Any] = field(default_factory=list)
    num_tokens: Any = 0

    def _chunk(self, key: StageKey) -> int:
        return 0 if key.stage < self.schedule.num_ranks else 1

    def forward(self, key: StageKey, microbatch: int, input: torch.Tensor | None) -> torch.Tensor:
        """One chunk's forward step; on the last stage the loss, divided by the number of microbatches."""
        chunk = self._chunk(key)
        last = key.stage == self.schedule.num_stages - 1
        output, num_tokens = stock.forward_step(
            self.forward_step_func,
            self.iterators[chunk],
            self.chunks[chunk],
            self.schedule.num_microbatches,
            input,
            self.losses,
            self.config,
            self.cp_size,
            collect_non_loss_data=self.collect_non_loss_data,
            is_first_microbatch=stock.check_first_val_step(
                self.first_val_step, self.schedule.forward_only, microbatch == 0
            ),
            current_microbatch=microbatch,
            vp_stage=chunk,
            is_last_stage=last,
        )
        if last:
            self.num_tokens = self.num_tokens + num_tokens
        result: torch.Tensor = output
        return result

    def after_forward(self, key: StageKey, microbatch: int, output: torch.Tensor) -> torch.Tensor | GradientEdge:
        """Where the gradient enters the graph, so that the output's memory is free when it is sent."""
        return get_gradient_edge(output) if output.requires_grad else output

    def backward(
        self,
        key: StageKey,
        microbatch: int,
        input: torch.Tensor | None,
        output: torch.Tensor | GradientEdge | None,
        output_grad: torch.Tensor | None,
    ) -> torch.Tensor | None:
        """One chunk's backward for inputs; the loss is scaled by the optimizer's function on the last stage."""
        if isinstance(output, GradientEdge):
            return _backward_from(output, input, output_grad, self.config)
        arguments: list[Any] = [input, output, output_grad]
        if _BACKWARD_TAKES_MODEL_TYPE:
            arguments.append(getattr(self.config, "model_type", None))
        gradient: torch.Tensor | None = stock.backward_step(*arguments, self.config)
        return gradient

    def no_sync(self, key: StageKey) -> AbstractContextManager[Any]:
        """Keeps the chunk's gradient hooks from communicating."""
        return self.no_syncs[self._chunk(key)]()

    def edge(self, payload: Payload, key: StageKey, microbatch: int) -> Edge:
        """All hops carry [sequence, microbatch, hidden] in the pipeline's dtype."""
        return Edge(self.shape, self.config.pipeline_dtype, self.device)


def _backward_from(
    edge: GradientEdge, input: torch.Tensor | None, output_grad: torch.Tensor | None, config: Any
) -> torch.Tensor | None:
    """Megatron's backward_step for a stage without a loss. That one reads a property of the output tensor itself."""
    if config.timers is not None:
        config.timers("backward-compute", log_level=2).start()
    torch.autograd.backward(edge, grad_tensors=output_grad)
    if config.timers is not None:
        config.timers("backward-compute").stop()
    return None if input is None else input.grad


_BACKWARD_TAKES_MODEL_TYPE = "model_type" in inspect.signature(stock.backward_step).parameters
"""megatron-core 0.16 passes the model type to backward_step; later versions do not."""


class PipelineSchedule:
    """A forward-backward function for Megatron that runs a bidirectional schedule over the V placement.

    Args:
        name: schedule to run; "dualpipev".
        split_weight_grad: run I and W apart where the schedule says so. Megatron's own linears defer their weight
            gradients after `megatron_patch.apply(split_weight_grad=True)`; without it these are part of I. Modules with
            `delay_wgrad_compute` (Transformer Engine's, MTMoELayer) have their `backward_dw` done at W in any case.
        group: pipeline ranks; Megatron's pipeline group by default.

    Attributes:
        peak_live: largest number of stage activations this rank held in the last call.

    Private process groups are made at the first call, which is collective, as is close().
    """

    def __init__(
        self, name: str = "dualpipev", *, split_weight_grad: bool = True, group: dist.ProcessGroup | None = None
    ) -> None:
        if name != "dualpipev":
            raise UsageError(
                f"schedule {name!r}", allowed="dualpipev", fix="use Megatron's own function for 1f1b and interleaved"
            )
        self.name = name
        self.peak_live = 0
        self._split = split_weight_grad
        self._group = group
        self._executor: Executor | None = None
        self._watched: list[int] = []
        self._delayed: list[Delayed] = []
        self._schedules: dict[tuple[int, bool], Schedule] = {}

    def __call__(
        self,
        *,
        forward_step_func: Callable[..., Any],
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        first_val_step: bool | None = None,
        force_all_reduce: bool | None = False,
        pg_collection: Any = None,
        **unused: Any,
    ) -> list[Any]:
        """Runs one step; arguments and result as Megatron's `forward_backward_func`.

        Returns:
            One entry a microbatch from the loss function, on the rank that owns the loss (pipeline rank 0); else [].

        Raises:
            UsageError: the model is not two chunks, there are too few microbatches for the schedule, or a module of
                Transformer Engine was built without `delay_wgrad_compute` while I and W run apart.
        """
        chunks, iterators = _as_chunks(model, data_iterator)
        config = get_model_config(chunks[0])
        _refuse_unsupported(config, chunks, unused)
        group = self._group or parallel_state.get_pipeline_model_parallel_group()
        schedule = self._schedule(group.size(), num_microbatches, forward_only)
        device = next(chunks[0].parameters()).device
        if self._executor is None:
            self._executor = Executor(group, store=weight_grad.STORE, device=device)
        self._watch(chunks)
        cp_size = parallel_state.get_context_parallel_world_size()
        programs = _Programs(
            forward_step_func=forward_step_func,
            iterators=iterators,
            chunks=chunks,
            schedule=schedule,
            config=config,
            shape=(_local_sequence(seq_length, cp_size, config), micro_batch_size, config.hidden_size),
            device=device,
            cp_size=cp_size,
            no_syncs=_no_syncs(config, len(chunks)),
            collect_non_loss_data=collect_non_loss_data,
            first_val_step=first_val_step,
        )
        with _timer(config), torch.no_grad() if forward_only else contextlib.nullcontext():
            self.peak_live = self._executor.run(schedule, programs).peak_live
            if not forward_only and config.finalize_model_grads_func is not None:
                _finalize(config, chunks, programs.num_tokens, group, device, pg_collection, force_all_reduce)
        return programs.losses

    def _watch(self, chunks: list[Any]) -> None:
        """Takes over what modules of these chunks leave to `backward_dw` (delay_wgrad_compute)."""
        if self._watched == [id(chunk) for chunk in chunks]:
            return
        for chunk in chunks if self._split else ():
            refuse_undelayed(chunk)
        self._unwatch()
        self._delayed = [found for chunk in chunks for found in delayed_in(chunk)]
        for delayed in self._delayed:
            weight_grad.STORE.watch(delayed)
        self._watched = [id(chunk) for chunk in chunks]

    def _unwatch(self) -> None:
        for delayed in self._delayed:
            weight_grad.STORE.unwatch(delayed)
        self._delayed, self._watched = [], []

    def _schedule(self, num_ranks: int, num_microbatches: int, no_backward: bool) -> Schedule:
        key = (num_microbatches, no_backward)
        if key not in self._schedules:
            schedule = build(self.name, num_ranks, num_microbatches, backward_split=self._split)
            self._schedules[key] = forward_only(schedule) if no_backward else schedule
        return self._schedules[key]

    def close(self) -> None:
        """Gives the private process groups back; collective, harmless when repeated."""
        self._unwatch()
        if self._executor is not None:
            self._executor.close()
            self._executor = None


def _as_chunks(model: Any, data_iterator: Any) -> tuple[list[Any], list[Any]]:
    chunks = list(model) if isinstance(model, list | tuple) else [model]
    iterators = list(data_iterator) if isinstance(data_iterator, list | tuple) else [data_iterator] * len(chunks)
    if len(chunks) != 2 or len(iterators) != 2:
        raise UsageError(
            f"{len(chunks)} model chunks and {len(iterators)} data iterators",
            allowed="two chunks, each with its own iterator (the V placement)",
            fix="build with VLayout and virtual_pipeline_model_parallel_size=2, and pass lists",
        )
    return chunks, iterators


def _refuse_unsupported(config: Any, chunks: list[Any], unused: dict[str, Any]) -> None:
    # Megatron makes a second, zeroed copy on the chunk with the loss and sums it over ranks that the V does not have.
    if any(get_attr_wrapped_model(chunk, "share_embeddings_and_output_weights") for chunk in chunks):
        raise UsageError(
            "share_embeddings_and_output_weights=True with DualPipeV",
            allowed="False (untied embedding and output layer)",
            fix="build GPTModel with share_embeddings_and_output_weights=False",
        )
    if getattr(config, "mtp_num_layers", None):
        raise UsageError(
            f"mtp_num_layers={config.mtp_num_layers} with DualPipeV",
            allowed="None (its copy of the embedding would not be kept equal)",
            fix="leave multi-token prediction out",
        )
    if getattr(config, "variable_seq_lengths", False):
        raise UsageError("variable_seq_lengths=True with DualPipeV", allowed="False", fix="pad to one sequence length")
    if unused.get("adjust_tensor_shapes_fn") is not None:
        raise UsageError(
            "adjust_tensor_shapes_fn with DualPipeV", allowed="None", fix="use Megatron's own schedule for such models"
        )
    if config.deallocate_pipeline_outputs:
        raise UsageError(
            "deallocate_pipeline_outputs=True with DualPipeV",
            allowed="False (outputs are handed over in memory at the turn of the V)",
            fix="set it to False",
        )


def _local_sequence(seq_length: int, cp_size: int, config: Any) -> int:
    length = seq_length // cp_size
    return length // config.tensor_model_parallel_size if config.sequence_parallel else length


def _no_syncs(config: Any, num_chunks: int) -> list[Callable[[], AbstractContextManager[Any]]]:
    functions = config.no_sync_func
    if functions is None:
        return [contextlib.nullcontext] * num_chunks
    return list(functions) if isinstance(functions, list | tuple) else [functions] * num_chunks


@contextlib.contextmanager
def _timer(config: Any) -> Iterator[None]:
    if config.timers is None:
        yield
        return
    config.timers("forward-backward", log_level=1).start(barrier=config.barrier_with_L1_time)
    yield
    config.timers("forward-backward").stop()


def _finalize(
    config: Any,
    chunks: list[Any],
    num_tokens: Any,
    group: dist.ProcessGroup,
    device: torch.device,
    pg_collection: Any,
    force_all_reduce: bool | None,
) -> None:
    tokens = None
    if config.calculate_per_token_loss:
        tokens = torch.as_tensor(num_tokens, dtype=torch.int, device=device).reshape(())
        # Megatron reads the count from the last pipeline rank; in the V only the first one knows it.
        dist.all_reduce(tokens, group=group)
    optional = {"pg_collection": pg_collection, "force_all_reduce": force_all_reduce}
    parameters = inspect.signature(config.finalize_model_grads_func).parameters
    anything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
    chosen = {name: value for name, value in optional.items() if value and (anything or name in parameters)}
    config.finalize_model_grads_func(chunks, tokens, **chosen)
