// Bodies of launch.h: combines, by type.
#pragma once

#include "combine_bulk.cuh"
#include "launched.cuh"

namespace mt {

#if defined(MT_MOE_BULK)
// Whether bulk copies serve: bf16 alone, the type of training, is compiled for them.
inline bool sums_in_bulk(const MtCombineCall& call) { return call.dtype == 0 && call.hidden % 8 == 0 && has_bulk(); }
#endif

template <typename T>
int launch_combine(const MtCombineCall& call, Stream stream) {
  combine_impl<T, 16 / sizeof(T), 4><<<call.num_sms, call.threads, 0, stream>>>(call);
  return launched();
}

template <typename T>
int launch_reduced(const MtCombineCall& call, const MtReduceCall& lay, Stream stream) {
  combine_reduce_impl<T, 16 / sizeof(T), 4><<<lay.num_sms + call.num_sms, call.threads, 0, stream>>>(call, lay);
  return launched();
}

}  // namespace mt

extern "C" {

int mt_combine(const MtCombineCall* call, void* stream) {
  const mt::Stream on = mt::stream_of(stream);
#if defined(MT_MOE_BULK)
  if (mt::sums_in_bulk(*call)) {
    mt::allow_shared(mt::combine_bulk_impl<mt_bf16>, sizeof(mt::WholeRing));
    mt::combine_bulk_impl<mt_bf16><<<call->num_sms, mt::WholeRing::THREADS, sizeof(mt::WholeRing), on>>>(*call);
    return mt::launched();
  }
#endif
  if (call->dtype == 0) return mt::launch_combine<mt_bf16>(*call, on);
  if (call->dtype == 1) return mt::launch_combine<mt_half>(*call, on);
  if (call->dtype == 3) return mt::launch_combine<double>(*call, on);
  return mt::launch_combine<float>(*call, on);
}

int mt_combine_reduced(const MtCombineCall* call, const MtReduceCall* lay, void* stream) {
  const mt::Stream on = mt::stream_of(stream);
#if defined(MT_MOE_BULK)
  if (mt::sums_in_bulk(*call)) {
    // Each rank lays down what others read alone, so the shares follow the number of ranks.
    const int blocks = lay->num_sms + call->num_sms, ranks = lay->num_ranks;
    MtReduceCall others = *lay;
    others.num_sms = ranks == 1 ? 0 : blocks < 4 ? 1 : blocks * 3 * (ranks - 1) / (4 * ranks);
    mt::allow_shared(mt::combine_reduce_bulk_impl<mt_bf16>, sizeof(mt::PartRing));
    mt::combine_reduce_bulk_impl<mt_bf16><<<blocks, mt::PartRing::THREADS, sizeof(mt::PartRing), on>>>(*call, others);
    return mt::launched();
  }
#endif
  if (call->dtype == 0) return mt::launch_reduced<mt_bf16>(*call, *lay, on);
  if (call->dtype == 1) return mt::launch_reduced<mt_half>(*call, *lay, on);
  if (call->dtype == 3) return mt::launch_reduced<double>(*call, *lay, on);
  return mt::launch_reduced<float>(*call, *lay, on);
}
}
