// Orders of rows: ascending, as gradients are added and results handed out; or shard by shard, as hosts ship them.
//
// The forwarder of a host (shmacc.ray) ships rows shard by shard; a chief puts those of all shards in ascending order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <vector>

#include "rows/kernels.hpp"
#include "segment/support.hpp"

namespace shmacc {

// A key that is to be sorted, and where it is.
template <class Key>
struct KeyAt {
    Key key;
    uint32_t at;
};

template <class Key>
std::vector<uint32_t> order_by_digits(const int64_t* keys, uint32_t count) {
    constexpr int kBits = 11;
    constexpr uint64_t kDigits = 1u << kBits;
    constexpr uint32_t kFew = 256;  // below this, comparing is faster than counting
    using Item = KeyAt<Key>;
    std::unique_ptr<Item[]> from(new Item[count]), to(new Item[count]);
    uint64_t differing = 0;
    for (uint32_t i = 0; i < count; ++i) {
        from[i] = {static_cast<Key>(keys[i]), i};
        differing |= from[i].key ^ from[0].key;
    }
    if (count <= kFew) {
        std::sort(from.get(), from.get() + count,
                  [](const Item& a, const Item& b) { return a.key != b.key ? a.key < b.key : a.at < b.at; });
        differing = 0;
    }
    for (int shift = 0; shift < 64 && differing >> shift; shift += kBits) {
        if (((differing >> shift) & (kDigits - 1)) == 0) continue;
        const auto digit = [shift](const Item& item) {
            return (static_cast<uint64_t>(item.key) >> shift) & (kDigits - 1);
        };
        uint32_t starts[kDigits] = {};
        for (uint32_t i = 0; i < count; ++i) ++starts[digit(from[i])];
        uint32_t start = 0;
        for (uint32_t& at : starts) {
            uint32_t size = at;
            at = start;
            start += size;
        }
        for (uint32_t i = 0; i < count; ++i) to[starts[digit(from[i])]++] = from[i];
        std::swap(from, to);
    }
    std::vector<uint32_t> order(count);
    for (uint32_t i = 0; i < count; ++i) order[i] = from[i].at;
    return order;
}

// Indices into `keys` in ascending order of key; equal keys stay in their order. Radix sort of 11-bit digits;
// digits in which no keys differ are skipped. Most rows' numbers need half the memory.
inline std::vector<uint32_t> ascending_order(const int64_t* keys, uint32_t count) {
    uint64_t bits = 0;
    for (uint32_t i = 0; i < count; ++i) bits |= static_cast<uint64_t>(keys[i]);
    return bits >> 32 ? order_by_digits<uint64_t>(keys, count) : order_by_digits<uint32_t>(keys, count);
}

// The shard that a row is at, of so many: by a hash, since rows that are used often tend to have low numbers.
inline uint32_t shard_of(int64_t row, uint32_t shards) {
    return static_cast<uint32_t>(((static_cast<uint64_t>(row) * 0x9E3779B97F4A7C15) >> 32) * shards >> 32);
}

// How many rows each shard and those before it have: where its rows end, if they are in order of shard.
inline std::vector<uint64_t> ends_of_shards(const int64_t* rows, uint64_t count, uint32_t shards) {
    std::vector<uint64_t> ends(shards);
    for (uint64_t i = 0; i < count; ++i) ++ends[shard_of(rows[i], shards)];
    std::partial_sum(ends.begin(), ends.end(), ends.begin());
    return ends;
}

// Where rows go that are read in ascending order: each shard's together. Memory is best read in that order, in
// which gradients brought the rows; to write to several regions by turns costs little.
class PositionsByShard {
  public:
    PositionsByShard(const int64_t* rows, uint64_t count, uint32_t shards) : count_(count) {
        if (shards == 1) return;
        const std::vector<uint64_t> ends = ends_of_shards(rows, count, shards);
        next_.push_back(0);
        next_.insert(next_.end(), ends.begin(), ends.end() - 1);
    }
    // Of the row that is the i-th one in ascending order; to be called in that order.
    uint64_t position(uint64_t i, int64_t row) {
        if (next_.empty()) return i;
        const uint64_t position = next_[shard_of(row, static_cast<uint32_t>(next_.size()))]++;
        if (position >= count_) data_loss("its rows change while they are read");
        return position;
    }

  private:
    uint64_t count_;
    std::vector<uint64_t> next_;  // of each shard; empty: there is one
};

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
