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
        : state_(state), mapping_(mapping), committed_(committed), hash_(committed.config().hash_key) {}

    // Adds the gradient's rows. The caller commits; if this throws, no change is visible after a commit.
    void add_gradient(const Gradient<T>& gradient) {
        const uint32_t count = gradient.count();
        std::unique_ptr<Run[]> memory(new Run[count]);
        Runs runs{memory.get(), find(gradient, memory.get())};
        uint64_t fresh = 0;
        for (const Run& run : runs) fresh += run.slot == kAbsent ? run.length : 0;
        reserve(fresh, count - fresh);
        committed_.begin(state_, fresh);

        with_width(state_.row_elements, [&](auto width) { add_rows<width.value>(gradient, runs, fresh); });
        state_.index_filled += fresh;
    }

    // All rows in ascending order, reduced. False: a result does not fit the dtype.
    bool read(int64_t* keys, T* values, int64_t* contributions, const Reduce& reduce) {
        bool fits = true;
        with_width(state_.row_elements,
                   [&](auto width) { fits = read_rows<width.value>(keys, values, contributions, reduce); });
        return fits;
    }

  private:
    static constexpr uint64_t kPieceBytes = 2048;
    static constexpr uint32_t kPieceRows = 256;
    static constexpr uint32_t kAhead = 32;

    struct Runs {
        const Run* first;
        uint32_t count;
        const Run* begin() const { return first; }
        const Run* end() const { return first + count; }
    };

    template <uint64_t kWidth>
    bool read_rows(int64_t* keys, T* values, int64_t* contributions, const Reduce& reduce) {
        const uint64_t width = kWidth ? kWidth : state_.row_elements;
        const uint32_t count = static_cast<uint32_t>(state_.rows);
        const Slot* table = mapping_.array<Slot>(state_, kSlotsRegion, count);
        const T* sums = mapping_.array<T>(state_, kRows0Region, count * width);
        for (uint32_t i = 0; i < count; ++i) keys[i] = table[i].row;
        std::vector<uint32_t> order;
        if (!strictly_ascending(keys, count)) order = ascending_order(keys, count);
        bool fits = true;
        for (uint32_t i = 0; i < count; ++i) {
            if (!order.empty() && i + kAhead < count) {
                __builtin_prefetch(&table[order[i + kAhead]]);
                prefetch_row(sums + order[i + kAhead] * width, width);
            }
            const uint32_t slot = order.empty() ? i : order[i];
            keys[i] = table[slot].row;
            contributions[i] = table[slot].contributions;
            if (contributions[i] <= 0) data_loss("a row has no contributions");
            fits = reduce_into(values + i * width, sums + slot * width, width, contributions[i], reduce) &&
                   fits;
        }
        return fits;
    }

    // kWidth: the row's width, or 0 for any.
    template <uint64_t kWidth>
    void add_rows(const Gradient<T>& gradient, const Runs& runs, uint64_t fresh) {
        const uint64_t width = kWidth ? kWidth : state_.row_elements;
        Slot* table = mapping_.array<Slot>(state_, kSlotsRegion, state_.rows + fresh);
        T* sums = mapping_.array<T>(state_, kRows0Region, (state_.rows + fresh) * width);
        Undo undo(mapping_, state_, (gradient.count() - fresh) * width * sizeof(T));
        Inserts inserts(current_index(), state_.rows);

        // A run (a gradient like an earlier one has long ones) is saved and added as one, in pieces that stay
        // in the first-level cache. Single rows are fetched kAhead runs in advance, a few lines at a time:
        // that hides the misses, for which an apply of wide rows mostly waits.
        const uint32_t longest = static_cast<uint32_t>(
            std::clamp<uint64_t>(kPieceBytes / std::max<uint64_t>(width * sizeof(T), 1), 1, kPieceRows));
        uint32_t at = 0;
        for (const Run& run : runs) {
            if (runs.end() - &run > kAhead) {
                const Run& later = (&run)[kAhead];
                if (later.slot != kAbsent) {
                    __builtin_prefetch(&table[later.slot], 1);
                    prefetch_row(sums + later.slot * width, width);
                }
            }
            if (run.slot == kAbsent) {
                append<kWidth>(gradient, at, run.length, table, sums, inserts);
                at += run.length;
                continue;
            }
            for (uint32_t done = 0, length; done < run.length; done += length, at += length) {
                length = std::min(longest, run.length - done);
                const uint32_t slot = run.slot + done;
                undo.save<kWidth>(table + slot, sums + slot * width, slot, length, width);
                committed_.publish(undo.records());
                add_piece<kWidth>(gradient, at, length, table + slot, sums + slot * width);
            }
        }
        inserts.finish();
    }

    // Adds rows that the table does not have yet.
    template <uint64_t kWidth>
    void append(const Gradient<T>& gradient, uint32_t at, uint32_t count, Slot* table, T* sums,
                Inserts& inserts) {
        const uint64_t width = kWidth ? kWidth : state_.row_elements;
        const int64_t* keys = gradient.keys();
        const uint32_t end = at + count;
        uint64_t slot = state_.rows;
        for (uint32_t i = at; i < end; ++i, ++slot) {
            const int64_t key = keys[i];
            table[slot].row = key;
            table[slot].contributions = gradient.contributions(i);
            copy_numbers(sums + slot * width, gradient.row(i, width), width);
            inserts.add(key);
        }
        state_.rows = slot;
    }

    // Adds rows `at` and after of the gradient to consecutive rows of the table.
    template <uint64_t kWidth>
    void add_piece(const Gradient<T>& gradient, uint32_t at, uint32_t length, Slot* slots, T* sums) {
        const uint64_t width = kWidth ? kWidth : state_.row_elements;
        if (gradient.counted()) {
            for (uint32_t j = 0; j < length; ++j) add_contributions(slots[j], gradient.contributions(at + j));
        } else {
            for (uint32_t j = 0; j < length; ++j) add_contributions(slots[j], 1);
        }
        bool fits = true;
        if (gradient.contiguous() && length > 1) {
            fits = add_many(sums, gradient.row(at, width), length * width);
        } else {
            for (uint32_t j = 0; j < length; ++j)
                fits = add_numbers(sums + j * width, gradient.row(at + j, width), width) && fits;
        }
        if (!fits) Gradient<T>::sum_overflows();
    }

    // An overwritten number may be anything; a sound one stays below the number of gradients.
    static void add_contributions(Slot& slot, int64_t more) {
        slot.contributions = static_cast<int64_t>(static_cast<uint64_t>(slot.contributions) +
                                                  static_cast<uint64_t>(more));
    }

    // Where rows are saved before they are added to.
    //
    // They are read again only after a death; so when they are many they are streamed past the caches, which
    // the table and the gradient need. Streamed stores are the only ones that x86-64 lets later stores
    // overtake, so another processor may see `records` count a record that is not there yet, until this
    // processor's next interrupt or locked instruction: both write streamed stores out (Intel's manual,
    // volume 3, on write combining; AMD's, volume 2). Rows are put back by the next owner of the lock, after
    // an interrupt ended this process and locked instructions in the kernel released its lock; or by this
    // thread itself, which sees its own stores. end_of_stream orders them before everything that a living
    // process does next.
    class Undo {
      public:
        Undo(Mapping& mapping, const State& state, uint64_t bytes)
            : log_(mapping.at_least(kUndoLogRegion, state.reserved[kUndoLogRegion])),
              rows_(mapping.at_least(kUndoRowsRegion, state.reserved[kUndoRowsRegion])),
              streamed_(bytes >= kStreamedFrom) {}
        ~Undo() {
            if (streamed_) end_of_stream();
        }
        Undo(const Undo&) = delete;
        Undo& operator=(const Undo&) = delete;

        // Records so far.
        uint64_t records() const { return records_; }

        template <uint64_t kWidth>
        void save(const Slot* __restrict__ slots, const T* rows, uint32_t slot, uint32_t length,
                  uint64_t width) {
            const UndoRecord record{slot, length};
            std::memcpy(log_, &record, sizeof record);
            auto* __restrict__ contributions = reinterpret_cast<int64_t*>(log_ + sizeof record);
            for (uint32_t j = 0; j < length; ++j) contributions[j] = slots[j].contributions;
            log_ += sizeof record + length * sizeof(int64_t);
            const uint64_t bytes = length * width * sizeof(T);
            if (streamed_)
                stream(rows_, rows, bytes);
            else if (kWidth && length == 1)
                copy_numbers(reinterpret_cast<T*>(rows_), rows, kWidth);
            else if (bytes)
                std::memcpy(rows_, rows, bytes);
            rows_ += bytes;
            ++records_;
        }

      private:
        unsigned char* log_;
        unsigned char* rows_;
        const bool streamed_;
        uint64_t records_ = 0;
    };

    Index current_index() {
        return Index(mapping_.array<Bucket>(state_, kIndex0Region + static_cast<uint32_t>(state_.index),
                                            state_.index_buckets),
                     state_.index_buckets, static_cast<uint32_t>(state_.index_stamp), hash_);
    }

    uint32_t find(const Gradient<T>& gradient, Run* runs) {
        return current_index().find(gradient.keys(), gradient.count(),
                                    mapping_.array<Slot>(state_, kSlotsRegion, state_.rows), state_.rows, runs);
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
        const uint64_t known[] = {state_.reserved[kUndoLogRegion], state_.reserved[kUndoRowsRegion]};
        ensure_reserved(state_, mapping_, kUndoLogRegion, added * kUndoLogBytes);
        ensure_reserved(state_, mapping_, kUndoRowsRegion, added * row_bytes);
        if (known[0] != state_.reserved[kUndoLogRegion] || known[1] != state_.reserved[kUndoRowsRegion]) {
            // `recover` checks the records against what is committed as reserved.
            State now = committed_.current();
            now.reserved[kUndoLogRegion] = state_.reserved[kUndoLogRegion];
            now.reserved[kUndoRowsRegion] = state_.reserved[kUndoRowsRegion];
            committed_.commit(now);
            state_.generation = now.generation;
        }
        if (fresh && Index::crowded(state_.index_filled + fresh, state_.index_buckets)) rebuild_index(rows);
    }

    // Builds in the region that is not current; it becomes current with the commit.
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
        const Slot* table = mapping_.array<Slot>(state_, kSlotsRegion, state_.rows);
        Inserts inserts(current_index(), 0);
        for (uint64_t slot = 0; slot < state_.rows; ++slot) inserts.add(table[slot].row);
        inserts.finish();
    }

    State& state_;
    Mapping& mapping_;
    Committed& committed_;
    const RowHash hash_;
};

}  // namespace shmacc
