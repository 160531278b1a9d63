// The shape of a member's round, its memory, and its reduction.
#pragma once

#include <type_traits>
#include <vector>

#include "lane.hpp"

namespace shmacc {

constexpr uint64_t kMostElements = uint64_t{1} << 36;

// False: too many for a segment. Dimensions of 0 count as 1: NumPy, too, bounds the others next to them.
inline bool count_elements(const Dims& dims, uint64_t* elements) {
    uint64_t bounded = 1;
    bool empty = false;
    for (int64_t dim : dims) {
        if (dim < 0 || dim > static_cast<int64_t>(kMostElements)) return false;
        empty |= dim == 0;
        bounded *= static_cast<uint64_t>(std::max<int64_t>(dim, 1));
        if (bounded > kMostElements) return false;
    }
    *elements = empty ? 0 : bounded;
    return true;
}

inline uint64_t product(const Dims& dims) {
    uint64_t elements;
    if (!count_elements(dims, &elements))
        throw Error(Failure::kResourceExhausted, "A row, or a dense gradient, has at most 2**36 numbers");
    return elements;
}

inline std::string in_brackets(const Dims& dims) {
    std::string text = "[";
    for (size_t i = 0; i < dims.size(); ++i) text += (i ? "," : "") + std::to_string(dims[i]);
    return text + "]";
}

// shape: the round's, if it is not the declared one.
inline Dims round_dims(const Shape* shape, const MemberSpec& spec, const MemberState& state) {
    Dims dims;
    if (state.shape == kDeclaredShape) {
        if (!spec.round) data_loss("it has no declared shape");
        dims = *spec.round;
    } else {
        const uint64_t rank = load(shape->rank);
        if (rank > kMaxRank - (spec.kind == kSparse)) data_loss("its shape has too many dimensions");
        dims.resize(rank);
        for (uint64_t i = 0; i < rank; ++i) dims[i] = load_relaxed(shape->dims[i]);
    }
    uint64_t elements;
    if (!count_elements(dims, &elements)) data_loss("a dimension is out of range");
    if (elements * spec.components != state.row_elements) data_loss("its shape and its rows disagree");
    return dims;
}
inline Dims round_dims(Member& member) {
    const bool declared = member.state.shape == kDeclaredShape;
    return round_dims(declared ? nullptr : &member.shape(member.state.shape), member.spec(), member.state);
}

// The first gradient of a round fixes the round's shape. Takes effect with the commit.
inline void start_round(Member& member, const Dims& dims) {
    MemberState& state = member.state;
    state.row_elements = product(dims) * member.spec().components;
    if (dims == member.spec().round) {
        state.shape = kDeclaredShape;
        return;
    }
    state.shape = member.before.shape == 0;  // not the one that readers of the committed state need
    Shape& shape = member.new_shape(state.shape);
    store_barrier();  // after the commits since which no reader needs the old shape (commit.hpp)
    for (size_t i = 0; i < dims.size(); ++i) store_relaxed(shape.dims[i], dims[i]);
    store(shape.rank, uint64_t{dims.size()});
}

// TensorFlow's checks against the round (semantics: rows 8a, 8b; dense: 3).
inline void check_shape(Member& member, const Dims& dims) {
    if (member.state.count == 0) return;
    if (member.state.shape == kDeclaredShape && dims == member.spec().round) return;
    const Dims round = round_dims(member);
    if (member.spec().kind == kDense) {
        if (dims != round)
            throw Error(Failure::kInvalidArgument,
                        "Shape mismatch: expected " + in_brackets(round) + ", got " + in_brackets(dims));
        return;
    }
    if (dims.size() != round.size())
        throw Error(Failure::kInvalidArgument, "Shape mismatch: expected values rank " +
                                                   std::to_string(round.size() + 1) + ", got " +
                                                   std::to_string(dims.size() + 1));
    for (size_t i = 0; i < dims.size(); ++i)
        if (dims[i] != round[i])
            throw Error(Failure::kInvalidArgument,
                        "Shape mismatch: expected values dim " + std::to_string(i + 1) + " to be " +
                            std::to_string(round[i]) + ", got " + std::to_string(dims[i]));
}

// How a take reduces, and the range that results must fit.
struct Reduce {
    bool divide;
    int64_t divisor;  // 0: a row's contributions
    int64_t lowest;  // integers: the dtype's range
    uint64_t highest;
};

template <class T>
bool within(T value, const Reduce& reduce) {
    if constexpr (std::is_floating_point_v<T>) return true;
    // No early exit: several at a time.
    if constexpr (std::is_signed_v<T>)
        return (value >= reduce.lowest) & ((value < 0) | (static_cast<uint64_t>(value) <= reduce.highest));
    return static_cast<uint64_t>(value) <= reduce.highest;
}

// out[i] = sums[i], divided if asked to; false if a result does not fit the dtype.
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
            // Dividing by a power of two equals multiplying by its inverse, to the bit, and multiplying is
            // much cheaper.
            if (count > 1 && (divisor & (divisor - 1)) == 0) {
                const T inverse = T{1} / static_cast<T>(divisor);
                for (uint64_t j = 0; j < count; ++j) out[j] = sums[j] * inverse;
                return true;
            }
        }
        if constexpr (std::is_integral_v<T>) {
            // A shift instead of a division, which takes as long as a dozen of them; towards zero as well.
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

}  // namespace shmacc
