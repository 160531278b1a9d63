// The sparse table: adding a gradient's rows, and reading them out. Under the lock, between begin and commit.
#pragma once

#include "gradient.hpp"
#include "index.hpp"
#include "round.hpp"

namespace shmacc {

template <class T>
class Rows {
  public:
    Rows(State& state, Mapping& mapping, Committed& committed)
        : state_(state), mapping_(mapping), committed_(committed) {}

    // Adds the gradient's rows. The caller commits; throws with nothing changed that a commit would show.
    void add_gradient(const Gradient<T>& gradient) {
        const uint32_t count = gradient.count();
        std::unique_ptr<uint32_t[]> slots(new uint32_t[count]);
        find(gradient, slots.get());
        uint64_t fresh = 0;
        for (uint32_t i = 0; i < count; ++i) fresh += slots[i] == kAbsent;
        reserve(fresh, count - fresh);
        committed_.begin(state_, fresh);

        const uint64_t width = state_.row_elements;
        const uint64_t old_rows = state_.rows;
        Slot* table = mapping_.array<Slot>(kSlotsRegion, state_.rows + fresh);
        T* sums = mapping_.array<T>(kRows0Region, (state_.rows + fresh) * width);
        const uint64_t record_bytes = sizeof(UndoRecord) + width * sizeof(T);
        unsigned char* undo = mapping_.at_least(kUndoRegion, (count - fresh) * record_bytes);
        Index index = current_index();

        // Batches small enough to stay in the first-level cache between saving and adding.
        const uint32_t batch_rows =
            static_cast<uint32_t>(std::clamp<uint64_t>(kBatchBytes / record_bytes, 1, 256));
        uint64_t saved = 0;
        for (uint32_t base = 0; base < count; base += batch_rows) {
            const uint32_t end = std::min(count, base + batch_rows);
            prefetch(slots.get(), table, sums, width, end, std::min(count, end + batch_rows), old_rows);
            uint64_t before = saved;
            for (uint32_t i = base; i < end; ++i) {
                if (slots[i] == kAbsent) continue;
                UndoRecord record{slots[i], table[slots[i]].contributions};
                std::memcpy(undo, &record, sizeof record);
                copy(reinterpret_cast<T*>(undo + sizeof record), sums + slots[i] * width, width);
                undo += record_bytes;
                ++saved;
            }
            if (saved > before) committed_.publish(saved);
            for (uint32_t i = base; i < end; ++i) {
                if (slots[i] == kAbsent) {
                    uint64_t slot = state_.rows++;
                    table[slot] = {gradient.keys()[i], gradient.contributions(i)};
                    copy(sums + slot * width, gradient.row(i), width);
                    index.insert(gradient.keys()[i], static_cast<uint32_t>(slot));
                } else {
                    table[slots[i]].contributions += gradient.contributions(i);
                    if (!add_row(sums + slots[i] * width, gradient.row(i), width))
                        Gradient<T>::sum_overflows();
                }
            }
        }
        state_.index_filled += fresh;
    }

    // All rows in ascending order, reduced. False: a result does not fit the dtype.
    bool read(int64_t* keys, T* values, int64_t* contributions, const Reduce& reduce) {
        const uint64_t width = state_.row_elements;
        const uint32_t count = static_cast<uint32_t>(state_.rows);
        const Slot* table = mapping_.array<Slot>(kSlotsRegion, count);
        const T* sums = mapping_.array<T>(kRows0Region, count * width);
        for (uint32_t i = 0; i < count; ++i) keys[i] = table[i].row;
        std::vector<uint32_t> order;
        if (!strictly_ascending(keys, count)) order = ascending_order(keys, count);
        bool fits = true;
        for (uint32_t i = 0; i < count; ++i) {
            if (!order.empty() && i + kAhead < count) {
                __builtin_prefetch(&table[order[i + kAhead]]);
                prefetch_row(sums + order[i + kAhead] * width, width);
            }
            uint32_t slot = order.empty() ? i : order[i];
            keys[i] = table[slot].row;
            contributions[i] = table[slot].contributions;
            if (contributions[i] <= 0) data_loss("a row without contributions");
            fits = reduce_into(values + i * width, sums + slot * width, width, contributions[i], reduce) &&
                   fits;
        }
        return fits;
    }

  private:
    static constexpr uint64_t kBatchBytes = 16384;
    static constexpr uint32_t kAhead = 16;

    Index current_index() {
        return Index(mapping_.array<Bucket>(kIndex0Region + static_cast<uint32_t>(state_.index),
                                            state_.index_buckets),
                     state_.index_buckets, static_cast<uint32_t>(state_.index_stamp));
    }

    void find(const Gradient<T>& gradient, uint32_t* slots) {
        current_index().find(gradient.keys(), gradient.count(),
                             mapping_.array<Slot>(kSlotsRegion, state_.rows), state_.rows, slots);
    }

    // Room for `fresh` new rows and the undo of `added` old ones.
    void reserve(uint64_t fresh, uint64_t added) {
        const uint64_t rows = state_.rows + fresh;
        const uint64_t row_bytes = state_.row_elements * sizeof(T);
        if (rows > kMaxRows || (row_bytes && rows > kRegionSpan / row_bytes))
            throw Error(Failure::kResourceExhausted,
                        "An accumulator holds at most 2**32 rows and 2**40 bytes");
        ensure_reserved(state_, mapping_, kSlotsRegion, rows * sizeof(Slot));
        ensure_reserved(state_, mapping_, kRows0Region, rows * row_bytes);
        const uint64_t undo_bytes = added * (sizeof(UndoRecord) + row_bytes);
        if (undo_bytes > state_.reserved[kUndoRegion]) {
            ensure_reserved(state_, mapping_, kUndoRegion, undo_bytes);
            // `undo` checks the records against what is committed as reserved.
            State known = committed_.current();
            known.reserved[kUndoRegion] = state_.reserved[kUndoRegion];
            committed_.commit(known);
            state_.generation = known.generation;
        }
        if (fresh && Index::crowded(state_.index_filled + fresh, state_.index_buckets)) rebuild_index(rows);
    }

    // In the region that is not current: it becomes so with the commit.
    void rebuild_index(uint64_t rows) {
        const uint32_t other = kIndex0Region + (state_.index ? 0 : 1);
        const uint64_t buckets = Index::buckets_for(rows);
        mapping_.punch(other, 0);  // an operation that died may have left entries there
        const uint64_t bytes = page_up(buckets * sizeof(Bucket));
        mapping_.grow(other, 0, bytes);
        state_.reserved[other] = bytes;
        state_.reserved[kIndex0Region + state_.index] = 0;
        state_.index = other - kIndex0Region;
        state_.index_buckets = buckets;
        state_.index_stamp = 1;
        state_.index_filled = state_.rows;
        Index index = current_index();
        const Slot* table = mapping_.array<Slot>(kSlotsRegion, state_.rows);
        for (uint64_t slot = 0; slot < state_.rows; ++slot) {
            if (slot + kAhead < state_.rows) index.prefetch(table[slot + kAhead].row);
            index.insert(table[slot].row, static_cast<uint32_t>(slot));
        }
    }

    static void copy(T* to, const T* from, uint64_t width) {
        for (uint64_t j = 0; j < width; ++j) to[j] = from[j];
    }
    static bool add_row(T* __restrict__ sums, const T* __restrict__ values, uint64_t width) {
        bool fits = true;
        for (uint64_t j = 0; j < width; ++j) {
            if constexpr (std::is_integral_v<T>)
                fits = add(sums[j], values[j]) && fits;
            else
                sums[j] += values[j];
        }
        return fits;
    }
    static void prefetch_row(const T* row, uint64_t width) {
        const auto* at = reinterpret_cast<const char*>(row);
        const uint64_t bytes = std::min<uint64_t>(width * sizeof(T), 1024);
        for (uint64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 1);
    }
    static void prefetch(const uint32_t* slots, const Slot* table, const T* sums, uint64_t width,
                         uint32_t from, uint32_t to, uint64_t rows) {
        for (uint32_t i = from; i < to; ++i) {
            if (slots[i] >= rows) continue;
            __builtin_prefetch(&table[slots[i]], 1);
            prefetch_row(sums + slots[i] * width, width);
        }
    }

    State& state_;
    Mapping& mapping_;
    Committed& committed_;
};

}  // namespace shmacc
