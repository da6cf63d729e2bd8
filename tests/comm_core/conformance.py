"""The conformance suite: what every backend must carry out exactly as comm_core.reference defines it.

    conform(group, "posix", seed)                       # inside the ranks
    check("collective", "cuda", num_ranks=8, seed=1)    # from outside, on resident ranks
    python -m tests.comm_core.conformance --backend posix --ranks 4

A list of cases at the edges of what is allowed, and random ones behind it; all follow from the seed. What a backend
does not claim in its `Capabilities` is left out and counted, so that a run says what it has not shown.
"""

from __future__ import annotations

import argparse
import random
from collections import Counter
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist

from comm_core import ElasticBuffer, layout
from comm_core.backends import registry
from comm_core.runtime import device as devices
from tests.comm_core import cases
from tests.comm_core.cases import Case
from tests.pool import run_ranks


@dataclass
class Report:
    """What a rank has found.

    Attributes:
        bad: differences from the reference.
        ran: number of cases carried out.
        left_out: number of cases by the capability they would have needed.
    """

    bad: list[str] = field(default_factory=list)
    ran: int = 0
    left_out: Counter[str] = field(default_factory=Counter)


def edge_cases(seed: int, num_ranks: int, *, tiny: bool = False) -> list[Case]:
    """The edges of what is allowed, plain and expanded; `tiny` leaves the widest rows and many lanes out."""
    num_topk = min(4, 2 * num_ranks)
    plain = Case(seed, tuple(4 + rank % 3 for rank in range(num_ranks)), 24, num_topk, 2, torch.bfloat16)
    found = []
    for base in (plain, replace(plain, do_expand=True, alignment=4)):
        found += [
            # Routings.
            replace(base, tokens=(0,) * num_ranks),
            replace(base, tokens=(0,) * (num_ranks - 1) + (7,), asynchronous=True),
            replace(base, tokens=(0, *range(2, num_ranks + 1)), num_bias=2),
            replace(base, masked=1.1, num_bias=1),
            replace(base, one_expert=True, num_topk=1, masked=0.0),
            replace(base, one_expert=True, weights=False, prepared=True),
            # Several lanes on each of at least three ranks, where the order of the sums shows.
            replace(base, num_local=6, num_topk=min(8, 6 * num_ranks), hidden=256, masked=0.1, num_bias=1),
            replace(base, num_local=32, num_topk=32, masked=0.0, dtype=torch.float16),
            replace(base, num_local=5, num_topk=min(31, 5 * num_ranks), masked=0.3),
            # Widths: odd multiples of 8, of 4 bytes, of nothing, and the largest.
            replace(base, hidden=8, dtype=torch.float32, alignment=256),
            replace(base, hidden=1000),
            replace(base, hidden=2056, dtype=torch.float16, alignment=1),
            replace(base, hidden=8192, alignment=128),
            replace(base, hidden=3, dtype=torch.float16),
            replace(base, hidden=40, dtype=torch.float64, asynchronous=True, previous=True),
            # FP8 with ceil(hidden / 128) columns of scales.
            replace(base, hidden=128, scales="fp32"),
            replace(base, hidden=200, scales="packed", column_major=True),
            replace(base, hidden=1096, scales="fp32", column_major=True, weights=False),
            # Shapes without a host wait.
            replace(base, static=True, bound=9, asynchronous=True),
            replace(base, static=True, bound=9, tokens=(0,) * num_ranks),
            replace(base, static=True, bound=9, hidden=136, scales="packed", column_major=True),
        ]
    found = [replace(case, poisoned=index % 4 != 0) for index, case in enumerate(found)]
    return [case for case in found if not tiny or (case.hidden <= 256 and case.num_topk <= 8)]


def suite(seed: int, num_ranks: int, num_random: int, *, tiny: bool = False) -> list[Case]:
    """Every case of a run: the edges, then random ones."""
    rng = random.Random(seed)
    return edge_cases(seed, num_ranks, tiny=tiny) + [cases.random_case(rng, num_ranks) for _ in range(num_random)]


def lacks(buffer: ElasticBuffer, case: Case) -> str | None:
    """The capability that a case needs and the backend of a buffer does not claim; None where it has all."""
    able, kind = buffer._backend.capabilities, buffer.device.type
    if case.dtype not in able.dtypes:
        return f"dtypes ({case.dtype})"
    if case.hidden % able.hidden_multiple:
        return f"hidden_multiple ({able.hidden_multiple})"
    if case.scales and kind not in able.fp8_kinds:
        return f"fp8_kinds ({kind})"
    if case.static and not able.worst_case_outputs:
        return "worst_case_outputs"
    return None


def conform(
    group: dist.ProcessGroup,
    backend: str,
    seed: int,
    *,
    device: torch.device | None = None,
    num_random: int = 20,
    tiny: bool = False,
    timeout: float = 30.0,
) -> Report:
    """Carries the suite out on this rank of a group; every rank of the group calls it alike.

    Args:
        group: the ranks.
        backend: name of a backend.
        seed: of everything.
        device: where tensors live; the CPU by default.
        num_random: random cases behind those at the edges.
        tiny: leave the largest cases out.
        timeout: of the buffers, in seconds.
    """
    report = Report()
    todo = suite(seed, dist.get_world_size(group), num_random, tiny=tiny)
    device = device or torch.device("cpu")
    for multiple in (True, False):
        with ElasticBuffer(
            group, backend=backend, device=device, num_cpu_timeout_secs=timeout, allow_multiple_reduction=multiple
        ) as buffer:
            if not multiple and not buffer._backend.capabilities.single_reduction:
                report.left_out["single_reduction"] += sum(case.do_expand for case in todo)
                continue
            for case in todo:
                if not multiple and not case.do_expand:
                    continue  # the same sum
                if buffer._backend.capabilities.needs_token_bound and not case.bound:
                    case = replace(case, bound=max(1, *case.tokens))
                reason = lacks(buffer, case)
                if reason is not None:
                    report.left_out[reason] += 1
                    continue
                report.ran += 1
                report.bad += cases.run(buffer, case)
    return report


def neighbours_swapped(plan: layout.SendPlan) -> layout.SendPlan:
    """A fault to plant: one row for each rank changes places with its neighbour, every other row is right."""
    rows, ends = plan.send_token.clone(), plan.send_counts.cumsum(0)
    for first in (ends - plan.send_counts)[plan.send_counts > 1].tolist():
        rows[[first, first + 1]] = rows[[first + 1, first]]
    return replace(plan, send_token=rows)


def on_rank(rank: int, backend: str, kind: str, seed: int, num_random: int, tiny: bool) -> Report:
    """`conform` on the default group; ranks share the devices where there are fewer of them."""
    assert dist.group.WORLD is not None
    device = devices.of(kind, rank % devices.count(kind))
    return conform(dist.group.WORLD, backend, seed, device=device, num_random=num_random, tiny=tiny)


def check(
    backend: str,
    kind: str,
    num_ranks: int,
    seed: int,
    *,
    num_random: int = 20,
    tiny: bool = False,
    timeout: float = 280.0,
) -> list[Report]:
    """`conform` on `num_ranks` resident processes with devices of a kind; a report a rank.

    Args:
        backend, seed, num_random, tiny: as in `conform`.
        kind: "cpu", "cuda" or "musa".
        num_ranks: size of the group.
        timeout: seconds for all of it.
    """
    return run_ranks(num_ranks, on_rank, backend, kind, seed, num_random, tiny, timeout=timeout)


def main() -> None:
    """Runs the suite and prints what each rank found."""
    parser = argparse.ArgumentParser(description="Is a backend what the reference defines?")
    parser.add_argument("--backend", default="collective", choices=registry.names())
    parser.add_argument("--device", default="cpu", choices=devices.KINDS)
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**31))
    parser.add_argument("--random", type=int, default=20, help="random cases behind those at the edges")
    parser.add_argument("--timeout", type=float, default=280.0, help="seconds for all of it")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    reports = check(
        given.backend, given.device, given.ranks, given.seed, num_random=given.random, timeout=given.timeout
    )
    for rank, report in enumerate(reports):
        print(f"rank {rank}: {report.ran} cases, {len(report.bad)} differences, left out: {dict(report.left_out)}")
        print("\n".join(report.bad[:20]), end="\n" if report.bad else "")
    if any(report.bad for report in reports):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
