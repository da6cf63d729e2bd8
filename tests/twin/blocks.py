"""The low-latency kernels (kernels/low_latency.cuh) in loops over tokens and experts: two kinds, two halves each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from comm_core import fp8
from comm_core.kernels import library as abi
from tests.twin.channel import Side, address_in, word
from tests.twin.memory import numbers_at, words
from tests.twin.order import Span

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
DISPATCH, COMBINE = 0, 1


class _Half(Side):
    """One half's view of the blocks segments. The first half counts the call, the second finds its number."""

    def __init__(self, call: Any, kind: int, first: bool) -> None:
        super().__init__(call.channel)
        self.call, self.kind = call, kind
        self.kept = words(call.seq, 1)
        self.seq = (self.state.blocks_seq[kind] + 1) & 0xFFFFFFFF if first else int(self.kept[0])
        self.turn = self.seq % 2

    def at(self, rank: int, place: str) -> int:
        """Address of a part of a rank's segment."""
        return self.segment(abi.BLOCKS, rank) + int(getattr(self.call.places, place))

    def header(self, reader: int, writer: int) -> np.ndarray:
        size = word("HEADER_WORDS")
        index = (self.kind * 2 + self.turn) * word("MAX_RANKS") + writer
        return words(self.at(reader, "headers") + index * size * 4, size)

    def done(self, reader: int) -> np.ndarray:
        """The numbers up to which each rank has read from a rank."""
        return words(self.at(reader, "done") + self.kind * word("MAX_RANKS") * 4, self.num_ranks)

    def table(self, place: str, reader: int, writer: int, width: int) -> np.ndarray:
        """A line of a table by writer, one table in turn."""
        line = self.turn * self.num_ranks + writer
        return words(self.at(reader, place) + line * width * 4, width, np.int32)

    def is_free(self) -> bool:
        """Waits until all ranks have read the call before the last."""
        return all([self.wait_flag(self.done(self.rank), rank, rank, self.seq - 2) for rank in self.ranks])

    def announce(self) -> None:
        """Headers go out; the number is kept for the second half."""
        for rank in self.ranks:
            header, lent = self.header(rank, self.rank), self.call.lent
            header[word("HASH")], header[word("STATUS")] = self.call.hash, self.call.status | self.state.status
            header[word("NUM_TOKENS")], header[word("LENT")] = self.call.num_tokens, self.call.is_lent
            header[word("X") : word("X") + 3] = lent.offset & 0xFFFFFFFF, lent.offset >> 32, lent.segment
            header[word("SEQ")] = self.seq
        self.state.status = abi.OK
        self.state.blocks_seq[self.kind] = self.seq
        self.kept[0] = self.seq

    def begins(self) -> bool:
        """Waits for all headers; False where one did not come or nothing may move."""
        came = [self.wait_flag(self.mine(rank), word("SEQ"), rank) for rank in self.ranks]
        differ = any(
            good and (self.mine(rank)[word("HASH")] != self.call.hash or self.mine(rank)[word("STATUS")] != abi.OK)
            for rank, good in zip(self.ranks, came, strict=True)
        )
        if differ:
            self.note_difference()
        return all(came) and not differ

    def ends(self) -> None:
        """This rank has read all."""
        for rank in self.ranks:
            self.done(rank)[self.rank] = self.seq


def run(call: Any, half: str, kind: int) -> None:
    """One half of a call."""
    side = _Half(call, kind, half == "send")
    if half == "send":
        if side.is_free():
            (_lay_tokens, _lay_answers)[kind](call, side)
        side.announce()
    else:
        (_read_tokens, _read_answers)[kind](call, side, side.begins())
        side.ends()


def _row_bytes(call: Any) -> int:
    return call.hidden * DTYPES[call.dtype].itemsize


def _ids(call: Any) -> np.ndarray:
    return words(call.topk_idx, call.num_tokens * call.num_topk, np.int64).reshape(call.num_tokens, call.num_topk)


def _lay_tokens(call: Any, side: _Half) -> None:
    """Rows of this rank, cast where that is asked for, ids for all ranks, and the place of each lane."""
    ids = _ids(call)
    positions = words(call.positions, ids.size, np.int32).reshape(ids.shape)
    for rank in side.ranks:
        table = side.table("ids", rank, side.rank, call.max_tokens * call.num_topk)
        table[: ids.size] = ids.reshape(-1)
    for token, lanes in enumerate(ids):
        for k, e in enumerate(lanes):
            positions[token, k] = int((ids[:token] == e).sum())
            if e < -1 or e >= call.num_local * side.num_ranks or (e >= 0 and e in lanes[:k]):
                side.state.status |= abi.BAD_ID
    if not call.num_tokens:
        return
    size = call.places.row_bytes
    start = side.at(side.rank, "rows") + side.turn * call.max_tokens * size
    out = words(start, call.num_tokens * size, np.uint8).reshape(call.num_tokens, size)
    x = numbers_at(call.x, call.num_tokens * call.hidden, DTYPES[call.dtype]).view(call.num_tokens, call.hidden)
    if not call.fp8:
        out[:, : _row_bytes(call)] = x.contiguous().view(torch.uint8).numpy()
        return
    data, scales = fp8.per_token_cast(x, round_scale=call.fp8 >= 2, packed=call.fp8 == 3)
    out[:, : call.hidden] = data.view(torch.uint8).numpy()
    out[:, call.hidden : call.hidden + 4 * call.scale_words] = scales.contiguous().view(torch.uint8).numpy()


def _read_tokens(call: Any, side: _Half, moves: bool) -> None:
    """Tokens of each local expert, in (source rank, token) order."""
    row_bytes = call.hidden if call.fp8 else _row_bytes(call)
    size, width = call.places.row_bytes, call.max_tokens * call.num_topk
    info = words(call.src_info, call.num_local * call.height, np.int32).reshape(call.num_local, call.height)
    ranges = words(call.ranges, call.num_local * side.num_ranks, np.int64).reshape(call.num_local, side.num_ranks)
    counts = words(call.counts, call.num_local, np.int32)
    for expert in range(call.num_local):
        row, wanted = 0, side.rank * call.num_local + expert
        for source in side.ranks:
            begin, ids = row, side.table("ids", side.rank, source, width).reshape(call.max_tokens, call.num_topk)
            for token in range(int(side.mine(source)[word("NUM_TOKENS")]) if moves else 0):
                if wanted not in ids[token]:
                    continue
                at = side.at(source, "rows") + (side.turn * call.max_tokens + token) * size
                to = call.out_x + (expert * call.height + row) * row_bytes
                words(to, row_bytes, np.uint8)[:] = words(at, row_bytes, np.uint8)
                for column, value in enumerate(words(at + call.hidden, call.scale_words)):
                    there = expert * call.scale_expert_stride + column * call.scale_col_stride + row
                    words(call.out_scales + 4 * there, 1)[0] = value
                info[expert, row] = token
                row += 1
            ranges[expert, source] = begin << 32 | (row - begin)
        info[expert, row:] = -1
        counts[expert] = row
        if call.stats:
            words(call.stats, call.num_local, np.int32)[expert] += row


def _lay_answers(call: Any, side: _Half) -> None:
    """Answers one after the other, unless they are lent, and where those for each rank begin."""
    counts = words(call.counts, call.num_local, np.int32)
    ranges = words(call.ranges, call.num_local * side.num_ranks, np.int64).reshape(call.num_local, side.num_ranks)
    row_bytes, first = _row_bytes(call), 0
    start = side.at(side.rank, "answers") + side.turn * call.places.answer_rows * row_bytes
    for expert in range(call.num_local):
        num_bytes, given = int(counts[expert]) * row_bytes, expert * call.height
        if not call.is_lent:
            source = words(call.x + given * row_bytes, num_bytes, np.uint8)
            words(start + first * row_bytes, num_bytes, np.uint8)[:] = source
        for rank in side.ranks:
            begins = side.table("begins", rank, side.rank, call.num_local)
            begins[expert] = (given if call.is_lent else first) + int(ranges[expert, rank] >> 32)
        first += int(counts[expert])


def _read_answers(call: Any, side: _Half, moves: bool) -> None:
    """Weight times row, added in lane order, each step rounded to fp32, once to the type of the rows."""
    ids, row_bytes, dtype = _ids(call), _row_bytes(call), DTYPES[call.dtype]
    positions = words(call.positions, ids.size, np.int32).reshape(ids.shape)
    weights = numbers_at(call.topk_weights, ids.size, torch.float32).view(ids.shape)
    for token, lanes in enumerate(ids if moves else ()):
        total = torch.zeros(call.hidden, dtype=torch.float32)
        for k, e in enumerate(lanes):
            if not 0 <= e < call.num_local * side.num_ranks:
                continue
            rank, expert = divmod(int(e), call.num_local)
            row = int(side.table("begins", side.rank, rank, call.num_local)[expert] + positions[token, k])
            answers = side.at(rank, "answers") + side.turn * call.places.answer_rows * row_bytes
            header = side.mine(rank)
            if header[word("LENT")]:
                which, offset = address_in(header[word("X") : word("X") + 3])
                answers = side.segment(which, rank) + offset
            content = numbers_at(answers + row * row_bytes, call.hidden, dtype).to(torch.float32)
            total = total + content * weights[token, k]
        numbers_at(call.out_x + token * row_bytes, call.hidden, dtype).copy_(total)


def spans(call: Any, half: str, kind: int) -> list[Span]:
    """What one half accesses."""
    lanes, num_local, num_ranks = call.num_tokens * call.num_topk, call.num_local, call.channel.num_ranks
    rows = num_local * call.height
    found = [Span(call.seq, 4, half == "send")]
    if (half, kind) == ("send", DISPATCH):
        found += [Span(call.x, call.num_tokens * _row_bytes(call), False), Span(call.topk_idx, lanes * 8, False)]
        found += [Span(call.positions, lanes * 4, True)]
    elif (half, kind) == ("recv", DISPATCH):
        found += [Span(call.out_x, rows * (call.hidden if call.fp8 else _row_bytes(call)), True)]
        found += [Span(call.src_info, rows * 4, True), Span(call.ranges, num_local * num_ranks * 8, True)]
        found += [Span(call.counts, num_local * 4, True), Span(call.stats, num_local * 4 if call.stats else 0, True)]
        last = (num_local - 1) * call.scale_expert_stride + (call.scale_words - 1) * call.scale_col_stride + call.height
        found += [Span(call.out_scales, last * 4 if call.scale_words else 0, True)]
    elif half == "send":
        found += [Span(call.x, rows * _row_bytes(call), False), Span(call.counts, num_local * 4, False)]
        found += [Span(call.ranges, num_local * num_ranks * 8, False)]
    else:
        found += [Span(call.topk_idx, lanes * 8, False), Span(call.topk_weights, lanes * 4, False)]
        found += [Span(call.positions, lanes * 4, False), Span(call.out_x, call.num_tokens * _row_bytes(call), True)]
    return found
