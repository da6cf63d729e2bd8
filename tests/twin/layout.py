"""The layout kernel (kernels/layout.cuh) in loops over tokens and rows: first what the record tells, then tables."""

from __future__ import annotations

from typing import Any

import numpy as np

from comm_core.kernels import library as abi
from tests.twin.channel import Side, word
from tests.twin.memory import words

NO_ID = 0xFFFF


def tables(layout: Any, num_ranks: int) -> dict[str, np.ndarray]:
    """The tables of a layout as arrays."""
    tokens, lanes, experts, room = layout.num_tokens, layout.num_topk, layout.num_local, layout.room
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
    }
    return {
        name: words(getattr(layout, name), int(np.prod(shape)), dtype).reshape(shape)
        for name, (shape, dtype) in shapes.items()
    }


class Parts:
    """What ranks lay down for each other: ids in the memory of their rank, counts in that of the reader."""

    def __init__(self, call: Any, side: Side) -> None:
        self._call, self._side = call, side
        self.num_local, self.num_topk = call.layout.num_local, call.layout.num_topk

    def ids(self, rank: int, num_tokens: int) -> np.ndarray:
        """uint16 [num_tokens, lanes] of a rank."""
        lanes, place = abi.id_lanes(self.num_topk), self._call.ids
        at = self._side.segment(place.segment, rank) + place.offset
        return words(at, num_tokens * lanes, np.uint16).reshape(num_tokens, lanes)

    def counts(self, reader: int, writer: int) -> np.ndarray:
        """uint16 [blocks, columns] that `writer` writes into the memory of `reader`."""
        columns, place, blocks = abi.count_columns(self.num_local), self._call.tables, self._call.table_blocks
        at = self._side.segment(place.segment, reader) + place.offset + writer * blocks * columns * 2
        return words(at, blocks * columns, np.uint16).reshape(blocks, columns)


def count(call: Any) -> bool:
    """What ends with the record: ids, counts and headers. False where the fault record names this call."""
    side, layout = Side(call.channel), call.layout
    kept = tables(layout, side.num_ranks)["topk_idx"]
    given = words(call.given_idx, kept.size, np.int64).reshape(kept.shape)
    kept[:] = given
    parts = Parts(call, side)
    _send(call, side, parts, given)
    came = side.wait_headers()
    return not came or _record(call, side, parts, not side.headers_differ())


def place(call: Any, flipped: bool) -> None:
    """The tables, behind the record.

    Args:
        call: the struct.
        flipped: the debug hook: the first two rows from the first rank that sends two change places.
    """
    side = Side(call.channel)
    moves = side.wait_headers() and not side.headers_differ()
    parts, table = Parts(call, side), tables(call.layout, side.num_ranks)
    _place_tokens(call, side, parts, table)
    _receive(call, side, parts, table, moves)
    if flipped:
        _flip(table)
    if call.layout.expand:
        _expand(table)
    side.state.seq = side.seq


def _send(call: Any, side: Side, parts: Parts, given: np.ndarray) -> None:
    """Ids and counts of blocks of tokens, and the header."""
    layout, num_local, size = call.layout, call.layout.num_local, word("TOKENS")
    valid = np.array([_valid(ids, num_local * side.num_ranks) for ids in given], bool).reshape(given.shape)
    bad = bool(((given != -1) & ~valid).any())
    laid = parts.ids(side.rank, len(given))
    laid[:] = NO_ID
    laid[:, : layout.num_topk] = np.where(valid, given, NO_ID)
    own = words(call.own_counts, -(-len(given) // size) * side.num_ranks, np.int32).reshape(-1, side.num_ranks)
    for block in range(len(own)):
        ids = laid[block * size : (block + 1) * size].astype(np.int64)
        for rank in side.ranks:
            here = ids // num_local == rank
            counts = parts.counts(rank, side.rank)[block]
            counts[:] = 0
            counts[:num_local] = np.bincount(ids[here] - rank * num_local, minlength=num_local)
            counts[num_local] = own[block, rank] = here.any(1).sum()
    for rank in side.ranks:
        header = side.header(rank, side.rank)
        header[word("NUM_TOKENS")] = layout.num_tokens
        header[word("COUNTS") : word("COUNTS") + side.num_ranks] = own.sum(0)
        side.send(rank, call.hash, call.status | (abi.BAD_ID if bad else 0), {"X": call.ids}, 0)


def _valid(ids: np.ndarray, num_experts: int) -> list[bool]:
    """Lanes that count: not masked, in range, and not a second time the same."""
    return [0 <= e < num_experts and e not in ids[:lane] for lane, e in enumerate(ids)]


def _tokens_of(side: Side, rank: int) -> int:
    return int(side.mine(rank)[word("NUM_TOKENS")])


def _experts(call: Any, side: Side, parts: Parts, moves: bool) -> tuple[list[int], list[int]]:
    """Rows of each expert, and the first expanded row of each; behind it the number of all."""
    totals = np.zeros(call.layout.num_local, np.int64)
    for source in side.ranks if moves else ():
        blocks = -(-_tokens_of(side, source) // word("TOKENS"))
        totals += parts.counts(side.rank, source)[:blocks, : len(totals)].sum(0, dtype=np.int64)
    aligned = -(-totals // call.layout.alignment) * call.layout.alignment
    return totals.tolist(), [0, *np.cumsum(aligned).tolist()]


def _record(call: Any, side: Side, parts: Parts, moves: bool) -> bool:
    """What the host waits for, its first word last; True where nothing is wrong."""
    num_ranks, num_local = side.num_ranks, call.layout.num_local
    headers, at = [side.mine(rank) for rank in side.ranks], word("COUNTS")
    status = int(np.bitwise_or.reduce([header[word("STATUS")] for header in headers]))
    if not moves or status != abi.OK:
        side.note_difference()
    totals, starts = _experts(call, side, parts, moves)
    record = words(call.record, abi.REC_TABLES + num_ranks * (num_ranks + 1) + num_local)
    record[abi.REC_STATUS], record[abi.REC_DIFFERENT] = status, not moves
    record[abi.REC_ROWS] = sum(int(header[at + side.rank]) for header in headers) if moves else 0
    record[abi.REC_EXPANDED] = starts[-1]
    found = [header[word("NUM_TOKENS")] for header in headers]
    found += [count for header in headers for count in header[at : at + num_ranks]]
    record[abi.REC_TABLES :] = [*found, *totals]
    record[abi.REC_SEQ] = 1
    return moves and status == abi.OK


def _place_tokens(call: Any, side: Side, parts: Parts, table: dict[str, np.ndarray]) -> None:
    """Positions of the own lanes among the rows to their ranks."""
    num_local, sent = call.layout.num_local, [0] * side.num_ranks
    table["lane_row"][:], table["last_lanes"][:] = -1, 0
    for token, ids in enumerate(parts.ids(side.rank, call.layout.num_tokens).tolist()):
        lanes_of: dict[int, list[int]] = {}
        for lane, expert in enumerate(ids):
            if expert != NO_ID:
                lanes_of.setdefault(expert // num_local, []).append(lane)
        for rank, lanes in lanes_of.items():
            table["lane_row"][token, lanes] = sent[rank]
            table["last_lanes"][token] |= np.uint32(1 << lanes[-1])
            sent[rank] += 1


def _receive(call: Any, side: Side, parts: Parts, table: dict[str, np.ndarray], moves: bool) -> None:
    """Rows of all ranks for this one, and counts of the experts."""
    layout, num_local, at = call.layout, call.layout.num_local, word("COUNTS")
    sent = np.array([side.mine(rank)[at : at + side.num_ranks] for rank in side.ranks], np.int32)
    table["matrix"][:] = sent if moves else 0
    table["row_base"][0], table["row_base"][1:] = 0, np.cumsum(table["matrix"][:, side.rank])
    for source in side.ranks if moves else ():
        local = (
            parts.ids(source, _tokens_of(side, source))[:, : layout.num_topk].astype(np.int32) - side.rank * num_local
        )
        local[(local < 0) | (local >= num_local)] = -1
        tokens = (local >= 0).any(1).nonzero()[0]
        first, end = table["row_base"][source : source + 2]
        table["recv_token"][first:end] = tokens
        table["local_idx"][first:end] = local[tokens]
    table["expert_counts"][:], table["expert_starts"][:] = _experts(call, side, parts, moves)


def _flip(table: dict[str, np.ndarray]) -> None:
    sizes = np.diff(table["row_base"])
    for first, size in zip(table["row_base"], sizes, strict=False):
        if size > 1:
            for name in ("recv_token", "local_idx"):
                table[name][[first, first + 1]] = table[name][[first + 1, first]]
            return


def _expand(table: dict[str, np.ndarray]) -> None:
    """Expanded row of each lane."""
    free = table["expert_starts"][:-1].copy()
    for row, ids in enumerate(table["local_idx"][: table["row_base"][-1]]):
        table["expand_row"][row] = -1
        for lane, expert in enumerate(ids):
            if expert >= 0:
                table["expand_row"][row, lane] = free[expert]
                free[expert] += 1
