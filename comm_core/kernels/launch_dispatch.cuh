// Bodies of launch.h: layouts by width of a token, dispatches by width of a row.
#pragma once

#include "dispatch_bulk.cuh"
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

int mt_dispatch(const MtDispatchCall* call, void* stream) {
  const mt::Stream on = mt::stream_of(stream);
#if defined(MT_MOE_BULK)
  const mt::BulkShape shape = mt::bulk_shape(call->row_bytes, call->num_sms);
  if (shape.depth) {
    const int shared = shape.movers * mt::bulk_ring_bytes(shape.depth, shape.piece);
    mt::allow_shared(mt::dispatch_bulk_impl, shared);
    mt::dispatch_bulk_impl<<<call->num_sms, 512, shared, on>>>(*call, shape);
    return mt::launched();
  }
#endif
  if (call->row_bytes % 16 == 0)
    mt::dispatch_impl<int4, 4><<<call->num_sms, call->threads, 0, on>>>(*call);
  else if (call->row_bytes % 8 == 0)
    mt::dispatch_impl<int2, 4><<<call->num_sms, call->threads, 0, on>>>(*call);
  else
    mt::dispatch_impl<int, 4><<<call->num_sms, call->threads, 0, on>>>(*call);
  return mt::launched();
}
}
