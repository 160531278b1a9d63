// The undo log, in which an apply saves rows before it adds to them, and how they are put back.
//
// Saved rows are read again only after a death or an error. So if there are many, they are streamed past the
// caches, which the table and the gradient need. Streamed stores are the only ones that x86-64 lets later stores
// overtake, so another processor may see `records` count a record that is not there yet, until this
// processor's next interrupt or locked instruction: both write streamed stores out (Intel's manual,
// volume 3, on write combining; AMD's, volume 2). Rows are put back by the next owner of the lock, after
// an interrupt ended this process and locked instructions in the kernel released its lock; or by this
// thread itself, which sees its own stores. end_of_stream orders them before everything that a living
// process does next. The streams of two processors hinder each other: together they add hardly faster than one
// alone. So with several lanes rows are saved through the caches, which costs a single process 3 to 5 %.
#pragma once

#include "protocol/lane.hpp"
#include "values/kernels.hpp"

namespace shmacc {

class Undo {
  public:
    // bytes: the size of all rows that will be saved, for which room is reserved (Lane::reserve_undo).
    Undo(Lane& lane, const LaneState& state, uint64_t bytes)
        : lane_(lane), log_(lane.region(kUndoLog, state)), rows_(lane.region(kUndoRows, state)),
          log_end_(log_ + state.reserved[kUndoLog]), rows_end_(rows_ + state.reserved[kUndoRows]),
          streamed_(bytes >= kStreamedFrom && lane.is_the_only_one()) {}
    ~Undo() {
        if (streamed_) end_of_stream();
    }
    Undo(const Undo&) = delete;
    Undo& operator=(const Undo&) = delete;

    // Begins with the rows of this member, and aligns the first. rows: how many rows and row numbers are saved at most.
    void start(uint32_t member, uint64_t rows, uint64_t bytes) {
        member_ = static_cast<uint16_t>(member);
        rows_ = reinterpret_cast<unsigned char*>((reinterpret_cast<uintptr_t>(rows_) + kUndoAlign - 1) /
                                                 kUndoAlign * kUndoAlign);
        SHMACC_ASSERT(lane_.has_begun() && member < kUndoNumbers);
        SHMACC_ASSERT(rows == 0 || (log_ + rows * kUndoLogBytes <= log_end_ && rows_ + bytes <= rows_end_));
    }
    // Saves consecutive rows, which may be changed once this returns. kWidth: the numbers in a row, or 0 for any.
    template <uint64_t kWidth, class T>
    void save(const RowPlace* __restrict__ places, const T* rows, uint32_t place, uint32_t length,
              uint64_t width) {
        const uint64_t bytes = length * width * sizeof(T);
        const UndoRecord record{place, static_cast<uint16_t>(length), member_};
        std::memcpy(log_, &record, sizeof record);
        auto* __restrict__ contributions = reinterpret_cast<int64_t*>(log_ + sizeof record);
        for (uint32_t j = 0; j < length; ++j) contributions[j] = places[j].contributions;
        log_ += sizeof record + length * sizeof(int64_t);
        if (streamed_)
            stream(rows_, rows, bytes);
        else if (kWidth && length == 1)
            copy_numbers(reinterpret_cast<T*>(rows_), rows, kWidth);
        else if (bytes)
            std::memcpy(rows_, rows, bytes);
        rows_ += bytes;
        lane_.publish(++records_);
    }
    // Saves all committed rows of the member, and their numbers. After that, other rows may overwrite them.
    void save_all(Member& member) {
        const uint64_t rows = member.before.rows, row_bytes = member.spec().row_bytes(member.before);
        const RowPlace* places = member.array<RowPlace>(kPlaces, rows);
        const auto* sums = member.array<unsigned char>(kRows0, rows * row_bytes);
        SHMACC_ASSERT(member.state.rows == 0);  // a new round, which has put nothing over the saved rows yet
        start(member.number(), 2 * rows, rows * row_bytes);
        for (uint64_t at = 0; at < rows; at += kPieceSlots) {
            const auto place = static_cast<uint32_t>(at);
            const auto length = static_cast<uint32_t>(std::min<uint64_t>(kPieceSlots, rows - at));
            save<0>(places + at, sums + at * row_bytes, place, length, row_bytes);
            save_numbers(places + at, place, length);
        }
    }

  private:
    static constexpr uint64_t kPieceSlots = 1024;

    void save_numbers(const RowPlace* places, uint32_t place, uint32_t length) {
        const UndoRecord record{place, static_cast<uint16_t>(length),
                                static_cast<uint16_t>(member_ | kUndoNumbers)};
        std::memcpy(log_, &record, sizeof record);
        log_ += sizeof record;
        for (uint32_t j = 0; j < length; ++j, log_ += sizeof(int64_t))
            std::memcpy(log_, &places[j].row, sizeof(int64_t));
        lane_.publish(++records_);
    }

    Lane& lane_;
    unsigned char* log_;
    unsigned char* rows_;
    const unsigned char* const log_end_;
    const unsigned char* const rows_end_;
    const bool streamed_;
    uint16_t member_ = 0;
    uint64_t records_ = 0;
};

// The consecutive rows that an undo record has saved.
struct SavedRows {
    uint32_t member, first_place = 0, places = 0;
    bool numbers = false;  // true: it has the rows' numbers; false: their contributions and sums
    const unsigned char* words = nullptr;  // a number, or the contributions, of each row
    uint64_t sums_at = 0, sums_bytes = 0;  // in UndoRows

    // all: the member's places.
    void put_back(RowPlace* all) const {
        for (uint32_t j = 0; j < places; ++j) {
            RowPlace& place = all[first_place + j];
            std::memcpy(numbers ? &place.row : &place.contributions, words + j * sizeof(int64_t),
                        sizeof(int64_t));
        }
    }
};

// Calls act(SavedRows) for each of the first `records` records of an undo log. Checks all bounds: so the log may be a
// copy that was made without the lock. state_of(member) is called before the first of a member's records, and returns
// its committed state.
template <class StateOf, class Act>
void read_undo(const unsigned char* log, const LaneState& lane, const MemberSpecs& specs, uint64_t records,
               StateOf state_of, Act act) {
    uint64_t left = lane.reserved[kUndoLog], row_bytes = 0, rows = 0;
    SavedRows saved{UINT32_MAX};
    for (; records > 0; --records) {
        UndoRecord record;
        if (left < sizeof record) data_loss("its undo log is too long");
        std::memcpy(&record, log, sizeof record);
        const uint32_t member = record.member & ~uint32_t{kUndoNumbers};
        if (member >= specs.size()) data_loss("an undo record names no member");
        saved.sums_at += saved.sums_bytes;
        if (member != saved.member) {
            const MemberState& state = state_of(member);
            rows = state.rows;
            row_bytes = specs[member].row_bytes(state);
            saved.sums_at = undo_aligned(saved.sums_at);
        }
        if (uint64_t{record.first_place} + record.places > rows) data_loss("an undo record names no row");
        saved.member = member;
        saved.first_place = record.first_place;
        saved.places = record.places;
        saved.numbers = record.member & kUndoNumbers;
        saved.words = log + sizeof record;
        saved.sums_bytes = saved.numbers ? 0 : record.places * row_bytes;
        const uint64_t bytes = sizeof record + record.places * sizeof(int64_t);
        if (bytes > left || saved.sums_at + saved.sums_bytes > lane.reserved[kUndoRows])
            data_loss("its undo log is too long");
        act(saved);
        log += bytes;
        left -= bytes;
    }
}

inline void put_rows_back(Lane& lane, LaneState& state, uint64_t records) {
    SHMACC_ASSERT(lane.lock().is_mine());
    const unsigned char* const saved = lane.region(kUndoRows, state);
    std::optional<Member> member;
    RowPlace* places = nullptr;
    unsigned char* sums = nullptr;
    const auto state_of = [&](uint32_t number) -> const MemberState& {
        member.emplace(lane, number, state);
        places = member->array<RowPlace>(kPlaces, member->state.rows);
        // Cannot overflow: rows * row_bytes is at most a region.
        sums = member->array<unsigned char>(kRows0, member->state.rows * member->row_bytes());
        return member->state;
    };
    const auto put_back = [&](const SavedRows& rows) {
        rows.put_back(places);
        std::copy_n(saved + rows.sums_at, rows.sums_bytes, sums + rows.first_place * member->row_bytes());
    };
    read_undo(lane.region(kUndoLog, state), state, lane.specs(), records, state_of, put_back);
}

}  // namespace shmacc
