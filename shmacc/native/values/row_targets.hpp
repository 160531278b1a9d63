// Where a result's rows are written, in ascending order: all to one place, or each to its shard's memory.
//
// One pass over the rows serves all shards: writing to several places in turn costs little.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

#include "base/errors.hpp"
#include "values/kernels.hpp"

namespace shmacc {

// The shard that a row belongs to. Uses a hash, since rows that are used often tend to have low numbers.
inline uint32_t shard_of(int64_t row, uint32_t shards) {
    return static_cast<uint32_t>(((static_cast<uint64_t>(row) * 0x9E3779B97F4A7C15) >> 32) * shards >> 32);
}

// Memory for rows: their numbers, how many gradients each has, and their values.
template <class T>
struct RowTarget {
    int64_t* rows;
    int64_t* counts;
    T* values;
    uint64_t room;
};

// All rows go to one place, which has room for them.
template <class T>
class OneTarget {
  public:
    OneTarget(const RowTarget<T>& to, uint64_t width) : to_(to), width_(width) {}
    // Returns memory for all row numbers; it can be used until the first `add`.
    int64_t* scratch(uint64_t) { return to_.rows; }
    // Writes the i-th row's number and count; returns where its values are to go.
    T* add(uint64_t i, int64_t row, int64_t count) {
        to_.rows[i] = row;
        to_.counts[i] = count;
        return to_.values + i * width_;
    }

  private:
    const RowTarget<T> to_;
    const uint64_t width_;
};

// Each row goes to its shard's memory.
template <class T>
class ShardTargets {
  public:
    ShardTargets(std::vector<RowTarget<T>>& by_shard, uint64_t width) : by_shard_(by_shard), width_(width) {}
    int64_t* scratch(uint64_t rows) {
        scratch_.reset(new int64_t[rows]);
        return scratch_.get();
    }
    T* add(uint64_t, int64_t row, int64_t count) {
        RowTarget<T>& next = by_shard_[shard_of(row, static_cast<uint32_t>(by_shard_.size()))];
        if (next.room == 0) data_loss("its rows change while they are read");
        --next.room;
        *next.rows++ = row;
        *next.counts++ = count;
        T* const values = next.values;
        next.values += width_;
        return values;
    }

  private:
    std::vector<RowTarget<T>>& by_shard_;
    const uint64_t width_;
    std::unique_ptr<int64_t[]> scratch_;
};

template <class T>
class RowTargets {
  public:
    // streamed: values are written past the caches (is_streamed).
    RowTargets(std::vector<RowTarget<T>> by_shard, bool streamed)
        : by_shard_(std::move(by_shard)), streamed_(streamed) {}

    // Calls read(width, streamed, targets), which writes the rows. `width` and `streamed` are compile-time constants;
    // `width` is 0 if there is no loop for just this width.
    template <class Read>
    bool fill(uint64_t width, uint64_t rows, Read read) {
        bool fits = true;
        if (by_shard_.size() == 1) {
            if (rows > by_shard_[0].room) data_loss("its rows change while they are read");
            OneTarget<T> targets(by_shard_[0], width);
            with_width(width, [&](auto constant) {
                fits = streamed_ ? read(constant, std::true_type(), targets)
                                 : read(constant, std::false_type(), targets);
            });
            by_shard_[0].room -= rows;
        } else {
            ShardTargets<T> targets(by_shard_, width);
            constexpr std::integral_constant<uint64_t, 0> kAny;
            fits = streamed_ ? read(kAny, std::true_type(), targets) : read(kAny, std::false_type(), targets);
        }
        if (streamed_) end_of_stream();
        return fits;
    }
    // How much room each shard has left.
    uint64_t room(uint32_t shard) const { return by_shard_[shard].room; }

  private:
    std::vector<RowTarget<T>> by_shard_;
    const bool streamed_;
};

}  // namespace shmacc
