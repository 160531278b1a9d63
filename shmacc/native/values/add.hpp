// How a sum is combined with one more number, from a gradient, another lane or another host.
//
// All reductions add; they differ in how a take reduces the sum (reduction.hpp). A reduction that keeps no sum (but a
// maximum, say) needs a struct like `Add`, a case in `with_sums`, and its types in SHMACC_FOR_ALL_SUMS.
#pragma once

#include "base/member_specs.hpp"
#include "values/kernels.hpp"

namespace shmacc {

// Loops that combine rows. Combine: Add<T>. They return false if an integer sum does not fit; it wraps around then.
template <class Combine, class T>
struct CombiningLoops {
    using Number = T;

    // Combines each value of a row with its sum.
    static bool row(T* __restrict__ sums, const T* __restrict__ values, uint64_t count) {
        uint64_t wrong = 0;
        for (uint64_t j = 0; j < count; ++j) sums[j] = Combine::one(sums[j], values[j], wrong);
        return wrong >> 63 == 0;
    }
    static bool into(T* __restrict__ to, const T* __restrict__ a, const T* __restrict__ b, uint64_t count) {
        uint64_t wrong = 0;
        for (uint64_t j = 0; j < count; ++j) to[j] = Combine::one(a[j], b[j], wrong);
        return wrong >> 63 == 0;
    }
};

SHMACC_TWO_WIDTHS static void add_long(float* __restrict__ sums, const float* __restrict__ values,
                                       uint64_t count) {
    for (uint64_t j = 0; j < count; ++j) sums[j] += values[j];
}
SHMACC_TWO_WIDTHS static void add_long(double* __restrict__ sums, const double* __restrict__ values,
                                       uint64_t count) {
    for (uint64_t j = 0; j < count; ++j) sums[j] += values[j];
}

template <class T>
struct Add : CombiningLoops<Add<T>, T> {
    static constexpr T kNeutral = static_cast<T>(-0.0);  // a number combined with it is the number itself

    // If an integer sum wraps around, as its sign or (unsigned) its carry shows, the top bit of `wrong` is set.
    static T one(T a, T b, uint64_t& wrong) {
        if constexpr (std::is_integral_v<T>) {
            const T sum = static_cast<T>(static_cast<uint64_t>(a) + static_cast<uint64_t>(b));
            wrong |= static_cast<uint64_t>(std::is_signed_v<T> ? (a ^ sum) & (b ^ sum)
                                                               : (a & b) | ((a | b) & ~sum));
            return sum;
        } else {
            return a + b;
        }
    }
    // Does the same as `row`, and is faster for arrays that are longer than a row.
    static bool many(T* __restrict__ sums, const T* __restrict__ values, uint64_t count) {
        if constexpr (std::is_integral_v<T>) {
            return Add::row(sums, values, count);
        } else {
            add_long(sums, values, count);
            return true;
        }
    }
};

// Calls act(Add<T>()), where T is the type of the member's sums.
template <class Act>
auto with_sums(uint32_t sum, uint32_t reduction, Act act) {
    switch (static_cast<Reduction>(reduction)) {  // no default, so that g++ warns of a missing case
        case kMean:
        case kSum:
        case kCmean: return with_sum_type(sum, [&](auto zero) { return act(Add<decltype(zero)>()); });
    }
    std::abort();
}
template <class Act>
auto with_sums(const MemberSpec& spec, Act act) {
    return with_sums(spec.sum, spec.reduction, act);
}

// Declares (extern template class) or compiles (template class) a class template for all sums.
#define SHMACC_FOR_ALL_SUMS(what, name) \
    what name<Add<float>>;              \
    what name<Add<double>>;             \
    what name<Add<int64_t>>;            \
    what name<Add<uint64_t>>

}  // namespace shmacc
