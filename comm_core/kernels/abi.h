// What the host and the kernels share: structs of plain words, the same in library.py. Field meanings stand here once.
#pragma once

#include <cstdint>

constexpr int MT_MAX_RANKS = 64;      // of one scale-up domain
constexpr int MT_MAX_TOPK = 32;       // one lane of a warp each
constexpr int MT_TOKENS = 256;        // tokens that a block of the layout kernel handles at a time
constexpr int MT_READY = 4096;        // chunks of rows from a rank to another that have a flag
constexpr int MT_READY_ROWS = 2;      // rows of a chunk, which one warp lays down; more where there would be more chunks
constexpr int MT_HEADER_WORDS = 128;  // 16 words, then one count a rank
constexpr int MT_DONE_SLOTS = 256;    // blocks of a low-latency kernel, at most
constexpr int MT_BLOCKS_EXPERTS = 256;  // experts of a rank in low-latency calls, at most
constexpr int MT_NEAR_RANKS = 8;      // up to so many, segments of the others travel with a low-latency call
constexpr int MT_SEGMENTS = 4;        // control, ring, pool, blocks

// Words of a header: what a rank tells every other at the start of an operation.
enum MtHeader : int {
  MT_SEQ = 0,         // number of the operation, written last
  MT_HASH = 1,        // of the settings of the call
  MT_STATUS = 2,      // MtStatus of this rank
  MT_NUM_TOKENS = 3,
  MT_X = 4,           // where rows, weights and scales (or lists) of this rank begin: two words and a segment each
  MT_WEIGHTS = 7,
  MT_SCALES = 10,
  MT_LENT = 13,       // 1: the rows are the caller's own memory, so the operation ends when all have read them
  MT_COUNTS = 16,     // rows this rank sends to each
};

enum MtStatus : uint32_t {
  MT_OK = 0,
  MT_BAD_ID = 1,      // an id out of range or twice in a row: the lane counts as masked
  MT_REFUSED = 2,     // the call is wrong on this rank, nothing moves
};

// Words of the record by which the host learns counts, in mapped host memory.
enum MtRecord : int {
  MT_REC_SEQ = 0,     // written last
  MT_REC_STATUS = 1,  // of all ranks, or-ed
  MT_REC_DIFFERENT = 2,  // 1: not all hashes are equal
  MT_REC_ROWS = 3,
  MT_REC_EXPANDED = 4,
  MT_REC_TABLES = 8,  // tokens of each rank, matrix[src][dst], then rows of each local expert
};

// Words of the fault record in mapped host memory, set once: who waited for whom in vain.
enum MtFault : int {
  MT_FAULT_SET = 0,
  MT_FAULT_PEER = 1,
  MT_FAULT_NUMBER = 2,     // of the call, as the host counts them
  MT_FAULT_DIFFERENT = 3,  // number of the first call whose settings differ between ranks, or that a rank refused
};

// Offsets into the control segment of a rank.
constexpr uint64_t MT_AT_HEADERS = 0;  // [2][MT_MAX_RANKS][MT_HEADER_WORDS] words, the second index is the writer
constexpr uint64_t MT_AT_DONE = 2ull * MT_MAX_RANKS * MT_HEADER_WORDS * 4;  // [MT_MAX_RANKS] words, by writer
constexpr uint64_t MT_AT_STATE = MT_AT_DONE + MT_MAX_RANKS * 4;             // MtState, local
constexpr uint64_t MT_AT_READY = MT_AT_STATE + 4096 + 8ull * MT_SEGMENTS * MT_MAX_RANKS;  // [MT_MAX_RANKS][MT_READY], by writer
constexpr uint64_t MT_CONTROL_BYTES = MT_AT_READY + 4ull * MT_MAX_RANKS * MT_READY;

// Local device memory of a channel.
struct MtState {
  uint32_t seq;      // operations done
  uint32_t ticket;   // blocks of the running kernel that are done
  uint32_t aborted;  // 1: a wait timed out, nothing is waited for any more
  uint32_t status;   // of the layout under way
  uint32_t differed; // 1: the fault record names a call that differs
  uint32_t blocks_seq[2];  // low-latency dispatches and combines begun
  uint32_t left;     // blocks of the layout under way that have ended
  uint32_t rows_to[MT_MAX_RANKS];  // rows of the layout under way to each rank
};

// The channel as kernels see it.
struct MtChannel {
  uint64_t state;             // MtState*
  uint64_t peers;             // char* [MT_SEGMENTS][MT_MAX_RANKS]
  uint64_t fault;             // uint32_t*, mapped host memory
  int64_t timeout_ticks;
  int32_t rank;
  int32_t num_ranks;
  uint32_t number;            // of the call, as the host counts them
  uint32_t padding;
};

// A place in symmetric memory of this rank.
struct MtPlace {
  uint64_t offset;
  uint32_t segment;
  uint32_t padding;
};

// The layout of one handle. Pointers to device memory; n: received rows, R ranks, L local experts, K lanes.
struct MtLayout {
  uint64_t topk_idx;      // int64 [num_tokens, K], own ids
  uint64_t lane_row;      // int32 [num_tokens, K], position among the rows sent to the rank of the lane, -1 masked
  uint64_t last_lanes;    // uint32 [num_tokens], lanes that are the last of the token on their rank
  uint64_t matrix;        // int32 [R, R], rows from source to destination
  uint64_t row_base;      // int32 [R + 1], first received row of each source; n
  uint64_t recv_token;    // int32 [room], token number on its source
  uint64_t local_idx;     // int32 [room, K], local expert or -1
  uint64_t expand_row;    // int32 [room, K], expanded row or -1
  uint64_t expert_counts; // int32 [L]
  uint64_t expert_starts; // int32 [L + 1]; the last is the number of expanded rows
  int32_t num_tokens;
  int32_t num_topk;
  int32_t num_local;
  int32_t alignment;
  int32_t expand;
  int32_t room;           // received rows that there is room for
};

struct MtLayoutCall {
  MtChannel channel;
  MtLayout layout;
  MtPlace ids;            // uint16 [num_tokens, K rounded up to 8 or 32], ids of this rank's lanes, 0xffff masked
  MtPlace tables;         // uint16 [R, table_blocks, L + 1 rounded up to 8], by writer: counts of its blocks of tokens for
                          // each expert of this rank, and for the rank. `ids` and this lie at the same places on all ranks
  uint64_t given_idx;     // int64 [num_tokens, K]; topk_idx is filled from it where it is another
  uint64_t own_counts;    // int32 [blocks of num_tokens, R], scratch
  uint64_t record;        // uint32_t*, mapped host memory
  uint32_t hash;
  uint32_t status;
  int32_t num_blocks;     // of the receiving side
  int32_t table_blocks;   // blocks of tokens that a rank can have
};

struct MtDispatchCall {
  MtChannel channel;
  MtLayout layout;
  MtPlace x;
  MtPlace weights;
  MtPlace scales;
  uint64_t out_x;
  uint64_t out_idx;       // int64 or 0
  uint64_t out_weights;   // or 0
  uint64_t out_scales;    // or 0
  int64_t scale_row_stride;  // of out_scales, in words
  int64_t scale_col_stride;
  int64_t num_out_rows;   // rows of the outputs
  double ticks_per_byte;  // pace of remote bytes, 0 without
  uint32_t hash;
  uint32_t lent;
  int32_t row_bytes;
  int32_t scale_words;    // words a row, 0 without scales
  int32_t weight_words;   // words a weight, 1 or 2
  int32_t num_sms;
  int32_t threads;
  int32_t clears_rest;    // 1: rows of the outputs behind the real ones are filled
};

struct MtCombineCall {
  MtChannel channel;
  MtLayout layout;
  MtPlace x;              // rows for the other ranks
  MtPlace weights;        // [n, K]
  uint64_t local_x;       // rows for this rank
  uint64_t out_x;
  uint64_t out_weights;   // or 0
  uint64_t bias0;         // or 0
  uint64_t bias1;
  double ticks_per_byte;
  uint32_t hash;
  uint32_t lent;
  int32_t hidden;
  int32_t dtype;          // 0 bf16, 1 fp16, 2 fp32, 3 fp64
  int32_t weight_words;
  int32_t num_sms;
  int32_t threads;
  int32_t padding;
};

// Rows that a combine lays down for the ranks of their tokens: expanded rows added up, or plain ones as they are.
struct MtReduceCall {
  MtLayout layout;
  uint64_t x;
  uint64_t rows;          // [n, hidden]
  uint64_t weights;       // expanded [E] or plain [n, K], or 0
  uint64_t lane_weights;  // [n, K]
  int32_t hidden;
  int32_t dtype;
  int32_t weight_words;
  int32_t num_ranks;
  int32_t num_sms;
};

// Offsets into the blocks segment of a rank, which the low-latency calls use: two places in turn, p = number % 2. Tagged
// words hold the low bits of the number above their value.
struct MtBlocksPlaces {
  uint64_t headers;   // [2 kinds][2][MT_MAX_RANKS][MT_HEADER_WORDS] tagged words: kind 0 dispatch, 1 combine
  uint64_t done;      // [2 kinds][2][MT_MAX_RANKS][MT_DONE_SLOTS] words, by writer: number of the last call its block has read
  uint64_t counts;    // [2][R][L] tagged, by writer: its tokens for each expert of this rank
  uint64_t begins;    // [2][R][L] tagged, by writer: row of the first answer of each of its experts to this rank
  uint64_t flags;     // [2][R][max_tokens] tagged, by writer: 1 its token is in `rows`, 0 it has no expert here
  uint64_t laid;      // [2][R * L][max_tokens] words, by expert and position: number of the call whose answer is laid down
  uint64_t rows;      // [2][R][max_tokens] rows, by writer, scales behind each, at the end the record of K words
  uint64_t answers;   // [2][answer rows] rows of this rank's experts
  uint64_t row_bytes; // of `rows`, scales and record included
  uint64_t answer_rows;
};

// A low-latency dispatch or combine. T tokens of this rank, K lanes, L local experts, `height` rows a block.
struct MtBlocksCall {
  MtChannel channel;
  MtBlocksPlaces places;
  uint64_t near[2 * MT_NEAR_RANKS];  // char*, pool and blocks segments by rank, where there are few ranks
  MtPlace lent;           // combine: x itself, where it lies in symmetric memory
  uint64_t x;             // dispatch: [T, hidden]; combine: [L, height, hidden]
  uint64_t topk_idx;      // int64 [T, K]
  uint64_t topk_weights;  // combine: float [T, K]
  uint64_t positions;     // int32 [T, K], place among the tokens of this rank for the lane's expert
  uint64_t seq;           // uint32, number of the call, from its first half for its second where that is another launch
  uint64_t out_x;         // dispatch: [L, height, hidden]; combine: [T, hidden]
  uint64_t out_scales;
  uint64_t src_info;      // int32 [L, height]
  uint64_t ranges;        // int64 [L, R]
  uint64_t counts;        // int32 [L]
  uint64_t stats;         // int32 [L] or 0
  int64_t scale_expert_stride;  // of out_scales, in words; the stride of rows is 1
  int64_t scale_col_stride;
  uint32_t hash;
  uint32_t status;
  uint32_t is_lent;
  int32_t num_tokens;
  int32_t num_topk;
  int32_t num_local;
  int32_t max_tokens;
  int32_t height;
  int32_t hidden;
  int32_t dtype;          // 0 bf16, 1 fp16, 2 fp32
  int32_t fp8;            // 0 none, 1 fp32 scales, 2 scales rounded to powers of two, 3 packed exponents
  int32_t scale_words;
};

// Words of regions that one kernel raises, or waits for.
struct MtRegionWords {
  MtChannel channel;
  uint64_t words[MT_MAX_RANKS];  // uint32_t*
  uint32_t values[MT_MAX_RANKS];
  int32_t peers[MT_MAX_RANKS];   // whose they are
  int32_t count;
  int32_t heed;                  // 1: not to wait any more where a rank refuses a call
};

// out[i] = row row[i] of the table of rank owner[i].
struct MtRegionRead {
  uint64_t tables[MT_MAX_RANKS];  // char* [num_rows, width]
  uint64_t owner;                 // int64 [count]
  uint64_t row;                   // int64 [count]
  uint64_t out;                   // char* [count, width]
  int64_t count;
  int64_t num_rows;
  int32_t width;                  // bytes
  int32_t num_ranks;
  int32_t num_sms;
  int32_t padding;
};

struct MtBarrierCall {
  MtChannel channel;
  uint32_t hash;
  uint32_t status;
};
