"""`python -m comm_core bench`: dispatch and combine of every usable backend beside a plain all-to-all, in one run.

The plain all-to-all is what a model without this package does: sort the rows by destination rank, exchange the counts,
`all_to_all_single`, and back again with a sum. It moves the same rows, one per (token, rank). All take turns inside
each repetition, so that a noisy moment meets all of them, and the median over the repetitions is reported. Before
anything is timed every way has to give the same rows and sums, bit for bit where the order of sums is defined.

A time is that of the slowest rank: ranks start together behind a barrier, and an operation has ended when it has ended
everywhere. `dispatch` begins with the router's ids in hand and includes the exchange of counts.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from comm_core.backends import registry
from comm_core.elastic import ElasticBuffer
from comm_core.runtime import device as devices
from comm_core.runtime.errors import CommError, UsageError

PLAIN = "all_to_all_single"
_SECONDS = 600.0


@dataclass(frozen=True, slots=True)
class Settings:
    """What is measured; `repeats` timed round trips a backend after `warmup` others."""

    device: str = "cpu"
    ranks: int = 2
    tokens: int = 4096
    hidden: int = 2048
    topk: int = 4
    experts: int = 16
    dtype: str = "bfloat16"
    repeats: int = 20
    warmup: int = 3
    seed: int = 0

    def check(self) -> None:
        """Raises UsageError for what can not be run."""
        for name, least in (("ranks", 1), ("hidden", 1), ("topk", 1), ("experts", 1), ("repeats", 1)):
            if getattr(self, name) < least:
                raise UsageError(f"{name}={getattr(self, name)}", allowed=f"at least {least}", fix=f"pass --{name}")
        if self.tokens < 0 or self.warmup < 0:
            raise UsageError(f"tokens={self.tokens}, warmup={self.warmup}", allowed="not negative", fix="correct it")
        if self.experts % self.ranks or self.topk > self.experts:
            raise UsageError(
                f"experts={self.experts}, topk={self.topk}, ranks={self.ranks}",
                allowed="a multiple of ranks, at least topk",
                fix="pass --experts",
            )
        if self.device not in devices.KINDS:
            raise UsageError(f"device={self.device!r}", allowed=", ".join(devices.KINDS), fix="pass --device")
        if self.device != "cpu" and devices.count(self.device) < self.ranks:
            raise UsageError(
                f"{self.ranks} ranks on {devices.count(self.device)} {self.device} devices",
                allowed="one device a rank",
                fix="pass fewer --ranks",
            )


class Way(Protocol):
    """One way to move tokens to the ranks of their experts and back."""

    def dispatch(self) -> torch.Tensor:
        """Rows received, [n, hidden], in (source rank, token) order."""
        ...

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Sum of the rows of each token, [tokens, hidden]."""
        ...

    def close(self) -> None:
        """Frees what it holds."""
        ...


class BufferWay:
    """Through an ElasticBuffer."""

    def __init__(self, backend: str, settings: Settings, x: torch.Tensor, topk_idx: torch.Tensor) -> None:
        self._buffer = ElasticBuffer(backend=backend, device=x.device, num_cpu_timeout_secs=60)
        self._x, self._ids, self._num_experts = x, topk_idx, settings.experts
        self._handle: Any = None

    def dispatch(self) -> torch.Tensor:
        """Exchanges counts and moves rows."""
        rows, _, _, self._handle, _ = self._buffer.dispatch(self._x, self._ids, num_experts=self._num_experts)
        return rows

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Moves rows back and adds."""
        return self._buffer.combine(rows, self._handle)[0]

    def close(self) -> None:
        """Closes the buffer."""
        self._buffer.close()


class PlainWay:
    """Through torch.distributed alone, on the default group."""

    def __init__(self, settings: Settings, x: torch.Tensor, topk_idx: torch.Tensor) -> None:
        self._x, self._ids, self._settings = x, topk_idx, settings
        self._tokens, self._given, self._got = topk_idx[:0, 0], [0], [0]

    def dispatch(self) -> torch.Tensor:
        """Sorts rows by rank, exchanges counts, moves rows."""
        ranks = self._settings.ranks
        owner = self._ids.div(self._settings.experts // ranks, rounding_mode="floor")
        goes = torch.zeros(ranks, self._x.shape[0], dtype=torch.bool, device=self._x.device)
        goes.t().scatter_(1, owner, True)
        self._tokens = goes.nonzero()[:, 1]
        given = goes.sum(1)
        got = torch.empty_like(given)
        dist.all_to_all_single(got, given)
        self._given, self._got = given.tolist(), got.tolist()
        return self._exchange(self._x[self._tokens], self._got, self._given)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Moves rows back and adds in fp32."""
        back = self._exchange(rows, self._given, self._got)
        total = torch.zeros(self._x.shape, dtype=torch.float32, device=rows.device)
        return total.index_add_(0, self._tokens, back.float()).to(rows.dtype)

    def close(self) -> None:
        """Nothing to free."""

    def _exchange(self, rows: torch.Tensor, got: list[int], given: list[int]) -> torch.Tensor:
        out = rows.new_empty(sum(got), rows.shape[1])
        dist.all_to_all_single(out.view(torch.uint8), rows.view(torch.uint8), got, given)
        return out


def configure(parser: argparse.ArgumentParser) -> None:
    """Options of the command, the fields of `Settings`."""
    parser.add_argument("--device", choices=devices.KINDS, default="cpu", help="where the tokens live")
    parser.add_argument("--ranks", type=int, default=2, help="processes")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens a rank")
    parser.add_argument("--hidden", type=int, default=2048, help="elements a token")
    parser.add_argument("--topk", type=int, default=4, help="experts a token")
    parser.add_argument("--experts", type=int, default=16, help="experts of all ranks together")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=20, help="round trips the medians are taken of")
    parser.add_argument("--warmup", type=int, default=3, help="round trips before those")
    parser.add_argument("--seed", type=int, default=0, help="of the random tokens and ids")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(options: argparse.Namespace) -> int:
    """Measures and prints."""
    settings = Settings(**{name: getattr(options, name) for name in Settings.__dataclass_fields__})
    rows = measure(settings)
    print(json.dumps({"rows": rows}) if options.json else table(settings, rows))
    return 0


def measure(settings: Settings) -> list[dict[str, Any]]:
    """Rows of the table: backend, dispatch_us and combine_us, medians of the slowest rank's times.

    Raises:
        UsageError: settings that can not be run.
        CommError: a rank failed, or two ways gave different results; the message holds the reason.
    """
    settings.check()
    context = multiprocessing.get_context("spawn")
    answers: Any = context.Queue()
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        children = [
            context.Process(target=_child, args=(rank, settings, store, answers), daemon=True)
            for rank in range(settings.ranks)
        ]
        try:
            for child in children:
                child.start()
            rows = _collect(children, answers)
            for child in children:
                child.join(10)
        finally:
            for child in children:
                if child.is_alive():
                    child.kill()
                    child.join()
    return rows


def table(settings: Settings, rows: list[dict[str, Any]]) -> str:
    """The report for people."""
    told = ", ".join(f"{name} {value}" for name, value in asdict(settings).items())
    out = [told, f"{'backend':<20}{'dispatch us':>14}{'combine us':>14}{'both us':>14}"]
    for row in rows:
        both = row["dispatch_us"] + row["combine_us"]
        out.append(f"{row['backend']:<20}{row['dispatch_us']:>14.0f}{row['combine_us']:>14.0f}{both:>14.0f}")
    return "\n".join(out)


def _collect(children: list[Any], answers: Any) -> list[dict[str, Any]]:
    """The table from rank 0, or the first error of any rank."""
    end = time.monotonic() + _SECONDS
    rows: list[dict[str, Any]] | None = None
    done = 0
    while done < len(children):
        if not answers.empty():
            rank, problem, found = answers.get()
            if problem is not None:
                raise CommError(f"bench: rank {rank} failed: {problem}")
            rows = found if rank == 0 else rows
            done += 1
            continue
        dead = [rank for rank, child in enumerate(children) if child.exitcode not in (None, 0)]
        if dead or time.monotonic() > end:
            raise CommError(f"bench: rank {dead[0]} ended without a result" if dead else f"bench: over {_SECONDS:g} s")
        time.sleep(0.02)
    assert rows is not None
    return rows


def _child(rank: int, settings: Settings, store: str, answers: Any) -> None:
    torch.set_num_threads(1)
    try:
        device = devices.of(settings.device, rank)
        dist.init_process_group(
            devices.collective_backend(settings.device),
            init_method=f"file://{store}",
            rank=rank,
            world_size=settings.ranks,
            timeout=timedelta(seconds=60),
        )
        answers.put((rank, None, _measure(rank, settings, device)))
    except BaseException as error:
        answers.put((rank, f"{type(error).__name__}: {error}", None))
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _measure(rank: int, settings: Settings, device: torch.device) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(settings.seed * settings.ranks + rank)
    x = torch.randn(settings.tokens, settings.hidden, generator=generator).to(getattr(torch, settings.dtype))
    ids = torch.rand(settings.tokens, settings.experts, generator=generator).topk(settings.topk, dim=1).indices
    x, ids = x.to(device), ids.to(device)
    names = [name for name, kind, reason in registry.report() if kind == settings.device and reason is None]
    ways: dict[str, Way] = {name: BufferWay(name, settings, x, ids) for name in names}
    ways[PLAIN] = PlainWay(settings, x, ids)
    try:
        _check_same(ways, settings)
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        for _ in range(settings.warmup + settings.repeats):
            for name, way in ways.items():
                rows, first = _timed(way.dispatch, device)
                _, second = _timed(lambda way=way, rows=rows: way.combine(rows), device)  # type: ignore[misc]
                times[name].append((first, second))
    finally:
        for way in ways.values():
            way.close()
    found = []
    for name, pairs in times.items():
        slowest = torch.tensor(pairs[settings.warmup :], dtype=torch.float64, device=device).to(torch.float32)
        dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
        dispatch, combine = (statistics.median(column) for column in slowest.t().tolist())
        found.append({"backend": name, "dispatch_us": round(dispatch * 1e6, 1), "combine_us": round(combine * 1e6, 1)})
    return found


def _timed(call: Callable[[], torch.Tensor], device: torch.device) -> tuple[torch.Tensor, float]:
    """The result of a call that all ranks begin together, and its seconds on this rank."""
    dist.barrier()
    devices.synchronize(device)
    start = time.perf_counter()
    result = call()
    devices.synchronize(device)
    return result, time.perf_counter() - start


def _check_same(ways: dict[str, Way], settings: Settings) -> None:
    """All ways must give the same rows and the same sums; fp32 sums of a token in another order may round apart."""
    wanted = None
    for name, way in ways.items():
        rows = way.dispatch()
        found = (rows, way.combine(rows))
        if wanted is None:
            wanted = found
        exact = torch.equal(rows, wanted[0]) and (name == PLAIN or torch.equal(found[1], wanted[1]))
        if not exact or not torch.allclose(found[1].float(), wanted[1].float(), rtol=0.02, atol=0.02):
            raise CommError(f"{name} and {next(iter(ways))} give different rows or sums with {settings}")
