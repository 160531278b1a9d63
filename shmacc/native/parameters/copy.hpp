// Changes parameters that are one copy of several, on several hosts. All copies get the same updates, in one order.
//
// This file knows no rounds, since a round is over all hosts. The commit of an update also stores which updates the
// copy has (Lineage). So a copy makes each update once, however often it is asked to, and only the update that follows
// its last one. An update's result is the same to the bit on every host: the request has learning rates and corrections
// of bias, each loop has a fixed order of operations, and runs with DefaultFloats.
//
// A change has two commits, under the parameters' lock:
//
//   1  The RoundState says which step the change leads to (RoundState::begun).
//   2  The arrays, the step and the lineage, as in any update (update.hpp).
//
//   Invariant: a gradient of the copy's accumulator is computed from whole arrays if its step is not below `begun`.
//
// Each instant of death:
//   before 1            nothing has happened.
//   between 1 and 2     the next owner of the lock puts the old arrays back. Until then workers may read half of the
//                       change, and apply gradients that are computed from it: their step is below `begun`. So the
//                       accumulator is moved to `begun` before its gradients are counted, even without this change.
//   after 2             the change is complete. Asking for it again changes nothing.
//
// `make model` checks this with several hosts. It finds a fault if `begun` is not set, or not compared.
#pragma once

#include "parameters/update.hpp"

namespace shmacc {

struct CopyChange {
    std::optional<Lineage> parent;  // an update: the copy's lineage before it; nullopt: new contents of everything
    Lineage lineage;  // of the copy afterwards; an update's digest is computed
    int64_t step;  // of the copy afterwards
    int64_t begun;  // the step that its accumulator must reach
    MemberChanges changes;
    std::vector<int64_t> updates;  // if everything is new: how often each array was updated
    int64_t deadline;
    bool only_check;  // checks whether the change could be made: checks arguments; reserves memory and gives it back
};

class ChangeCopy : public ParametersOperation {
  public:
    using ParametersOperation::ParametersOperation;

    // Returns false if the copy has this change already. digest: is set to the copy's.
    bool change(const CopyChange& request, uint64_t& digest) {
        ActivityScope activity(segment_, kWaitsForLock, kUpdatesIt);
        const bool whole = !request.parent;
        bool is_new = false;
        repeat(activity, request.deadline, [&](ParametersSession& session) {
            const Lineage own = session.round.lineage;
            if (session.round.sealed && !whole) Update::refuse_half_loaded();
            if (!session.round.sealed && names_the_same(own, request.lineage) &&
                (!whole || own.digest == request.lineage.digest)) {
                digest = own.digest;
                return true;
            }
            if (!whole && !(names_the_same(own, *request.parent) && own.digest == request.parent->digest))
                refuse(own, *request.parent);
            is_new = session.compare(request.changes);
            if (is_new) digest = request.only_check ? check(session, request) : make(session, request);
            return is_new;
        });
        return is_new;
    }

  private:
    static bool names_the_same(const Lineage& one, const Lineage& other) {
        return one.term == other.term && one.number == other.number;
    }
    static void prepare(ParametersSession& session, const CopyChange& request) {
        try {
            session.prepare(request.changes);
        } catch (...) {
            if (!request.parent) session.give_journal_back();
            throw;
        }
    }
    // Nothing that readers see is changed; without a commit the session gives back what `prepare` has reserved.
    static uint64_t check(ParametersSession& session, const CopyChange& request) {
        prepare(session, request);
        if (!request.parent) session.give_journal_back();
        return session.round.lineage.digest;
    }
    static uint64_t make(ParametersSession& session, const CopyChange& request) {
        const bool whole = !request.parent;
        prepare(session, request);
        session.note_begun(request.begun);
        session.change(request.step - 1);
        Lineage lineage = request.lineage;
        if (whole) {
            session.forget_mark();
            session.keep_no_journal();
        } else {
            lineage.digest = session.digest(request.parent->digest);
        }
        session.commit(request.step, request.updates, lineage);
        return lineage.digest;
    }
    static std::string described(const Lineage& lineage) {
        return lineage.term == 0 ? "none that it knows"
                                 : std::to_string(lineage.number) + " of term " + std::to_string(lineage.term) +
                                       " (digest " + std::to_string(lineage.digest) + ")";
    }
    [[noreturn]] static void refuse(const Lineage& own, const Lineage& parent) {
        throw Error(Failure::kFailedPrecondition, "This copy's last update is " + described(own) +
                                                      ", but the change is for a copy whose last is " +
                                                      described(parent) + "; nothing was changed");
    }
};

}  // namespace shmacc
