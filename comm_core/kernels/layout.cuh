// Layout: where each row goes, in one kernel without a pass over the whole grid. The same definition as
// comm_core/layout.py. Deterministic: within a block positions come from bit masks, between blocks from sums.
//
// Blocks of three kinds, in this order, so that whoever waits waits for blocks that have begun:
// * One for each 256 own tokens lays their ids down in 16 bits a lane, and writes into the memory of each rank how many
//   of them have each of its experts, and how many go there at all. The last of these to end sends the headers.
// * Some read, when all headers are there, the tokens of other ranks 256 at a time. The sums over those tables of counts
//   say where the rows of a block of tokens begin, among all rows and within each expert, so that no block waits for
//   another. One more block adds everything up and tells the host.
// * One for each 256 own tokens finds their positions among the rows to each rank, which nobody waits for.
#pragma once

#include "sync.cuh"

namespace mt {

constexpr uint32_t NO_ID = 0xffff;             // a masked lane
constexpr int LAYOUT_WARPS = MT_TOKENS / WARP;
constexpr int LAYOUT_BINS = 2048;              // counters in shared memory of a block that lays ids down

// 16 bytes a lane, moved at once.
constexpr int COUNTS_A_VECTOR = 8;

// Columns of a row of counts: one a local expert, the rows of all, and padding to whole vectors.
__host__ __device__ __forceinline__ constexpr int count_columns(int num_local) {
  return (num_local + COUNTS_A_VECTOR) / COUNTS_A_VECTOR * COUNTS_A_VECTOR;
}

// Bytes of shared memory that any of the blocks needs.
template <int VECS>
int layout_shared_bytes(const MtLayout& layout) {
  const int columns = count_columns(layout.num_local);
  const int laying = MT_TOKENS * VECS * 16 + LAYOUT_BINS * 4;
  const int receiving = 3 * columns * 4 + (layout.expand ? LAYOUT_WARPS * layout.num_local * 6 : 0);
  return laying > receiving ? laying : receiving;
}

// The ids of a token, two a word, at constant places so that they stay in registers.
template <int VECS>
struct TokenIds {
  static constexpr int LANES = VECS * COUNTS_A_VECTOR;
  uint32_t pairs[LANES / 2];

  __device__ __forceinline__ uint32_t operator[](int lane) const { return pairs[lane / 2] >> (lane % 2 * 16) & NO_ID; }
  __device__ __forceinline__ void mask(int lane) { pairs[lane / 2] |= NO_ID << (lane % 2 * 16); }
  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int i = 0; i < LANES / 2; ++i) pairs[i] = ~0u;
  }
  __device__ __forceinline__ void load(const uint4* from) {
#pragma unroll
    for (int v = 0; v < VECS; ++v) {
      const uint4 found = from[v];
      pairs[4 * v] = found.x, pairs[4 * v + 1] = found.y, pairs[4 * v + 2] = found.z, pairs[4 * v + 3] = found.w;
    }
  }
  __device__ __forceinline__ void store(uint4* to) const {
#pragma unroll
    for (int v = 0; v < VECS; ++v) to[v] = make_uint4(pairs[4 * v], pairs[4 * v + 1], pairs[4 * v + 2], pairs[4 * v + 3]);
  }
};

// Stores one number a lane of a row of a table [rows, K]: whole vectors where the lanes fill them.
template <int LANES>
__device__ __forceinline__ void store_lanes(uint64_t table, int64_t row, int num_topk, const int (&values)[LANES]) {
  int* out = reinterpret_cast<int*>(table) + row * num_topk;
  if (num_topk == LANES) {
#pragma unroll
    for (int k = 0; k < LANES; k += 4)
      reinterpret_cast<int4*>(out)[k / 4] = make_int4(values[k], values[k + 1], values[k + 2], values[k + 3]);
    return;
  }
#pragma unroll
  for (int k = 0; k < LANES; ++k)
    if (k < num_topk) out[k] = values[k];
}

// The rank that owns an expert, without a division: exact for 16-bit ids and fewer than 2^15 experts a rank.
struct Owner {
  uint32_t factor;
  __device__ __forceinline__ explicit Owner(int num_local) : factor((0x80000000u + num_local - 1) / num_local) {}
  __device__ __forceinline__ int operator()(uint32_t id) const {
    return static_cast<int>(static_cast<uint64_t>(id) * factor >> 31);
  }
};

// Bits below this lane.
__device__ __forceinline__ uint32_t lower_lanes() { return (1u << lane_id()) - 1; }

// Where a source lays its counts of a block of tokens down for a reader; the same place in the memory of every rank.
__device__ __forceinline__ uint4* counts_of(const MtLayoutCall& call, char* tables, int source, int block) {
  const int64_t row = static_cast<int64_t>(source) * call.table_blocks + block;
  return reinterpret_cast<uint4*>(tables + call.tables.offset) + row * (count_columns(call.layout.num_local) / COUNTS_A_VECTOR);
}

// Reads the given ids of this block's tokens into shared memory, and keeps a copy of them. True where one is out of range.
template <int VECS>
__device__ __forceinline__ bool read_ids(const MtLayoutCall& call, uint16_t* ids, int first, int count) {
  constexpr int LANES = TokenIds<VECS>::LANES;
  const int num_topk = call.layout.num_topk;
  const int64_t num_experts = static_cast<int64_t>(call.layout.num_local) * call.channel.num_ranks;
  const int64_t* given = reinterpret_cast<const int64_t*>(call.given_idx) + static_cast<int64_t>(first) * num_topk;
  int64_t* kept = reinterpret_cast<int64_t*>(call.layout.topk_idx) + static_cast<int64_t>(first) * num_topk;
  const bool copies = call.given_idx != call.layout.topk_idx;
  bool bad = false;
  for (int j0 = 0; j0 < LANES; j0 += 8) {
    int64_t found[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) {  // all loads are under way at once
      const int at = (j0 + j) * MT_TOKENS + threadIdx.x, token = at / LANES, lane = at % LANES;
      found[j] = token < count && lane < num_topk ? given[token * num_topk + lane] : -1;
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const int at = (j0 + j) * MT_TOKENS + threadIdx.x, token = at / LANES, lane = at % LANES;
      if (copies && token < count && lane < num_topk) kept[token * num_topk + lane] = found[j];
      bad = bad || found[j] < -1 || found[j] >= num_experts;
      ids[at] = static_cast<uint16_t>(found[j] >= 0 && found[j] < num_experts ? static_cast<uint32_t>(found[j]) : NO_ID);
    }
  }
  return bad;
}

// Counts the tokens of this block for some ranks from `first_rank` on, and writes the counts into their memory.
template <int VECS>
__device__ __forceinline__ void send_counts(const MtLayoutCall& call, int* bins, char* const* tables, const TokenIds<VECS>& ids,
                                            uint64_t ranks, int block, int first_rank, int num) {
  const int num_local = call.layout.num_local, num_ranks = call.channel.num_ranks, columns = count_columns(num_local);
  const Owner owner(num_local);
  for (int i = threadIdx.x; i < num * columns; i += blockDim.x) bins[i] = 0;
  __syncthreads();
#pragma unroll
  for (int k = 0; k < TokenIds<VECS>::LANES; ++k) {
    const uint32_t id = ids[k];
    const int rank = id == NO_ID ? -1 : owner(id) - first_rank;
    if (rank >= 0 && rank < num) atomicAdd(&bins[rank * columns + static_cast<int>(id) - (first_rank + rank) * num_local], 1);
  }
  for (int r = 0; r < num; ++r) {
    const uint32_t votes = __ballot_sync(ALL_LANES, ranks >> (first_rank + r) & 1);
    if (lane_id() == 0 && votes) atomicAdd(&bins[r * columns + num_local], __popc(votes));
  }
  __syncthreads();
  chaos();
  const int vectors = columns / COUNTS_A_VECTOR;
  for (int i = threadIdx.x; i < num * vectors; i += blockDim.x) {
    const int r = i / vectors, v = i % vectors;
    const int* from = bins + r * columns + v * COUNTS_A_VECTOR;
    counts_of(call, tables[first_rank + r], call.channel.rank, block)[v] =
        make_uint4(from[0] | from[1] << 16, from[2] | from[3] << 16, from[4] | from[5] << 16, from[6] | from[7] << 16);
  }
  for (int r = threadIdx.x; r < num; r += blockDim.x) {
    const int rows = bins[r * columns + num_local];
    reinterpret_cast<int*>(call.own_counts)[static_cast<int64_t>(block) * num_ranks + first_rank + r] = rows;
    if (rows) atomicAdd(&state_of(call.channel)->rows_to[first_rank + r], static_cast<uint32_t>(rows));
  }
  __syncthreads();
}

// Tells all ranks that this one's counts and ids are laid down; one block, behind all that do so. Thread r has `words`, the
// header for rank r.
__device__ __forceinline__ void send_headers(const MtLayoutCall& call, uint32_t seq, volatile uint32_t* words, int* rows_to) {
  const MtChannel& channel = call.channel;
  const int num_ranks = channel.num_ranks;
  volatile uint32_t* sums = state_of(channel)->rows_to;
  const uint32_t status = call.status | *reinterpret_cast<volatile uint32_t*>(&state_of(channel)->status);
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    rows_to[r] = static_cast<int>(sums[r]);
    sums[r] = 0;
  }
  __syncthreads();
  if (threadIdx.x == 0) state_of(channel)->status = 0;
  if (static_cast<int>(threadIdx.x) >= num_ranks) return;
  words[MT_HASH] = call.hash;
  words[MT_STATUS] = status;
  words[MT_NUM_TOKENS] = call.layout.num_tokens;
  words[MT_LENT] = 0;
  for (int j = 0; j < num_ranks; ++j) words[MT_COUNTS + j] = rows_to[j];
  raise_flag(words + MT_SEQ, seq);
}

// A block of own tokens: its ids and counts. The last such block sends the headers.
template <int VECS>
__device__ __forceinline__ void lay_tokens(const MtLayoutCall& call, uint32_t seq, int block, int num_blocks, char* peer, char** peers,
                                           char* shared) {
  constexpr int LANES = TokenIds<VECS>::LANES;
  const MtChannel& channel = call.channel;
  const int num_ranks = channel.num_ranks, first = block * MT_TOKENS;
  const int count = call.layout.num_tokens - first < MT_TOKENS ? call.layout.num_tokens - first : MT_TOKENS;
  uint16_t* in_block = reinterpret_cast<uint16_t*>(shared);
  int* bins = reinterpret_cast<int*>(shared + MT_TOKENS * VECS * 16);
  const bool named = static_cast<int>(threadIdx.x) < num_ranks;
  volatile uint32_t* words = named ? header(channel, seq, threadIdx.x, channel.rank) : nullptr;
  bool bad = read_ids<VECS>(call, in_block, first, count);
  if (named) peers[threadIdx.x] = peer;  // not before the ids are under way
  __syncthreads();
  TokenIds<VECS> ids;
  ids.load(reinterpret_cast<const uint4*>(in_block) + threadIdx.x * VECS);
  const Owner owner(call.layout.num_local);
  uint64_t ranks = 0;
#pragma unroll
  for (int k = 0; k < LANES; ++k) {
    const uint32_t id = ids[k];
    bool twice = false;
#pragma unroll
    for (int j = 0; j < k; ++j) twice = twice || ids[j] == id;
    if (id == NO_ID) continue;
    if (twice) ids.mask(k), bad = true;
    ranks |= 1ull << owner(id);
  }
  if (bad) atomicOr(&state_of(channel)->status, static_cast<uint32_t>(MT_BAD_ID));
  if (static_cast<int>(threadIdx.x) < count)
    ids.store(reinterpret_cast<uint4*>(peers[channel.rank] + call.ids.offset) + static_cast<int64_t>(first + threadIdx.x) * VECS);
  const int at_once = LAYOUT_BINS / count_columns(call.layout.num_local);
  for (int r = 0; count > 0 && r < num_ranks; r += at_once)
    send_counts<VECS>(call, bins, peers, ids, ranks, block, r, num_ranks - r < at_once ? num_ranks - r : at_once);
  __shared__ bool last;
  fence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(&state_of(channel)->ticket, 1u) == static_cast<uint32_t>(num_blocks) - 1;
    fence_device();
  }
  __syncthreads();
  if (!last) return;
  if (threadIdx.x == 0) state_of(channel)->ticket = 0;
  send_headers(call, seq, words, bins);
}

// A block of own tokens again, when all of them are counted: positions of the lanes among the rows to their ranks.
template <int VECS>
__device__ __forceinline__ void place_tokens(const MtLayoutCall& call, uint32_t seq, int block, char* const* peers, char* shared) {
  constexpr int LANES = TokenIds<VECS>::LANES;
  const MtLayout& layout = call.layout;
  const MtChannel& channel = call.channel;
  const int num_ranks = channel.num_ranks, token = block * MT_TOKENS + threadIdx.x;
  int* before = reinterpret_cast<int*>(shared);
  uint32_t* votes = reinterpret_cast<uint32_t*>(before + MT_MAX_RANKS);                      // [warps][R]
  int* positions = reinterpret_cast<int*>(votes + LAYOUT_WARPS * MT_MAX_RANKS);  // of the first row of a warp
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) before[r] = 0;
  bool came = true;
  if (threadIdx.x == 0) came = wait_flag(channel, header(channel, seq, channel.rank, channel.rank) + MT_SEQ, seq, channel.rank);
  if (!__syncthreads_and(came)) return;
  chaos();
  TokenIds<VECS> ids;
  ids.clear();
  if (token < layout.num_tokens)
    ids.load(reinterpret_cast<const uint4*>(peers[channel.rank] + call.ids.offset) + static_cast<int64_t>(token) * VECS);
  const volatile int* counts = reinterpret_cast<const volatile int*>(call.own_counts);
  for (int i = threadIdx.x; i < block * num_ranks; i += blockDim.x) {
    const int rows = counts[i];
    if (rows) atomicAdd(&before[i % num_ranks], rows);
  }
  const Owner owner(layout.num_local);
  uint64_t ranks = 0;
#pragma unroll
  for (int k = 0; k < LANES; ++k)
    if (ids[k] != NO_ID) ranks |= 1ull << owner(ids[k]);
  for (int r = 0; r < num_ranks; ++r) {
    const uint32_t mask = __ballot_sync(ALL_LANES, ranks >> r & 1);
    if (lane_id() == 0) votes[warp_id() * num_ranks + r] = mask;
  }
  __syncthreads();
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x)
    for (int w = 0, sum = before[r]; w < LAYOUT_WARPS; ++w) {
      positions[w * num_ranks + r] = sum;
      sum += __popc(votes[w * num_ranks + r]);
    }
  __syncthreads();
  if (token >= layout.num_tokens) return;
  uint32_t last = 0;
  int rows[LANES];
#pragma unroll
  for (int k = LANES - 1; k >= 0; --k) {
    rows[k] = -1;
    if (ids[k] == NO_ID) continue;
    const int rank = owner(ids[k]), at = warp_id() * num_ranks + rank;
    rows[k] = positions[at] + __popc(votes[at] & lower_lanes());
    if (ranks >> rank & 1) last |= 1u << k;  // no lane behind it was of this rank
    ranks &= ~(1ull << rank);
  }
  store_lanes(layout.lane_row, token, layout.num_topk, rows);
  reinterpret_cast<uint32_t*>(layout.last_lanes)[token] = last;
}

// What all ranks said in their headers, in shared memory of a block.
struct Said {
  int first_block[MT_MAX_RANKS + 1];  // of the blocks of tokens of all ranks, in the order of the ranks
  int row_base[MT_MAX_RANKS + 1];
  int tokens[MT_MAX_RANKS];
  int rows[MT_MAX_RANKS];
  int silent;                         // 1: one did not come
  int differ;                         // 1: nothing may move
};

// Waits for the headers of all ranks.
__device__ __forceinline__ void hear(const MtLayoutCall& call, uint32_t seq, Said& said) {
  const MtChannel& channel = call.channel;
  const int num_ranks = channel.num_ranks;
  if (threadIdx.x == 0) said.silent = said.differ = 0;
  __syncthreads();
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    const volatile uint32_t* words = header(channel, seq, channel.rank, r);
    const bool came = wait_flag(channel, words + MT_SEQ, seq, r);
    const uint32_t hash = words[MT_HASH], status = words[MT_STATUS], tokens = words[MT_NUM_TOKENS];
    const uint32_t rows = words[MT_COUNTS + channel.rank];
    said.tokens[r] = static_cast<int>(tokens);
    said.rows[r] = static_cast<int>(rows);
    if (!came) said.silent = 1;
    if (!came || hash != call.hash || (status & MT_REFUSED)) said.differ = 1;
  }
  __syncthreads();
  for (int r = threadIdx.x; r <= num_ranks; r += blockDim.x) {
    int block = 0, row = 0;
    for (int j = 0; j < r && !said.differ; ++j) block += (said.tokens[j] + MT_TOKENS - 1) / MT_TOKENS, row += said.rows[j];
    said.first_block[r] = block;
    said.row_base[r] = row;
  }
  __syncthreads();
}

// The source of a block of tokens, or of a row, by bisection of the first ones of the sources.
__device__ __forceinline__ int source_of(const int* firsts, int num_ranks, int index) {
  int low = 0, high = num_ranks;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (firsts[middle] <= index) low = middle; else high = middle;
  }
  return low;
}

// Adds up the counts of all blocks of tokens, and of those before block `limit`, from column `first_column` on.
__device__ __forceinline__ void add_counts(const MtLayoutCall& call, char* tables, const Said& said, int limit, int first_column,
                                           int* before, int* total) {
  const int num_ranks = call.channel.num_ranks, first_vector = first_column / COUNTS_A_VECTOR;
  const int vectors = count_columns(call.layout.num_local) / COUNTS_A_VECTOR - first_vector;
  const int at_once = blockDim.x / vectors, slot = threadIdx.x / vectors, vector = first_vector + threadIdx.x % vectors;
  if (slot >= at_once) return;
  int sums[COUNTS_A_VECTOR] = {}, low[COUNTS_A_VECTOR] = {};
#pragma unroll 4
  for (int i = slot; i < said.first_block[num_ranks]; i += at_once) {
    const int source = source_of(said.first_block, num_ranks, i);
    const uint4 found = counts_of(call, tables, source, i - said.first_block[source])[vector];
    const uint32_t pairs[4] = {found.x, found.y, found.z, found.w};
#pragma unroll
    for (int c = 0; c < COUNTS_A_VECTOR; ++c) {
      const int count = static_cast<int>(pairs[c / 2] >> (c % 2 * 16) & 0xffff);
      sums[c] += count;
      low[c] += i < limit ? count : 0;
    }
  }
#pragma unroll
  for (int c = 0; c < COUNTS_A_VECTOR; ++c) {
    if (sums[c]) atomicAdd(&total[vector * COUNTS_A_VECTOR + c], sums[c]);
    if (low[c]) atomicAdd(&before[vector * COUNTS_A_VECTOR + c], low[c]);
  }
}

// Inclusive sum over the lanes of a warp.
__device__ __forceinline__ int warp_sum_up(int value) {
  for (int step = 1; step < WARP; step *= 2) {
    const int other = __shfl_up_sync(ALL_LANES, value, step);
    if (lane_id() >= step) value += other;
  }
  return value;
}

// First expanded rows of the experts from their counts, one warp: starts[e] of each, and the number of all.
__device__ __forceinline__ int start_experts(const int* total, int num_local, int alignment, int* starts) {
  const int each = (num_local + WARP - 1) / WARP, first = lane_id() * each;
  const int end = first + each < num_local ? first + each : num_local;
  int sum = 0;
  for (int e = first; e < end; ++e) {
    starts[e] = sum;
    sum += (total[e] + alignment - 1) / alignment * alignment;
  }
  const int until = warp_sum_up(sum);
  for (int e = first; e < end; ++e) starts[e] += until - sum;
  return __shfl_sync(ALL_LANES, until, WARP - 1);
}

// What the host waits for: counts, or why there are none. One block.
__device__ __forceinline__ void write_record(const MtLayoutCall& call, uint32_t seq, const Said& said, const int* total, int expanded) {
  const MtChannel& channel = call.channel;
  const int num_ranks = channel.num_ranks;
  volatile uint32_t* record = reinterpret_cast<volatile uint32_t*>(call.record);
  __shared__ uint32_t status;
  if (threadIdx.x == 0) status = 0;
  __syncthreads();
  for (int r = threadIdx.x; r < num_ranks; r += blockDim.x) {
    const volatile uint32_t* words = header(channel, seq, channel.rank, r);
    const uint32_t found = words[MT_STATUS];
    if (found) atomicOr(&status, found);
    record[MT_REC_TABLES + r] = words[MT_NUM_TOKENS];
  }
  for (int i = threadIdx.x; i < num_ranks * num_ranks; i += blockDim.x)
    record[MT_REC_TABLES + num_ranks + i] = header(channel, seq, channel.rank, i / num_ranks)[MT_COUNTS + i % num_ranks];
  for (int e = threadIdx.x; e < call.layout.num_local; e += blockDim.x)
    record[MT_REC_TABLES + num_ranks + num_ranks * num_ranks + e] = total[e];
  __syncthreads();
  if (threadIdx.x == 0) {
    if (said.differ || status != MT_OK) note_difference(channel);
    record[MT_REC_STATUS] = status;
    record[MT_REC_DIFFERENT] = said.differ;
    record[MT_REC_ROWS] = said.row_base[num_ranks];
    record[MT_REC_EXPANDED] = expanded;
  }
  fence_system();
  __syncthreads();
  if (threadIdx.x == 0) raise_flag(record + MT_REC_SEQ, 1);
}

// The block that adds everything up: tables of the whole layout, and the record.
__device__ __forceinline__ void sum_up(const MtLayoutCall& call, uint32_t seq, const Said& said, const int* total, int* starts) {
  const MtLayout& layout = call.layout;
  const MtChannel& channel = call.channel;
  const int num_ranks = channel.num_ranks, num_local = layout.num_local;
  __shared__ int expanded;
  if (warp_id() == 0) {
    const int end = start_experts(total, num_local, layout.alignment, starts);
    if (lane_id() == 0) expanded = end;
  }
  __syncthreads();
  if (!said.silent) write_record(call, seq, said, total, expanded);
  for (int r = threadIdx.x; r <= num_ranks; r += blockDim.x) reinterpret_cast<int*>(layout.row_base)[r] = said.row_base[r];
  for (int i = threadIdx.x; i < num_ranks * num_ranks; i += blockDim.x)
    reinterpret_cast<int*>(layout.matrix)[i] =
        said.differ ? 0 : header(channel, seq, channel.rank, i / num_ranks)[MT_COUNTS + i % num_ranks];
  for (int e = threadIdx.x; e < num_local; e += blockDim.x) {
    reinterpret_cast<int*>(layout.expert_counts)[e] = total[e];
    reinterpret_cast<int*>(layout.expert_starts)[e] = starts[e];
  }
  if (threadIdx.x == 0) reinterpret_cast<int*>(layout.expert_starts)[num_local] = expanded;
}

// The ids of token `threadIdx.x` of a block of tokens of all ranks, masked where there is none.
template <int VECS>
__device__ __forceinline__ void read_block(const MtLayoutCall& call, const Said& said, char* const* peers, int block,
                                           TokenIds<VECS>& ids, int* token) {
  const int source = source_of(said.first_block, call.channel.num_ranks, block);
  *token = (block - said.first_block[source]) * MT_TOKENS + static_cast<int>(threadIdx.x);
  ids.clear();
  if (*token < said.tokens[source])
    ids.load(reinterpret_cast<const uint4*>(peers[source] + call.ids.offset) + static_cast<int64_t>(*token) * VECS);
}

// Received rows of some blocks of tokens, one behind the other: part `part` of `parts`. The last part but one more sums up.
template <int VECS>
__device__ __forceinline__ void receive(const MtLayoutCall& call, uint32_t seq, int part, int parts, char* const* peers, char* shared) {
  constexpr int LANES = TokenIds<VECS>::LANES;
  const MtLayout& layout = call.layout;
  const int num_local = layout.num_local, num_topk = layout.num_topk, columns = count_columns(num_local), rank = call.channel.rank;
  const bool sums = part == parts, expand = layout.expand && !sums;
  int* before = reinterpret_cast<int*>(shared);
  int* total = before + columns;
  int* starts = total + columns;  // next expanded row of each expert
  uint32_t* bits = reinterpret_cast<uint32_t*>(starts + columns);                             // [warps][L], tokens of an expert
  uint16_t* earlier = reinterpret_cast<uint16_t*>(bits + LAYOUT_WARPS * num_local);  // [warps][L], rows of earlier warps
  __shared__ Said said;
  __shared__ int in_warp[LAYOUT_WARPS];
  for (int c = threadIdx.x; c < 2 * columns; c += blockDim.x) before[c] = 0;
  for (int i = threadIdx.x; expand && i < LAYOUT_WARPS * num_local; i += blockDim.x) bits[i] = 0;
  hear(call, seq, said);
  chaos();
  const int blocks = said.first_block[call.channel.num_ranks], end = sums ? 0 : blocks * (part + 1) / parts;
  int block = sums ? 0 : blocks * part / parts, token = 0;
  if (!sums && block == end) return;
  TokenIds<VECS> next;
  int next_token = 0;
  if (!sums) read_block<VECS>(call, said, peers, block, next, &next_token);
  add_counts(call, peers[rank], said, block, expand || sums ? 0 : num_local, before, total);
  if (sums) {
    __syncthreads();
    sum_up(call, seq, said, total, starts);
    return;
  }
  for (bool first = true; block < end; ++block, first = false) {
    TokenIds<VECS> ids = next;
    token = next_token;
    int local[LANES];
    bool mine = false;
#pragma unroll
    for (int k = 0; k < LANES; ++k) {
      const uint32_t expert = ids[k] - static_cast<uint32_t>(rank * num_local);  // NO_ID is beyond the experts of all
      local[k] = expert < static_cast<uint32_t>(num_local) ? static_cast<int>(expert) : -1;
      mine = mine || local[k] >= 0;
      if (expand && local[k] >= 0) atomicOr(&bits[warp_id() * num_local + local[k]], 1u << lane_id());
    }
    const uint32_t votes = __ballot_sync(ALL_LANES, mine);
    if (lane_id() == 0) in_warp[warp_id()] = __popc(votes);
    if (block + 1 < end) read_block<VECS>(call, said, peers, block + 1, next, &next_token);
    __syncthreads();
    if (first && expand && warp_id() == LAYOUT_WARPS - 1) {
      start_experts(total, num_local, layout.alignment, starts);
      __syncwarp(ALL_LANES);
      for (int e = lane_id(); e < num_local; e += WARP) starts[e] += before[e];
    }
    for (int e = threadIdx.x; expand && e < num_local; e += blockDim.x)
      for (int w = 0, sum = 0; w < LAYOUT_WARPS; ++w) {
        earlier[w * num_local + e] = static_cast<uint16_t>(sum);
        sum += __popc(bits[w * num_local + e]);
      }
    __syncthreads();
    int64_t row = before[num_local] + __popc(votes & lower_lanes()), all = 0;
    for (int w = 0; w < LAYOUT_WARPS; ++w) {
      row += w < warp_id() ? in_warp[w] : 0;
      all += in_warp[w];
    }
    if (mine) {
      reinterpret_cast<int*>(layout.recv_token)[row] = token;
      store_lanes(layout.local_idx, row, num_topk, local);
      if (expand) {
        int places[LANES];
#pragma unroll
        for (int k = 0; k < LANES; ++k) {
          const int at = warp_id() * num_local + local[k];
          places[k] = local[k] < 0 ? -1 : starts[local[k]] + earlier[at] + __popc(bits[at] & lower_lanes());
        }
        store_lanes(layout.expand_row, row, num_topk, places);
      }
    }
    if (block + 1 == end) break;
    __syncthreads();
    if (threadIdx.x == 0) before[num_local] += static_cast<int>(all);
    for (int e = threadIdx.x; expand && e < num_local; e += blockDim.x) {
      const int at = (LAYOUT_WARPS - 1) * num_local + e;
      starts[e] += earlier[at] + __popc(bits[at]);
      for (int w = 0; w < LAYOUT_WARPS; ++w) bits[w * num_local + e] = 0;
    }
    __syncthreads();
  }
}

// Blocks from number `first` on, of all that a layout takes: see above.
template <int VECS>
__global__ void __launch_bounds__(MT_TOKENS) layout_impl(const MtLayoutCall call, int first, int num_all) {
  extern __shared__ uint4 layout_memory[];
  char* shared = reinterpret_cast<char*>(layout_memory);
  const MtChannel& channel = call.channel;
  __shared__ char* peers[MT_MAX_RANKS];
  const uint32_t seq = next_seq(channel);
  static_assert(MT_TOKENS >= MT_MAX_RANKS, "thread r knows rank r");
  const bool named = static_cast<int>(threadIdx.x) < channel.num_ranks;
  char* peer = named ? segment(channel, call.ids.segment, threadIdx.x) : nullptr;
  const int num_laying = (num_all - call.num_blocks - 1) / 2;
  const int block = static_cast<int>(blockIdx.x) + first, receiver = block - num_laying, placing = receiver - call.num_blocks - 1;
  if (receiver >= 0 && named) peers[threadIdx.x] = peer;
  if (receiver < 0)
    lay_tokens<VECS>(call, seq, block, num_laying, peer, peers, shared);
  else if (placing < 0)
    receive<VECS>(call, seq, receiver, call.num_blocks, peers, shared);
  else
    place_tokens<VECS>(call, seq, placing, peers, shared);
  __syncthreads();  // all threads of all blocks have read the number of the operation before it is raised
  if (threadIdx.x != 0 || atomicAdd(&state_of(channel)->left, 1u) != static_cast<uint32_t>(num_all) - 1) return;
  state_of(channel)->left = 0;
  state_of(channel)->seq = seq;
}

}  // namespace mt
