// The common part of sparse and dense rounds: the shape of a round, reserving space for it, reducing it,
// ending it.
#pragma once

#include <type_traits>
#include <vector>

#include "commit.hpp"

namespace shmacc {

using Dims = std::vector<int64_t>;

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

// shape: the state's.
inline Dims round_dims(const Shape& shape, const Config& config, const State& state) {
    const uint64_t components = config.components;
    uint64_t rank = load(shape.rank);
    if (rank > kMaxRank - (config.kind == kSparse)) data_loss("its shape has too many dimensions");
    Dims dims(rank);
    for (uint64_t i = 0; i < rank; ++i) dims[i] = load_relaxed(shape.dims[i]);
    uint64_t elements;
    if (!count_elements(dims, &elements)) data_loss("a dimension is out of range");
    if (elements * components != state.row_elements) data_loss("its shape and its rows disagree");
    return dims;
}

// The first gradient of a round fixes the round's shape. Takes effect with the commit.
inline void start_round(Header& header, const Config& config, State& state, const Dims& dims) {
    state.row_elements = product(dims) * config.components;
    const Shape& now = header.shapes[state.shape];
    if (now.rank == dims.size() && std::equal(dims.begin(), dims.end(), now.dims)) return;
    state.shape ^= 1;
    Shape& shape = header.shapes[state.shape];
    store_barrier();  // after the commits since which no reader needs the old shape (commit.hpp)
    for (size_t i = 0; i < dims.size(); ++i) store_relaxed(shape.dims[i], dims[i]);
    store(shape.rank, uint64_t{dims.size()});
}

// Sizes grow by a sixteenth, or 64 KiB: memory stays near what the rows need.
inline uint64_t with_room(uint64_t bytes) { return page_up(bytes + std::max<uint64_t>(bytes / 16, 65536)); }

inline void ensure_reserved(State& state, Mapping& mapping, uint32_t region, uint64_t bytes) {
    if (bytes <= state.reserved[region]) return;
    uint64_t grown = with_room(bytes);
    mapping.grow(region, state.reserved[region], grown);
    state.reserved[region] = grown;
}

// Memory of a region that is kept beyond a round's need: small enough to keep a segment within 1 MiB of it.
constexpr uint64_t kSpare = 1 << 17;
constexpr uint64_t kSmallRounds = 8;

// Empties the round; takes effect with the commit, and `give_back` follows that.
//
// A round leaves its memory to the next one. Memory that it has not needed is given back, but not at once:
// reserving it again costs the next large round several times its apply, so memory that is given back and
// reserved with every other round would be most of their cost. It is given back when kSmallRounds rounds in a
// row have left much of it unused; so large rounds cost that at most once in so many rounds, and a segment
// holds
//
//   in each region at most 5/4 of the bytes, and kSpare, that the largest of this round and the kSmallRounds
//   rounds before it needed there (the index: twice).
//
// Rounds without gradients count, so an accumulator whose step alone is advanced keeps nothing for long.
inline void end_round(State& state, uint64_t row_bytes, uint64_t index_buckets_needed) {
    const uint64_t rows = state.rows;
    uint64_t needed[kRegions] = {};
    needed[kSlotsRegion] = rows * sizeof(Slot);
    needed[kRows0Region] = std::max<uint64_t>(rows, 1) * row_bytes;
    needed[kRows1Region] = rows ? 0 : row_bytes;
    needed[kUndoLogRegion] = rows * kUndoLogBytes;
    needed[kUndoRowsRegion] = rows * row_bytes;
    const bool large_index = state.index_buckets > 2 * index_buckets_needed + kSpare / sizeof(Bucket);
    auto large = [&](uint32_t region) { return state.reserved[region] > needed[region] / 4 * 5 + kSpare; };
    bool small = large_index;
    for (uint32_t region = kSlotsRegion; region < kRegions; ++region) small |= large(region);
    state.small_rounds = small ? state.small_rounds + 1 : 0;
    const bool enough = state.small_rounds >= kSmallRounds;
    if (enough) {
        for (uint32_t region = kSlotsRegion; region < kRegions; ++region)
            if (large(region)) state.reserved[region] = with_room(needed[region]);
        state.small_rounds = 0;
    }
    if ((enough && large_index) || state.index_stamp == UINT32_MAX) {
        state.reserved[kIndex0Region + state.index] = 0;
        state.index_buckets = state.index_stamp = 0;
    }
    ++state.index_stamp;
    state.index_filled = 0;
    state.rows = 0;
    state.count = 0;
}

inline void give_back(Mapping& mapping, const State& before, const State& now) {
    for (uint32_t region = 0; region < kRegions; ++region)
        if (now.reserved[region] < before.reserved[region]) mapping.punch(region, now.reserved[region]);
}

// How a take reduces, and the range that results must fit.
struct Reduce {
    bool divide;       // by contributions, or by `gradients`
    bool by_gradients;
    int64_t gradients;
    int64_t lowest;    // integers: the dtype's range
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
        const int64_t divisor = reduce.by_gradients ? reduce.gradients : contributions;
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
