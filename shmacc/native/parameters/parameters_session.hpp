// The lock of parameters, and a copy of their committed state to change; and what all operations on parameters share.
#pragma once

#include "parameters/changes.hpp"
#include "parameters/default_floats.hpp"
#include "segment/operation.hpp"

namespace shmacc {

using MemberChanges = std::vector<const MemberChange*>;  // one for each member that changes

class ParametersSession : public LaneSession {
  public:
    ParametersSession(OpenSegment& segment, int64_t deadline, Interruption& interruption)
        : LaneSession(segment, 0, false, deadline, interruption) {}

    // Without a commit: gives back the memory that tables have reserved for new rows. A change that has begun is left
    // to the lock's next owner.
    ~ParametersSession() {
        if (!committed_ && sound_ && !lane().has_begun())
            for (Member& member : members()) member.roll_back();
    }

    Member member(uint32_t number) { return Member(lane(), number, state); }

    // Compares the tables that will change with their indexes, if this process has not done so. Returns false if there
    // is more to compare: other processes get the lock before the next call, since this takes long.
    bool compare(const MemberChanges& changes) {
        constexpr uint64_t kMostRows = 1 << 20;
        for (const MemberChange* change : changes) {
            Member table = member(change->member());
            if (table.spec().kind != kTable || lane().compared(table.number()).all) continue;
            if (!TableIndex(table).compare(kMostRows)) return false;
        }
        return true;
    }
    // Reserves what the changes need, and writes the log. Nothing is changed yet, and nothing throws after this.
    void prepare(const MemberChanges& changes) {
        SHMACC_ASSERT(held() && !committed_ && prepared_.empty());
        lane().begin_round(state, round.round + 1);
        expect(changes.size());
        for (const MemberChange* change : changes)
            prepared_.push_back(change->prepare(members().emplace_back(member(change->member()))));
        for (const auto& change : prepared_) change->log(log_);
        log_.write(lane(), state);
    }
    // Makes the changes that were prepared. step: the step of the round.
    void change(int64_t step) {
        SHMACC_ASSERT(!committed_ && prepared_.size() == members().size());
        const DefaultFloats floats;
        uint64_t new_entries = 0;
        for (const auto& change : prepared_) new_entries += change->new_entries();
        lane().begin(state, new_entries);
        const uint64_t bytes = log_.saved_bytes();
        Saving saving{lane().mapping().at_least(kUndoRows, bytes, state.reserved[kUndoRows]),
                      &lane().journal().records, 0, bytes >= kStreamedFrom};
        for (const auto& change : prepared_) change->change(saving, step);
        SHMACC_ASSERT(saving.count == log_.entries() && lane().mapping().reaches(kUndoRows, saving.to));
        if (saving.streamed) end_of_stream();
    }
    // updates: how often each changed member was updated, in order of the changes; empty: `change` has counted it.
    // lineage: the new lineage (copy.hpp), if the parameters are a copy.
    void commit(int64_t step, const std::vector<int64_t>& updates = {}, const Lineage& lineage = {}) {
        SHMACC_ASSERT(updates.size() <= members().size());
        for (size_t i = 0; i < updates.size(); ++i) members()[i].state.count = updates[i];
        round.step = step;
        round.lineage = lineage;
        ++round.round;
        ++round.takes;
        commit_with_round();
        committed_ = true;
        if (round.round % Lane::kSmallRounds == 0) segment_.give_unrecorded_back(&state);
    }
    // For copies (copy.hpp): stores that a change begins, and the step that the copy's accumulator must reach.
    void note_begun(int64_t step) {
        round.begun = std::max(round.begun, step);
        segment_.commit(round);
    }
    // A digest of what `change` has changed. before: the digest of the changes before.
    uint64_t digest(uint64_t before) {
        Digest digest(before);
        for (size_t i = 0; i < prepared_.size(); ++i) {
            digest.add(members()[i].number());
            prepared_[i]->add_to(digest);
        }
        return digest.value();
    }
    // For loads (load.hpp) and copies. `mark` notes that the parameters are being loaded.
    void keep_no_journal() { Lane::keep_no_undo(before, state); }
    void mark() {
        const Presence& presence = segment_.presence();
        round.sealed = 1;
        round.holder = {++round.opened, presence.index(), presence.token(), timestamp_ns()};
        segment_.commit(round);
    }
    void forget_mark() {
        round.sealed = 0;
        round.holder = {};
    }
    void unmark() {
        forget_mark();
        segment_.commit(round);
    }
    // If a load fails: gives back the memory that `prepare` has reserved.
    void give_journal_back() {
        if (!sound_) return;
        LaneState now = lane().committed().again(), before = now;
        Lane::keep_no_undo(before, now);
        lane().commit(now);
        lane().give_back(before, now);
    }

  private:
    std::vector<std::unique_ptr<PreparedChange>> prepared_;
    UndoLog log_;
    bool committed_ = false;
};

class ParametersOperation : public Operation {
  protected:
    using Operation::Operation;

    // Calls attempt(session) until it returns true. Between two calls the lock is free, and signal handlers run.
    template <class Attempt>
    void repeat(ActivityScope& activity, int64_t deadline, Attempt attempt) {
        for (;; interruption_.check()) {
            activity.now(kWaitsForLock);
            ParametersSession session(segment_, deadline, interruption_);
            if (!session.held()) deadline_exceeded();
            activity.now(kUpdates);
            if (attempt(session)) return;
            if (past(deadline)) deadline_exceeded();
        }
    }
    [[noreturn]] void deadline_exceeded() {
        throw Error(
            Failure::kDeadlineExceeded,
            "Another update, snapshot or restore of the parameters, or an operation on the accumulator, "
            "kept its lock; nothing was changed",
            {{"step", segment_.round().snapshot().step}});
    }
};

}  // namespace shmacc
