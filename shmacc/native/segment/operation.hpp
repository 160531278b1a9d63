// What all operations have in common.
//
// Each operation works under one lane's lock, or under all lanes' locks, and ends with a commit. It runs no Python code
// under a lock, so no signal handler, finaliser or thread switch can interrupt it there.
#pragma once

#include "segment/session.hpp"

namespace shmacc {

// How long a call still tries to get the lock after its deadline (a stopped process may hold the lock for ever).
constexpr int64_t kLockPatience = 100 * kMillisecond;

inline int64_t lock_deadline(int64_t deadline) {
    return deadline == kForever ? kForever : std::max(deadline, monotonic_ns() + kLockPatience);
}

// Some living processes that are attached.
struct Attached {
    std::vector<int64_t> pids;  // ascending
    uint32_t more;  // at most this many more are attached
};
// Asks the kernel about kAsked processes only: each question takes longer the more processes are attached.
inline Attached some_attached(Presence& presence) {
    constexpr uint32_t kAsked = 16;
    Attached attached{};
    if (presence.claimed()) attached.pids.push_back(presence.own().pid);
    uint32_t asked = 0;
    presence.for_each([&](uint32_t i, uint64_t token) {
        if (!is_here(token) || i == presence.index()) return true;
        if (asked == kAsked) {
            ++attached.more;
            return true;
        }
        ++asked;
        if (presence.alive(i, token)) attached.pids.push_back(load_relaxed(presence.table()[i].pid));
        return true;
    });
    std::sort(attached.pids.begin(), attached.pids.end());
    return attached;
}
inline std::string describe(const Attached& attached) {
    std::string text = "attached processes: ";
    for (size_t i = 0; i < attached.pids.size(); ++i)
        text += (i ? ", pid " : "pid ") + std::to_string(attached.pids[i]);
    return attached.more ? text + " and up to " + std::to_string(attached.more) + " more" : text;
}

// Records in the participant's entry what the process is doing, and its role, for inspection.
class ActivityScope {
  public:
    ActivityScope(OpenSegment& segment, Activity activity, Role role)
        : segment_(segment), entry_(segment.presence().own()) {
        SHMACC_ASSERT(segment.presence().claimed());
        note_role(entry_, role);
        now(activity);
        store_relaxed(entry_.seen_ns, timestamp_ns());
    }
    ~ActivityScope() {
        if (!origin_.is_here() || !segment_.reachable()) return;
        if (waited_) store_relaxed(entry_.seen_ns, timestamp_ns());
        now(kIdle);
    }
    void now(Activity activity) {
        waited_ = waited_ || (activity >= kWaitsInQueue && activity <= kWaitsForStep);
        store_relaxed(entry_.activity, uint32_t{activity});
    }
    Participant& entry() { return entry_; }
    // Adds to a counter of the entry. Another thread of this process may do the same, in another lane.
    void count(uint64_t Participant::* counter, int64_t gradients) {
        __atomic_add_fetch(&(entry_.*counter), static_cast<uint64_t>(gradients), __ATOMIC_RELAXED);
    }

  private:
    OpenSegment& segment_;
    Participant& entry_;
    const Origin origin_;
    bool waited_ = false;  // it waited for other processes, maybe for hours: then seen_ns is set again at the end
};

class Operation {
  public:
    Operation(OpenSegment& segment, Interruption& interruption)
        : segment_(segment), interruption_(interruption) {}

  protected:
    bool round_is_open(const RoundState& round) { return shmacc::round_is_open(segment_.presence(), round); }
    void refuse_if_finished(const RoundState& round) {
        if (!segment_.finished(round)) return;
        const Totals now = totals(segment_);
        throw Error(Failure::kFinished,
                    "The accumulator is finished, at step " + std::to_string(now.round.step) + ", with " +
                        std::to_string(now.count) + (now.count == 1 ? " gradient" : " gradients") +
                        " pending; restore(state()) goes on with it, if_exists=\"replace\" begins a new one",
                    {{"accumulated", now.count}, {"step", now.round.step}});
    }
    // Whether an update by this round has begun: then the round takes no more gradients, open or not (update.hpp).
    static bool is_final(const RoundState& round) { return round.final.phase != kNotFinal; }
    bool is_closed(const RoundState& round) { return is_final(round) || round_is_open(round); }
    [[noreturn]] static void refuse_in_update(const RoundState& round, const std::string& what) {
        throw Error(Failure::kFailedPrecondition,
                    what + ": an update of parameters by the round of step " + std::to_string(round.step) +
                        " has begun (pid " + std::to_string(round.final.pid) +
                        "), so that round ends only when the update is in, or is skipped: open the round, "
                        "which gives the same gradients, and call Parameters.update or Parameters.skip");
    }
    // what: the action that was not done, for the message.
    void check_held(const AllLanesSession& session, const char* what) {
        if (!session.held())
            throw Error(Failure::kDeadlineExceeded, std::string("Another process kept the lock; ") + what,
                        {{"step", segment_.round().snapshot().step}});
    }
    // Wakes the calls that may go on after this commit.
    template <class Session>
    void let_others_go_on(Session& session) {
        session.release();
        segment_.wait_queue().announce_progress();
        segment_.wait_queue().wake_head();
    }
    void commit(AllLanesSession& session) {
        session.commit();
        let_others_go_on(session);
    }
    // Call it before a wait for this round's end. If the round was offered to this thread: gives it up, returns true.
    bool give_up_offered(const RoundHolder& holder) {
        switch (segment_.own_round().to_this_thread(holder)) {
            case OwnRound::Whose::kOthers:
            case OwnRound::Whose::kThreads: return false;
            case OwnRound::Whose::kHeld:
                throw Error(Failure::kFailedPrecondition,
                            "This call would wait for a round that this thread's event loop has open, which "
                            "cannot end while the thread waits; await it, or call it in asyncio.to_thread");
            case OwnRound::Whose::kOffered: break;
        }
        segment_.own_round().give_up();
        segment_.give_up_round(holder.serial);
        return true;
    }

    template <class Process>
    static std::string in_words(const std::vector<Process>& processes) {
        std::string text;
        for (const Process& process : processes)
            text += (text.empty() ? "pid " : "; pid ") + std::to_string(process.pid) + ", " + process.reason;
        return text;
    }
    static Error departed(Failure failure, const std::string& what, const std::vector<Departure>& departures,
                          Error::Lists lists = {}) {
        std::vector<int64_t> pids;
        std::vector<std::string> reasons;
        for (const Departure& process : departures) {
            pids.push_back(process.pid);
            reasons.push_back(process.reason);
        }
        lists.emplace_back("pids", std::move(pids));
        return Error(failure, what + ": " + in_words(departures), {}, std::move(lists),
                     {{"reasons", std::move(reasons)}});
    }
    // dropped_before: how many gradients had been dropped when the wait first looked. nullopt: it never got the lock;
    // then the message counts no gradient as dropped during the wait.
    [[noreturn]] void deadline_exceeded(const std::string& what, const Totals& now,
                                        std::optional<uint64_t> dropped_before, Error::Fields fields = {}) {
        const auto since_take = static_cast<int64_t>(now.ever.dropped - now.round.dropped);
        const auto dropped = static_cast<int64_t>(now.ever.dropped - dropped_before.value_or(now.ever.dropped));
        fields.insert(fields.end(),
                      {{"accumulated", now.count}, {"step", now.round.step}, {"dropped", dropped}});
        const Attached attached = some_attached(segment_.presence());
        throw Error(Failure::kDeadlineExceeded,
                    what + "; " + std::to_string(dropped) + " were dropped during this wait, and " +
                        std::to_string(since_take) + " since the last take, as stale or because of a seal; " +
                        describe(attached),
                    std::move(fields), {{"pids", attached.pids}});
    }

    OpenSegment& segment_;
    Interruption& interruption_;
};

}  // namespace shmacc
