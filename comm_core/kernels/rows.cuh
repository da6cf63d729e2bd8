// Moving rows: one warp a row, 16 bytes a lane and step where rows are that wide, several steps in flight.
#pragma once

#include "sync.cuh"

namespace mt {

// Copies a row from one place to one or several.
//
// VEC: what a lane moves at a time. STEPS: loads in flight a lane. `targets(i)` gives the i-th target, `num_targets` of them.
template <typename VEC, int STEPS, typename Targets>
__device__ __forceinline__ void copy_row(const char* from, int row_bytes, int num_targets, const Targets& targets) {
  const int count = row_bytes / static_cast<int>(sizeof(VEC));
  for (int base = 0; base < count; base += WARP * STEPS) {
    VEC values[STEPS];
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
      const int at = base + s * WARP + lane_id();
      if (at < count) values[s] = reinterpret_cast<const VEC*>(from)[at];
    }
    for (int target = 0; target < num_targets; ++target) {
      VEC* to = reinterpret_cast<VEC*>(targets(target));
#pragma unroll
      for (int s = 0; s < STEPS; ++s) {
        const int at = base + s * WARP + lane_id();
        if (at < count) to[at] = values[s];
      }
    }
  }
}

struct OneTarget {
  char* to;
  __device__ __forceinline__ char* operator()(int) const { return to; }
};

template <typename VEC>
__device__ __forceinline__ void clear_row(char* to, int row_bytes) {
  const VEC zero = {};
  for (int at = lane_id(); at < row_bytes / static_cast<int>(sizeof(VEC)); at += WARP) reinterpret_cast<VEC*>(to)[at] = zero;
}

}  // namespace mt
