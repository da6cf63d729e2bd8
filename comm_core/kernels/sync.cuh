// Flags, bounded waits, and the exchange of headers that begins every operation.
//
// An operation has a number, counted in device memory, so that a replayed graph waits for fresh headers. Headers have two
// places in turn. Who has all headers of operation n + 1 knows that all ranks are done with operation n, as each writes
// its header behind its earlier kernels; so what was laid down for n may be overwritten for n + 2 without another flag.
#pragma once

#include "abi.h"
#include "platform.h"

namespace mt {

#if defined(MT_MOE_CHAOS)
// Delays that differ by block, thread and time, to bring races out.
__device__ __forceinline__ void chaos() {
  uint32_t state = static_cast<uint32_t>(ticks()) ^ (blockIdx.x * 2654435761u) ^ (threadIdx.x * 40503u) ^ (MT_MOE_CHAOS * 97u);
  state ^= state << 13; state ^= state >> 17; state ^= state << 5;
  if (state % 4 != 0) return;
  const long long end = ticks() + state % 20000;
  while (ticks() < end) {}
}
#else
__device__ __forceinline__ void chaos() {}
#endif

__device__ __forceinline__ MtState* state_of(const MtChannel& channel) { return reinterpret_cast<MtState*>(channel.state); }

__device__ __forceinline__ char* segment(const MtChannel& channel, uint32_t which, int rank) {
  return reinterpret_cast<char**>(channel.peers)[which * MT_MAX_RANKS + rank];
}

// The header that `writer` writes into the memory of `reader`.
__device__ __forceinline__ volatile uint32_t* header(const MtChannel& channel, uint32_t seq, int reader, int writer) {
  const uint64_t index = (seq % 2) * MT_MAX_RANKS + writer;
  return reinterpret_cast<volatile uint32_t*>(segment(channel, 0, reader) + MT_AT_HEADERS + index * MT_HEADER_WORDS * 4);
}

__device__ __forceinline__ void raise_flag(volatile uint32_t* flag, uint32_t value) {
  chaos();
  store_flag(flag, value);
}

// Tells the host whom a wait was for that ended in vain, unless an earlier one has; nothing is waited for any more.
__device__ __forceinline__ void note_timeout(const MtChannel& channel, int peer) {
  volatile uint32_t* fault = reinterpret_cast<volatile uint32_t*>(channel.fault);
  if (atomicCAS(&state_of(channel)->aborted, 0u, 1u) != 0) return;
  fault[MT_FAULT_PEER] = peer;
  fault[MT_FAULT_NUMBER] = channel.number;
  raise_flag(&fault[MT_FAULT_SET], 1);
}

// Waits until the flag has come to `value`; false where a wait of this channel has timed out.
__device__ __forceinline__ bool wait_flag(const MtChannel& channel, const volatile uint32_t* flag, uint32_t value, int peer) {
  volatile uint32_t* aborted = &state_of(channel)->aborted;
  const long long start = ticks();
  chaos();
  while (static_cast<int32_t>(*flag - value) < 0) {
    if (*aborted) return false;
    if (ticks() - start > channel.timeout_ticks) {
      volatile uint32_t* fault = reinterpret_cast<volatile uint32_t*>(channel.fault);
      if (atomicCAS(&state_of(channel)->aborted, 0u, 1u) == 0) {
        fault[MT_FAULT_PEER] = peer;
        fault[MT_FAULT_NUMBER] = channel.number;
        raise_flag(&fault[MT_FAULT_SET], 1);
      }
      return false;
    }
  }
  fence_system();
  return *aborted == 0;
}

__device__ __forceinline__ void put_place(volatile uint32_t* words, const MtPlace& place) {
  words[0] = static_cast<uint32_t>(place.offset);
  words[1] = static_cast<uint32_t>(place.offset >> 32);
  words[2] = place.segment;
}

// Address of what `writer` announced in its header.
__device__ __forceinline__ char* announced(const MtChannel& channel, const volatile uint32_t* words, int writer) {
  return segment(channel, words[2], writer) + (words[0] | static_cast<uint64_t>(words[1]) << 32);
}

// Waits, all threads of the block, for the headers of all ranks; false where one did not come.
__device__ __forceinline__ bool wait_headers(const MtChannel& channel, uint32_t seq) {
  bool came = true;
  for (int r = threadIdx.x; r < channel.num_ranks; r += blockDim.x)
    came = wait_flag(channel, header(channel, seq, channel.rank, r) + MT_SEQ, seq, r) && came;
  return __syncthreads_and(came);
}

// True where a rank refused its call or all settings are not the same; then nothing may move, on any rank.
__device__ __forceinline__ bool headers_differ(const MtChannel& channel, uint32_t seq) {
  bool differ = false;
  const uint32_t hash = header(channel, seq, channel.rank, channel.rank)[MT_HASH];
  for (int r = threadIdx.x; r < channel.num_ranks; r += blockDim.x) {
    const volatile uint32_t* words = header(channel, seq, channel.rank, r);
    differ = differ || words[MT_HASH] != hash || (words[MT_STATUS] & MT_REFUSED);
  }
  return __syncthreads_or(differ);
}

// The last block of a kernel to come here: true in all its threads. What the others wrote is visible to it.
__device__ __forceinline__ bool is_last_block(const MtChannel& channel) {
  __shared__ bool last;
  fence_system();
  __syncthreads();
  if (threadIdx.x == 0) {
    last = atomicAdd(&state_of(channel)->ticket, 1u) == gridDim.x - 1;
    fence_device();
  }
  __syncthreads();
  if (last && threadIdx.x == 0) state_of(channel)->ticket = 0;
  return last;
}

// Writes the header of this rank into the memory of rank `reader`; one thread.
__device__ __forceinline__ void send_header(const MtChannel& channel, uint32_t seq, int reader, uint32_t hash, uint32_t status,
                                            const MtPlace& x, const MtPlace& weights, const MtPlace& scales, uint32_t lent) {
  volatile uint32_t* words = header(channel, seq, reader, channel.rank);
  words[MT_HASH] = hash;
  words[MT_STATUS] = status;
  words[MT_LENT] = lent;
  put_place(words + MT_X, x);
  put_place(words + MT_WEIGHTS, weights);
  put_place(words + MT_SCALES, scales);
  raise_flag(words + MT_SEQ, seq);
}

// Tells the host which call went wrong first; one thread.
__device__ __forceinline__ void note_difference(const MtChannel& channel) {
  if (atomicCAS(&state_of(channel)->differed, 0u, 1u) != 0) return;
  raise_flag(&reinterpret_cast<volatile uint32_t*>(channel.fault)[MT_FAULT_DIFFERENT], channel.number);
}

// Begins an operation that moves rows, in every block from the first on: headers go out and come in. False where nothing may
// move.
__device__ __forceinline__ bool begin(const MtChannel& channel, uint32_t seq, uint32_t hash, uint32_t status, const MtPlace& x,
                                      const MtPlace& weights, const MtPlace& scales, uint32_t lent, int first_block) {
  if (static_cast<int>(blockIdx.x) == first_block)
    for (int r = threadIdx.x; r < channel.num_ranks; r += blockDim.x)
      send_header(channel, seq, r, hash, status, x, weights, scales, lent);
  if (!wait_headers(channel, seq)) return false;
  if (!headers_differ(channel, seq)) return true;
  if (static_cast<int>(blockIdx.x) == first_block && threadIdx.x == 0) note_difference(channel);
  return false;
}

// Ends an operation, in every block: who lent its own memory waits until all have read it.
__device__ __forceinline__ void end(const MtChannel& channel, uint32_t seq, bool began, bool lent) {
  if (!is_last_block(channel)) return;
  for (int r = threadIdx.x; began && r < channel.num_ranks; r += blockDim.x) {
    const bool peer_lent = header(channel, seq, channel.rank, r)[MT_LENT];
    volatile uint32_t* done = reinterpret_cast<volatile uint32_t*>(segment(channel, 0, r) + MT_AT_DONE);
    if (peer_lent) raise_flag(done + channel.rank, seq);
    volatile uint32_t* mine = reinterpret_cast<volatile uint32_t*>(segment(channel, 0, channel.rank) + MT_AT_DONE);
    if (lent) wait_flag(channel, mine + r, seq, r);
  }
  __syncthreads();
  if (threadIdx.x == 0) state_of(channel)->seq = seq;
}

__device__ __forceinline__ uint32_t next_seq(const MtChannel& channel) {
  return *reinterpret_cast<volatile uint32_t*>(&state_of(channel)->seq) + 1;
}

// Waits until `bytes` more remote bytes may have passed at the pace of a call that studies slower links.
struct Pace {
  long long start;
  double allowed;
  __device__ __forceinline__ void pass(double ticks_per_byte, int bytes) {
    if (ticks_per_byte == 0) return;
    allowed += ticks_per_byte * bytes;
    while (static_cast<double>(ticks() - start) < allowed) {}
  }
};

}  // namespace mt
