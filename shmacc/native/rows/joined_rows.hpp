// Rows of several shards, put together in ascending order: what a chief makes of a round (shmacc.ray).
#pragma once

#include "rows/kernels.hpp"
#include "rows/row_order.hpp"

namespace shmacc {

// The position of each row in ascending order.
inline void find_positions(const int64_t* rows, uint64_t count, int64_t* positions) {
    if (count > kMaxRows) throw Error(Failure::kResourceExhausted, "A round hands out at most 2**32 rows");
    const std::vector<uint32_t> order = ascending_order(rows, static_cast<uint32_t>(count));
    for (uint64_t i = 0; i < count; ++i) positions[order[i]] = static_cast<int64_t>(i);
}

// Copies each row to its position in `all`, which has `size` rows; large tables past the caches, as takes do
// (reduction.hpp).
inline void put_rows(unsigned char* all, uint64_t size, uint64_t row_bytes, const int64_t* positions,
                     const unsigned char* rows, uint64_t count) {
    for (uint64_t i = 0; i < count; ++i)
        if (static_cast<uint64_t>(positions[i]) >= size)
            throw Error(Failure::kInvalidArgument, "A row's position is not in the table");
    const bool streamed = is_streamed(all, size * row_bytes, row_bytes);
    for (uint64_t i = 0; i < count; ++i) {
        unsigned char* const to = all + static_cast<uint64_t>(positions[i]) * row_bytes;
        const unsigned char* const from = rows + i * row_bytes;
        if (streamed)
            stream(to, from, row_bytes);
        else if (row_bytes)
            std::memcpy(to, from, row_bytes);
    }
    if (streamed) end_of_stream();
}

}  // namespace shmacc
