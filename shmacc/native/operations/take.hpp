// Takes and rounds: waiting in the queue, handing out, consuming.
#pragma once

#include "operations/operation.hpp"
#include "operations/round_copy.hpp"
#include "protocol/queue_entry.hpp"

namespace shmacc {

class Take : public Operation {
  public:
    using Operation::Operation;

    // Waits until it is the head and num_required gradients are there; hands out all that are.
    //
    // The copy of a large round takes milliseconds, and a signal that comes meanwhile must still find a take
    // that has consumed nothing. So signals are looked at between copy and commit: without the lock, since
    // handlers are Python's, but with its entry in the queue, so that nobody else takes the round and no gradient
    // joins it meanwhile (the head's number is reached: applies wait). It may change all the same: by
    // advance_step, an apply out of patience, a death that costs the entry, the handler itself. Then the copy is
    // made again; after kLooks looks, without another one. A process that dies between copy and commit took nothing.
    //
    // What it took is in `taken` when it throws, too, for nobody else has it from the commit on.
    void take(const TakeRequest& request, std::optional<Taken>& taken) {
        ActivityScope activity(segment_, kWaitsForLock);
        QueueEntry entry(segment_);
        Cancellable interruption(interruption_, entry);
        std::optional<RoundCopy> copy;
        std::optional<uint64_t> dropped_before;  // by the first look at the state
        for (int looks = 0;;) {
            uint32_t seen = 0;
            bool look = false;
            RoundHolder in_the_way{};
            {
                RoundSession session(segment_, lock_deadline(request.deadline), interruption);
                if (!session.held()) deadline_exceeded(request, dropped_before);
                if (!dropped_before) dropped_before = session.dropped();
                activity.now(kTakes);
                if (entry.joined()) seen = load(entry.wake_word());  // before anything is checked
                entry.check_cancelled();
                WaitQueue& queue = segment_.wait_queue();
                const uint32_t head = segment_.living_head(0);
                const bool open = round_is_open(session.state);
                const int64_t count = session.count();
                const bool first = !open &&
                                   (head == WaitQueue::kNobody || QueueEntry::of_this_thread(segment_, head));
                // A final round is handed to the first in the queue, whatever number it asks for.
                const bool final = is_final(session.state);
                const bool heads = !open && !first && (final || count >= queue[head].num_required);
                if (final && !open) check_may_take(session.state, request, first);
                if (request.num_required == 0 || (first && (final || count >= request.num_required))) {
                    if (!copy || !copy->is_of(session, open || heads)) {
                        copy.reset();  // two at a time might not fit
                        copy.emplace(session, *segment_.specs(), request, open || heads);
                        look = copy->bytes() > kQuickCopy && looks++ < kLooks;
                    }
                    if (!look) {
                        if (request.hold)
                            open_round(session, request, *copy);
                        else
                            consume(session, request, *copy);
                        taken = std::move(copy->taken);
                        if (request.seal) segment_.events().add(kSealed, activity.entry(), taken->step);
                        if (!request.hold) activity.entry().taken += static_cast<uint64_t>(taken->count);
                        entry.leave();
                        let_others_go_on(session);
                        return;
                    }
                    if (!entry.joined() && request.num_required > 0) entry.join(request.num_required);
                } else {
                    copy.reset();
                    if (open) in_the_way = session.state.holder;
                    if (request.on_death == OnDeath::kRaise) raise_deaths(session);
                    if (past(request.deadline)) deadline_exceeded(request, dropped_before);
                    // A dead take in front of it may just have been removed.
                    if (heads) queue.wake(head);
                    if (!entry.joined()) {
                        entry.join(request.num_required);
                        continue;  // once more, now in the queue: nothing that happens from here on is missed
                    }
                }
            }
            interruption.check();  // before the commit; or woken, but not served: possibly by a close
            if (look || give_up_offered(in_the_way)) continue;
            activity.now(kWaitsInQueue);
            wait_to_be_served(entry, seen, request);
        }
    }

    // Ends a round that `take` has opened. consume: it takes effect; else the step is open again as it was. False:
    // the round was ended already, by a new step or by the death of the process that opened it.
    bool close_round(uint64_t serial, bool consume, int64_t deadline = kForever) {
        ActivityScope activity(segment_, kWaitsForLock);
        RoundSession session(segment_, deadline, interruption_);
        if (!session.held() || session.state.holder.serial != serial) return false;
        if (consume) {
            if (session.state.final.phase == kUpdateBegun) {
                const RoundState round = session.state;
                open_again(session);
                refuse_in_update(round, "The block cannot end in order");
            }
            activity.now(kTakes);
            activity.entry().taken += static_cast<uint64_t>(session.count());
            this->consume(session, true, false);
            commit(session);
        } else {
            open_again(session);
        }
        return true;
    }

    // What a take would give now, of all that is there; consumes nothing and waits for nobody but the lock.
    RoundCopy look(bool partial, uint32_t shards) {
        ActivityScope activity(segment_, kWaitsForLock);
        RoundSession session(segment_, kForever, interruption_);
        return RoundCopy(session, *segment_.specs(),
                         {0, kForever, partial, shards, false, false, false, OnDeath::kWait, {}}, false);
    }

    // Throws as a take with OnDeath::kRaise that has to wait would throw now: each death is thrown once.
    void check_deaths() {
        if (!may_raise(totals(segment_).round)) return;
        ActivityScope activity(segment_, kWaitsForLock);
        RoundSession session(segment_, kForever, interruption_);
        raise_deaths(session);
    }

  private:
    using Operation::commit;
    using Operation::deadline_exceeded;

    [[noreturn]] void deadline_exceeded(const TakeRequest& request, std::optional<uint64_t> dropped_before) {
        const Totals now = totals(segment_);
        deadline_exceeded(std::to_string(now.count) + " of the " + std::to_string(request.num_required) +
                              " required gradients had arrived" + obstacle(request, now) +
                              "; the global step is " + std::to_string(now.round.step),
                          now, dropped_before, {{"required", request.num_required}});
    }
    // What the wait was for, if not for gradients. Read without the lock: of use to a person only.
    std::string obstacle(const TakeRequest& request, const Totals& now) {
        if (round_is_open(now.round)) {
            const auto at = static_cast<uint32_t>(now.round.holder.participant);
            const uint32_t pid = load_relaxed(segment_.presence().table()[at].pid);
            return ", but pid " + std::to_string(pid) + " has a round open";
        }
        if (now.count < request.num_required) return "";
        return ", but other takes were before it in the queue, or the lock was held all the time";
    }
    bool may_raise(const RoundState& round) {
        const auto applied = [](const Participant& entry) { return load_relaxed(entry.applied_ns) != 0; };
        return segment_.events().has_deaths(round) || segment_.presence().any_dead(applied);
    }
    // A process that had applied was found dead since the last take: the wait of a take ends with that, once.
    void raise_deaths(RoundSession& session) {
        segment_.wait_queue().sweep();
        const std::vector<Event> deaths = segment_.events().take_deaths(session.state);
        if (deaths.empty()) return;
        std::vector<int64_t> pids, contributors;
        std::string dead;
        for (size_t i = 0; i < deaths.size(); ++i) {
            const Event& death = deaths[i];
            // Two sweeps, in two lanes, may both have recorded it.
            if (std::any_of(deaths.begin(), deaths.begin() + static_cast<ptrdiff_t>(i),
                            [&](const Event& other) { return other.token == death.token; }))
                continue;
            pids.push_back(death.pid);
            if (death.contributor >= 0) contributors.push_back(death.contributor);
            dead += (dead.empty() ? "pid " : ", pid ") + std::to_string(death.pid);
        }
        throw Error(Failure::kWorkerDied,
                    "A process that had applied gradients has died: " + dead + "; nothing was consumed", {},
                    {{"pids", std::move(pids)}, {"contributors", std::move(contributors)}});
    }

    void wait_to_be_served(QueueEntry& entry, uint32_t seen, const TakeRequest& request) {
        WaitQueue& queue = segment_.wait_queue();
        uint32_t& word = entry.wake_word();
        for (Slices slices;;) {
            futex_wait(word, seen, request.deadline, slices.now());
            segment_.check_file();
            if (load(word) != seen) return;  // woken: no time to lose
            interruption_.check();
            entry.check_cancelled();
            if (past(request.deadline)) return;
            // Not woken: is this the head all the same, or is there a dead take in front of it? That is not
            // worth asking as long as this take could not be served: the apply that changes that removes the
            // dead, and wakes the head.
            const Totals now = totals(segment_);
            if ((now.count >= request.num_required || is_final(now.round)) && !round_is_open(now.round)) {
                const uint32_t head = queue.head();
                if (head == WaitQueue::kNobody || QueueEntry::of_this_thread(segment_, head) ||
                    !queue.alive(head))
                    return;
            }
            if (request.on_death == OnDeath::kRaise && may_raise(now.round)) return;
            slices.next(interruption_.ends_sleep() && !queue.is_near(entry.index()));
        }
    }

    // The copy of so few bytes delays a signal by about 0.1 ms only.
    static constexpr uint64_t kQuickCopy = 1 << 20;
    static constexpr int kLooks = 2;

    // Of a final round that nobody holds: sums are handed out no more; and it is consumed when its update is in.
    static void check_may_take(const RoundState& round, const TakeRequest& request, bool first) {
        if (!request.advance_step) refuse_in_update(round, "No partial can be taken");
        if (first && !request.hold && round.final.phase == kUpdateBegun)
            refuse_in_update(round, "It cannot be taken");
    }
    static void check_step_can_advance(const RoundState& state) {
        if (state.step == INT64_MAX)
            throw Error(Failure::kOutOfRange, "The global step is 2**63 - 1 and cannot move on");
    }

    // The round is handed out, and stays until `close_round`: no gradient joins it, no take is served. Nothing but
    // RoundState changes, so each instant of death leaves the round closed or open; an open one whose process is
    // proved dead counts as closed (round_is_open), and holds all that it held.
    void open_round(RoundSession& session, const TakeRequest& request, RoundCopy& copy) {
        RoundState& state = session.state;
        check_step_can_advance(state);
        const Presence& presence = segment_.presence();
        state.holder = {++state.opened, presence.index(), presence.token(), wall_ns()};
        copy.taken.serial = state.holder.serial;
        if (request.loop_thread != pthread_t{})
            segment_.loop_round().offer(state.holder, request.loop_thread);
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
};

}  // namespace shmacc
