// Bodies of launch.h: dispatches, by width of a row.
#pragma once

#include "dispatch_bulk.cuh"
#include "launched.cuh"

extern "C" {

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
