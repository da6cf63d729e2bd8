"""Buffer (V1): layout, dispatch, combine and handles against loops; what V1's own intranode test asserts is here."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist

from comm_core.deep_ep.utils.math import calc_diff
from comm_core.legacy import Buffer, Config, routing
from comm_core.runtime.errors import ClosedError, CommError, UsageError
from tests.comm_core import legacy_cases as cases
from tests.comm_core.legacy_cases import World
from tests.dist import run_ranks

GROUPS = ([0, 1, 2, 3], [0, 1, 3], [2])
DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def _check_handle(handle: Any, world: World, rank: int, channels: int, bad: cases.Failures) -> None:
    """The six fields by their descriptions, token by token."""
    prefix, channel_prefix, recv_channel_prefix, src, inside, head = handle
    num_ranks = len(world.x)
    arrivals = [world.arrivals(r) for r in range(num_ranks)]
    wanted = [[sum(s <= i for s, _ in arrivals[j]) for j in range(num_ranks)] for i in range(num_ranks)]
    bad.need(prefix.tolist() == wanted, "rank_prefix_matrix")
    bad.need(src.tolist()[: len(arrivals[rank])] == [token for _, token in arrivals[rank]], "recv_src_idx")

    def channel(source: int, token: int) -> int:
        return token // max(1, -(-world.x[source].shape[0] // channels))

    mine = range(world.x[rank].shape[0])
    for j in range(num_ranks):
        here = [token for token in mine if j in world.ranks_of(rank, token)]
        ends = [sum(channel(rank, token) <= c for token in here) for c in range(channels)]
        bad.need(channel_prefix[j].tolist() == ends, "channel_prefix_matrix")
        heads = [
            sum(channel(rank, other) == channel(rank, token) for other in here if other < token)
            if token in here
            else -1
            for token in mine
        ]
        bad.need(head[:, j].tolist() == heads and inside[:, j].tolist() == [t in here for t in mine], "send_head")
        starts = [sum(s == j and channel(s, t) < c for s, t in arrivals[rank]) for c in range(channels)]
        bad.need(recv_channel_prefix[j].tolist() == starts, "recv_channel_prefix_matrix")
    int32 = (prefix, channel_prefix, recv_channel_prefix, src, head)
    bad.need(all(item.dtype == torch.int32 for item in int32), "dtypes of the handle")


def _payload(world: World, rank: int, kind: str) -> Any:
    """What to send: the rows, or bytes with scales of any strides."""
    x = world.x[rank]
    if kind == "rows":
        return x
    generator = torch.Generator().manual_seed(rank)
    data = torch.randint(0, 120, (x.shape[0], x.shape[1]), dtype=torch.uint8, generator=generator)
    scales = torch.rand(3, x.shape[0], generator=generator).t()
    if kind == "packed scales":
        scales = torch.randint(0, 2**31, (3, x.shape[0]), dtype=torch.int32, generator=generator).t()
    return data.view(torch.float8_e4m3fn), scales


def _expected(world: World, rank: int, kind: str) -> list[torch.Tensor]:
    """The received rows (and scales)."""
    sources = [_payload(world, r, kind) for r in range(len(world.x))]
    sources = [source if isinstance(source, tuple) else (source,) for source in sources]
    pairs = world.arrivals(rank)
    found = []
    for part, sample in enumerate(sources[rank]):
        raw = [source[part].contiguous().view(torch.uint8) for source in sources]
        rows = [raw[source][token] for source, token in pairs]
        width = sample.shape[1] * sample.element_size()
        found.append((torch.stack(rows) if rows else torch.empty(0, width, dtype=torch.uint8)).view(sample.dtype))
    return found


def _round_trip(buffer: Buffer, world: World, kind: str, rng: random.Random) -> list[str]:
    """One dispatch in all its forms and a combine."""
    rank, bad = buffer.rank, cases.Failures()
    asynchronous, with_topk = rng.random() < 0.5, rng.random() < 0.7
    alignment, config = rng.choice((1, 4, 128)), rng.choice((None, Config(8, 2, 4), Config(2, 1, 256)))
    channels = buffer.num_sms // 2 if config is None else config.num_sms // 2
    num_bias = rng.choice((0, 1, 2))
    on_comm = asynchronous and rng.random() < 0.5
    options: dict[str, Any] = {"async_finish": asynchronous, "allocate_on_comm_stream": on_comm}
    if on_comm or rng.random() < 0.5:
        options["previous_event"] = Buffer.capture()
    counts = cases.layout_counts(buffer, world, rank, bad, **options)
    x, wanted, pairs = _payload(world, rank, kind), _expected(world, rank, kind), world.arrivals(rank)
    lanes = {"topk_idx": world.ids[rank], "topk_weights": world.weights[rank]} if with_topk else {}
    common = {"config": config, **options}
    got = buffer.dispatch(x, **counts, **lanes, expert_alignment=alignment, **common)
    recv, recv_idx, recv_weights, per_expert, handle, event = got
    event.current_stream_wait()
    parts = recv if isinstance(recv, tuple) else (recv,)
    bad.need(len(parts) == len(wanted) and all(map(cases.same, parts, wanted)), f"recv_x ({kind})")
    bad.need(all(part.is_contiguous() for part in parts), "row-major results")
    _check_handle(handle, world, rank, channels, bad)
    first = rank * world.num_local
    local = [
        [e - first if 0 <= e - first < world.num_local else -1 for e in world.ids[s][t].tolist()] for s, t in pairs
    ]
    flat = list(itertools.chain(*local))
    aligned = [-(-flat.count(e) // alignment) * alignment for e in range(world.num_local)]
    bad.need(per_expert == aligned, f"counts per expert {per_expert} {aligned}")
    if with_topk:
        weights = [
            [w if e >= 0 else 0.0 for w, e in zip(world.weights[s][t].tolist(), line, strict=True)]
            for (s, t), line in zip(pairs, local, strict=True)
        ]
        bad.need(recv_idx.tolist() == local and recv_idx.dtype == world.ids[rank].dtype, "recv_topk_idx")
        bad.need(recv_weights.tolist() == weights and recv_weights.dtype == torch.float32, "recv_topk_weights")
        _check_worst(buffer, world, x, parts, {**counts, **lanes}, recv_idx, recv_weights, handle, bad)
    else:
        bad.need(recv_idx is None and recv_weights is None, "lanes that were not sent")
    again = buffer.dispatch(x, handle=handle, **common)
    again[5].current_stream_wait()
    cached = again[0] if isinstance(again[0], tuple) else (again[0],)
    bad.need(all(map(cases.same, cached, parts)) and again[1:5] == (None,) * 4, "cached dispatch")
    _check_combine(buffer, world, handle, recv_weights, num_bias, common, bad)
    return [f"rank {rank}/{len(world.x)}: {what}" for what in bad]


def _check_worst(
    buffer: Buffer,
    world: World,
    x: Any,
    parts: Any,
    given: Any,
    idx: Any,
    weights: Any,
    handle: Any,
    bad: cases.Failures,
) -> None:
    """num_worst_tokens: the same rows first, -1 and 0 after; cached dispatch and combine with it."""
    worst, n = sum(item.shape[0] for item in world.x) + 3, idx.shape[0]
    recv, worst_idx, worst_weights, counts, worst_handle, _ = buffer.dispatch(x, **given, num_worst_tokens=worst)
    rows = recv if isinstance(recv, tuple) else (recv,)
    bad.need(
        all(row.shape[0] == worst and cases.same(row[:n], part) for row, part in zip(rows, parts, strict=True)), "worst"
    )
    bad.need(counts == [] and worst_idx.shape[0] == worst, "counts with num_worst_tokens")
    bad.need(torch.equal(worst_idx[:n], idx) and bool((worst_idx[n:] == -1).all()), "the tail of recv_topk_idx")
    bad.need(torch.equal(worst_weights[:n], weights) and not worst_weights[n:].any(), "the tail of recv_topk_weights")
    bad.need(torch.equal(worst_handle[0], handle[0]), "rank_prefix_matrix with num_worst_tokens")
    bad.need(bool((worst_handle[3][n:] == -1).all()) and worst_handle[3].shape[0] == worst, "the tail of recv_src_idx")
    again = buffer.dispatch(x, handle=worst_handle)[0]
    cached = again if isinstance(again, tuple) else (again,)
    bad.need(all(map(cases.same, cached, rows)), "cached dispatch with num_worst_tokens")
    y = torch.zeros(worst, 8)
    y[:n] = 1
    sums = buffer.combine(y, worst_handle)[0]
    bad.need(torch.equal(sums[:, 0], worst_handle[4].sum(1).float()), "combine of num_worst_tokens rows")


def _check_combine(
    buffer: Buffer, world: World, handle: Any, weights: Any, num_bias: int, options: dict[str, Any], bad: cases.Failures
) -> None:
    """Order-sensitive rows come back as the loops add them; weights return to their lanes; x comes back times ranks."""
    rank, (num_tokens, hidden) = buffer.rank, world.x[buffer.rank].shape
    dtype = world.x[rank].dtype
    rows = [cases.uneven((len(world.arrivals(r)), hidden), r, dtype) for r in range(len(world.x))]
    biases = [cases.uneven((num_tokens, hidden), 100 + i, dtype) for i in range(num_bias)]
    bias = None if not biases else biases[0] if num_bias == 1 else tuple(biases)
    out, back, event = buffer.combine(rows[rank], handle, topk_weights=weights, bias=bias, **options)
    event.current_stream_wait()
    want = cases.combined(world, rank, rows, biases)
    bad.need(out.dtype == dtype and torch.equal(out, want), f"combined_x ({num_bias} biases, {dtype})")
    if weights is not None:
        sent = world.weights[rank].masked_fill(world.ids[rank] < 0, 0)
        bad.need(torch.equal(back, sent), "combined_topk_weights")
    recv = buffer.dispatch(world.x[rank], handle=handle, **options)
    recv[5].current_stream_wait()
    home, _, event = buffer.combine(recv[0], handle, **options)
    event.current_stream_wait()
    copies = handle[4].sum(1, keepdim=True)
    total = world.x[rank].double() * copies
    bad.need(torch.allclose(home.double(), total, rtol=2**-7, atol=2**-7), "identity")
    bad.need(calc_diff(home / copies.clamp_min(1), world.x[rank] * (copies > 0)) < 5e-6, "the tokens that come home")


def _everything(rank: int, backend: str, seed: int) -> list[str]:
    wrong: list[str] = []
    for ranks in GROUPS:
        group = dist.new_group(ranks)
        if rank not in ranks:
            continue
        rng, num_ranks = random.Random(seed + len(ranks)), len(ranks)
        buffer = Buffer(group, 1 << 20, num_cpu_timeout_secs=30, backend=backend)
        for index in range(8):
            num_local = rng.choice((1, 2, 5))
            tokens = tuple(rng.choice((0, 1, 5, 9, 14)) for _ in ranks) if index else (0,) * num_ranks
            world = cases.draw(
                rng.randrange(2**31),
                tokens,
                rng.choice((1, 7, 8, 40, 136, 513)),
                rng.randint(1, min(6, num_local * num_ranks)),
                num_local,
                rng.choice(DTYPES),
                rng.choice((0.0, 0.3, 1.1)),
            )
            kind = ("rows", "scales", "packed scales")[index % 3]
            wrong += [f"{line} in {kind}, {tokens}" for line in _round_trip(buffer, world, kind, rng)]
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("EP_NUM_TOPK_IDX_BITS", "32")
            found = _round_trip(buffer, cases.narrow_ids(world), "rows", rng)
            wrong += [f"{line} with ids of 32 bits" for line in found]
        buffer.destroy()
        buffer.destroy()  # a second time
        try:
            buffer.get_dispatch_layout(torch.zeros(1, 1, dtype=torch.int64), num_ranks)
            buffer.dispatch(torch.zeros(1, 8), handle=None)
            wrong.append("used after destroy")
        except ClosedError:
            wrong += [] if buffer.runtime is None else ["a runtime after destroy"]
    return wrong


@pytest.mark.parametrize("backend", cases.BACKENDS)
def test_layout_dispatch_combine_and_handles(backend: str, fresh_random_data: int) -> None:
    assert run_ranks(4, _everything, backend, fresh_random_data, timeout=150.0) == [[]] * 4


def _planted(rank: int, seed: int) -> int:
    """Sums in descending order of the ranks: the order must be seen by the test."""
    good = routing.lanes_of
    routing.lanes_of = lambda *args: good(*args).flip(1)  # type: ignore[assignment]
    world = cases.draw(seed, (9, 12, 7), 136, 6, 4, torch.bfloat16, 0.1)
    buffer = Buffer(dist.group.WORLD, num_cpu_timeout_secs=30)
    found = _round_trip(buffer, world, "rows", random.Random(seed))
    buffer.destroy()
    return sum("combined_x" in line for line in found)


def test_another_order_of_sums_is_noticed(fresh_random_data: int) -> None:
    assert all(run_ranks(3, _planted, fresh_random_data))


def _misuse(rank: int, seed: int) -> list[str]:
    """Each mistake of one rank raises on all three, and the buffer works on."""
    wrong = []
    buffer = Buffer(dist.group.WORLD, num_cpu_timeout_secs=20)
    other = Buffer(dist.group.WORLD, num_cpu_timeout_secs=20)
    world = cases.draw(seed, (5, 4, 7), 40, 3, 4, torch.bfloat16, 0.0)
    x, ids, weights = world.x[rank], world.ids[rank], world.weights[rank]
    counts = cases.layout_counts(buffer, world, rank, cases.Failures())
    lanes = {"topk_idx": ids, "topk_weights": weights}
    recv, _, _, _, handle, _ = buffer.dispatch(x, **counts, **lanes)
    foreign = other.dispatch(x, **counts)[4]

    def fresh(**changes: Any) -> Any:
        given = {"x": x, **counts, **lanes, **changes}
        return buffer.dispatch(given.pop("x"), **given)

    def combine(**changes: Any) -> Any:
        return buffer.combine(**{"x": recv, "handle": handle, **changes})

    def laid_out(ids_: torch.Tensor) -> Any:
        buffer.get_dispatch_layout(ids_, world.num_experts)
        return fresh()

    spoiled = ids.clone()
    spoiled[0, 1] = 99
    todo: list[tuple[str, int, Any, Any, str]] = [
        ("id out of range", 1, lambda: laid_out(spoiled), fresh, "= 99"),
        ("id out of range in dispatch", 0, lambda: fresh(topk_idx=spoiled), fresh, "= 99"),
        (
            "worst tokens",
            2,
            lambda: fresh(num_worst_tokens=1),
            lambda: fresh(num_worst_tokens=99),
            "num_worst_tokens=1",
        ),
        ("counts", 0, lambda: fresh(num_tokens_per_rank=counts["num_tokens_per_rank"] + 1), fresh, "by the routing"),
        ("one of the pair", 1, lambda: fresh(topk_weights=None), fresh, "or neither"),
        ("strided x", 2, lambda: fresh(x=x.repeat(1, 2)[:, ::2]), fresh, "contiguous"),
        (
            "handle and counts",
            0,
            lambda: fresh(handle=handle),
            lambda: buffer.dispatch(x, handle=handle),
            "one of them",
        ),
        ("no decision", 1, lambda: buffer.dispatch(x), fresh, "call get_dispatch_layout"),
        ("scales", 1, lambda: fresh(x=(x, x)), fresh, "torch.float32"),
        ("plain tuple", 2, lambda: combine(handle=tuple(handle)), combine, "handle is a tuple"),
        ("foreign handle", 0, lambda: combine(handle=foreign), combine, "another buffer"),
        ("rows", 1, lambda: combine(x=recv[:-1]), combine, "rows; allowed"),
        ("bias", 2, lambda: combine(bias=x[1:]), combine, "bias of shape"),
        ("stream", 0, lambda: fresh(allocate_on_comm_stream=True), fresh, "previous_event=None"),
        ("width", 2, lambda: fresh(x=x.repeat(1, 2)), fresh, "rank 2 80"),
        ("lanes", 1, lambda: fresh(topk_idx=None, topk_weights=None), fresh, "rank 0 3, rank 1 -1"),
        ("alignment", 1, lambda: fresh(expert_alignment=4), fresh, "expert_alignment: rank 0 1, rank 1 4"),
    ]
    for name, at, bad, good, says in todo:
        try:
            (bad if rank == at else good)()
            wrong.append(f"{name}: no error")
        except (UsageError, CommError) as error:
            if says not in str(error):
                wrong.append(f"{name}: {error}")
        if name in ("worst tokens", "width", "alignment"):
            wrong += [f"after {name}: {line}" for line in _round_trip(buffer, world, "rows", random.Random(0))[:1]]
    other.destroy()
    buffer.destroy()
    return wrong


def test_mistakes_raise_on_every_rank(fresh_random_data: int) -> None:
    assert run_ranks(3, _misuse, fresh_random_data, timeout=120.0) == [[], [], []]


def test_config() -> None:
    for num_ranks in range(1, 200):
        for config in (Buffer.get_dispatch_config(num_ranks), Buffer.get_combine_config(num_ranks)):
            assert config.num_sms == 20
            assert config.get_nvl_buffer_size_hint(7168 * 2, num_ranks) % 128 == 0
            between = config.get_rdma_buffer_size_hint(7168 * 2, num_ranks)
            assert (between == 0) == (num_ranks <= 8) and between % 128 == 0
    rows = Config(20, 6, 256).get_nvl_buffer_size_hint(1000, 8)
    assert rows >= 10 * 8 * 256 * 1000
    assert Config(20, 6, 256).get_nvl_buffer_size_hint(2000, 8) - rows >= 10 * 8 * 256 * 1000 - 128
    for wrong in ((21,), (20, 6, 6), (20, 0), (20, 6, 256, 8, 8)):
        with pytest.raises(UsageError):
            Config(*wrong)
    with pytest.raises(UsageError, match="even"):
        Buffer.set_num_sms(7)
    Buffer.set_num_sms(24)
    try:
        assert Buffer.get_dispatch_config(4).num_sms == 24
    finally:
        Buffer.set_num_sms(20)
    with pytest.raises(UsageError, match="leave comm out"):
        Buffer(None, comm=object())


def test_a_token_for_more_ranks_than_lanes_is_refused() -> None:
    inside = torch.zeros(2, 40, dtype=torch.bool)
    inside[0, 3:35] = True
    ids = routing.lanes_of(inside, 80)
    assert ids[0].tolist() == [2 * rank for rank in range(3, 35)]
    assert ids[1].tolist() == [-1] * 32
    inside[1, :33] = True
    with pytest.raises(UsageError, match="33 ranks"):
        routing.lanes_of(inside, 80)
