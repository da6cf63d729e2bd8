// Combine by bulk copies (platform.h): a warp keeps pieces of the rows it adds up in flight through a ring in shared memory,
// so that few multiprocessors keep the link, and the memory, busy. The same sums as combine_impl and combine_reduce_impl.
#pragma once

#include "combine.cuh"

#if defined(MT_MOE_BULK)
namespace mt {

constexpr int SUM_PIECE = 2048;  // bytes of a row
constexpr int SUM_GROUP = 2;     // summands in one slot
constexpr int SUM_WARPS = 16, SUM_DEPTH = 3;
constexpr int SUM_STEPS = SUM_PIECE / 16 / WARP;

enum SumMark : int { SUM_FIRST = 1, SUM_LAST = 2, SUM_CHUNK = 4, SUM_TWO = 8 };

// What a slot holds: a piece of one or two summands of an output row.
struct alignas(16) SumNote {
  int row;
  int piece_and_marks;  // marks in the low byte
  int reader, chunk;    // with SUM_CHUNK: this is the end of a chunk
};

struct SumRing {
  char data[SUM_WARPS][SUM_DEPTH][SUM_GROUP][SUM_PIECE];
  SumNote notes[SUM_WARPS][SUM_DEPTH];
  BulkFlag flags[SUM_WARPS][SUM_DEPTH];
};

// Summands in order: the lanes of a row for its first piece, two at a time, again for its second, then the next row.
struct Summands {
  const char* address;  // of this lane's summand
  uint32_t lanes, left;
  int piece, pieces, hidden_bytes, row, reader, chunk;
  bool ends_chunk;

  __device__ __forceinline__ void begin_row(int number, const char* from, uint32_t summands) {
    row = number; address = from; lanes = left = summands; piece = 0;
  }
  // Starts the copies of the next one or two; false where this was the last of the row.
  __device__ __forceinline__ bool issue(SumRing& ring, int slot) {
    const int lane = lane_id(), warp = warp_id(), rest = hidden_bytes - piece * SUM_PIECE, bytes = rest < SUM_PIECE ? rest : SUM_PIECE;
    const uint32_t after = left & (left - 1), two = after & (0u - after), one = left & (0u - left), mine = 1u << lane;
    const uint32_t still = after & (after - 1);
    const char* from = address + piece * SUM_PIECE;
    const bool last = still == 0, ends = last && piece == pieces - 1;
    if (mine == one) {
      const int marks = (left == lanes ? SUM_FIRST : 0) | (last ? SUM_LAST : 0) | (ends && ends_chunk ? SUM_CHUNK : 0) | (two ? SUM_TWO : 0);
      ring.notes[warp][slot] = {row, piece << 8 | marks, reader, chunk};
      bulk_expect(&ring.flags[warp][slot], two ? 2 * bytes : bytes);
    }
    if (mine & (one | two)) bulk_copy(ring.data[warp][slot][mine == one ? 0 : 1], from, bytes, &ring.flags[warp][slot]);
    left = still;
    if (last && ++piece < pieces) left = lanes;
    return !ends;
  }
};

// Where sums go.
struct SumOut {
  char* out;
  uint64_t bias0, bias1;
  int64_t row_bytes;
};

// Rows to add up, for a combine that reads: the tokens of this rank. What is known of the next token has been asked for while
// this one's rows are on their way.
template <typename T>
struct PulledRows {
  const MtCombineCall& call;
  const Answers& answers;
  uint32_t seq;
  bool waits;
  int warps, coming;
  int position;
  int64_t id;
  uint32_t last;
  Pace pace;

  __device__ __forceinline__ void ask() {
    if (coming >= call.layout.num_tokens) return;
    const int64_t at = static_cast<int64_t>(coming) * call.layout.num_topk + lane_id();
    position = -1;
    if (lane_id() < call.layout.num_topk) {
      position = reinterpret_cast<const int*>(call.layout.lane_row)[at];
      id = reinterpret_cast<const int64_t*>(call.layout.topk_idx)[at];
    }
    last = reinterpret_cast<const uint32_t*>(call.layout.last_lanes)[coming];
  }
  __device__ __forceinline__ bool next(Summands& summands, const SumOut& out) {
    while (coming < call.layout.num_tokens) {
      const int token = coming;
      Lane lane = Lane::of(call, answers, position, id);
      if (waits) {
        lane.await(call.channel, answers, seq);
        bulk_fence();
      }
      const bool valid = lane.position >= 0;
      const uint32_t lanes = last & __ballot_sync(ALL_LANES, valid);
      const char* address = valid ? answers.x[lane.rank] + lane.row(answers) * out.row_bytes : nullptr;
      const uint32_t remote = lanes & __ballot_sync(ALL_LANES, valid && lane.rank != call.channel.rank);
      pace.pass(call.ticks_per_byte * warps, static_cast<int>(out.row_bytes) * __popc(remote));
      coming += warps;
      ask();
      if (lanes) {
        summands.begin_row(token, address, lanes);
        return true;
      }
      const int64_t at = token * out.row_bytes;  // a token without experts has its biases alone
      sum_rows<T, 16 / sizeof(T), 4>(0, nullptr, row_of_bias(out.bias0, at), row_of_bias(out.bias1, at), out.out + at, call.hidden);
    }
    return false;
  }
};

// Rows to add up, for a combine that lays down: chunks of received rows.
struct LaidRows {
  const MtReduceCall& call;
  Chunks chunks;
  bool open;
  int here, expanded;  // of this lane, in the row that comes next

  __device__ __forceinline__ void ask() {
    while (open && chunks.row >= chunks.end) open = chunks.next();
    if (!open || lane_id() >= call.layout.num_topk) return;
    const int64_t at = chunks.row * call.layout.num_topk + lane_id();
    here = reinterpret_cast<const int*>(call.layout.local_idx)[at];
    if (call.layout.expand) expanded = reinterpret_cast<const int*>(call.layout.expand_row)[at];
  }
  __device__ __forceinline__ bool next(Summands& summands, const SumOut& out) {
    if (!open) return false;
    const Laid laid = Laid::of(call, chunks.row, lane_id() < call.layout.num_topk ? here : -1, expanded);
    summands.begin_row(static_cast<int>(chunks.row), reinterpret_cast<const char*>(call.x) + laid.from * out.row_bytes, laid.lanes);
    summands.reader = chunks.reader;
    summands.chunk = chunks.chunk;
    summands.ends_chunk = ++chunks.row >= chunks.end;
    ask();
    return true;
  }
};

// Adds a piece that has come to the sums of the lanes; `count` packs of it are real.
template <typename T, int N>
__device__ __forceinline__ void add_piece(typename Wide<T>::Type (&sums)[SUM_STEPS][N], const Pack<T, N>* piece, int count) {
  Pack<T, N> packs[SUM_STEPS];
  if (count >= SUM_STEPS * WARP) {
#pragma unroll
    for (int s = 0; s < SUM_STEPS; ++s) packs[s] = piece[s * WARP + lane_id()];
#pragma unroll
    for (int s = 0; s < SUM_STEPS; ++s) add(sums[s], packs[s]);
    return;
  }
#pragma unroll
  for (int s = 0; s < SUM_STEPS; ++s)
    if (s * WARP + lane_id() < count) add(sums[s], piece[s * WARP + lane_id()]);
}

// Adds up all rows that `rows` gives.
template <typename T, typename Rows>
__device__ __forceinline__ void sum_pieces(SumRing& ring, Rows& rows, const SumOut& out, const MtChannel& channel, uint32_t seq, int hidden) {
  constexpr int N = 16 / sizeof(T);
  using P = Pack<T, N>;
  const int warp = warp_id(), lane = lane_id();
  if (lane < SUM_DEPTH) bulk_open(&ring.flags[warp][lane]);
  bulk_fence();
  __syncwarp();
  Summands summands = {};
  summands.hidden_bytes = hidden * static_cast<int>(sizeof(T));
  summands.pieces = (summands.hidden_bytes + SUM_PIECE - 1) / SUM_PIECE;
  rows.ask();
  bool more = rows.next(summands, out);
  int ahead = 0;
  for (; more && ahead < SUM_DEPTH; ++ahead) more = summands.issue(ring, ahead) || rows.next(summands, out);
  __syncwarp();
  typename Wide<T>::Type sums[SUM_STEPS][N];
  uint32_t turn = 0;
  for (int slot = 0; ahead > 0; --ahead) {
    bulk_await(&ring.flags[warp][slot], turn);
    const SumNote note = ring.notes[warp][slot];
    const int first = (note.piece_and_marks >> 8) * (SUM_PIECE / 16), count = hidden / N - first;
    if (note.piece_and_marks & SUM_FIRST) {
#pragma unroll
      for (int s = 0; s < SUM_STEPS; ++s)
#pragma unroll
        for (int i = 0; i < N; ++i) sums[s][i] = 0;
      for (int b = 0; b < 2; ++b) {
        const char* bias = row_of_bias(b == 0 ? out.bias0 : out.bias1, note.row * out.row_bytes);
        if (bias) add_piece<T, N>(sums, reinterpret_cast<const P*>(bias) + first, count);
      }
    }
    add_piece<T, N>(sums, reinterpret_cast<const P*>(ring.data[warp][slot][0]), count);
    if (note.piece_and_marks & SUM_TWO) add_piece<T, N>(sums, reinterpret_cast<const P*>(ring.data[warp][slot][1]), count);
    __syncwarp();  // the slot has been read
    if (more) {
      more = summands.issue(ring, slot) || rows.next(summands, out);
      ++ahead;
    }
    if (note.piece_and_marks & SUM_LAST) {
      P* to = reinterpret_cast<P*>(out.out + note.row * out.row_bytes) + first + lane;
#pragma unroll
      for (int s = 0; s < SUM_STEPS; ++s) {
        P pack;
#pragma unroll
        for (int i = 0; i < N; ++i) pack.at[i] = narrow<T>(sums[s][i]);
        if (s * WARP + lane < count) to[s * WARP] = pack;
      }
    }
    if (note.piece_and_marks & SUM_CHUNK) raise_ready(channel, note.reader, note.chunk, seq);
    __syncwarp();  // the note of the next slot is visible
    if (++slot == SUM_DEPTH) { slot = 0; turn ^= 1; }
  }
}

template <typename T>
__device__ __forceinline__ void pull_pieces(SumRing& ring, const MtCombineCall& call, uint32_t seq, bool moves, int first_block, bool waits) {
  __shared__ Answers answers;
  open_answers(call, seq, moves, answers);
  const int block = static_cast<int>(blockIdx.x) - first_block, blocks = static_cast<int>(gridDim.x) - first_block;
  const SumOut out = {reinterpret_cast<char*>(call.out_x), call.bias0, call.bias1, static_cast<int64_t>(call.hidden) * static_cast<int>(sizeof(T))};
  PulledRows<T> rows = {call, answers, seq, waits, blocks * SUM_WARPS, block * SUM_WARPS + warp_id(), -1, 0, 0, {ticks(), 0}};
  sum_pieces<T>(ring, rows, out, call.channel, seq, call.hidden);
  return_weights(call, answers, seq, waits, static_cast<int64_t>(block) * blockDim.x + threadIdx.x, static_cast<int64_t>(blocks) * blockDim.x);
}

template <typename T>
__global__ void __launch_bounds__(SUM_WARPS * WARP, 1) combine_bulk_impl(const MtCombineCall call) {
  extern __shared__ __align__(128) char memory[];
  const MtPlace none = {};
  const uint32_t seq = next_seq(call.channel);
  const bool moves = begin(call.channel, seq, call.hash, MT_OK, call.x, call.weights, none, call.lent, 0);
  pull_pieces<T>(*reinterpret_cast<SumRing*>(memory), call, seq, moves, 0, false);
  end(call.channel, seq, moves, call.lent);
}

template <typename T>
__global__ void __launch_bounds__(SUM_WARPS * WARP, 1) combine_reduce_bulk_impl(const MtCombineCall call, const MtReduceCall lay) {
  extern __shared__ __align__(128) char memory[];
  SumRing& ring = *reinterpret_cast<SumRing*>(memory);
  const uint32_t seq = next_seq(call.channel);
  bool moves = true;
  if (static_cast<int>(blockIdx.x) < lay.num_sms) {
    LaidRows rows = {lay, {}, true, -1, -1};
    rows.chunks.open(lay, call.channel.rank, static_cast<int>(blockIdx.x) * SUM_WARPS + warp_id(), lay.num_sms * SUM_WARPS);
    const SumOut out = {reinterpret_cast<char*>(lay.rows), 0, 0, static_cast<int64_t>(lay.hidden) * static_cast<int>(sizeof(T))};
    sum_pieces<T>(ring, rows, out, call.channel, seq, lay.hidden);
  } else {
    const MtPlace none = {};
    moves = begin(call.channel, seq, call.hash, MT_OK, call.x, call.weights, none, call.lent, lay.num_sms);
    pull_pieces<T>(ring, call, seq, moves, lay.num_sms, true);
  }
  end(call.channel, seq, moves, false);
}

}  // namespace mt
#endif
