// Bodies of launch.h: the low-latency calls, by type.
#pragma once

#include "launched.cuh"
#include "low_latency.cuh"

namespace mt {

template <typename T>
int launch_blocks_of(const MtBlocksCall& call, int kind, int halves, int sms, Stream stream) {
  const int lanes = call.num_tokens * call.num_topk, staged = lanes <= STAGED_LANES ? lanes : 0;
  const int counts = (call.channel.num_ranks + 1) * call.num_local;
  const int shared = 2 * (staged > counts ? staged : counts);
  if (kind == 0) dispatch_low_latency_impl<T><<<sms, BLOCKS_THREADS, shared, stream>>>(call, halves);
  else combine_low_latency_impl<T><<<sms, BLOCKS_THREADS, 0, stream>>>(call, halves);
  return launched();
}

inline int launch_blocks(const MtBlocksCall& call, int kind, int halves, int sms, Stream stream) {
  if (call.dtype == 0) return launch_blocks_of<mt_bf16>(call, kind, halves, sms, stream);
  if (call.dtype == 1) return launch_blocks_of<mt_half>(call, kind, halves, sms, stream);
  return launch_blocks_of<float>(call, kind, halves, sms, stream);
}

}  // namespace mt

extern "C" {

int mt_blocks_send(const MtBlocksCall* call, int kind, int sms, void* stream) {
  return mt::launch_blocks(*call, kind, mt::HALF_SEND, sms, mt::stream_of(stream));
}
int mt_blocks_recv(const MtBlocksCall* call, int kind, int sms, void* stream) {
  return mt::launch_blocks(*call, kind, mt::HALF_RECV, sms, mt::stream_of(stream));
}
int mt_blocks_whole(const MtBlocksCall* call, int kind, int sms, void* stream) {
  return mt::launch_blocks(*call, kind, mt::HALF_SEND | mt::HALF_RECV, sms, mt::stream_of(stream));
}
}
