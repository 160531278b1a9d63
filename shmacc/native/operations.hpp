// The operations on an accumulator: each one works under the lock, without running any Python code there (no
// signal handler, finaliser or thread switch can come between), and ends with a commit.
#pragma once

#include "queue_entry.hpp"
#include "round_copy.hpp"

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

class Operations {
  public:
    Operations(OpenSegment& segment, Interruption& interruption)
        : segment_(segment), interruption_(interruption) {}

    // add(state) puts the gradient in. False: dropped, as stale or because of a seal.
    // bytes: of the gradient's values.
    template <class Add>
    bool apply(const Dims& dims, int64_t local_step, int64_t gradients, uint64_t bytes, Add add) {
        ActivityScope activity(segment_, kWaitsForLock);
        for (HeadGrace grace;;) {
            OpenSegment::Session session(segment_, kForever, interruption_);
            activity.now(kApplies);
            State& state = session.state;
            // Read before the queue: a take that leaves it needs no lock, and wakes once only.
            const uint32_t seen = load(segment_.wait_queue().progress_word());
            const bool open = round_is_open(state);
            if (local_step < state.step || state.sealed || (open && local_step == state.step)) {
                drop(session, activity, gradients);
                return false;
            }
            if (open) {  // it is of a later step than the one that is being closed
                session.release();
                wait_for_progress(activity, kWaitsForRound, seen, kForever);
                continue;
            }
            WaitQueue& queue = segment_.wait_queue();
            uint32_t head = queue.living_head();
            if (head != WaitQueue::kNobody && !QueueEntry::of_this_thread(segment_, head) &&
                grace.must_wait(queue[head], state)) {
                session.release();
                wait_for_progress(activity, kWaitsForHead, seen, grace.until());
                continue;
            }
            check_shape(state, dims);
            if (__builtin_add_overflow(state.count, gradients, &state.count) ||
                __builtin_add_overflow(state.applied, gradients, &state.applied))
                throw Error(Failure::kOutOfRange, "The number of gradients would exceed 64 bits");
            try {
                if (session.before.count == 0) start_round(segment_.header(), segment_.config(), state, dims);
                add(state);
            } catch (...) {
                session.roll_back();
                throw;
            }
            state.applied_bytes += bytes;
            session.commit();
            Participant& entry = activity.entry();
            entry.applied += static_cast<uint64_t>(gradients);
            entry.applied_ns = wall_ns();
            entry.applied_step = state.step;
            bool reached = head != WaitQueue::kNobody && state.count >= queue[head].num_required;
            session.release();
            if (reached) queue.wake(head);
            return true;
        }
    }

    // For a gradient that does not fit the round: true if it is dropped anyway.
    bool drop_if_stale(int64_t local_step, int64_t gradients) {
        ActivityScope activity(segment_, kWaitsForLock);
        OpenSegment::Session session(segment_, kForever, interruption_);
        const State& state = session.state;
        const bool open = round_is_open(session.state);
        if (local_step >= state.step + (open && state.step < INT64_MAX) && !state.sealed) return false;
        drop(session, activity, gradients);
        return true;
    }

    // Waits until it is the head and num_required gradients are there; hands out all that are.
    //
    // The copy of a large round takes milliseconds, and a signal that comes meanwhile must still find a take
    // that has consumed nothing. So signals are looked at between copy and commit: without the lock, since
    // handlers are Python's, but with the place in line, so that nobody else takes the round and no gradient
    // joins it meanwhile (the head's number is reached: applies wait). It may change all the same: by
    // advance_step, an apply out of patience, a death that costs the place, the handler itself. Then the copy is
    // made again; after kLooks looks, without another one. A process that dies between copy and commit took nothing.
    //
    // What it took is in `taken` when it throws, too, for nobody else has it from the commit on.
    void take(const TakeRequest& request, std::optional<Taken>& taken) {
        ActivityScope activity(segment_, kWaitsForLock);
        QueueEntry place(segment_);
        Cancellable interruption(interruption_, place);
        std::optional<RoundCopy> copy;
        std::optional<uint64_t> dropped_before;  // by the first look at the state
        for (int looks = 0;;) {
            uint32_t seen = 0;
            bool look = false;
            {
                OpenSegment::Session session(segment_, lock_deadline(request.deadline), interruption);
                if (!session.held()) deadline_exceeded(request, dropped_before);
                if (!dropped_before) dropped_before = session.state.dropped;
                activity.now(kTakes);
                if (place.joined()) seen = load(place.wake_word());  // before anything is checked
                place.check_cancelled();
                State& state = session.state;
                WaitQueue& queue = segment_.wait_queue();
                const uint32_t head = queue.living_head();
                const bool open = round_is_open(state);
                const bool first = !open &&
                                   (head == WaitQueue::kNobody || QueueEntry::of_this_thread(segment_, head));
                const bool heads = !open && !first && state.count >= queue[head].num_required;
                if (request.num_required == 0 || (first && state.count >= request.num_required)) {
                    if (!copy || !copy->is_of(state, open || heads)) {
                        copy.reset();  // two at a time might not fit
                        copy.emplace(segment_, state, request, open || heads);
                        look = copy->bytes() > kQuickCopy && looks++ < kLooks;
                    }
                    if (!look) {
                        if (request.hold)
                            open_round(session, *copy);
                        else
                            consume(session, request, *copy);
                        taken = std::move(copy->taken);
                        if (!request.hold) activity.entry().taken += static_cast<uint64_t>(taken->count);
                        place.leave();
                        session.release();
                        queue.announce_progress();
                        queue.wake_head();
                        return;
                    }
                    if (!place.joined() && request.num_required > 0) place.join(request.num_required);
                } else {
                    copy.reset();
                    if (past(request.deadline)) deadline_exceeded(request, dropped_before);
                    // A dead take in front of it may just have been removed.
                    if (heads) queue.wake(head);
                    if (!place.joined()) {
                        place.join(request.num_required);
                        continue;  // once more, now in the queue: nothing that happens from here on is missed
                    }
                }
            }
            interruption.check();  // before the commit; or woken, but not served: possibly by a close
            if (look) continue;
            activity.now(kWaitsInLine);
            wait_to_be_served(place, seen, request);
        }
    }

    // Ends a round that `take` has opened. consume: it takes effect; else the step is open again as it was. False:
    // the round was ended already, by a new step or by the death of the process that opened it.
    bool close_round(uint64_t serial, bool consume, int64_t deadline = kForever) {
        ActivityScope activity(segment_, kWaitsForLock);
        OpenSegment::Session session(segment_, deadline, interruption_);
        if (!session.held() || session.state.holder.serial != serial) return false;
        State& state = session.state;
        state.holder = {};
        if (consume) {
            activity.now(kTakes);
            segment_.committed().begin(state, 0);
            activity.entry().taken += static_cast<uint64_t>(state.count);
            state.taken += static_cast<uint64_t>(state.count);
            state.takes += 1;
            reset_round(state);
            ++state.step;
            state.sealed = 0;
        }
        session.commit();
        session.release();
        segment_.wait_queue().announce_progress();
        segment_.wait_queue().wake_head();
        return true;
    }

    // The old step.
    int64_t set_step(int64_t step) {
        ActivityScope activity(segment_, kWaitsForLock);
        OpenSegment::Session session(segment_, kForever, interruption_);
        int64_t old = session.state.step;
        session.state.step = step;
        session.state.holder = {};
        session.commit();
        session.release();
        segment_.wait_queue().announce_progress();
        segment_.wait_queue().wake_head();
        return old;
    }

    // The number of dropped gradients of older steps.
    int64_t advance_step(int64_t step) {
        ActivityScope activity(segment_, kWaitsForLock);
        OpenSegment::Session session(segment_, kForever, interruption_);
        State& state = session.state;
        if (step <= state.step) return 0;
        int64_t dropped = state.count;
        reset_round(state);
        state.discarded += static_cast<uint64_t>(dropped);
        state.step = step;
        state.sealed = 0;
        state.holder = {};
        session.commit();
        session.release();
        segment_.wait_queue().announce_progress();
        return dropped;
    }

    void unseal() {
        ActivityScope activity(segment_, kWaitsForLock);
        OpenSegment::Session session(segment_, kForever, interruption_);
        if (round_is_open(session.state))
            throw Error(Failure::kFailedPrecondition,
                        "A round is open: its end unseals the step, and nothing else does");
        session.state.sealed = 0;
        session.commit();
    }

    int64_t wait_step(int64_t after, int64_t deadline) {
        ActivityScope activity(segment_, kWaitsForStep);
        std::optional<uint64_t> dropped_before;
        for (Slices slices;; slices.next(interruption_.ends_sleep())) {
            uint32_t seen = load(segment_.wait_queue().progress_word());
            const State state = segment_.committed().snapshot();
            if (state.step > after) return state.step;
            if (!dropped_before) dropped_before = state.dropped;
            if (past(deadline))
                deadline_exceeded("The global step is still " + std::to_string(state.step) + ", not past " +
                                      std::to_string(after) + "; " + std::to_string(state.count) +
                                      " gradients had arrived",
                                  state, dropped_before);
            futex_wait(segment_.wait_queue().progress_word(), seen, deadline, slices.now());
            segment_.check_file();
            interruption_.check();
        }
    }

  private:
    static bool past(int64_t deadline) { return deadline != kForever && monotonic_ns() >= deadline; }

    // dropped_before: by the first look of the wait. A wait that never got the lock has not looked: the process that
    // kept the lock kept all others from dropping anything.
    [[noreturn]] static void deadline_exceeded(const std::string& what, const State& state,
                                               std::optional<uint64_t> dropped_before,
                                               Error::Fields fields = {}) {
        const auto dropped = static_cast<int64_t>(state.dropped - dropped_before.value_or(state.dropped));
        fields.insert(fields.end(), {{"accumulated", state.count}, {"step", state.step}, {"dropped", dropped}});
        throw Error(Failure::kDeadlineExceeded,
                    what + "; " + std::to_string(dropped) +
                        " were dropped during this wait, as stale or because of a seal",
                    std::move(fields));
    }
    [[noreturn]] void deadline_exceeded(const TakeRequest& request, std::optional<uint64_t> dropped_before) {
        const State state = segment_.committed().snapshot();
        deadline_exceeded(std::to_string(state.count) + " of the " + std::to_string(request.num_required) +
                              " required gradients had arrived; the global step is " +
                              std::to_string(state.step),
                          state, dropped_before, {{"required", request.num_required}});
    }

    // Whether a living process has the round open. A process that is proved dead has given it up: the step is open
    // again as it was.
    bool round_is_open(State& state) {
        if (state.holder.serial == 0) return false;
        if (segment_.presence().alive(static_cast<uint32_t>(state.holder.participant), state.holder.token))
            return true;
        state.holder = {};
        return false;
    }

    // Without the lock, until the step moves on, a take or a round ends, or the deadline.
    void wait_for_progress(ActivityScope& activity, Activity what, uint32_t seen, int64_t deadline) {
        activity.now(what);
        futex_wait(segment_.wait_queue().progress_word(), seen, deadline);
        segment_.check_file();
        interruption_.check();
    }

    void drop(OpenSegment::Session& session, ActivityScope& activity, int64_t gradients) {
        session.state.dropped += static_cast<uint64_t>(gradients);
        session.commit();
        activity.entry().dropped += static_cast<uint64_t>(gradients);
    }

    // TensorFlow's checks against the round (semantics: rows 8a, 8b; dense: 3).
    void check_shape(const State& state, const Dims& dims) {
        if (state.count == 0) return;
        Dims round = round_dims(segment_.header().shapes[state.shape], segment_.config(), state);
        if (segment_.config().kind == kDense) {
            if (dims != round)
                throw Error(Failure::kInvalidArgument,
                            "Shape mismatch: expected " + in_brackets(round) + ", got " + in_brackets(dims));
            return;
        }
        if (dims.size() != round.size())
            throw Error(Failure::kInvalidArgument, "Shape mismatch: expected values rank " +
                                                       std::to_string(round.size() + 1) + ", got " +
                                                       std::to_string(dims.size() + 1));
        for (size_t i = 0; i < dims.size(); ++i)
            if (dims[i] != round[i])
                throw Error(Failure::kInvalidArgument,
                            "Shape mismatch: expected values dim " + std::to_string(i + 1) + " to be " +
                                std::to_string(round[i]) + ", got " + std::to_string(dims[i]));
    }

    void wait_to_be_served(QueueEntry& place, uint32_t seen, const TakeRequest& request) {
        WaitQueue& queue = segment_.wait_queue();
        uint32_t& word = place.wake_word();
        for (Slices slices;;) {
            futex_wait(word, seen, request.deadline, slices.now());
            segment_.check_file();
            if (load(word) != seen) return;  // woken: no time to lose
            interruption_.check();
            place.check_cancelled();
            if (past(request.deadline)) return;
            // Not woken: is this the head all the same, or is there a dead take in front of it? That is not
            // worth asking as long as this take could not be served: the apply that changes that removes the
            // dead, and wakes the head.
            State now = segment_.committed().snapshot();
            if (now.count >= request.num_required && !round_is_open(now)) {
                const uint32_t head = queue.head();
                if (head == WaitQueue::kNobody || QueueEntry::of_this_thread(segment_, head) ||
                    !queue.alive(head))
                    return;
            }
            slices.next(interruption_.ends_sleep() && !queue.is_near(place.entry()));
        }
    }

    void reset_round(State& state) {
        end_round(state, segment_.row_bytes(state), Index::buckets_for(state.rows));
    }

    // The copy of so few bytes delays a signal by about 0.1 ms only.
    static constexpr uint64_t kQuickCopy = 1 << 20;
    static constexpr int kLooks = 2;

    static void check_step_can_advance(const State& state) {
        if (state.step == INT64_MAX)
            throw Error(Failure::kOutOfRange, "The global step is 2**63 - 1 and cannot move on");
    }

    // The round is handed out, and stays until `close_round`: no gradient joins it, no take is served. Nothing but
    // State changes, so each instant of death leaves the round closed or open; an open one whose process is
    // proved dead counts as closed (round_is_open), and holds all that it held.
    void open_round(OpenSegment::Session& session, RoundCopy& copy) {
        State& state = session.state;
        check_step_can_advance(state);
        const Presence& presence = segment_.presence();
        state.holder = {++state.rounds, presence.index(), presence.token(), wall_ns()};
        copy.taken.step = state.step;
        copy.taken.serial = state.holder.serial;
        session.commit();
    }

    // The take takes effect: the round is the one that was copied.
    void consume(OpenSegment::Session& session, const TakeRequest& request, RoundCopy& copy) {
        State& state = session.state;
        if (request.advance_step) check_step_can_advance(state);
        copy.taken.step = state.step;
        segment_.committed().begin(state, 0);
        if (!copy.nothing()) reset_round(state);
        state.taken += static_cast<uint64_t>(copy.taken.count);
        state.takes += 1;
        if (request.advance_step) ++state.step;
        if (request.seal) state.sealed = 1;
        session.commit();
    }

    OpenSegment& segment_;
    Interruption& interruption_;
};

}  // namespace shmacc
