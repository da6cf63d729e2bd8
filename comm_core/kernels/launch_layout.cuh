// Bodies of launch.h: layouts, by width of a token.
#pragma once

#include "launched.cuh"
#include "layout.cuh"

namespace mt {

template <int VECS>
int launch_layout(const MtLayoutCall& call, Stream stream) {
  const int laying = call.layout.num_tokens > 0 ? (call.layout.num_tokens + MT_TOKENS - 1) / MT_TOKENS : 1;
  const int all = 2 * laying + call.num_blocks + 1, at_first = BLOCKS_BEGIN_IN_ORDER ? all : laying;
  const int shared = layout_shared_bytes<VECS>(call.layout);
  layout_impl<VECS><<<at_first, MT_TOKENS, shared, stream>>>(call, 0, all);
  if (at_first < all) layout_impl<VECS><<<all - at_first, MT_TOKENS, shared, stream>>>(call, at_first, all);
  return launched();
}

}  // namespace mt

extern "C" {

int mt_layout(const MtLayoutCall* call, void* stream) {
  if (call->layout.num_topk <= mt::TokenIds<1>::LANES) return mt::launch_layout<1>(*call, mt::stream_of(stream));
  return mt::launch_layout<4>(*call, mt::stream_of(stream));
}
}
