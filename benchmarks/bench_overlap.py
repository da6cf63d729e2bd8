"""Overlapped pairs of forward and backward beside the same work one after the other.

    torchrun --nproc-per-node 2 benchmarks/bench_overlap.py [--layers 4] [--repeats 20]

Two stages of V2-Lite-like layers with balanced experts: `serial_ms` is the forward of one and the backward of the
other, each in its own order; `overlapped_ms` both as one pair; results are compared before anything is timed.
`compute_ms` is the pair on a group of one rank for each rank, where no row crosses a link. The share of communication
that a pair covers is (serial_ms - overlapped_ms) / (serial_ms - compute_ms) at most 1; it says little at full speed,
where NVLink leaves a few per cent to cover. So a second row paces bytes from other ranks (`buffer.pace_gbs`) until
communication takes as long as computation, the balance of DeepSeek's runs. A full run on two devices writes
benchmarks/results/overlap_h200x2.json, others what --output names.

`megatron_ms` is null with the reason beside it: Megatron-core's combined 1F1B is not built here yet.

`--device cpu --quick` runs every line on the CPU with tiny shapes: its times mean nothing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks import harness
from benchmarks.moe_sides import SHAPES, Shape
from comm_core import ElasticBuffer
from comm_core.runtime import device as devices
from comm_core.runtime.errors import MTMoEError
from mt_moe import DataPath, MoEConfig, MoELayer, OverlapLayer, OverlapStage

RESULTS = Path(__file__).parent / "results" / "overlap_h200x2.json"
NO_MEGATRON = "Megatron-core's combined 1F1B is not built by this benchmark yet"


class Attention(nn.Module):
    """Self-attention with norm and residual: [batch, sequence, hidden] to the same."""

    def __init__(self, hidden: int, heads: int = 16) -> None:
        super().__init__()
        self.heads, self.norm = heads, nn.RMSNorm(hidden)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden, bias=False), nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Causal attention."""
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm(x)).chunk(3, -1))
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(mixed.transpose(1, 2).flatten(2))


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="layers of each stage")
    parser.add_argument("--device", default="auto", choices=("auto", *devices.KINDS))
    parser.add_argument("--quick", action="store_true", help="tiny shape and few repetitions")
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--comm-sms", type=int, default=20, help="multiprocessors of dispatch and combine")
    parser.add_argument("--pace-gbs", type=float, help="pace of the second row; found by measuring by default")
    parser.add_argument("--output", type=Path, help="write rows as JSON")
    parser.add_argument("--commit", default=harness.commit(), help="what is measured, where there is no checkout")
    return parser.parse_args(arguments)


class Work:
    """Two stages over one buffer, and their data on this rank."""

    def __init__(self, shape: Shape, buffer: ElasticBuffer, device: torch.device, options: argparse.Namespace) -> None:
        torch.manual_seed(1)
        # A rank alone holds as many experts as one of many does, so that its products are the same.
        experts = shape.num_experts * buffer.num_ranks // dist.get_world_size()
        config = MoEConfig(
            hidden=shape.hidden, ffn=shape.ffn, num_experts=experts, num_topk=shape.num_topk,
            shared_ffn=2 * shape.ffn, force_load_balancing=True,
            data_path=DataPath(comm_sms=options.comm_sms, gemm_spare_sms=options.comm_sms),
        )  # fmt: skip
        self.stages = [self._stage(config, buffer, device, first, options.layers) for first in (0, options.layers)]
        form = (shape.batch, shape.sequence, shape.hidden)
        self.x0, self.x1, self.grad = (torch.randn(form, device=device, dtype=torch.bfloat16) for _ in range(3))
        self.x0.requires_grad_()
        self.x1.requires_grad_()
        self.behind: Tensor | None = None

    @staticmethod
    def _stage(config: MoEConfig, buffer: ElasticBuffer, device: torch.device, first: int, layers: int) -> OverlapStage:
        found = []
        for number in range(first, first + layers):
            mlp = MoELayer(config, buffer=buffer, layer_number=number, dtype=torch.bfloat16, device=device)
            around = Attention(config.hidden), nn.RMSNorm(config.hidden)
            attention, norm = (module.to(device, torch.bfloat16) for module in around)
            found.append(OverlapLayer(attention, mlp, norm=norm))
        return OverlapStage(found)

    def prepare(self) -> None:
        """The forward whose backward is measured."""
        self.x0.grad = self.x1.grad = None
        for stage in self.stages:
            stage.zero_grad(set_to_none=True)
        self.behind = self.stages[1](self.x1)

    def serial(self) -> Tensor:
        """Forward of one, then backward of the other."""
        assert self.behind is not None
        y: Tensor = self.stages[0](self.x0)
        self.behind.backward(self.grad)
        return y

    def overlapped(self) -> Tensor:
        """The same as a pair."""
        assert self.behind is not None
        one, other = self.stages
        (y,), _ = one.overlapped_forward_backward(one, [self.x0], None, [], other, None, [self.behind], [self.grad])
        return y

    def check(self) -> None:
        """Ends the run where the two differ in any bit of output or gradients."""
        found = []
        for run in (self.serial, self.overlapped):
            self.prepare()
            y = run()
            grads = [self.x1.grad, *(parameter.grad for parameter in self.stages[1].parameters())]
            found.append([y.detach(), *(grad for grad in grads if grad is not None)])
        same = len(found[0]) == len(found[1]) and all(map(torch.equal, *found))
        if not same:
            raise SystemExit("the overlapped pair differs from serial execution; nothing was timed")
        self.prepare()

    def times(self, device: torch.device, repeats: int, warmup: int) -> dict[str, float]:
        """Medians of both in turn, the forward that precedes a backward not counted."""
        times: dict[str, list[float]] = {"serial_ms": [], "overlapped_ms": []}
        for number in range(repeats + warmup):
            for name, run in (("serial_ms", self.serial), ("overlapped_ms", self.overlapped)):
                self.prepare()
                taken = harness.median_ms(run, device, repeats=1, warmup=0)
                if number >= warmup:
                    times[name].append(taken)
        return {name: sorted(values)[len(values) // 2] for name, values in times.items()}


def row_of(name: str, times: dict[str, float], compute_ms: float, pace: float | None, ranks: int) -> dict[str, Any]:
    """One row of the file: `covered` is None where no communication was seen."""
    communication = times["serial_ms"] - compute_ms
    hidden = times["serial_ms"] - times["overlapped_ms"]
    return {
        "shape": name,
        "ranks": ranks,
        "pace_gbs": pace,
        **times,
        "megatron_ms": None,
        "megatron_missing": NO_MEGATRON,
        "compute_ms": compute_ms,
        "ratio": times["overlapped_ms"] / times["serial_ms"],
        "covered": min(1.0, hidden / communication) if communication > 0 else None,
    }


def balanced_pace(shape: Shape, layers: int, compute_ms: float, num_ranks: int) -> float:
    """The GB/s at which the bytes that a rank reads from others in a pair take as long as its computation.

    A pair moves every row four times in each layer; of its rows, (num_ranks - 1) / num_ranks come from others, and
    copies of a token on one rank as one each.
    """
    rows = shape.num_tokens * min(shape.num_topk, num_ranks) * (num_ranks - 1) / num_ranks
    return max(4 * layers * rows * shape.hidden * 2 / (compute_ms * 1e6), 1e-3)


def line(row: dict[str, Any]) -> str:
    """A row for people."""
    pace = "full speed" if row["pace_gbs"] is None else f"{row['pace_gbs']:.1f} GB/s"
    covered = "no communication seen" if row["covered"] is None else f"{100 * row['covered']:.0f} % covered"
    return (
        f"{row['shape']} at {pace}: serial {row['serial_ms']:.2f} ms, overlapped {row['overlapped_ms']:.2f} ms, "
        f"ratio {row['ratio']:.3f}, {covered}"
    )


def measure(name: str, device: torch.device, options: argparse.Namespace) -> list[dict[str, Any]]:
    """A row at full speed, and one at a pace where the backend has one."""
    shape, ranks = SHAPES[name], dist.get_world_size()
    repeats, warmup = (3, 1) if options.quick else (options.repeats, 5)
    alone = [dist.new_group([rank]) for rank in range(ranks)][dist.get_rank()]
    with ElasticBuffer(alone, device=device) as buffer:
        compute_ms = Work(shape, buffer, device, options).times(device, repeats, warmup)["overlapped_ms"]
    rows = []
    with ElasticBuffer(None, device=device) as buffer:
        work = Work(shape, buffer, device, options)
        work.check()
        rows.append(row_of(name, work.times(device, repeats, warmup), compute_ms, None, ranks))
        pace = torch.tensor(options.pace_gbs or balanced_pace(shape, options.layers, compute_ms, ranks), device=device)
        dist.broadcast(pace, 0)
        try:
            buffer.pace_gbs = float(pace)
        except MTMoEError as error:
            say(f"no pace: {error}")
            return rows
        rows.append(row_of(name, work.times(device, repeats, warmup), compute_ms, float(pace), ranks))
        buffer.pace_gbs = None
    return rows


def say(*words: object) -> None:
    """Prints on rank 0, at once."""
    if dist.get_rank() == 0:
        print(*words, flush=True)


def main() -> None:
    """Measures and prints a line each; rank 0 writes the file."""
    options = parse()
    device = devices.local(options.device)
    options.layers = 1 if options.quick else options.layers
    dist.init_process_group(
        devices.collective_backend(device.type), **({} if device.type == "cpu" else {"device_id": device})
    )
    if device.type == "cpu":
        say("on the CPU: every line runs, the times mean nothing")
    rows = measure("tiny" if options.quick else "lite", device, options)
    say("\n".join(line(row) for row in rows))
    full = device.type != "cpu" and dist.get_world_size() == 2 and not options.quick and len(rows) == 2
    path = options.output or (RESULTS if full else None)
    if dist.get_rank() == 0 and path is not None:
        harness.write(path, device, rows, commit_hash=options.commit)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
