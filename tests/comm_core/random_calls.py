"""A long conversation between ranks: random calls on two buffers, valid and invalid mixed, nothing in a fixed order.

All ranks draw the same conversation from one seed. A valid call must give what the reference says, sooner or later: an
asynchronous one is looked at when other calls have followed it. An invalid one must raise on all ranks, each in the way
that its part in the mistake asks for. Two buffers serve the whole conversation: an error must leave them as they were.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch

from comm_core import ElasticBuffer, EPHandle, EventOverlap, reference
from comm_core.runtime import device as devices
from comm_core.runtime.errors import CommError, MTMoEError, PeerTimeout, UsageError
from tests.comm_core import cases
from tests.comm_core.cases import Case

TIMEOUT = 30.0
MOST_OPEN, MOST_FLYING = 6, 4
Arguments = dict[str, Any]


@dataclass
class Open:
    """A handle that is out, and what the reference says of it."""

    buffer: int
    case: Case
    data: cases.Data
    wanted: list[reference.Dispatched]
    handle: EPHandle


def _ids(arguments: Arguments, value: int) -> Arguments:
    ids = arguments["topk_idx"].clone()
    ids[0, 0] = value
    return {"topk_idx": ids}


def _twice(arguments: Arguments) -> Arguments:
    ids = arguments["topk_idx"]
    return {"topk_idx": torch.zeros_like(ids) if ids.shape[1] > 1 else ids - 99}


FRESH, ALL_DATA = ("dispatch", "prepare"), ("dispatch", "cached", "combine")
EVERY = ("dispatch", "cached", "prepare", "combine")


def _more_rows(a: Arguments) -> Arguments:
    return {"x": torch.cat([a["x"], a["x"][:1]]) if len(a["x"]) else a["x"].new_zeros(2, 8)}


def _fewer_rows(a: Arguments) -> Arguments:
    """Expanded rows may be more than are needed; where none are, nothing takes their place."""
    return {"x": a["x"][:-1] if len(a["x"]) else None}


# (kinds of calls, change of the arguments on the rank at fault): the rank alone is wrong.
LOCAL: list[tuple[tuple[str, ...], Callable[[Arguments], Arguments]]] = [
    (FRESH, lambda a: _ids(a, a["num_experts"])),
    (FRESH, lambda a: _ids(a, -2)),
    (FRESH, _twice),
    (FRESH, lambda a: {"topk_idx": a["topk_idx"].float()}),
    (FRESH, lambda a: {"topk_idx": a["topk_idx"][0]}),
    (FRESH, lambda a: {"num_experts": a["num_experts"] + 1}),
    (FRESH, lambda a: {"num_experts": 0}),
    (FRESH, lambda a: {"expert_alignment": -4}),
    (FRESH, lambda a: {"num_max_tokens_per_rank": 1, "topk_idx": a["topk_idx"].repeat(2, 1)}),
    (("dispatch", "cached"), _more_rows),
    (("combine",), lambda a: _fewer_rows(a) if a["handle"].do_expand else _more_rows(a)),
    (ALL_DATA, lambda a: {"x": a["x"].long()}),
    (ALL_DATA, lambda a: {"x": None}),
    (ALL_DATA, lambda a: {"x": a["x"].new_zeros(len(a["x"]), 0)}),
    (ALL_DATA, lambda a: {"x": a["x"].new_zeros(2, len(a["x"]), a["x"].shape[1])}),
    (ALL_DATA, lambda a: {"topk_weights": torch.ones(3, 3, 3)}),
    (ALL_DATA, lambda a: {"topk_weights": [1.0]}),
    (("cached", "combine"), lambda a: {"handle": "handle"}),
    (("cached",), lambda a: {"num_experts": 10**6}),
    (("cached",), lambda a: {"do_cpu_sync": True}),
    (("cached",), lambda a: {"topk_idx": a["handle"].topk_idx}),
    (("combine",), lambda a: {"bias": a["x"].new_zeros(99, a["x"].shape[1])}),
    (("combine",), lambda a: {"bias": (None, None, None)}),
    (("combine",), lambda a: {"x": (a["x"], a["x"])}),
    (("dispatch",), lambda a: {"do_cpu_sync": False, "num_max_tokens_per_rank": 0}),
    (("dispatch",), lambda a: {"cumulative_local_expert_recv_stats": torch.zeros(999, dtype=torch.int32)}),
    (("dispatch",), lambda a: {"num_sms": -1}),
]  # fmt: skip
# The same where each rank by itself is right, and the ranks differ.
SPLIT: list[tuple[tuple[str, ...], Callable[[Arguments], Arguments]]] = [
    (FRESH, lambda a: {"num_experts": a["num_experts"] * 2}),
    (FRESH, lambda a: {"expert_alignment": a["expert_alignment"] + 1}),
    (FRESH, lambda a: {"do_expand": not a["do_expand"]}),
    (FRESH, lambda a: {"num_max_tokens_per_rank": 77}),
    (ALL_DATA, lambda a: {"x": a["x"].repeat(1, 2)}),
    (ALL_DATA, lambda a: {"x": a["x"].float() if a["x"].dtype != torch.float32 else a["x"].bfloat16()}),
    (("cached",), lambda a: {"topk_weights": None if a["topk_weights"] is not None else
                             torch.ones(a["handle"].topk_idx.shape)}),
    (("combine",), lambda a: {"bias": a["x"].new_zeros(a["handle"].num_tokens, a["x"].shape[1])}),
    (("combine",), lambda a: {"topk_weights": torch.ones(
        (len(a["x"]),) if a["handle"].do_expand else (len(a["x"]), a["handle"].num_topk))}),
    (EVERY, lambda a: {"instead": "barrier"}),
    (FRESH, lambda a: {"instead": "the other buffer"}),
]  # fmt: skip


class Conversation:
    """The calls of one rank, drawn from a seed that all ranks share."""

    def __init__(self, buffers: tuple[ElasticBuffer, ElasticBuffer], seed: int) -> None:
        self.buffers, self.rank, self.num_ranks = buffers, buffers[0].rank, buffers[0].num_ranks
        self._able, self._device = buffers[0]._backend.capabilities, buffers[0].device
        self._rng = random.Random(seed)
        self._open: list[Open] = []
        self._flying: list[tuple[EventOverlap, Callable[[], list[str]]]] = []
        self.tally: Counter[str] = Counter()
        self.bad: list[str] = []

    def run(self, num_calls: int) -> None:
        """Makes the calls, then brings everything home that is still out."""
        while sum(self.tally.values()) < num_calls and len(self.bad) < 5:
            number, start = sum(self.tally.values()), time.monotonic()
            action = self._choose()
            with cases.poison(self._rng.random() < 0.5):
                found = getattr(self, f"_{action}")()
            self.tally[action] += 1
            seconds = time.monotonic() - start
            found += [f"took {seconds:.1f} s"] if seconds > TIMEOUT / 2 else []
            self.bad += [f"rank {self.rank}, call {number} ({action}): {what}" for what in found]
        while self._open and not self.bad:
            self.bad += self._combine(last=True)
        while self._flying and not self.bad:
            self.bad += self._land()

    def _choose(self) -> str:
        if len(self._flying) > MOST_FLYING:
            return "land"
        if len(self._open) > MOST_OPEN:
            return "combine"
        choices = {"dispatch": 4, "prepare": 2, "barrier": 1}
        # Elsewhere ranks that disagree hear of it later, each at another call.
        choices |= {"mistake": 4} if self._device.type in self._able.host_checked_kinds else {}
        choices |= {"cached": 3, "combine": 5} if self._open else {}
        choices |= {"land": 2} if self._flying else {}
        return self._rng.choices(list(choices), list(choices.values()))[0]

    def _case(self) -> Case:
        rng = self._rng
        num_local = rng.randint(1, 4)
        case = replace(
            cases.random_case(rng, self.num_ranks),
            tokens=tuple(rng.choice((0, 1, 2, 3, 5)) for _ in range(self.num_ranks)),
            hidden=rng.choice((8, 16, 40)),
            num_local=num_local,
            num_topk=rng.randint(1, min(5, num_local * self.num_ranks)),
            dtype=rng.choice(self._able.dtypes),
            prepared=False,
        )
        return case if self._device.type in self._able.fp8_kinds else replace(case, scales="")

    def _opened(self, case: Case) -> tuple[int, cases.Data, list[reference.Dispatched]]:
        data = cases.draw(case)
        wanted = reference.dispatch(
            data.x, data.topk_idx, data.weights, num_experts=case.num_experts, expert_alignment=case.alignment,
            do_expand=case.do_expand,
        )  # fmt: skip
        return self._rng.randrange(2), data, wanted

    def _dispatch(self) -> list[str]:
        case = self._case()
        which, data, wanted = self._opened(case)
        x, weights = self._inputs(case, data)
        stats = torch.zeros(case.num_local, dtype=torch.int32, device=self._device)
        got = cases.send(self.buffers[which], case, x, data.topk_idx[self.rank].to(self._device), weights, stats)
        self._open.append(Open(which, case, data, wanted, got[3]))
        return self._arriving(self._open[-1], got, stats)

    def _inputs(self, case: Case, data: cases.Data) -> tuple[Any, torch.Tensor | None]:
        x: Any = data.x[self.rank].to(self._device)
        weights = None if data.weights is None else data.weights[self.rank].to(self._device)
        return cases.cast(x, case) if case.scales else x, weights

    def _prepare(self) -> list[str]:
        case = self._case()
        which, data, wanted = self._opened(case)
        handle = self.buffers[which].prepare(data.topk_idx[self.rank].to(self._device), **self._routing(case))
        self._open.append(Open(which, case, data, wanted, handle))
        # Half of them are read at once, the others by a later call.
        return cases.check_handle(handle, case, wanted[self.rank]) if self._rng.random() < 0.5 else []

    def _cached(self) -> list[str]:
        it = self._rng.choice(self._open)
        x, weights = self._inputs(it.case, it.data)
        later = self._rng.random() < 0.5
        got = self.buffers[it.buffer].dispatch(
            x, handle=it.handle, topk_weights=weights, async_with_compute_stream=later
        )
        return self._arriving(it, got, None)

    def _arriving(self, it: Open, got: tuple[Any, ...], stats: torch.Tensor | None) -> list[str]:
        """Looks at what a dispatch returned, now or when its event has been waited for."""
        mine = it.wanted[self.rank]

        def check() -> list[str]:
            parts = got[0] if it.case.scales else (got[0],)
            pairs = list(zip(parts, cases.received_parts(it.case, it.data, self.rank), strict=True))
            pairs += [(got[1], mine.recv_topk_idx), (got[2], mine.recv_topk_weights)]
            bad = [f"part {at} in {it.case}" for at, pair in enumerate(pairs) if not cases.same_bytes(*pair)]
            if stats is not None and stats.tolist() != list(mine.expert_counts):
                bad.append(f"statistics in {it.case}")
            return bad

        return self._later(got[4], check)

    def _combine(self, last: bool = False) -> list[str]:
        it = self._open[self._rng.randrange(len(self._open))]
        if last or self._rng.random() < 0.7:
            self._open.remove(it)
        event, check = cases.start_combine(self.buffers[it.buffer], it.case, it.data, it.wanted, it.handle)
        return self._later(event, lambda: [f"{what} in {it.case}" for what in check()])

    def _later(self, event: EventOverlap, check: Callable[[], list[str]]) -> list[str]:
        if event.event is None:
            return check()
        self._flying.append((event, check))
        return []

    def _land(self) -> list[str]:
        event, check = self._flying.pop(self._rng.randrange(len(self._flying)))
        event.current_stream_wait()
        return check()

    def _barrier(self) -> list[str]:
        self.buffers[self._rng.randrange(2)].barrier()
        return []

    @staticmethod
    def _routing(case: Case) -> Arguments:
        return {
            "num_experts": case.num_experts,
            "expert_alignment": case.alignment,
            "do_expand": case.do_expand,
            "num_max_tokens_per_rank": case.bound,
        }

    def _valid(self, kind: str) -> tuple[int, Arguments]:
        """A buffer and the arguments of a call that would be right."""
        if kind in FRESH:
            case = replace(self._case(), tokens=(3,) * self.num_ranks, masked=0.0)
            data = cases.draw(case)
            arguments = self._routing(case) | {"topk_idx": data.topk_idx[self.rank]}
            return self._rng.randrange(2), arguments | ({"x": data.x[self.rank]} if kind == "dispatch" else {})
        it = self._rng.choice(self._open)
        num_rows = it.handle.num_recv_rows if kind == "combine" else it.handle.num_tokens
        return it.buffer, {"x": torch.zeros(num_rows, 8), "handle": it.handle, "topk_weights": None}

    def _mistake(self) -> list[str]:
        """One rank makes a mistake, or differs from the others; what is wrong with the answers of this rank."""
        kind = self._rng.choice(EVERY if self._open else FRESH)
        local = self._rng.random() < 0.7
        changes = [change for kinds, change in (LOCAL if local else SPLIT) if kind in kinds]
        change, at_fault = self._rng.choice(changes), self._rng.randrange(self.num_ranks)
        later, (which, arguments) = self._rng.random() < 0.3, self._valid(kind)
        if kind != "prepare":
            arguments["async_with_compute_stream"] = later
        given = arguments | (change(arguments) if self.rank == at_fault else {})
        what = f"{kind} with {[name for name in given if given[name] is not arguments.get(name)]} on rank {at_fault}"
        try:
            self._call(kind, which, given)
        except MTMoEError as error:
            wanted = UsageError if local and self.rank == at_fault else CommError
            named = not local or self.rank == at_fault or f"because of rank {at_fault}: " in str(error)
            named = named and (local or "disagree on" in str(error))
            good = isinstance(error, wanted) and not isinstance(error, PeerTimeout) and named
            return [] if good else [f"{what}: {type(error).__name__} {error}"]
        return [f"{what}: no error"]

    def _call(self, kind: str, which: int, arguments: Arguments) -> None:
        instead = arguments.pop("instead", "")
        if instead == "barrier":
            self.buffers[which].barrier()
            return
        buffer = self.buffers[1 - which if instead else which]
        if kind == "prepare":
            _ = buffer.prepare(arguments.pop("topk_idx"), **arguments).num_recv_tokens
        else:
            call = buffer.combine if kind == "combine" else buffer.dispatch
            call(arguments.pop("x"), **arguments)[-1].current_stream_wait()


def talk(rank: int, backend: str, seed: int, num_calls: int, kind: str = "cpu") -> tuple[list[str], dict[str, int]]:
    """A conversation on the default group; what is wrong, and how many calls of each kind were made.

    Args:
        rank: this rank; ranks share devices where there are fewer of them.
        backend, seed, num_calls: of the conversation.
        kind: of device.
    """
    device = devices.of(kind, rank % devices.count(kind))
    options: Arguments = {"backend": backend, "num_cpu_timeout_secs": TIMEOUT, "device": device}
    with ElasticBuffer(**options) as first, ElasticBuffer(allow_multiple_reduction=False, **options) as second:
        conversation = Conversation((first, second), seed)
        conversation.run(num_calls)
        if conversation.bad:
            raise AssertionError("\n".join(conversation.bad))
    return conversation.bad, dict(conversation.tally)
