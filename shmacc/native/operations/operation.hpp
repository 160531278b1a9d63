// What all operations have in common.
//
// Each one works under the lock of a lane, or of all, without running any Python code there (no signal handler,
// finaliser or thread switch can come between), and ends with a commit.
#pragma once

#include "protocol/session.hpp"

namespace shmacc {

// A stopped process may hold the lock for ever; a call with a deadline still tries the lock once.
constexpr int64_t kLockPatience = 100 * kMillisecond;

inline int64_t lock_deadline(int64_t deadline) {
    return deadline == kForever ? kForever : std::max(deadline, monotonic_ns() + kLockPatience);
}

// Records in the participant's entry what the process is doing, for inspection.
class ActivityScope {
  public:
    ActivityScope(OpenSegment& segment, Activity activity)
        : segment_(segment), entry_(segment.presence().own()) {
        now(activity);
        store_relaxed(entry_.seen_ns, wall_ns());
    }
    ~ActivityScope() {
        if (origin_.is_here() && segment_.reachable()) now(kIdle);
    }
    void now(Activity activity) { store_relaxed(entry_.activity, uint32_t{activity}); }
    Participant& entry() { return entry_; }

  private:
    OpenSegment& segment_;
    Participant& entry_;
    const Origin origin_;
};

class Operation {
  public:
    Operation(OpenSegment& segment, Interruption& interruption)
        : segment_(segment), interruption_(interruption) {}

  protected:
    // Whether a living process has the round open. A process that is proved dead has given it up: the step is open
    // again as it was, and the record of it stays until the next commit of the round.
    bool round_is_open(const RoundState& round) {
        return round.holder.serial != 0 &&
               segment_.presence().alive(static_cast<uint32_t>(round.holder.participant), round.holder.token);
    }
    // Whether an update by this round has begun: nothing more gets in, held or not (update.hpp).
    static bool is_final(const RoundState& round) { return round.final.phase != kNotFinal; }
    bool is_closed(const RoundState& round) { return is_final(round) || round_is_open(round); }
    [[noreturn]] static void refuse_in_update(const RoundState& round, const std::string& what) {
        throw Error(Failure::kFailedPrecondition,
                    what + ": an update of parameters by the round of step " + std::to_string(round.step) +
                        " has begun (pid " + std::to_string(round.final.pid) +
                        "), so that round ends only when the update is in, or is skipped: open the round, "
                        "which gives the same gradients, and call Parameters.update or Parameters.skip");
    }
    // The end of an operation, after its commit, that may let others go on.
    template <class Session>
    void let_others_go_on(Session& session) {
        session.release();
        segment_.wait_queue().announce_progress();
        segment_.wait_queue().wake_head();
    }
    void commit(RoundSession& session) {
        session.commit();
        let_others_go_on(session);
    }
    // A round that is open ends without consuming anything.
    void open_again(RoundSession& session) {
        session.state.holder = {};
        commit(session);
    }
    // Before a wait for this round's end. True: it was offered to this very thread, and given up.
    bool give_up_offered(const RoundHolder& holder) {
        switch (segment_.loop_round().to_this_thread(holder)) {
            case LoopRound::State::kOthers: return false;
            case LoopRound::State::kHeld:
                throw Error(Failure::kFailedPrecondition,
                            "This call would wait for a round that this thread's event loop has open, which "
                            "cannot end while the thread waits; await it, or call it in asyncio.to_thread");
            case LoopRound::State::kOffered: break;
        }
        segment_.loop_round().give_up();
        RoundSession session(segment_, kForever, interruption_);
        if (session.state.holder.serial == holder.serial) open_again(session);
        return true;
    }

    // dropped_before: by the first look of the wait. A wait that never got the lock has not looked: the process that
    // kept the lock kept all others from dropping anything.
    [[noreturn]] static void deadline_exceeded(const std::string& what, const Totals& now,
                                               std::optional<uint64_t> dropped_before,
                                               Error::Fields fields = {}) {
        const auto dropped = static_cast<int64_t>(now.dropped - dropped_before.value_or(now.dropped));
        fields.insert(fields.end(),
                      {{"accumulated", now.count}, {"step", now.round.step}, {"dropped", dropped}});
        throw Error(Failure::kDeadlineExceeded,
                    what + "; " + std::to_string(dropped) +
                        " were dropped during this wait, as stale or because of a seal",
                    std::move(fields));
    }

    OpenSegment& segment_;
    Interruption& interruption_;
};

}  // namespace shmacc
