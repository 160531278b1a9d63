// Updates of parameters: each is atomic and happens once per round, even if any process dies at any instant.
//
// Two segments take part: the accumulator whose round is open, and the parameters. Each has its own commits. An
// update takes four steps, in this order. The first three are made under the parameters' lock:
//
//   1  The accumulator's RoundState says that the update has begun: the round is final. From here on it keeps exactly
//      these gradients. After an exception, a close or the holder's death the next block gets the same gradients.
//   2  Lane::begin stamps the parameters' journal, which is no commit. Then entries are copied, counted as saved, and
//      changed.
//   3  The parameters' RoundState with the new step, then the lane's state: together one commit (RoundState::needs).
//   4  The accumulator's RoundState says that the update is in (complete). The round may be consumed.
//
//   Invariant: the parameters contain the updates of all rounds before `step`, and no others. If their journal is
//              stamped, this is true after the next owner of their lock has put back the entries that the journal
//              counts as saved (recovery.hpp).
//   Invariant: no gradient of a round was computed from parameters that the round's own update had begun to change: a
//              round whose update has begun takes no more gradients.
//
// Each instant of death:
//   before 1            nothing has happened: the round takes gradients again.
//   between 1 and 2     the round is final. The next chief that opens it makes its update.
//   between 2 and 3     as between 1 and 2. But first the next update, snapshot or restore, or the next process that
//                       attaches, puts the old entries back. Until then workers, which read without the lock, may
//                       see half an update; the final round takes none of the gradients computed from it. The
//                       next chief may compute new contents from the arrays. So opening a round puts the entries
//                       back if the chief has attached the parameters by then (Handle::recover_parameters).
//   between 3 and 4     the update is in, though the round says only that it has begun. The next chief asks for the
//                       update. The parameters' step shows that it is in, so only 4 is left to do.
//   after 4             the round is consumed, by its block's end, by the next chief, or by advance_step.
// Within 3, the arrays' states and the RoundState mean nothing before the lane's commit (commit.hpp).
//
// tools/model/update.pml checks all of this with two chiefs. It finds a fault if a round does not become final, old
// entries are not put back, the parameters have no step, or a final round may end without its update.
//
// The accumulator's lock is taken while the parameters' lock is held, never the other way round. No signal handler runs
// while both are held, since it might use either segment. If a lane of the accumulator is busy, both are released.
#pragma once

#include "parameters/final_round.hpp"
#include "parameters/parameters_session.hpp"
#include "parameters/touched_array.hpp"
#include "values/output.hpp"

namespace shmacc {

struct UpdateRequest {
    int64_t step;  // the round's
    MemberChanges changes;
    int64_t deadline;
};

class Update : public ParametersOperation {
  public:
    using ParametersOperation::ParametersOperation;

    // Returns false if the parameters have this round already.
    bool update(const UpdateRequest& request, UpdatedRound& round) {
        ActivityScope activity(segment_, kWaitsForLock, kUpdatesIt);
        bool is_in = false;
        repeat(activity, request.deadline, [&](ParametersSession& session) {
            if (session.round.sealed) refuse_half_loaded();
            const int64_t step = session.round.step;
            if (step - 1 > request.step)
                throw Error(
                    Failure::kFailedPrecondition,
                    "The parameters are of step " + std::to_string(step) +
                        ", so they are past the round of step " + std::to_string(request.step) +
                        ": the accumulator is newer than they are, or its step was set back; make both new "
                        "(if_exists=\"replace\"), or load a checkpoint of both");
            is_in = step - 1 == request.step;
            if (is_in) return round.begin(is_in);
            if (!session.compare(request.changes)) return false;
            session.prepare(request.changes);
            if (!round.begin(is_in)) return false;
            session.change(request.step);
            session.commit(request.step + 1);
            return true;
        });
        if (!is_in) round.note_in(request.deadline, interruption_);
        return !is_in;
    }

    // Undoes a dead process's unfinished update.
    void recover(int64_t deadline) {
        ActivityScope activity(segment_, kWaitsForLock, kUpdatesIt);
        if (!ParametersSession(segment_, deadline, interruption_).held()) deadline_exceeded();
    }

    struct ArrayCopy {
        uint32_t array;
        uint32_t region;  // in kArrayRegions
        void* to;
        uint64_t bytes;
    };
    struct TableCopy {
        uint32_t table;
        uint64_t rows = 0;
        std::optional<Output> ids = {}, steps = {}, records = {};
    };
    // Copies arrays and tables, and returns the RoundState that they belong to. updates: gets each
    // array's number of updates. whole: each row of a table is followed by the optimizer's numbers for it.
    RoundState read(const std::vector<ArrayCopy>& copies, std::vector<TableCopy>& tables, bool whole,
                    std::vector<int64_t>& updates, int64_t deadline) {
        ActivityScope activity(segment_, kWaitsForLock, whole ? kSaves : kLooksOn);
        ParametersSession session(segment_, deadline, interruption_);
        if (!session.held()) deadline_exceeded();
        for (const ArrayCopy& copy : copies) {
            Member array = session.member(copy.array);
            const uint32_t region = kArrayRegions[copy.region];
            if (copy.bytes > array.state.reserved[region])
                data_loss("an array is larger than what is reserved for it");
            const auto* from = array.array<unsigned char>(region, copy.bytes);
            if (copy.bytes) std::memcpy(copy.to, from, copy.bytes);
        }
        for (TableCopy& copy : tables) read_table(session, copy, whole);
        for (uint32_t i = 0; i + 1 < segment_.specs()->size(); ++i)
            updates.push_back(session.member(i).state.count);
        return session.round;
    }

    [[noreturn]] static void refuse_half_loaded() {
        throw Error(
            Failure::kFailedPrecondition,
            "These parameters take no update: the process that loaded a checkpoint into them died before "
            "the end, so they and their accumulator may be of different steps; load it again");
    }

  private:
    static void read_table(ParametersSession& session, TableCopy& copy, bool whole) {
        Member member = session.member(copy.table);
        Table table(member);
        const auto all = table.all();
        const uint64_t number = member.spec().number_bytes(), stride = table.shape().numbers() * number;
        const uint64_t bytes = whole ? stride : table.shape().width * number;
        copy.rows = all.size();
        auto* ids = reinterpret_cast<int64_t*>(copy.ids.emplace(all.size() * sizeof(int64_t)).get());
        auto* steps = reinterpret_cast<int64_t*>(copy.steps.emplace(all.size() * sizeof(int64_t)).get());
        auto* records = reinterpret_cast<unsigned char*>(copy.records.emplace(all.size() * bytes).get());
        const auto* last_steps = member.array<int64_t>(kRows1, member.state.rows);
        const auto* from = member.array<unsigned char>(kRows0, member.state.rows * stride);
        constexpr size_t kAhead = 16;
        for (size_t i = 0; i < all.size(); ++i) {
            if (i + kAhead < all.size()) prefetch_row(from + all[i + kAhead].second * stride, bytes);
            ids[i] = all[i].first;
            steps[i] = last_steps[all[i].second];
            if (bytes) std::memcpy(records + i * bytes, from + all[i].second * stride, bytes);
        }
    }
};

}  // namespace shmacc
