"""Our drop-in MoE layer beside Megatron's own on the same accelerators: forward and forward + backward.

    torchrun --nproc-per-node 2 benchmarks/bench_moe_layer.py [--shape lite --shape v3] [--pace-gbs 45] [--profile]

All layers hold the same weights and are given the same tokens; outputs and gradients are compared before anything is
timed, and repetitions of the sides are timed in turn. On a device the stock experts are Transformer Engine's grouped
linears; ours compute on the same parameters. With `--pace-gbs` the rows of v3 are sent at the pace of a network, whole
and in chunks. With `--recipe` our layer without Megatron is timed with products in FP8 beside BF16. A full run on two
devices (no --shape, no --quick) writes benchmarks/results/moe_layer_h200x2.json, others what --output names.

`--device cpu --quick` runs every line on the CPU with tiny shapes: its times mean nothing. Ends with 1 where numbers
differ.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

import megatron_patch
from benchmarks import harness, moe_sides
from benchmarks.moe_sides import SHAPES, Memory
from comm_core import ElasticBuffer
from comm_core.runtime import device as devices
from comm_core.runtime.errors import MTMoEError
from mt_moe import DataPath

RESULTS = Path(__file__).parent / "results" / "moe_layer_h200x2.json"
LIMIT = 2e-2
"""Relative distance allowed between two layers: bf16 sums in another order."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", action="append", choices=list(SHAPES), help="repeatable (default: lite and v3)")
    parser.add_argument("--device", default="auto", choices=("auto", *devices.KINDS))
    parser.add_argument("--quick", action="store_true", help="tiny shape and few repetitions")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--implementation", default="auto", help="of our experts: auto, loop, grouped, te")
    parser.add_argument("--save-dispatched", default="keep", help="keep, copy or redispatch")
    parser.add_argument("--at-once", action="store_true", help="delay_wgrad=False")
    parser.add_argument("--release", action="store_true", help="least memory: release=True, delay_wgrad=False")
    parser.add_argument("--comm-sms", type=int, default=0, help="multiprocessors of dispatch and combine, 0: automatic")
    parser.add_argument("--pace-gbs", type=float, help="also time v3 at this pace of the link, whole and in chunks")
    parser.add_argument("--chunks", default="2,4", help="numbers of chunks of the paced rows")
    parser.add_argument("--chunk-sms", type=int, default=16, help="multiprocessors of communication beside products")
    parser.add_argument("--recipe", action="append", default=[], help="FP8 recipe to time beside BF16; repeatable")
    parser.add_argument("--profile", action="store_true", help="print the kernels with the most time of both sides")
    parser.add_argument("--output", type=Path, help="write rows as JSON")
    parser.add_argument("--commit", default=harness.commit(), help="what is measured, where there is no checkout")
    return parser.parse_args(arguments)


def say(*words: object) -> None:
    """Prints on rank 0, at once."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def compare(name: str, ours: Any, stock: Any, x: torch.Tensor, grad: torch.Tensor) -> float:
    """The distance of two layers; ends the run where it is too large."""
    distance = moe_sides.distances(ours, stock, x, grad)
    if not distance <= LIMIT:
        raise SystemExit(f"{name}: the layers differ by {distance:.1e}, more than {LIMIT:.0e}; nothing was timed")
    say(f"{name}: numbers agree to {distance:.1e}")
    return distance


def sides(names: dict[str, Any], x: torch.Tensor, grad: torch.Tensor, options: argparse.Namespace) -> dict[str, float]:
    """Medians of forward alone and of forward + backward for each layer, as `NAME_forward_ms` and `NAME_ms`."""
    repeats = {"repeats": 3, "warmup": 1} if options.quick else {"repeats": options.repeats, "warmup": 5}

    def forward(layer: Any) -> None:
        with torch.no_grad():
            layer(x)

    works = {f"{name}_forward_ms": lambda layer=layer: forward(layer) for name, layer in names.items()}
    found = harness.medians_ms(works, x.device, **repeats)
    works = {f"{name}_ms": lambda layer=layer: moe_sides.step(layer, x, grad) for name, layer in names.items()}
    found |= harness.medians_ms(works, x.device, **repeats)
    for layer in names.values():
        layer.zero_grad(set_to_none=True)
    return found


def measure(name: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """One row: our layer beside the stock ones; `ratio` is ours over alltoall, forward + backward."""
    from megatron_patch import moe_spec

    shape = SHAPES[name]
    x, grad = moe_sides.inputs(shape, device, 1)
    path = DataPath(
        save_dispatched=options.save_dispatched,
        comm_sms=options.comm_sms,
        release=options.release,
        delay_wgrad=not (options.release or options.at_once),
    )
    memory = Memory(device)
    stock = moe_sides.stock_layer(shape, device)
    row: dict[str, Any] = {"shape": name, "dtype": "bf16", "recipe": "bf16", "ranks": dist.get_world_size()}
    row |= {
        "save_dispatched": path.save_dispatched,
        "release": path.release,
        "comm_sms": path.comm_sms,
        "delay_wgrad": path.delay_wgrad,
    }
    row["alltoall_memory_gib"] = memory.gib(stock, x, grad)
    memory = Memory(device)
    ours = moe_sides.our_layer(stock, path, implementation=options.implementation)
    row["memory_gib"] = memory.gib(ours, x, grad)
    row["distance"] = compare(name, ours, stock, x, grad)
    layers = {"alltoall": stock, "ours": ours}
    missing = moe_sides.deepep_missing()
    if missing is None:
        layers["deepep"] = moe_sides.stock_layer(shape, device, flex=True)
        layers["deepep"].load_state_dict(stock.state_dict())
        compare(f"{name}, flex/DeepEP", layers["deepep"], stock, x, grad)
    row |= {"deepep_ms": None, "deepep_missing": missing} | sides(layers, x, grad, options)
    row["ratio"] = row["ours_ms"] / row["alltoall_ms"]
    if options.profile:
        row["kernels"] = {key: profiled(key, layers[key], x, grad) for key in ("alltoall", "ours")}
    del layers, ours, stock
    clean(device)
    moe_spec.close_buffers()
    return row


def profiled(name: str, layer: Any, x: torch.Tensor, grad: torch.Tensor) -> list[dict[str, Any]]:
    """The kernels with the most time of forward + backward, printed."""
    found = harness.top_kernels(lambda: moe_sides.step(layer, x, grad), x.device)
    say(f"  {name}: {sum(item['ms'] for item in found):.2f} ms in the {len(found)} kernels with the most time")
    for item in found:
        say(f"    {item['ms']:8.3f} ms {item['launches']:6.1f} x {item['kernel']}")
    return found


def measure_chunks(device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows at a pace of the link: whole, and in chunks whose rows travel beside the products of others."""
    from megatron_patch import moe_spec

    name = "tiny" if options.quick else "v3"
    x, grad = moe_sides.inputs(SHAPES[name], device, 2)
    stock = moe_sides.stock_layer(SHAPES[name], device)
    counts = [1, *(int(part) for part in options.chunks.split(","))]
    layers = {}
    for count in counts:
        spare = 0 if count == 1 else options.chunk_sms
        path = DataPath(num_chunks=count, comm_sms=spare, gemm_spare_sms=spare, save_dispatched=options.save_dispatched)
        layers[f"{count} chunks"] = moe_sides.our_layer(stock, path, implementation=options.implementation)
        compare(f"{name}, {count} chunks", layers[f"{count} chunks"], stock, x, grad)
    buffer = layers["1 chunks"].token_dispatcher.dispatcher.buffer
    pace = options.pace_gbs
    try:
        buffer.pace_gbs = pace
    except MTMoEError as error:
        say(f"no pace: {error}")
        pace = None
    found = sides(layers, x, grad, options)
    if options.profile:
        for key, layer in layers.items():
            profiled(f"{key} at {pace} GB/s", layer, x, grad)
    buffer.pace_gbs = None
    rows = [
        {
            "shape": name,
            "dtype": "bf16",
            "recipe": "bf16",
            "ranks": dist.get_world_size(),
            "pace_gbs": pace,
            "num_chunks": count,
            "comm_sms": 0 if count == 1 else options.chunk_sms,
            "ours_forward_ms": found[f"{count} chunks_forward_ms"],
            "ours_ms": found[f"{count} chunks_ms"],
            "ratio_to_whole": found[f"{count} chunks_ms"] / found["1 chunks_ms"],
        }
        for count in counts
    ]
    del layers, stock, buffer
    clean(device)
    moe_spec.close_buffers()
    return rows


def measure_recipe(name: str, recipe: str, device: torch.device, options: argparse.Namespace) -> dict[str, Any]:
    """Our layer without Megatron by a recipe beside the same in BF16; `ratio_to_bf16` is of forward + backward."""
    shape = SHAPES[name]
    x, grad = moe_sides.inputs(shape, device, 3)
    path = DataPath(comm_sms=options.comm_sms)
    with ElasticBuffer(None) as buffer:
        layers = {}
        row: dict[str, Any] = {"shape": name, "dtype": "bf16", "recipe": recipe, "ranks": dist.get_world_size()}
        for key, kind in (("bf16", "bf16"), ("ours", recipe)):
            memory = Memory(device)
            layers[key] = moe_sides.own_layer(shape, buffer, path, kind, device)
            row["memory_gib" if key == "ours" else "bf16_memory_gib"] = memory.gib(layers[key], x, grad)
        row["distance"] = moe_sides.distances(layers["ours"], layers["bf16"], x, grad)
        row |= sides(layers, x, grad, options)
        row["ratio_to_bf16"] = row["ours_ms"] / row["bf16_ms"]
        if options.profile:
            row["kernels"] = {key: profiled(f"{key} ({recipe})", layers[key], x, grad) for key in layers}
        del layers
        clean(device)
    return row


def clean(device: torch.device) -> None:
    """Lets go of what the last row held."""
    gc.collect()
    devices.synchronize(device)
    devices.release_cached(device)


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    if "ratio" in row:
        return (
            f"{row['shape']}: forward {row['ours_forward_ms']:.2f} ms (alltoall {row['alltoall_forward_ms']:.2f}), "
            f"forward + backward {row['ours_ms']:.2f} ms (alltoall {row['alltoall_ms']:.2f}, "
            f"DeepEP {row['deepep_ms']}), ratio {row['ratio']:.3f}, memory {row['memory_gib']:.2f} GiB "
            f"(alltoall {row['alltoall_memory_gib']:.2f})"
        )
    if "ratio_to_whole" in row:
        return (
            f"{row['shape']} at {row['pace_gbs']} GB/s, {row['num_chunks']} chunks: forward + backward "
            f"{row['ours_ms']:.2f} ms, ratio to whole {row['ratio_to_whole']:.3f}"
        )
    return (
        f"{row['shape']} {row['recipe']}: forward + backward {row['ours_ms']:.2f} ms (BF16 {row['bf16_ms']:.2f}), "
        f"ratio {row['ratio_to_bf16']:.3f}, distance {row['distance']:.1e}, memory {row['memory_gib']:.2f} GiB"
    )


def start(device: torch.device) -> None:
    """The process group, Megatron's groups and what every side's first call would pay for."""
    dist.init_process_group(
        devices.collective_backend(device.type), **({} if device.type == "cpu" else {"device_id": device})
    )
    from megatron.core import parallel_state, tensor_parallel

    parallel_state.initialize_model_parallel(
        expert_model_parallel_size=dist.get_world_size(), expert_tensor_parallel_size=1
    )
    tensor_parallel.model_parallel_cuda_manual_seed(1)
    warm = torch.ones(1024, 1024, device=device, dtype=torch.bfloat16)
    (warm @ warm).sum()
    whole = torch.empty_like(warm)
    if device.type != "cpu":
        dist.all_to_all_single(whole, warm, group=parallel_state.get_expert_model_parallel_group())


def main() -> None:
    """Measures what is asked for and prints a line each; rank 0 writes the file."""
    options = parse()
    device = devices.local(options.device)
    megatron_patch.apply(device.type, split_weight_grad=False)
    start(device)
    rows = []
    named = options.shape or (["tiny"] if options.quick else ["lite", "v3"])
    for name in named:
        rows.append(measure(name, device, options))
        say(line(rows[-1]))
    if options.pace_gbs:
        rows += measure_chunks(device, options)
        say("\n".join(line(row) for row in rows if "ratio_to_whole" in row))
    for recipe in options.recipe:
        rows.append(measure_recipe("tiny" if options.quick else "v3", recipe, device, options))
        say(line(rows[-1]))
    full = device.type != "cpu" and dist.get_world_size() == 2 and not (options.shape or options.quick)
    path = options.output or (RESULTS if full else None)
    if dist.get_rank() == 0 and path is not None:
        harness.write(path, device, rows, commit_hash=options.commit)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
