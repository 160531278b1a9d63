// Merges the rows of several tables or arrays: a sparse member's sums in the lanes of a round, or its rows as several
// hosts have sent them. Equal rows are added up in the order of their sources.
#pragma once

#include "values/add.hpp"
#include "values/reduction.hpp"
#include "values/row_order.hpp"
#include "values/row_targets.hpp"

namespace shmacc {

// A source: rows in any order, each once. In a damaged segment rows may change while they are read, so every access
// must stay in bounds.
template <class T>
struct RowSource {
    const int64_t* keys;  // row i has keys[i * stride]
    const int64_t* contributions;
    uint64_t stride;
    const T* rows;
    uint64_t count;
};

template <class Combine>
class Merge {
    using T = typename Combine::Number;

  public:
    Merge(std::vector<RowSource<T>> sources, uint64_t width);
    // How many distinct rows there are.
    uint64_t rows() const { return keys_.size(); }

    // Writes all rows, reduced, in ascending order. Returns false if a result does not fit.
    bool read(RowTargets<T>& to, const Reduce& reduce);

    // Adds up a dense member's arrays and reduces their sum. Returns false if a result does not fit.
    static bool reduce_arrays(T* out, const std::vector<const T*>& arrays, uint64_t size, const Reduce& reduce);

  private:
    static constexpr uint64_t kAhead = 32;

    void sort() {
        order_ = ascending_order(keys_.data(), static_cast<uint32_t>(total_));  // equal rows in order of source
        std::vector<int64_t> distinct;
        distinct.reserve(total_);
        for (const uint32_t i : order_)
            if (distinct.empty() || keys_[i] != distinct.back()) distinct.push_back(keys_[i]);
        if (distinct.size() < total_) {
            repeats_.resize(total_);
            for (uint64_t i = 1; i < total_; ++i) repeats_[i] = keys_[order_[i]] == keys_[order_[i - 1]];
        }
        keys_ = std::move(distinct);
    }

    // kWidth: the row's width, or 0 for any.
    template <uint64_t kWidth, bool kStreamed, class Targets>
    bool read_rows(Targets& targets, const Reduce& reduce) {
        const uint64_t width = kWidth ? kWidth : width_;
        std::vector<T> sum(repeats_.empty() ? 0 : width);
        bool fits = true;
        uint64_t row = 0;
        for (uint64_t i = 0; i < total_; ++row) {
            if (!order_.empty() && i + kAhead < total_) {
                const auto [source, at] = find(order_[i + kAhead]);
                __builtin_prefetch(&source.contributions[at * source.stride]);
                prefetch_row(source.rows + at * width, width);
            }
            const auto [source, at] = find(order_.empty() ? i : order_[i]);
            const T* sums = source.rows + at * width;
            int64_t count = contributions_of(source, at);
            for (++i; !repeats_.empty() && i < total_ && repeats_[i]; ++i) {
                const auto [other, there] = find(order_[i]);
                if (__builtin_add_overflow(count, contributions_of(other, there), &count))
                    data_loss("a row's contributions do not fit");
                const T* const row_there = other.rows + there * width;
                fits = (sums == sum.data() ? Combine::row(sum.data(), row_there, width)
                                           : Combine::into(sum.data(), sums, row_there, width)) &&
                       fits;
                sums = sum.data();
            }
            T* const to = targets.add(row, keys_[row], count);
            fits = reduce_row<kWidth, kStreamed>(to, sums, width, count, reduce) && fits;
        }
        return fits;
    }
    static int64_t contributions_of(const RowSource<T>& source, uint64_t at) {
        const int64_t contributions = source.contributions[at * source.stride];
        if (contributions <= 0) data_loss("a row has no contributions");
        return contributions;
    }
    std::pair<const RowSource<T>&, uint64_t> find(uint64_t i) const {
        const uint64_t source = source_of_[i];
        return {sources_[source], i - starts_[source]};
    }

    const std::vector<RowSource<T>> sources_;
    const uint64_t width_;
    std::vector<uint64_t> starts_;  // for each source, how many rows the sources before it have
    std::vector<uint32_t> source_of_;  // for each row, the number of its source
    uint64_t total_ = 0;
    std::vector<int64_t> keys_;  // ascending, each once
    std::vector<uint32_t> order_;  // empty: the rows are ascending as they are
    std::vector<uint8_t> repeats_;  // whether a row equals the one before it in order_; empty: none does
};

template <class Combine>
Merge<Combine>::Merge(std::vector<RowSource<T>> sources, uint64_t width)
    : sources_(std::move(sources)), width_(width) {
    for (const RowSource<T>& source : sources_) {
        starts_.push_back(total_);
        total_ += source.count;
    }
    if (total_ > kMaxRows) throw Error(Failure::kResourceExhausted, "A take hands out at most 2**32 rows");
    keys_.reserve(total_);
    source_of_.reserve(total_);
    for (uint32_t number = 0; number < sources_.size(); ++number) {
        const RowSource<T>& source = sources_[number];
        for (uint64_t i = 0; i < source.count; ++i) keys_.push_back(source.keys[i * source.stride]);
        source_of_.resize(keys_.size(), number);
    }
    if (!strictly_ascending(keys_.data(), total_)) sort();
}
template <class Combine>
bool Merge<Combine>::read(RowTargets<T>& to, const Reduce& reduce) {
    return to.fill(width_, rows(), [&](auto width, auto streamed, auto& targets) {
        return read_rows<width.value, streamed.value>(targets, reduce);
    });
}

template <class Combine>
bool Merge<Combine>::reduce_arrays(T* out, const std::vector<const T*>& arrays, uint64_t size,
                                   const Reduce& reduce) {
    constexpr uint64_t kPiece = 1024;  // numbers that stay in the first-level cache
    const bool streamed = is_streamed(out, size * sizeof(T), kPiece * sizeof(T));
    if (arrays.size() == 1 && !streamed) return reduce_into(out, arrays[0], size, reduce.divisor, reduce);
    T sum[kPiece];
    bool fits = true;
    for (uint64_t at = 0; at < size; at += kPiece) {
        const uint64_t count = std::min(kPiece, size - at);
        const T* sums = arrays[0] + at;
        for (size_t i = 1; i < arrays.size(); ++i) {
            fits = (i == 1 ? Combine::into(sum, sums, arrays[1] + at, count)
                           : Combine::many(sum, arrays[i] + at, count)) &&
                   fits;
            sums = sum;
        }
        fits = (streamed && count == kPiece
                    ? reduce_row<kPiece, true>(out + at, sums, count, reduce.divisor, reduce)
                    : reduce_into(out + at, sums, count, reduce.divisor, reduce)) &&
               fits;
    }
    if (streamed) end_of_stream();
    return fits;
}

// Compiled in merge.cpp.
SHMACC_FOR_ALL_SUMS(extern template class, Merge);

}  // namespace shmacc
