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
  for (int64_t base = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; base < count; base += stride * STEPS) {
    int4 values[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
      if (base + s * stride < count) values[s] = from[base + s * stride];
#pragma unroll
    for (int s = 0; s < STEPS; ++s)
      if (base + s * stride < count) to[base + s * stride] = values[s];
  }
}

__global__ void delay_impl(int64_t count) {
  const long long start = ticks();
  while (ticks() - start < count) {}
}

}  // namespace mt
