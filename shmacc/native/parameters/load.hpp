// Loads replace the contents of one segment, or of several together.
//
// A load holds the locks of all its segments from the first change to the last. Like an update it takes the parameters'
// locks first, then the accumulators', each in order of token. So two loads neither mix nor deadlock. All that can
// fail comes before the first commit: the gradients are put in under each lane's journal, and the parameters' journals
// are written. A failure there is undone. No signal handler runs while a lock is held, and nothing throws after the
// first commit. So only a death can end a load half way. The commits come in this order:
//
//   1  All parameters' RoundStates: mark them as being loaded (RoundState::sealed), and by which process.
//   2  Each parameters' RoundState and lane: their arrays are in.
//   3  Each accumulator's RoundState and lane: its gradients are in. This ends its open round.
//   4  All parameters' RoundStates: remove the mark.
//
// A single segment has one commit, 2 or 3, and no mark. Each instant of death:
//   before 1            nothing has changed. The lanes' next owners undo the gradients that were put in.
//   between 1 and 4     marked parameters take no update and are not saved. Loading once more makes everything whole.
//                       Without the mark, parameters of an older step could take the update of a round that does not
//                       belong to them, since steps may be skipped.
//   in 4                everything is in; parameters that are still marked must be loaded again.
// After such a death, blocks without an update can still consume rounds of the accumulators.
#pragma once

#include <deque>

#include "accumulators/apply.hpp"
#include "parameters/update.hpp"

namespace shmacc {

class Load {
  public:
    // All arrays and slots of one segment of parameters, and how often each array was updated, at `step`.
    struct Arrays {
        OpenSegment* segment;
        int64_t step;
        MemberChanges changes;  // of each member, in their order
        std::vector<int64_t> updates;
    };
    // All gradients of an accumulator, at the request's step; the request's members are sorted.
    struct Gradients {
        OpenSegment* segment;
        ApplyRequest request;
        uint64_t* timeline;  // is set to the timeline that the load begins
    };

    Load(std::vector<Arrays> arrays, std::vector<Gradients> gradients, int64_t deadline,
         Interruption& interruption)
        : arrays_(std::move(arrays)), gradients_(std::move(gradients)), deadline_(deadline),
          interruption_(interruption) {
        std::sort(arrays_.begin(), arrays_.end(), by_token<Arrays>);
        std::sort(gradients_.begin(), gradients_.end(), by_token<Gradients>);
    }

    void run() {
        std::deque<ActivityScope> activities;
        for (const Arrays& each : arrays_) activities.emplace_back(*each.segment, kWaitsForLock, kUpdatesIt);
        for (const Gradients& each : gradients_)
            activities.emplace_back(*each.segment, kWaitsForLock, kUpdatesIt);
        const int64_t until = lock_deadline(deadline_);
        while (OpenSegment* const busy = replace_if_free(activities)) {
            interruption_.check();
            HeldLocks wait(*busy);  // this may take long, so no other lock is held meanwhile
            if (!wait.acquire_all(until, interruption_) || past(until)) deadline_exceeded(*busy);
        }
    }

  private:
    template <class Part>
    static bool by_token(const Part& one, const Part& other) {
        return one.segment->config().token < other.segment->config().token;
    }

    // Loads if all locks are free, and returns null. Otherwise returns a segment whose lock is not free.
    OpenSegment* replace_if_free(std::deque<ActivityScope>& activities) {
        Uninterrupted uninterrupted;
        std::deque<ParametersSession> parameters;
        std::deque<LaneSession> accumulators;
        for (const Arrays& each : arrays_) {
            parameters.emplace_back(*each.segment, soon(), uninterrupted);
            if (!parameters.back().held()) return each.segment;
        }
        for (const Gradients& each : gradients_) {
            accumulators.emplace_back(*each.segment, std::nullopt, true, soon(), uninterrupted);
            if (!accumulators.back().held()) return each.segment;
        }
        for (ActivityScope& activity : activities) activity.now(kUpdates);
        prepare(parameters, accumulators);

        const bool marks = arrays_.size() + gradients_.size() > 1;
        for (ParametersSession& session : parameters) marks ? session.mark() : session.forget_mark();
        for (size_t i = 0; i < arrays_.size(); ++i) {
            parameters[i].change(arrays_[i].step);
            parameters[i].keep_no_journal();
            parameters[i].commit(arrays_[i].step, arrays_[i].updates);
        }
        for (size_t i = 0; i < gradients_.size(); ++i) {
            Apply(*gradients_[i].segment, uninterrupted).commit_replaced(accumulators[i]);
            *gradients_[i].timeline = accumulators[i].round.restores;
        }
        if (marks)
            for (ParametersSession& session : parameters) session.unmark();
        return nullptr;
    }
    // If this throws, nothing has changed.
    void prepare(std::deque<ParametersSession>& parameters, std::deque<LaneSession>& accumulators) {
        Uninterrupted uninterrupted;
        size_t put = 0, prepared = 0;
        try {
            for (; put < gradients_.size(); ++put)
                Apply(*gradients_[put].segment, uninterrupted).replace(accumulators[put], gradients_[put].request);
            for (; prepared < arrays_.size(); ++prepared)
                parameters[prepared].prepare(arrays_[prepared].changes);
        } catch (...) {
            for (size_t i = 0; i < put; ++i) accumulators[i].roll_back();
            for (size_t i = 0; i < std::min(prepared + 1, arrays_.size()); ++i)
                parameters[i].give_journal_back();
            throw;
        }
    }
    [[noreturn]] static void deadline_exceeded(OpenSegment& busy) {
        throw Error(Failure::kDeadlineExceeded,
                    "Another process kept a lock of '" + name_of(busy.config()) +
                        "' (it updates, takes or copies, or is stopped in that); nothing was changed",
                    {{"step", busy.round().snapshot().step}});
    }
    static int64_t soon() { return monotonic_ns() + HeldLocks::kSlice; }

    std::vector<Arrays> arrays_;
    std::vector<Gradients> gradients_;
    const int64_t deadline_;
    Interruption& interruption_;
};

}  // namespace shmacc
