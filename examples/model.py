"""A DeepSeek-V3-style model in Megatron's own classes: MLA, a dense first part, MoE layers with a shared expert.

Import after `megatron_patch.apply()`. Everything is built for the parallel layout that `setup_parallel` made; weights
are a function of their global name alone (`seed_parameters`), so that any placement starts from the same model.
"""

from __future__ import annotations

import functools
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
)
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.transformer.transformer_config import MLATransformerConfig
from megatron.core.utils import get_model_config

from examples.config import Config
from examples.data import Batch
from megatron_patch.moe_spec import use_mt_moe
from megatron_patch.placement import VLayout, embedding_ranks, has_embedding, has_loss

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
# Fusions need kernels that only exist on CUDA with Transformer Engine or Apex.
_NO_FUSIONS = dict.fromkeys(
    (
        *("bias_activation_fusion", "bias_dropout_fusion", "masked_softmax_fusion", "apply_rope_fusion"),
        *("gradient_accumulation_fusion", "persist_layer_norm"),
    ),
    False,
)


def setup_parallel(config: Config) -> None:
    """Makes Megatron's process groups for a configuration; torch.distributed must be initialised."""
    parallel = config.parallel
    v_placement = parallel.schedule == "dualpipev"
    parallel_state.initialize_model_parallel(
        pipeline_model_parallel_size=parallel.pp_size,
        virtual_pipeline_model_parallel_size=2 if v_placement else None,
        expert_model_parallel_size=parallel.ep_size,
        expert_tensor_parallel_size=1,
        **({"get_embedding_ranks": embedding_ranks} if v_placement else {}),
    )
    tensor_parallel.model_parallel_cuda_manual_seed(config.train.seed)


def transformer_config(config: Config) -> MLATransformerConfig:
    """The Megatron configuration of the model and its layout."""
    model, parallel, dtype = config.model, config.parallel, _DTYPES[config.train.dtype]
    return MLATransformerConfig(
        num_layers=model.num_layers,
        hidden_size=model.hidden,
        num_attention_heads=model.num_attention_heads,
        ffn_hidden_size=model.ffn_hidden,
        multi_latent_attention=True,
        q_lora_rank=model.q_lora_rank,
        kv_lora_rank=model.kv_lora_rank,
        qk_head_dim=model.qk_head_dim,
        qk_pos_emb_head_dim=model.qk_pos_emb_head_dim,
        v_head_dim=model.v_head_dim,
        rope_type="rope",
        qk_layernorm=True,
        normalization="RMSNorm",
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=model.init_std,
        num_moe_experts=model.num_experts,
        moe_layer_freq=[0] * model.num_dense_layers + [1] * (model.num_layers - model.num_dense_layers),
        moe_ffn_hidden_size=model.moe_ffn_hidden,
        moe_shared_expert_intermediate_size=model.shared_expert_ffn_hidden,
        moe_token_dispatcher_type="alltoall",
        moe_router_topk=model.num_topk,
        moe_router_num_groups=model.num_groups,
        moe_router_group_topk=model.group_topk,
        moe_router_topk_scaling_factor=model.routed_scaling_factor,
        moe_router_score_function="sigmoid",
        moe_router_enable_expert_bias=True,
        moe_router_bias_update_rate=model.expert_bias_update_rate,
        moe_router_load_balancing_type="seq_aux_loss" if model.seq_aux_loss_coeff else "none",
        moe_aux_loss_coeff=model.seq_aux_loss_coeff,
        moe_router_dtype="fp32",
        pipeline_model_parallel_size=parallel.pp_size,
        expert_model_parallel_size=parallel.ep_size,
        expert_tensor_parallel_size=1,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        use_cpu_initialization=True,
        **_NO_FUSIONS,
        **_placement(config),
    )


def _placement(config: Config) -> dict[str, Any]:
    """The settings of the V placement; nothing for one stage a rank."""
    if config.parallel.schedule != "dualpipev":
        return {}
    return {
        "pipeline_model_parallel_layout": VLayout(config.model.num_layers, config.parallel.pp_size),
        "virtual_pipeline_model_parallel_size": 2,
        "overlap_p2p_comm": True,
        "batch_p2p_comm": False,
    }


@dataclass(slots=True)
class Model:
    """What a rank trains: its chunks in DDP, and names that do not depend on the placement."""

    chunks: list[Any]
    parameters: dict[str, torch.nn.Parameter]
    config: Any

    def routers(self) -> Iterator[tuple[int, Any]]:
        """(global layer number from 0, router) of every MoE layer on this rank."""
        for chunk in self.chunks:
            for layer in chunk.module.decoder.layers:
                if hasattr(layer.mlp, "router"):
                    yield layer.layer_number - 1, layer.mlp.router


def build(config: Config, device: torch.device) -> Model:
    """Builds this rank's chunks on a device, with seeded weights, wrapped in Megatron's DDP."""
    megatron_config = transformer_config(config)
    v_placement = config.parallel.schedule == "dualpipev"
    bare = [
        _chunk(config, megatron_config, device, chunk if v_placement else None)
        for chunk in range(2 if v_placement else 1)
    ]
    named: dict[str, torch.nn.Parameter] = {}
    for module in bare:
        named.update(global_names(module))
    seed_parameters(named, seed=config.train.seed, std=config.model.init_std, num_layers=config.model.num_layers)
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=True,
    )
    chunks = [
        DistributedDataParallel(megatron_config, ddp_config, module, disable_bucketing=index > 0)
        for index, module in enumerate(bare)
    ]
    return Model(chunks, named, megatron_config)


def _chunk(config: Config, megatron_config: Any, device: torch.device, vp_stage: int | None) -> Any:
    rank, size = parallel_state.get_pipeline_model_parallel_rank(), config.parallel.pp_size
    if vp_stage is None:
        pre, post = rank == 0, rank == size - 1
    else:
        pre, post = has_embedding(rank, vp_stage), has_loss(rank, vp_stage)
    spec = get_gpt_decoder_block_spec(megatron_config, use_transformer_engine=False, vp_stage=vp_stage)
    module = GPTModel(
        megatron_config,
        use_mt_moe(spec) if config.parallel.moe_layer == "mt_moe" else spec,
        vocab_size=config.model.vocab_size,
        max_sequence_length=config.train.seq_length,
        pre_process=pre,
        post_process=post,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
        vp_stage=vp_stage,
    ).to(device=device, dtype=_DTYPES[config.train.dtype])
    for part in module.modules():
        # Megatron's half-precision wrapper does the same: the expert bias counts in fp32.
        if hasattr(part, "_maintain_float32_expert_bias"):
            part._maintain_float32_expert_bias()
    return module


def global_names(module: Any) -> dict[str, torch.nn.Parameter]:
    """Parameters by a name with the global layer and expert number, equal under every placement."""
    first = {index: layer.layer_number - 1 for index, layer in enumerate(module.decoder.layers)}
    experts = module.config.num_moe_experts // parallel_state.get_expert_model_parallel_world_size()
    offset = parallel_state.get_expert_model_parallel_rank() * experts
    named = {}
    for name, parameter in module.named_parameters():
        name = re.sub(r"decoder\.layers\.(\d+)", lambda m: f"decoder.layers.{first[int(m[1])]}", name)
        name = re.sub(r"local_experts\.(\d+)", lambda m: f"experts.{offset + int(m[1])}", name)
        named[name] = parameter
    return named


@torch.no_grad()
def seed_parameters(named: dict[str, torch.nn.Parameter], *, seed: int, std: float, num_layers: int) -> None:
    """Draws every matrix from a normal distribution that depends on (seed, global name); vectors keep their values.

    Matrices that write to the residual stream get std / sqrt(2 * num_layers), as Megatron's own initialisation.
    """
    for name, parameter in named.items():
        if parameter.dim() < 2:
            continue
        residual = name.endswith(("linear_proj.weight", "linear_fc2.weight"))
        scale = std / (2 * num_layers) ** 0.5 if residual else std
        generator = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def build_optimizer(config: Config, model: Model) -> Any:
    """Megatron's Adam over all chunks, and the hooks its schedules read from the config."""
    train = config.train
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam",
            lr=train.lr,
            min_lr=train.min_lr,
            weight_decay=train.weight_decay,
            adam_beta1=0.9,
            adam_beta2=0.95,
            clip_grad=train.clip_grad,
            bf16=train.dtype == "bf16",
            params_dtype=_DTYPES[train.dtype],
        ),
        model.chunks,
    )
    shared = get_model_config(model.chunks[0])
    shared.finalize_model_grads_func = finalize_model_grads
    shared.grad_scale_func = optimizer.scale_loss
    no_sync = [chunk.no_sync for chunk in model.chunks]
    shared.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
    return optimizer


def forward_step(data_iterator: Iterator[Batch], chunk: Any) -> tuple[torch.Tensor, Any]:
    """Megatron's forward_step_func: one microbatch through one chunk, and its loss function."""
    tokens, labels, loss_mask, position_ids = next(data_iterator)
    length = tokens.shape[1]
    mask = torch.ones(1, 1, length, length, dtype=torch.bool, device=tokens.device).triu_(1)
    return chunk(tokens, position_ids, mask, labels=labels), functools.partial(_masked_mean, loss_mask)


def _masked_mean(loss_mask: torch.Tensor, losses: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    mask = loss_mask.reshape(-1).float()
    loss = (losses.float().reshape(-1) * mask).sum() / mask.sum().clamp_min(1)
    return loss, {"lm loss": loss.detach().clone()}
