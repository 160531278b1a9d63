// How a take reduces sums: divides them, and checks them against the range of the accumulator's dtype.
#pragma once

#include "base/member_specs.hpp"
#include "values/kernels.hpp"

namespace shmacc {

// How a take reduces, and the range that results must fit.
struct Reduce {
    bool divide;
    int64_t divisor;  // 0: each row's own number of contributions
    int64_t lowest;  // integers: the dtype's range
    uint64_t highest;
};

// The only place that decides how to reduce a member's sums. weight: the weight of the gradients that have the member;
// round_weight: the weight of all gradients of the round.
inline Reduce reduce_by(const MemberSpec& spec, int64_t weight, int64_t round_weight) {
    Reduce reduce{true, 0, spec.lowest, spec.highest};
    switch (static_cast<Reduction>(spec.reduction)) {
        case kMean: reduce.divisor = spec.kind == kSparse ? 0 : weight; break;
        case kSum: reduce.divide = false; break;
        case kCmean: reduce.divisor = round_weight; break;
    }
    return reduce;
}
// The reduction of a partial: sums stay as they are.
inline Reduce not_reduced() { return {false, 0, INT64_MIN, UINT64_MAX}; }

template <class T>
bool within(T value, const Reduce& reduce) {
    if constexpr (std::is_floating_point_v<T>) return true;
    // Without an early exit the compiler tests several values at a time.
    if constexpr (std::is_signed_v<T>)
        return (value >= reduce.lowest) & ((value < 0) | (static_cast<uint64_t>(value) <= reduce.highest));
    return static_cast<uint64_t>(value) <= reduce.highest;
}

// out[i] = sums[i], divided if `reduce` says so. Returns false if a result does not fit the dtype.
template <class T>
bool reduce_into(T* out, const T* sums, uint64_t count, int64_t contributions, const Reduce& reduce) {
    bool fits = true;
    if (!reduce.divide) {
        for (uint64_t j = 0; j < count; ++j) {
            out[j] = sums[j];
            if constexpr (std::is_integral_v<T>) fits &= within(out[j], reduce);
        }
    } else {
        const int64_t divisor = reduce.divisor ? reduce.divisor : contributions;
        if constexpr (std::is_floating_point_v<T>) {
            // Dividing by a power of two equals multiplying by its inverse, to the bit, and multiplying is cheaper.
            if (count > 1 && (divisor & (divisor - 1)) == 0) {
                const T inverse = T{1} / static_cast<T>(divisor);
                for (uint64_t j = 0; j < count; ++j) out[j] = sums[j] * inverse;
                return true;
            }
        }
        if constexpr (std::is_integral_v<T>) {
            // A division takes as long as a dozen shifts. Adding `below` makes the shift round towards zero, too.
            if ((divisor & (divisor - 1)) == 0) {
                const int shift = __builtin_ctzll(static_cast<uint64_t>(divisor));
                const T below = static_cast<T>(divisor - 1);
                for (uint64_t j = 0; j < count; ++j) {
                    out[j] = (sums[j] + (sums[j] < 0 ? below : 0)) >> shift;
                    fits &= within(out[j], reduce);
                }
                return fits;
            }
        }
        for (uint64_t j = 0; j < count; ++j) {
            out[j] = sums[j] / static_cast<T>(divisor);
            if constexpr (std::is_integral_v<T>) fits &= within(out[j], reduce);
        }
    }
    return fits;
}

// Does what reduce_into does, for a row. kWidth: the row's width, or 0 for any. kStreamed: writes past the caches.
template <uint64_t kWidth, bool kStreamed, class T>
bool reduce_row(T* out, const T* sums, uint64_t width, int64_t contributions, const Reduce& reduce) {
    if constexpr (!kStreamed) return reduce_into(out, sums, kWidth ? kWidth : width, contributions, reduce);
    constexpr uint64_t kPiece = kWidth ? kWidth : 256;
    alignas(64) T piece[kPiece];
    bool fits = true;
    for (uint64_t done = 0; done < (kWidth ? kWidth : width); done += kPiece) {
        const uint64_t count = kWidth ? kWidth : std::min(kPiece, width - done);
        fits = reduce_into(piece, sums + done, count, contributions, reduce) && fits;
        stream(reinterpret_cast<unsigned char*>(out + done), piece, count * sizeof(T));
    }
    return fits;
}

}  // namespace shmacc
