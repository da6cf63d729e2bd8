"""The low-latency calls against loops; what V1's own low-latency test asserts is here, lost ranks included."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_core import fp8
from comm_core.deep_ep.utils.math import calc_diff, hash_tensors
from comm_core.legacy import Buffer, logfmt, low_latency
from comm_core.runtime.errors import CommError, UsageError
from tests.comm_core import legacy_cases as cases
from tests.comm_core.legacy_cases import World
from tests.dist import run_ranks

GROUPS = ([0, 1, 2, 3], [0, 1, 3], [2])
FORMATS = ({"use_fp8": False}, {}, {"round_scale": True}, {"round_scale": True, "use_ue8m0": True})
BOUND = 12


def _arrivals(world: World, rank: int, expert: int, left: list[int]) -> list[tuple[int, int]]:
    """(source, token) of the rows of a local expert, from the ranks that are left."""
    e = rank * world.num_local + expert
    return [(s, t) for s in left for t, ids in enumerate(world.ids[s].tolist()) if e in ids]


def _finish(kind: str, event: Any, hook: Any) -> None:
    """Waits in the way that was asked for."""
    if kind == "hook":
        hook()
    else:
        assert hook is None
        event.current_stream_wait()


def _how(kind: str) -> dict[str, bool]:
    return {"hook": {"return_recv_hook": True}, "async": {"async_finish": True}}.get(kind, {})


def _round_trip(buffer: Buffer, world: World, form: dict[str, bool], rng: random.Random, left: list[int]) -> list[str]:
    """Dispatch and combine of one world on this rank; what is wrong."""
    rank, bad = buffer.rank, []
    num_ranks, num_local, hidden = len(world.x), world.num_local, world.x[rank].shape[1]
    kind = rng.choice(("hook", "async", "sync"))
    stats, cost = torch.full((num_local,), 5, dtype=torch.int32), torch.zeros(num_ranks, dtype=torch.int64)
    arguments = (world.x[rank], world.ids[rank], BOUND, world.num_experts, stats, cost)
    recv, counts, handle, event, hook = buffer.low_latency_dispatch(*arguments, **form, **_how(kind))
    _finish(kind, event, hook)
    sent: Any = [(x,) for x in world.x] if form == FORMATS[0] else [
        fp8.per_token_cast(x, round_scale="round_scale" in form, packed="use_ue8m0" in form) for x in world.x
    ]  # fmt: skip
    parts = recv if isinstance(recv, tuple) else (recv,)
    src_info, ranges, *sizes = handle
    bad += [] if sizes == [BOUND, hidden, world.num_experts] else ["sizes of the handle"]
    bad += [] if len(parts) == 1 or parts[1].stride(1) == 1 else ["scales are not column-major"]
    for expert in range(num_local):
        pairs = _arrivals(world, rank, expert, left)
        good = int(counts[expert]) == len(pairs) and int(stats[expert]) == 5 + len(pairs)
        # The ranges tile the block, and each names the rows of its source.
        for source in range(num_ranks):
            first, number = int(ranges[expert, source] >> 32), int(ranges[expert, source] & 0xFFFFFFFF)
            good &= src_info[expert, first : first + number].tolist() == [t for s, t in pairs if s == source]
        good &= sum(int(value & 0xFFFFFFFF) for value in ranges[expert]) == len(pairs)
        rows = [(int(ranges[expert, s] >> 32) + [t_ for s_, t_ in pairs if s_ == s].index(t), s, t) for s, t in pairs]
        for part, number in zip(parts, range(2), strict=False):
            good &= part.shape[:2] == (num_local, num_ranks * BOUND) and part.dtype == sent[rank][number].dtype
            good &= all(torch.equal(cases.raw(part[expert, i]), cases.raw(sent[s][number][t])) for i, s, t in rows)
            good &= not cases.raw(part[expert, len(pairs) :]).any()
        bad += [] if good else [f"expert {expert}: {int(counts[expert])} rows of {len(pairs)}"]
    bad += [] if kind != "sync" or bool((cost[left] > 0).all()) else ["wait costs"]
    bad += _same_tokens_home(buffer, world, handle, parts, left)
    bad += _combine(buffer, world, handle, rng, left)
    return [f"rank {rank}/{num_ranks} of {left}: {what} with {form}, {kind}" for what in bad]


def _same_tokens_home(buffer: Buffer, world: World, handle: Any, parts: Any, left: list[int]) -> list[str]:
    """Experts that return what they got: each token times the sum of its weights, within the format's error."""
    rank, height, hidden = buffer.rank, handle[0].shape[1], handle[3]
    rows = parts[0].reshape(-1, hidden)
    if len(parts) > 1:
        rows = fp8.per_token_cast_back(rows, parts[1].reshape(rows.shape[0], -1))
    y = rows.view(world.num_local, height, hidden)
    call = (y, world.ids[rank], world.weights[rank], handle)
    results = [buffer.low_latency_combine(*call, use_logfmt=use_logfmt)[0] for use_logfmt in (False, True)]
    owners = world.ids[rank].div(world.num_local, rounding_mode="floor").masked_fill(world.ids[rank] < 0, -1)
    weights = world.weights[rank].masked_fill(~torch.isin(owners, torch.tensor(left)), 0)
    wanted = world.x[rank].float() * weights.sum(1, keepdim=True)
    # An FP8 value is off by 2^-4 of itself at most, so the whole by 2^-9; DeepEP's 9e-4 is for many tokens together.
    limit = 1e-5 if len(parts) == 1 else 2.0**-9
    changed = [calc_diff(got, wanted) for got in results]
    return [] if max(changed) < limit else [f"tokens changed by {changed}"]


def _combine(buffer: Buffer, world: World, handle: Any, rng: random.Random, left: list[int]) -> list[str]:
    """Each expert returns rows of its own; each token gets their weighted sum, in lane order."""
    rank, num_local, dtype = buffer.rank, world.num_local, torch.bfloat16
    hidden, kind = world.x[rank].shape[1], rng.choice(("hook", "async", "sync"))

    zero_copy = rng.random() < 0.5
    use_logfmt = not zero_copy and rng.random() < 0.5

    def value(e: int, s: int, t: int) -> torch.Tensor:
        row = cases.uneven((hidden,), (e * 50 + s) * 50 + t, dtype)
        return row * 2.0**-13 if use_logfmt else row  # below 1, where the format changes them

    y = torch.full((num_local, len(world.x) * BOUND, hidden), float("nan"), dtype=dtype)
    for expert in range(num_local):
        for source in range(len(world.x)):
            first, number = int(handle[1][expert, source] >> 32), int(handle[1][expert, source] & 0xFFFFFFFF)
            for i in range(first, first + number):
                y[expert, i] = value(rank * num_local + expert, source, int(handle[0][expert, i]))
    ids, weights = world.ids[rank], world.weights[rank]
    out = torch.empty(ids.shape[0], hidden, dtype=dtype)
    if zero_copy:
        buffer.get_next_low_latency_combine_buffer(handle)[:, :, :] = y
        y = torch.zeros_like(y)
    options: dict[str, Any] = {"zero_copy": zero_copy, "use_logfmt": use_logfmt, "out": rng.choice((None, out))}
    got, event, hook = buffer.low_latency_combine(y, ids, weights, handle, **options, **_how(kind))
    _finish(kind, event, hook)
    want = torch.zeros(ids.shape[0], hidden, dtype=dtype)
    for token, lanes in enumerate(ids.tolist()):
        total = torch.zeros(hidden)
        for lane, e in enumerate(lanes):
            if e >= 0 and e // num_local in left:
                row = value(e, rank, token).float()
                total = total + (_formatted(row) if use_logfmt else row) * weights[token, lane]
        want[token] = total.to(dtype)
    same = torch.allclose(got.float(), want.float(), rtol=2**-7, atol=2e-5) if use_logfmt else torch.equal(got, want)
    bad = [] if got.dtype == dtype and same else [f"combine, use_logfmt={use_logfmt}"]
    bad += ["NaN"] if bool(got.isnan().any()) else []
    bad += ["out"] if options["out"] is not None and got.data_ptr() != out.data_ptr() else []
    return bad


def _formatted(row: torch.Tensor) -> torch.Tensor:
    return torch.tensor(cases.after_logfmt(row.tolist()))


def test_logfmt(fresh_random_data: int) -> None:
    """Against the formula value by value in fp64; the error bound; exact where it does not pay; no bias."""
    for hidden in (8, 130, 512, 640, 1024):
        x = (torch.randn(6, hidden) * 0.2).clamp(-0.99, 0.99).bfloat16()
        x[1] *= 8  # values of 1 and more
        x[2] = 0
        x[3, ::3] = 0
        x[4] = torch.randn(()).clamp(-0.9, 0.9)  # a single magnitude
        x[5, 0] = float("nan")
        got, plain = logfmt.round_trip(x), x.float()
        want = torch.stack([_formatted(row) for row in plain[:5]])
        near = (got[:5] - want).abs() <= 1e-5 * want.abs()
        assert near.double().mean() > 0.999, "another formula"  # a value between two codes may fall to either side
        assert torch.equal(got[[1, 2, 4]], plain[[1, 2, 4]]) and torch.equal(got[5, 1:], plain[5, 1:])
        assert not torch.equal(got[0], plain[0]) and torch.equal(got[3, ::3], plain[3, ::3])
        # Half a step of the widest range: 32 octaves in 510 steps.
        assert bool(((got[0] - plain[0]).abs() <= plain[0].abs() * (2 ** (32 / 510) - 1)).all())
    x = torch.rand(400, 1024) * 0.9
    assert abs(float((logfmt.round_trip(x) - x).mean())) < 2e-5
    assert logfmt.round_trip(torch.zeros(0, 640)).shape == (0, 640)


def _world(rng: random.Random, num_ranks: int) -> World:
    num_local = rng.choice((1, 3))
    tokens = tuple(rng.choice((0, 1, 5, BOUND)) for _ in range(num_ranks))
    num_topk = rng.randint(1, min(5, num_local * num_ranks))
    hidden = rng.choice((8, 130, 640, 1000))
    return cases.draw(rng.randrange(2**31), tokens, hidden, num_topk, num_local, torch.bfloat16, rng.choice((0.0, 0.2)))


def _everything(rank: int, backend: str, seed: int) -> list[str]:
    wrong: list[str] = []
    for ranks in GROUPS:
        group = dist.new_group(ranks)
        if rank not in ranks:
            continue
        rng = random.Random(seed + len(ranks))
        buffer = Buffer(group, low_latency_mode=True, num_cpu_timeout_secs=30, backend=backend)
        for form in FORMATS:
            wrong += _round_trip(buffer, _world(rng, len(ranks)), form, rng, list(range(len(ranks))))
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EP_NUM_TOPK_IDX_BITS", "32")
            narrow = cases.narrow_ids(_world(rng, len(ranks)))
            wrong += _round_trip(buffer, narrow, FORMATS[1], rng, list(range(len(ranks))))
        buffer.clean_low_latency_buffer(BOUND, 64, 8 * len(ranks))
        if len(ranks) == 3:
            wrong += _outstanding(buffer, rng) + _misuse(buffer, rng)
        buffer.destroy()
    return wrong


def _outstanding(buffer: Buffer, rng: random.Random) -> list[str]:
    """Four results at once, their hooks called in another order; repeated calls give the same bytes."""
    world = cases.draw(rng.randrange(2**31), (5, 0, 9), 64, 4, 3, torch.bfloat16, 0.1)
    rank = buffer.rank
    call = (world.x[rank], world.ids[rank], BOUND, world.num_experts)
    calls = [buffer.low_latency_dispatch(*call, use_fp8=False, return_recv_hook=True) for _ in range(4)]
    order = list(range(4))
    random.Random(rank).shuffle(order)
    for index in order:
        hook = calls[index][4]
        assert hook is not None
        hook()
    same = all(torch.equal(calls[0][0], other[0]) and torch.equal(calls[0][2][1], other[2][1]) for other in calls)
    back = [buffer.low_latency_combine(got[0], world.ids[rank], world.weights[rank], got[2])[0] for got in calls]
    wanted = world.x[rank].float() * world.weights[rank].masked_fill(world.ids[rank] < 0, 0).sum(1, keepdim=True)
    close = torch.allclose(back[0].float(), wanted, rtol=2**-7, atol=2**-7)
    hashes = set()
    for _ in range(20):
        recv, counts, handle, _, _ = buffer.low_latency_dispatch(*call)
        sums = buffer.low_latency_combine(calls[0][0], world.ids[rank], world.weights[rank], handle)[0]
        hashes.add(hash_tensors(recv[0], recv[1].contiguous(), counts, handle[0], handle[1], sums))
    same &= len(hashes) == 1
    return [] if same and close and all(torch.equal(back[0], other) for other in back) else ["outstanding results"]


def _misuse(buffer: Buffer, rng: random.Random) -> list[str]:
    wrong = []
    world = cases.draw(rng.randrange(2**31), (5, 3, 9), 64, 4, 3, torch.bfloat16, 0.0)
    rank = buffer.rank
    x, ids, weights = world.x[rank], world.ids[rank], world.weights[rank]
    recv, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, BOUND, world.num_experts, use_fp8=False)

    def send(x_: Any = x, ids_: Any = ids, bound: int = BOUND, **options: Any) -> Any:
        return buffer.low_latency_dispatch(x_, ids_, bound, world.num_experts, **options)

    def back(y: Any = recv, ids_: Any = ids, handle_: Any = handle, **options: Any) -> Any:
        return buffer.low_latency_combine(y, ids_, weights, handle_, **options)

    todo: list[tuple[str, int, Any, Any, str]] = [
        ("bound", 2, lambda: send(bound=8), send, "at most 8 tokens"),
        ("other bound", 0, lambda: send(bound=16), send, "num_max_tokens_per_rank"),
        ("id", 1, lambda: send(ids_=ids + 9), send, "topk_idx["),
        ("exponents", 0, lambda: send(use_ue8m0=True), send, "round_scale=True"),
        ("two endings", 1, lambda: send(async_finish=True, return_recv_hook=True), send, "one of them"),
        (
            "costs of one combine",
            0,
            lambda: back(combine_wait_recv_cost_stats=torch.zeros(3, dtype=torch.int64)),
            back,
            "call",
        ),
        (
            "one rank's costs",
            1,
            lambda: send(dispatch_wait_recv_cost_stats=torch.zeros(3, dtype=torch.int64)),
            send,
            "call",
        ),
        ("stats", 2, lambda: send(cumulative_local_expert_recv_stats=ids[0].int()), send, "one a local expert"),
        ("blocks", 0, lambda: back(recv[:, :8].contiguous()), back, "the blocks of the dispatch"),
        ("another routing", 1, lambda: back(ids_=ids.flip(1)), back, "another routing"),
        ("plain tuple", 2, lambda: back(handle_=tuple(handle)), back, "handle is a tuple"),
        ("zero copy", 0, lambda: back(zero_copy=True), back, "get_next_low_latency_combine_buffer"),
        ("format of x", 1, lambda: send(x_=x.double()), send, "torch.float64"),
    ]
    for name, at, bad, good, says in todo:
        try:
            (bad if rank == at else good)()
            wrong.append(f"{name}: no error")
        except (UsageError, CommError) as error:
            wrong += [] if says in str(error) else [f"{name}: {error}"]
    for call in (lambda: buffer.low_latency_update_mask_buffer(1, True), buffer.low_latency_clean_mask_buffer):
        try:
            call()
            wrong.append("a mask without enable_shrink")
        except UsageError:
            pass
    masked = ids.clone()
    masked[:, 0] = -1  # a lane that was sent may be left out of the sum
    fewer, _, _ = buffer.low_latency_combine(recv, masked, weights, handle)
    wanted = x.float() * weights[:, 1:].sum(1, keepdim=True)
    return wrong + ([] if torch.allclose(fewer.float(), wanted, rtol=2**-6, atol=2**-6) else ["a lane left out"])


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_dispatch_and_combine(backend: str, fresh_random_data: int) -> None:
    assert run_ranks(4, _everything, backend, fresh_random_data, timeout=150.0) == [[]] * 4


# The call at which a rank stops taking part.
FAILS = {"dispatch": 1, "combine": 3, "clean": 2}


def _lose_ranks(rank: int, backend: str, seed: int) -> list[str]:
    """Ranks stop without a word, one at each kind of call; the others go on and know who is missing."""
    options: dict[str, Any] = {"num_cpu_timeout_secs": 8, "backend": backend}
    buffer = Buffer(dist.group.WORLD, low_latency_mode=True, enable_shrink=True, **options)
    rng, status = random.Random(seed), torch.full((4,), -1, dtype=torch.int32)
    wrong = _round_trip(buffer, _world(rng, 4), FORMATS[1], rng, [0, 1, 2, 3])
    world = _world(rng, 4)
    left = [0, 1, 2, 3]
    handle: Any = None
    for call, lost in FAILS.items():
        if rank == lost:
            time.sleep(20 if call == "clean" else 0)
            return wrong
        left.remove(lost)
        if call == "dispatch":
            wrong += _round_trip(buffer, world, FORMATS[0], random.Random(seed), left)
            handle = buffer.low_latency_dispatch(
                world.x[rank], world.ids[rank], BOUND, world.num_experts, use_fp8=False
            )
        elif call == "combine":
            wrong += _combine(buffer, world, handle[2], random.Random(seed), left)
            wrong += _round_trip(buffer, world, FORMATS[2], random.Random(seed), left)
        else:
            buffer.clean_low_latency_buffer(BOUND, 64, world.num_experts)
        buffer.low_latency_query_mask_buffer(status)
        wrong += [] if status.tolist() == [int(r not in left) for r in range(4)] else [f"{call}: mask {status}"]
    wrong += _round_trip(buffer, world, FORMATS[3], random.Random(seed), left)
    buffer.destroy()
    return wrong


def _lose_one(rank: int, backend: str, seed: int) -> list[str]:
    """The same with one rank that stops at a dispatch."""
    buffer = Buffer(dist.group.WORLD, enable_shrink=True, num_cpu_timeout_secs=3, backend=backend)
    rng, status = random.Random(seed), torch.full((3,), -1, dtype=torch.int32)
    world, wrong = _world(rng, 3), []
    if rank != 1:
        wrong = _round_trip(buffer, world, FORMATS[1], rng, [0, 2])
        buffer.low_latency_query_mask_buffer(status)
        wrong += [] if status.tolist() == [0, 1, 0] else [f"mask {status}"]
        buffer.destroy()
    return wrong


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_a_rank_that_stops_is_masked(backend: str, fresh_random_data: int) -> None:
    assert run_ranks(3, _lose_one, backend, fresh_random_data) == [[]] * 3


@pytest.mark.slow
@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_ranks_that_stop_are_masked(backend: str, fresh_random_data: int) -> None:
    assert run_ranks(4, _lose_ranks, backend, fresh_random_data, timeout=120.0) == [[]] * 4


def _mask_by_hand(rank: int, seed: int) -> list[str]:
    """A rank left out by agreement takes no part; it is taken in again; a mistake masks nobody."""
    buffer = Buffer(dist.group.WORLD, enable_shrink=True, num_cpu_timeout_secs=30)
    status = torch.zeros(3, dtype=torch.int32)
    world, wrong = _world(random.Random(seed), 3), []
    if rank != 1:
        buffer.low_latency_update_mask_buffer(1, True)
        wrong += _round_trip(buffer, world, FORMATS[0], random.Random(seed), [0, 2])
        buffer.low_latency_query_mask_buffer(status)
        wrong += [] if status.tolist() == [0, 1, 0] else ["mask by hand"]
        buffer.low_latency_clean_mask_buffer()
    wrong += _round_trip(buffer, world, FORMATS[2], random.Random(seed), [0, 1, 2])
    try:
        buffer.low_latency_dispatch(world.x[rank], world.ids[rank], 1 if rank == 2 else BOUND, 6, use_ue8m0=rank == 2)
        wrong.append("a mistake raised nothing")
    except (UsageError, CommError):
        pass
    buffer.low_latency_query_mask_buffer(status)
    wrong += [] if not status.any() else ["a mistake masked a rank"]
    wrong += _round_trip(buffer, world, FORMATS[0], random.Random(seed), [0, 1, 2])
    buffer.destroy()
    return wrong


def test_masks_by_hand(fresh_random_data: int) -> None:
    assert run_ranks(3, _mask_by_hand, fresh_random_data) == [[]] * 3


def _planted(rank: int, seed: int) -> list[int]:
    """Weights in another lane, rows in another place: the comparison must see both."""
    world = cases.draw(seed, (7, 9), 64, 4, 3, torch.bfloat16, 0.0)
    buffer, found = Buffer(dist.group.WORLD, num_cpu_timeout_secs=30), []
    lane_ids, flat_rows = low_latency.blocks.lane_ids, low_latency.blocks.flat_rows
    for name, fault in (("lane_ids", lambda *a: lane_ids(*a).flip(0)), ("flat_rows", lambda *a: flat_rows(*a).flip(0))):
        good = getattr(low_latency.blocks, name)
        setattr(low_latency.blocks, name, fault)
        found.append(len(_round_trip(buffer, world, FORMATS[0], random.Random(seed), [0, 1])))
        setattr(low_latency.blocks, name, good)
    found.append(-len(_round_trip(buffer, world, FORMATS[0], random.Random(seed), [0, 1])))
    buffer.destroy()
    return found


def test_planted_faults_are_noticed(fresh_random_data: int) -> None:
    for rows, places, sound in run_ranks(2, _planted, fresh_random_data):
        assert rows > 0 and places > 0 and sound == 0
