"""The drop-in MoE layer: Megatron's router, experts' parameters and checkpoint keys; our communication and overlap.

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    spec = use_mt_moe(spec)

`MTMoELayer` is a `MoELayer` (Megatron tests for that class in several places). It computes on the weights of the
stock experts module, so checkpoints of stock runs load unchanged. Import this after `megatron_patch.apply()`.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec

from comm_core import ElasticBuffer, EPHandle
from comm_core.runtime.errors import UsageError
from megatron_patch import weight_grad
from mt_moe.dispatcher import Dispatcher
from mt_moe.experts import expert_mlp
from mt_moe.functional import DispatchTicket, StaticRouting, fan_out

_BUFFERS: dict[Any, ElasticBuffer] = {}


def buffer_for(group: Any) -> ElasticBuffer:
    """The EP buffer of a process group, shared by all layers of this process; made at first use (collective)."""
    if group not in _BUFFERS:
        _BUFFERS[group] = ElasticBuffer(group)
    return _BUFFERS[group]


def close_buffers() -> None:
    """Closes every buffer that layers made (collective); layers made before must not run again."""
    while _BUFFERS:
        _BUFFERS.popitem()[1].close()


def topk_from_map(probs: torch.Tensor, routing_map: torch.Tensor, num_topk: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Turns Megatron's dense routing into lanes.

    Args:
        probs: [T, E] routing weights, zero where not routed.
        routing_map: [T, E] bool, at most `num_topk` set in a row.
        num_topk: lanes a token.

    Returns:
        topk_idx int64 [T, K], experts ascending, -1 in unused lanes; topk_weights fp32 [T, K], 0 in unused lanes,
        differentiable with respect to `probs`.
    """
    # A stable descending sort of 0/1 puts the routed experts first and keeps them ascending.
    idx = torch.argsort(routing_map.to(torch.uint8), dim=1, descending=True, stable=True)[:, :num_topk]
    routed = routing_map.gather(1, idx)
    weights = probs.gather(1, idx).float()
    return idx.masked_fill(~routed, -1), weights.masked_fill(~routed, 0.0)


class MegatronDispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """Megatron's dispatcher interface over `mt_moe.dispatcher.Dispatcher`.

    As with the stock dispatchers one microbatch is in flight between the six calls; what backward needs lives in the
    autograd graph, so several microbatches may wait for their backward.
    """

    def __init__(self, config: Any, pg_collection: Any, buffer: ElasticBuffer) -> None:
        super().__init__(config, pg_collection)
        self.dispatcher = Dispatcher(buffer, num_experts=config.num_moe_experts)
        self._handle: EPHandle | StaticRouting | None = None
        self._shape: tuple[int, ...] = ()

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Starts the exchange of counts. Returns tokens [T, hidden] and topk_weights [T, K]."""
        self._shape = tuple(hidden_states.shape)
        topk_idx, topk_weights = topk_from_map(probs, routing_map, self.config.moe_router_topk)
        self._handle = self.dispatcher.prepare(topk_idx)
        return hidden_states.reshape(-1, hidden_states.shape[-1]), topk_weights

    def token_dispatch(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Moves tokens to the ranks of their experts: rows [N, hidden] by local expert, weights [N]."""
        arrived = self.dispatcher.wait_dispatch(self.launch(hidden_states, probs))
        return arrived.rows, arrived.row_weights

    def launch(self, hidden_states: torch.Tensor, topk_weights: torch.Tensor) -> DispatchTicket:
        """First half of token_dispatch; finish it with `dispatcher.wait_dispatch(ticket)`."""
        assert self._handle is not None, "dispatch without dispatch_preprocess"
        return self.dispatcher.launch_dispatch(hidden_states, topk_weights, self._handle)

    def dispatch_postprocess(
        self, hidden_states: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows are in expert order already; adds the number of rows of each local expert (int64, on the host)."""
        return hidden_states, torch.tensor(self.counts(), dtype=torch.int64), probs

    def counts(self) -> list[int]:
        """Rows of each local expert for the microbatch in flight."""
        assert isinstance(self._handle, EPHandle), "counts without dispatch_preprocess"
        return self._handle.num_unaligned_recv_tokens_per_expert_list

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Nothing to reorder."""
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sums the rows of each token on its own rank: [T, hidden]."""
        assert isinstance(self._handle, EPHandle), "combine without dispatch_preprocess"
        return self.dispatcher.wait_combine(self.dispatcher.launch_combine(hidden_states, self._handle))

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Back to the shape that dispatch_preprocess was given."""
        self._handle = None
        return hidden_states.reshape(self._shape)


def _refuse_unsupported(config: Any) -> None:
    for name, allowed in (
        ("moe_shared_expert_overlap", False),
        ("moe_latent_size", None),
        ("moe_apply_probs_on_input", False),
        ("moe_expert_capacity_factor", None),
        ("fp8", None),
        ("overlap_dispatch_backward_with_experts_wgrad", False),
    ):
        value = getattr(config, name, allowed)
        if value != allowed:
            hint = "this layer overlaps the shared expert by itself" if "shared" in name else "not supported yet"
            raise UsageError(
                f"{name}={value!r} with MTMoELayer",
                allowed=f"{name}={allowed!r} ({hint})",
                fix="change the setting or keep Megatron's own MoELayer",
            )
    if config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
        raise UsageError(
            f"tensor_model_parallel_size={config.tensor_model_parallel_size} without sequence_parallel with MTMoELayer",
            allowed="sequence_parallel=True (each rank routes its own part of the sequence)",
            fix="set sequence_parallel=True",
        )


def _refuse_expert_tensor_parallel(size: int) -> None:
    if size != 1:
        raise UsageError(
            f"expert_tensor_parallel_size={size} with MTMoELayer",
            allowed="1",
            fix="set expert_tensor_parallel_size=1 and raise expert_model_parallel_size instead",
        )


class MTMoELayer(MoELayer):  # type: ignore[misc]
    """Megatron's MoELayer with our dispatch and combine; the shared expert runs while tokens travel.

    Constructor and forward have the signatures of the stock layer. Input and output: [sequence, batch, hidden].
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        **kwargs: Any,
    ) -> None:
        _refuse_unsupported(config)
        pg_collection = pg_collection or get_default_pg_collection()
        _refuse_expert_tensor_parallel(pg_collection.expt_tp.size())
        super().__init__(config, submodules, layer_number, pg_collection, **kwargs)
        self.token_dispatcher = MegatronDispatcher(config, pg_collection, buffer_for(pg_collection.ep))

    def forward(
        self,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        padding_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """As MoELayer.forward. Recompute and partial graphs take the stock sequence over the same dispatcher."""
        whole = self.fwd_execution_map == ["route", "expert_compute", "postprocess"]
        if intermediate_tensors is not None or self.moe_layer_recompute or not whole:
            return super().forward(hidden_states, intermediate_tensors, padding_mask, **kwargs)
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        dispatcher = self.token_dispatcher
        # The order in which the stock layer's gradients meet, kept so that overlap changes no bit.
        to_dispatch, to_router, to_shared = fan_out(hidden_states, 3)
        probs, routing_map = self.route(to_router, padding_mask)
        tokens, topk_weights = self.preprocess(to_dispatch, probs, routing_map)
        ticket = dispatcher.launch(tokens, topk_weights)
        shared = self.shared_experts_compute(to_shared)
        arrived = dispatcher.dispatcher.wait_dispatch(ticket)
        output, _ = self.routed_experts_compute(arrived.rows, arrived.row_weights)
        return self.postprocess(self.combine(output), shared), None

    def routed_experts_compute(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Local experts on rows [N, hidden] with weights [N], on the parameters of the stock experts module."""
        compute = borrowed_experts(self.experts, self.config)
        if compute is None:
            return super().routed_experts_compute(hidden_states, probs)
        return compute(hidden_states, self.token_dispatcher.counts(), probs), None


def borrowed_experts(experts: Any, config: Any) -> Callable[..., torch.Tensor] | None:
    """A function (rows, counts, row_weights) -> rows on the weights of a stock experts module.

    None where the module's arithmetic is not plain SwiGLU without bias; the stock module computes then.
    """
    if config.add_bias_linear or not config.gated_linear_unit or config.activation_func is not torch.nn.functional.silu:
        return None
    if not isinstance(experts, SequentialMLP):
        return None
    fc1: Sequence[torch.Tensor] = [expert.linear_fc1.weight for expert in experts.local_experts]
    fc2: Sequence[torch.Tensor] = [expert.linear_fc2.weight for expert in experts.local_experts]
    return functools.partial(_compute, fc1=fc1, fc2=fc2)


def _compute(
    rows: torch.Tensor,
    counts: Sequence[int],
    row_weights: torch.Tensor,
    *,
    fc1: Sequence[torch.Tensor],
    fc2: Sequence[torch.Tensor],
) -> torch.Tensor:
    defer = weight_grad.STORE.put_many if torch.is_grad_enabled() and rows.requires_grad else None
    return expert_mlp(rows, counts, row_weights, fc1, fc2, defer=defer)


def use_mt_moe(spec: Any) -> Any:
    """Returns a copy of a block or layer spec in which every MoELayer is an MTMoELayer; dense layers stay as they are.

    Args:
        spec: what `get_gpt_decoder_block_spec` or `get_gpt_layer_local_spec` and their like return.
    """
    spec = copy.deepcopy(spec)
    for layer in getattr(spec, "layer_specs", [spec]):
        mlp = getattr(layer.submodules, "mlp", None)
        if isinstance(mlp, functools.partial) and mlp.func is MoELayer:
            layer.submodules.mlp = functools.partial(MTMoELayer, *mlp.args, **mlp.keywords)
        elif isinstance(mlp, ModuleSpec) and mlp.module is MoELayer:
            mlp.module = MTMoELayer
    return spec
