// The C ABI of the library: what library.py calls. Every function returns 0 or an error code of the runtime, except
// where it says otherwise. Streams are raw handles, pointers are raw addresses.
#pragma once

#include <sys/types.h>

#include "abi.h"

extern "C" {
const char* mt_error_text(int code);
int mt_abi(int64_t* sizes, int count);  // sizes of the structs, to compare with the host's; returns how many

int mt_alloc(int device, uint64_t bytes, void** out);  // of its own, so that it can be shared; cleared
int mt_free(void* pointer);
int mt_share(void* pointer, void* handle64);
int mt_open(int device, const void* handle64, void** out);
int mt_close(void* pointer);
int mt_host_alloc(uint64_t bytes, void** host, void** device);  // mapped, cleared
int mt_host_free(void* host);
int mt_copy(void* to, const void* from, uint64_t bytes, void* stream);
int mt_clear(void* to, uint64_t bytes, void* stream);
int mt_synchronize();
// Tensors in symmetric memory: pool `index` is the range given (none with 0 bytes); a thread chooses the pool, -1 for none,
// of what torch's allocator asks for by the last two.
int mt_pool_set(int index, void* base, uint64_t bytes);
int mt_pool_choose(int index);
void* mt_pool_alloc(ssize_t bytes, int device, void* stream);
void mt_pool_free(void* pointer, ssize_t bytes, int device, void* stream);
int mt_properties(int device, int64_t* sms, int64_t* ticks_per_second);
// Polls a word of mapped host memory until it is not 0: 0 then, 1 after `seconds`; 2 where the fault record names a peer
// first, 3 where it names a call that differs.
int mt_wait_word(const volatile uint32_t* word, const volatile uint32_t* fault, double seconds);
// For measurements: copies by plain 16-byte loads and stores, whose places may be another rank's, and a wait of the stream.
int mt_ceiling(void* to, const void* from, uint64_t bytes, int num_sms, int threads, void* stream);
int mt_delay(int64_t ticks, void* stream);

int mt_layout(const MtLayoutCall* call, void* stream);
int mt_dispatch(const MtDispatchCall* call, void* stream);
int mt_combine(const MtCombineCall* call, void* stream);
// A combine whose rows are laid down in the same kernel: lay->num_sms blocks lay, call->num_sms read.
int mt_combine_reduced(const MtCombineCall* call, const MtReduceCall* lay, void* stream);
// The halves of the low-latency calls: 0 dispatch, 1 combine.
int mt_blocks_send(const MtBlocksCall* call, int kind, int sms, void* stream);
int mt_blocks_recv(const MtBlocksCall* call, int kind, int sms, void* stream);
// Both halves in one launch; `sms` blocks must be on the device at once.
int mt_blocks_whole(const MtBlocksCall* call, int kind, int sms, void* stream);
// Regions: words raised in the parts of others, words of the own part awaited, rows read, bytes copied by kernels.
int mt_region_raise(const MtRegionWords* call, void* stream);
int mt_region_await(const MtRegionWords* call, void* stream);
int mt_region_read(const MtRegionRead* call, void* stream);
int mt_region_copy(void* to, const void* from, uint64_t bytes, int sms, void* stream);
int mt_barrier(const MtBarrierCall* call, void* stream);
}
