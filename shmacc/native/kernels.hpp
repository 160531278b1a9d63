// The loops over numbers.
//
// Rows that miss the caches cost what memory costs, whatever the instructions. Gradients that stay in the caches
// do not: there twice the vector width is worth a third of an apply, so the long loops exist twice, and the
// loader picks one. No wider ones, no fused operations: the result is the same to the bit.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#if defined(__x86_64__) && defined(__GLIBC__) && !defined(__SANITIZE_ADDRESS__)
#define SHMACC_TWO_WIDTHS __attribute__((target_clones("avx2", "default")))
#else
#define SHMACC_TWO_WIDTHS
#endif

namespace shmacc {

SHMACC_TWO_WIDTHS static void add_long(float* __restrict__ sums, const float* __restrict__ values,
                                       uint64_t count) {
    for (uint64_t j = 0; j < count; ++j) sums[j] += values[j];
}
SHMACC_TWO_WIDTHS static void add_long(double* __restrict__ sums, const double* __restrict__ values,
                                       uint64_t count) {
    for (uint64_t j = 0; j < count; ++j) sums[j] += values[j];
}

// sums[j] += values[j]; false if a sum does not fit (integers; it is left as it was).
template <class T>
bool add_numbers(T* __restrict__ sums, const T* __restrict__ values, uint64_t count) {
    bool fits = true;
    if constexpr (std::is_integral_v<T>) {
        for (uint64_t j = 0; j < count; ++j)
            fits = !__builtin_add_overflow(sums[j], values[j], &sums[j]) && fits;
    } else {
        for (uint64_t j = 0; j < count; ++j) sums[j] += values[j];
    }
    return fits;
}

// The same for more numbers than a row has.
template <class T>
bool add_many(T* __restrict__ sums, const T* __restrict__ values, uint64_t count) {
    if constexpr (std::is_integral_v<T>) {
        return add_numbers(sums, values, count);
    } else {
        add_long(sums, values, count);
        return true;
    }
}

template <class T>
void copy_numbers(T* to, const T* from, uint64_t count) {
    for (uint64_t j = 0; j < count; ++j) to[j] = from[j];
}

template <class T>
void copy_many(T* to, const T* from, uint64_t count) {
    if (count) std::memcpy(to, from, count * sizeof(T));
}

}  // namespace shmacc
