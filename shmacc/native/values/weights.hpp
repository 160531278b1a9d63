// Multiplies a gradient's values by its weight. Complex values are multiplied as pairs of numbers: a complex product
// would turn an infinite part into a NaN.
#pragma once

#include <cstdint>
#include <type_traits>

namespace shmacc {

// to[i] = from[i] * weight; false if an integer product does not fit. Large weights are multiplied as doubles.
template <class T>
bool weigh(const T* __restrict__ from, T* __restrict__ to, uint64_t count, int64_t weight) {
    if constexpr (std::is_integral_v<T>) {
        bool fits = true;
        for (uint64_t i = 0; i < count; ++i) fits = !__builtin_mul_overflow(from[i], weight, to + i) && fits;
        return fits;
    } else {
        constexpr int64_t kExactInFloat = int64_t{1} << 24;
        if (weight <= kExactInFloat) {
            const T factor = static_cast<T>(weight);
            for (uint64_t i = 0; i < count; ++i) to[i] = from[i] * factor;
        } else {
            const auto factor = static_cast<double>(weight);
            for (uint64_t i = 0; i < count; ++i) to[i] = static_cast<T>(from[i] * factor);
        }
        return true;
    }
}

}  // namespace shmacc
