// The sums of a sparse member in a lane: adds a gradient's rows, and reads all rows. Needs the lane's lock.
#pragma once

#include "protocol/round_shape.hpp"
#include "protocol/undo_rows.hpp"
#include "values/distinct_rows.hpp"
#include "values/reduction.hpp"
#include "values/row_index.hpp"
#include "values/row_targets.hpp"
#include "values/sorted_rows.hpp"

namespace shmacc {

template <class Combine>
class SparseSums {
    using T = typename Combine::Number;

  public:
    explicit SparseSums(Member& member)
        : member_(member), state_(member.state), hash_(member.lane().hash_key()) {}

    // The places of a gradient's rows.
    struct Found {
        std::unique_ptr<Run[]> runs;
        uint32_t count = 0;
        uint64_t fresh = 0;  // rows that have no sums yet
        uint64_t end_of_old = 0;  // one past the last place of a row that has sums
        const Run* begin() const { return runs.get(); }
        const Run* end() const { return runs.get() + count; }
    };
    // Finds the gradient's rows, and reserves room for those that are new.
    Found prepare(const SortedRows<Combine>& gradient);
    // Adds the gradient's rows, between begin and commit.
    void add(const SortedRows<Combine>& gradient, const Found& found, Undo& undo);
    // Whether there are sums for any of these rows. The rows must ascend.
    bool has_any(const int64_t* keys, uint32_t count);
    // Writes all rows, reduced, in ascending order. Returns false if a result does not fit the dtype.
    bool read(RowTargets<T>& to, const Reduce& reduce);

  private:
    static constexpr uint64_t kPieceBytes = 2048;
    static constexpr uint32_t kPieceRows = 256;
    static constexpr uint32_t kAhead = 32;

    template <uint64_t kWidth, bool kStreamed, class Targets>
    bool read_rows(Targets& targets, const Reduce& reduce) {
        const uint64_t width = kWidth ? kWidth : state_.row_elements;
        const uint32_t count = static_cast<uint32_t>(state_.rows);
        const RowPlace* places = this->places(count);
        const T* sums = member_.array<T>(kRows0, count * width);
        int64_t* const keys = targets.scratch(count);
        for (uint32_t i = 0; i < count; ++i) keys[i] = places[i].row;
        std::vector<uint32_t> order;
        if (!strictly_ascending(keys, count)) {
            DistinctRows distinct = distinct_rows(keys, count);
            if (!distinct.positions.empty()) data_loss("a row is in its table twice");
            order = std::move(distinct.order);
        }
        bool fits = true;
        for (uint32_t i = 0; i < count; ++i) {
            if (!order.empty() && i + kAhead < count) {
                __builtin_prefetch(&places[order[i + kAhead]]);
                prefetch_row(sums + order[i + kAhead] * width, width);
            }
            const uint32_t place = order.empty() ? i : order[i];
            const int64_t contributions = places[place].contributions;
            if (contributions <= 0) data_loss("a row has no contributions");
            T* const to = targets.add(i, places[place].row, contributions);
            fits = reduce_row<kWidth, kStreamed>(to, sums + place * width, width, contributions, reduce) &&
                   fits;
        }
        return fits;
    }

    // kWidth: the row's width, or 0 for any.
    template <uint64_t kWidth>
    void add_rows(const SortedRows<Combine>& gradient, const Found& found, Undo& undo) {
        SHMACC_ASSERT(found.fresh <= gradient.count() && found.end_of_old <= member_.before.rows);
        const uint64_t width = kWidth ? kWidth : state_.row_elements;
        const uint64_t rows = state_.rows;
        RowPlace* places = this->places(rows + found.fresh);
        T* sums = member_.array<T>(kRows0, (rows + found.fresh) * width);
        Inserts inserts(member_.index(hash_));
        const Run* const end = found.end();
        const uint64_t old = gradient.count() - found.fresh;
        undo.start(member_.number(), old, old * width * sizeof(T));

        // Each run is saved and added in pieces that stay in the first-level cache. (If a gradient resembles an earlier
        // one, its runs are long.) The start of a run is fetched kAhead runs in advance: this hides the cache misses,
        // for which an apply of wide rows mostly waits.
        const uint32_t longest = static_cast<uint32_t>(
            std::clamp<uint64_t>(kPieceBytes / std::max<uint64_t>(width * sizeof(T), 1), 1, kPieceRows));
        uint32_t at = 0;
        for (const Run& run : found) {
            if (end - &run > kAhead) {
                const Run& later = (&run)[kAhead];
                if (later.place != kAbsent) {
                    __builtin_prefetch(&places[later.place], 1);
                    prefetch_row(sums + later.place * width, width);
                }
            }
            if (run.place == kAbsent) {
                append<kWidth>(gradient, at, run.length, places, sums, inserts);
                at += run.length;
                continue;
            }
            for (uint32_t done = 0, length; done < run.length; done += length, at += length) {
                length = std::min(longest, run.length - done);
                const uint32_t place = run.place + done;
                undo.save<kWidth>(places + place, sums + place * width, place, length, width);
                add_piece<kWidth>(gradient, at, length, places + place, sums + place * width);
            }
        }
        SHMACC_ASSERT(at == gradient.count() && state_.rows == rows + found.fresh);
        inserts.finish();
    }

    // Adds rows that have no sums yet.
    template <uint64_t kWidth>
    void append(const SortedRows<Combine>& gradient, uint32_t at, uint32_t count, RowPlace* places, T* sums,
                Inserts& inserts) {
        const uint64_t width = kWidth ? kWidth : state_.row_elements;
        const int64_t* keys = gradient.keys();
        const uint32_t end = at + count;
        uint64_t place = state_.rows;
        SHMACC_ASSERT((place + count) * sizeof(RowPlace) <= state_.reserved[kPlaces]);
        SHMACC_ASSERT((place + count) * width * sizeof(T) <= state_.reserved[kRows0]);
        for (uint32_t i = at; i < end; ++i, ++place) {
            const int64_t key = keys[i];
            places[place].row = key;
            places[place].contributions = gradient.contributions(i);
            copy_numbers(sums + place * width, gradient.row(i, width), width);
            inserts.add(key, place);
        }
        state_.rows = place;
    }

    // Adds `length` rows of the gradient, from `at` on, to consecutive rows.
    template <uint64_t kWidth>
    void add_piece(const SortedRows<Combine>& gradient, uint32_t at, uint32_t length, RowPlace* places,
                   T* sums) {
        const uint64_t width = kWidth ? kWidth : state_.row_elements;
        if (gradient.counted()) {
            for (uint32_t j = 0; j < length; ++j)
                add_contributions(places[j], gradient.contributions(at + j));
        } else {
            for (uint32_t j = 0; j < length; ++j) add_contributions(places[j], gradient.weight());
        }
        bool fits = true;
        if (gradient.contiguous() && length > 1) {
            fits = Combine::many(sums, gradient.row(at, width), length * width);
        } else {
            for (uint32_t j = 0; j < length; ++j)
                fits = Combine::row(sums + j * width, gradient.row(at + j, width), width) && fits;
        }
        if (!fits) SortedRows<Combine>::sum_overflows();
    }

    // In a sound segment the sum fits. In a damaged one `contributions` may be anything, and the sum may wrap around.
    static void add_contributions(RowPlace& place, int64_t more) {
        place.contributions = static_cast<int64_t>(static_cast<uint64_t>(place.contributions) +
                                                   static_cast<uint64_t>(more));
    }

    RowPlace* places(uint64_t rows) { return member_.array<RowPlace>(kPlaces, rows); }

    // Reserves room for `fresh` new rows, and rebuilds the index if it would be crowded.
    void reserve(uint64_t fresh) {
        const uint64_t rows = state_.rows + fresh;
        const uint64_t row_bytes = state_.row_elements * sizeof(T);
        if (rows > kMaxRows || (row_bytes && rows > kRegionSpan / row_bytes))
            throw Error(Failure::kResourceExhausted,
                        "An accumulator holds at most 2**32 rows and 2**40 bytes");
        member_.ensure_reserved(kPlaces, rows * sizeof(RowPlace));
        member_.ensure_reserved(kRows0, rows * row_bytes);
        const uint64_t leftovers = member_.lane_state().leftovers - state_.leftovers_before;
        if (fresh && Index::crowded(state_.index_filled + leftovers + fresh, state_.index_buckets))
            rebuild_index(rows);
    }

    // Builds the index in the region that is not current; the commit makes it current.
    void rebuild_index(uint64_t rows) {
        SHMACC_ASSERT(member_.lane().may_begin());
        const uint32_t other = state_.index ? kIndex0 : kIndex1;
        const uint64_t buckets = Index::buckets_for(rows);
        SHMACC_ASSERT(rows >= state_.rows && !Index::crowded(rows, buckets));
        const bool empty = member_.empty(other);  // an operation that died may have left entries there
        state_.reserved[other] = 0;
        member_.ensure_reserved(other, buckets * sizeof(Bucket), false);
        state_.reserved[kIndex0 + state_.index] = 0;
        state_.index = other - kIndex0;
        state_.index_buckets = buckets;
        state_.index_stamp = 1;
        state_.index_filled = state_.rows;
        if (!empty) std::fill_n(member_.array<Bucket>(other, buckets), buckets, Bucket{});
        state_.leftovers_before = member_.lane_state().leftovers;
        const RowPlace* places = this->places(state_.rows);
        Inserts inserts(member_.index(hash_));
        for (uint64_t place = 0; place < state_.rows; ++place) inserts.add(places[place].row, place);
        inserts.finish();
    }

    Member& member_;
    MemberState& state_;
    const RowHash hash_;
};

template <class Combine>
typename SparseSums<Combine>::Found SparseSums<Combine>::prepare(const SortedRows<Combine>& gradient) {
    Found found{std::unique_ptr<Run[]>(new Run[gradient.count()])};
    found.count = member_.index(hash_).find(gradient.keys(), gradient.count(), places(state_.rows),
                                            state_.rows, found.runs.get());
    for (const Run& run : found) {
        const bool absent = run.place == kAbsent;
        found.fresh += absent ? run.length : 0;
        found.end_of_old = std::max(found.end_of_old, absent ? 0 : uint64_t{run.place} + run.length);
    }
    reserve(found.fresh);
    return found;
}
template <class Combine>
void SparseSums<Combine>::add(const SortedRows<Combine>& gradient, const Found& found, Undo& undo) {
    with_width(state_.row_elements, [&](auto width) { add_rows<width.value>(gradient, found, undo); });
    state_.index_filled += found.fresh;
}
template <class Combine>
bool SparseSums<Combine>::has_any(const int64_t* keys, uint32_t count) {
    std::unique_ptr<Run[]> runs(new Run[count]);
    const uint32_t found = member_.index(hash_).find(keys, count, places(state_.rows), state_.rows, runs.get());
    return std::any_of(runs.get(), runs.get() + found, [](const Run& run) { return run.place != kAbsent; });
}
template <class Combine>
bool SparseSums<Combine>::read(RowTargets<T>& to, const Reduce& reduce) {
    return to.fill(state_.row_elements, state_.rows, [&](auto width, auto streamed, auto& targets) {
        return read_rows<width.value, streamed.value>(targets, reduce);
    });
}

// Compiled in sparse_sums.cpp.
SHMACC_FOR_ALL_SUMS(extern template class, SparseSums);

}  // namespace shmacc
