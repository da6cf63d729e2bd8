// The only file that names CUDA or MUSA. What the kernels may use is what stands here: plain loads and stores, volatile
// 32-bit flags between system fences, 32-bit atomics, full-mask warp votes and shuffles, block barriers.
//
// CUDA: run on H200. MUSA: prepared; compiled through a shim, never by mcc, never run.
#pragma once

#include <cstddef>
#include <cstdint>

#if defined(MT_MOE_MUSA)
#include <musa_bf16.h>
#include <musa_fp16.h>
#include <musa_runtime.h>
#define MT_RT(name) musa##name
using mt_bf16 = __mt_bfloat16;
using mt_half = __half;
#else
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#define MT_RT(name) cuda##name
using mt_bf16 = __nv_bfloat16;
using mt_half = __half;
#endif

namespace mt {

using Stream = MT_RT(Stream_t);

// Lanes of a warp: 32 on every CUDA device and on MUSA's mp_31; older MUSA devices have 128 and are not supported.
constexpr int WARP = 32;
constexpr uint32_t ALL_LANES = 0xffffffffu;
static_assert(WARP == 32, "lane masks are 32 bits wide");

__device__ __forceinline__ int lane_id() { return static_cast<int>(threadIdx.x % WARP); }
__device__ __forceinline__ int warp_id() { return static_cast<int>(threadIdx.x / WARP); }

// What was written before is seen, by the other devices too, before what is written after.
__device__ __forceinline__ void fence_system() { __threadfence_system(); }

// The same for the threads of this device, between blocks. On MUSA the weaker fence is said to be too weak.
__device__ __forceinline__ void fence_device() {
#if defined(MT_MOE_MUSA) || defined(MT_MOE_PORTABLE)
  __threadfence_system();
#else
  __threadfence();
#endif
}

// Stores a flag that others wait for, behind everything written before.
__device__ __forceinline__ void store_flag(volatile uint32_t* flag, uint32_t value) {
  __threadfence_system();
  *flag = value;
#if defined(MT_MOE_MUSA) || defined(MT_MOE_PORTABLE)
  __threadfence_system();
#endif
}

// True where blocks of a kernel begin in the order of their numbers, so that a block may wait for a lower one.
#if defined(MT_MOE_MUSA) || defined(MT_MOE_PORTABLE)
constexpr bool BLOCKS_BEGIN_IN_ORDER = false;
#else
constexpr bool BLOCKS_BEGIN_IN_ORDER = true;
#endif

// Stores a word that others wait for and that nothing else goes with: it says all by itself.
__device__ __forceinline__ void store_alone(volatile uint32_t* word, uint32_t value) {
  *word = value;
#if defined(MT_MOE_MUSA) || defined(MT_MOE_PORTABLE)
  __threadfence_system();
#endif
}

// All threads of a block: a system fence of any of them is for what all have written before this.
__device__ __forceinline__ void done_writing() {
#if defined(MT_MOE_MUSA) || defined(MT_MOE_PORTABLE)
  __threadfence_system();
#endif
  __syncthreads();
}

// Ticks of a timer of the device, for timeouts and pacing.
__device__ __forceinline__ long long ticks() { return static_cast<long long>(clock64()); }

// What elements are added up in: fp32, and fp64 for fp64.
template <typename T>
struct Wide {
  using Type = float;
};
template <>
struct Wide<double> {
  using Type = double;
};

__device__ __forceinline__ double widen(double value) { return value; }
__device__ __forceinline__ float widen(float value) { return value; }
__device__ __forceinline__ float widen(mt_bf16 value) {
  uint16_t bits;
  __builtin_memcpy(&bits, &value, 2);
  return __uint_as_float(static_cast<uint32_t>(bits) << 16);
}
__device__ __forceinline__ float widen(mt_half value) { return __half2float(value); }

template <typename T>
__device__ __forceinline__ T narrow(typename Wide<T>::Type value);
template <>
__device__ __forceinline__ double narrow<double>(double value) { return value; }
template <>
__device__ __forceinline__ float narrow<float>(float value) { return value; }
template <>
__device__ __forceinline__ mt_bf16 narrow<mt_bf16>(float value) { return __float2bfloat16_rn(value); }
template <>
__device__ __forceinline__ mt_half narrow<mt_half>(float value) { return __float2half_rn(value); }

}  // namespace mt
