// Low-latency dispatch and combine: fixed shapes, no host wait, two halves each, so that nothing runs in between.
//
// First half of a dispatch: every rank casts its tokens into its own memory once and tells all ranks the ids. Second half:
// every rank works out, expert by expert, which tokens are for it, in (source rank, token) order, and reads their rows.
// Combine is the same the other way: answers are laid down, and the rank of a token reads, weighs and adds its rows.
//
// A place is used again two calls later, when all ranks have said that they are done reading.
#pragma once

#include "cast.cuh"
#include "combine.cuh"
#include "rows.cuh"

namespace mt {

__device__ __forceinline__ char* blocks_at(const MtBlocksCall& call, int rank, uint64_t offset) { return segment(call.channel, 3, rank) + offset; }

__device__ __forceinline__ volatile uint32_t* blocks_header(const MtBlocksCall& call, int kind, uint32_t seq, int reader, int writer) {
  const uint64_t index = ((kind * 2 + seq % 2) * MT_MAX_RANKS + writer) * MT_HEADER_WORDS;
  return reinterpret_cast<volatile uint32_t*>(blocks_at(call, reader, call.places.headers)) + index;
}

__device__ __forceinline__ volatile uint32_t* blocks_done(const MtBlocksCall& call, int kind, int reader, int writer) {
  return reinterpret_cast<volatile uint32_t*>(blocks_at(call, reader, call.places.done)) + kind * MT_MAX_RANKS + writer;
}

// A table of one word a place: [2][ranks][width], by writer.
__device__ __forceinline__ int* blocks_table(const MtBlocksCall& call, uint64_t offset, uint32_t seq, int reader, int writer, int width) {
  return reinterpret_cast<int*>(blocks_at(call, reader, offset)) + (static_cast<int64_t>(seq % 2) * call.channel.num_ranks + writer) * width;
}

__device__ __forceinline__ char* blocks_rows(const MtBlocksCall& call, uint32_t seq, int rank) {
  return blocks_at(call, rank, call.places.rows) + static_cast<uint64_t>(seq % 2) * call.max_tokens * call.places.row_bytes;
}

// Begins a first half: the place of two calls ago may be written. All threads of every block.
__device__ __forceinline__ bool blocks_free(const MtBlocksCall& call, int kind, uint32_t seq) {
  bool free = true;
  for (int r = threadIdx.x; r < call.channel.num_ranks; r += blockDim.x)
    free = wait_flag(call.channel, blocks_done(call, kind, call.channel.rank, r), seq - 2, r) && free;
  return __syncthreads_and(free);
}

// Ends a first half, in its last block: headers go out, the number is kept for the second half.
__device__ __forceinline__ void blocks_announce(const MtBlocksCall& call, int kind, uint32_t seq) {
  for (int r = threadIdx.x; r < call.channel.num_ranks; r += blockDim.x) {
    volatile uint32_t* words = blocks_header(call, kind, seq, r, call.channel.rank);
    words[MT_HASH] = call.hash;
    words[MT_STATUS] = call.status | *reinterpret_cast<volatile uint32_t*>(&state_of(call.channel)->status);
    words[MT_NUM_TOKENS] = call.num_tokens;
    words[MT_LENT] = call.is_lent;
    put_place(words + MT_X, call.lent);
    raise_flag(words + MT_SEQ, seq);
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  state_of(call.channel)->status = MT_OK;
  state_of(call.channel)->blocks_seq[kind] = seq;
  *reinterpret_cast<uint32_t*>(call.seq) = seq;
}

// Begins a second half: false, in all threads, where a header did not come or nothing may move.
__device__ __forceinline__ bool blocks_begin(const MtBlocksCall& call, int kind, uint32_t seq) {
  bool came = true, differ = false;
  for (int r = threadIdx.x; r < call.channel.num_ranks; r += blockDim.x) {
    const volatile uint32_t* words = blocks_header(call, kind, seq, call.channel.rank, r);
    came = wait_flag(call.channel, words + MT_SEQ, seq, r) && came;
    differ = differ || (came && (words[MT_HASH] != call.hash || words[MT_STATUS] != MT_OK));
  }
  came = __syncthreads_and(came);
  differ = __syncthreads_or(differ);
  if (differ && blockIdx.x == 0 && threadIdx.x == 0) note_difference(call.channel);
  return came && !differ;
}

// Ends a second half, in every block: this rank has read all.
__device__ __forceinline__ void blocks_end(const MtBlocksCall& call, int kind, uint32_t seq) {
  if (!is_last_block(call.channel)) return;
  for (int r = threadIdx.x; r < call.channel.num_ranks; r += blockDim.x)
    raise_flag(blocks_done(call, kind, r, call.channel.rank), seq);
}

// A block of 128 columns of a row, cast by one warp: data and scale.
template <typename T>
__device__ __forceinline__ void cast_block(const MtBlocksCall& call, const T* row, char* out, int block) {
  constexpr int EACH = CAST_BLOCK / WARP;
  float values[EACH], amax = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const int column = block * CAST_BLOCK + lane_id() * EACH + i;
    values[i] = column < call.hidden ? widen(row[column]) : 0.f;
    const float magnitude = values[i] < 0 ? -values[i] : values[i];
    amax = magnitude > amax || magnitude != magnitude ? magnitude : amax;
  }
  for (int step = WARP / 2; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(ALL_LANES, amax, step);
    amax = other > amax || other != other ? other : amax;
  }
  const float scale = scale_of(amax, call.fp8 >= 2);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) word |= to_e4m3(values[i] / scale) << (8 * i);
  const int first = block * CAST_BLOCK + lane_id() * EACH;
  if (first < call.hidden) *reinterpret_cast<uint32_t*>(out + first) = word;  // hidden is a multiple of 16
  if (lane_id() != 0) return;
  char* scales = out + call.hidden;
  if (call.fp8 < 3) reinterpret_cast<float*>(scales)[block] = scale;
  else reinterpret_cast<uint8_t*>(scales)[block] = static_cast<uint8_t>(bits_of(scale) >> 23);
}

// Place of each lane of a token among the tokens of this rank for the same expert. One warp a lane.
__device__ __forceinline__ void find_positions(const MtBlocksCall& call, int token) {
  const int64_t* ids = reinterpret_cast<const int64_t*>(call.topk_idx);
  const int num_topk = call.num_topk, before = token * num_topk;
  for (int k = warp_id(); k < num_topk; k += blockDim.x / WARP) {
    const int64_t id = ids[before + k];
    int found = 0;
    bool twice = false;
    for (int i = lane_id(); i < before; i += WARP) found += ids[i] == id;
    for (int i = lane_id(); i < k; i += WARP) twice = twice || ids[before + i] == id;
    for (int step = WARP / 2; step > 0; step /= 2) found += __shfl_xor_sync(ALL_LANES, found, step);
    const bool bad = id < -1 || id >= static_cast<int64_t>(call.num_local) * call.channel.num_ranks || (id >= 0 && twice);
    if (bad) atomicOr(&state_of(call.channel)->status, static_cast<uint32_t>(MT_BAD_ID));
    if (lane_id() == 0) reinterpret_cast<int*>(call.positions)[before + k] = found;
  }
}

// First half of a dispatch; one block a token.
template <typename T>
__global__ void __launch_bounds__(256) dispatch_low_latency_send_impl(const MtBlocksCall call) {
  const MtChannel& channel = call.channel;
  const uint32_t seq = *reinterpret_cast<volatile uint32_t*>(&state_of(channel)->blocks_seq[0]) + 1;
  const int token = blockIdx.x, num_topk = call.num_topk;
  if (blocks_free(call, 0, seq) && token < call.num_tokens) {
    const int64_t* ids = reinterpret_cast<const int64_t*>(call.topk_idx) + static_cast<int64_t>(token) * num_topk;
    for (int i = threadIdx.x; i < num_topk * channel.num_ranks; i += blockDim.x)
      blocks_table(call, call.places.ids, seq, i / num_topk, channel.rank, call.max_tokens * num_topk)[token * num_topk + i % num_topk] =
          static_cast<int>(ids[i % num_topk]);
    const T* row = reinterpret_cast<const T*>(call.x) + static_cast<int64_t>(token) * call.hidden;
    char* out = blocks_rows(call, seq, channel.rank) + static_cast<uint64_t>(token) * call.places.row_bytes;
    if (call.fp8) {
      const int num_blocks = (call.hidden + CAST_BLOCK - 1) / CAST_BLOCK;
      if (call.fp8 == 3)  // exponents of blocks that are not there are 0
        for (int b = num_blocks + threadIdx.x; b < 4 * call.scale_words; b += blockDim.x) out[call.hidden + b] = 0;
      for (int b = warp_id(); b < num_blocks; b += blockDim.x / WARP) cast_block(call, row, out, b);
    } else {
      for (int i = threadIdx.x; i < call.hidden * static_cast<int>(sizeof(T)) / 16; i += blockDim.x)
        reinterpret_cast<int4*>(out)[i] = reinterpret_cast<const int4*>(row)[i];
    }
    find_positions(call, token);
  }
  if (is_last_block(channel)) blocks_announce(call, 0, seq);
}

// Lists, in shared memory, the tokens for a local expert in (source rank, token) order; their number. All threads.
__device__ __forceinline__ int list_tokens(const MtBlocksCall& call, uint32_t seq, int expert, int* list, int* per_warp) {
  const MtChannel& channel = call.channel;
  const int total = channel.num_ranks * call.max_tokens, wanted = channel.rank * call.num_local + expert;
  int found = 0;
  for (int base = 0; base < total; base += blockDim.x) {
    const int at = base + threadIdx.x, source = at / call.max_tokens, token = at % call.max_tokens;
    bool here = false;
    if (at < total && token < static_cast<int>(blocks_header(call, 0, seq, channel.rank, source)[MT_NUM_TOKENS])) {
      const int* ids = blocks_table(call, call.places.ids, seq, channel.rank, source, call.max_tokens * call.num_topk) + token * call.num_topk;
      for (int k = 0; k < call.num_topk; ++k) here = here || ids[k] == wanted;
    }
    const uint32_t votes = __ballot_sync(ALL_LANES, here);
    if (lane_id() == 0) per_warp[warp_id()] = __popc(votes);
    __syncthreads();
    int place = found + __popc(votes & ((1u << lane_id()) - 1));
    for (int w = 0; w < static_cast<int>(blockDim.x) / WARP; ++w) {
      if (w < warp_id()) place += per_warp[w];
      found += per_warp[w];
    }
    if (here) list[place] = at;
    __syncthreads();
  }
  return found;
}

// Second half of a dispatch; several blocks an expert, which share its rows.
__global__ void __launch_bounds__(512) dispatch_low_latency_recv_impl(const MtBlocksCall call) {
  extern __shared__ int list[];
  __shared__ int per_warp[512 / WARP];
  const MtChannel& channel = call.channel;
  const uint32_t seq = *reinterpret_cast<const uint32_t*>(call.seq);
  const int expert = blockIdx.x % call.num_local, part = blockIdx.x / call.num_local, parts = gridDim.x / call.num_local;
  const bool moves = blocks_begin(call, 0, seq);
  const int found = moves ? list_tokens(call, seq, expert, list, per_warp) : 0;
  const int row_bytes = call.fp8 ? call.hidden : call.hidden * (call.dtype == 2 ? 4 : 2), num_warps = blockDim.x / WARP;
  for (int i = part * num_warps + warp_id(); i < found; i += parts * num_warps) {
    const int source = list[i] / call.max_tokens, token = list[i] % call.max_tokens;
    const char* from = blocks_rows(call, seq, source) + static_cast<uint64_t>(token) * call.places.row_bytes;
    const int64_t row = static_cast<int64_t>(expert) * call.height + i;
    char* to = reinterpret_cast<char*>(call.out_x) + row * row_bytes;
    copy_row<int4, 7>(from, row_bytes, 1, OneTarget{to});
    const uint32_t* scales = reinterpret_cast<const uint32_t*>(from + call.hidden);
    for (int c = lane_id(); c < call.scale_words; c += WARP)
      reinterpret_cast<uint32_t*>(call.out_scales)[expert * call.scale_expert_stride + c * call.scale_col_stride + i] = scales[c];
    if (lane_id() == 0) reinterpret_cast<int*>(call.src_info)[row] = token;
  }
  if (part == 0) {
    for (int i = found + threadIdx.x; i < call.height; i += blockDim.x)
      reinterpret_cast<int*>(call.src_info)[static_cast<int64_t>(expert) * call.height + i] = -1;
    for (int r = threadIdx.x; r < channel.num_ranks; r += blockDim.x) {
      int begin = 0, count = 0;
      for (int i = 0; i < found; ++i) { begin += list[i] / call.max_tokens < r; count += list[i] / call.max_tokens == r; }
      reinterpret_cast<int64_t*>(call.ranges)[expert * channel.num_ranks + r] = static_cast<int64_t>(begin) << 32 | count;
    }
    if (threadIdx.x == 0) {
      reinterpret_cast<int*>(call.counts)[expert] = found;
      if (call.stats) reinterpret_cast<int*>(call.stats)[expert] += found;
    }
  }
  blocks_end(call, 0, seq);
}

// First half of a combine; several blocks an expert. Answers that are not lent are laid down one after the other.
__global__ void __launch_bounds__(512) combine_low_latency_send_impl(const MtBlocksCall call) {
  extern __shared__ int first[];  // of the answers of each local expert
  const MtChannel& channel = call.channel;
  const uint32_t seq = *reinterpret_cast<volatile uint32_t*>(&state_of(channel)->blocks_seq[1]) + 1;
  const int expert = blockIdx.x % call.num_local, part = blockIdx.x / call.num_local, parts = gridDim.x / call.num_local;
  const bool free = blocks_free(call, 1, seq);
  const int* counts = reinterpret_cast<const int*>(call.counts);
  if (threadIdx.x == 0)
    for (int e = 0, sum = 0; e < call.num_local; ++e) { first[e] = call.is_lent ? e * call.height : sum; sum += counts[e]; }
  __syncthreads();
  const int64_t row_bytes = static_cast<int64_t>(call.hidden) * (call.dtype == 2 ? 4 : 2);
  char* answers = blocks_at(call, channel.rank, call.places.answers) + static_cast<uint64_t>(seq % 2) * call.places.answer_rows * row_bytes;
  const int num_warps = blockDim.x / WARP;
  for (int i = part * num_warps + warp_id(); free && !call.is_lent && i < counts[expert]; i += parts * num_warps) {
    const char* from = reinterpret_cast<const char*>(call.x) + (static_cast<int64_t>(expert) * call.height + i) * row_bytes;
    char* to = answers + (first[expert] + i) * row_bytes;
    copy_row<int4, 7>(from, static_cast<int>(row_bytes), 1, OneTarget{to});
  }
  for (int r = threadIdx.x; free && part == 0 && r < channel.num_ranks; r += blockDim.x)
    blocks_table(call, call.places.begins, seq, r, channel.rank, call.num_local)[expert] =
        first[expert] + static_cast<int>(reinterpret_cast<const int64_t*>(call.ranges)[expert * channel.num_ranks + r] >> 32);
  if (is_last_block(channel)) blocks_announce(call, 1, seq);
}

// Second half of a combine; one block a token. Weight times row, added in lane order, each step rounded, once to T.
template <typename T, int N>
__global__ void __launch_bounds__(256) combine_low_latency_recv_impl(const MtBlocksCall call) {
  using P = Pack<T, N>;
  __shared__ const P* rows[MT_MAX_TOPK];
  __shared__ float weights[MT_MAX_TOPK];
  const MtChannel& channel = call.channel;
  const uint32_t seq = *reinterpret_cast<const uint32_t*>(call.seq);
  const bool moves = blocks_begin(call, 1, seq);
  const int token = blockIdx.x, num_topk = call.num_topk;
  if (moves && token < call.num_tokens) {
    if (static_cast<int>(threadIdx.x) < num_topk) {
      const int lane = token * num_topk + threadIdx.x;
      const int64_t id = reinterpret_cast<const int64_t*>(call.topk_idx)[lane];
      rows[threadIdx.x] = nullptr;
      if (id >= 0 && id < static_cast<int64_t>(call.num_local) * channel.num_ranks) {
        const int rank = static_cast<int>(id / call.num_local), expert = static_cast<int>(id % call.num_local);
        const volatile uint32_t* words = blocks_header(call, 1, seq, channel.rank, rank);
        const int64_t row = blocks_table(call, call.places.begins, seq, channel.rank, rank, call.num_local)[expert] +
                            reinterpret_cast<const int*>(call.positions)[lane];
        const int64_t row_bytes = static_cast<int64_t>(call.hidden) * sizeof(T);
        const char* answers = words[MT_LENT] ? announced(channel, words + MT_X, rank)
                                             : blocks_at(call, rank, call.places.answers) + static_cast<uint64_t>(seq % 2) * call.places.answer_rows * row_bytes;
        rows[threadIdx.x] = reinterpret_cast<const P*>(answers + row * row_bytes);
      }
      weights[threadIdx.x] = reinterpret_cast<const float*>(call.topk_weights)[lane];
    }
    __syncthreads();
    for (int at = threadIdx.x; at < call.hidden / N; at += blockDim.x) {
      float sums[N] = {};
      constexpr int GROUP = 4;
      for (int k0 = 0; k0 < num_topk; k0 += GROUP) {
        P packs[GROUP];
#pragma unroll
        for (int j = 0; j < GROUP; ++j) if (k0 + j < num_topk && rows[k0 + j]) packs[j] = rows[k0 + j][at];
#pragma unroll
        for (int j = 0; j < GROUP; ++j) {
          if (k0 + j >= num_topk || !rows[k0 + j]) continue;
#pragma unroll
          for (int i = 0; i < N; ++i) sums[i] = sums[i] + widen(packs[j].at[i]) * weights[k0 + j];
        }
      }
      P out;
#pragma unroll
      for (int i = 0; i < N; ++i) out.at[i] = narrow<T>(sums[i]);
      reinterpret_cast<P*>(call.out_x)[static_cast<int64_t>(token) * (call.hidden / N) + at] = out;
    }
  }
  blocks_end(call, 1, seq);
}

}  // namespace mt
