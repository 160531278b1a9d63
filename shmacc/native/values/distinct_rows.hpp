// Finds the distinct rows of a list, in ascending order, and where each of them occurs.
//
// A batch's ids come in any order and repeat. If they lie close together (at least one in 128 numbers, on average), a
// bitmap from the least to the greatest id marks those that occur. A row's place is then the number of marks before its
// own. This takes four passes over the rows in order, and one over the bitmap, which stays in the second-level cache.
// Ids that lie further apart are sorted by their digits, which takes three times as long.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "values/kernels.hpp"
#include "values/row_order.hpp"

namespace shmacc {

struct DistinctRows {
    std::vector<int64_t> rows;  // ascending, each once
    std::vector<uint32_t> order;  // where each of `rows` is in the list; empty if a row repeats
    std::vector<uint32_t> positions;  // where each row of the list is in `rows`; empty if no row repeats
};

// A word of the bitmap: the marks of 64 numbers, and how many marks are in the words before it.
struct NumbersWord {
    uint64_t bits;
    uint64_t before;
};

// Sets `before` of each word, and returns how many marks there are in all.
SHMACC_TWO_WIDTHS static uint64_t count_bits(NumbersWord* words, uint64_t count) {
    uint64_t before = 0;
    for (uint64_t i = 0; i < count; ++i) {
        words[i].before = before;
        before += static_cast<uint64_t>(__builtin_popcountll(words[i].bits));
    }
    return before;
}
// Replaces each number by how many marks are below it: its place among the distinct rows.
SHMACC_TWO_WIDTHS static void numbers_to_places(const NumbersWord* words, uint32_t* numbers, uint32_t count) {
    for (uint32_t i = 0; i < count; ++i) {
        const NumbersWord& word = words[numbers[i] / 64];
        const uint64_t lesser = word.bits & ((uint64_t{1} << numbers[i] % 64) - 1);
        numbers[i] = static_cast<uint32_t>(word.before) + static_cast<uint32_t>(__builtin_popcountll(lesser));
    }
}

// All rows lie between `least` and `least + span`.
inline DistinctRows distinct_by_bits(const int64_t* rows, uint32_t count, int64_t least, uint64_t span) {
    std::vector<NumbersWord> words(span / 64 + 1);
    std::vector<uint32_t> places(count);
    for (uint32_t i = 0; i < count; ++i) {
        // The row is copied and bounded, since a caller's memory may change meanwhile.
        const uint64_t number = std::min(static_cast<uint64_t>(rows[i]) - static_cast<uint64_t>(least), span);
        places[i] = static_cast<uint32_t>(number);
        words[number / 64].bits |= uint64_t{1} << number % 64;
    }

    DistinctRows found;
    found.rows.resize(count_bits(words.data(), words.size()));
    int64_t* row = found.rows.data();
    for (uint64_t i = 0; i < words.size(); ++i)
        for (uint64_t bits = words[i].bits; bits; bits &= bits - 1)
            *row++ = least + static_cast<int64_t>(i * 64 + static_cast<uint64_t>(__builtin_ctzll(bits)));
    numbers_to_places(words.data(), places.data(), count);
    if (found.rows.size() < count) {
        found.positions = std::move(places);
    } else {
        found.order.resize(count);
        for (uint32_t i = 0; i < count; ++i) found.order[places[i]] = i;
    }
    return found;
}

inline DistinctRows distinct_by_digits(const int64_t* rows, uint32_t count) {
    DistinctRows found;
    found.order = ascending_order(rows, count);
    found.rows.resize(count);
    uint32_t distinct = 0;
    for (uint32_t i = 0; i < count; ++i) {
        found.rows[i] = rows[found.order[i]];
        distinct += i == 0 || found.rows[i] != found.rows[i - 1];
    }
    if (distinct == count) return found;
    found.positions.resize(count);
    uint32_t at = 0;
    for (uint32_t i = 0; i < count; ++i) {
        at += found.rows[i] != found.rows[at];
        found.rows[at] = found.rows[i];
        found.positions[found.order[i]] = at;
    }
    found.rows.resize(distinct);
    found.order.clear();
    return found;
}

inline DistinctRows distinct_rows(const int64_t* rows, uint32_t count) {
    if (count == 0) return {};
    const RowExtent extent = extent_of(rows, count);
    const uint64_t span = static_cast<uint64_t>(extent.greatest) - static_cast<uint64_t>(extent.least);
    return span / 128 < count && span < UINT32_MAX ? distinct_by_bits(rows, count, extent.least, span)
                                                   : distinct_by_digits(rows, count);
}

}  // namespace shmacc
