// Constraints on the rows that an update has changed; they are applied after the optimizer's rule.
//
// The docstrings of shmacc/_values/constraints.py give the formulas. A norm adds the squares in the order of the
// elements, so it is the same to the bit for every width of vectors. Each addition waits for the one before, so several
// rows are added up side by side.
#pragma once

#include <cfloat>
#include <cmath>
#include <limits>

#include "base/assertions.hpp"
#include "parameters/touched_array.hpp"

namespace shmacc {

constexpr uint64_t kNormsAtOnce = 8;

// from: equal to `to`, or memory that does not overlap it.
template <class T, class Make>
SHMACC_INLINE void put_each(const T* from, T* to, uint64_t count, Make make) {
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC ivdep
#endif
    for (uint64_t j = 0; j < count; ++j) to[j] = make(from[j]);
}

// Writes `count` rows (at most kNormsAtOnce) to these places, changed so that the constraint of their norms holds.
template <class T>
SHMACC_INLINE void put_rows(const OptimizerSpec& by, const T* from, T* const* to, uint64_t count, uint64_t row) {
    const T* rows[kNormsAtOnce];
    for (uint64_t k = 0; k < kNormsAtOnce; ++k) rows[k] = from + (k < count ? k : 0) * row;
    double sums[kNormsAtOnce] = {};
    for (uint64_t j = 0; j < row; ++j)
        for (uint64_t k = 0; k < kNormsAtOnce; ++k) {
            const double number = rows[k][j];
            sums[k] += number * number;
        }
    const bool is_unit = by.constraint() == kUnitNorm;
    const double most = by.limits()[0];
    for (uint64_t k = 0; k < count; ++k) {
        const double norm = std::sqrt(sums[k]);
        const T divisor = static_cast<T>(norm), factor = static_cast<T>(most / norm);
        if (is_unit && divisor > 0 && divisor <= std::numeric_limits<T>::max())
            put_each(rows[k], to[k], row, [=](T number) { return number / divisor; });
        else if (!is_unit && norm > most && norm <= DBL_MAX)
            put_each(rows[k], to[k], row, [=](T number) { return number * factor; });
        else
            put_each(rows[k], to[k], row, [](T number) { return number; });
    }
}

template <class T>
SHMACC_INLINE void put_entries(const OptimizerSpec& by, uint64_t row, const T* from,
                               const TouchedArray<T>& array, uint64_t begin, uint64_t end) {
    const bool is_clip = by.constraint() == kClip;
    const T low = is_clip ? static_cast<T>(by.limits()[0]) : T{0};
    const T high = is_clip ? static_cast<T>(by.limits()[1]) : std::numeric_limits<T>::infinity();
    T* rows[kNormsAtOnce];
    uint64_t count = 0;
    const auto put = [&] {
        put_rows(by, from, rows, count, row);
        from += count * row;
        count = 0;
    };
    for (uint64_t i = begin; i < end; ++i) {
        const uint64_t entry = array.rows ? static_cast<uint64_t>(array.rows[i]) : i;
        T* const to = array.contents + entry * array.stride;
        const uint64_t numbers = array.rows ? array.width
                                            : std::min(array.width, array.total - entry * array.width);
        if (!by.constrains_norms()) {
            put_each(from, to, numbers, [=](T number) {
                const T raised = number < low ? low : number;
                return raised > high ? high : raised;
            });
            from += numbers;
            continue;
        }
        for (uint64_t first = 0; first + row <= numbers; first += row) {
            rows[count++] = to + first;
            if (count == kNormsAtOnce) put();
        }
    }
    if (count) put();
}

#if defined(__x86_64__)
template <class T>
__attribute__((target("avx2"), noinline)) void put_constrained_wide(const OptimizerSpec& by, uint64_t row,
                                                                    const T* from, const TouchedArray<T>& array,
                                                                    uint64_t begin, uint64_t end) {
    put_entries(by, row, from, array, begin, end);
}
#endif
// Writes the entries from `begin` to before `end`, which stand one after the other in `from`, to the array, so that the
// constraint holds. row: numbers in a row. Not inlined, so it is compiled once for each type, not once for each rule.
template <class T>
__attribute__((noinline)) void put_constrained(const OptimizerSpec& by, uint64_t row, const T* from,
                                               const TouchedArray<T>& array, uint64_t begin, uint64_t end) {
    SHMACC_ASSERT(row > 0);
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx2")) return put_constrained_wide(by, row, from, array, begin, end);
#endif
    put_entries(by, row, from, array, begin, end);
}

}  // namespace shmacc
