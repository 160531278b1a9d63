// Takes and rounds: how they wait in the queue, are handed out, and are consumed.
#pragma once

#include "accumulators/pace.hpp"
#include "accumulators/round_copy.hpp"
#include "segment/operation.hpp"
#include "segment/queue_entry.hpp"

namespace shmacc {

class Take : public Operation {
  public:
    using Operation::Operation;

    // Waits until this take is the head of the queue and num_required gradients are pending (at the deadline at_least
    // are enough). Then hands out all pending gradients.
    //
    // Copying a large round takes milliseconds, and if a signal handler raises because of a signal that came meanwhile,
    // the take must have consumed nothing. So signals are handled between copy and commit: without the lock, since
    // handlers run Python, but with the take's entry in the queue. So nobody else takes the round, and no gradient
    // joins it (the head has its number of gradients, so applies wait). The round may still change: by advance_step, by
    // an apply that runs out of patience, by a death that removes the entry, or by the handler itself. Then it is
    // copied again; after kLooks such copies the take commits without handling signals first. A process that dies
    // between copy and commit has taken nothing.
    //
    // After the commit, `taken` has the round even if this throws: by then there is no other copy of it.
    void take(const TakeRequest& request, std::optional<Taken>& taken) {
        ActivityScope activity(segment_, kWaitsForLock, kTakesIt);
        QueueEntry entry(segment_);
        InQueue interruption(*this, entry, request);
        Attempt attempt{timestamp_ns()};
        for (;;) {
            AllLanesSession session(segment_, lock_deadline(request.deadline), interruption);
            if (!session.held()) deadline_exceeded(request, attempt.dropped_before);
            if (!attempt.dropped_before) attempt.dropped_before = session.dropped();
            activity.now(kTakes);
            const uint32_t seen = entry.joined() ? load(entry.wake_word()) : 0;  // before anything is checked
            entry.check_cancelled();
            Verdict verdict = judge(session, request, entry);
            if (verdict.what == Verdict::kHandOut) {
                if (copies_anew(session, request, verdict, attempt)) verdict.what = Verdict::kHandleSignals;
            } else {
                attempt.copy.reset();
                refuse_to_wait(session, request);
            }
            switch (verdict.what) {  // no default, so that g++ warns of a missing case
                case Verdict::kHandOut:
                    hand_out(session, request, attempt, activity, taken);
                    entry.quit();
                    let_others_go_on(session);
                    return;
                case Verdict::kHandleSignals:
                    if (!entry.joined() && request.num_required > 0) entry.join(request.num_required);
                    session.release();
                    interruption.check();
                    break;
                case Verdict::kTimeOut:
                    deadline_exceeded(request, attempt.dropped_before, missed(session, entry.joined()));
                case Verdict::kJoin:  // then judges once more: nothing that happens from here on is missed
                    wake_next(verdict);
                    entry.join(request.num_required);
                    break;
                case Verdict::kWait:
                    wake_next(verdict);
                    session.release();
                    interruption.check();  // what woke this take may have been a close of its handle
                    if (give_up_offered(verdict.in_the_way)) break;
                    activity.now(kWaitsInQueue);
                    wait_to_be_served(entry, seen, request);
                    break;
            }
        }
    }

    // Consumes the round that `take` has opened. Returns false if it was given up, or a new step has ended it. updated:
    // this process knows that the round's update is complete.
    bool consume_round(uint64_t serial, bool updated) {
        ActivityScope activity(segment_, kWaitsForLock, kTakesIt);
        AllLanesSession session(segment_, kForever, interruption_);
        const RoundState round = session.state;
        if (round.holder.serial != serial || !round_is_open(round)) return false;
        if (round.final.phase == kUpdateBegun && !updated) {
            session.release();
            segment_.give_up_round(serial);
            refuse_in_update(round, "The block cannot end in order");
        }
        activity.now(kTakes);
        activity.entry().taken += static_cast<uint64_t>(session.count());
        PaceKeeper(segment_).left_block(round.holder.since_ns);
        consume(session, true, false);
        commit(session);
        return true;
    }

    // Returns what a take of all gradients would give now. Consumes nothing, and waits only for the lock.
    RoundCopy look(bool advance_step, const Division* division, int64_t deadline) {
        ActivityScope activity(segment_, kWaitsForLock, advance_step ? kLooksOn : kSaves);
        AllLanesSession session(segment_, lock_deadline(deadline), interruption_);
        check_held(session, "nothing was read");
        return RoundCopy(session, *segment_.specs(),
                         {0, 0, kForever, division, advance_step, false, false, false, {}}, false);
    }

    // Throws, as a waiting take with raise_departures would, if workers are gone.
    void check_departures() {
        if (!segment_.departures().any()) return;
        ActivityScope activity(segment_, kWaitsForLock, kTakesIt);
        AllLanesSession session(segment_, kForever, interruption_);
        raise_departures(session);
    }

  private:
    using Operation::commit;
    using Operation::deadline_exceeded;

    // Ends a wait, in the queue or for the lock (a stopped process may hold it), when the take is cancelled or the
    // accumulator is finished.
    class InQueue : public Interruption {
      public:
        InQueue(Take& take, QueueEntry& entry, const TakeRequest& request)
            : take_(take), entry_(entry), ends_(request.advance_step) {}
        void check() override {
            take_.interruption_.check();
            entry_.check_cancelled();
            if (ends_) take_.refuse_if_finished(take_.segment_.round().snapshot());
        }
        bool ends_sleep() const override { return take_.interruption_.ends_sleep(); }

      private:
        Take& take_;
        QueueEntry& entry_;
        const bool ends_;
    };

    // The findings of earlier attempts of the same take.
    struct Attempt {
        int64_t called;  // when the take was called
        int looks = 0;  // copies after which signals were handled
        std::optional<RoundCopy> copy = {};
        std::optional<uint64_t> dropped_before = {};  // how many gradients had been dropped when this take began
    };
    // The next action of a take.
    struct Verdict {
        enum What { kHandOut, kHandleSignals, kTimeOut, kJoin, kWait } what;
        bool nothing = false;  // kHandOut: the round belongs to another take; this take gets an empty one
        uint32_t next = WaitQueue::kNobody;  // not kHandOut: another take that can be served
        RoundHolder in_the_way = {};  // not kHandOut: the holder of the open round, if there is one
    };

    // Decides what the take does next. Changes nothing, but removes dead takes at the head of the queue.
    Verdict judge(AllLanesSession& session, const TakeRequest& request, const QueueEntry& entry) {
        if (request.advance_step) refuse_if_finished(session.state);
        const uint32_t head = segment_.living_head(0);
        const bool open = round_is_open(session.state);
        const int64_t count = session.count();
        const bool first = !open && (head == WaitQueue::kNobody || QueueEntry::of_this_thread(segment_, head));
        // A final round is handed to the first take in the queue, however many gradients this take requires.
        const bool final = is_final(session.state);
        const bool heads = !open && !first && (final || count >= segment_.wait_queue()[head].num_required);
        if (final && !open) check_may_take(session.state, request, first);
        const bool late = past(request.deadline);
        const int64_t enough = late ? request.at_least : request.num_required;
        if (request.num_required == 0 || (first && (final || count >= enough)))
            return {Verdict::kHandOut, open || heads};
        const auto what = late ? Verdict::kTimeOut : entry.joined() ? Verdict::kWait : Verdict::kJoin;
        return {what, false, heads ? head : WaitQueue::kNobody, open ? session.state.holder : RoundHolder{}};
    }

    // Copies the round, unless the last attempt's copy is current. Returns whether to handle signals before the commit.
    bool copies_anew(AllLanesSession& session, const TakeRequest& request, const Verdict& verdict,
                     Attempt& attempt) {
        if (attempt.copy && attempt.copy->is_of(session, verdict.nothing)) return false;
        attempt.copy.reset();  // two at a time might not fit
        attempt.copy.emplace(session, *segment_.specs(), request, verdict.nothing);
        return attempt.copy->bytes() > kQuickCopy && attempt.looks++ < kLooks;
    }

    // Consumes or opens the round, by a commit, and hands out its copy.
    void hand_out(AllLanesSession& session, const TakeRequest& request, Attempt& attempt,
                  ActivityScope& activity, std::optional<Taken>& taken) {
        PaceKeeper(segment_).got(session.state, request.num_required, session.count(), attempt.called);
        if (request.hold)
            open_round(session, request, *attempt.copy);
        else
            consume(session, request, *attempt.copy);
        taken = std::move(attempt.copy->taken);
        if (request.seal) segment_.events().add(kSealed, activity.entry(), taken->step);
        if (!request.hold) activity.entry().taken += static_cast<uint64_t>(taken->count);
    }

    void refuse_to_wait(AllLanesSession& session, const TakeRequest& request) {
        refuse_if_finished(session.state);
        if (request.raise_departures) raise_departures(session);
    }
    // Wakes the take that can be served next: a dead take in front of it may just have been removed.
    void wake_next(const Verdict& verdict) {
        if (verdict.next != WaitQueue::kNobody) segment_.wait_queue().wake(verdict.next);
    }

    [[noreturn]] void deadline_exceeded(const TakeRequest& request, std::optional<uint64_t> dropped_before,
                                        const std::string& missed = "") {
        const Totals now = totals(segment_);
        deadline_exceeded(std::to_string(now.count) + " of the " + std::to_string(request.num_required) +
                              " required gradients had arrived" + obstacle(request, now) + missed +
                              "; the global step is " + std::to_string(now.round.step),
                          now, dropped_before, {{"required", request.num_required}});
    }
    // Returns what the take waited for besides gradients. For a message only, since it is read without the lock.
    std::string obstacle(const TakeRequest& request, const Totals& now) {
        if (round_is_open(now.round)) {
            const auto at = static_cast<uint32_t>(now.round.holder.participant);
            const uint32_t pid = load_relaxed(segment_.presence().table()[at].pid);
            return ", but pid " + std::to_string(pid) + " has a round open";
        }
        if (now.count < request.num_required) return "";
        return ", but other takes were before it in the queue, or the lock was held all the time";
    }
    // For a message: the processes that have died or failed during this step or the one before, and whose gradients
    // the round may therefore lack. This does not mark a departure as told (departures.hpp). It asks the kernel about
    // deaths only if the take has waited in the queue.
    std::string missed(AllLanesSession& session, bool has_waited) {
        if (has_waited) segment_.wait_queue().sweep();
        std::vector<Events::Gone> lost = segment_.events().gone_since(session.state.step - 1);
        if (lost.empty()) return "";
        const auto more = static_cast<std::ptrdiff_t>(lost.size() - std::min(lost.size(), kNamed));
        lost.erase(lost.begin(), lost.begin() + more);
        return "; gone: " + in_words(lost) + (more ? "; and " + std::to_string(more) + " earlier" : "");
    }
    // Throws if workers have died or failed. Each departure ends the wait of one take (departures.hpp).
    void raise_departures(AllLanesSession& session) {
        segment_.wait_queue().sweep();
        const std::vector<Departure> news = segment_.departures().news();
        if (news.empty()) return;
        Error error = departed(Failure::kWorkerDied, "A process that applies gradients is gone", news,
                               {{"contributors", contributors_of(session, news)}});
        segment_.departures().tell(news);
        throw error;
    }
    // The contributors in the round whose processes have departed.
    std::vector<int64_t> contributors_of(AllLanesSession& session, const std::vector<Departure>& departures) {
        std::vector<int64_t> appliers, contributors;
        for (const Departure& process : departures) appliers.push_back(applier_of(process.token));
        for (Member& set : session.in_lanes(static_cast<uint32_t>(segment_.specs()->size()) - 1)) {
            const RowPlace* const places = set.array<RowPlace>(kPlaces, set.state.rows);
            for (uint64_t i = 0; i < set.state.rows; ++i)
                if (std::find(appliers.begin(), appliers.end(), places[i].applier) != appliers.end())
                    contributors.push_back(places[i].row);
        }
        std::sort(contributors.begin(), contributors.end());
        return contributors;
    }

    void wait_to_be_served(QueueEntry& entry, uint32_t seen, const TakeRequest& request) {
        WaitQueue& queue = segment_.wait_queue();
        uint32_t& word = entry.wake_word();
        for (Slices slices;;) {
            futex_wait(word, seen, request.deadline, slices.now());
            segment_.check_file();
            if (load(word) != seen) return;  // woken
            interruption_.check();
            entry.check_cancelled();
            if (past(request.deadline)) return;
            // Not woken. Still, this take may be the head, or behind a dead take. This matters only if enough gradients
            // are pending; if not, the apply that adds the last of them removes dead takes and wakes the head.
            const Totals now = totals(segment_);
            if ((now.count >= request.num_required || is_final(now.round)) && !round_is_open(now.round)) {
                const uint32_t head = queue.head();
                if (head == WaitQueue::kNobody || QueueEntry::of_this_thread(segment_, head) ||
                    !queue.alive(head))
                    return;
            }
            if (request.raise_departures && segment_.departures().any()) return;
            slices.next(interruption_.ends_sleep() && !queue.is_near(entry.index()));
        }
    }

    // Copying up to this many bytes delays a signal by about 0.1 ms only.
    static constexpr uint64_t kQuickCopy = 1 << 20;
    static constexpr int kLooks = 2;
    static constexpr std::size_t kNamed = 3;  // processes that a message names

    // A final round that nobody holds gives no partials. A take without `hold` gets it only if its update is complete.
    static void check_may_take(const RoundState& round, const TakeRequest& request, bool first) {
        if (!request.advance_step) refuse_in_update(round, "No partial can be taken");
        if (first && !request.hold && round.final.phase == kUpdateBegun)
            refuse_in_update(round, "It cannot be taken");
    }
    static void check_step_can_advance(const RoundState& state) {
        if (state.step == INT64_MAX)
            throw Error(Failure::kOutOfRange, "The global step is 2**63 - 1 and cannot move on");
    }

    // Hands out the round and keeps it until `consume_round`; until then no gradient joins it, and no other take is
    // served. Only RoundState changes, in one commit, so after a death at any instant the round is either open or not.
    // An open round whose process is proved dead does not count as open (round_is_open), and has all its gradients.
    void open_round(AllLanesSession& session, const TakeRequest& request, RoundCopy& copy) {
        RoundState& state = session.state;
        SHMACC_ASSERT(copy.is_of(session, copy.nothing()));
        check_step_can_advance(state);
        const Presence& presence = segment_.presence();
        state.holder = {++state.opened, presence.index(), presence.token(), timestamp_ns()};
        copy.taken.serial = state.holder.serial;
        copy.taken.half_updated = state.final.phase == kUpdateBegun ? state.final.parameters : 0;
        segment_.own_round().opened(state.holder, request.loop_thread);
        note_taking();
        session.commit();
    }

    // Call it before the commit: a process that dies between the two counts as a chief, too.
    void note_taking() {
        SHMACC_ASSERT(segment_.presence().claimed() && segment_.has_all_locks());
        store(segment_.presence().own().took_ns, timestamp_ns());
    }

    // Consumes the round and commits. The round must be the one that was copied.
    void consume(AllLanesSession& session, const TakeRequest& request, const RoundCopy& copy) {
        SHMACC_ASSERT(copy.is_of(session, copy.nothing()));
        if (request.advance_step) check_step_can_advance(session.state);
        if (copy.nothing()) {  // the round is another take's
            session.state.takes += 1;
            if (request.seal) session.state.sealed = 1;
        } else {
            consume(session, request.advance_step, request.seal);
        }
        session.commit();
    }
    void consume(AllLanesSession& session, bool advance_step, bool seal) {
        SHMACC_ASSERT(session.count() >= 0);
        note_taking();
        RoundState& state = session.state;
        state.dropped = session.dropped();
        state.taken += static_cast<uint64_t>(session.count());
        state.takes += 1;
        session.next_round();
        if (advance_step) {
            ++state.step;
            state.sealed = 0;
        }
        if (seal) state.sealed = 1;
    }
};

}  // namespace shmacc
