// The sparse table: adding a gradient's rows, and reading them out. Under the lock, between begin and commit.
#pragma once

#include "gradient.hpp"
#include "index.hpp"
#include "kernels.hpp"
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

        // Common widths are compiled in: a loop that does not know its length costs as much as the rest.
        switch (state_.row_elements) {
            case 1: add_rows<1>(gradient, slots.get(), fresh); break;
            case 2: add_rows<2>(gradient, slots.get(), fresh); break;
            case 4: add_rows<4>(gradient, slots.get(), fresh); break;
            case 8: add_rows<8>(gradient, slots.get(), fresh); break;
            case 16: add_rows<16>(gradient, slots.get(), fresh); break;
            case 32: add_rows<32>(gradient, slots.get(), fresh); break;
            case 64: add_rows<64>(gradient, slots.get(), fresh); break;
            case 128: add_rows<128>(gradient, slots.get(), fresh); break;
            default: add_rows<0>(gradient, slots.get(), fresh); break;
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
    static constexpr uint64_t kPieceBytes = 4096;
    static constexpr uint32_t kPieceRows = 128;
    static constexpr uint32_t kAhead = 32;

    // kWidth: the row's width, or 0 for any.
    template <uint64_t kWidth>
    void add_rows(const Gradient<T>& gradient, const uint32_t* slots, uint64_t fresh) {
        const uint32_t count = gradient.count();
        const uint64_t width = kWidth ? kWidth : state_.row_elements;
        Slot* table = mapping_.array<Slot>(kSlotsRegion, state_.rows + fresh);
        T* sums = mapping_.array<T>(kRows0Region, (state_.rows + fresh) * width);
        unsigned char* undo = mapping_.at_least(kUndoRegion, state_.reserved[kUndoRegion]);
        Index index = current_index();

        // A run of consecutive slots (a gradient like an earlier one has long ones) is saved and added as one,
        // in pieces that stay in the first-level cache. Rows are fetched kAhead rows before their turn, a
        // few lines at a time: that hides the misses, which are what an apply of wide rows waits for.
        const uint32_t longest = static_cast<uint32_t>(
            std::clamp<uint64_t>(kPieceBytes / std::max<uint64_t>(width * sizeof(T), 1), 1, kPieceRows));
        uint64_t records = 0;
        for (uint32_t i = 0, length; i < count; i += length) {
            const uint32_t slot = slots[i];
            const uint32_t most = std::min(longest, count - i);
            length = 1;
            if (slot != kAbsent)
                while (length < most && slots[i + length] == slot + length) ++length;
            for (uint32_t j = i + kAhead; j < std::min(count, i + kAhead + length); ++j) {
                if (slots[j] == kAbsent) {
                    index.prefetch(gradient.keys()[j]);
                } else if (slots[j] != slots[j - 1] + 1) {
                    __builtin_prefetch(&table[slots[j]], 1);
                    prefetch_row(sums + slots[j] * width, width);
                }
            }
            if (slot == kAbsent) {
                const uint64_t fresh_slot = state_.rows++;
                table[fresh_slot] = {gradient.keys()[i], gradient.contributions(i)};
                copy_numbers(sums + fresh_slot * width, gradient.row(i, width), width);
                index.insert(gradient.keys()[i], static_cast<uint32_t>(fresh_slot));
                continue;
            }
            undo = save<kWidth>(undo, table + slot, sums + slot * width, slot, length, width);
            committed_.publish(++records);
            for (uint32_t j = 0; j < length; ++j)
                // A scribbled number may be anything; a sound one stays below the number of gradients.
                table[slot + j].contributions =
                    static_cast<int64_t>(static_cast<uint64_t>(table[slot + j].contributions) +
                                         static_cast<uint64_t>(gradient.contributions(i + j)));
            bool fits = true;
            if (gradient.in_place() && length > 1) {
                fits = add_many(sums + slot * width, gradient.row(i, width), length * width);
            } else {
                for (uint32_t j = 0; j < length; ++j)
                    fits = add_numbers(sums + (slot + j) * width, gradient.row(i + j, width), width) && fits;
            }
            if (!fits) Gradient<T>::sum_overflows();
        }
    }

    template <uint64_t kWidth>
    static unsigned char* save(unsigned char* undo, const Slot* slots, const T* rows, uint32_t slot,
                               uint32_t length, uint64_t width) {
        const UndoRecord record{slot, length};
        std::memcpy(undo, &record, sizeof record);
        undo += sizeof record;
        for (uint32_t j = 0; j < length; ++j, undo += sizeof(int64_t))
            std::memcpy(undo, &slots[j].contributions, sizeof(int64_t));
        if (kWidth && length == 1)
            copy_numbers(reinterpret_cast<T*>(undo), rows, kWidth);
        else
            copy_many(reinterpret_cast<T*>(undo), rows, length * width);
        return undo + length * width * sizeof(T);
    }

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
        const uint64_t undo_bytes = added * (sizeof(UndoRecord) + sizeof(int64_t) + row_bytes);
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

    static void prefetch_row(const T* row, uint64_t width) {
        const auto* at = reinterpret_cast<const char*>(row);
        const uint64_t bytes = std::min<uint64_t>(width * sizeof(T), 1024);
        for (uint64_t i = 0; i < bytes; i += 64) __builtin_prefetch(at + i, 1);
    }

    State& state_;
    Mapping& mapping_;
    Committed& committed_;
};

}  // namespace shmacc
