// Messages and reads of regions: memory that each rank owns a part of. Who lays down what, and where: gpu_region.py.
//
// The data of a message are moved by the copy engine, behind the work of a stream. These kernels of one block come behind
// and in front of it: they raise a word in the receiver's part and wait for words in the own part. Numbers of words only
// grow, and each word has one writer.
#pragma once

#include "rows.cuh"

namespace mt {

// True where a rank has refused a call that this rank has not come to yet. Looks at one rank after the other.
__device__ __forceinline__ bool has_refused(const MtChannel& channel, int rank) {
  const uint32_t done = *reinterpret_cast<volatile uint32_t*>(&state_of(channel)->seq);
  for (uint32_t turn = 0; turn < 2; ++turn) {
    const volatile uint32_t* words = header(channel, turn, channel.rank, rank);
    if (static_cast<int32_t>(words[MT_SEQ] - done) <= 0) continue;
    fence_system();
    if (words[MT_STATUS] & MT_REFUSED) return true;
  }
  return false;
}

// One thread a word. A channel that has given up tells nobody that something is there.
__global__ void region_raise_impl(const MtRegionWords call) {
  const int i = threadIdx.x;
  if (i >= call.count || *reinterpret_cast<volatile uint32_t*>(&state_of(call.channel)->aborted)) return;
  raise_flag(reinterpret_cast<volatile uint32_t*>(call.words[i]), call.values[i]);
}

// One thread a word. With `heed` it waits in vain where a rank refuses a call: then what others owe here may not come.
__global__ void region_await_impl(const MtRegionWords call) {
  const MtChannel& channel = call.channel;
  const int i = threadIdx.x;
  if (i >= call.count) return;
  const volatile uint32_t* word = reinterpret_cast<const volatile uint32_t*>(call.words[i]);
  const volatile uint32_t* aborted = &state_of(channel)->aborted;
  const long long start = ticks();
  int rank = call.peers[i];
  while (call.heed && static_cast<int32_t>(*word - call.values[i]) < 0 && ticks() - start < channel.timeout_ticks) {
    if (*aborted) return;
    // Another rank than the awaited one may be what keeps it; it may also have been refused later, so that is not at once.
    const bool awaited = rank == call.peers[i];
    if ((awaited || ticks() - start > channel.timeout_ticks / 64) && has_refused(channel, rank)) {
      if (static_cast<int32_t>(*word - call.values[i]) >= 0) break;  // it came just before
      note_difference(channel);
      return;
    }
    rank = rank + 1 < channel.num_ranks ? rank + 1 : 0;
  }
  // What is left of the time, for those who heed nothing: all of it.
  MtChannel rest = channel;
  if (call.heed) rest.timeout_ticks -= ticks() - start;
  wait_flag(rest, word, call.values[i], call.peers[i]);
}

// Copies a row for each (owner, row), one warp each. Numbers out of range read some row.
template <typename VEC, int STEPS>
__global__ void __launch_bounds__(512, 1) region_read_impl(const MtRegionRead call) {
  const int64_t* owners = reinterpret_cast<const int64_t*>(call.owner);
  const int64_t* numbers = reinterpret_cast<const int64_t*>(call.row);
  const int64_t warps = static_cast<int64_t>(gridDim.x) * (blockDim.x / WARP);
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * (blockDim.x / WARP) + warp_id(); i < call.count; i += warps) {
    const int64_t owner = owners[i] < 0 ? 0 : owners[i] < call.num_ranks ? owners[i] : call.num_ranks - 1;
    const int64_t row = numbers[i] < 0 ? 0 : numbers[i] < call.num_rows ? numbers[i] : call.num_rows - 1;
    const char* from = reinterpret_cast<const char*>(call.tables[owner]) + row * call.width;
    copy_row<VEC, STEPS>(from, call.width, 1, OneTarget{reinterpret_cast<char*>(call.out) + i * call.width});
  }
}

// Copies bytes by loads and stores, where a device's copy engine is slower than a few multiprocessors.
template <typename VEC, int STEPS>
__global__ void __launch_bounds__(1024, 1) region_copy_impl(VEC* to, const VEC* from, int64_t count) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; base < count; base += stride * STEPS) {
    VEC values[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
      if (base + s * stride < count) values[s] = from[base + s * stride];
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
      if (base + s * stride < count) to[base + s * stride] = values[s];
  }
}

}  // namespace mt
