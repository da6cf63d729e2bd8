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

// The same for bf16, two elements a word: the upper half is a number of fp32 as it stands.
__device__ __forceinline__ void add(float (&sums)[8], const Pack<mt_bf16, 8>& pack) {
  uint32_t words[4];
  __builtin_memcpy(words, &pack, 16);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sums[2 * i] += __uint_as_float(words[i] << 16);
    sums[2 * i + 1] += __uint_as_float(words[i] & 0xffff0000u);
  }
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

// Where the rows for this rank lie on each rank, in shared memory.
struct Answers {
  const char* x[MT_MAX_RANKS];
  const char* weights[MT_MAX_RANKS];
  int first[MT_MAX_RANKS];  // of the rows of this rank on another
  int sent[MT_MAX_RANKS];
};

// Fills it, behind `begin`. All threads.
__device__ __forceinline__ void open_answers(const MtCombineCall& call, uint32_t seq, bool moves, Answers& answers) {
  const MtChannel& channel = call.channel;
  const int num_ranks = channel.num_ranks;
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    const int* matrix = reinterpret_cast<const int*>(call.layout.matrix);
    int before = 0;
    for (int s = 0; s < channel.rank; ++s) before += matrix[s * num_ranks + r];
    answers.first[r] = before;
    answers.sent[r] = moves ? matrix[channel.rank * num_ranks + r] : 0;
    if (!moves) continue;
    const volatile uint32_t* words = header(channel, seq, channel.rank, r);
    answers.x[r] = r == channel.rank ? reinterpret_cast<const char*>(call.local_x) : announced(channel, words + MT_X, r);
    answers.weights[r] = announced(channel, words + MT_WEIGHTS, r);
  }
  __syncthreads();
}

// One lane of a token: where its row lies.
struct Lane {
  int position;  // among the rows of this rank on another, -1 for none
  int rank;
  __device__ static __forceinline__ Lane of(const MtCombineCall& call, const Answers& answers, int position, int64_t id) {
    const int rank = position >= 0 ? static_cast<int>(id) / call.layout.num_local : 0;
    return {position < answers.sent[rank] ? position : -1, rank};
  }
  __device__ static __forceinline__ Lane at(const MtCombineCall& call, const Answers& answers, int64_t number) {
    return of(call, answers, reinterpret_cast<const int*>(call.layout.lane_row)[number],
              reinterpret_cast<const int64_t*>(call.layout.topk_idx)[number]);
  }
  __device__ __forceinline__ int64_t row(const Answers& answers) const { return answers.first[rank] + static_cast<int64_t>(position); }
  // Waits until the row has been laid down; without it the lane is none.
  __device__ __forceinline__ void await(const MtChannel& channel, const Answers& answers, uint32_t seq) {
    if (position >= 0 && !wait_flag(channel, ready_flag(channel, channel.rank, rank, position / chunk_rows(answers.sent[rank])), seq, rank))
      position = -1;
  }
};

// Weights of all lanes of all tokens, each from the rank of its expert. Thread `me` of `threads`. With `lay` those of other ranks
// are waited for, and this rank's are where they were before they were laid down.
__device__ __forceinline__ void return_weights(const MtCombineCall& call, const Answers& answers, const MtReduceCall* lay, uint32_t seq, int64_t me,
                                               int64_t threads) {
  const int num_topk = call.layout.num_topk, words = call.weight_words;
  const int64_t lanes = static_cast<int64_t>(call.layout.num_tokens) * num_topk;
  for (int64_t at = me; call.out_weights && at < lanes; at += threads) {
    Lane lane = Lane::at(call, answers, at);
    const bool here = lay && lane.rank == call.channel.rank;
    if (lay && !here) lane.await(call.channel, answers, seq);
    const uint32_t* weights = reinterpret_cast<const uint32_t*>(here ? reinterpret_cast<const char*>(lay->weights) : answers.weights[lane.rank]);
    int64_t from = lane.position < 0 ? 0 : lane.row(answers) * num_topk + static_cast<int>(at % num_topk);
    if (here && lane.position >= 0 && lay->layout.expand) from = reinterpret_cast<const int*>(call.layout.expand_row)[from];
    for (int w = 0; w < words; ++w) reinterpret_cast<uint32_t*>(call.out_weights)[at * words + w] = lane.position >= 0 ? weights[from * words + w] : 0;
  }
}

__device__ __forceinline__ const char* row_of_bias(uint64_t bias, int64_t at) { return bias ? reinterpret_cast<const char*>(bias) + at : nullptr; }

// Reads and adds up the tokens of this rank, in the blocks from `first_block` on. With `lay` rows are read chunk by chunk, as
// their flags come.
template <typename T, int N, int STEPS>
__device__ __forceinline__ void pull_tokens(const MtCombineCall& call, const MtReduceCall* lay, uint32_t seq, bool moves, int first_block) {
  const MtLayout& layout = call.layout;
  const int num_topk = layout.num_topk, lane_number = lane_id(), rank = call.channel.rank;
  const int64_t row_bytes = static_cast<int64_t>(call.hidden) * sizeof(T);
  __shared__ Answers answers;
  open_answers(call, seq, moves, answers);
  const int block = static_cast<int>(blockIdx.x) - first_block, blocks = static_cast<int>(gridDim.x) - first_block;
  const int warps = blocks * static_cast<int>(blockDim.x) / WARP;
  Pace pace = {ticks(), 0};
  for (int64_t token = block * (blockDim.x / WARP) + warp_id(); token < layout.num_tokens; token += warps) {
    Lane lane = {-1, 0};
    if (lane_number < num_topk) lane = Lane::at(call, answers, token * num_topk + lane_number);
    if (lay) lane.await(call.channel, answers, seq);
    const bool valid = lane.position >= 0;
    const uint32_t last = reinterpret_cast<const uint32_t*>(layout.last_lanes)[token] & __ballot_sync(ALL_LANES, valid);
    const char* address = valid ? answers.x[lane.rank] + lane.row(answers) * row_bytes : nullptr;
    const int64_t at = token * row_bytes;
    sum_rows<T, N, STEPS>(last, address, row_of_bias(call.bias0, at), row_of_bias(call.bias1, at), reinterpret_cast<char*>(call.out_x) + at,
                          call.hidden);
    const uint32_t remote = last & __ballot_sync(ALL_LANES, valid && lane.rank != rank);
    pace.pass(call.ticks_per_byte * warps, static_cast<int>(row_bytes) * __popc(remote));
  }
  return_weights(call, answers, lay, seq, static_cast<int64_t>(block) * blockDim.x + threadIdx.x, static_cast<int64_t>(blocks) * blockDim.x);
}

template <typename T, int N, int STEPS>
__global__ void __launch_bounds__(512, 1) combine_impl(const MtCombineCall call) {
  const MtPlace none = {};
  const uint32_t seq = next_seq(call.channel);
  const bool moves = begin(call.channel, seq, call.hash, MT_OK, call.x, call.weights, none, call.lent, 0);
  pull_tokens<T, N, STEPS>(call, nullptr, seq, moves, 0);
  end(call.channel, seq, moves, call.lent);
}

// A row of a combine that is laid down: lane b of the warp has the expanded row of its lane as a summand, or lane 0 the row
// itself. The weights of its lanes are laid down here.
struct Laid {
  int64_t from;
  uint32_t lanes;
  // `here` and `expanded`: of this lane, its local expert (-1 for none) and expanded row.
  __device__ static __forceinline__ Laid of(const MtReduceCall& call, int64_t row, int here, int expanded) {
    const MtLayout& layout = call.layout;
    const int num_topk = layout.num_topk, lane = lane_id(), words = call.weight_words;
    const bool summand = layout.expand ? here >= 0 : lane == 0;
    const Laid laid = {layout.expand && summand ? expanded : row, __ballot_sync(ALL_LANES, summand)};
    if (!call.weights || lane >= num_topk) return laid;
    const int64_t at = row * num_topk + lane, weight = layout.expand ? laid.from : at;
    for (int w = 0; w < words; ++w)
      reinterpret_cast<uint32_t*>(call.lane_weights)[at * words + w] =
          here >= 0 || !layout.expand ? reinterpret_cast<const uint32_t*>(call.weights)[weight * words + w] : 0;
    return laid;
  }
  __device__ static __forceinline__ Laid at(const MtReduceCall& call, int64_t row) {
    const int64_t lane = row * call.layout.num_topk + lane_id();
    const bool real = lane_id() < call.layout.num_topk;
    const int here = real ? reinterpret_cast<const int*>(call.layout.local_idx)[lane] : -1;
    return of(call, row, here, real && call.layout.expand ? reinterpret_cast<const int*>(call.layout.expand_row)[lane] : -1);
  }
};

// The chunks of rows that one warp of several lays down, for all readers in turn; each has a flag that says its rows are there.
struct Chunks {
  int rank, num_ranks, next_chunk, warps, most;
  bool own;  // rows of this rank's own tokens too
  const int* matrix;
  const int* row_base;
  int reader, chunk;
  int64_t row, end;
  __device__ __forceinline__ void open(const MtReduceCall& call, int rank_here, int me, int of, bool with_own) {
    rank = rank_here; num_ranks = call.num_ranks; next_chunk = me; warps = of; most = 0; own = with_own;
    matrix = reinterpret_cast<const int*>(call.layout.matrix);
    row_base = reinterpret_cast<const int*>(call.layout.row_base);
    for (int r = 0; r < num_ranks; ++r) {
      const int rows = matrix[r * num_ranks + rank], size = chunk_rows(rows), chunks = (rows + size - 1) / size;
      most = chunks > most ? chunks : most;
    }
  }
  // Goes to the next chunk; false behind the last.
  __device__ __forceinline__ bool next() {
    const int readers = own ? num_ranks : num_ranks - 1;  // this rank comes last
    while (next_chunk < most * readers) {
      const int q = next_chunk;
      next_chunk += warps;
      reader = (rank + 1 + q % readers) % num_ranks;
      chunk = q / readers;
      const int rows = matrix[reader * num_ranks + rank], size = chunk_rows(rows);
      if (chunk * size >= rows) continue;
      row = row_base[reader] + chunk * size;
      end = row_base[reader] + (chunk * size + size < rows ? chunk * size + size : rows);
      return true;
    }
    return false;
  }
};

// Says that a chunk is there; all lanes, behind what they wrote.
__device__ __forceinline__ void raise_ready(const MtChannel& channel, int reader, int chunk, uint32_t seq) {
  fence_system();
  __syncwarp();
  if (lane_id() == 0) raise_flag(ready_flag(channel, reader, channel.rank, chunk), seq);
}

template <typename T, int N, int STEPS>
__device__ __forceinline__ void lay_rows(const MtCombineCall& call, const MtReduceCall& lay, uint32_t seq) {
  const int64_t row_bytes = static_cast<int64_t>(lay.hidden) * sizeof(T);
  const int each = static_cast<int>(blockDim.x) / WARP;
  Chunks chunks;
  chunks.open(lay, call.channel.rank, static_cast<int>(blockIdx.x) * each + warp_id(), lay.num_sms * each, true);
  while (chunks.next()) {
    for (int64_t row = chunks.row; row < chunks.end; ++row) {
      const Laid laid = Laid::at(lay, row);
      sum_rows<T, N, STEPS>(laid.lanes, reinterpret_cast<const char*>(lay.x) + laid.from * row_bytes, nullptr, nullptr,
                            reinterpret_cast<char*>(lay.rows) + row * row_bytes, lay.hidden);
    }
    raise_ready(call.channel, chunks.reader, chunks.chunk, seq);
  }
}

// Combine of rows that are laid down first, in one kernel: the first blocks lay rows down, chunk by chunk, the others read as
// chunks come. One role a block; those that others wait for come first.
template <typename T, int N, int STEPS>
__global__ void __launch_bounds__(512, 1) combine_reduce_impl(const MtCombineCall call, const MtReduceCall lay) {
  const uint32_t seq = next_seq(call.channel);
  bool moves = true;
  if (static_cast<int>(blockIdx.x) < lay.num_sms) {
    lay_rows<T, N, STEPS>(call, lay, seq);
  } else {
    const MtPlace none = {};
    moves = begin(call.channel, seq, call.hash, MT_OK, call.x, call.weights, none, call.lent, lay.num_sms);
    pull_tokens<T, N, STEPS>(call, &lay, seq, moves, lay.num_sms);
  }
  end(call.channel, seq, moves, false);
}

}  // namespace mt
