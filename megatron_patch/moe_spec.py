"""The drop-in MoE layer: Megatron's router, experts' parameters and checkpoint keys; our communication and overlap.

    spec = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    spec = use_mt_moe(spec)

`MTMoELayer` is a `MoELayer` (Megatron tests for that class in several places). It computes on the weights of the
stock experts module, so checkpoints of stock runs load unchanged. Import this after `megatron_patch.apply()`.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from megatron.core.transformer.spec_utils import ModuleSpec

from comm_core import ElasticBuffer, EPHandle
from comm_core.runtime.errors import UsageError
from megatron_patch import weight_grad
from megatron_patch.borrowed import BorrowedExperts
from mt_moe.aliases import fan_out
from mt_moe.data_path import DataPath
from mt_moe.dispatcher import Dispatched, Dispatcher
from mt_moe.expert_linear import Defer
from mt_moe.functional import DispatchTicket, StaticRouting
from mt_moe.lanes import from_map as topk_from_map
from mt_moe.routed import Journey
from mt_moe.weight_gradients import HeldWeightGradients

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


class MegatronDispatcher(MoETokenDispatcher):  # type: ignore[misc]
    """Megatron's dispatcher interface over `mt_moe.dispatcher.Dispatcher`.

    As with the stock dispatchers one microbatch is in flight between the six calls; what backward needs lives in the
    autograd graph, so several microbatches may wait for their backward.
    """

    def __init__(self, config: Any, pg_collection: Any, buffer: ElasticBuffer, num_sms: int = 0) -> None:
        super().__init__(config, pg_collection)
        self.dispatcher = Dispatcher(buffer, num_experts=config.num_moe_experts, num_sms=num_sms)
        self._handle: EPHandle | StaticRouting | None = None
        self._shape: tuple[int, ...] = ()

    def dispatch_preprocess(
        self, hidden_states: torch.Tensor, routing_map: torch.Tensor, probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Starts the exchange of counts. Returns tokens [T, hidden] and topk_weights [T, K]."""
        self._shape = tuple(hidden_states.shape)
        topk_idx, topk_weights = _lanes(probs, routing_map, self.config)
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

    def handle(self) -> EPHandle:
        """The routing of the microbatch in flight."""
        assert isinstance(self._handle, EPHandle), "a handle is there after dispatch_preprocess"
        return self._handle

    def counts(self) -> list[int]:
        """Rows of each local expert for the microbatch in flight."""
        return self.handle().num_unaligned_recv_tokens_per_expert_list

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Nothing to reorder."""
        return hidden_states

    def token_combine(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Sums the rows of each token on its own rank: [T, hidden]."""
        return self.dispatcher.wait_combine(self.dispatcher.launch_combine(hidden_states, self.handle()))

    def combine_postprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Back to the shape that dispatch_preprocess was given."""
        self._handle = None
        return hidden_states.reshape(self._shape)


def _lanes(probs: torch.Tensor, routing_map: torch.Tensor, config: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Experts and weights of every token, [T, K] each, from Megatron's dense map."""
    if config.moe_pad_expert_input_to_capacity:
        # The tokens that pad an expert have weight 0: they add zero to every sum and gradient, and are not sent.
        routing_map = routing_map & (probs != 0)
    return topk_from_map(probs, routing_map, config.moe_router_topk)


def _refuse_unsupported(config: Any) -> None:
    for name, allowed in (
        ("moe_shared_expert_overlap", False),
        ("moe_apply_probs_on_input", False),
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

    Args:
        data_path: how rows move and what of them is kept, beside Megatron's own arguments.
        experts_implementation: of `mt_moe.expert_mlp`.
    """

    def __init__(
        self,
        config: Any,
        submodules: Any = None,
        layer_number: int | None = None,
        pg_collection: Any = None,
        *,
        data_path: DataPath | None = None,
        experts_implementation: str = "auto",
        **kwargs: Any,
    ) -> None:
        _refuse_unsupported(config)
        pg_collection = pg_collection or get_default_pg_collection()
        _refuse_expert_tensor_parallel(pg_collection.expt_tp.size())
        super().__init__(config, submodules, layer_number, pg_collection, **kwargs)
        self.data_path = path = data_path or DataPath()
        buffer = buffer_for(pg_collection.ep)
        self.token_dispatcher = MegatronDispatcher(config, pg_collection, buffer, path.comm_sms)
        self._dispatcher = Dispatcher(
            buffer,
            num_experts=config.num_moe_experts,
            max_tokens_per_rank=path.tokens_a_chunk,
            num_sms=path.comm_sms,
        )
        self.held_weight_gradients = HeldWeightGradients()
        foreign = BorrowedExperts.why_not(self.experts, config)
        self.borrowed = None if foreign else BorrowedExperts(self.experts, path, experts_implementation)

    def forward(
        self,
        hidden_states: torch.Tensor,
        intermediate_tensors: Any = None,
        padding_mask: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """As MoELayer.forward. Recompute and partial graphs take the stock sequence over the same dispatcher."""
        whole = self.fwd_execution_map == ["route", "expert_compute", "postprocess"]
        borrowed = self.borrowed
        if borrowed is None or intermediate_tensors is not None or self.moe_layer_recompute or not whole:
            return super().forward(hidden_states, intermediate_tensors, padding_mask, **kwargs)
        if padding_mask is not None:
            padding_mask = padding_mask.transpose(0, 1).bool()
        # The order in which the stock layer's gradients meet, kept so that overlap changes no bit.
        to_dispatch, to_router, to_shared = fan_out(hidden_states, 3)
        probs, routing_map = self.route(to_router, padding_mask)
        topk_idx, topk_weights = _lanes(probs, routing_map, self.config)
        journey = Journey(self._dispatcher, self.data_path, topk_idx)
        latent = bool(self.config.moe_latent_size)
        sent = self.fc1_latent_proj(to_dispatch)[0] if latent else to_dispatch
        journey.launch(sent.reshape(-1, sent.shape[-1]), topk_weights)
        shared = self.shared_experts_compute(to_shared)
        output = journey.finish(borrowed, borrowed.weights(), self._defer()).view(sent.shape)
        if latent:
            output = self.fc2_latent_proj(output)[0]
        return output if shared is None else output + shared, None

    def routed_experts_compute(self, hidden_states: torch.Tensor, probs: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Local experts on rows [N, hidden] with weights [N], on the parameters of the stock experts module."""
        if self.borrowed is None:
            return super().routed_experts_compute(hidden_states, probs)
        arrived = Dispatched(hidden_states, probs, self.token_dispatcher.counts(), self.token_dispatcher.handle())
        defer = self._defer() if torch.is_grad_enabled() and hidden_states.requires_grad else None
        return self.borrowed(arrived, defer=defer, rows_again=None), None

    def backward_dw(self, routed_experts: bool = True, shared_experts: bool = False) -> None:
        """The weight gradients that `delay_wgrad_compute` left over, as MoELayer.backward_dw."""
        if not getattr(self.config, "delay_wgrad_compute", False) or self.borrowed is None:
            super().backward_dw(routed_experts, shared_experts)
            return
        if routed_experts:
            self.held_weight_gradients.run()
        if shared_experts and self.use_shared_expert:
            self.shared_experts.backward_dw()

    def _defer(self) -> Defer | None:
        """What takes the experts' weight gradients; None for the moment in backward that the data path names."""
        if getattr(self.config, "delay_wgrad_compute", False):
            return self.held_weight_gradients.put
        # A pipeline schedule that splits backward must not find the weights in the graph of I.
        return weight_grad.STORE.put_many if weight_grad.is_deferring() else None


def use_mt_moe(spec: Any, **options: Any) -> Any:
    """Returns a copy of a block or layer spec in which every MoELayer is an MTMoELayer; dense layers stay as they are.

    Args:
        spec: what `get_gpt_decoder_block_spec` or `get_gpt_layer_local_spec` and their like return.
        **options: of `MTMoELayer`: `data_path`, `experts_implementation`.
    """
    spec = copy.deepcopy(spec)
    for layer in getattr(spec, "layer_specs", [spec]):
        mlp = getattr(layer.submodules, "mlp", None)
        if isinstance(mlp, functools.partial) and mlp.func is MoELayer:
            layer.submodules.mlp = functools.partial(MTMoELayer, *mlp.args, **{**mlp.keywords, **options})
        elif isinstance(mlp, ModuleSpec) and mlp.module is MoELayer:
            mlp.module, mlp.params = MTMoELayer, {**(mlp.params or {}), **options}
    return spec
