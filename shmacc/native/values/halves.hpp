// Converts between float16 and float32 (float16 gradients are summed as float32) if the processor has instructions for
// that. NumPy converts one number at a time, which took longer than the rest of an apply. Rounds as NumPy does: to
// nearest, ties to even, beyond the range to infinity.
#pragma once

#include <cstdint>

#if defined(__x86_64__) && !defined(__clang__) && __GNUC__ >= 11
#include <immintrin.h>
#define SHMACC_HALVES __attribute__((target("avx,f16c")))
#endif

namespace shmacc {

#ifdef SHMACC_HALVES

inline bool converts_halves() { return __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c"); }

SHMACC_HALVES inline void widen(const uint16_t* from, float* to, uint64_t count) {
    uint64_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + i))));
    for (; i < count; ++i) to[i] = _cvtsh_ss(from[i]);
}

SHMACC_HALVES inline void narrow(const float* from, uint16_t* to, uint64_t count) {
    constexpr int kToNearest = _MM_FROUND_TO_NEAREST_INT;
    uint64_t i = 0;
    for (; i + 8 <= count; i += 8)
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i),
                         _mm256_cvtps_ph(_mm256_loadu_ps(from + i), kToNearest));
    for (; i < count; ++i) to[i] = _cvtss_sh(from[i], kToNearest);
}

#else

inline bool converts_halves() { return false; }
inline void widen(const uint16_t*, float*, uint64_t) {}
inline void narrow(const float*, uint16_t*, uint64_t) {}

#endif

}  // namespace shmacc
