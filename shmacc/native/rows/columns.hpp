// Rows of many members in one column, one member's after the other, as hosts and shards send them to each other. What
// comes in is checked here: a wrong column is an error, and never a wrong place in memory.
#pragma once

#include <numeric>
#include <queue>

#include "rows/row_order.hpp"

namespace shmacc {

// A column: numbers of rows, and how many of them each member has.
struct Column {
    const int64_t* rows;
    uint64_t count;
    const int64_t* lengths;
    uint64_t members;

    // Whether the members' rows are all that there are.
    bool fits() const {
        uint64_t left = count;
        for (uint64_t i = 0; i < members; ++i) {
            if (lengths[i] < 0 || static_cast<uint64_t>(lengths[i]) > left) return false;
            left -= static_cast<uint64_t>(lengths[i]);
        }
        return left == 0;
    }
};

// The first member whose rows do not ascend from 0 to below its limit, or have counts other than 1 to its weight; -1:
// there is none. counts: one for each row. limits, weights: one for each member.
inline int64_t wrong_member(const Column& column, const int64_t* counts, const int64_t* limits,
                            const int64_t* weights) {
    const int64_t* row = column.rows;
    for (uint64_t member = 0; member < column.members; ++member) {
        int64_t last = -1;
        for (const int64_t* const end = row + column.lengths[member]; row < end; ++row, ++counts) {
            if (*row <= last || *row >= limits[member] || *counts < 1 || *counts > weights[member])
                return static_cast<int64_t>(member);
            last = *row;
        }
    }
    return -1;
}

// Merges columns of which each member's rows ascend: `rows` and `counts` get all rows of a member in ascending order,
// positions[i] where among its member's rows each row of the i-th column is.
inline void merge_columns(const std::vector<Column>& columns, const std::vector<const int64_t*>& counts,
                          int64_t* rows, int64_t* merged_counts, const std::vector<int64_t*>& positions) {
    struct Next {
        int64_t row;
        size_t column;
        bool operator>(const Next& other) const {
            return row != other.row ? row > other.row : column > other.column;
        }
    };
    std::vector<uint64_t> at(columns.size()), end(columns.size());
    const uint64_t members = columns.empty() ? 0 : columns[0].members;
    for (uint64_t member = 0; member < members; ++member) {
        std::priority_queue<Next, std::vector<Next>, std::greater<Next>> next;
        for (size_t i = 0; i < columns.size(); ++i) {
            end[i] = at[i] + static_cast<uint64_t>(columns[i].lengths[member]);
            if (at[i] < end[i]) next.push({columns[i].rows[at[i]], i});
        }
        for (int64_t position = 0; !next.empty(); ++position) {
            const auto [row, i] = next.top();
            next.pop();
            *rows++ = row;
            *merged_counts++ = counts[i][at[i]];
            positions[i][at[i]++] = position;
            if (at[i] < end[i]) next.push({columns[i].rows[at[i]], i});
        }
    }
}

}  // namespace shmacc
