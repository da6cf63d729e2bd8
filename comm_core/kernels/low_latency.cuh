// Low-latency dispatch and combine: fixed shapes, no host wait, two halves each, in one launch or in two.
//
// At these sizes no byte counts, but each step that waits for another. So nothing here waits for a whole grid: blocks take
// tokens, warps take parts of rows, and each waits for just the flag that its part depends on.
//
// Dispatch, first half: a block casts a token and writes it once into the memory of every rank that has an expert of it,
// with a record (expert and position for each lane), then a flag. Beside that go the counts of each expert to its owner.
// Second half: counts give the first row of each source, a record the row, and warps copy to all experts of the token.
// Combine, first half: answers are laid down row by row, a flag behind each, unless they are lent; where they lie is told.
// Second half: the rank of a token reads, weighs and adds its rows.
//
// Small words are tagged with the low bits of the call's number: they say by themselves that they have come, without a
// fence. Each is written by every call of its place, two calls apart, so a few bits tell them from what was there.
// A place is used again two calls later, when all blocks of all ranks have said that they are done reading.
#pragma once

#include "cast.cuh"
#include "combine.cuh"
#include "sync.cuh"

namespace mt {

constexpr int BLOCKS_THREADS = 512, BLOCKS_WARPS = BLOCKS_THREADS / WARP;
constexpr int HALF_SEND = 1, HALF_RECV = 2;
constexpr int STAGED_LANES = 8192;  // ids that are kept in shared memory, 16 bits each
constexpr int NUMBER_BITS = 16, ROW_BITS = 18;  // of the values of tagged words
constexpr uint32_t BAD_CODE = 0xffffu;

__device__ __forceinline__ char* blocks_segment(const MtBlocksCall& call, uint32_t which, int rank) {
  if (call.channel.num_ranks > MT_NEAR_RANKS || which < 2) return segment(call.channel, which, rank);
  return reinterpret_cast<char*>(call.near[(which - 2) * MT_NEAR_RANKS + rank]);
}

__device__ __forceinline__ char* blocks_at(const MtBlocksCall& call, int rank, uint64_t offset) {
  return blocks_segment(call, 3, rank) + offset;
}

// A table of words in the memory of `reader`, two in turn: [2][ranks][width], by writer.
__device__ __forceinline__ volatile uint32_t* blocks_table(const MtBlocksCall& call, uint64_t offset, uint32_t seq, int reader, int writer, int width) {
  const int64_t line = static_cast<int64_t>(seq % 2) * call.channel.num_ranks + writer;
  return reinterpret_cast<volatile uint32_t*>(blocks_at(call, reader, offset)) + line * width;
}

__device__ __forceinline__ volatile uint32_t* blocks_header(const MtBlocksCall& call, int kind, uint32_t seq, int reader, int writer) {
  const uint64_t index = ((kind * 2 + seq % 2) * MT_MAX_RANKS + writer) * MT_HEADER_WORDS;
  return reinterpret_cast<volatile uint32_t*>(blocks_at(call, reader, call.places.headers)) + index;
}

__device__ __forceinline__ volatile uint32_t* blocks_done(const MtBlocksCall& call, int kind, uint32_t seq, int reader, int writer) {
  return reinterpret_cast<volatile uint32_t*>(blocks_at(call, reader, call.places.done)) + ((kind * 2 + seq % 2) * MT_MAX_RANKS + writer) * MT_DONE_SLOTS;
}

// Rows received from `writer` by `reader`.
__device__ __forceinline__ char* blocks_row(const MtBlocksCall& call, uint32_t seq, int reader, int writer, int token) {
  const uint64_t line = (static_cast<uint64_t>(seq % 2) * call.channel.num_ranks + writer) * call.max_tokens + token;
  return blocks_at(call, reader, call.places.rows) + line * call.places.row_bytes;
}

// Where the record of a row begins: a word a lane, behind the data.
__device__ __forceinline__ uint64_t record_offset(const MtBlocksCall& call) { return call.places.row_bytes - (call.num_topk * 4 + 15) / 16 * 16; }

__device__ __forceinline__ char* blocks_answers(const MtBlocksCall& call, uint32_t seq, int rank, int64_t row_bytes) {
  return blocks_at(call, rank, call.places.answers) + static_cast<int64_t>((seq % 2) * call.places.answer_rows) * row_bytes;
}

// The flag of an answer to this token: [2][experts][max_tokens], by position.
__device__ __forceinline__ volatile uint32_t* blocks_laid(const MtBlocksCall& call, uint32_t seq, int reader, int expert, int position) {
  const int64_t experts = static_cast<int64_t>(call.num_local) * call.channel.num_ranks;
  return reinterpret_cast<volatile uint32_t*>(blocks_at(call, reader, call.places.laid)) + ((seq % 2) * experts + expert) * call.max_tokens + position;
}

__device__ __forceinline__ int64_t blocks_row_bytes(const MtBlocksCall& call) { return static_cast<int64_t>(call.hidden) * (call.dtype == 2 ? 4 : 2); }

// Waits until the bits of a word from `shift` on are the low bits of `seq`; false where a wait of this channel has timed out.
__device__ __forceinline__ bool wait_tagged(const MtChannel& channel, const volatile uint32_t* word, int shift, uint32_t seq, int peer, uint32_t* found) {
  const long long start = ticks();
  const uint32_t wanted = seq << shift;
  chaos();
  for (uint32_t polls = 1;; ++polls) {
    const uint32_t value = *word;
    *found = value & ((1u << shift) - 1);
    if (((value ^ wanted) >> shift) == 0) return true;
    if (polls % 64 != 0) continue;
    if (*reinterpret_cast<volatile uint32_t*>(&state_of(channel)->aborted)) return false;
    if (ticks() - start <= channel.timeout_ticks) continue;
    note_timeout(channel, peer);
    return false;
  }
}

__device__ __forceinline__ void send_tagged(volatile uint32_t* word, int shift, uint32_t seq, uint32_t value) {
  chaos();
  store_alone(word, seq << shift | (value & ((1u << shift) - 1)));
}

// Begins a first half, all threads: the number of the call. False where the place of two calls ago may not be written yet,
// as some block of some rank has not said that it has read it. What is loaded before this is under way meanwhile.
__device__ __forceinline__ bool blocks_start(const MtBlocksCall& call, int kind, uint32_t* seq) {
  __shared__ uint32_t number;
  const MtChannel& channel = call.channel;
  const int count = channel.num_ranks * MT_DONE_SLOTS;
  const volatile uint32_t* places[] = {blocks_done(call, kind, 0, channel.rank, 0), blocks_done(call, kind, 1, channel.rank, 0)};
  if (threadIdx.x == 0) number = *reinterpret_cast<volatile uint32_t*>(&state_of(channel)->blocks_seq[kind]) + 1;
  const bool some = static_cast<int>(threadIdx.x) < count;
  const uint32_t even = some ? places[0][threadIdx.x] : 0, odd = some ? places[1][threadIdx.x] : 0;
  __syncthreads();
  *seq = number;
  const volatile uint32_t* words = *seq % 2 ? places[1] : places[0];
  bool free = true;
  for (int i = threadIdx.x; i < count; i += BLOCKS_THREADS) {
    const uint32_t value = i != static_cast<int>(threadIdx.x) ? words[i] : *seq % 2 ? odd : even;
    if (static_cast<int32_t>(value - (*seq - 2)) >= 0) continue;
    free = free && wait_flag(channel, words + i, *seq - 2, i / MT_DONE_SLOTS);
  }
  return __syncthreads_and(free);
}

// Ends a second half: this block has read all it will; what it read has gone into results, so no fence is needed for it.
__device__ __forceinline__ void blocks_end(const MtBlocksCall& call, int kind, uint32_t seq) {
  const MtChannel& channel = call.channel;
  __syncthreads();
  for (int r = 0; r < channel.num_ranks; ++r)
    for (int slot = blockIdx.x + threadIdx.x * gridDim.x; slot < MT_DONE_SLOTS; slot += blockDim.x * gridDim.x) {
      chaos();
      store_alone(blocks_done(call, kind, seq, r, channel.rank) + slot, seq);
    }
}

// Counts the call, in the last block to come here. A whole block has its number by then.
__device__ __forceinline__ void blocks_count(const MtBlocksCall& call, int kind, uint32_t seq) {
  if (threadIdx.x != BLOCKS_THREADS - 1) return;  // of a warp that has little to do
  MtState* state = state_of(call.channel);
  if (atomicAdd(&state->ticket, 1u) != gridDim.x - 1) return;
  state->ticket = 0;
  state->blocks_seq[kind] = seq;
  *reinterpret_cast<uint32_t*>(call.seq) = seq;
}

// What every rank must know before anything moves, in words of 16 bits.
__device__ __forceinline__ uint32_t header_word(const MtBlocksCall& call, int word, uint32_t status) {
  const uint64_t offset = call.lent.offset;
  if (word == 0) return call.hash & 0xffffu;
  if (word == 1) return call.hash >> 16;
  if (word == 2) return call.status | status;
  if (word == 3) return call.is_lent << 8 | call.lent.segment;
  return static_cast<uint32_t>(offset >> (16 * (word - 4))) & 0xffffu;
}
constexpr int DISPATCH_WORDS = 4, COMBINE_WORDS = 8;

__device__ __forceinline__ void send_headers(const MtBlocksCall& call, int kind, uint32_t seq, uint32_t status) {
  const int words = kind == 0 ? DISPATCH_WORDS : COMBINE_WORDS;
  for (int i = threadIdx.x; i < call.channel.num_ranks * words; i += blockDim.x)
    send_tagged(blocks_header(call, kind, seq, i / words, call.channel.rank) + i % words, NUMBER_BITS, seq, header_word(call, i % words, status));
}

// A word of a header has come and says nothing against the call.
__device__ __forceinline__ bool take_header(const MtBlocksCall& call, int kind, uint32_t seq, int writer, int word, uint32_t* value, bool* differ) {
  const volatile uint32_t* words = blocks_header(call, kind, seq, call.channel.rank, writer);
  if (!wait_tagged(call.channel, words + word, NUMBER_BITS, seq, writer, value)) return false;
  if (word < 2 && *value != header_word(call, word, 0)) *differ = true;
  if (word == 2 && *value != MT_OK) *differ = true;
  return true;
}

// All threads: true where everything came and nothing is against the call.
__device__ __forceinline__ bool may_move(const MtBlocksCall& call, bool came, bool differ) {
  came = __syncthreads_and(came);
  differ = __syncthreads_or(differ);
  if (differ && blockIdx.x == 0 && threadIdx.x == 0) note_difference(call.channel);
  return came && !differ;
}

// An id as 16 bits: 0 masked, id + 1, or BAD_CODE.
__device__ __forceinline__ uint32_t code_of(const MtBlocksCall& call, int64_t id) {
  const int64_t experts = static_cast<int64_t>(call.num_local) * call.channel.num_ranks;
  return id < -1 || id >= experts ? BAD_CODE : static_cast<uint32_t>(id + 1);
}

struct Codes {
  const int64_t* ids;
  const uint16_t* staged;  // or null
  __device__ __forceinline__ uint32_t at(const MtBlocksCall& call, int i) const { return staged ? staged[i] : code_of(call, ids[i]); }
};

// How many of the first `limit` lanes of this rank have a code. A warp.
__device__ __forceinline__ int count_code(const MtBlocksCall& call, const Codes& codes, uint32_t code, int limit) {
  int found = 0;
  if (codes.staged) {
#pragma unroll 8
    for (int i = lane_id(); i < limit; i += WARP) found += codes.staged[i] == code;
  } else {
#pragma unroll 4
    for (int i = lane_id(); i < limit; i += WARP) found += code_of(call, codes.ids[i]) == code;
  }
  for (int step = WARP / 2; step > 0; step /= 2) found += __shfl_xor_sync(ALL_LANES, found, step);
  return found;
}

// True where an id is out of range or twice in a token.
__device__ __forceinline__ bool any_bad(const MtBlocksCall& call, const Codes& codes) {
  bool bad = false;
  for (int i = threadIdx.x; i < call.num_tokens * call.num_topk; i += blockDim.x) {
    const uint32_t code = codes.at(call, i);
    bad = bad || code == BAD_CODE;
    for (int j = i - i % call.num_topk; j < i; ++j) bad = bad || (code != 0 && codes.at(call, j) == code);
  }
  return bad;
}

template <typename T>
using Row16 = Pack<T, 16 / sizeof(T)>;

// Ranks that a token goes to.
struct TokenRanks {
  uint32_t masks[MT_MAX_RANKS / WARP];
  __device__ __forceinline__ bool has(int rank) const { return masks[rank / WARP] >> (rank % WARP) & 1; }
};

// Loads two packs a thread of a row, from pack `base` on.
template <typename T>
__device__ __forceinline__ void load_packs(const T* row, int base, int count, Row16<T> (&packs)[2]) {
#pragma unroll
  for (int s = 0; s < 2; ++s) {
    const int at = base + s * BLOCKS_THREADS + threadIdx.x;
    packs[s] = at < count ? reinterpret_cast<const Row16<T>*>(row)[at] : Row16<T>{};
  }
}

// Casts a pack, with the lanes that share its block of 128 columns, and stores it for all targets.
template <typename T>
__device__ __forceinline__ void send_cast(const MtBlocksCall& call, uint32_t seq, int token, int at, const Row16<T>& pack, const TokenRanks& targets) {
  constexpr int EACH = 16 / sizeof(T), LANES = CAST_BLOCK / EACH;
  float amax = 0;
#pragma unroll
  for (int i = 0; i < EACH; ++i) {
    const float value = widen(pack.at[i]), magnitude = value < 0 ? -value : value;
    amax = magnitude > amax || magnitude != magnitude ? magnitude : amax;
  }
#pragma unroll
  for (int step = LANES / 2; step > 0; step /= 2) {
    const float other = __shfl_xor_sync(ALL_LANES, amax, step);
    amax = other > amax || other != other ? other : amax;
  }
  if (at * EACH >= call.hidden) return;
  const float scale = scale_of(amax, call.fp8 >= 2);
  Pack<uint32_t, EACH / 4> out;
#pragma unroll
  for (int w = 0; w < EACH / 4; ++w) {
    out.at[w] = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) out.at[w] |= to_e4m3(widen(pack.at[4 * w + i]) / scale) << (8 * i);
  }
  const int block = at / LANES;
  for (int r = 0; r < call.channel.num_ranks; ++r) {
    if (!targets.has(r)) continue;
    char* to = blocks_row(call, seq, r, call.channel.rank, token);
    reinterpret_cast<Pack<uint32_t, EACH / 4>*>(to)[at] = out;
    if (at % LANES != 0) continue;
    if (call.fp8 < 3) reinterpret_cast<float*>(to + call.hidden)[block] = scale;
    else reinterpret_cast<uint8_t*>(to + call.hidden)[block] = static_cast<uint8_t>(bits_of(scale) >> 23);
  }
}

// Writes a token, cast where that is asked for, to all targets. `packs` are the first of its row.
template <typename T>
__device__ __forceinline__ void send_row(const MtBlocksCall& call, uint32_t seq, int token, Row16<T> (&packs)[2], const TokenRanks& targets) {
  const T* row = reinterpret_cast<const T*>(call.x) + static_cast<int64_t>(token) * call.hidden;
  const int count = call.hidden * static_cast<int>(sizeof(T)) / 16, num_ranks = call.channel.num_ranks;
  for (int base = 0; base < count; base += 2 * BLOCKS_THREADS) {
    if (base > 0) load_packs<T>(row, base, count, packs);
#pragma unroll
    for (int s = 0; s < 2; ++s) {
      const int at = base + s * BLOCKS_THREADS + threadIdx.x;
      if (call.fp8) {
        send_cast<T>(call, seq, token, at, packs[s], targets);
        continue;
      }
      for (int r = 0; r < num_ranks; ++r)
        if (at < count && targets.has(r)) reinterpret_cast<Row16<T>*>(blocks_row(call, seq, r, call.channel.rank, token))[at] = packs[s];
    }
  }
  const int first = call.fp8 == 3 ? (call.hidden + CAST_BLOCK - 1) / CAST_BLOCK : 4 * call.scale_words;
  for (int b = first + threadIdx.x; b < 4 * call.scale_words; b += BLOCKS_THREADS)  // exponents of blocks that are not there are 0
    for (int r = 0; r < num_ranks; ++r)
      if (targets.has(r)) blocks_row(call, seq, r, call.channel.rank, token)[call.hidden + b] = 0;
}

// First half of a dispatch, all threads.
template <typename T>
__device__ __forceinline__ uint32_t dispatch_send(const MtBlocksCall& call, uint16_t* shared) {
  __shared__ TokenRanks targets;
  __shared__ int positions[MT_MAX_TOPK];
  __shared__ uint32_t token_codes[MT_MAX_TOPK];
  const MtChannel& channel = call.channel;
  const int num_topk = call.num_topk, lanes = call.num_tokens * num_topk, experts = call.num_local * channel.num_ranks;
  const int count = call.hidden * static_cast<int>(sizeof(T)) / 16;
  const T* x = reinterpret_cast<const T*>(call.x);
  Row16<T> packs[2] = {};
  if (static_cast<int>(blockIdx.x) < call.num_tokens) load_packs<T>(x + static_cast<int64_t>(blockIdx.x) * call.hidden, 0, count, packs);
  const Codes codes = {reinterpret_cast<const int64_t*>(call.topk_idx), lanes <= STAGED_LANES ? shared : nullptr};
  for (int i = threadIdx.x; codes.staged && i < lanes; i += BLOCKS_THREADS) shared[i] = static_cast<uint16_t>(code_of(call, codes.ids[i]));
  uint32_t seq;
  if (!blocks_start(call, 0, &seq)) return seq;  // and all codes are there
  if (blockIdx.x == 0) send_headers(call, 0, seq, __syncthreads_or(any_bad(call, codes)) ? MT_BAD_ID : MT_OK);
  const int senders = static_cast<int>(gridDim.x) < call.max_tokens ? gridDim.x : call.max_tokens;
  for (int token = blockIdx.x; token < call.max_tokens; token += gridDim.x) {
    const bool real = token < call.num_tokens;
    if (token != static_cast<int>(blockIdx.x)) {
      __syncthreads();  // the last token's words in shared memory have been read
      if (real) load_packs<T>(x + static_cast<int64_t>(token) * call.hidden, 0, count, packs);
    }
    if (warp_id() == 0) {
      uint32_t code = 0, masks[MT_MAX_RANKS / WARP] = {};
      if (real && lane_id() < num_topk) token_codes[lane_id()] = code = codes.at(call, token * num_topk + lane_id());
      if (code != 0 && code != BAD_CODE) {
        const int rank = static_cast<int>(code - 1) / call.num_local;
#pragma unroll
        for (int w = 0; w < MT_MAX_RANKS / WARP; ++w) masks[w] = rank / WARP == w ? 1u << (rank % WARP) : 0;
      }
#pragma unroll
      for (int w = 0; w < MT_MAX_RANKS / WARP; ++w) {
        for (int step = WARP / 2; step > 0; step /= 2) masks[w] |= static_cast<uint32_t>(__shfl_xor_sync(ALL_LANES, static_cast<int>(masks[w]), step));
        if (lane_id() == 0) targets.masks[w] = masks[w];
      }
    }
    __syncthreads();
    if (real) send_row<T>(call, seq, token, packs, targets);
    // While those stores are under way: positions of the lanes, and with the first token counts of some experts.
    const int own = real ? num_topk : 0;
    const int more = token == static_cast<int>(blockIdx.x) ? (experts - token + senders - 1) / senders : 0;
    for (int task = warp_id(); task < own + more; task += BLOCKS_WARPS) {
      const int expert = token + (task - own) * senders;
      const bool is_lane = task < own;
      const int found = count_code(call, codes, is_lane ? token_codes[task] : expert + 1, is_lane ? token * num_topk : lanes);
      if (lane_id() != 0) continue;
      if (is_lane) reinterpret_cast<int*>(call.positions)[token * num_topk + task] = positions[task] = found;
      else send_tagged(blocks_table(call, call.places.counts, seq, expert / call.num_local, channel.rank, call.num_local) + expert % call.num_local,
                       NUMBER_BITS, seq, found);
    }
    __syncthreads();
    for (int i = threadIdx.x; real && i < channel.num_ranks * num_topk; i += BLOCKS_THREADS) {
      const int r = i / num_topk, k = i % num_topk, local = static_cast<int>(token_codes[k]) - 1 - r * call.num_local;
      if (!targets.has(r)) continue;
      const bool here = token_codes[k] != BAD_CODE && local >= 0 && local < call.num_local;
      reinterpret_cast<uint32_t*>(blocks_row(call, seq, r, channel.rank, token) + record_offset(call))[k] = here ? (local + 1) << 16 | positions[k] : 0;
    }
    done_writing();
    for (int r = threadIdx.x; r < channel.num_ranks; r += BLOCKS_THREADS) {
      volatile uint32_t* flag = blocks_table(call, call.places.flags, seq, r, channel.rank, call.max_tokens) + token;
      if (real && targets.has(r)) raise_flag(flag, seq << 1 | 1);
      else send_tagged(flag, 1, seq, 0);
    }
  }
  return seq;
}

// Counts of all sources: in `starts`, [ranks][L] in shared memory, the first row of each; the sums in `totals`. All threads.
__device__ __forceinline__ bool take_counts(const MtBlocksCall& call, uint32_t seq, uint16_t* starts, uint16_t* totals) {
  const MtChannel& channel = call.channel;
  const int num_local = call.num_local;
  const volatile uint32_t* table = blocks_table(call, call.places.counts, seq, channel.rank, 0, num_local);
  bool came = true, differ = false;
  uint32_t value = 0;
  for (int i = threadIdx.x; i < channel.num_ranks * num_local; i += BLOCKS_THREADS) {
    came = came && wait_tagged(channel, table + i, NUMBER_BITS, seq, i / num_local, &value);
    starts[i] = static_cast<uint16_t>(value);
  }
  for (int i = threadIdx.x; i < channel.num_ranks * DISPATCH_WORDS; i += BLOCKS_THREADS)
    came = came && take_header(call, 0, seq, i / DISPATCH_WORDS, i % DISPATCH_WORDS, &value, &differ);
  const bool moves = may_move(call, came, differ);
  for (int e = threadIdx.x; e < num_local; e += BLOCKS_THREADS) {
    int sum = 0;
    for (int r = 0; r < channel.num_ranks; ++r) {
      const int here = moves ? starts[r * num_local + e] : 0;
      starts[r * num_local + e] = static_cast<uint16_t>(sum);
      if (e % gridDim.x == blockIdx.x) reinterpret_cast<int64_t*>(call.ranges)[e * channel.num_ranks + r] = static_cast<int64_t>(sum) << 32 | here;
      sum += here;
    }
    totals[e] = static_cast<uint16_t>(sum);
    if (e % gridDim.x != blockIdx.x) continue;
    reinterpret_cast<int*>(call.counts)[e] = sum;
    if (call.stats) reinterpret_cast<int*>(call.stats)[e] += sum;
  }
  __syncthreads();
  return moves;
}

// Copies a part of a received row to all experts of its token. A warp.
__device__ __forceinline__ void take_row(const MtBlocksCall& call, uint32_t seq, int source, int token, int part, int parts, const uint16_t* starts) {
  constexpr int STEPS = 4;
  const int row_bytes = static_cast<int>(call.fp8 ? call.hidden : blocks_row_bytes(call)), count = row_bytes / 16;
  const char* from = blocks_row(call, seq, call.channel.rank, source, token);
  const int each = (count + parts - 1) / parts, first = part * each, end = first + each < count ? first + each : count;
  const uint32_t record = lane_id() < call.num_topk ? reinterpret_cast<const uint32_t*>(from + record_offset(call))[lane_id()] : 0;
  int64_t row = 0, scale = 0;
  for (int base = first; base < end || base == first; base += WARP * STEPS) {
    int4 values[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int at = base + s * WARP + lane_id();
      if (at < end) values[s] = reinterpret_cast<const int4*>(from)[at];
    }
    if (base == first && record) {  // the record comes with the row
      const int local = static_cast<int>(record >> 16) - 1;
      const int place = starts[source * call.num_local + local] + static_cast<int>(record & 0xffffu);
      row = static_cast<int64_t>(local) * call.height + place;
      scale = local * call.scale_expert_stride + place;
      if (part == 0) reinterpret_cast<int*>(call.src_info)[row] = token;
    }
    for (uint32_t left = __ballot_sync(ALL_LANES, record != 0); left; left &= left - 1) {
      const int64_t there = __shfl_sync(ALL_LANES, static_cast<long long>(row), __ffs(left) - 1);
      int4* to = reinterpret_cast<int4*>(call.out_x + there * row_bytes);
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        const int at = base + s * WARP + lane_id();
        if (at < end) to[at] = values[s];
      }
    }
  }
  for (int base = part * WARP; base < call.scale_words; base += parts * WARP) {
    const int c = base + lane_id();
    const uint32_t value = c < call.scale_words ? reinterpret_cast<const uint32_t*>(from + call.hidden)[c] : 0;
    for (uint32_t left = __ballot_sync(ALL_LANES, record != 0); left; left &= left - 1) {
      const int64_t there = __shfl_sync(ALL_LANES, static_cast<long long>(scale), __ffs(left) - 1);
      if (c < call.scale_words) reinterpret_cast<uint32_t*>(call.out_scales)[there + c * call.scale_col_stride] = value;
    }
  }
}

// Parts that `count` things are cut in so that every warp has one: a power of 2, at most `most`.
__device__ __forceinline__ int parts_of(int count, int most) {
  int parts = 1;
  while (parts < most && count * parts * 2 <= static_cast<int>(gridDim.x) * BLOCKS_WARPS) parts *= 2;
  return parts;
}

// Second half of a dispatch, all threads.
__device__ __forceinline__ void dispatch_recv(const MtBlocksCall& call, uint32_t seq, uint16_t* shared) {
  const MtChannel& channel = call.channel;
  uint16_t* totals = shared + channel.num_ranks * call.num_local;
  __syncthreads();  // the first half is done with shared memory
  const bool moves = take_counts(call, seq, shared, totals);
  for (int e = blockIdx.x; e < call.num_local; e += gridDim.x)
    for (int i = totals[e] + threadIdx.x; i < call.height; i += BLOCKS_THREADS)
      reinterpret_cast<int*>(call.src_info)[static_cast<int64_t>(e) * call.height + i] = -1;
  const int rows = channel.num_ranks * call.max_tokens, parts = parts_of(rows, 8), num_warps = gridDim.x * BLOCKS_WARPS;
  for (int unit = blockIdx.x * BLOCKS_WARPS + warp_id(); moves && unit < rows * parts; unit += num_warps) {
    const int which = unit / parts, source = which / call.max_tokens, token = which % call.max_tokens;
    uint32_t has = 0;
    const volatile uint32_t* flag = blocks_table(call, call.places.flags, seq, channel.rank, source, call.max_tokens) + token;
    const bool came = wait_tagged(channel, flag, 1, seq, source, &has);
    if (!__ballot_sync(ALL_LANES, came && has)) continue;  // all lanes have read the same word
    fence_system();
    take_row(call, seq, source, token, unit % parts, parts, shared);
  }
  blocks_end(call, 0, seq);
}

// `halves`: HALF_SEND, HALF_RECV, or both; then all blocks must be on the device at once.
template <typename T>
__global__ void __launch_bounds__(BLOCKS_THREADS, 1) dispatch_low_latency_impl(const MtBlocksCall call, int halves) {
  extern __shared__ uint16_t shared_words[];
  uint32_t seq;
  if (halves & HALF_SEND) {
    seq = dispatch_send<T>(call, shared_words);
    blocks_count(call, 0, seq);
  } else {
    seq = *reinterpret_cast<const uint32_t*>(call.seq);
  }
  if (halves & HALF_RECV) dispatch_recv(call, seq, shared_words);
}

// Row of the first answer of each local expert among those laid down, in `first`; how many there are. All threads.
__device__ __forceinline__ int first_answers(const MtBlocksCall& call, int* first) {
  const int* counts = reinterpret_cast<const int*>(call.counts);
  for (int e = threadIdx.x; e < call.num_local; e += BLOCKS_THREADS) first[e + 1] = counts[e];
  __syncthreads();
  if (warp_id() == 0) {
    int sum = 0;
    for (int base = 0; base < call.num_local; base += WARP) {
      const int e = base + lane_id();
      int value = e < call.num_local ? first[e + 1] : 0;
      for (int step = 1; step < WARP; step *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, value, step);
        if (lane_id() >= step) value += other;
      }
      if (e < call.num_local) first[e + 1] = sum + value;
      sum += __shfl_sync(ALL_LANES, value, WARP - 1);
    }
    if (lane_id() == 0) first[0] = 0;
  }
  __syncthreads();
  return first[call.num_local];
}

// Lays an answer down and tells the rank of its token. A warp.
__device__ __forceinline__ void lay_answer(const MtBlocksCall& call, uint32_t seq, int expert, int i, char* to) {
  constexpr int STEPS = 7;
  const MtChannel& channel = call.channel;
  const int64_t row_bytes = blocks_row_bytes(call), *ranges = reinterpret_cast<const int64_t*>(call.ranges) + expert * channel.num_ranks;
  const int4* from = reinterpret_cast<const int4*>(call.x + (static_cast<int64_t>(expert) * call.height + i) * row_bytes);
  int reader = -1, position = 0;
  for (int r = lane_id(); r < channel.num_ranks; r += WARP) {
    const int begin = static_cast<int>(ranges[r] >> 32), count = static_cast<int>(static_cast<uint32_t>(ranges[r]));
    if (i < begin || i >= begin + count) continue;
    reader = r;
    position = i - begin;
  }
  const int count = static_cast<int>(row_bytes / 16);
  for (int base = 0; base < count; base += WARP * STEPS) {
    int4 values[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int at = base + s * WARP + lane_id();
      if (at < count) values[s] = from[at];
    }
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int at = base + s * WARP + lane_id();
      if (at < count) reinterpret_cast<int4*>(to)[at] = values[s];
    }
  }
  fence_system();
  __syncwarp();
  if (reader >= 0) raise_flag(blocks_laid(call, seq, reader, channel.rank * call.num_local + expert, position), seq);
}

// First half of a combine, all threads.
__device__ __forceinline__ uint32_t combine_send(const MtBlocksCall& call, int* first) {
  const MtChannel& channel = call.channel;
  const int num_local = call.num_local, words = channel.num_ranks * num_local;
  uint32_t seq;
  if (!blocks_start(call, 1, &seq)) return seq;
  if (blockIdx.x == 0) send_headers(call, 1, seq, MT_OK);
  const int total = call.is_lent ? 0 : first_answers(call, first);
  for (int i = blockIdx.x * BLOCKS_THREADS + threadIdx.x; i < words; i += gridDim.x * BLOCKS_THREADS) {
    const int r = i / num_local, expert = i % num_local;
    const int begin = static_cast<int>(reinterpret_cast<const int64_t*>(call.ranges)[expert * channel.num_ranks + r] >> 32);
    send_tagged(blocks_table(call, call.places.begins, seq, r, channel.rank, num_local) + expert, ROW_BITS, seq, call.is_lent ? begin : first[expert] + begin);
  }
  char* answers = blocks_answers(call, seq, channel.rank, blocks_row_bytes(call));
  for (int row = blockIdx.x + warp_id() * gridDim.x; row < total; row += gridDim.x * BLOCKS_WARPS) {
    int low = 0, high = num_local;  // the expert whose answers hold this row
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      if (first[middle] <= row) low = middle;
      else high = middle;
    }
    lay_answer(call, seq, low, row - first[low], answers + row * blocks_row_bytes(call));
  }
  return seq;
}

// Where the answers of each rank lie, in shared memory.
struct Sources {
  const char* answers[MT_MAX_RANKS];
  uint32_t words[MT_MAX_RANKS * COMBINE_WORDS];
  __device__ __forceinline__ bool is_lent(int rank) const { return words[rank * COMBINE_WORDS + 3] >> 8; }
};

__device__ __forceinline__ bool take_sources(const MtBlocksCall& call, uint32_t seq, Sources& sources) {
  const int num_ranks = call.channel.num_ranks;
  bool came = true, differ = false;
  for (int i = threadIdx.x; i < num_ranks * COMBINE_WORDS; i += BLOCKS_THREADS)
    came = came && take_header(call, 1, seq, i / COMBINE_WORDS, i % COMBINE_WORDS, &sources.words[i], &differ);
  const bool moves = may_move(call, came, differ);
  for (int r = threadIdx.x; moves && r < num_ranks; r += BLOCKS_THREADS) {
    const uint32_t* words = sources.words + r * COMBINE_WORDS;
    const uint64_t offset = words[4] | words[5] << 16 | static_cast<uint64_t>(words[6]) << 32 | static_cast<uint64_t>(words[7]) << 48;
    sources.answers[r] = sources.is_lent(r) ? blocks_segment(call, words[3] & 0xffu, r) + offset : blocks_answers(call, seq, r, blocks_row_bytes(call));
  }
  __syncthreads();
  return moves;
}

// Weight times row, added in lane order, each step rounded, once to T; packs first to end of a token. A warp, whose lanes
// below num_topk hold address (0 without) and weight of a summand.
template <typename T, int N>
__device__ __forceinline__ void weigh_rows(long long address, float weight, Pack<T, N>* out, int first, int end) {
  using P = Pack<T, N>;
  constexpr int GROUP = 8;
  for (int base = first; base < end; base += WARP) {
    const int at = base + lane_id();
    float sums[N] = {};
    for (uint32_t left = __ballot_sync(ALL_LANES, address != 0); left;) {
      P packs[GROUP];
      float weights[GROUP];
      const int count = __popc(left);
#pragma unroll
      for (int j = 0; j < GROUP; ++j) {
        if (j >= count) continue;
        const int lane = __ffs(left) - 1;
        left &= left - 1;
        const P* row = reinterpret_cast<const P*>(__shfl_sync(ALL_LANES, address, lane));
        weights[j] = __shfl_sync(ALL_LANES, weight, lane);
        if (at < end) packs[j] = row[at];
      }
#pragma unroll
      for (int j = 0; j < GROUP; ++j) {
        if (j >= count) continue;
#pragma unroll
        for (int i = 0; i < N; ++i) sums[i] = sums[i] + widen(packs[j].at[i]) * weights[j];
      }
    }
    P result;
#pragma unroll
    for (int i = 0; i < N; ++i) result.at[i] = narrow<T>(sums[i]);
    if (at < end) out[at] = result;
  }
}

// Second half of a combine, all threads.
template <typename T, int N>
__device__ __forceinline__ void combine_recv(const MtBlocksCall& call, uint32_t seq) {
  __shared__ Sources sources;
  const MtChannel& channel = call.channel;
  const int num_topk = call.num_topk, num_local = call.num_local, count = call.hidden / N;
  const bool moves = take_sources(call, seq, sources);
  const int parts = parts_of(call.num_tokens, 16), each = (count + parts - 1) / parts, num_warps = gridDim.x * BLOCKS_WARPS;
  for (int unit = blockIdx.x * BLOCKS_WARPS + warp_id(); moves && unit < call.num_tokens * parts; unit += num_warps) {
    const int token = unit / parts, first = unit % parts * each;
    long long address = 0;
    float weight = 0;
    bool came = true;
    if (lane_id() < num_topk) {
      const int lane = token * num_topk + lane_id();
      const int64_t id = reinterpret_cast<const int64_t*>(call.topk_idx)[lane];
      const int position = reinterpret_cast<const int*>(call.positions)[lane];
      weight = reinterpret_cast<const float*>(call.topk_weights)[lane];
      if (id >= 0 && id < num_local * channel.num_ranks) {
        const int rank = static_cast<int>(id) / num_local, expert = static_cast<int>(id) % num_local;
        const bool lent = sources.is_lent(rank);
        uint32_t row = 0, none = 0;
        came = wait_tagged(channel, blocks_table(call, call.places.begins, seq, channel.rank, rank, num_local) + expert, ROW_BITS, seq, rank, &row);
        if (!lent) came = came && wait_tagged(channel, blocks_laid(call, seq, channel.rank, static_cast<int>(id), position), 0, seq, rank, &none);
        const int64_t there = static_cast<int64_t>(row) + position + (lent ? static_cast<int64_t>(expert) * call.height : 0);
        address = reinterpret_cast<long long>(sources.answers[rank] + there * call.hidden * static_cast<int64_t>(sizeof(T)));
      }
    }
    if (__ballot_sync(ALL_LANES, !came)) continue;
    fence_system();
    Pack<T, N>* out = reinterpret_cast<Pack<T, N>*>(call.out_x) + static_cast<int64_t>(token) * count;
    weigh_rows<T, N>(address, weight, out, first, first + each < count ? first + each : count);
  }
  blocks_end(call, 1, seq);
}

template <typename T>
__global__ void __launch_bounds__(BLOCKS_THREADS, 1) combine_low_latency_impl(const MtBlocksCall call, int halves) {
  __shared__ int first[MT_BLOCKS_EXPERTS + 1];
  uint32_t seq;
  if (halves & HALF_SEND) {
    seq = combine_send(call, first);
    blocks_count(call, 1, seq);
  } else {
    seq = *reinterpret_cast<const uint32_t*>(call.seq);
  }
  if (halves & HALF_RECV) combine_recv<T, 16 / sizeof(T)>(call, seq);
}

}  // namespace mt
