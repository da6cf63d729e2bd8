"""The low-latency kernels (kernels/low_latency.cuh) in loops over tokens and experts: two kinds, two halves each."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from comm_core import fp8
from comm_core.kernels import library as abi
from comm_core.layout import align
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

    def done(self, reader: int, writer: int) -> np.ndarray:
        """The numbers up to which the blocks of a rank have read from a rank."""
        line, size = (self.kind * 2 + self.turn) * word("MAX_RANKS") + writer, word("DONE_SLOTS")
        return words(self.at(reader, "done") + line * size * 4, size)

    def table(self, place: str, reader: int, writer: int, width: int) -> np.ndarray:
        """A line of a table by writer, one table in turn. Only the kernels tag small words: here flags come last."""
        line = self.turn * self.num_ranks + writer
        return words(self.at(reader, place) + line * width * 4, width)

    def row(self, reader: int, writer: int, token: int) -> int:
        """Address of a row received."""
        line = (self.turn * self.num_ranks + writer) * self.call.max_tokens + token
        return self.at(reader, "rows") + line * self.call.places.row_bytes

    def record(self, row: int) -> np.ndarray:
        """The record of a row: for each lane its local expert + 1 and its position, or 0."""
        num_topk = self.call.num_topk
        return words(row + self.call.places.row_bytes - align(num_topk * 4, 16), num_topk)

    def laid(self, reader: int, expert: int) -> np.ndarray:
        """Flags of the answers of an expert to a rank, by position."""
        line = self.turn * self.num_ranks * self.call.num_local + expert
        return words(self.at(reader, "laid") + line * self.call.max_tokens * 4, self.call.max_tokens)

    def is_free(self) -> bool:
        """Waits until all blocks of all ranks have read the call before the last."""
        slots = range(word("DONE_SLOTS"))
        return all(self.wait_flag(self.done(self.rank, r), i, r, self.seq - 2) for r in self.ranks for i in slots)

    def announce(self, status: int) -> None:
        """Headers go out; the number is kept for the second half."""
        for rank in self.ranks:
            header, lent = self.header(rank, self.rank), self.call.lent
            header[word("HASH")], header[word("STATUS")] = self.call.hash, self.call.status | status
            header[word("LENT")] = self.call.is_lent
            header[word("X") : word("X") + 3] = lent.offset & 0xFFFFFFFF, lent.offset >> 32, lent.segment
            header[word("SEQ")] = self.seq
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
            self.done(rank, self.rank)[:] = self.seq


def run(call: Any, half: str, kind: int) -> None:
    """One half of a call, or all of it."""
    if half == "whole":
        run(call, "send", kind)
        half = "recv"
    side = _Half(call, kind, half == "send")
    if half == "send":
        side.announce((_send_tokens, _lay_answers)[kind](call, side) if side.is_free() else abi.OK)
    else:
        (_take_tokens, _read_answers)[kind](call, side, side.begins())
        side.ends()


def _row_bytes(call: Any) -> int:
    return call.hidden * DTYPES[call.dtype].itemsize


def _ids(call: Any) -> np.ndarray:
    return words(call.topk_idx, call.num_tokens * call.num_topk, np.int64).reshape(call.num_tokens, call.num_topk)


def _send_tokens(call: Any, side: _Half) -> int:
    """Rows of this rank, cast where that is asked for, to all ranks with an expert of them; the place of each lane."""
    ids, content, status = _ids(call), _content(call), abi.OK
    positions = words(call.positions, ids.size, np.int32).reshape(ids.shape)
    for token, lanes in enumerate(ids):
        for k, e in enumerate(lanes):
            positions[token, k] = int((ids[:token] == e).sum())
            if e < -1 or e >= call.num_local * side.num_ranks or (e >= 0 and e in lanes[:k]):
                status = abi.BAD_ID
    for rank in side.ranks:
        first = rank * call.num_local
        here = (ids >= first) & (ids < first + call.num_local)
        numbers = np.where(here, (ids - first + 1) << 16 | positions, 0)
        for token in map(int, np.flatnonzero(here.any(axis=1))):
            row = side.row(rank, side.rank, token)
            words(row, content.shape[1], np.uint8)[:] = content[token]
            side.record(row)[:] = numbers[token]
        counts = side.table("counts", rank, side.rank, call.num_local)
        counts[:] = np.bincount((ids - first)[here], minlength=call.num_local)
        flags = side.table("flags", rank, side.rank, call.max_tokens)
        flags[:] = (side.seq << 1) & 0xFFFFFFFF
        flags[: call.num_tokens] |= here.any(axis=1)
    return status


def _content(call: Any) -> np.ndarray:
    """Bytes of the rows of this rank as they are sent, scales behind."""
    if not call.num_tokens:
        return np.zeros((0, 0), np.uint8)
    x = numbers_at(call.x, call.num_tokens * call.hidden, DTYPES[call.dtype]).view(call.num_tokens, call.hidden)
    if not call.fp8:
        return x.contiguous().view(torch.uint8).numpy()
    data, scales = fp8.per_token_cast(x, round_scale=call.fp8 >= 2, packed=call.fp8 == 3)
    return np.concatenate([data.view(torch.uint8).numpy(), scales.contiguous().view(torch.uint8).numpy()], axis=1)


def _take_tokens(call: Any, side: _Half, moves: bool) -> None:
    """Tokens of each local expert, in (source rank, token) order."""
    row_bytes = call.hidden if call.fp8 else _row_bytes(call)
    info = words(call.src_info, call.num_local * call.height, np.int32).reshape(call.num_local, call.height)
    ranges = words(call.ranges, call.num_local * side.num_ranks, np.int64).reshape(call.num_local, side.num_ranks)
    found = np.zeros(call.num_local, np.int64)
    info[:] = -1
    for source in side.ranks:
        begins = found.copy()
        if moves:
            found += side.table("counts", side.rank, source, call.num_local)
        ranges[:, source] = begins << 32 | (found - begins)
        flags = side.table("flags", side.rank, source, call.max_tokens)
        for token in map(int, np.flatnonzero(flags & 1) if moves else ()):
            at = side.row(side.rank, source, token)
            for lane in side.record(at)[np.flatnonzero(side.record(at))]:
                expert, row = int(lane >> 16) - 1, int(begins[(lane >> 16) - 1] + (lane & 0xFFFF))
                to = call.out_x + (expert * call.height + row) * row_bytes
                words(to, row_bytes, np.uint8)[:] = words(at, row_bytes, np.uint8)
                for column, value in enumerate(words(at + call.hidden, call.scale_words)):
                    there = expert * call.scale_expert_stride + column * call.scale_col_stride + row
                    words(call.out_scales + 4 * there, 1)[0] = value
                info[expert, row] = token
    words(call.counts, call.num_local, np.int32)[:] = found
    if call.stats:
        words(call.stats, call.num_local, np.int32)[:] += found.astype(np.int32)


def _lay_answers(call: Any, side: _Half) -> int:
    """Answers one after the other, unless they are lent, and where those for each rank begin."""
    counts = words(call.counts, call.num_local, np.int32)
    ranges = words(call.ranges, call.num_local * side.num_ranks, np.int64).reshape(call.num_local, side.num_ranks)
    row_bytes, first = _row_bytes(call), 0
    start = side.at(side.rank, "answers") + side.turn * call.places.answer_rows * row_bytes
    for expert in range(call.num_local):
        num_bytes = int(counts[expert]) * row_bytes
        if not call.is_lent:
            source = words(call.x + expert * call.height * row_bytes, num_bytes, np.uint8)
            words(start + first * row_bytes, num_bytes, np.uint8)[:] = source
        for rank in side.ranks:
            begin, count = int(ranges[expert, rank] >> 32), int(ranges[expert, rank] & 0xFFFFFFFF)
            begins = side.table("begins", rank, side.rank, call.num_local)
            begins[expert] = begin if call.is_lent else first + begin
            if not call.is_lent:
                side.laid(rank, side.rank * call.num_local + expert)[:count] = side.seq
        first += int(counts[expert])
    return abi.OK


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
                row += expert * call.height
            else:
                assert side.laid(side.rank, int(e))[positions[token, k]] == side.seq
            content = numbers_at(answers + row * row_bytes, call.hidden, dtype).to(torch.float32)
            total = total + content * weights[token, k]
        numbers_at(call.out_x + token * row_bytes, call.hidden, dtype).copy_(total)


def spans(call: Any, half: str, kind: int) -> list[Span]:
    """What one half, or a whole call, accesses."""
    if half == "whole":
        return [*spans(call, "send", kind), *spans(call, "recv", kind)]
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
