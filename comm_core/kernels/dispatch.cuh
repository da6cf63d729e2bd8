// Dispatch: every rank reads the rows it is to have from where their owners laid them, straight into the rows of its
// output, plain or expanded. A row crosses once and is replicated where it arrives.
#pragma once

#include "rows.cuh"

namespace mt {

// Targets of a row: lane k of the warp holds the expanded row of lane k of the token, or lane 0 the plain row.
struct Targets {
  char* out;
  int64_t row_bytes;
  int rows;  // of this lane
  uint32_t lanes;
  __device__ __forceinline__ char* operator()(int index) const {
    uint32_t left = lanes;
    for (int i = 0; i < index; ++i) left &= left - 1;
    return out + row_bytes * __shfl_sync(ALL_LANES, rows, __ffs(left) - 1);
  }
};

// What goes with a row: ids, weights, scales. One warp.
__device__ __forceinline__ void move_small(const MtDispatchCall& call, int row, int expanded, const uint32_t* weights,
                                           const uint32_t* scales) {
  const MtLayout& layout = call.layout;
  const int lane = lane_id(), num_topk = layout.num_topk, words = call.weight_words;
  const int token = reinterpret_cast<const int*>(layout.recv_token)[row];
  const int* ids = reinterpret_cast<const int*>(layout.local_idx) + static_cast<int64_t>(row) * num_topk;
  if (call.out_idx && lane < num_topk)
    reinterpret_cast<int64_t*>(call.out_idx)[static_cast<int64_t>(row) * num_topk + lane] = ids[lane];
  if (call.out_weights && lane < num_topk && (!layout.expand || expanded >= 0)) {
    const int64_t to = layout.expand ? expanded : static_cast<int64_t>(row) * num_topk + lane;
    for (int w = 0; w < words; ++w)
      reinterpret_cast<uint32_t*>(call.out_weights)[to * words + w] = weights[(static_cast<int64_t>(token) * num_topk + lane) * words + w];
  }
  if (!call.out_scales) return;
  uint32_t* out = reinterpret_cast<uint32_t*>(call.out_scales);
  uint32_t lanes = __ballot_sync(ALL_LANES, layout.expand && expanded >= 0);
  for (int c = lane; c < (call.scale_words + WARP - 1) / WARP * WARP; c += WARP) {
    const uint32_t value = c < call.scale_words ? scales[static_cast<int64_t>(token) * call.scale_words + c] : 0;
    for (uint32_t left = layout.expand ? lanes : 1u; left; left &= left - 1) {
      const int64_t to = layout.expand ? __shfl_sync(ALL_LANES, expanded, __ffs(left) - 1) : row;
      if (c < call.scale_words) out[to * call.scale_row_stride + c * call.scale_col_stride] = value;
    }
  }
}

// One output row that shows nothing.
template <typename VEC>
__device__ __forceinline__ void clear_output(const MtDispatchCall& call, int64_t row) {
  const MtLayout& layout = call.layout;
  const int lane = lane_id(), words = call.weight_words * (layout.expand ? 1 : layout.num_topk);
  clear_row<VEC>(reinterpret_cast<char*>(call.out_x) + row * call.row_bytes, call.row_bytes);
  if (call.out_idx && lane < layout.num_topk) reinterpret_cast<int64_t*>(call.out_idx)[row * layout.num_topk + lane] = -1;
  if (call.out_weights)
    for (int w = lane; w < words; w += WARP) reinterpret_cast<uint32_t*>(call.out_weights)[row * words + w] = 0;
  if (call.out_scales)
    for (int c = lane; c < call.scale_words; c += WARP)
      reinterpret_cast<uint32_t*>(call.out_scales)[row * call.scale_row_stride + c * call.scale_col_stride] = 0;
}

// What a dispatch reads from, in shared memory: rows of each source and where they lie.
struct RowSources {
  int row_base[MT_MAX_RANKS + 1];
  int most;  // rows of one source
  const char* x[MT_MAX_RANKS];
  const char* weights[MT_MAX_RANKS];
  const char* scales[MT_MAX_RANKS];
};

// Fills it, behind `begin`. All threads.
__device__ __forceinline__ void open_sources(const MtDispatchCall& call, uint32_t seq, bool moves, RowSources& sources) {
  const MtChannel& channel = call.channel;
  const int num_ranks = channel.num_ranks;
  if (threadIdx.x == 0) sources.most = 0;
  for (int r = threadIdx.x; r <= num_ranks; r += blockDim.x)
    sources.row_base[r] = moves ? reinterpret_cast<const int*>(call.layout.row_base)[r] : 0;
  for (int r = threadIdx.x; moves && r < num_ranks; r += blockDim.x) {
    const volatile uint32_t* words = header(channel, seq, channel.rank, r);
    sources.x[r] = announced(channel, words + MT_X, r);
    sources.weights[r] = announced(channel, words + MT_WEIGHTS, r);
    sources.scales[r] = announced(channel, words + MT_SCALES, r);
  }
  __syncthreads();
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) atomicMax(&sources.most, sources.row_base[r + 1] - sources.row_base[r]);
  __syncthreads();
}

// The rows of one warp of several: sources in turn, so that the links to all of them are busy all the time.
struct Turns {
  const RowSources& sources;
  int rank, num_ranks, me, warps;
  __device__ __forceinline__ int steps() const { return (sources.most * num_ranks + warps - 1) / warps; }
  // The source of a step, and its row; -1 where it has none.
  __device__ __forceinline__ int row_of(int step, int* source) const {
    const int q = step * warps + me;
    // A number of warps that the ranks divide would give a warp one source alone.
    const int shift = warps % num_ranks == 0 ? step : 0;
    *source = (rank + 1 + q % num_ranks + shift) % num_ranks;
    const int row = sources.row_base[*source] + q / num_ranks;
    return row < sources.row_base[*source + 1] ? row : -1;
  }
};

// Clears what lies between and behind the real rows. Warp `me` of `warps`.
template <typename VEC>
__device__ __forceinline__ void clear_rest(const MtDispatchCall& call, const RowSources& sources, bool moves, int me, int warps) {
  const MtLayout& layout = call.layout;
  const int* starts = reinterpret_cast<const int*>(layout.expert_starts);
  if (layout.expand && moves) {
    const int* counts = reinterpret_cast<const int*>(layout.expert_counts);
    for (int e = me; e < layout.num_local; e += warps)
      for (int64_t row = starts[e] + counts[e]; row < starts[e + 1]; ++row) clear_output<VEC>(call, row);
  }
  const int64_t real = !moves ? 0 : layout.expand ? starts[layout.num_local] : sources.row_base[call.channel.num_ranks];
  for (int64_t row = real + me; call.clears_rest && row < call.num_out_rows; row += warps) clear_output<VEC>(call, row);
}

template <typename VEC, int STEPS>
__global__ void __launch_bounds__(1024, 1) dispatch_impl(const MtDispatchCall call) {
  const MtLayout& layout = call.layout;
  const MtChannel& channel = call.channel;
  const int num_topk = layout.num_topk, lane = lane_id();
  __shared__ RowSources sources;
  const uint32_t seq = next_seq(channel);
  const bool moves = begin(channel, seq, call.hash, MT_OK, call.x, call.weights, call.scales, call.lent, 0);
  open_sources(call, seq, moves, sources);
  const int warps = gridDim.x * blockDim.x / WARP, me = blockIdx.x * (blockDim.x / WARP) + warp_id();
  const Turns turns = {sources, channel.rank, channel.num_ranks, me, warps};
  Pace pace = {ticks(), 0};
  for (int step = 0, steps = turns.steps(); step < steps; ++step) {
    int source;
    const int row = turns.row_of(step, &source);
    if (row < 0) continue;
    const int token = reinterpret_cast<const int*>(layout.recv_token)[row];
    const char* from = sources.x[source] + static_cast<int64_t>(token) * call.row_bytes;
    // One copy for both kinds of row: two of them need more registers than 1,024 threads have.
    int expanded = lane == 0 ? row : -1;
    if (layout.expand)
      expanded = lane < num_topk ? reinterpret_cast<const int*>(layout.expand_row)[static_cast<int64_t>(row) * num_topk + lane] : -1;
    const uint32_t lanes = __ballot_sync(ALL_LANES, expanded >= 0);
    const Targets targets = {reinterpret_cast<char*>(call.out_x), call.row_bytes, expanded, lanes};
    copy_row<VEC, STEPS>(from, call.row_bytes, __popc(lanes), targets);
    move_small(call, row, expanded, reinterpret_cast<const uint32_t*>(sources.weights[source]),
               reinterpret_cast<const uint32_t*>(sources.scales[source]));
    if (source != channel.rank) pace.pass(call.ticks_per_byte * warps, call.row_bytes);
  }
  clear_rest<VEC>(call, sources, moves, me, warps);
  end(channel, seq, moves, call.lent);
}

}  // namespace mt
