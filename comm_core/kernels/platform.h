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
__device__ __forceinline__ void fence_system() {
#if defined(MT_MOE_MUSA) || defined(MT_MOE_PORTABLE)
  __threadfence_system();
#else
  // Release and acquire are all that flags need; the runtime's own fence is sequentially consistent and slower.
  asm volatile("fence.acq_rel.sys;" ::: "memory");
#endif
}

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
  fence_system();
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

// Bulk copies between global and shared memory: many kilobytes in flight without a register. CUDA devices of 9.0 and later;
// everything that uses them has a twin by plain loads and stores.
#if !defined(MT_MOE_MUSA) && !defined(MT_MOE_PORTABLE)
#define MT_MOE_BULK 1

namespace mt {

constexpr int BULK_SHARED_BYTES = 220 * 1024;  // of a block, beside what kernels declare

// Counts the bytes of one copy into shared memory; it is used again and again, by turns 0 and 1.
using BulkFlag = unsigned long long;

inline bool has_bulk() {
  int device = 0, major = 0;
  if (cudaGetDevice(&device) != cudaSuccess) return false;
  if (cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device) != cudaSuccess) return false;
  return major >= 9;
}

template <typename Kernel>
inline void allow_shared(Kernel kernel, int bytes) {
  cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
}

// Defined where kernels are compiled for a device that has them; for others they are empty and never launched.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
#define MT_MOE_BULK_HERE 1
#endif

#if defined(MT_MOE_BULK_HERE)
__device__ __forceinline__ uint32_t in_shared(const void* pointer) { return static_cast<uint32_t>(__cvta_generic_to_shared(pointer)); }

__device__ __forceinline__ void bulk_open(BulkFlag* flag) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(in_shared(flag)) : "memory");
}

// Between ordinary accesses and bulk copies of the same memory, in either order.
__device__ __forceinline__ void bulk_fence() { asm volatile("fence.proxy.async;" ::: "memory"); }

// A flag comes when as many bytes have arrived as it expects; one thread says how many, before or while they are copied.
__device__ __forceinline__ void bulk_expect(BulkFlag* flag, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(in_shared(flag)), "r"(bytes) : "memory");
}

// Starts a copy into shared memory. Bytes and addresses are multiples of 16.
__device__ __forceinline__ void bulk_copy(void* to, const void* from, int bytes, BulkFlag* flag) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(in_shared(to)), "l"(from),
               "r"(bytes), "r"(in_shared(flag))
               : "memory");
}

__device__ __forceinline__ void bulk_await(BulkFlag* flag, uint32_t turn) {
  uint32_t done = 0;
  while (!done)
    asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                 : "=r"(done)
                 : "r"(in_shared(flag)), "r"(turn)
                 : "memory");
}

// Starts a copy out of shared memory; each thread waits for its own, by groups.
__device__ __forceinline__ void bulk_store(void* to, const void* from, int bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to), "r"(in_shared(from)), "r"(bytes) : "memory");
}
__device__ __forceinline__ void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
// Shared memory of all groups but the last has been read.
__device__ __forceinline__ void bulk_read_but_one() { asm volatile("cp.async.bulk.wait_group.read 1;" ::: "memory"); }
__device__ __forceinline__ void bulk_written() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }
#else
__device__ __forceinline__ void bulk_open(BulkFlag*) {}
__device__ __forceinline__ void bulk_fence() {}
__device__ __forceinline__ void bulk_expect(BulkFlag*, int) {}
__device__ __forceinline__ void bulk_copy(void*, const void*, int, BulkFlag*) {}
__device__ __forceinline__ void bulk_await(BulkFlag*, uint32_t) {}
__device__ __forceinline__ void bulk_store(void*, const void*, int) {}
__device__ __forceinline__ void bulk_commit() {}
__device__ __forceinline__ void bulk_read_but_one() {}
__device__ __forceinline__ void bulk_written() {}
#endif

}  // namespace mt
#endif
