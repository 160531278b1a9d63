// How an update or a restore changes one member of parameters: an array or a table.
//
// `prepare` does everything that can fail, reserves all memory, and says what will be saved. `change` saves and
// changes, after the journal is stamped, so it throws nothing (update.hpp).
#pragma once

#include "parameters/table.hpp"
#include "protocol/undo_arrays.hpp"

namespace shmacc {

// A change of a member, prepared under the lock.
class PreparedChange {
  public:
    explicit PreparedChange(Member& member) : member_(member) {}
    virtual ~PreparedChange() = default;
    PreparedChange(const PreparedChange&) = delete;
    PreparedChange& operator=(const PreparedChange&) = delete;

    // Adds to the log what `change` will save, in the same order.
    virtual void log(UndoLog& log) const = 0;
    // How many index entries are left over if the process dies before its commit.
    virtual uint64_t new_entries() const { return 0; }
    // step: the step of the round.
    virtual void change(Saving& saving, int64_t step) = 0;
    // Adds what `change` has changed to a digest.
    virtual void add_to(Digest& digest) = 0;

  protected:
    Member& member_;
};

// A change that a request asks for. Lives as long as the request, since an update may prepare it several times.
class MemberChange {
  public:
    explicit MemberChange(uint32_t member) : member_(member) {}
    virtual ~MemberChange() = default;
    MemberChange(const MemberChange&) = delete;
    MemberChange& operator=(const MemberChange&) = delete;

    uint32_t member() const { return member_; }
    // Reserves memory, under the lock. If it throws, nothing has changed. The result refers to this object.
    virtual std::unique_ptr<PreparedChange> prepare(Member& member) const = 0;

  private:
    const uint32_t member_;
};

// The rows of an array that change.
struct ChangedRows {
    const int64_t* rows = nullptr;  // ascending; null: the whole array
    uint64_t count = 0;
    uint64_t bytes = 0;  // of a row

    bool any() const { return rows == nullptr || count > 0; }
};

// An array's entries that change, as the undo log has them: the rows, or pieces of the whole array.
struct ChangedEntries {
    // group: a piece has a multiple of this many bytes.
    ChangedEntries(const ChangedRows& rows, uint64_t array_bytes, uint64_t group)
        : bytes(rows.rows ? rows.bytes : group * std::max<uint64_t>(1, kPieceBytes / group)),
          count(rows.rows ? rows.count : (array_bytes + bytes - 1) / bytes) {}

    const uint64_t bytes;  // of an entry; the last piece may be shorter
    const uint64_t count;

  private:
    static constexpr uint64_t kPieceBytes = 4096;
};

// Adds the rows that have changed, or all `bytes` of the array, to a digest. T: unsigned char for any numbers.
template <class T>
void add_changed(Digest& digest, const ChangedRows& rows, const unsigned char* array, uint64_t bytes,
                 uint64_t row_bytes) {
    const auto* const numbers = reinterpret_cast<const T*>(array);
    const uint64_t width = row_bytes / sizeof(T);
    if (!rows.rows) digest.add(numbers, bytes / sizeof(T));
    constexpr uint64_t kAhead = 4;  // rows that are prefetched: those that have changed are no longer in a cache
    for (uint64_t i = 0; rows.rows && i < rows.count; ++i) {
        if (i + kAhead < rows.count)
            prefetch_row(numbers + static_cast<uint64_t>(rows.rows[i + kAhead]) * width, width);
        digest.add(static_cast<uint64_t>(rows.rows[i]));
        digest.add(numbers + static_cast<uint64_t>(rows.rows[i]) * width, width);
    }
}

// How many numbers an array's constraint limits together: a row (all dimensions but the first), or 1.
inline uint64_t constrained_together(const MemberSpec& spec) {
    uint64_t numbers = 1;
    for (size_t i = 1; spec.optimizer.constrains_norms() && i < spec.round->size(); ++i)
        numbers *= static_cast<uint64_t>((*spec.round)[i]);
    return std::max<uint64_t>(numbers, 1);
}

// Maps a region of an array, if it is not mapped yet, and returns it.
inline unsigned char* changed_region(Member& member, uint32_t region, uint64_t bytes) {
    if (bytes > member.state.reserved[kArrayRegions[region]])
        data_loss("an array is larger than what is reserved for it");
    return member.array<unsigned char>(kArrayRegions[region], bytes);
}

// A gradient of an array. It changes the array's slots, too.
class ArrayGradient : public MemberChange {
  public:
    // bytes: the array's. values: the gradients of the rows, one after the other.
    ArrayGradient(uint32_t member, const Rate& rate, ChangedRows rows, const void* values, uint64_t bytes)
        : MemberChange(member), rate_(rate), rows_(rows), values_(values), bytes_(bytes) {}

    std::unique_ptr<PreparedChange> prepare(Member& member) const override {
        return std::make_unique<Prepared>(*this, member);
    }

  private:
    class Prepared : public PreparedChange {
      public:
        Prepared(const ArrayGradient& asked, Member& member)
            : PreparedChange(member), asked_(asked), slots_(slots_of(spec().optimizer, *spec().round)),
              entries_(asked.rows_, asked.bytes_,
                       std::max(group_bytes(), constrained_together(spec()) * spec().number_bytes())),
              constrained_(spec().optimizer, constrained_together(spec()), entries_.bytes) {
            if (asked.rows_.rows && asked.rows_.bytes % group_bytes())
                throw Error(Failure::kInvalidArgument,
                            "A rowwise accumulator of an array with one dimension is of all of it, so rows "
                            "alone cannot "
                            "be updated");
            for (uint32_t i = 0; i <= slots_.count; ++i)
                regions_[i] = changed_region(member, i, asked.bytes_ / group(i));
        }
        void log(UndoLog& log) const override {
            SavedArray saved{asked_.member(), entries_.count, asked_.rows_.rows != nullptr, {}};
            for (uint32_t i = 0; i <= slots_.count; ++i)
                saved.regions[i] = {entries_.bytes / group(i), asked_.bytes_ / group(i)};
            log.add(saved, asked_.rows_.rows);
        }
        void change(Saving& saving, int64_t) override {
            // torch's SparseAdam also counts an update without rows.
            member_.state.count += asked_.rows_.any() || spec().optimizer.has(kAsTorch);
            if (asked_.rows_.any())
                with_number(spec().sum == kFloat64, [&](auto zero) { change<decltype(zero)>(saving); });
        }
        void add_to(Digest& digest) override {
            with_number(spec().sum == kFloat64, [&](auto zero) {
                for (uint32_t i = 0; i <= slots_.count; ++i)
                    add_changed<decltype(zero)>(digest, asked_.rows_, regions_[i], asked_.bytes_ / group(i),
                                                asked_.rows_.bytes / group(i));
            });
        }

      private:
        template <class T>
        void change(Saving& saving) {
            const auto at = [&](uint32_t i) { return reinterpret_cast<T*>(regions_[i]); };
            TouchedArray<T> touched{at(0),
                                    {at(1), at(2)},
                                    static_cast<const T*>(asked_.values_),
                                    asked_.rows_.rows,
                                    entries_.count,
                                    entries_.bytes / sizeof(T),
                                    asked_.bytes_ / sizeof(T),
                                    slots_.group};
            touched.constrained = constrained_.if_any();
            optimize(spec().optimizer, asked_.rate_, member_.state.count, touched, saving);
        }
        const MemberSpec& spec() const { return member_.spec(); }
        uint64_t group(uint32_t region) const { return region == 0 ? 1 : slots_.group; }
        uint64_t group_bytes() const { return slots_.group * spec().number_bytes(); }

        const ArrayGradient& asked_;
        const SlotShape slots_;
        const ChangedEntries entries_;
        const Constrained constrained_;
        unsigned char* regions_[std::size(kArrayRegions)] = {};
    };

    const Rate rate_;
    const ChangedRows rows_;
    const void* const values_;
    const uint64_t bytes_;
};

// New contents of an array, or of the array and its slots.
class ArrayContents : public MemberChange {
  public:
    struct Region {
        uint32_t number;  // in kArrayRegions
        const void* values;
        uint64_t bytes;  // the region's
    };
    // rows: the whole array, if there are several regions.
    ArrayContents(uint32_t member, ChangedRows rows, std::vector<Region> regions)
        : MemberChange(member), rows_(rows), regions_(std::move(regions)) {}

    std::unique_ptr<PreparedChange> prepare(Member& member) const override {
        return std::make_unique<Prepared>(*this, member);
    }

  private:
    class Prepared : public PreparedChange {
      public:
        Prepared(const ArrayContents& asked, Member& member) : PreparedChange(member), asked_(asked) {
            for (const Region& region : asked.regions_) changed_region(member, region.number, region.bytes);
        }
        void log(UndoLog& log) const override {
            for (const Region& region : asked_.regions_) {
                const ChangedEntries entries = asked_.entries_of(region);
                SavedArray saved{asked_.member(), entries.count, asked_.rows_.rows != nullptr, {}};
                saved.regions[region.number] = {entries.bytes, region.bytes};
                log.add(saved, asked_.rows_.rows);
            }
        }
        void change(Saving& saving, int64_t) override {
            using Byte = unsigned char;
            for (const Region& region : asked_.regions_) {
                const ChangedEntries entries = asked_.entries_of(region);
                const TouchedArray<Byte> touched{changed_region(member_, region.number, region.bytes),
                                                 {},
                                                 static_cast<const Byte*>(region.values),
                                                 asked_.rows_.rows,
                                                 entries.count,
                                                 entries.bytes,
                                                 region.bytes};
                replace(touched, saving);
            }
        }
        void add_to(Digest& digest) override {
            for (const Region& region : asked_.regions_)
                add_changed<unsigned char>(digest, asked_.rows_,
                                           changed_region(member_, region.number, region.bytes), region.bytes,
                                           asked_.rows_.bytes);
        }

      private:
        const ArrayContents& asked_;
    };
    ChangedEntries entries_of(const Region& region) const { return {rows_, region.bytes, 1}; }

    const ChangedRows rows_;
    const std::vector<Region> regions_;
};

// Gradients or new contents of a table's rows, and the removal of rows.
class TableChange : public MemberChange {
  public:
    // The gradients or new contents of the rows of these ids.
    struct Rows {
        Ids ids;
        std::optional<Rate> rate;  // of gradients; nullopt: the values are new contents
        const void* values;
        uint64_t row_bytes;  // of `values`, for each row; new contents include the optimizer's slots
        const int64_t* steps = nullptr;  // the step of the round that changed each row last; null: this round's
    };
    TableChange(uint32_t member, const Rows& rows, const Removal& removal)
        : MemberChange(member), rows_(rows), removal_(removal) {}

    std::unique_ptr<PreparedChange> prepare(Member& member) const override {
        return std::make_unique<Prepared>(*this, member);
    }

  private:
    class Prepared : public PreparedChange {
      public:
        Prepared(const TableChange& asked, Member& member)
            : PreparedChange(member), rows_(asked.rows_), table_(member),
              constrained_(member.spec().optimizer, table_.shape().width, asked.rows_.row_bytes) {
            table_.prepare(asked.rows_.ids, asked.removal_);
        }
        void log(UndoLog& log) const override {
            log.add(table_.saved_marks(), table_.marked().data());
            log.add(table_.saved_steps(), table_.touched().data());
            log.add(table_.saved_rows(), table_.touched().data());
        }
        uint64_t new_entries() const override { return table_.new_entries(); }
        void change(Saving& saving, int64_t step) override {
            // torch's SparseAdam also counts an update without rows.
            if (rows_.rate)
                member_.state.count += rows_.ids.count > 0 || member_.spec().optimizer.has(kAsTorch);
            with_number(member_.spec().sum == kFloat64,
                        [&](auto zero) { change<decltype(zero)>(saving, step); });
        }
        void add_to(Digest& digest) override {
            with_number(member_.spec().sum == kFloat64,
                        [&](auto zero) { table_.add_changed<decltype(zero)>(digest); });
        }

      private:
        template <class T>
        void change(Saving& saving, int64_t step) {
            const RecordShape& shape = table_.shape();
            table_.give<T>(saving, rows_.steps, step);
            if (rows_.ids.count > 0 && shape.width > 0) {
                T* const records = table_.records<T>();
                TouchedArray<T> touched{records,
                                        {records + shape.width, records + shape.width + shape.slot_width},
                                        static_cast<const T*>(rows_.values),
                                        table_.places().data(),
                                        rows_.ids.count,
                                        rows_.row_bytes / sizeof(T),
                                        0,
                                        shape.slots.group,
                                        shape.numbers(),
                                        shape.numbers(),
                                        table_.committed_rows()};
                if (rows_.rate) {
                    touched.constrained = constrained_.if_any();
                    optimize(member_.spec().optimizer, *rows_.rate, member_.state.count, touched, saving);
                } else {
                    replace(touched, saving);
                }
            }
            table_.name();
        }

        const Rows& rows_;
        Table table_;
        const Constrained constrained_;
    };

    const Rows rows_;
    const Removal removal_;
};

}  // namespace shmacc
