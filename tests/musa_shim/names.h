// Every name of MUSA that the kernels may use, declared as public MUSA code uses it. A name gets in here with the
// repository in which it was seen: torch_musa, mutlass, muAlg, muThrust, onnxruntime-musa, tensorflow_musa_extension,
// MT-DeepEP, MT-flashMLA (all of Moore Threads), Mooncake, FlagCX. Parameters are CUDA's, which these repositories rely on.
//
// Left out on purpose, though they exist: __threadfence (tilelang_musa: only the system fence is safe), __trap (Mooncake:
// kernels that hold one fail on SDK 4.3), 64-bit and scoped atomics, shuffles of unsigned or 16-bit types, arithmetic of
// bf16 and fp16.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>

// The language. Seen in: torch_musa, MT-DeepEP, mutlass, MT-flashMLA.
#define __global__
#define __device__
#define __host__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) alignas(bytes)

struct uint3 { unsigned x, y, z; };
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};
extern const uint3 threadIdx, blockIdx;
extern const dim3 blockDim, gridDim;

// Vectors. Seen in: torch_musa, mutlass, Mooncake. No volatile form: Mooncake.
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
int4 make_int4(int x, int y, int z, int w);                 // Mooncake, tensorflow_musa_extension
uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w);  // tilelang_musa
float4 make_float4(float x, float y, float z, float w);     // tilelang_musa, mate

// Fences, barriers, timer.
void __threadfence_system();           // MT-DeepEP, Mooncake, FlagCX
void __syncthreads();                  // torch_musa, MT-DeepEP, mutlass
int __syncthreads_and(int predicate);  // muAlg
int __syncthreads_or(int predicate);   // muAlg
void __syncwarp(unsigned mask = 0xffffffffu);  // MT-DeepEP, MT-flashMLA, Mooncake
long long clock64();                   // torch_musa, MT-DeepEP, Mooncake

// Votes and shuffles. Seen in: muAlg, torch_musa, MT-DeepEP, Mooncake, tensorflow_musa_extension.
unsigned __ballot_sync(unsigned mask, int predicate);
int __any_sync(unsigned mask, int predicate);
int __all_sync(unsigned mask, int predicate);
#define MT_SHUFFLES(type)                                              \
  type __shfl_sync(unsigned mask, type value, int lane);               \
  type __shfl_up_sync(unsigned mask, type value, unsigned distance);   \
  type __shfl_down_sync(unsigned mask, type value, unsigned distance); \
  type __shfl_xor_sync(unsigned mask, type value, int lanes);
MT_SHUFFLES(int)
MT_SHUFFLES(long)
MT_SHUFFLES(long long)
MT_SHUFFLES(float)
MT_SHUFFLES(double)
#undef MT_SHUFFLES

// Bits. Seen in: muAlg, muThrust, mutlass, Mooncake.
int __popc(unsigned value);
int __ffs(int value);
int __clz(int value);
unsigned __float_as_uint(float value);
float __uint_as_float(unsigned value);
int __float_as_int(float value);
float __int_as_float(int value);

// 32-bit atomics. atomicExch was seen nowhere; atomicCAS does what it does for a flag.
int atomicAdd(int* address, int value);                  // torch_musa, MT-DeepEP, Mooncake
unsigned atomicAdd(unsigned* address, unsigned value);   // onnxruntime-musa, tensorflow_musa_extension
float atomicAdd(float* address, float value);            // torch_musa
int atomicCAS(int* address, int compare, int value);     // torch_musa, mutlass
unsigned atomicCAS(unsigned* address, unsigned compare, unsigned value);  // torch_musa
int atomicMax(int* address, int value);                  // mutlass
int atomicMin(int* address, int value);                  // mutlass
int atomicOr(int* address, int value);                   // muAlg
unsigned atomicOr(unsigned* address, unsigned value);    // muAlg

// Numbers.
struct __mt_bfloat16 { __mt_bfloat16() = default; unsigned short bits; };  // torch_musa, mutlass, onnxruntime-musa
struct __half { __half() = default; unsigned short bits; };                // torch_musa, mutlass
float __bfloat162float(__mt_bfloat16 value);     // onnxruntime-musa, tensorflow_musa_extension, Mooncake
__mt_bfloat16 __float2bfloat16(float value);     // torch_musa, tensorflow_musa_extension
__mt_bfloat16 __float2bfloat16_rn(float value);  // mutlass, onnxruntime-musa
float __half2float(__half value);                // mutlass, onnxruntime-musa
__half __float2half(float value);                // mutlass
__half __float2half_rn(float value);             // mutlass, onnxruntime-musa
float __fmul_rn(float a, float b);               // MT-flashMLA
int __float2int_rn(float value);                 // torch_musa, mutlass
float __int2float_rn(int value);                 // mutlass

// The runtime. Seen in: torch_musa, Mooncake, mutlass, MT-DeepEP, FlagCX; where one alone has a name it stands behind it.
enum musaError_t { musaSuccess = 0, musaErrorNotReady = 600, musaErrorPeerAccessAlreadyEnabled = 704 };
enum musaMemcpyKind { musaMemcpyHostToDevice = 1, musaMemcpyDeviceToHost, musaMemcpyDeviceToDevice, musaMemcpyDefault };
enum MtAttribute {
  musaDevAttrClockRate = 13,  // Mooncake
  musaDevAttrMultiProcessorCount = 16,
  musaDevAttrMaxSharedMemoryPerBlockOptin = 97,
};
enum MtFuncAttribute { musaFuncAttributeMaxDynamicSharedMemorySize = 8 };
using musaStream_t = struct MUstream_st*;
using musaEvent_t = struct MUevent_st*;
struct musaIpcMemHandle_t { char reserved[64]; };
constexpr unsigned musaHostAllocDefault = 0, musaHostAllocPortable = 1, musaHostAllocMapped = 2;
constexpr unsigned musaHostRegisterPortable = 1, musaHostRegisterMapped = 2;
constexpr unsigned musaIpcMemLazyEnablePeerAccess = 1, musaEventDisableTiming = 2;

extern "C" {
musaError_t musaGetLastError();
musaError_t musaPeekAtLastError();  // mutlass
const char* musaGetErrorString(musaError_t error);
const char* musaGetErrorName(musaError_t error);
musaError_t musaSetDevice(int device);
musaError_t musaGetDevice(int* device);
musaError_t musaGetDeviceCount(int* count);
musaError_t musaDeviceGetAttribute(int* value, MtAttribute attribute, int device);
musaError_t musaDeviceSynchronize();
musaError_t musaDeviceCanAccessPeer(int* can, int device, int peer);
musaError_t musaDeviceEnablePeerAccess(int peer, unsigned flags);
musaError_t musaMalloc(void** pointer, size_t bytes);
musaError_t musaFree(void* pointer);
musaError_t musaMallocHost(void** pointer, size_t bytes);
musaError_t musaHostAlloc(void** pointer, size_t bytes, unsigned flags);
musaError_t musaFreeHost(void* pointer);
musaError_t musaHostGetDevicePointer(void** device, void* host, unsigned flags);
musaError_t musaHostRegister(void* pointer, size_t bytes, unsigned flags);
musaError_t musaHostUnregister(void* pointer);
musaError_t musaMemGetInfo(size_t* free, size_t* total);
musaError_t musaMemcpy(void* to, const void* from, size_t bytes, musaMemcpyKind kind);
musaError_t musaMemcpyAsync(void* to, const void* from, size_t bytes, musaMemcpyKind kind, musaStream_t stream = nullptr);
musaError_t musaMemcpyPeerAsync(void* to, int device, const void* from, int source, size_t bytes, musaStream_t stream = nullptr);
musaError_t musaMemset(void* pointer, int value, size_t bytes);
musaError_t musaMemsetAsync(void* pointer, int value, size_t bytes, musaStream_t stream = nullptr);
musaError_t musaIpcGetMemHandle(musaIpcMemHandle_t* handle, void* pointer);
musaError_t musaIpcOpenMemHandle(void** pointer, musaIpcMemHandle_t handle, unsigned flags);
musaError_t musaIpcCloseMemHandle(void* pointer);
musaError_t musaStreamQuery(musaStream_t stream);
musaError_t musaStreamSynchronize(musaStream_t stream);
musaError_t musaStreamWaitEvent(musaStream_t stream, musaEvent_t event, unsigned flags);
musaError_t musaEventCreateWithFlags(musaEvent_t* event, unsigned flags);
musaError_t musaEventRecord(musaEvent_t event, musaStream_t stream = nullptr);
musaError_t musaEventQuery(musaEvent_t event);
musaError_t musaEventSynchronize(musaEvent_t event);
musaError_t musaEventDestroy(musaEvent_t event);
musaError_t musaFuncSetAttribute(const void* kernel, MtFuncAttribute attribute, int value);  // mutlass, MT-flashMLA
musaError_t musaOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, const void* kernel, int threads, size_t shared);  // mutlass
}
