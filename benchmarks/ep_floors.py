"""What the operations are to reach, the form of the results, and the table that sets the two beside each other.

The floors are for two H200 of one host and the sizes of `STANDARD`; elsewhere the table shows times alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.ep_data import Shape
from benchmarks.ep_operations import Operation

STANDARD = Shape(tokens=8192, hidden=7168, topk=8, experts=256, ranks=2)
SMALL_TOKENS = 128
# Multiprocessors that an operation may take: those with expanded rows, and those of a few tokens; all others.
WIDE, NARROW = 64, 16
BUILD_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Floor:
    """One line of the table.

    Attributes:
        operation: what is measured, with ordinary tensors.
        deepep: what DeepEP 2.1.0 takes, as text.
        link_us: what the remote half takes at 323 GB/s, the rate of mixed traffic; 0 where it is nothing.
        zero_copy_us: to reach where what is sent needs no copy.
        ordinary_us: to reach with ordinary tensors; None where nothing is asked.
    """

    operation: Operation
    deepep: str
    link_us: float
    zero_copy_us: float
    ordinary_us: float | None = None

    def us(self, zero_copy: bool) -> float | None:
        """Microseconds to reach."""
        return self.zero_copy_us if zero_copy else self.ordinary_us


FLOORS = (
    Floor(Operation("dispatch", "fp8"), "268 us, 64 SMs", 187, 200, 255),
    Floor(Operation("dispatch", "fp8", cached=True), "267 us", 187, 195, 255),
    Floor(Operation("dispatch", "bf16"), "", 362, 365, 460),
    Floor(Operation("dispatch", "fp8", expanded=True), "450 us", 187, 260, 420),
    Floor(Operation("dispatch", "bf16", expanded=True, cached=True), "", 362, 450),
    Floor(Operation("combine", "bf16"), "469 us, 64 SMs", 362, 370, 440),
    Floor(Operation("combine", "bf16", expanded=True), "524 us", 362, 460, 510),
    Floor(Operation("dispatch", "fp8", graph=True), "17.6 us, kernels", 0, 14, 14),
    Floor(Operation("combine", "bf16", graph=True), "", 0, 14),
)


def sm_limit(operation: Operation) -> int:
    """Multiprocessors that the operation may take."""
    return WIDE if operation.expanded or operation.graph else NARROW


@dataclass(frozen=True, slots=True)
class Measured:
    """An operation with its times.

    Attributes:
        operation: which.
        tokens: a rank.
        ranks: of the group.
        remote_bytes: that cross into the busiest rank.
        by_sms: microseconds by the number of SMs asked for.
        kernels: blocks of each kernel at the number of SMs that was chosen.
        sms: the number chosen, the fastest within the limit.
    """

    operation: Operation
    tokens: int
    ranks: int
    remote_bytes: int
    by_sms: dict[int, float]
    kernels: dict[str, int]
    sms: int

    @property
    def us(self) -> float:
        """The time with that number."""
        return self.by_sms[self.sms]

    @property
    def sms_taken(self) -> int:
        """Multiprocessors of the widest kernel that moves or adds rows, which may be more than were asked for."""
        return max((blocks for name, blocks in self.kernels.items() if name != "layout"), default=self.sms)


def best(by_sms: dict[int, float], limit: int) -> int:
    """The fastest number of SMs within the limit; the smallest where none is."""
    allowed = [sms for sms in by_sms if sms <= limit] or [min(by_sms)]
    return min(allowed, key=lambda sms: by_sms[sms])


def row(measured: Measured, ceiling_gbs: float) -> dict[str, Any]:
    """A row of the results; `over_ceiling` is the time over that of the remote bytes at the ceiling."""
    operation, us = measured.operation, measured.us
    made = {
        "operation": operation.operation,
        "dtype": operation.dtype,
        "expanded": operation.expanded,
        "cached": operation.cached,
        "zero_copy": operation.zero_copy,
        "tokens": measured.tokens,
        "ranks": measured.ranks,
        "us": round(us, 2),
        "sms": measured.sms_taken,
        "peer_gbs": round(measured.remote_bytes / us / 1e3, 1),
        "over_ceiling": round(us * ceiling_gbs * 1e3 / measured.remote_bytes, 3) if measured.remote_bytes else None,
    }
    return made | {name: True for name in ("graph", "host_wait", "low_latency") if getattr(operation, name)}


def verdict(measured: Measured) -> str:
    """Passed or missed, and by how much; nothing where nothing is asked. For the sizes of `STANDARD` alone."""
    floor = _floor_of(measured.operation)
    wanted = None if floor is None else floor.us(measured.operation.zero_copy)
    if wanted is None:
        return ""
    if measured.us > wanted:
        return f"missed by {measured.us - wanted:.1f} us ({measured.us / wanted - 1:.0%})"
    limit = sm_limit(measured.operation)
    return "pass" if measured.sms_taken <= limit else f"missed: {measured.sms_taken} SMs, {limit} allowed"


def build_verdict(seconds: float | None) -> str:
    """The same for the cold build of the library."""
    if seconds is None:
        return "cold build of the kernel library: not measured, there is no compiler here"
    told = "pass" if seconds <= BUILD_SECONDS else f"missed by {seconds - BUILD_SECONDS:.1f} s"
    return f"cold build of the kernel library: {seconds:.1f} s, to reach {BUILD_SECONDS:g} s, DeepEP 94 s: {told}"


def is_standard(shape: Shape) -> bool:
    """The floors are for these sizes, whatever the alignment of expanded rows."""
    return all(
        getattr(shape, name) == getattr(STANDARD, name) for name in ("tokens", "hidden", "topk", "experts", "ranks")
    )


def table(measured: Sequence[Measured], ceiling_gbs: float, *, judged: bool) -> str:
    """The report for people; `judged` adds what is to be reached."""
    head = f"{'operation':<40}{'us':>8}{'SMs':>5}{'GB/s':>7}{'/ceiling':>10}"
    lines = [head + (f"  {'to reach':<16}{'DeepEP':<18}{'link':<8}verdict" if judged else "")]
    for item in measured:
        made = row(item, ceiling_gbs)
        line = f"{item.operation!s:<40}{item.us:>8.1f}{made['sms']:>5}"
        line += f"{made['peer_gbs']:>7.0f}{made['over_ceiling'] or 0:>10.2f}"
        floor = _floor_of(item.operation) if judged else None
        if floor is not None:
            wanted = floor.us(item.operation.zero_copy)
            limit = "" if wanted is None else f"{wanted:g} us, {sm_limit(item.operation)} SMs"
            link = f"{floor.link_us:g} us" if floor.link_us else ""
            line += f"  {limit:<16}{floor.deepep:<18}{link:<8}{verdict(item)}"
        lines.append(line.rstrip())
    return "\n".join(lines)


def _floor_of(operation: Operation) -> Floor | None:
    """The floor of an operation. A fresh dispatch counts as it is made without a host wait.

    Both kinds of calls for a few tokens have the same: V1's, whose combine brings every lane's row home, and V2's.
    """
    for floor in FLOORS:
        wanted = floor.operation
        same = all(
            getattr(operation, name) == getattr(wanted, name)
            for name in ("operation", "dtype", "expanded", "cached", "graph")
        )
        if same and not operation.host_wait:
            return floor
    return None
