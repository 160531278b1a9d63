// Sorts row numbers: gradients are added, and results handed out, in ascending order of row.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "values/kernels.hpp"

namespace shmacc {

template <class Key>
std::vector<uint32_t> order_by_digits(const int64_t* keys, uint32_t count) {
    constexpr int kBits = 11;
    constexpr uint64_t kDigits = 1u << kBits;
    constexpr uint32_t kFew = 256;  // below this, comparing is faster than counting
    struct Item {
        Key key;
        uint32_t at;  // its position
    };
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
// digits in which no keys differ are skipped. Keys below 2**32 are sorted in half the memory.
inline std::vector<uint32_t> ascending_order(const int64_t* keys, uint32_t count) {
    uint64_t bits = 0;
    for (uint32_t i = 0; i < count; ++i) bits |= static_cast<uint64_t>(keys[i]);
    return bits >> 32 ? order_by_digits<uint64_t>(keys, count) : order_by_digits<uint32_t>(keys, count);
}

}  // namespace shmacc
