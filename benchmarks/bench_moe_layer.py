"""Our drop-in MoE layer beside Megatron's own on the same accelerators: forward and forward + backward.

    torchrun --nproc-per-node 2 benchmarks/bench_moe_layer.py [--shape lite --shape v3] [--output FILE.json]

Both layers hold the same weights and are given the same tokens; outputs and gradients are compared before anything is
timed. Experts are Transformer Engine's grouped linears on both sides, so the difference is router to experts and back.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

import megatron_patch
from benchmarks import harness
from comm_core.runtime import device as devices

# name: hidden, expert ffn, experts, top-k, sequence, micro batch
SHAPES = {"lite": (2048, 1408, 64, 6, 4096, 4), "v3": (7168, 2048, 64, 8, 4096, 2)}
LIMIT = 2e-2
"""Relative distance allowed between the two layers: bf16 sums in another order."""


def _layers(shape: str) -> tuple[Any, Any]:
    """The stock layer and ours, with the same weights."""
    from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_patch.moe_spec import MTMoELayer

    hidden, ffn, experts, topk, _, _ = SHAPES[shape]
    config = TransformerConfig(
        num_layers=1,
        hidden_size=hidden,
        num_attention_heads=16,
        ffn_hidden_size=ffn,
        moe_ffn_hidden_size=ffn,
        num_moe_experts=experts,
        moe_router_topk=topk,
        expert_model_parallel_size=dist.get_world_size(),
        moe_token_dispatcher_type="alltoall",
        moe_grouped_gemm=True,
        moe_permute_fusion=True,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        bias_activation_fusion=True,
        add_bias_linear=False,
        params_dtype=torch.bfloat16,
        bf16=True,
        moe_router_load_balancing_type="none",
        moe_router_score_function="sigmoid",
        moe_router_dtype="fp32",
        moe_aux_loss_coeff=0.0,
        gradient_accumulation_fusion=False,
    )
    spec = get_moe_module_spec(use_te=True, num_experts=experts, moe_grouped_gemm=True)
    stock = spec(config).to(devices.local("auto"))
    ours = MTMoELayer(config, stock.submodules).to(devices.local("auto"))
    ours.load_state_dict(stock.state_dict())
    for layer in (stock, ours):
        layer.set_layer_number(1)
    return stock, ours


def _step(layer: Any, x: torch.Tensor, grad: torch.Tensor) -> torch.Tensor:
    x.grad = None
    layer.zero_grad(set_to_none=True)
    y: torch.Tensor = layer(x)[0]
    y.backward(grad)
    return y


def _compare(stock: Any, ours: Any, x: torch.Tensor, grad: torch.Tensor) -> float:
    """Largest relative distance over the output and all gradients."""
    found = []
    for layer in (ours, stock):
        y = _step(layer, x, grad)
        assert x.grad is not None
        found.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
    return max(float((a.float() - b.float()).norm() / b.float().norm()) for a, b in zip(*found, strict=True))


def measure(shape: str, device: torch.device) -> dict[str, Any]:
    """One row: both layers on one shape; times in milliseconds, `ratio` is ours over stock."""
    stock, ours = _layers(shape)
    hidden, _, _, _, sequence, batch = SHAPES[shape]
    generator = torch.Generator(device).manual_seed(1 + dist.get_rank())
    make = {"device": device, "dtype": torch.bfloat16, "generator": generator}
    x = torch.randn(sequence, batch, hidden, **make).requires_grad_()
    grad = torch.randn(sequence, batch, hidden, **make)
    distance = _compare(stock, ours, x, grad)
    if not distance <= LIMIT:
        raise SystemExit(f"{shape}: the layers differ by {distance:.1e}, more than {LIMIT:.0e}; nothing was timed")
    row: dict[str, Any] = {"shape": shape, "dtype": "bf16", "ranks": dist.get_world_size(), "distance": distance}
    for name, layer in (("alltoall", stock), ("ours", ours)):
        with torch.no_grad():
            row[f"{name}_forward_ms"] = harness.median_ms(lambda layer=layer: layer(x), device)
        row[f"{name}_ms"] = harness.median_ms(lambda layer=layer: _step(layer, x, grad), device)
    row["ratio"] = row["ours_ms"] / row["alltoall_ms"]
    return row


def main() -> None:
    """Measures the shapes asked for and prints a line each; rank 0 writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="repeatable (default: all)")
    parser.add_argument("--output", type=Path, help="write rows as JSON")
    parser.add_argument("--commit", default=harness.commit(), help="what is measured, where there is no checkout")
    arguments = parser.parse_args()
    device = devices.local("auto")
    megatron_patch.apply(device.type)
    dist.init_process_group(devices.collective_backend(device.type), device_id=device)
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    rows = [measure(shape, device) for shape in arguments.shape or SHAPES]
    if dist.get_rank() == 0:
        for row in rows:
            print(
                f"{row['shape']}: forward {row['ours_forward_ms']:.2f} ms (alltoall {row['alltoall_forward_ms']:.2f}), "
                f"forward + backward {row['ours_ms']:.2f} ms (alltoall {row['alltoall_ms']:.2f}), "
                f"ratio {row['ratio']:.2f}, distance {row['distance']:.1e}"
            )
        if arguments.output:
            harness.write(arguments.output, device, rows, commit_hash=arguments.commit)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
