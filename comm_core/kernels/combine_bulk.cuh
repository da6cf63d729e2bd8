// Combine by bulk copies (platform.h): a warp keeps pieces of the rows it adds up in flight through a ring in shared memory,
// so that few multiprocessors keep the link, and the memory, busy. The same sums as combine_impl and combine_reduce_impl.
#pragma once

#include "combine.cuh"

#if defined(MT_MOE_BULK)
namespace mt {

constexpr int SUM_PIECE = 2048;  // bytes of a row
constexpr int SUM_STEPS = SUM_PIECE / 16 / WARP;

enum SumMark : int {
  SUM_FIRST = 1,  // of an output row's piece
  SUM_LAST = 2,
  SUM_CHUNK = 4,  // the end of a chunk
  SUM_PART = 8,   // of a part, which is rounded before it is added
  SUM_OPENS = 16, // the first of a part
  SUM_CLOSES = 32,
};

// What a slot holds: a piece of some summands of an output row.
struct alignas(16) SumNote {
  int row;
  int about;          // marks in the low byte, then the number of summands, then the piece
  int reader, chunk;  // with SUM_CHUNK
};

// GROUP summands at most in a slot, DEPTH slots a warp.
template <int WARPS, int DEPTH, int GROUP, bool PARTS>
struct SumRing {
  static constexpr int THREADS = WARPS * WARP, SLOTS = DEPTH, SUMMANDS = GROUP;
  static constexpr bool HAS_PARTS = PARTS;
  char data[WARPS][DEPTH][GROUP][SUM_PIECE];
  SumNote notes[WARPS][DEPTH];
  BulkFlag flags[WARPS][DEPTH];
};
using WholeRing = SumRing<16, 3, 2, false>;
// Two sums at a time need more registers, so there are fewer warps; several rows of one rank come in one slot.
using PartRing = SumRing<12, 2, 4, true>;

// Summands in order: the lanes of a row for its first piece, some at a time, again for its second, then the next row. Those of
// `part` are added up and rounded by themselves, between the lanes `before` and `behind` it.
struct Summands {
  const char* address;  // of this lane's summand
  uint32_t before, part, behind;
  uint32_t left;  // of the stretch under way
  int stretch;    // 0 before, 1 part, 2 behind
  int piece, pieces, hidden_bytes, row, reader, chunk;
  bool ends_chunk;

  __device__ __forceinline__ uint32_t lanes_of(int which) const { return which == 0 ? before : which == 1 ? part : behind; }
  __device__ __forceinline__ void begin_piece() {
    stretch = before ? 0 : part ? 1 : 2;
    left = lanes_of(stretch);
  }
  __device__ __forceinline__ void begin_row(int number, const char* from, uint32_t lanes_before, uint32_t lanes_of_part, uint32_t lanes_behind) {
    row = number; address = from; before = lanes_before; part = lanes_of_part; behind = lanes_behind; piece = 0;
    begin_piece();
  }
  // Starts the copies of the next ones; false where these were the last of the row.
  template <typename Ring>
  __device__ __forceinline__ bool issue(Ring& ring, int slot) {
    const int lane = lane_id(), warp = warp_id(), rest = hidden_bytes - piece * SUM_PIECE, bytes = rest < SUM_PIECE ? rest : SUM_PIECE;
    const uint32_t mine = 1u << lane;
    uint32_t still = left;
#pragma unroll
    for (int i = 0; i < Ring::SUMMANDS; ++i) still &= still - 1;
    const uint32_t group = left & ~still;
    const bool opens = left == lanes_of(stretch), closes = still == 0;
    const bool last = closes && (stretch == 2 || (stretch == 1 ? behind == 0 : (part | behind) == 0)), ends = last && piece == pieces - 1;
    if (lane == 0) {
      const bool first = opens && (stretch == 0 || (stretch == 1 ? before == 0 : (before | part) == 0));
      const int marks = (first ? SUM_FIRST : 0) | (last ? SUM_LAST : 0) | (ends && ends_chunk ? SUM_CHUNK : 0) |
                        (stretch != 1 ? 0 : SUM_PART | (opens ? SUM_OPENS : 0) | (closes ? SUM_CLOSES : 0));
      ring.notes[warp][slot] = {row, piece << 16 | __popc(group) << 8 | marks, reader, chunk};
      bulk_expect(&ring.flags[warp][slot], __popc(group) * bytes);
    }
    if (mine & group) bulk_copy(ring.data[warp][slot][__popc(group & (mine - 1))], address + piece * SUM_PIECE, bytes, &ring.flags[warp][slot]);
    left = still;
    if (!closes) return true;
    if (last) {
      if (++piece < pieces) begin_piece();
    } else {
      stretch = stretch == 0 && part ? 1 : 2;
      left = lanes_of(stretch);
    }
    return !ends;
  }
};

// Where sums go.
struct SumOut {
  char* out;
  uint64_t bias0, bias1;
  int64_t row_bytes;
};

// Rows to add up, for a combine that reads: the tokens of this rank. What is known of the next tokens has been asked for while
// this one's rows are on their way. With `lay` rows of other ranks are waited for, and those of this rank are added up here.
template <typename T>
struct PulledRows {
  const MtCombineCall& call;
  const Answers& answers;
  const MtReduceCall* lay;
  uint32_t seq;
  int warps, coming;
  Lane lane;          // of the token that comes next
  uint32_t last;
  int expanded;
  int asked_position; // of the token after it
  int64_t asked_id;
  uint32_t asked_last;
  Pace pace;

  __device__ __forceinline__ bool sums_here() const { return lay && lay->layout.expand; }
  __device__ __forceinline__ void ask(int token) {
    asked_position = -1;
    if (token >= call.layout.num_tokens) return;
    const int64_t at = static_cast<int64_t>(token) * call.layout.num_topk + lane_id();
    if (lane_id() < call.layout.num_topk) {
      asked_position = reinterpret_cast<const int*>(call.layout.lane_row)[at];
      asked_id = reinterpret_cast<const int64_t*>(call.layout.topk_idx)[at];
    }
    asked_last = reinterpret_cast<const uint32_t*>(call.layout.last_lanes)[token];
  }
  // What was asked for is there: the token after it is asked for.
  __device__ __forceinline__ void take(int token) {
    lane = Lane::of(call, answers, asked_position, asked_id);
    last = asked_last;
    if (sums_here() && lane.position >= 0 && lane.rank == call.channel.rank)
      expanded = reinterpret_cast<const int*>(call.layout.expand_row)[lane.row(answers) * call.layout.num_topk + lane_id()];
    ask(token + warps);
  }
  __device__ __forceinline__ void open() {
    ask(coming);
    take(coming);
  }
  __device__ __forceinline__ bool next(Summands& summands, const SumOut& out) {
    while (coming < call.layout.num_tokens) {
      const int token = coming;
      const bool here = lane.rank == call.channel.rank;
      if (lay) {
        if (!here) lane.await(call.channel, answers, seq);
        bulk_fence();
      }
      const bool valid = lane.position >= 0, adds = valid && here && sums_here();
      const uint32_t lasts = last & __ballot_sync(ALL_LANES, valid), part = __ballot_sync(ALL_LANES, adds);
      const uint32_t remote = lasts & __ballot_sync(ALL_LANES, valid && !here);
      const char* base = lay && here ? reinterpret_cast<const char*>(lay->x) : answers.x[lane.rank];
      const char* address = valid ? base + (adds ? expanded : lane.row(answers)) * out.row_bytes : nullptr;
      pace.pass(call.ticks_per_byte * warps, static_cast<int>(out.row_bytes) * __popc(remote));
      coming += warps;
      take(coming);
      if (part & (part - 1)) {  // where it stands is its last lane's place
        const uint32_t below = (lasts & part) - 1;
        summands.begin_row(token, address, lasts & below, part, lasts & ~part & ~below);
        return true;
      }
      if (lasts) {
        summands.begin_row(token, address, lasts, 0, 0);
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
  bool any;
  int here, expanded;  // of this lane, in the row that comes next

  __device__ __forceinline__ void open() {
    while (any && chunks.row >= chunks.end) any = chunks.next();
    if (!any || lane_id() >= call.layout.num_topk) return;
    const int64_t at = chunks.row * call.layout.num_topk + lane_id();
    here = reinterpret_cast<const int*>(call.layout.local_idx)[at];
    if (call.layout.expand) expanded = reinterpret_cast<const int*>(call.layout.expand_row)[at];
  }
  __device__ __forceinline__ bool next(Summands& summands, const SumOut& out) {
    if (!any) return false;
    const Laid laid = Laid::of(call, chunks.row, lane_id() < call.layout.num_topk ? here : -1, expanded);
    summands.begin_row(static_cast<int>(chunks.row), reinterpret_cast<const char*>(call.x) + laid.from * out.row_bytes, laid.lanes, 0, 0);
    summands.reader = chunks.reader;
    summands.chunk = chunks.chunk;
    summands.ends_chunk = ++chunks.row >= chunks.end;
    open();
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

// Adds up all rows that `rows` gives; PARTS where some hold a part.
template <typename T, bool PARTS, typename Ring, typename Rows>
__device__ __forceinline__ void sum_pieces(Ring& ring, Rows& rows, const SumOut& out, const MtChannel& channel, uint32_t seq, int hidden) {
  constexpr int N = 16 / sizeof(T), DEPTH = Ring::SLOTS;
  using P = Pack<T, N>;
  using W = typename Wide<T>::Type;
  const int warp = warp_id(), lane = lane_id();
  if (lane < DEPTH) bulk_open(&ring.flags[warp][lane]);
  bulk_fence();
  __syncwarp();
  Summands summands = {};
  summands.hidden_bytes = hidden * static_cast<int>(sizeof(T));
  summands.pieces = (summands.hidden_bytes + SUM_PIECE - 1) / SUM_PIECE;
  rows.open();
  bool more = rows.next(summands, out);
  int ahead = 0;
  for (; more && ahead < DEPTH; ++ahead) more = summands.issue(ring, ahead) || rows.next(summands, out);
  __syncwarp();
  W sums[SUM_STEPS][N], part[PARTS ? SUM_STEPS : 1][N];
  uint32_t turn = 0;
  for (int slot = 0; ahead > 0; --ahead) {
    bulk_await(&ring.flags[warp][slot], turn);
    const SumNote note = ring.notes[warp][slot];
    const int first = (note.about >> 16) * (SUM_PIECE / 16), count = hidden / N - first, summands_here = note.about >> 8 & 255;
    const P* pieces = reinterpret_cast<const P*>(ring.data[warp][slot]);
    if (note.about & SUM_FIRST) {
#pragma unroll
      for (int s = 0; s < SUM_STEPS; ++s)
#pragma unroll
        for (int i = 0; i < N; ++i) sums[s][i] = 0;
      for (int b = 0; b < 2; ++b) {
        const char* bias = row_of_bias(b == 0 ? out.bias0 : out.bias1, note.row * out.row_bytes);
        if (bias) add_piece<T, N>(sums, reinterpret_cast<const P*>(bias) + first, count);
      }
    }
    const bool of_part = PARTS && (note.about & SUM_PART);
    if (of_part && (note.about & SUM_OPENS)) {
#pragma unroll
      for (int s = 0; s < (PARTS ? SUM_STEPS : 0); ++s)
#pragma unroll
        for (int i = 0; i < N; ++i) part[s][i] = 0;
    }
#pragma unroll 1
    for (int i = 0; i < summands_here; ++i) {
      if constexpr (PARTS) {
        if (of_part) { add_piece<T, N>(part, pieces + i * (SUM_PIECE / 16), count); continue; }
      }
      add_piece<T, N>(sums, pieces + i * (SUM_PIECE / 16), count);
    }
    if (of_part && (note.about & SUM_CLOSES)) {
#pragma unroll
      for (int s = 0; s < (PARTS ? SUM_STEPS : 0); ++s)
#pragma unroll
        for (int i = 0; i < N; ++i) sums[s][i] += widen(narrow<T>(part[s][i]));
    }
    __syncwarp();  // the slot has been read
    if (more) {
      more = summands.issue(ring, slot) || rows.next(summands, out);
      ++ahead;
    }
    if (note.about & SUM_LAST) {
      P* to = reinterpret_cast<P*>(out.out + note.row * out.row_bytes) + first + lane;
#pragma unroll
      for (int s = 0; s < SUM_STEPS; ++s) {
        P pack;
#pragma unroll
        for (int i = 0; i < N; ++i) pack.at[i] = narrow<T>(sums[s][i]);
        if (s * WARP + lane < count) to[s * WARP] = pack;
      }
    }
    if (note.about & SUM_CHUNK) raise_ready(channel, note.reader, note.chunk, seq);
    __syncwarp();  // the note of the next slot is visible
    if (++slot == DEPTH) { slot = 0; turn ^= 1; }
  }
}

// Reads and adds up the tokens of this rank, in the blocks from `first_block` on.
template <typename T, typename Ring>
__device__ __forceinline__ void pull_pieces(Ring& ring, const MtCombineCall& call, const MtReduceCall* lay, uint32_t seq, bool moves, int first_block) {
  constexpr int WARPS = Ring::THREADS / WARP;
  __shared__ Answers answers;
  open_answers(call, seq, moves, answers);
  const int block = static_cast<int>(blockIdx.x) - first_block, blocks = static_cast<int>(gridDim.x) - first_block;
  const SumOut out = {reinterpret_cast<char*>(call.out_x), call.bias0, call.bias1, static_cast<int64_t>(call.hidden) * static_cast<int>(sizeof(T))};
  PulledRows<T> rows = {call, answers, lay, seq, blocks * WARPS, block * WARPS + warp_id(), {-1, 0}, 0, -1, -1, 0, 0, {ticks(), 0}};
  sum_pieces<T, Ring::HAS_PARTS>(ring, rows, out, call.channel, seq, call.hidden);
  return_weights(call, answers, lay, seq, static_cast<int64_t>(block) * blockDim.x + threadIdx.x, static_cast<int64_t>(blocks) * blockDim.x);
}

template <typename T>
__global__ void __launch_bounds__(WholeRing::THREADS, 1) combine_bulk_impl(const MtCombineCall call) {
#if defined(MT_MOE_BULK_HERE)
  extern __shared__ __align__(128) char memory[];
  const MtPlace none = {};
  const uint32_t seq = next_seq(call.channel);
  const bool moves = begin(call.channel, seq, call.hash, MT_OK, call.x, call.weights, none, call.lent, 0);
  pull_pieces<T>(*reinterpret_cast<WholeRing*>(memory), call, nullptr, seq, moves, 0);
  end(call.channel, seq, moves, call.lent);
#endif
}

// The rows of this rank's own tokens are not laid down: who reads them adds up what they are made of.
template <typename T>
__global__ void __launch_bounds__(PartRing::THREADS, 1) combine_reduce_bulk_impl(const MtCombineCall call, const MtReduceCall lay) {
#if defined(MT_MOE_BULK_HERE)
  extern __shared__ __align__(128) char memory[];
  constexpr int WARPS = PartRing::THREADS / WARP;
  PartRing& ring = *reinterpret_cast<PartRing*>(memory);
  const uint32_t seq = next_seq(call.channel);
  bool moves = true;
  if (static_cast<int>(blockIdx.x) < lay.num_sms) {
    LaidRows rows = {lay, {}, true, -1, -1};
    rows.chunks.open(lay, call.channel.rank, static_cast<int>(blockIdx.x) * WARPS + warp_id(), lay.num_sms * WARPS, false);
    const SumOut out = {reinterpret_cast<char*>(lay.rows), 0, 0, static_cast<int64_t>(lay.hidden) * static_cast<int>(sizeof(T))};
    sum_pieces<T, false>(ring, rows, out, call.channel, seq, lay.hidden);
  } else {
    const MtPlace none = {};
    moves = begin(call.channel, seq, call.hash, MT_OK, call.x, call.weights, none, call.lent, lay.num_sms);
    pull_pieces<T>(ring, call, &lay, seq, moves, lay.num_sms);
  }
  end(call.channel, seq, moves, false);
#endif
}

}  // namespace mt
#endif
