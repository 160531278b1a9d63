// The loops over numbers and row numbers.
//
// For rows that miss the caches, memory determines the time, whatever the instructions. For gradients that stay in
// the caches, vectors of twice the width save a third of an apply, so the long loops exist twice, and the loader
// picks one of the two. Neither uses fused operations, so both give the same result to the bit.
#pragma once

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "base/layout.hpp"

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define SHMACC_TWO_WIDTHS [[maybe_unused]] __attribute__((target_clones("avx2", "default")))
#else
#define SHMACC_TWO_WIDTHS [[maybe_unused]]
#endif

#define SHMACC_INLINE inline __attribute__((always_inline))

namespace shmacc {

// Within a piece there is no early exit, and differences are collected as bits, so that the compiler vectorises this.
SHMACC_TWO_WIDTHS static bool strictly_ascending(const int64_t* keys, uint64_t count) {
    constexpr uint64_t kPiece = 1024;
    for (uint64_t begin = 1; begin < count; begin += kPiece) {
        const uint64_t end = begin + kPiece < count ? begin + kPiece : count;
        uint64_t wrong = 0;
        for (uint64_t i = begin; i < end; ++i) wrong |= keys[i - 1] >= keys[i];
        if (wrong) return false;
    }
    return true;
}

struct RowExtent {
    int64_t least;
    int64_t greatest;
};
SHMACC_TWO_WIDTHS static RowExtent extent_of(const int64_t* rows, uint64_t count) {
    int64_t least = rows[0], greatest = rows[0];
    for (uint64_t i = 1; i < count; ++i) {
        least = rows[i] < least ? rows[i] : least;
        greatest = rows[i] > greatest ? rows[i] : greatest;
    }
    return {least, greatest};
}

// Whether the keys are the row numbers of these places.
SHMACC_TWO_WIDTHS static bool stand_at(const RowPlace* places, const int64_t* keys, uint64_t count) {
    uint64_t differing = 0;
    for (uint64_t i = 0; i < count; ++i) differing |= static_cast<uint64_t>(places[i].row ^ keys[i]);
    return differing == 0;
}

template <class T>
void copy_numbers(T* __restrict__ to, const T* __restrict__ from, uint64_t count) {
    for (uint64_t j = 0; j < count; ++j) to[j] = from[j];
}

// Calls the loop with the width as a constant if the width is common, else with 0. A loop of unknown length costs as
// much as the rest of the work on a row.
template <class Loop>
void with_width(uint64_t width, Loop loop) {
    switch (width) {
        case 1: return loop(std::integral_constant<uint64_t, 1>());
        case 2: return loop(std::integral_constant<uint64_t, 2>());
        case 4: return loop(std::integral_constant<uint64_t, 4>());
        case 8: return loop(std::integral_constant<uint64_t, 8>());
        case 16: return loop(std::integral_constant<uint64_t, 16>());
        case 32: return loop(std::integral_constant<uint64_t, 32>());
        case 64: return loop(std::integral_constant<uint64_t, 64>());
        case 128: return loop(std::integral_constant<uint64_t, 128>());
        default: return loop(std::integral_constant<uint64_t, 0>());
    }
}

// Prefetches a row that is going to be changed; only the start of a long row, since the hardware fetches the rest.
template <class T>
void prefetch_row(const T* row, uint64_t width) {
    const auto* at = reinterpret_cast<const char*>(row);
    const uint64_t bytes = std::min<uint64_t>(width * sizeof(T), 1024);
    for (uint64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 1);
}

// From this many bytes on it pays to bypass the caches: about the size of a second-level cache.
constexpr uint64_t kStreamedFrom = 1 << 20;

// Copies past the caches, for data that is not read again. Such stores may be reordered with each other and
// with later ones, up to end_of_stream. Always inlined: a call for each row would slow an update down.
SHMACC_INLINE void stream(unsigned char* to, const void* from, uint64_t bytes) {
#ifdef __SSE2__
    if (reinterpret_cast<uintptr_t>(to) % 16 == 0 && bytes % 16 == 0) {
        const auto* blocks = static_cast<const __m128i*>(from);
        auto* out = reinterpret_cast<__m128i*>(to);
        const uint64_t count = bytes / 16, by_lines = count / 4 * 4;
        // One cache line per iteration: shorter iterations take a third longer if their code is badly aligned.
        for (uint64_t i = 0; i < by_lines; i += 4) {
            const __m128i a = _mm_loadu_si128(blocks + i), b = _mm_loadu_si128(blocks + i + 1),
                          c = _mm_loadu_si128(blocks + i + 2), d = _mm_loadu_si128(blocks + i + 3);
            _mm_stream_si128(out + i, a);
            _mm_stream_si128(out + i + 1, b);
            _mm_stream_si128(out + i + 2, c);
            _mm_stream_si128(out + i + 3, d);
        }
        for (uint64_t i = by_lines; i < count; ++i) _mm_stream_si128(out + i, _mm_loadu_si128(blocks + i));
        return;
    }
#endif
    if (bytes) std::memcpy(to, from, bytes);
}

// Whether to write a result's rows past the caches. Through the caches, a take would move half as many bytes again,
// since a large result's lines are read from memory before they are overwritten, and evicted before the caller reads
// them. Rows must be whole cache lines: writing parts of lines past the caches is slower.
inline bool is_streamed(const void* result, uint64_t bytes, uint64_t row_bytes) {
    constexpr uint64_t kLine = 64, kLargestCache = 32 << 20;  // about
    return bytes >= kLargestCache && row_bytes % kLine == 0 && reinterpret_cast<uintptr_t>(result) % kLine == 0;
}

inline void end_of_stream() {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

}  // namespace shmacc
