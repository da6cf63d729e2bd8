// Layout: where each row goes. Every rank counts its own rows and lists them for each destination; every rank then reads
// its lists from all, in (source rank, token) order, and finds the expanded row of each lane. The same definition as
// comm_core/layout.py. Deterministic: within a block positions come from bit masks, between blocks from sums.
#pragma once

#include "sync.cuh"

namespace mt {

// The ranks that own the ids of a token, as bits; bad lanes count as masked and are noted in `bad`.
__device__ __forceinline__ uint64_t ranks_of(const int64_t* ids, int num_topk, int num_local, int num_ranks, int64_t* kept, bool* bad) {
  uint64_t ranks = 0;
  for (int k = 0; k < num_topk; ++k) {
    int64_t id = ids[k];
    bool wrong = id < -1 || id >= static_cast<int64_t>(num_local) * num_ranks;
    for (int j = 0; j < k && !wrong; ++j) wrong = id >= 0 && ids[j] == id;
    if (wrong) { *bad = true; id = -1; }
    if (kept) kept[k] = id;
    if (id >= 0) ranks |= 1ull << (id / num_local);
  }
  return ranks;
}

// Counts of a block of own tokens for each rank.
__global__ void __launch_bounds__(MT_TOKENS) layout_count_impl(const MtLayoutCall call) {
  const MtLayout& layout = call.layout;
  __shared__ int counts[MT_MAX_RANKS];
  for (int r = threadIdx.x; r < call.channel.num_ranks; r += blockDim.x) counts[r] = 0;
  __syncthreads();
  const int token = blockIdx.x * MT_TOKENS + threadIdx.x, num_topk = layout.num_topk;
  uint64_t ranks = 0;
  if (token < layout.num_tokens) {
    bool bad = false;
    const int64_t* ids = reinterpret_cast<const int64_t*>(call.given_idx) + static_cast<int64_t>(token) * num_topk;
    int64_t* kept = call.given_idx == layout.topk_idx
                        ? nullptr : reinterpret_cast<int64_t*>(layout.topk_idx) + static_cast<int64_t>(token) * num_topk;
    ranks = ranks_of(ids, num_topk, layout.num_local, call.channel.num_ranks, nullptr, &bad);
    if (kept) for (int k = 0; k < num_topk; ++k) kept[k] = ids[k];
    if (bad) atomicOr(&state_of(call.channel)->status, static_cast<uint32_t>(MT_BAD_ID));
  }
  for (int r = 0; r < call.channel.num_ranks; ++r) {
    const uint32_t votes = __ballot_sync(ALL_LANES, (ranks >> r) & 1);
    if (lane_id() == 0 && votes) atomicAdd(&counts[r], __popc(votes));
  }
  __syncthreads();
  int* out = reinterpret_cast<int*>(call.block_counts) + static_cast<int64_t>(blockIdx.x) * call.channel.num_ranks;
  for (int r = threadIdx.x; r < call.channel.num_ranks; r += blockDim.x) out[r] = counts[r];
}

// Positions of a block of own tokens among the rows to each rank, their list entries, and the header.
__global__ void __launch_bounds__(MT_TOKENS) layout_send_impl(const MtLayoutCall call) {
  const MtLayout& layout = call.layout;
  const MtChannel& channel = call.channel;
  const int num_ranks = channel.num_ranks, num_topk = layout.num_topk, num_local = layout.num_local;
  __shared__ int total[MT_MAX_RANKS], before[MT_MAX_RANKS], first[MT_MAX_RANKS];
  __shared__ int in_warp[MT_TOKENS / WARP][MT_MAX_RANKS];
  const uint32_t seq = next_seq(channel);
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) total[r] = before[r] = 0;
  __syncthreads();
  const int* counts = reinterpret_cast<const int*>(call.block_counts);
  for (int i = threadIdx.x; i < static_cast<int>(gridDim.x) * num_ranks; i += blockDim.x) {
    const int count = counts[i];
    if (count == 0) continue;
    atomicAdd(&total[i % num_ranks], count);
    if (i / num_ranks < static_cast<int>(blockIdx.x)) atomicAdd(&before[i % num_ranks], count);
  }
  const int token = blockIdx.x * MT_TOKENS + threadIdx.x;
  const bool real = token < layout.num_tokens;
  const int64_t* ids = reinterpret_cast<const int64_t*>(call.given_idx) + static_cast<int64_t>(real ? token : 0) * num_topk;
  bool bad = false;
  const uint64_t ranks = real ? ranks_of(ids, num_topk, num_local, num_ranks, nullptr, &bad) : 0;
  for (int r = 0; r < num_ranks; ++r) {
    const uint32_t votes = __ballot_sync(ALL_LANES, (ranks >> r) & 1);
    if (lane_id() == 0) in_warp[warp_id()][r] = __popc(votes);
  }
  __syncthreads();
  if (threadIdx.x == 0)
    for (int r = 0, sum = 0; r < num_ranks; ++r) { first[r] = sum; sum += total[r]; }
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x)
    for (int w = 0, sum = before[r]; w < MT_TOKENS / WARP; ++w) { const int count = in_warp[w][r]; in_warp[w][r] = sum; sum += count; }
  __syncthreads();
  int* lane_row = reinterpret_cast<int*>(layout.lane_row) + static_cast<int64_t>(token) * num_topk;
  int* lists = reinterpret_cast<int*>(segment(channel, call.lists.segment, channel.rank) + call.lists.offset);
  uint32_t valid = 0, last = 0;
  for (int r = 0; r < num_ranks; ++r) {
    const bool goes = (ranks >> r) & 1;
    const uint32_t votes = __ballot_sync(ALL_LANES, goes);
    if (!goes) continue;
    const int position = in_warp[warp_id()][r] + __popc(votes & ((1u << lane_id()) - 1));
    int* entry = lists + static_cast<int64_t>(first[r] + position) * (1 + num_topk);
    entry[0] = token;
    int highest = -1;
    for (int k = 0; k < num_topk; ++k) {
      const int64_t id = ids[k];
      bool here = id >= 0 && id < static_cast<int64_t>(num_local) * num_ranks && id / num_local == r;
      for (int j = 0; j < k && here && bad; ++j) here = ids[j] != id;
      entry[1 + k] = here ? static_cast<int>(id - static_cast<int64_t>(r) * num_local) : -1;
      if (!here) continue;
      lane_row[k] = position;
      valid |= 1u << k;
      highest = k;
    }
    last |= 1u << highest;
  }
  if (real) {
    for (int k = 0; k < num_topk; ++k) if (!((valid >> k) & 1)) lane_row[k] = -1;
    reinterpret_cast<uint32_t*>(layout.last_lanes)[token] = last;
  }
  if (!is_last_block(channel)) return;
  const uint32_t status = call.status | *reinterpret_cast<volatile uint32_t*>(&state_of(channel)->status);
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    volatile uint32_t* words = header(channel, seq, r, channel.rank);
    words[MT_NUM_TOKENS] = layout.num_tokens;
    for (int j = 0; j < num_ranks; ++j) words[MT_COUNTS + j] = total[j];
    const MtPlace none = {};
    send_header(channel, seq, r, call.hash, status, call.lists, none, none, 0);
  }
  __syncthreads();
  if (threadIdx.x == 0) state_of(channel)->status = 0;
}

// The source of received row `row`, by bisection of the first rows of the sources.
__device__ __forceinline__ int source_of(const int* row_base, int num_ranks, int row) {
  int low = 0, high = num_ranks;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (row_base[middle] <= row) low = middle; else high = middle;
  }
  return low;
}

// Notes, as bits [MT_CHUNK / WARP][L] in shared memory, which rows of a chunk go to which expert.
__device__ __forceinline__ void note_experts(uint32_t* bits, const int* ids, bool real, int num_topk, int num_local) {
  for (int i = threadIdx.x; i < MT_CHUNK / WARP * num_local; i += blockDim.x) bits[i] = 0;
  __syncthreads();
  if (real)
    for (int k = 0; k < num_topk; ++k)
      if (ids[k] >= 0) atomicOr(&bits[warp_id() * num_local + ids[k]], 1u << lane_id());
  __syncthreads();
}

// Inclusive sum over the lanes of a warp.
__device__ __forceinline__ int warp_sum_up(int value) {
  for (int step = 1; step < WARP; step *= 2) {
    const int other = __shfl_up_sync(ALL_LANES, value, step);
    if (lane_id() >= step) value += other;
  }
  return value;
}

// Turns rows of an expert in each chunk into rows before the chunk, and fills counts and first rows of the experts.
__device__ __forceinline__ void place_experts(const MtLayout& layout, int num_chunks, int* totals) {
  volatile int* counts = reinterpret_cast<volatile int*>(layout.chunk_counts);
  const int num_local = layout.num_local, num_warps = blockDim.x / WARP;
  for (int e = warp_id(); e < num_local; e += num_warps) {
    int before = 0;
    for (int c0 = 0; c0 < num_chunks; c0 += WARP) {
      const int c = c0 + lane_id();
      const int count = c < num_chunks ? counts[static_cast<int64_t>(c) * num_local + e] : 0;
      const int sum = warp_sum_up(count);
      if (c < num_chunks) counts[static_cast<int64_t>(c) * num_local + e] = before + sum - count;
      before += __shfl_sync(ALL_LANES, sum, WARP - 1);
    }
    if (lane_id() == 0) totals[e] = before;
  }
  __syncthreads();
  if (warp_id() == 0) {
    int start = 0;
    for (int e0 = 0; e0 < num_local; e0 += WARP) {
      const int e = e0 + lane_id(), count = e < num_local ? totals[e] : 0;
      const int aligned = (count + layout.alignment - 1) / layout.alignment * layout.alignment;
      const int sum = warp_sum_up(aligned);
      if (e < num_local) {
        reinterpret_cast<int*>(layout.expert_counts)[e] = count;
        reinterpret_cast<int*>(layout.expert_starts)[e] = start + sum - aligned;
      }
      start += __shfl_sync(ALL_LANES, sum, WARP - 1);
    }
    if (lane_id() == 0) reinterpret_cast<int*>(layout.expert_starts)[num_local] = start;
  }
  __syncthreads();
}

// What the host waits for: counts, or why there are none.
__device__ __forceinline__ void write_record(const MtLayoutCall& call, uint32_t seq, const int* totals, int rows, bool differ) {
  const MtChannel& channel = call.channel;
  const int num_ranks = channel.num_ranks;
  volatile uint32_t* record = reinterpret_cast<volatile uint32_t*>(call.record);
  uint32_t status = 0;
  for (int r = 0; r < num_ranks; ++r) status |= header(channel, seq, channel.rank, r)[MT_STATUS];
  for (int i = threadIdx.x; i < num_ranks * num_ranks; i += blockDim.x)
    record[MT_REC_TABLES + num_ranks + i] = header(channel, seq, channel.rank, i / num_ranks)[MT_COUNTS + i % num_ranks];
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x)
    record[MT_REC_TABLES + r] = header(channel, seq, channel.rank, r)[MT_NUM_TOKENS];
  for (int e = threadIdx.x; e < call.layout.num_local; e += blockDim.x)
    record[MT_REC_TABLES + num_ranks + num_ranks * num_ranks + e] = totals[e];
  if (threadIdx.x == 0) {
    if (differ || status != MT_OK) note_difference(channel);
    record[MT_REC_STATUS] = status;
    record[MT_REC_DIFFERENT] = differ;
    record[MT_REC_ROWS] = rows;
    record[MT_REC_EXPANDED] = reinterpret_cast<int*>(call.layout.expert_starts)[call.layout.num_local];
  }
  fence_system();
  __syncthreads();
  if (threadIdx.x == 0) raise_flag(record + MT_REC_SEQ, 1);
}

// Reads the lists of all ranks for this one, and counts the rows of the local experts.
__global__ void __launch_bounds__(MT_CHUNK) layout_recv_impl(const MtLayoutCall call) {
  extern __shared__ uint32_t bits[];
  const MtLayout& layout = call.layout;
  const MtChannel& channel = call.channel;
  const int num_ranks = channel.num_ranks, num_topk = layout.num_topk, num_local = layout.num_local;
  __shared__ int row_base[MT_MAX_RANKS + 1];
  __shared__ const int* lists[MT_MAX_RANKS];
  const uint32_t seq = next_seq(channel);
  const bool came = wait_headers(channel, seq), differ = came && headers_differ(channel, seq), moves = came && !differ;
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    const volatile uint32_t* words = header(channel, seq, channel.rank, r);
    int64_t skip = 0;
    for (int j = 0; j < channel.rank; ++j) skip += words[MT_COUNTS + j];
    lists[r] = moves ? reinterpret_cast<const int*>(announced(channel, words + MT_X, r)) + skip * (1 + num_topk) : nullptr;
    row_base[r + 1] = moves ? words[MT_COUNTS + channel.rank] : 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) {
    row_base[0] = 0;
    for (int r = 0; r < num_ranks; ++r) row_base[r + 1] += row_base[r];
  }
  __syncthreads();
  const int rows = row_base[num_ranks], num_chunks = (rows + MT_CHUNK - 1) / MT_CHUNK;
  for (int chunk = blockIdx.x; chunk < num_chunks; chunk += gridDim.x) {
    const int row = chunk * MT_CHUNK + threadIdx.x;
    int* ids = reinterpret_cast<int*>(layout.local_idx) + static_cast<int64_t>(row) * num_topk;
    if (row < rows) {
      const int source = source_of(row_base, num_ranks, row);
      const int* entry = lists[source] + static_cast<int64_t>(row - row_base[source]) * (1 + num_topk);
      reinterpret_cast<int*>(layout.recv_token)[row] = entry[0];
      for (int k = 0; k < num_topk; ++k) ids[k] = entry[1 + k];
    }
    note_experts(bits, ids, row < rows, num_topk, num_local);
    for (int e = threadIdx.x; e < num_local; e += blockDim.x) {
      int count = 0;
      for (int w = 0; w < MT_CHUNK / WARP; ++w) count += __popc(bits[w * num_local + e]);
      reinterpret_cast<int*>(layout.chunk_counts)[static_cast<int64_t>(chunk) * num_local + e] = count;
    }
    __syncthreads();
  }
  if (!is_last_block(channel)) return;
  int* totals = reinterpret_cast<int*>(bits);
  for (int r = threadIdx.x; r <= num_ranks; r += blockDim.x) reinterpret_cast<int*>(layout.row_base)[r] = row_base[r];
  for (int i = threadIdx.x; i < num_ranks * num_ranks; i += blockDim.x)
    reinterpret_cast<int*>(layout.matrix)[i] = moves ? header(channel, seq, channel.rank, i / num_ranks)[MT_COUNTS + i % num_ranks] : 0;
  place_experts(layout, num_chunks, totals);
  if (call.stats)
    for (int e = threadIdx.x; e < num_local; e += blockDim.x) reinterpret_cast<int*>(call.stats)[e] += totals[e];
  if (came) write_record(call, seq, totals, rows, differ);
  if (threadIdx.x == 0) state_of(channel)->seq = seq;
}

// Expanded row of each lane.
__global__ void __launch_bounds__(MT_CHUNK) layout_place_impl(const MtLayoutCall call) {
  extern __shared__ uint32_t bits[];
  const MtLayout& layout = call.layout;
  const int num_topk = layout.num_topk, num_local = layout.num_local;
  const int rows = reinterpret_cast<const int*>(layout.row_base)[call.channel.num_ranks];
  const int* starts = reinterpret_cast<const int*>(layout.expert_starts);
  for (int chunk = blockIdx.x; chunk * MT_CHUNK < rows; chunk += gridDim.x) {
    const int row = chunk * MT_CHUNK + threadIdx.x;
    const int* ids = reinterpret_cast<const int*>(layout.local_idx) + static_cast<int64_t>(row) * num_topk;
    note_experts(bits, ids, row < rows, num_topk, num_local);
    const int* before = reinterpret_cast<const int*>(layout.chunk_counts) + static_cast<int64_t>(chunk) * num_local;
    int* out = reinterpret_cast<int*>(layout.expand_row) + static_cast<int64_t>(row) * num_topk;
    for (int k = 0; row < rows && k < num_topk; ++k) {
      const int e = ids[k];
      int place = -1;
      if (e >= 0) {
        place = starts[e] + before[e] + __popc(bits[warp_id() * num_local + e] & ((1u << lane_id()) - 1));
        for (int w = 0; w < warp_id(); ++w) place += __popc(bits[w * num_local + e]);
      }
      out[k] = place;
    }
    __syncthreads();
  }
}

}  // namespace mt
