// What measurements need: the plainest way to move bytes between two places, as a ceiling for the operations, and a delay
// behind which the ranks start together.
#pragma once

#include "platform.h"

namespace mt {

// Copies 16 bytes a thread and step, STEPS of them in flight, as the rows of the operations go. Either place may be
// another rank's: `to` for stores, `from` for reads.
template <int STEPS>
__global__ void __launch_bounds__(1024, 1) ceiling_impl(int4* to, const int4* from, int64_t count) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t at = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
  for (; at + (STEPS - 1) * stride < count; at += STEPS * stride) {
    int4 values[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) values[s] = from[at + s * stride];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) to[at + s * stride] = values[s];
  }
  for (; at < count; at += stride) to[at] = from[at];
}

__global__ void delay_impl(int64_t count) {
  const long long start = ticks();
  while (ticks() - start < count) {}
}

}  // namespace mt
