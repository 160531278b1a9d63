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

// A gradient, or the sum of some (a partial).
struct ApplyRequest {
    int64_t local_step;
    int64_t count;
    int64_t weight;
    Part* const* parts;
    size_t part_count;
    std::vector<int64_t> contributors;  // ascending
    bool partial;  // a contributor that is in the round already is an error; else there is nothing to add
    int64_t deadline;
};

class Operations {
  public:
    Operations(OpenSegment& segment, Interruption& interruption)
        : segment_(segment), interruption_(interruption) {}

    // False: dropped, as stale or because of a seal.
    bool apply(const ApplyRequest& request) {
        ActivityScope activity(segment_, kWaitsForLock);
        HeadGrace grace;
        for (bool everywhere = contributors_everywhere(request);;) {
            activity.now(kWaitsForLock);
            ApplySession session(segment_, contributor_of(request), everywhere, lock_deadline(request.deadline),
                                 interruption_);
            if (!session.held()) apply_deadline_exceeded();
            activity.now(kApplies);
            // Read before the queue: a take that leaves it needs no lock, and wakes once only.
            const uint32_t seen = load(segment_.wait_queue().progress_word());
            const bool open = round_is_open(session.round);
            if (is_stale(session.round, open, request.local_step)) {
                drop(session, activity, request.count);
                return false;
            }
            Activity what = kWaitsForRound;
            int64_t until = kForever;
            if (!open) {
                if (!everywhere && must_look_everywhere(session, request)) {
                    everywhere = true;
                    continue;
                }
                if (has_contributor(session, request, everywhere)) return true;
                const int64_t pending = session.pending();
                const uint32_t head = segment_.living_head(session.lane_number());
                const bool heads = head != WaitQueue::kNobody && !QueueEntry::of_this_thread(segment_, head);
                if (is_full(pending, request.count)) {
                    what = kWaitsForRoom;
                    if (heads) segment_.wait_queue().wake(head);
                } else if (heads && grace.must_wait(segment_.wait_queue()[head], pending)) {
                    what = kWaitsForHead;
                    until = grace.until();
                } else {
                    put_in(session, activity, request, everywhere);
                    wake_head_if_reached(session, head, pending + request.count);
                    return true;
                }
            }
            session.release();
            if (past(request.deadline)) apply_deadline_exceeded();
            wait_for_progress(activity, what, seen, std::min(until, request.deadline));
        }
    }

    // For a gradient that does not fit the round: true if it is dropped anyway.
    bool drop_if_stale(int64_t local_step, int64_t gradients) {
        ActivityScope activity(segment_, kWaitsForLock);
        ApplySession session(segment_, std::nullopt, false, kForever, interruption_);
        if (!is_stale(session.round, round_is_open(session.round), local_step)) return false;
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
                RoundSession session(segment_, lock_deadline(request.deadline), interruption);
                if (!session.held()) deadline_exceeded(request, dropped_before);
                if (!dropped_before) dropped_before = session.dropped();
                activity.now(kTakes);
                if (place.joined()) seen = load(place.wake_word());  // before anything is checked
                place.check_cancelled();
                WaitQueue& queue = segment_.wait_queue();
                const uint32_t head = segment_.living_head(0);
                const bool open = round_is_open(session.state);
                const int64_t count = session.count();
                const bool first = !open &&
                                   (head == WaitQueue::kNobody || QueueEntry::of_this_thread(segment_, head));
                const bool heads = !open && !first && count >= queue[head].num_required;
                if (request.num_required == 0 || (first && count >= request.num_required)) {
                    if (!copy || !copy->is_of(session, open || heads)) {
                        copy.reset();  // two at a time might not fit
                        copy.emplace(session, *segment_.specs(), request, open || heads);
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
                    if (request.on_death == OnDeath::kRaise) raise_deaths(session);
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
        RoundSession session(segment_, deadline, interruption_);
        if (!session.held() || session.state.holder.serial != serial) return false;
        if (consume) {
            activity.now(kTakes);
            activity.entry().taken += static_cast<uint64_t>(session.count());
            this->consume(session, true, false);
        } else {
            session.state.holder = {};
        }
        commit(session);
        return true;
    }

    // The old step.
    int64_t set_step(int64_t step) {
        ActivityScope activity(segment_, kWaitsForLock);
        RoundSession session(segment_, kForever, interruption_);
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
        const int64_t dropped = session.count();
        session.next_round();
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
        session.state.sealed = 0;
        commit(session);
    }

    // What a take would give now, of all that is there; consumes nothing and waits for nobody but the lock.
    RoundCopy look(bool partial) {
        ActivityScope activity(segment_, kWaitsForLock);
        RoundSession session(segment_, kForever, interruption_);
        return RoundCopy(session, *segment_.specs(),
                         {0, kForever, partial, false, false, false, OnDeath::kWait}, false);
    }

    int64_t wait_step(int64_t after, int64_t deadline) {
        ActivityScope activity(segment_, kWaitsForStep);
        std::optional<uint64_t> dropped_before;
        for (Slices slices;; slices.next(interruption_.ends_sleep())) {
            uint32_t seen = load(segment_.wait_queue().progress_word());
            const int64_t step = segment_.round().snapshot().step;
            if (step > after) return step;
            if (!dropped_before) dropped_before = totals(segment_).dropped;
            if (past(deadline)) {
                const Totals now = totals(segment_);
                deadline_exceeded("The global step is still " + std::to_string(now.round.step) + ", not past " +
                                      std::to_string(after) + "; " + std::to_string(now.count) +
                                      " gradients had arrived",
                                  now, dropped_before);
            }
            futex_wait(segment_.wait_queue().progress_word(), seen, deadline, slices.now());
            segment_.check_file();
            interruption_.check();
        }
    }

  private:
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
    [[noreturn]] void deadline_exceeded(const TakeRequest& request, std::optional<uint64_t> dropped_before) {
        const Totals now = totals(segment_);
        deadline_exceeded(std::to_string(now.count) + " of the " + std::to_string(request.num_required) +
                              " required gradients had arrived; the global step is " +
                              std::to_string(now.round.step),
                          now, dropped_before, {{"required", request.num_required}});
    }
    [[noreturn]] void apply_deadline_exceeded() {
        const Totals now = totals(segment_);
        throw Error(Failure::kDeadlineExceeded,
                    "The gradient was not added: it waited for the lock, for room or for the end of a round; " +
                        std::to_string(now.count) + " gradients are pending at step " +
                        std::to_string(now.round.step),
                    {{"accumulated", now.count}, {"step", now.round.step}});
    }

    // Whether a living process has the round open. A process that is proved dead has given it up: the step is open
    // again as it was, and the record of it stays until the next commit of the round.
    bool round_is_open(const RoundState& round) {
        return round.holder.serial != 0 &&
               segment_.presence().alive(static_cast<uint32_t>(round.holder.participant), round.holder.token);
    }
    // open: whether a round is open; its step counts as closed.
    static bool is_stale(const RoundState& round, bool open, int64_t local_step) {
        return local_step < round.step || round.sealed || (open && local_step == round.step);
    }

    // Without the lock, until the step moves on, a take or a round ends, or the deadline.
    void wait_for_progress(ActivityScope& activity, Activity what, uint32_t seen, int64_t deadline) {
        activity.now(what);
        futex_wait(segment_.wait_queue().progress_word(), seen, deadline);
        segment_.check_file();
        interruption_.check();
    }

    void drop(ApplySession& session, ActivityScope& activity, int64_t gradients) {
        session.state.dropped += static_cast<uint64_t>(gradients);
        session.commit();
        activity.entry().dropped += static_cast<uint64_t>(gradients);
    }

    // A contributor is looked for, and put, in its own lane; those of a partial in all lanes, and then this round's
    // everywhere (RoundState::spread).
    bool contributors_everywhere(const ApplyRequest& request) const {
        return request.partial && !request.contributors.empty() && segment_.lanes().size() > 1;
    }
    static std::optional<int64_t> contributor_of(const ApplyRequest& request) {
        if (request.partial || request.contributors.empty()) return std::nullopt;
        return request.contributors.front();
    }
    static bool must_look_everywhere(const ApplySession& session, const ApplyRequest& request) {
        return !request.contributors.empty() && session.round.spread == session.round.round;
    }
    bool has_contributor(ApplySession& session, const ApplyRequest& request, bool everywhere) {
        if (request.contributors.empty()) return false;
        const auto set = static_cast<uint32_t>(segment_.specs()->size()) - 1;
        const auto count = static_cast<uint32_t>(request.contributors.size());
        for (uint32_t i = 0; i < segment_.lanes().size(); ++i) {
            if (!everywhere && i != session.lane_number()) continue;
            LaneState state = i == session.lane_number() ? session.state : segment_.lanes()[i]->recovered();
            Member member(*segment_.lanes()[i], set, state);
            if (member.state.round != session.round.round) continue;
            if (!Rows<float>(member).has_any(request.contributors.data(), count)) continue;
            if (!request.partial) return true;
            throw Error(Failure::kAlreadyExists,
                        "A contributor of the partial is in the round already; nothing was added");
        }
        return false;
    }

    bool is_full(int64_t pending, int64_t count) const {
        const int64_t capacity = segment_.config().capacity;
        return capacity != kUnbounded && pending > 0 && (count > capacity || pending > capacity - count);
    }

    // All of the gradient, or, if this throws, nothing.
    void put_in(ApplySession& session, ActivityScope& activity, const ApplyRequest& request, bool everywhere) {
        LaneState& state = session.state;
        session.begin_round();
        if (__builtin_add_overflow(state.count, request.count, &state.count) ||
            __builtin_add_overflow(state.weight, request.weight, &state.weight) ||
            __builtin_add_overflow(state.applied, static_cast<uint64_t>(request.count), &state.applied))
            throw Error(Failure::kOutOfRange, "The number of gradients would exceed 64 bits");
        try {
            add_parts(session, request);
            if (everywhere && session.round.spread != session.round.round) {
                session.round.spread = session.round.round;
                segment_.round().commit(session.round);
            }
        } catch (...) {
            session.roll_back();
            throw;
        }
        session.commit();
        Participant& entry = activity.entry();
        entry.applied += static_cast<uint64_t>(request.count);
        entry.applied_ns = wall_ns();
        entry.applied_step = session.round.step;
        entry.contributor = contributor_of(request).value_or(-1);
    }
    void add_parts(ApplySession& session, const ApplyRequest& request) {
        const size_t count = request.part_count + !request.contributors.empty();
        session.expect(count);
        Part::Need need;
        of_each(request, [&](Part& part) { prepare(session, part, need); });
        std::optional<SparsePart<float>> contributors;
        if (!request.contributors.empty()) {
            contributors.emplace(static_cast<uint32_t>(segment_.specs()->size()) - 1, Dims{0}, request.count,
                                 request.weight, request.contributors.data(), nullptr, nullptr,
                                 static_cast<uint32_t>(request.contributors.size()), 0, true);
            contributors->sort();
            prepare(session, *contributors, need);
        }
        if (need.undo_rows > 0)
            session.lane().reserve_undo(session.state, need.undo_rows * kUndoLogBytes, need.undo_bytes);
        session.lane().begin(session.state, need.new_rows);
        Undo undo(session.lane(), session.state, need.undo_bytes);
        auto member = session.members().begin();
        of_each(request, [&](Part& part) { part.add(*member++, undo); });
        if (contributors) contributors->add(*member, undo);
    }
    static void prepare(ApplySession& session, Part& part, Part::Need& need) {
        Member& member = session.member(part.member());
        check_shape(member, part.dims());
        if (member.state.count == 0) start_round(member, part.dims());
        member.state.count += part.count();  // at most the lane's, as is the weight
        member.state.weight += part.weight();
        const Part::Need more = part.prepare(member);
        need.new_rows += more.new_rows;
        need.undo_rows += more.undo_rows;
        need.undo_bytes += more.undo_bytes + kUndoAlign;
        session.state.applied_bytes += part.bytes();
    }
    // An error of a group's member names it.
    template <class Act>
    void of_each(const ApplyRequest& request, Act act) {
        for (size_t i = 0; i < request.part_count; ++i) {
            try {
                act(*request.parts[i]);
            } catch (const Error& error) {
                const std::string& name = (*segment_.specs())[request.parts[i]->member()].name;
                if (name.empty()) throw;
                throw error.of_member(name);
            }
        }
    }
    // The session's commit is done. Of two lanes that commit at a time, one at least sees the other's count.
    void wake_head_if_reached(ApplySession& session, uint32_t head, int64_t count) {
        if (head != WaitQueue::kNobody && segment_.lanes().size() > 1) {
            full_barrier();
            count = totals(segment_).count;
        }
        WaitQueue& queue = segment_.wait_queue();
        const bool reached = head != WaitQueue::kNobody && count >= queue[head].num_required;
        session.release();
        if (reached) queue.wake(head);
    }

    bool may_raise(const RoundState& round) {
        const auto applied = [](const Participant& entry) { return load_relaxed(entry.applied) > 0; };
        return segment_.events().has_deaths(round) || segment_.presence().any_dead(applied);
    }
    // A process that had applied was found dead since the last take: the wait of a take ends with that, once.
    void raise_deaths(RoundSession& session) {
        segment_.wait_queue().sweep();
        const std::vector<Event> deaths = segment_.events().take_deaths(session.state);
        if (deaths.empty()) return;
        std::vector<int64_t> pids, contributors;
        std::string who;
        for (const Event& death : deaths) {
            pids.push_back(death.pid);
            if (death.contributor >= 0) contributors.push_back(death.contributor);
            who += (who.empty() ? "pid " : ", pid ") + std::to_string(death.pid);
        }
        throw Error(Failure::kWorkerDied,
                    "A process that had applied gradients has died: " + who + "; nothing was consumed", {},
                    {{"pids", std::move(pids)}, {"contributors", std::move(contributors)}});
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
            const Totals now = totals(segment_);
            if (now.count >= request.num_required && !round_is_open(now.round)) {
                const uint32_t head = queue.head();
                if (head == WaitQueue::kNobody || QueueEntry::of_this_thread(segment_, head) ||
                    !queue.alive(head))
                    return;
            }
            if (request.on_death == OnDeath::kRaise && may_raise(now.round)) return;
            slices.next(interruption_.ends_sleep() && !queue.is_near(place.entry()));
        }
    }

    // The copy of so few bytes delays a signal by about 0.1 ms only.
    static constexpr uint64_t kQuickCopy = 1 << 20;
    static constexpr int kLooks = 2;

    static void check_step_can_advance(const RoundState& state) {
        if (state.step == INT64_MAX)
            throw Error(Failure::kOutOfRange, "The global step is 2**63 - 1 and cannot move on");
    }

    // The round is handed out, and stays until `close_round`: no gradient joins it, no take is served. Nothing but
    // RoundState changes, so each instant of death leaves the round closed or open; an open one whose process is
    // proved dead counts as closed (round_is_open), and holds all that it held.
    void open_round(RoundSession& session, RoundCopy& copy) {
        RoundState& state = session.state;
        check_step_can_advance(state);
        const Presence& presence = segment_.presence();
        state.holder = {++state.opened, presence.index(), presence.token(), wall_ns()};
        copy.taken.serial = state.holder.serial;
        session.commit();
    }

    // The take takes effect: the round is the one that was copied.
    void consume(RoundSession& session, const TakeRequest& request, const RoundCopy& copy) {
        if (request.advance_step) check_step_can_advance(session.state);
        if (copy.nothing()) {  // it is another take's
            session.state.takes += 1;
            if (request.seal) session.state.sealed = 1;
        } else {
            consume(session, request.advance_step, request.seal);
        }
        session.commit();
    }
    static void consume(RoundSession& session, bool advance_step, bool seal) {
        RoundState& state = session.state;
        state.taken += static_cast<uint64_t>(session.count());
        state.takes += 1;
        session.next_round();
        if (advance_step) {
            ++state.step;
            state.sealed = 0;
        }
        if (seal) state.sealed = 1;
    }
    // The end of an operation that may let others go on.
    void commit(RoundSession& session) {
        session.commit();
        session.release();
        segment_.wait_queue().announce_progress();
        segment_.wait_queue().wake_head();
    }

    OpenSegment& segment_;
    Interruption& interruption_;
};

}  // namespace shmacc
