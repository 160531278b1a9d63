// The global step: set, moved on, waited for; and the seal.
#pragma once

#include "operations/operation.hpp"
#include "protocol/queue_entry.hpp"

namespace shmacc {

class Step : public Operation {
  public:
    using Operation::Operation;

    // The old step.
    int64_t set_step(int64_t step) {
        ActivityScope activity(segment_, kWaitsForLock);
        RoundSession session(segment_, kForever, interruption_);
        if (is_final(session.state))
            refuse_in_update(session.state, "The step cannot be set, which would keep the gradients");
        const int64_t old = session.state.step;
        session.state.step = step;
        session.state.holder = {};
        commit(session);
        return old;
    }

    // The number of dropped gradients of older steps.
    int64_t advance_step(int64_t step) {
        ActivityScope activity(segment_, kWaitsForLock);
        RoundSession session(segment_, kForever, interruption_);
        if (step <= session.state.step) return 0;
        if (session.state.final.phase == kUpdateBegun)
            refuse_in_update(session.state, "The step cannot move on");
        // Of a round that is in the parameters nothing is dropped: it was taken.
        const bool taken = session.state.final.phase == kUpdateIn;
        const int64_t count = session.count(), dropped = taken ? 0 : count;
        session.next_round();
        session.state.takes += taken;
        session.state.taken += static_cast<uint64_t>(count - dropped);
        session.state.discarded += static_cast<uint64_t>(dropped);
        session.state.step = step;
        session.state.sealed = 0;
        commit(session);
        return dropped;
    }

    void unseal() {
        ActivityScope activity(segment_, kWaitsForLock);
        RoundSession session(segment_, kForever, interruption_);
        if (round_is_open(session.state))
            throw Error(Failure::kFailedPrecondition,
                        "A round is open: its end unseals the step, and nothing else does");
        if (is_final(session.state)) refuse_in_update(session.state, "The step cannot be opened again");
        session.state.sealed = 0;
        commit(session);
    }

    int64_t wait_step(int64_t after, int64_t deadline) {
        ActivityScope activity(segment_, kWaitsForStep);
        std::optional<uint64_t> dropped_before;
        for (Slices slices;; slices.next(interruption_.ends_sleep())) {
            uint32_t seen = load(segment_.wait_queue().progress_word());
            interruption_.check();
            const int64_t step = segment_.round().snapshot().step;
            if (step > after) return step;
            if (!dropped_before) dropped_before = totals(segment_).dropped;
            if (past(deadline)) {
                const Totals now = totals(segment_);
                deadline_exceeded("The global step is still " + std::to_string(now.round.step) +
                                      ", not past " + std::to_string(after) + "; " +
                                      std::to_string(now.count) + " gradients had arrived",
                                  now, dropped_before);
            }
            futex_wait(segment_.wait_queue().progress_word(), seen, deadline, slices.now());
            segment_.check_file();
        }
    }
};

}  // namespace shmacc
