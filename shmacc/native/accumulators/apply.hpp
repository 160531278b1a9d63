// Applies gradients: adds each to the members of a lane, and its contributor to the lane's set of contributors.
#pragma once

#include "accumulators/put_gradient.hpp"
#include "segment/operation.hpp"
#include "segment/queue_entry.hpp"

namespace shmacc {

class Apply : public Operation {
  public:
    using Operation::Operation;

    // Returns false if the gradient was dropped: it is stale, or its step is sealed (tensorflow#11660).
    bool apply(ApplyRequest& request) {
        ActivityScope activity(segment_, kWaitsForLock, kAppliesIt);
        Attempt attempt{contributors_everywhere(request)};
        for (;;) {
            if (!attempt.waited) activity.now(kWaitsForLock);
            LaneSession session(segment_, contributor_of(request), attempt.everywhere,
                                lock_deadline(request.deadline), interruption_);
            if (!session.held()) apply_deadline_exceeded(attempt.refused);
            if (!attempt.waited) activity.now(kApplies);
            // Load this word before the queue is read: a take that leaves later, without a lock, changes it.
            const uint32_t seen = load(segment_.wait_queue().progress_word());
            Verdict verdict = judge(session, request, attempt);
            if (verdict.overdue) {
                SHMACC_ASSERT(verdict.head != WaitQueue::kNobody);
                segment_.wait_queue()[verdict.head].overdue = 1;
            }
            if (verdict.what == Verdict::kAdd && !put_in_if_room(session, request, activity, verdict, attempt))
                verdict = verdict.after_refusal();
            switch (verdict.what) {  // no default, so that g++ warns of a missing case
                case Verdict::kDrop: drop(session, activity, request.count); return false;
                case Verdict::kThere: repeat(session, request); return true;
                case Verdict::kAdd:
                    activity.count(&Participant::applied, request.count);
                    wake_head_if_reached(session, verdict.head);
                    return true;
                case Verdict::kLookEverywhere:
                    if (attempt.everywhere) weights_overflow();
                    attempt.everywhere = true;
                    break;
                case Verdict::kGiveBack:
                    session.release();
                    attempt.given_back = give_memory_back(activity, request.deadline, attempt.refused);
                    attempt.everywhere = true;
                    break;
                case Verdict::kWait:
                    if (verdict.heads && verdict.activity == kWaitsForRoom)
                        segment_.wait_queue().wake(verdict.head);
                    session.release();
                    wait(verdict, seen, session.round.holder, request.deadline, activity, attempt);
                    break;
            }
        }
    }

    // Drops a gradient that does not fit the round, if it is stale. Returns whether it is stale.
    bool drop_if_stale(ApplyRequest& request) {
        ActivityScope activity(segment_, kWaitsForLock, kAppliesIt);
        LaneSession session(segment_, std::nullopt, false, lock_deadline(request.deadline), interruption_);
        if (!session.held()) apply_deadline_exceeded({});
        if (!is_refused(session.round, is_closed(session.round), request)) return false;
        drop(session, activity, request.count);
        return true;
    }

    // For Load: replaces all gradients by the request's, and the step by the request's step. Ends an open round; a
    // finished accumulator is usable again. Afterwards `commit_replaced` commits it, or `session.roll_back` undoes it.
    // If this throws, nothing has changed. session: has all lanes' locks.
    void replace(LaneSession& session, const ApplyRequest& request) {
        RoundState& round = session.round;
        SHMACC_ASSERT(session.held() && session.everywhere());
        round.discarded += static_cast<uint64_t>(session.pending().count);
        round.step = request.local_step;
        round.sealed = 0;
        ++round.restores;
        round.holder = {};
        round.final = {};
        round.spread = ++round.round;
        PutGradient(segment_, session, request).put();
    }
    void commit_replaced(LaneSession& session) {
        Lane::keep_no_undo(session.before, session.state);
        session.commit_with_round();
        let_others_go_on(session);
    }

  private:
    // The last attempt that failed because its memory is kept free for other programs (Header::kept_free).
    struct Refused {
        uint64_t needed = 0;  // bytes; 0: there was none
        uint64_t round = 0;
        int64_t pending = 0;
        uint32_t lane = 0;

        // Whether the next attempt would fail for the same reason. It is asked first, since an attempt looks up all
        // rows of the gradient under the lock, and a waiting process would make twenty attempts a second.
        bool still(const LaneSession& session, int64_t now_pending, const SegmentFile& file) const {
            return needed != 0 && pending != 0 && pending == now_pending && round == session.round.round &&
                   lane == session.lane_number() && !file.has_room(needed);
        }
    };

    // The findings of earlier attempts of the same apply.
    struct Attempt {
        bool everywhere;  // it needs all lanes' locks
        bool waited = false;  // not only for a lock; inspection shows this wait even while the apply checks again
        bool given_back = false;  // it gave back memory of past rounds, and has not waited since then
        HeadGrace grace = {};
        Refused refused = {};
    };
    // The next action of an apply.
    struct Verdict {
        enum What { kDrop, kThere, kLookEverywhere, kAdd, kGiveBack, kWait } what;
        Activity activity = kApplies;  // kWait: for the round's end, room, or the head's take
        bool open = false;  // whether a living process has the round open
        int64_t pending = 0;
        uint32_t head = WaitQueue::kNobody;
        bool heads = false;  // whether another thread's take is the head
        bool overdue = false;  // whether the head's grace is over

        Verdict but(What other, Activity why = kApplies) const {
            return {other, why, open, pending, head, heads, overdue};
        }
        // Returns what to do if the gradient needs memory that is kept free for other programs.
        Verdict after_refusal() const { return pending == 0 ? but(kGiveBack) : but(kWait, kWaitsForRoom); }
    };

    // Decides what the apply does next. Changes nothing, but cleans up after dead processes in the lanes and the queue.
    Verdict judge(LaneSession& session, ApplyRequest& request, Attempt& attempt) {
        const bool open = round_is_open(session.round);
        const bool closed = open || is_final(session.round);
        if (is_refused(session.round, closed, request)) return {Verdict::kDrop};
        if (closed) return {Verdict::kWait, kWaitsForRound, open};
        if (!attempt.everywhere && segment_.lanes().size() > 1 && must_look_everywhere(session, request))
            return {Verdict::kLookEverywhere};
        if (has_contributor(session, request, attempt.everywhere)) return {Verdict::kThere};
        const auto [pending, weight_fits] = session.pending(request.weight);
        const uint32_t head = segment_.living_head(session.lane_number());
        const bool heads = head != WaitQueue::kNobody && !QueueEntry::of_this_thread(segment_, head);
        Verdict verdict{Verdict::kAdd, kApplies, open, pending, head, heads};
        if (is_full(pending, request.count)) return verdict.but(Verdict::kWait, kWaitsForRoom);
        if (heads && attempt.grace.must_wait(segment_.wait_queue()[head], pending))
            return verdict.but(Verdict::kWait, kWaitsForHead);
        verdict.overdue = heads && attempt.grace.overdue();
        if (!weight_fits) return verdict.but(Verdict::kLookEverywhere);
        return attempt.refused.still(session, pending, segment_.file()) ? verdict.after_refusal() : verdict;
    }

    // The only place where an apply sleeps, without a lock: until the step moves on, a take or a round ends, or the
    // deadline passes.
    void wait(const Verdict& verdict, uint32_t seen, const RoundHolder& holder, int64_t deadline,
              ActivityScope& activity, Attempt& attempt) {
        if (past(deadline)) apply_deadline_exceeded(attempt.refused);
        if (verdict.open) refuse_in_own_block(holder);
        const bool for_round = verdict.activity == kWaitsForRound, for_head = verdict.activity == kWaitsForHead;
        if (for_round && give_up_offered(holder)) return;
        attempt.given_back = false;
        attempt.waited = true;
        activity.now(verdict.activity);
        futex_wait(segment_.wait_queue().progress_word(), seen,
                   for_head ? std::min(attempt.grace.until(), deadline) : deadline);
        segment_.check_file();
        interruption_.check();
    }

    [[noreturn]] void apply_deadline_exceeded(const Refused& refused) {
        const Totals now = totals(segment_);
        std::string room;
        if (const uint64_t kept = segment_.file().kept(); refused.needed && kept)
            room = "; " + std::to_string(refused.needed) + " more bytes of /dev/shm were needed, beside " +
                   std::to_string(kept) + " that are kept free for others";
        throw Error(
            Failure::kDeadlineExceeded,
            "The gradient was not added: it waited for the lock, for room or for the end of a round; " +
                std::to_string(now.count) + " gradients are pending at step " +
                std::to_string(now.round.step) + room,
            {{"accumulated", now.count}, {"step", now.round.step}});
    }

    [[noreturn]] static void weights_overflow() {
        throw Error(
            Failure::kOutOfRange,
            "The weights of the round's gradients would add up to more than 2**63 - 1; the gradient was "
            "not added, nothing was changed");
    }

    // closed: whether a round is open or final, so that its step takes no more gradients.
    bool is_refused(const RoundState& round, bool closed, ApplyRequest& request) const {
        request.behind = request.timeline < round.restores ? round.restores : 0;
        return request.behind || request.local_step < round.step || round.sealed ||
               (closed && request.local_step == round.step) || segment_.finished(round);
    }

    void refuse_in_own_block(const RoundHolder& holder) const {
        if (segment_.own_round().to_this_thread(holder) == OwnRound::Whose::kThreads)
            throw Error(
                Failure::kFailedPrecondition,
                "This thread has a round of this accumulator open, and the apply would wait for its end; "
                "apply at the round's own step, which is refused, or after the block");
    }

    void drop(LaneSession& session, ActivityScope& activity, int64_t gradients) {
        SHMACC_ASSERT(session.held() && gradients >= 0);
        session.state.dropped += static_cast<uint64_t>(gradients);
        session.commit();
        activity.count(&Participant::dropped, gradients);
    }

    void repeat(LaneSession& session, ApplyRequest& request) {
        ++session.state.repeated;
        note_applied(session, request);
        session.commit();
        request.repeated = true;
    }

    // Contributors are stored in the lane of their gradient. A single gradient looks in its own lane for its
    // contributor. A partial, and any gradient after a partial in the same round (RoundState::spread), looks in all
    // lanes.
    bool contributors_everywhere(const ApplyRequest& request) const {
        return request.partial && !request.contributors.empty() && segment_.lanes().size() > 1;
    }
    static std::optional<int64_t> contributor_of(const ApplyRequest& request) {
        if (request.partial || request.contributors.empty()) return std::nullopt;
        return request.contributors.front();
    }
    // Whether to compare this gradient with the other lanes. They may have its contributor; or they may have another
    // shape, if the gradient is a member's first in this lane and does not have the declared shape.
    bool must_look_everywhere(LaneSession& session, const ApplyRequest& request) const {
        if (!request.contributors.empty() && session.round.spread == session.round.round) return true;
        for (size_t i = 0; i < request.member_count; ++i) {
            const MemberGradient& gradient = *request.members[i];
            if (gradient.dims() == (*segment_.specs())[gradient.member()].round) continue;
            const MemberState& now = session.lane().current(gradient.member(), session.state);
            if (now.round != session.round.round || now.count == 0) return true;
        }
        return false;
    }
    bool has_contributor(LaneSession& session, const ApplyRequest& request, bool everywhere) {
        if (request.contributors.empty()) return false;
        const auto set = static_cast<uint32_t>(segment_.specs()->size()) - 1;
        const auto count = static_cast<uint32_t>(request.contributors.size());
        for (uint32_t i = 0; i < segment_.lanes().size(); ++i) {
            if (!everywhere && i != session.lane_number()) continue;
            LaneState state = i == session.lane_number() ? session.state : segment_.recovered(i);
            Member member(*segment_.lanes()[i], set, state);
            if (member.state.round != session.round.round) continue;
            if (!SparseSums<Add<float>>(member).has_any(request.contributors.data(), count)) continue;
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

    // Adds the gradient. Returns false if it needs memory that is kept free for other programs; then nothing has
    // changed. Regions grow only in `prepare` and Lane::reserve_undo, before Lane::begin, so no row and no index entry
    // has been written. `roll_back` gives back the regions that had grown before the refusal; no commit has recorded
    // them. (reserve_undo commits what it grows, but it is the last to grow.) A death meanwhile leaves pages that no
    // commit records, as in any apply that grows.
    //
    // If gradients are pending, the apply waits as it does at the capacity: the next round reuses their memory. If no
    // gradient is pending, lanes and members may still keep the memory of past rounds (Lane::kSmallRounds). They give
    // that back first, and a gradient that still does not fit is an error.
    bool put_in_if_room(LaneSession& session, const ApplyRequest& request, ActivityScope& activity,
                        const Verdict& verdict, Attempt& attempt) {
        activity.now(kApplies);
        try {
            PutGradient(segment_, session, request).put();
        } catch (const Error& error) {
            const bool last = attempt.given_back && verdict.pending == 0;
            if (last || !error.field("kept")) throw;
            attempt.refused = {static_cast<uint64_t>(error.field("needed").value_or(0)), session.round.round,
                               verdict.pending, session.lane_number()};
            return false;
        }
        if (request.partial && session.round.spread != session.round.round) {
            // From here on every gradient of this round looks in all lanes for its contributor, even if this process
            // dies before the partial's commit.
            session.round.spread = session.round.round;
            segment_.commit(session.round);
        }
        if (request.local_step == kNeverStale) note_unchecked(session, request);
        note_applied(session, request);
        session.commit();
        return true;
    }
    // For display only: how old a gradient without a step can be. Its process read the parameters after its last apply,
    // so the gradient is no older than that apply. A death may keep some of these stores from happening.
    void note_unchecked(LaneSession& session, const ApplyRequest& request) {
        const Participant& entry = segment_.presence().own();
        if (!has_applied(entry) || request.partial) return;
        SHMACC_ASSERT(session.lane().lock().is_mine());
        Unchecked& seen = session.lane().unchecked();
        const int64_t steps = session.round.step - entry.applied_step;
        const auto counted = static_cast<uint64_t>(std::max(steps, int64_t{0}));
        store_relaxed(seen.gradients, seen.gradients + 1);
        store_relaxed(seen.steps, seen.steps + counted);
        if (counted > seen.most_steps) store_relaxed(seen.most_steps, counted);
    }
    // Takes all locks itself. Returns false, without a change, if the round is not empty or takes no gradients.
    bool give_memory_back(ActivityScope& activity, int64_t deadline, const Refused& refused) {
        activity.now(kWaitsForLock);
        AllLanesSession session(segment_, lock_deadline(deadline), interruption_);
        if (!session.held()) apply_deadline_exceeded(refused);
        activity.now(kApplies);
        if (session.count() > 0 || is_closed(session.state)) return false;
        session.give_memory_back(true);
        return true;
    }
    // Call it before the commit: if the process dies between the two, it counts as a worker (presence.hpp).
    void note_applied(const LaneSession& session, const ApplyRequest& request) {
        SHMACC_ASSERT(segment_.presence().claimed());
        Participant& entry = segment_.presence().own();
        store_relaxed(entry.applied_ns, timestamp_ns());
        entry.applied_step = session.round.step;
        entry.contributor = contributor_of(request).value_or(-1);
    }
    // Call it after the session's commit. If two lanes commit at the same time, at least one sees the other's count.
    void wake_head_if_reached(LaneSession& session, uint32_t head) {
        if (head == WaitQueue::kNobody) return;  // no take can join while the lane's lock is held
        full_barrier();
        WaitQueue& queue = segment_.wait_queue();
        bool reached = true;  // if another lane is damaged: the woken take finds that, and this gradient is in
        try {
            reached = session.pending().count >= queue[head].num_required;
        } catch (const Error&) {
        }
        session.release();
        if (reached) queue.wake(head);
    }
};

}  // namespace shmacc
