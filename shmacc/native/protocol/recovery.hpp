// Undoes an operation that did not commit, because it failed or its process died. Why this suffices: commit.hpp.
#pragma once

#include "protocol/undo_arrays.hpp"
#include "protocol/undo_rows.hpp"

namespace shmacc {

// Needs the lane's lock. deaths: 1 if the operation's process died, 0 if the operation failed.
inline void recover(Lane& lane, LaneState& state, uint64_t deaths) {
    SHMACC_ASSERT(lane.lock().is_mine() && lane.committed().is_current(state));
    const Journal& journal = lane.journal();
    if (const uint64_t records = load(journal.records); records > 0) {
        if (lane.has_parameters())
            put_arrays_back(lane, state, records);
        else
            put_rows_back(lane, state, records);
    }
    for (uint32_t i = 0; i < lane.member_count(); ++i)
        for (MemberState& copy : lane.states(i).copies)
            if (load_relaxed(copy.generation) > state.generation) store(copy.generation, uint64_t{0});
    state.leftovers += std::min(load(journal.new_rows), kMaxRows);
    state.recoveries += deaths;
    lane.commit(state);
}

}  // namespace shmacc
