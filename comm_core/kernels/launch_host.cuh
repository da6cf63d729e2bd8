// Bodies of launch.h: the few calls of the runtime that the host needs, and what is small: regions, barrier, measurements.
#pragma once

#include <chrono>
#include <thread>

#include "barrier.cuh"
#include "ceiling.cuh"
#include "launched.cuh"
#include "pool.cuh"
#include "region.cuh"

namespace mt {

template <typename VEC>
int launch_region_read(const MtRegionRead& call, Stream stream) {
  region_read_impl<VEC, 4><<<call.num_sms, 512, 0, stream>>>(call);
  return launched();
}

template <typename VEC>
int launch_region_copy(void* to, const void* from, uint64_t bytes, int sms, Stream stream) {
  const int64_t count = static_cast<int64_t>(bytes / sizeof(VEC));
  region_copy_impl<VEC, 4><<<sms, 1024, 0, stream>>>(static_cast<VEC*>(to), static_cast<const VEC*>(from), count);
  return launched();
}

}  // namespace mt

extern "C" {

const char* mt_error_text(int code) { return MT_RT(GetErrorString)(static_cast<MT_RT(Error_t)>(code)); }

int mt_abi(int64_t* sizes, int count) {
  const int64_t known[] = {sizeof(MtChannel), sizeof(MtLayout), sizeof(MtLayoutCall), sizeof(MtDispatchCall),
                           sizeof(MtCombineCall), sizeof(MtReduceCall), sizeof(MtBarrierCall), sizeof(MtState), sizeof(MtBlocksCall),
                           sizeof(MtRegionWords), sizeof(MtRegionRead),
                           static_cast<int64_t>(MT_CONTROL_BYTES), static_cast<int64_t>(MT_AT_STATE)};
  const int number = sizeof(known) / sizeof(known[0]);
  for (int i = 0; i < number && i < count; ++i) sizes[i] = known[i];
  return number;
}

int mt_alloc(int device, uint64_t bytes, void** out) {
  int code = MT_RT(SetDevice)(device);
  if (code == 0) code = MT_RT(Malloc)(out, bytes);
  if (code == 0) code = MT_RT(Memset)(*out, 0, bytes);
  if (code == 0) code = MT_RT(DeviceSynchronize)();
  if (code != 0) MT_RT(GetLastError)();  // it has been reported, later calls are not to find it
  return code;
}
int mt_free(void* pointer) { return MT_RT(Free)(pointer); }
int mt_share(void* pointer, void* handle64) {
  static_assert(sizeof(MT_RT(IpcMemHandle_t)) == 64, "handles travel as 64 bytes");
  const int code = MT_RT(IpcGetMemHandle)(static_cast<MT_RT(IpcMemHandle_t)*>(handle64), pointer);
  if (code != 0) MT_RT(GetLastError)();
  return code;
}
int mt_open(int device, const void* handle64, void** out) {
  int code = MT_RT(SetDevice)(device);
  if (code == 0)
    code = MT_RT(IpcOpenMemHandle)(out, *static_cast<const MT_RT(IpcMemHandle_t)*>(handle64), MT_RT(IpcMemLazyEnablePeerAccess));
  if (code != 0) MT_RT(GetLastError)();
  return code;
}
int mt_close(void* pointer) { return MT_RT(IpcCloseMemHandle)(pointer); }

int mt_host_alloc(uint64_t bytes, void** host, void** device) {
  int code = MT_RT(HostAlloc)(host, bytes, MT_RT(HostAllocMapped));
  if (code != 0) return code;
  for (uint64_t i = 0; i < bytes; ++i) static_cast<volatile char*>(*host)[i] = 0;
  return MT_RT(HostGetDevicePointer)(device, *host, 0);
}
int mt_host_free(void* host) { return MT_RT(FreeHost)(host); }

int mt_copy(void* to, const void* from, uint64_t bytes, void* stream) {
  return MT_RT(MemcpyAsync)(to, from, bytes, MT_RT(MemcpyDefault), mt::stream_of(stream));
}
int mt_clear(void* to, uint64_t bytes, void* stream) { return MT_RT(MemsetAsync)(to, 0, bytes, mt::stream_of(stream)); }

int mt_synchronize() { return MT_RT(DeviceSynchronize)(); }
int mt_pool_set(int index, void* base, uint64_t bytes) {
  mt::pool(index).set(static_cast<char*>(base), bytes);
  return 0;
}
int mt_pool_choose(int index) {
  mt::chosen_pool() = index;
  return 0;
}
void* mt_pool_alloc(ssize_t bytes, int device, void*) {
  const int chosen = mt::chosen_pool();
  void* found = chosen >= 0 ? mt::pool(chosen).take(bytes) : nullptr;
  if (found) return found;
  if (MT_RT(SetDevice)(device) != 0 || MT_RT(Malloc)(&found, bytes) != 0) return nullptr;
  return found;
}
void mt_pool_free(void* pointer, ssize_t, int, void*) {
  for (int i = 0; i < mt::MAX_POOLS; ++i)
    if (mt::pool(i).give(pointer)) return;
  MT_RT(Free)(pointer);
}

int mt_properties(int device, int64_t* sms, int64_t* ticks_per_second) {
  int value = 0;
  int code = MT_RT(DeviceGetAttribute)(&value, MT_RT(DevAttrMultiProcessorCount), device);
  *sms = value;
  if (code == 0) code = MT_RT(DeviceGetAttribute)(&value, MT_RT(DevAttrClockRate), device);
  *ticks_per_second = value * 1000ll;
  return code;
}

int mt_wait_word(const volatile uint32_t* word, const volatile uint32_t* fault, double seconds) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
  for (int64_t polls = 0; *word == 0; ++polls) {
    if (fault[MT_FAULT_SET] != 0) return 2;
    if (fault[MT_FAULT_DIFFERENT] != 0) return 3;
    if (polls % 256 == 255) {
      if (std::chrono::steady_clock::now() > end) return 1;
      if (polls > 100000) std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }
  return 0;
}

int mt_ceiling(void* to, const void* from, uint64_t bytes, int num_sms, int threads, void* stream) {
  mt::ceiling_impl<4><<<num_sms, threads, 0, mt::stream_of(stream)>>>(static_cast<int4*>(to), static_cast<const int4*>(from),
                                                                      static_cast<int64_t>(bytes / sizeof(int4)));
  return mt::launched();
}
int mt_delay(int64_t ticks, void* stream) {
  mt::delay_impl<<<1, 1, 0, mt::stream_of(stream)>>>(ticks);
  return mt::launched();
}

int mt_region_raise(const MtRegionWords* call, void* stream) {
  mt::region_raise_impl<<<1, MT_MAX_RANKS, 0, mt::stream_of(stream)>>>(*call);
  return mt::launched();
}

int mt_region_await(const MtRegionWords* call, void* stream) {
  mt::region_await_impl<<<1, MT_MAX_RANKS, 0, mt::stream_of(stream)>>>(*call);
  return mt::launched();
}

int mt_region_read(const MtRegionRead* given, void* stream) {
  const MtRegionRead& call = *given;
  const mt::Stream on = mt::stream_of(stream);
  const uint64_t steps = static_cast<uint64_t>(call.width) | call.out;  // tables begin at pages
  if (steps % 16 == 0) return mt::launch_region_read<int4>(call, on);
  if (steps % 4 == 0) return mt::launch_region_read<int>(call, on);
  return mt::launch_region_read<char>(call, on);
}

int mt_region_copy(void* to, const void* from, uint64_t bytes, int sms, void* stream) {
  const mt::Stream on = mt::stream_of(stream);
  const uint64_t steps = reinterpret_cast<uint64_t>(to) | reinterpret_cast<uint64_t>(from) | bytes;
  if (steps % 16 == 0) return mt::launch_region_copy<int4>(to, from, bytes, sms, on);
  return mt::launch_region_copy<char>(to, from, bytes, sms, on);
}

int mt_barrier(const MtBarrierCall* call, void* stream) {
  mt::barrier_impl<<<1, MT_MAX_RANKS, 0, mt::stream_of(stream)>>>(*call);
  return mt::launched();
}
}
