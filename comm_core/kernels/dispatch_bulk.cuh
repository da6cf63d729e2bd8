// Dispatch by bulk copies (platform.h): a few warps of a block move rows through rings in shared memory, so that a handful of
// multiprocessors keep the link full; the others move ids, weights and scales. The same results as dispatch_impl.
#pragma once

#include "dispatch.cuh"

#if defined(MT_MOE_BULK)
namespace mt {

// How rows are cut. `depth` pieces are in flight a warp.
struct BulkShape {
  int movers;  // warps of a block that move rows
  int depth;
  int piece;   // bytes, a multiple of 16
  int pieces;  // of a row
};

constexpr int BULK_NOTE = MT_MAX_TOPK + 1;  // words beside a piece: rows it goes to, their number and the piece's

__host__ __device__ constexpr int bulk_ring_bytes(int depth, int piece) {
  const int each = (piece + 127) / 128 * 128 + static_cast<int>(sizeof(BulkFlag)) + BULK_NOTE * 4;
  return (depth * each + 127) / 128 * 128;
}

// Moves the rows of one warp: pieces come into a slot each, in turn, and leave for one or several rows of the output.
struct Mover {
  const MtDispatchCall& call;
  const BulkShape& shape;
  const Turns& turns;
  char* data;
  BulkFlag* flags;
  int* notes;
  int slot_bytes;
  // What comes next: steps of 32 rows, a row, a piece.
  int begun, steps, piece, expanded, lane_row;
  uint32_t left, lanes;
  const char* lane_from;
  const char* from;
  bool remote, lane_remote;
  Pace pace;

  // Goes to the next piece; false behind the last.
  __device__ __forceinline__ bool next() {
    if (++piece < shape.pieces) return true;
    while (left == 0) {
      if (begun >= steps) return false;
      const int step = begun + lane_id();
      begun += WARP;
      int source = 0;
      lane_row = step < steps ? turns.row_of(step, &source) : -1;
      lane_remote = source != call.channel.rank;
      const int token = lane_row >= 0 ? reinterpret_cast<const int*>(call.layout.recv_token)[lane_row] : 0;
      lane_from = turns.sources.x[source] + static_cast<int64_t>(token) * call.row_bytes;
      left = __ballot_sync(ALL_LANES, lane_row >= 0);
    }
    const int which = __ffs(left) - 1, lane = lane_id(), num_topk = call.layout.num_topk;
    left &= left - 1;
    piece = 0;
    const int row = __shfl_sync(ALL_LANES, lane_row, which);
    from = reinterpret_cast<const char*>(__shfl_sync(ALL_LANES, reinterpret_cast<long long>(lane_from), which));
    remote = __shfl_sync(ALL_LANES, static_cast<int>(lane_remote), which);
    expanded = lane == 0 ? row : -1;
    if (call.layout.expand)
      expanded = lane < num_topk ? reinterpret_cast<const int*>(call.layout.expand_row)[static_cast<int64_t>(row) * num_topk + lane] : -1;
    lanes = __ballot_sync(ALL_LANES, expanded >= 0);
    return true;
  }

  __device__ __forceinline__ int bytes_of(int which) const {
    const int rest = call.row_bytes - which * shape.piece;
    return rest < shape.piece ? rest : shape.piece;
  }

  // Starts the copy of this piece into a slot.
  __device__ __forceinline__ void issue(int slot) {
    int* note = notes + slot * BULK_NOTE;
    if (expanded >= 0) note[__popc(lanes & ((1u << lane_id()) - 1))] = expanded;
    if (lane_id() == 0) note[MT_MAX_TOPK] = __popc(lanes) | piece << 8;
    __syncwarp();
    if (remote && piece == 0) pace.pass(call.ticks_per_byte * turns.warps, call.row_bytes);
    if (lane_id() != 0) return;
    bulk_expect(flags + slot, bytes_of(piece));
    bulk_copy(data + slot * slot_bytes, from + piece * shape.piece, bytes_of(piece), flags + slot);
  }

  // Waits for the piece of a slot and starts its copies to the output, one a lane.
  __device__ __forceinline__ void deliver(int slot, uint32_t turn) {
    const int* note = notes + slot * BULK_NOTE;
    bulk_await(flags + slot, turn);
    const int count = note[MT_MAX_TOPK] & 255, which = note[MT_MAX_TOPK] >> 8;
    if (lane_id() < count)
      bulk_store(reinterpret_cast<char*>(call.out_x) + static_cast<int64_t>(note[lane_id()]) * call.row_bytes + which * shape.piece,
                 data + slot * slot_bytes, bytes_of(which));
    bulk_commit();
  }

  __device__ __forceinline__ void run() {
    bool more = next();
    int ahead = 0;  // slots that are filled
    for (; more && ahead < shape.depth; ++ahead) { issue(ahead); more = next(); }
    int slot = 0, before = shape.depth - 1;
    uint32_t turn = 0;
    for (bool first = true; ahead > 0; --ahead, first = false) {
      deliver(slot, turn);
      if (more && !first) {  // into the slot before, once its copies have left
        bulk_read_but_one();
        __syncwarp();
        issue(before);
        more = next();
        ++ahead;
      }
      before = slot;
      if (++slot == shape.depth) { slot = 0; turn ^= 1; }
    }
    bulk_written();
  }
};

// Ids, weights and scales of 32 rows at a time: lane i knows where row i comes from and goes to. Reads wait behind rows on a
// full link, so many are under way at once.
struct Smalls {
  const MtDispatchCall& call;
  const RowSources& sources;
  int row, token, source;  // row -1: none

  // Weights and ids, in order of row and lane.
  __device__ __forceinline__ void weights() const {
    constexpr int GROUP = 8;
    const MtLayout& layout = call.layout;
    const int num_topk = layout.num_topk, words = call.weight_words, all = WARP * num_topk;
    for (int base = 0; base < all; base += WARP * GROUP) {
      int64_t to[GROUP];
      uint32_t first[GROUP], second[GROUP];
#pragma unroll
      for (int j = 0; j < GROUP; ++j) {
        const int at = base + j * WARP + lane_id(), which = at / num_topk < WARP ? at / num_topk : 0, lane = at % num_topk;
        const int its_row = __shfl_sync(ALL_LANES, row, which), its_token = __shfl_sync(ALL_LANES, token, which);
        const int its_source = __shfl_sync(ALL_LANES, source, which);
        to[j] = -1;
        if (at >= all || its_row < 0) continue;
        const int64_t place = static_cast<int64_t>(its_row) * num_topk + lane;
        to[j] = layout.expand ? reinterpret_cast<const int*>(layout.expand_row)[place] : place;
        if (call.out_idx) reinterpret_cast<int64_t*>(call.out_idx)[place] = reinterpret_cast<const int*>(layout.local_idx)[place];
        if (!call.out_weights) continue;
        const uint32_t* from = reinterpret_cast<const uint32_t*>(sources.weights[its_source]) + (static_cast<int64_t>(its_token) * num_topk + lane) * words;
        first[j] = from[0];
        if (words == 2) second[j] = from[1];
      }
#pragma unroll
      for (int j = 0; j < GROUP; ++j) {
        if (to[j] < 0 || !call.out_weights) continue;
        uint32_t* out = reinterpret_cast<uint32_t*>(call.out_weights) + to[j] * words;
        out[0] = first[j];
        if (words == 2) out[1] = second[j];
      }
    }
  }

  __device__ __forceinline__ void scales() const {
    constexpr int GROUP = 8;
    const MtLayout& layout = call.layout;
    const int lane = lane_id(), num_topk = layout.num_topk;
    for (uint32_t left = __ballot_sync(ALL_LANES, row >= 0); left;) {
      int to[GROUP];  // the row, or the expanded row of this lane
      const uint32_t* from[GROUP];
#pragma unroll
      for (int j = 0; j < GROUP; ++j) {
        const int which = left ? __ffs(left) - 1 : 0;
        const int its_row = __shfl_sync(ALL_LANES, row, which), its_token = __shfl_sync(ALL_LANES, token, which);
        const int its_source = __shfl_sync(ALL_LANES, source, which);
        to[j] = -1;
        from[j] = nullptr;
        if (!left) continue;
        left &= left - 1;
        from[j] = reinterpret_cast<const uint32_t*>(sources.scales[its_source]) + static_cast<int64_t>(its_token) * call.scale_words;
        if (!layout.expand) to[j] = lane == 0 ? its_row : -1;
        else if (lane < num_topk) to[j] = reinterpret_cast<const int*>(layout.expand_row)[static_cast<int64_t>(its_row) * num_topk + lane];
      }
      for (int base = 0; base < call.scale_words; base += 2 * WARP) {
        uint32_t value[GROUP][2];
#pragma unroll
        for (int j = 0; j < GROUP; ++j)
#pragma unroll
          for (int h = 0; h < 2; ++h) {
            const int c = base + h * WARP + lane;
            if (from[j] && c < call.scale_words) value[j][h] = from[j][c];
          }
#pragma unroll
        for (int j = 0; j < GROUP; ++j)
          for (uint32_t lanes = __ballot_sync(ALL_LANES, to[j] >= 0); lanes; lanes &= lanes - 1) {
            const int64_t place = __shfl_sync(ALL_LANES, to[j], __ffs(lanes) - 1);
            uint32_t* out = reinterpret_cast<uint32_t*>(call.out_scales) + place * call.scale_row_stride;
#pragma unroll
            for (int h = 0; h < 2; ++h) {
              const int c = base + h * WARP + lane;
              if (c < call.scale_words) out[c * call.scale_col_stride] = value[j][h];
            }
          }
      }
    }
  }
};

// Ids, weights and scales of the rows of one warp.
__device__ __forceinline__ void move_smalls(const MtDispatchCall& call, const Turns& turns) {
  if (!call.out_idx && !call.out_weights && !call.out_scales) return;
  for (int begun = 0, steps = turns.steps(); begun < steps; begun += WARP) {
    Smalls smalls = {call, turns.sources, -1, 0, 0};
    const int step = begun + lane_id();
    if (step < steps) smalls.row = turns.row_of(step, &smalls.source);
    if (smalls.row >= 0) smalls.token = reinterpret_cast<const int*>(call.layout.recv_token)[smalls.row];
    if (call.out_idx || call.out_weights) smalls.weights();
    if (call.out_scales) smalls.scales();
  }
}

__global__ void __launch_bounds__(512, 1) dispatch_bulk_impl(const MtDispatchCall call, const BulkShape shape) {
#if defined(MT_MOE_BULK_HERE)
  extern __shared__ __align__(128) char memory[];
  __shared__ RowSources sources;
  const MtChannel& channel = call.channel;
  const uint32_t seq = next_seq(channel);
  const bool moves = begin(channel, seq, call.hash, MT_OK, call.x, call.weights, call.scales, call.lent, 0);
  open_sources(call, seq, moves, sources);
  const int num_warps = blockDim.x / WARP, movers = shape.movers;
  if (warp_id() < movers) {
    const Turns turns = {sources, channel.rank, channel.num_ranks, static_cast<int>(blockIdx.x) * movers + warp_id(),
                         static_cast<int>(gridDim.x) * movers};
    char* data = memory + warp_id() * bulk_ring_bytes(shape.depth, shape.piece);
    const int slot_bytes = (shape.piece + 127) / 128 * 128;
    BulkFlag* flags = reinterpret_cast<BulkFlag*>(data + shape.depth * slot_bytes);
    Mover mover = {call, shape, turns, data, flags, reinterpret_cast<int*>(flags + shape.depth), slot_bytes,
                   0, turns.steps(), shape.pieces, -1, -1, 0, 0, nullptr, nullptr, false, false, {ticks(), 0}};
    if (lane_id() < shape.depth) bulk_open(flags + lane_id());
    bulk_fence();
    __syncwarp();
    mover.run();
  } else {
    const int others = num_warps - movers;
    const Turns turns = {sources, channel.rank, channel.num_ranks, static_cast<int>(blockIdx.x) * others + warp_id() - movers,
                         static_cast<int>(gridDim.x) * others};
    move_smalls(call, turns);
  }
  clear_rest<int4>(call, sources, moves, static_cast<int>(blockIdx.x) * num_warps + warp_id(), static_cast<int>(gridDim.x) * num_warps);
  end(channel, seq, moves, call.lent);
#endif
}

// The shape for rows of some bytes; depth 0 where they can not be moved like this.
inline BulkShape bulk_shape(int row_bytes, int sms) {
  constexpr int MOVERS = 8, LIMIT = 4096;
  // What is under way in all: less does not fill the link, more makes everything wait in queues.
  constexpr int64_t UNDER_WAY = 2 << 20;
  BulkShape shape = {MOVERS, 0, row_bytes, 1};
  if (row_bytes % 16 != 0 || row_bytes == 0 || !has_bulk()) return shape;
  shape.pieces = (row_bytes + LIMIT - 1) / LIMIT;
  shape.piece = (row_bytes / 16 + shape.pieces - 1) / shape.pieces * 16;
  const int wanted = static_cast<int>(UNDER_WAY / (static_cast<int64_t>(sms) * MOVERS * shape.piece));
  shape.depth = wanted < 2 ? 2 : wanted > WARP ? WARP : wanted;
  while (MOVERS * bulk_ring_bytes(shape.depth, shape.piece) > BULK_SHARED_BYTES) --shape.depth;
  return shape;
}

}  // namespace mt
#endif
