"""The layout kernels (kernels/layout.cuh) in loops over tokens and rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from comm_core.kernels import library as abi
from tests.twin.channel import Side, word
from tests.twin.memory import words


def tables(layout: Any, num_ranks: int) -> dict[str, np.ndarray]:
    """The tables of a layout as arrays."""
    tokens, lanes, experts, room = layout.num_tokens, layout.num_topk, layout.num_local, layout.room
    chunks = -(-room // word("CHUNK"))
    shapes: dict[str, tuple[tuple[int, ...], type]] = {
        "topk_idx": ((tokens, lanes), np.int64),
        "lane_row": ((tokens, lanes), np.int32),
        "last_lanes": ((tokens,), np.uint32),
        "matrix": ((num_ranks, num_ranks), np.int32),
        "row_base": ((num_ranks + 1,), np.int32),
        "recv_token": ((room,), np.int32),
        "local_idx": ((room, lanes), np.int32),
        "expand_row": ((room if layout.expand else 0, lanes), np.int32),
        "expert_counts": ((experts,), np.int32),
        "expert_starts": ((experts + 1,), np.int32),
        "chunk_counts": ((chunks, experts), np.int32),
    }
    return {
        name: words(getattr(layout, name), int(np.prod(shape)), dtype).reshape(shape)
        for name, (shape, dtype) in shapes.items()
    }


def count(call: Any, flipped: bool) -> bool:
    """The kernels up to the one that writes the record; False where the fault record names this call.

    Args:
        call: the struct.
        flipped: the debug hook: the first two rows for the first rank that gets two change places in the list.
    """
    side = Side(call.channel)
    table = tables(call.layout, side.num_ranks)
    given = words(call.given_idx, table["topk_idx"].size, np.int64).reshape(table["topk_idx"].shape)
    table["topk_idx"][:] = given
    _send(call, side, table, given, flipped)
    came = side.wait_headers()
    moves = came and not side.headers_differ()
    _receive(call, side, table, moves)
    if call.stats:
        words(call.stats, call.layout.num_local, np.int32)[:] += table["expert_counts"]
    good = not came or _record(call, side, table, moves)
    side.state.seq = side.seq
    return good


def _valid(ids: np.ndarray, num_experts: int) -> list[bool]:
    """Lanes that count: not masked, in range, and not a second time the same."""
    return [0 <= e < num_experts and e not in ids[:lane] for lane, e in enumerate(ids)]


def _send(call: Any, side: Side, table: dict[str, np.ndarray], given: np.ndarray, flipped: bool) -> None:
    """Lists of rows for each rank, positions of the own lanes, and the header."""
    layout, num_local = call.layout, call.layout.num_local
    num_experts = num_local * side.num_ranks
    rows: list[list[list[int]]] = [[] for _ in side.ranks]
    status = call.status
    table["lane_row"][:], table["last_lanes"][:] = -1, 0
    for token, ids in enumerate(given):
        valid = _valid(ids, num_experts)
        if any(e != -1 and not good for e, good in zip(ids, valid, strict=True)):
            status |= abi.BAD_ID
        for rank in sorted({int(e) // num_local for e, good in zip(ids, valid, strict=True) if good}):
            lanes = [k for k, e in enumerate(ids) if valid[k] and e // num_local == rank]
            table["lane_row"][token, lanes] = len(rows[rank])
            table["last_lanes"][token] |= np.uint32(1 << max(lanes))
            entry = [token] + [-1] * layout.num_topk
            for k in lanes:
                entry[1 + k] = int(ids[k]) - rank * num_local
            rows[rank].append(entry)
    if flipped:
        several = next((entries for entries in rows if len(entries) > 1), None)
        if several is not None:
            several[0], several[1] = several[1], several[0]
    flat = [number for entries in rows for entry in entries for number in entry]
    words(side.own(call.lists), len(flat), np.int32)[:] = flat
    for rank in side.ranks:
        header = side.header(rank, side.rank)
        header[word("NUM_TOKENS")] = layout.num_tokens
        header[word("COUNTS") : word("COUNTS") + side.num_ranks] = [len(entries) for entries in rows]
        side.send(rank, call.hash, status, {"X": call.lists}, 0)


def _receive(call: Any, side: Side, table: dict[str, np.ndarray], moves: bool) -> None:
    """Rows of all lists for this rank, counts of the experts, expanded rows."""
    layout, width, at = call.layout, 1 + call.layout.num_topk, word("COUNTS")
    sent = np.array([side.mine(rank)[at : at + side.num_ranks] for rank in side.ranks], np.int32)
    table["matrix"][:] = sent if moves else 0
    counts = table["matrix"][:, side.rank]
    table["row_base"][0], table["row_base"][1:] = 0, np.cumsum(counts)
    for source in side.ranks if moves else ():
        first, skipped = int(table["row_base"][source]), int(table["matrix"][source, : side.rank].sum())
        start = side.announced(source, "X") + skipped * width * 4
        entries = words(start, int(counts[source]) * width, np.int32).reshape(-1, width)
        table["recv_token"][first : first + len(entries)] = entries[:, 0]
        table["local_idx"][first : first + len(entries)] = entries[:, 1:]
    local = table["local_idx"][: table["row_base"][-1]]
    totals = [0] * layout.num_local
    for row, ids in enumerate(local):
        if row % word("CHUNK") == 0:
            table["chunk_counts"][row // word("CHUNK")] = totals
        for expert in ids[ids >= 0]:
            totals[expert] += 1
    table["expert_counts"][:] = totals
    aligned = [-(-count // layout.alignment) * layout.alignment for count in totals]
    table["expert_starts"][0], table["expert_starts"][1:] = 0, np.cumsum(aligned)


def _record(call: Any, side: Side, table: dict[str, np.ndarray], moves: bool) -> bool:
    """What the host waits for, its first word last; True where nothing is wrong."""
    num_ranks, num_local = side.num_ranks, call.layout.num_local
    headers, at = [side.mine(rank) for rank in side.ranks], word("COUNTS")
    status = int(np.bitwise_or.reduce([header[word("STATUS")] for header in headers]))
    if not moves or status != abi.OK:
        side.note_difference()
    record = words(call.record, abi.REC_TABLES + num_ranks * (num_ranks + 1) + num_local)
    record[abi.REC_STATUS], record[abi.REC_DIFFERENT] = status, not moves
    record[abi.REC_ROWS], record[abi.REC_EXPANDED] = table["row_base"][-1], table["expert_starts"][-1]
    found = [header[word("NUM_TOKENS")] for header in headers]
    found += [count for header in headers for count in header[at : at + num_ranks]]
    record[abi.REC_TABLES :] = [*found, *table["expert_counts"]]
    record[abi.REC_SEQ] = 1
    return moves and status == abi.OK


def place(call: Any) -> None:
    """Expanded row of each lane, behind the record."""
    if not call.layout.expand:
        return
    table = tables(call.layout, call.channel.num_ranks)
    free = table["expert_starts"][:-1].copy()
    for row, ids in enumerate(table["local_idx"][: table["row_base"][-1]]):
        table["expand_row"][row] = -1
        for lane, expert in enumerate(ids):
            if expert >= 0:
                table["expand_row"][row, lane] = free[expert]
                free[expert] += 1
