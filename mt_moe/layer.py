"""MoELayer: router, dispatch, experts, combine and shared expert, in plain torch.

    router -> prepare -> launch dispatch -> shared expert -> wait -> experts -> launch combine -> wait -> add

The shared expert runs while the rows travel, in forward and in backward (`functional` says why). The layer is the same
code on one process and on many; only the group differs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

from comm_core import ElasticBuffer
from comm_core.runtime import device as devices
from comm_core.runtime import env
from comm_core.runtime.errors import UsageError
from mt_moe import memory
from mt_moe.aliases import fan_out
from mt_moe.config import MoEConfig
from mt_moe.dispatcher import Dispatched, Dispatcher
from mt_moe.expert_linear import Defer
from mt_moe.experts import Experts
from mt_moe.fp8_cast import travel_casts
from mt_moe.latent import LatentProjection
from mt_moe.routed import Journey
from mt_moe.router import Router
from mt_moe.shared_experts import SharedExperts
from mt_moe.weight_gradients import HeldWeightGradients


class MoELayer(nn.Module):
    """A mixture-of-experts layer whose experts are spread over the ranks of one group. Building it is collective.

    Parameters: `router.weight`, `experts.fc1`, `experts.fc2`, with a shared expert `shared.fc1`, `shared.fc2`
    (and `shared.gate`), with a latent width `latent.down`, `latent.up`.
    Initial weights depend on `config.seed`, their name, `layer_number` and the global expert number alone, so the same
    layer starts alike under any number of ranks.

        with MoELayer(config) as layer:       # one process; under torchrun pass group= or buffer=
            y = layer(x)

    Args:
        config: sizes and rules.
        group: the ranks that share the experts; the layer makes a buffer on it and closes it. With neither group nor
            buffer the default group is taken, or, in a process that was not started with others, a group of one that
            `close` removes.
        buffer: a buffer made by the caller, which stays the caller's to close. Layers may share one.
        layer_number: tells the initial weights of several layers apart.
        dtype: of the weights.
        device: of weights and tokens; the buffer's by default, which follows its group's torch.distributed backend.

    Raises:
        UsageError: group and buffer together, experts that the ranks do not divide, several processes without a group.
    """

    def __init__(
        self,
        config: MoEConfig,
        *,
        group: dist.ProcessGroup | None = None,
        buffer: ElasticBuffer | None = None,
        layer_number: int = 0,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if group is not None and buffer is not None:
            raise UsageError("group and buffer", allowed="one of them", fix="leave group out: the buffer has its own")
        num_ranks = buffer.num_ranks if buffer is not None else dist.get_world_size(group) if _has_group() else 1
        if config.num_experts % num_ranks:
            raise UsageError(
                f"num_experts = {config.num_experts} on {num_ranks} ranks",
                allowed=f"a multiple of {num_ranks}",
                fix="choose a number of ranks that divides the experts",
            )
        kind = "cpu" if device is None else torch.device(device).type
        self._owns_group = buffer is None and not _has_group() and _make_group_of_one(kind)
        self._owns_buffer = buffer is None
        self.buffer = ElasticBuffer(group, device=device) if buffer is None else buffer
        self.config = config
        self.dispatcher = Dispatcher(
            self.buffer,
            config.num_experts,
            config.expert_alignment,
            max_tokens_per_rank=config.data_path.tokens_a_chunk,
            num_sms=config.data_path.comm_sms,
        )
        self.dispatcher.cast, self.dispatcher.grad_cast = travel_casts(config.recipe)
        where = self.buffer.device if device is None else torch.device(device)
        num_local = config.num_experts // self.buffer.num_ranks
        prefix = f"layers.{layer_number}"
        self.router = Router(config, name=f"{prefix}.router", dtype=dtype, device=where, rank=self.buffer.rank)
        self.experts = Experts(
            replace(config, hidden=config.latent, latent=0) if config.latent else config,
            first_expert=self.buffer.rank * num_local,
            num_local_experts=num_local,
            name=f"{prefix}.experts",
            dtype=dtype,
            device=where,
        )
        self.held_weight_gradients = HeldWeightGradients()
        self._defer: Defer | None = None
        self.shared = None
        if config.shared_ffn:
            self.shared = SharedExperts(config, name=f"{prefix}.shared", dtype=dtype, device=where)
        self.latent = None
        if config.latent:
            self.latent = LatentProjection(config, name=f"{prefix}.latent", dtype=dtype, device=where)

    def forward(
        self,
        x: Tensor,
        *,
        token_mask: Tensor | None = None,
        aux_losses: list[Tensor] | None = None,
        defer: Defer | None = None,
    ) -> Tensor:
        """Every token through its experts and the shared expert. Collective: every rank calls it, with any tokens.

        Computes in the dtype of the weights, under autocast too.

        Args:
            x: [..., hidden] in the dtype of the weights; any leading shape, also without tokens.
            token_mask: bool, the leading shape of x; a token with False meets no routed expert.
            aux_losses: takes the router's losses (scalars), to be added to the loss; needed in training where
                `aux_loss_coefficient` or `z_loss_coefficient` is set. The next to last dimension of x is the sequence.
            defer: takes the weight gradients of experts and latent projection out of backward; see `expert_mlp`.

        Returns:
            [..., hidden] in the dtype of x.

        Raises:
            UsageError: a last dimension other than hidden, another dtype than the weights', a mask of another shape, a
                balance loss with no place to go.
        """
        self._check(x, token_mask, aux_losses)
        if torch.is_autocast_enabled(x.device.type):  # it would round logits, and forward unlike backward
            with torch.autocast(x.device.type, enabled=False):
                return self.forward(x, token_mask=token_mask, aux_losses=aux_losses, defer=defer)
        tokens = x.reshape(-1, self.config.hidden)
        mask = None if token_mask is None else token_mask.reshape(-1)
        defer = defer or self._defer
        # The order of the aliases is the order in which their gradients are added.
        to_dispatch, to_router, to_shared = fan_out(tokens, 3)
        routing = self.router(to_router, mask)
        journey = Journey(self.dispatcher, self.config.data_path, routing.topk_idx)
        if aux_losses is not None and self.config.has_losses:
            num_sequences = max(1, tokens.shape[0] // x.shape[-2]) if x.dim() > 1 and x.shape[-2] else 1
            group = self.buffer.group
            aux_losses += self.router.losses(routing, num_sequences=num_sequences, token_mask=mask, group=group)
        sent = to_dispatch if self.latent is None else self.latent.narrow(to_dispatch, defer=defer)
        journey.launch(sent, routing.topk_weights)
        shared = None if self.shared is None else self.shared(to_shared, defer=defer)
        y = journey.finish(self._on_rows, (self.experts.fc1, self.experts.fc2), defer)
        if self.latent is not None:
            y = self.latent.widen(y, defer=defer)
        return (y if shared is None else y + shared).view(x.shape)

    def defer_weight_grads(self, defer: Defer | None) -> None:
        """Sets what `forward` takes as `defer` where it is given none: how a pipeline splits its stages' backward."""
        self._defer = defer

    def backward_dw(self) -> None:
        """Computes the weight gradients of calls made with `defer=layer.held_weight_gradients.put`."""
        self.held_weight_gradients.run()

    def memory_report(self, num_tokens: int, *, num_rows: int | None = None, microbatches: int = 1) -> str:
        """A table of what this layer keeps for backward, and would keep with other choices of `DataPath`.

        Args:
            num_tokens: of this rank.
            num_rows: rows of its experts; by default those of an even load, or of the worst case where shapes are.
            microbatches: in flight at once.
        """
        config = self.config
        if num_rows is None:
            num_rows = num_tokens * config.num_topk
            bound, local = config.data_path.max_tokens_per_rank, config.num_experts // self.buffer.num_ranks
            if bound:
                num_rows = bound * self.buffer.num_ranks * min(config.num_topk, local)
        return memory.table(memory.choices(config, num_tokens, num_rows, self.experts.fc1.dtype), microbatches)

    def _on_rows(self, arrived: Dispatched, *, defer: Defer | None, rows_again: Callable[[], Tensor] | None) -> Tensor:
        """The experts on the rows that have arrived."""
        found: Tensor = self.experts(
            arrived.rows,
            arrived.counts,
            arrived.row_weights,
            defer=defer,
            ends=arrived.ends,
            rows_again=rows_again,
            quantised=arrived.quantised,
        )
        return found

    @torch.no_grad()
    def update_expert_bias(self, group: dist.ProcessGroup | None = None) -> None:
        """Moves the router's bias by the tokens routed in training since the last call, and starts counting anew.

        Collective. Call it once an optimizer step; "global_aux_loss" counts from one call to the next as well.

        Args:
            group: all ranks whose tokens this router sees; the ranks of the buffer by default.
        """
        counts = self.router.tokens_per_expert.clone()
        dist.all_reduce(counts, group=self.buffer.group if group is None else group)
        self.router.update_expert_bias(counts)
        self.router.restart_counts()

    def __deepcopy__(self, memo: dict[int, Any]) -> MoELayer:
        """A layer with weights of its own (an average of models) on this buffer, which stays this layer's to close."""
        memo[id(self.buffer)] = self.buffer
        other = memo[id(self)] = self.__class__.__new__(self.__class__)
        other.__dict__.update({name: copy.deepcopy(value, memo) for name, value in self.__dict__.items()})
        other._owns_buffer = other._owns_group = False
        return other

    def close(self) -> None:
        """Closes the buffer (and the group of one) that the layer made itself. Collective, idempotent."""
        if self._owns_buffer:
            self.buffer.close()
        if self._owns_group:
            self._owns_group = False
            dist.destroy_process_group()

    def __enter__(self) -> MoELayer:
        """The layer, closed at the end of the block."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Closes; where the block failed, without waiting for ranks that may not come."""
        if self._owns_buffer and kind is not None:
            self.buffer.__exit__(kind, error, trace)
        self.close()

    def check_tokens(self, x: Tensor) -> None:
        """Refuses tokens of another width or dtype than the weights, before anything is sent."""
        if x.dim() < 1 or x.shape[-1] != self.config.hidden:
            raise UsageError(
                f"x of shape {list(x.shape)}", allowed=f"[..., {self.config.hidden}]", fix="pass tokens of width hidden"
            )
        if x.dtype != self.experts.fc1.dtype:
            raise UsageError(
                f"x of {x.dtype} and weights of {self.experts.fc1.dtype}",
                allowed="one dtype",
                fix="build MoELayer(..., dtype=) for the dtype of its tokens, or pass x.to(dtype)",
            )

    def _check(self, x: Tensor, token_mask: Tensor | None, aux_losses: list[Tensor] | None) -> None:
        self.check_tokens(x)
        if token_mask is not None and (token_mask.shape != x.shape[:-1] or token_mask.dtype != torch.bool):
            raise UsageError(
                f"token_mask {token_mask.dtype} of shape {list(token_mask.shape)}",
                allowed=f"bool {list(x.shape[:-1])}",
                fix="pass one flag a token",
            )
        if self.training and self.config.has_losses and aux_losses is None:
            config = self.config
            raise UsageError(
                f"aux_loss_coefficient = {config.aux_loss_coefficient}, z_loss_coefficient = "
                f"{config.z_loss_coefficient} and no aux_losses",
                allowed="a list that takes the losses",
                fix="call layer(x, aux_losses=losses) and add sum(losses) to the loss, or set the coefficients to 0",
            )


def _has_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _make_group_of_one(kind: str) -> bool:
    """Makes this process a default group of its own, for tensors of a device kind.

    Raises:
        UsageError: a launcher started several processes, which then would each train alone, unnoticed.
    """
    if env.has_launcher() and env.world_size() > 1:
        raise UsageError(
            f"no process group in one of {env.world_size()} processes",
            allowed="an initialised torch.distributed group",
            fix="call torch.distributed.init_process_group first, or pass group= or buffer=",
        )
    dist.init_process_group(devices.collective_backend(kind), store=HashStore(), rank=0, world_size=1)
    return True
