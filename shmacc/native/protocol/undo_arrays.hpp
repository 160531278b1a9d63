// The undo log of parameters: how an update saves what it will change, and how that is put back.
//
// The log is complete before the update's stamp; from then on Journal::records counts the entries that are
// saved. So recovery reads only what belongs to the update whose stamp is in the journal. Putting entries back
// a second time gives the same contents.
#pragma once

#include "protocol/lane.hpp"

namespace shmacc {

// The contents that an update will save.
class UndoLog {
  public:
    // listed: the numbers of the entries, if the array lists them; they must stay until `write`.
    void add(const SavedArray& array, const int64_t* listed) {
        SHMACC_ASSERT(!array.listed || array.entries == 0 || listed);
        arrays_.push_back({array, listed});
        for (const auto& region : array.regions)
            saved_bytes_ += array.entries * undo_aligned(region.entry_bytes);
    }
    // Reserves room for the log and for the entries that will be saved, and writes the log.
    void write(Lane& lane, LaneState& state) const {
        uint64_t bytes = 0;
        for (const Logged& one : arrays_) bytes += sizeof one.array + one.listed_bytes();
        lane.reserve_undo(state, bytes, saved_bytes_);
        unsigned char* to = lane.region(kUndoLog, state);
        lane.region(kUndoRows, state);  // mapped now, so that nothing fails later
        SHMACC_ASSERT(lane.may_begin() && lane.mapping().reaches(kUndoLog, to + bytes));
        for (const Logged& one : arrays_) {
            std::memcpy(to, &one.array, sizeof one.array);
            to += sizeof one.array;
            if (one.listed_bytes()) std::memcpy(to, one.listed, one.listed_bytes());
            to += one.listed_bytes();
        }
    }
    uint64_t saved_bytes() const { return saved_bytes_; }
    uint64_t entries() const {
        uint64_t entries = 0;
        for (const Logged& one : arrays_) entries += one.array.entries;
        return entries;
    }

  private:
    struct Logged {
        SavedArray array;
        const int64_t* listed;

        uint64_t listed_bytes() const { return array.listed * array.entries * sizeof(int64_t); }
    };
    std::vector<Logged> arrays_;
    uint64_t saved_bytes_ = 0;
};

inline void put_arrays_back(Lane& lane, LaneState& state, uint64_t entries) {
    SHMACC_ASSERT(lane.lock().is_mine());
    uint64_t log_left = state.reserved[kUndoLog], saved_left = state.reserved[kUndoRows];
    const unsigned char* log = lane.region(kUndoLog, state);
    const unsigned char* saved = lane.region(kUndoRows, state);
    while (entries > 0) {
        SavedArray array;
        if (log_left < sizeof array) data_loss("its undo log is too long");
        std::memcpy(&array, log, sizeof array);
        log += sizeof array;
        log_left -= sizeof array;
        if (array.member >= lane.member_count() - 1) data_loss("an undo record names no array");
        if (array.listed && array.entries > log_left / sizeof(int64_t)) data_loss("its undo log is too long");
        const unsigned char* const listed = log;
        if (array.listed) {
            log += array.entries * sizeof(int64_t);
            log_left -= array.entries * sizeof(int64_t);
        }
        Member member(lane, static_cast<uint32_t>(array.member), state);
        const auto& saved_regions = member.spec().kind == kTable ? kTableRegions : kArrayRegions;
        unsigned char* regions[std::size(kArrayRegions)] = {};
        for (size_t k = 0; k < std::size(kArrayRegions); ++k) {
            const uint64_t reserved = member.state.reserved[saved_regions[k]];
            if (array.regions[k].bytes > reserved) data_loss("an undo record names no array");
            if (array.regions[k].entry_bytes)
                regions[k] = member.array<unsigned char>(saved_regions[k], array.regions[k].bytes);
        }
        // Each entry takes room in the log (if listed) or in UndoRows (if it has bytes): so the loop below is bounded.
        const bool has_bytes = std::any_of(std::begin(regions), std::end(regions), [](auto at) { return at; });
        if (!array.listed && !has_bytes && array.entries > 0) data_loss("an undo record names no row");
        const uint64_t count = std::min(entries, array.entries);
        for (uint64_t i = 0; i < count; ++i) {
            uint64_t entry = i;
            if (array.listed) std::memcpy(&entry, listed + i * sizeof entry, sizeof entry);
            for (size_t k = 0; k < std::size(kArrayRegions); ++k) {
                const auto [entry_bytes, all] = array.regions[k];
                if (!regions[k]) continue;
                if (entry > all / entry_bytes) data_loss("an undo record names no row");
                const uint64_t from = entry * entry_bytes, bytes = std::min(entry_bytes, all - from);
                if (undo_aligned(bytes) > saved_left) data_loss("its undo log is too long");
                std::copy(saved, saved + bytes, regions[k] + from);
                saved += undo_aligned(bytes);
                saved_left -= undo_aligned(bytes);
            }
        }
        entries -= count;
    }
}

}  // namespace shmacc
