// Combine: every rank reads the rows of its tokens from the ranks that had them and adds them up, in fp32, unfused, in the
// order of the last lane of each rank, biases first, rounded once. The definition is comm_core/reference.py.
#pragma once

#include "rows.cuh"

namespace mt {

// N elements of T as one load.
template <typename T, int N>
struct alignas(sizeof(T) * N) Pack {
  T at[N];
};

template <typename W, int N, typename P>
__device__ __forceinline__ void add(W (&sums)[N], const P& pack) {
#pragma unroll
  for (int i = 0; i < N; ++i) sums[i] += widen(pack.at[i]);  // no product: nothing to fuse
}

// Adds up rows given by lanes: lane `b` of the warp holds the address of a summand for each bit b of `lanes`.
//
// PAIR summands are loaded before the first is added, STEPS packs each.
template <typename T, int N, int STEPS>
__device__ __forceinline__ void sum_rows(uint32_t lanes, const char* address, const char* bias0, const char* bias1, char* out, int hidden) {
  using P = Pack<T, N>;
  const int count = hidden / N;
  for (int base = 0; base < count; base += WARP * STEPS) {
    typename Wide<T>::Type sums[STEPS][N];
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
#pragma unroll
      for (int i = 0; i < N; ++i) sums[s][i] = 0;
    for (int b = 0; b < 2; ++b) {
      const char* bias = b == 0 ? bias0 : bias1;
      if (!bias) continue;
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        const int at = base + s * WARP + lane_id();
        if (at < count) add(sums[s], reinterpret_cast<const P*>(bias)[at]);
      }
    }
    uint32_t left = lanes;
    while (left) {
      const long long own = reinterpret_cast<long long>(address);  // shuffles take no unsigned types on MUSA
      const P* one = reinterpret_cast<const P*>(__shfl_sync(ALL_LANES, own, __ffs(left) - 1));
      left &= left - 1;
      const P* two = left ? reinterpret_cast<const P*>(__shfl_sync(ALL_LANES, own, __ffs(left) - 1)) : nullptr;
      left &= left - 1;
      P first[STEPS], second[STEPS];
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        const int at = base + s * WARP + lane_id();
        if (at < count) first[s] = one[at];
        if (at < count && two) second[s] = two[at];
      }
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        const int at = base + s * WARP + lane_id();
        if (at < count) add(sums[s], first[s]);
        if (at < count && two) add(sums[s], second[s]);
      }
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int at = base + s * WARP + lane_id();
      if (at >= count) continue;
      P pack;
#pragma unroll
      for (int i = 0; i < N; ++i) pack.at[i] = narrow<T>(sums[s][i]);
      reinterpret_cast<P*>(out)[at] = pack;
    }
  }
}

// Weights of the lanes of a token, each from the rank of its expert.
__device__ __forceinline__ void return_weights(const MtCombineCall& call, int64_t token, bool valid, int64_t row, const char* weights) {
  const int lane = lane_id(), num_topk = call.layout.num_topk, words = call.weight_words;
  if (!call.out_weights || lane >= num_topk) return;
  uint32_t* out = reinterpret_cast<uint32_t*>(call.out_weights) + (token * num_topk + lane) * words;
  for (int w = 0; w < words; ++w)
    out[w] = valid ? reinterpret_cast<const uint32_t*>(weights)[(row * num_topk + lane) * words + w] : 0;
}

// Rows that are laid down while others read: the flag of each chunk says that its rows are there. Rows of a chunk between two
// ranks; both know their number.
__device__ __forceinline__ int chunk_rows(int rows) {
  int size = MT_READY_ROWS;
  while ((rows + size - 1) / size > MT_READY) size *= 2;
  return size;
}

__device__ __forceinline__ volatile uint32_t* ready_flag(const MtChannel& channel, int reader, int writer, int chunk) {
  return reinterpret_cast<volatile uint32_t*>(segment(channel, 0, reader) + MT_AT_READY) + writer * MT_READY + chunk;
}

// Reads and adds up the tokens of this rank, in the blocks from `first_block` on. With `waits` rows are read chunk by chunk,
// as their flags come.
template <typename T, int N, int STEPS>
__device__ __forceinline__ void pull_tokens(const MtCombineCall& call, uint32_t seq, bool moves, int first_block, bool waits) {
  const MtLayout& layout = call.layout;
  const MtChannel& channel = call.channel;
  const int num_ranks = channel.num_ranks, num_topk = layout.num_topk, lane = lane_id();
  const int64_t row_bytes = static_cast<int64_t>(call.hidden) * sizeof(T);
  __shared__ const char* rows_at[MT_MAX_RANKS];
  __shared__ const char* weights_at[MT_MAX_RANKS];
  __shared__ int first[MT_MAX_RANKS];  // of the rows of this rank on another
  __shared__ int sent[MT_MAX_RANKS];
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    const int* matrix = reinterpret_cast<const int*>(layout.matrix);
    int before = 0;
    for (int s = 0; s < channel.rank; ++s) before += matrix[s * num_ranks + r];
    first[r] = before;
    sent[r] = moves ? matrix[channel.rank * num_ranks + r] : 0;
    if (!moves) continue;
    const volatile uint32_t* words = header(channel, seq, channel.rank, r);
    rows_at[r] = r == channel.rank ? reinterpret_cast<const char*>(call.local_x) : announced(channel, words + MT_X, r);
    weights_at[r] = announced(channel, words + MT_WEIGHTS, r);
  }
  __syncthreads();
  const int warps = (gridDim.x - first_block) * blockDim.x / WARP;
  Pace pace = {ticks(), 0};
  for (int64_t token = (blockIdx.x - first_block) * (blockDim.x / WARP) + warp_id(); token < layout.num_tokens; token += warps) {
    int position = -1, rank = 0;
    if (lane < num_topk) {
      position = reinterpret_cast<const int*>(layout.lane_row)[token * num_topk + lane];
      if (position >= 0) rank = static_cast<int>(reinterpret_cast<const int64_t*>(layout.topk_idx)[token * num_topk + lane] / layout.num_local);
      if (position >= sent[rank]) position = -1;
    }
    if (waits && position >= 0 &&
        !wait_flag(channel, ready_flag(channel, channel.rank, rank, position / chunk_rows(sent[rank])), seq, rank))
      position = -1;
    const bool valid = position >= 0;
    const int64_t row = valid ? first[rank] + position : 0;
    const uint32_t last = reinterpret_cast<const uint32_t*>(layout.last_lanes)[token] & __ballot_sync(ALL_LANES, valid);
    const char* address = valid ? rows_at[rank] + row * row_bytes : nullptr;
    const int64_t at = token * row_bytes;
    sum_rows<T, N, STEPS>(last, address, call.bias0 ? reinterpret_cast<const char*>(call.bias0) + at : nullptr,
                          call.bias1 ? reinterpret_cast<const char*>(call.bias1) + at : nullptr,
                          reinterpret_cast<char*>(call.out_x) + at, call.hidden);
    return_weights(call, token, valid, row, weights_at[rank]);
    const uint32_t remote = last & __ballot_sync(ALL_LANES, valid && rank != channel.rank);
    pace.pass(call.ticks_per_byte, static_cast<int>(row_bytes) * __popc(remote));
  }
}

template <typename T, int N, int STEPS>
__global__ void __launch_bounds__(512, 1) combine_impl(const MtCombineCall call) {
  const MtPlace none = {};
  const uint32_t seq = next_seq(call.channel);
  const bool moves = begin(call.channel, seq, call.hash, MT_OK, call.x, call.weights, none, call.lent, 0);
  pull_tokens<T, N, STEPS>(call, seq, moves, 0, false);
  end(call.channel, seq, moves, call.lent);
}

// Lays a row of a combine down: expanded rows of a token added up in lane order, rounded once; a plain row as it is. The
// weights of its lanes go with it. One warp.
template <typename T, int N, int STEPS>
__device__ __forceinline__ void lay_row(const MtReduceCall& call, int64_t row) {
  const MtLayout& layout = call.layout;
  const int num_topk = layout.num_topk, lane = lane_id(), words = call.weight_words;
  const int64_t row_bytes = static_cast<int64_t>(call.hidden) * sizeof(T), at = row * num_topk + lane;
  const int here = lane < num_topk ? reinterpret_cast<const int*>(layout.local_idx)[at] : -1;
  int64_t from = row;
  bool summand = lane == 0;
  if (layout.expand) {
    summand = here >= 0;
    from = summand ? reinterpret_cast<const int*>(layout.expand_row)[at] : 0;
  }
  const uint32_t lanes = __ballot_sync(ALL_LANES, summand);
  sum_rows<T, N, STEPS>(lanes, reinterpret_cast<const char*>(call.x) + from * row_bytes, nullptr, nullptr,
                        reinterpret_cast<char*>(call.rows) + row * row_bytes, call.hidden);
  if (!call.weights || lane >= num_topk) return;
  const int64_t weight = layout.expand ? from : at;
  for (int w = 0; w < words; ++w)
    reinterpret_cast<uint32_t*>(call.lane_weights)[at * words + w] =
        here >= 0 || !layout.expand ? reinterpret_cast<const uint32_t*>(call.weights)[weight * words + w] : 0;
}

// Combine of rows that are laid down first, in one kernel: the first blocks lay rows down, chunk by chunk and for all ranks in
// turn, the others read as chunks come. One role a block; those that others wait for come first.
template <typename T, int N, int STEPS>
__global__ void __launch_bounds__(512, 1) combine_reduce_impl(const MtCombineCall call, const MtReduceCall lay) {
  const MtChannel& channel = call.channel;
  const int layers = lay.num_sms, num_ranks = channel.num_ranks;
  const uint32_t seq = next_seq(channel);
  bool moves = true;
  if (static_cast<int>(blockIdx.x) < layers) {
    const int* matrix = reinterpret_cast<const int*>(lay.layout.matrix);
    const int* row_base = reinterpret_cast<const int*>(lay.layout.row_base);
    int most = 0;
    for (int r = 0; r < num_ranks; ++r) {
      const int rows = matrix[r * num_ranks + channel.rank], size = chunk_rows(rows), chunks = (rows + size - 1) / size;
      most = chunks > most ? chunks : most;
    }
    for (int q = blockIdx.x; q < most * num_ranks; q += layers) {
      const int reader = (channel.rank + 1 + q) % num_ranks, chunk = q / num_ranks;
      const int rows = matrix[reader * num_ranks + channel.rank], size = chunk_rows(rows);
      const int begin_row = chunk * size, end_row = begin_row + size < rows ? begin_row + size : rows;
      if (begin_row >= rows) continue;
      for (int i = begin_row + warp_id(); i < end_row; i += blockDim.x / WARP) lay_row<T, N, STEPS>(lay, row_base[reader] + i);
      fence_system();
      __syncthreads();
      if (threadIdx.x == 0) raise_flag(ready_flag(channel, reader, channel.rank, chunk), seq);
    }
  } else {
    const MtPlace none = {};
    moves = begin(channel, seq, call.hash, MT_OK, call.x, call.weights, none, call.lent, layers);
    pull_tokens<T, N, STEPS>(call, seq, moves, layers, true);
  }
  end(channel, seq, moves, false);
}

}  // namespace mt
