// Float to FP8 (e4m3, no infinities) in blocks of 128 columns, as comm_core/fp8.py defines it. By bits: the conversion
// instructions are not the same everywhere.
#pragma once

#include "platform.h"

namespace mt {

constexpr int CAST_BLOCK = 128;
constexpr float CAST_MAX = 448.f, CAST_FLOOR = 1e-4f;

__device__ __forceinline__ uint32_t bits_of(float value) {
  uint32_t bits;
  __builtin_memcpy(&bits, &value, 4);
  return bits;
}

__device__ __forceinline__ float float_of(uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, 4);
  return value;
}

// Round to nearest, ties to even; |value| <= 448, or NaN.
__device__ __forceinline__ uint32_t to_e4m3(float value) {
  const uint32_t bits = bits_of(value), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return sign | 0x7fu;
  if (magnitude < 0x3c800000u) {  // below 2^-6: multiples of 2^-9; adding 2^14 leaves them in the lowest bits
    const float shifted = float_of(magnitude) + 16384.f;
    return sign | (bits_of(shifted) - bits_of(16384.f));
  }
  const uint32_t rounded = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
  const uint32_t code = rounded - (120u << 3);
  return sign | (code < 0x7eu ? code : 0x7eu);
}

// The scale of a block whose largest magnitude is `amax`.
__device__ __forceinline__ float scale_of(float amax, bool power_of_two) {
  const float scale = (amax > CAST_FLOOR ? amax : CAST_FLOOR) / CAST_MAX;
  if (!power_of_two) return scale;
  const uint32_t exponent = (bits_of(scale) + 0x7fffffu) >> 23;
  return float_of((exponent < 255u ? exponent : 255u) << 23);
}

}  // namespace mt
