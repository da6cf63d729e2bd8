"""Dispatch and combine of the kernels beside what the link gives, one rank a device: times, SMs and GB/s into the peer.

    torchrun --nproc-per-node 2 benchmarks/bench_ep.py [--sms 8,16,32,64] [--quick] [--output FILE.json]

The outputs of every operation are compared byte for byte with plain torch before and after it is timed, in memory that
held something else. All rows and the ceiling, the best of plain stores into the next rank over all numbers of SMs, are
measured in one way (ep_timing.py). A full run of the standard sizes with a device for each rank writes
benchmarks/results/ep_h200x2.json, any other run only what --output names. Ends with 1 where data differ, with 2 where
it can not run.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist

from benchmarks import ep_ceiling, ep_data, ep_floors, ep_low_latency, ep_operations, ep_timing, harness
from benchmarks.ep_data import Shape
from benchmarks.ep_floors import Measured
from benchmarks.ep_operations import Bench, Operation
from benchmarks.ep_timing import Timer, gathered
from comm_core import ElasticBuffer
from comm_core.kernels import build, compiler
from comm_core.runtime import device as devices
from comm_core.runtime import env
from comm_core.runtime.errors import BuildError, CommError, MissingPackageError, MTMoEError, UsageError

RESULTS = Path(__file__).parent / "results" / "ep_h200x2.json"
_SLACK_BYTES = 512 << 20  # torch takes memory of the pool in pieces
_GRAPH_CALLS = 10


def sm_counts(text: str) -> tuple[int, ...]:
    """`16,24` as numbers, ascending."""
    try:
        counts = tuple(sorted({int(part) for part in text.split(",")}))
    except ValueError:
        counts = (0,)
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers above 0, like 16,24,32,64")
    return counts


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Options of the command line."""
    standard = ep_floors.STANDARD
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=list(devices.VENDORS), default="cuda", help="kind of device")
    parser.add_argument("--tokens", type=int, default=standard.tokens, help="tokens a rank")
    parser.add_argument("--hidden", type=int, default=standard.hidden, help="elements a token")
    parser.add_argument("--topk", type=int, default=standard.topk, help="experts a token")
    parser.add_argument("--experts", type=int, default=standard.experts, help="experts of all ranks")
    parser.add_argument("--alignment", type=int, default=1, help="of an expert's first expanded row")
    parser.add_argument("--sms", type=sm_counts, default=sm_counts("16,24,32,64"), help="numbers of SMs to try")
    parser.add_argument("--only", default="", help="measure operations whose name holds this")
    parser.add_argument("--repeats", type=int, default=20, help="samples that medians are taken of")
    parser.add_argument("--warmup", type=int, default=5, help="calls before them")
    parser.add_argument("--seed", type=int, help="of tokens and ids (default: a new one)")
    parser.add_argument("--quick", action="store_true", help="fewer samples, the first and last number of SMs alone")
    parser.add_argument("--output", type=Path, help=f"where rows go as JSON (default for a full run: {RESULTS.name})")
    parser.add_argument("--commit", default=harness.commit(), help="what is measured, where there is no checkout")
    given = parser.parse_args(arguments)
    if given.quick:
        given.sms, given.repeats, given.warmup = sm_counts(f"{given.sms[0]},{given.sms[-1]}"), 5, 2
    if given.repeats < 1:
        parser.error(f"--repeats {given.repeats}: at least 1")
    return given


def output_of(given: argparse.Namespace, shape: Shape, *, shared: bool) -> Path | None:
    """Where the results go; a run that is not the one of the results file writes only what it is told to."""
    full = ep_floors.is_standard(shape) and not (given.quick or given.only or shared)
    return given.output or (RESULTS if full else None)


def cold_build(device: torch.device) -> float | None:
    """Seconds in which the library is compiled where there is none; None without a compiler. Rank 0 measures."""
    if dist.get_rank():
        return None
    with tempfile.TemporaryDirectory() as folder:
        try:
            platform = devices.platform(device)
            found = compiler.find(platform)
            archs = compiler.architectures(platform, devices.architecture(device))
        except (MissingPackageError, BuildError):
            return None
        start = time.perf_counter()
        build.compile_to(found, archs, (), Path(folder) / "library.so")
        return time.perf_counter() - start


def agree_on_data(bench: Bench, operation: Operation, got: Any, wanted: Any, when: str) -> None:
    """Raises on every rank where outputs are wrong on one."""
    found = gathered(bench.check(operation, got, wanted))
    bad = [line for lines in found for line in lines]
    if bad:
        raise CommError("\n".join([f"{operation}: wrong data {when}; nothing is written", *bad]))


def measure(bench: Bench, timer: Timer, operation: Operation, counts: tuple[int, ...]) -> Measured:
    """Checks and times one operation with each number of SMs."""
    call, wanted = bench.call(operation), bench.wanted(operation)
    by_sms, kernels = {}, {}
    for sms in counts:
        with ep_operations.poisoned(), ep_timing.launches(timer.buffer) as kernels[sms]:
            answer = call(sms)
        agree_on_data(bench, operation, answer, wanted, f"with {sms} SMs")
        if operation.graph:
            with ep_timing.launches(timer.buffer) as kernels[sms]:
                graph, answer = ep_timing.captured(bench.device, lambda sms=sms: call(sms))  # type: ignore[misc]
            for _, output in answer:
                ep_operations.spoil(output)
            graph.replay()
            agree_on_data(bench, operation, answer, wanted, f"in the first replay with {sms} SMs")
            by_sms[sms], _ = timer.series(graph.replay, calls=_GRAPH_CALLS)
        else:
            by_sms[sms], answer = timer.series(lambda sms=sms: call(sms), waits=operation.host_wait)  # type: ignore[misc]
        agree_on_data(bench, operation, answer, wanted, f"after it was timed with {sms} SMs")
    chosen = ep_floors.best(by_sms, ep_floors.sm_limit(operation))
    return Measured(
        operation, bench.shape.tokens, bench.shape.ranks, bench.remote_bytes(operation), by_sms, kernels[chosen], chosen
    )


def run(given: argparse.Namespace, shape: Shape, device: torch.device, seed: int) -> tuple[Any, list[Measured]]:
    """The ceiling and all rows."""
    little = replace(shape, tokens=min(shape.tokens, ep_floors.SMALL_TOKENS))
    with ElasticBuffer(backend="gpu", device=device, num_cpu_timeout_secs=60) as buffer:
        timer = Timer(buffer, given.repeats, given.warmup)
        counts = tuple(sorted({min(sms, timer.num_sms) for sms in given.sms}))
        benches = [Bench(buffer, size, seed) for size in (shape, little)]
        prints = gathered([bench.fingerprint() for bench in benches])
        if any(other != prints[0] for other in prints):
            raise CommError("the ranks drew different tokens from one seed; they need devices of one kind")
        room = sum(ep_data.room(bench.shape, bench.routings) for bench in benches) + ep_low_latency.room(little)
        buffer.reserve_symmetric(room + _SLACK_BYTES)
        tried = (8, 32) if given.quick else ep_ceiling.COUNTS
        ceiling = ep_ceiling.measure(buffer, timer, shape.tokens * shape.hidden * 2, tried)
        measured = []
        # Graphs last: once one is captured, symmetric memory can not grow any more.
        for bench, operations in zip(benches, (ep_operations.large(), ep_operations.small()), strict=True):
            for operation in operations:
                if given.only in str(operation):
                    say(f"measuring {operation}")
                    measured.append(measure(bench, timer, operation, counts))
            bench.release()
    return ceiling, measured


def report(
    given: argparse.Namespace,
    shape: Shape,
    device: torch.device,
    found: tuple[Any, list[Measured]],
    built: float | None,
) -> None:
    """Prints the table and writes the file; rank 0."""
    ceiling, measured = found
    shared = dist.get_world_size() > devices.count(given.device)
    if shared:
        print(
            f"{dist.get_world_size()} ranks share {devices.count(given.device)} device(s): "
            "the data are right, the times mean nothing"
        )
    print(f"ceiling: {ceiling.gbs:.1f} GB/s stores, {max(ceiling.reads.values()):.1f} GB/s reads; by SMs:")
    for name in ("stores", "reads"):
        print(f"  {name}: " + ", ".join(f"{sms}: {rate:.0f}" for sms, rate in getattr(ceiling, name).items()))
    print(ep_floors.table(measured, ceiling.gbs, judged=ep_floors.is_standard(shape) and not shared))
    for item in measured:
        times = ", ".join(f"{sms}: {us:.1f}" for sms, us in item.by_sms.items())
        print(f"  {item.operation}: us by SMs {times}; blocks {item.kernels}")
    print(ep_floors.build_verdict(built))
    output = output_of(given, shape, shared=shared)
    if output is None:
        print("nothing is written; name a file with --output")
        return
    told = {
        **harness.environment(device, given.commit),
        "machine": f"{min(dist.get_world_size(), devices.count(given.device))} x {devices.name(device)}",
        "ceiling_gbs": round(ceiling.gbs, 1),
        "rows": [ep_floors.row(item, ceiling.gbs) for item in measured],
        "ceiling": {"stores": ceiling.stores, "reads": ceiling.reads},
        "cold_build_seconds": built,
        "details": [{"name": str(item.operation), "by_sms": item.by_sms, "blocks": item.kernels} for item in measured],
    }
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(told, indent=1) + "\n")
    print(f"written: {output}")


def say(text: str) -> None:
    """A line on stderr, from rank 0."""
    if env.rank() == 0:
        print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Checks, measures, prints; rank 0 writes the file."""
    given = parse(arguments)
    if not devices.count(given.device):
        say(f"bench_ep: no {given.device} device is visible to torch {torch.__version__}; it measures devices alone")
        return 2
    if not env.has_launcher() or env.world_size() < 2:
        say("bench_ep: it takes two ranks or more: torchrun --nproc-per-node 2 benchmarks/bench_ep.py")
        return 2
    shape = Shape(given.tokens, given.hidden, given.topk, given.experts, env.world_size(), given.alignment)
    try:
        shape.check()
    except UsageError as problem:
        say(f"bench_ep: {problem}")
        return 2
    device = devices.of(given.device, env.local_rank() % devices.count(given.device))
    dist.init_process_group("gloo", timeout=timedelta(seconds=300))
    try:
        built = cold_build(device)
        seed = gathered(int(torch.seed() % 2**31) if given.seed is None else given.seed)[0]
        say(f"seed {seed}")
        found = run(given, shape, device, seed)
        if dist.get_rank() == 0:
            report(given, shape, device, found, built)
        dist.barrier()
    except MTMoEError as error:
        print(f"bench_ep, rank {env.rank()}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    finally:
        dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
