// Sets, advances and awaits the global step, and removes its seal.
#pragma once

#include "segment/operation.hpp"
#include "segment/queue_entry.hpp"

namespace shmacc {

class Step : public Operation {
  public:
    using Operation::Operation;

    // Returns the old step, and the timeline.
    std::pair<int64_t, uint64_t> set_step(int64_t step, int64_t deadline) {
        ActivityScope activity(segment_, kWaitsForLock, kUpdatesIt);
        AllLanesSession session(segment_, lock_deadline(deadline), interruption_);
        check_held(session, kNothingChanged);
        if (is_final(session.state))
            refuse_in_update(session.state, "The step cannot be set, which would keep the gradients");
        const int64_t old = session.state.step;
        session.state.step = step;
        session.state.holder = {};
        commit(session);
        return {old, session.state.restores};
    }

    // Moves the step on, if `step` is higher. Returns how many pending gradients were dropped, and the timeline.
    std::pair<int64_t, uint64_t> advance_step(int64_t step, int64_t deadline) {
        ActivityScope activity(segment_, kWaitsForLock, kUpdatesIt);
        AllLanesSession session(segment_, lock_deadline(deadline), interruption_);
        check_held(session, kNothingChanged);
        if (step <= session.state.step) return {0, session.state.restores};
        if (session.state.final.phase == kUpdateBegun)
            refuse_in_update(session.state, "The step cannot move on");
        // If the round's update is in the parameters, the round counts as taken: none of its gradients is dropped.
        const bool taken = session.state.final.phase == kUpdateIn;
        const int64_t count = session.count(), dropped = taken ? 0 : count;
        session.next_round();
        session.state.takes += taken;
        session.state.taken += static_cast<uint64_t>(count - dropped);
        session.state.discarded += static_cast<uint64_t>(dropped);
        session.state.step = step;
        session.state.sealed = 0;
        commit(session);
        return {dropped, session.state.restores};
    }

    // Ties the accumulator to the parameters with this token. Returns false if it is tied to other parameters already.
    bool belong_to(uint64_t parameters) {
        if (segment_.round().snapshot().final.parameters == parameters) return true;
        AllLanesSession session(segment_, monotonic_ns() + kLockPatience, interruption_);
        if (!session.held()) return true;  // a stopped process may hold a lock; the first update checks again
        RoundState& state = session.state;
        const bool unused = state.takes == 0 && session.count() == 0 && !is_closed(state);
        if (state.final.parameters && !unused) return state.final.parameters == parameters;
        state.final.parameters = parameters;
        session.commit();
        return true;
    }

    void unseal(int64_t deadline) {
        ActivityScope activity(segment_, kWaitsForLock, kUpdatesIt);
        AllLanesSession session(segment_, lock_deadline(deadline), interruption_);
        check_held(session, kNothingChanged);
        if (round_is_open(session.state))
            throw Error(Failure::kFailedPrecondition,
                        "A round is open: its end unseals the step, and nothing else does");
        if (is_final(session.state)) refuse_in_update(session.state, "The step cannot be opened again");
        session.state.sealed = 0;
        commit(session);
    }

    // A step, and its timeline: the number of restores.
    using At = std::tuple<int64_t, uint64_t>;
    // Waits until the step is past `after`.
    At wait_step(int64_t after, int64_t deadline, bool raise_departures) {
        const auto is_past = [after](const RoundState& now) { return now.step > after; };
        const RoundState round = wait(is_past, ", not past " + std::to_string(after), deadline,
                                      raise_departures);
        return At(round.step, round.restores);
    }
    // Waits until the step or the timeline differs from `last`. Returns nullopt if the accumulator is finished.
    std::optional<At> next_step(const std::optional<At>& last, int64_t deadline, bool raise_departures) {
        const auto is_new = [&](const RoundState& now) {
            return segment_.finished(now) || last != At(now.step, now.restores);
        };
        const RoundState round = wait(is_new, "", deadline, raise_departures);
        if (segment_.finished(round)) return std::nullopt;
        return At(round.step, round.restores);
    }

  private:
    static constexpr const char* kNothingChanged = "nothing was changed";

    template <class Reached>
    RoundState wait(Reached reached, const std::string& missing, int64_t deadline, bool raise_departures) {
        ActivityScope activity(segment_, kWaitsForStep, kLooksOn);
        std::optional<uint64_t> dropped_before;
        for (Slices slices;; slices.next(interruption_.ends_sleep())) {
            uint32_t seen = load(segment_.wait_queue().progress_word());
            interruption_.check();
            const RoundState round = segment_.round().snapshot();
            if (reached(round)) return round;
            refuse_if_finished(round);
            if (raise_departures) raise_if_chiefs_are_gone();
            if (!dropped_before) dropped_before = totals(segment_).ever.dropped;
            if (past(deadline)) {
                const Totals now = totals(segment_);
                deadline_exceeded("The global step is still " + std::to_string(now.round.step) + missing +
                                      "; " + std::to_string(now.count) + " gradients had arrived",
                                  now, dropped_before);
            }
            futex_wait(segment_.wait_queue().progress_word(), seen, deadline, slices.now());
            segment_.check_file();
        }
    }
    void raise_if_chiefs_are_gone() {
        // Look for waiting takes before and after `chiefs`: a take that is served meanwhile may be overlooked by both
        // `chiefs` (it had not taken yet) and the second look (it does not wait any more).
        if (segment_.wait_queue().anybody_waits()) return;
        const std::vector<Departure> departures = segment_.departures().chiefs();
        if (departures.empty() || segment_.wait_queue().anybody_waits()) return;
        throw departed(Failure::kChiefDied, "Nobody is left who takes: all that have taken are gone",
                       departures);
    }
};

}  // namespace shmacc
