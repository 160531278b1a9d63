// Prepares a sparse gradient: checks its rows, sorts them, and adds up rows that repeat.
//
// The caller does this before it takes the lock. Values are not moved unless rows repeat: a gradient that is merely
// unsorted is read through `order_`.
#pragma once

#include <algorithm>
#include <memory>
#include <vector>

#include "base/errors.hpp"
#include "values/add.hpp"
#include "values/distinct_rows.hpp"

namespace shmacc {

struct RowCheck {
    bool ascending;  // strictly
    int64_t over;  // position of the first row number that is not below the limit; -1: none
    int64_t negative;  // position of the first negative row number; -1: none
};

inline RowCheck check_rows(const int64_t* keys, uint64_t count, int64_t limit) {
    RowCheck check{strictly_ascending(keys, count), -1, -1};
    if (count == 0) return check;
    if (check.ascending && keys[0] >= 0 && keys[count - 1] < limit) return check;
    const RowExtent extent = extent_of(keys, count);
    if (extent.least >= 0 && extent.greatest < limit) return check;
    for (uint64_t i = count; i-- > 0;) {
        if (keys[i] >= limit) check.over = static_cast<int64_t>(i);
        if (keys[i] < 0) check.negative = static_cast<int64_t>(i);
    }
    return check;
}

// The position of a row number that occurs twice; -1: each occurs once.
inline int64_t repeated_row(const int64_t* keys, uint64_t count) {
    const std::vector<uint32_t> order = ascending_order(keys, static_cast<uint32_t>(count));
    for (uint64_t i = 1; i < count; ++i)
        if (keys[order[i]] == keys[order[i - 1]]) return order[i];
    return -1;
}

template <class Combine>
class SortedRows {
    using T = typename Combine::Number;

  public:
    // counts: contributions of each row, or null for `weight` each. All arrays must outlive this.
    // ascending: whether keys are strictly ascending already (from check_rows).
    // Call `sort` before anything else.
    SortedRows(const int64_t* keys, const T* values, const int64_t* counts, int64_t weight, uint32_t count,
               uint64_t width, bool ascending)
        : keys_(keys), values_(values), counts_(counts), weight_(weight), count_(count), width_(width),
          ascending_(ascending) {}

    // Adds up the values of a row that occurs several times, in the gradient's order (`a[i] += v` would lose some:
    // numpy#16790). Such a row still counts as one contribution. (A partial's rows do not repeat: gradient_checks.py.)
    void sort() {
        if (ascending_) return;
        distinct_ = distinct_rows(keys_, count_);
        const auto distinct = static_cast<uint32_t>(distinct_.rows.size());
        if (distinct == count_) {
            order_ = distinct_.order.data();
        } else {
            merged_.reset(new T[distinct * width_]);
            bool fits = true;
            with_width(width_, [&](auto width) { fits = sum<width.value>(distinct_.positions, distinct); });
            if (!fits) sum_overflows();
            values_ = merged_.get();
            count_ = distinct;
        }
        keys_ = distinct_.rows.data();
        ascending_ = true;
    }

    uint32_t count() const { return count_; }
    const int64_t* keys() const { return keys_; }
    // Whether the values of consecutive rows are adjacent.
    bool contiguous() const { return order_ == nullptr; }
    const T* row(uint32_t i, uint64_t width) const { return values_ + at(i) * width; }
    // Whether each row has its own number of contributions.
    bool counted() const { return counts_ != nullptr; }
    int64_t weight() const { return weight_; }
    int64_t contributions(uint32_t i) const { return counts_ ? counts_[at(i)] : weight_; }
    [[noreturn]] static void sum_overflows() {
        throw Error(Failure::kOutOfRange,
                    "A 64-bit sum would overflow; the gradient was not added, nothing was changed");
    }

  private:
    static constexpr uint32_t kAhead = 16;
    static constexpr uint64_t kNearBytes = 256 << 10;  // sums this small stay in the second-level cache

    uint64_t at(uint32_t i) const { return order_ ? order_[i] : i; }

    // Adds the rows to their sums, in the gradient's order. So the hardware prefetches the rows, and only the sums are
    // at random addresses. The sums are fewer, the most frequent ones stay in the caches, and the others are fetched
    // kAhead rows in advance. (If each sum were finished before the next, every row would be at a random address, and
    // waiting for rows would take most of an apply.) Returns false if a sum does not fit.
    template <uint64_t kWidth>
    bool sum(const std::vector<uint32_t>& positions, uint32_t distinct) {
        const uint64_t width = kWidth ? kWidth : width_;
        const bool near = distinct * width * sizeof(T) <= kNearBytes;
        const uint32_t fetching = near || count_ < kAhead ? 0 : count_ - kAhead;
        // Narrow sums begin as -0.0, and adding a number to that gives the number itself. This is faster than checking
        // for each sum whether it has begun.
        constexpr bool kNarrow = kWidth * sizeof(T) > 0 && kWidth * sizeof(T) <= 16;
        if (kNarrow) std::fill_n(merged_.get(), distinct * width, Combine::kNeutral);
        std::vector<bool> begun(kNarrow ? 0 : distinct);
        bool fits = true;
        for (uint32_t i = 0; i < count_; ++i) {
            if (i < fetching) prefetch_row(merged_.get() + positions[i + kAhead] * width, width);
            T* row = merged_.get() + positions[i] * width;
            const T* value = values_ + i * width;
            if (kNarrow || begun[positions[i]]) {
                fits = Combine::row(row, value, width) && fits;
            } else {
                begun[positions[i]] = true;
                copy_numbers(row, value, width);
            }
        }
        return fits;
    }

    const int64_t* keys_;
    const T* values_;
    const int64_t* counts_;
    int64_t weight_;
    uint32_t count_;
    uint64_t width_;
    bool ascending_;
    const uint32_t* order_ = nullptr;
    DistinctRows distinct_;
    std::unique_ptr<T[]> merged_;
};

}  // namespace shmacc
