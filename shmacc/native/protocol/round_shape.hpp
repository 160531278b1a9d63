// The shape that a member's values have in a round.
#pragma once

#include <type_traits>
#include <vector>

#include "protocol/lane.hpp"

namespace shmacc {

constexpr uint64_t kMostElements = uint64_t{1} << 36;

// Returns false if there are more elements than a segment may have. For this limit a dimension of 0 counts as 1, as in
// NumPy, so that the other dimensions are bounded, too.
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

// The dims of a round's values. shape: the round's shape; not used if it is the declared one.
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
    SHMACC_ASSERT(state.shape != member.before.shape && dims.size() <= kMaxRank);
    Shape& shape = member.new_shape(state.shape);
    store_barrier();  // after the commit that made the old shape unused (commit.hpp)
    for (size_t i = 0; i < dims.size(); ++i) store_relaxed(shape.dims[i], dims[i]);
    store(shape.rank, uint64_t{dims.size()});
}

// Checks a gradient's shape against the round's, as TensorFlow does.
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

}  // namespace shmacc
