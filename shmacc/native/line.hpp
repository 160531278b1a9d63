// The line of waiting takes: first come, first served, and no place for the dead.
//
// An entry stands in line while its ticket is not 0. Tickets only grow; the head is the living entry with
// the lowest one. Who takes is always the waiting process itself, under the segment's lock, when it is the
// head and its number is reached. So nothing is ever handed to somebody who may be gone: a waiter that dies,
// times out or is cancelled has consumed nothing, by construction.
//
//   join    under the lock: the fields first, then the ticket. Death in between: not joined.
//   leave   one store by the waiter itself, needs no lock (a timeout must not depend on the lock's owner).
//   cancel  one store: every ticket up to the last one given is cancelled (and a count, for takes that wait
//           for the lock and have none yet); the waiters see it when woken,
//           or when their slice ends if the canceller died before waking them.
//   wake    each waiter sleeps on a futex word of its own entry, and looks around at least every kSlice, so a
//           lost wake-up (its sender was killed) costs a slice, never a hang.
//   death   whoever finds an entry in front of its own whose process is proved dead sweeps it, under the lock.
//
// TensorFlow closes a round in the very apply that reaches the head's number: a gradient that comes later
// belongs to the next round, and is stale if it was computed for this one. Here the head must come and take
// first, so such a gradient waits for it (Core::apply). If the head lives but does not come (it is stopped),
// after kPatience the apply goes on and the gradient joins the round, which is what a take allows too: "at
// least num_required".
//
// Futexes rather than one semaphore a waiter: nothing more to create, to leak or to clean up, and the kernel
// keys them by the file's inode and offset, so any process that maps the segment can wait and wake.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>

#include "presence.hpp"

namespace shmacc {

constexpr int64_t kWaitSlice = 50 * kMillisecond;
constexpr int64_t kPatience = 1000 * kMillisecond;

// Sleeps until the word is woken, is not `seen` any more, the deadline passes, a slice ends or a signal comes.
inline void futex_wait(uint32_t& word, uint32_t seen, int64_t deadline) {
    int64_t left = kWaitSlice;
    if (deadline != kForever) left = std::clamp<int64_t>(deadline - monotonic_ns(), 0, left);
    timespec timeout{static_cast<time_t>(left / 1000000000), static_cast<long>(left % 1000000000)};
    syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0);
}
inline void futex_wake(uint32_t& word) {
    __atomic_add_fetch(&word, 1, __ATOMIC_ACQ_REL);
    syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

class Line {
  public:
    static constexpr uint32_t kNobody = UINT32_MAX;

    Line(Mapping& mapping, Header* header, Presence& presence)
        : head_(header->line), presence_(presence),
          table_(mapping, kWaitersRegion, kMaxWaiters, header->line.top) {}

    // Under the lock. The entry's index.
    uint32_t join(int64_t num_required) {
        for (uint32_t i = 0; i < kMaxWaiters; ++i) {
            Waiter& entry = table_.first_use(i);
            if (load(entry.ticket) != 0) continue;
            entry.participant = presence_.index();
            entry.participant_token = presence_.token();
            entry.num_required = num_required;
            entry.since_ns = wall_ns();
            entry.overdue = 0;
            uint64_t ticket = load(head_.next_ticket) + 1;
            store(head_.next_ticket, ticket);
            store(entry.ticket, ticket);
            return i;
        }
        throw Error(Failure::kResourceExhausted,
                    std::to_string(kMaxWaiters) + " takes wait in line already");
    }

    void leave(uint32_t i) { store(table_[i].ticket, uint64_t{0}); }

    void cancel() {
        __atomic_add_fetch(&head_.cancels, 1, __ATOMIC_ACQ_REL);
        store(head_.cancelled_through, load(head_.next_ticket));
        wake_all();
    }
    uint64_t cancels() const { return load(head_.cancels); }
    bool cancelled(uint32_t i) { return is_cancelled(load(table_[i].ticket)); }

    // The entry that is served next; kNobody if nobody waits. Does not ask who lives.
    uint32_t head() {
        uint32_t found = kNobody;
        uint64_t lowest = UINT64_MAX;
        for (uint32_t i = 0, top = table_.size(); i < top; ++i) {
            uint64_t ticket = load(table_[i].ticket);
            if (ticket == 0 || is_cancelled(ticket) || ticket >= lowest) continue;
            lowest = ticket;
            found = i;
        }
        return found;
    }
    bool alive(uint32_t i) {
        return presence_.alive(table_[i].participant, load(table_[i].participant_token));
    }
    // Under the lock: the living head; the dead in front of it are taken out.
    uint32_t living_head() {
        for (;;) {
            uint32_t i = head();
            if (i == kNobody || alive(i)) return i;
            sweep();
            leave(i);
        }
    }
    // Under the lock: frees what the dead hold, here and among the participants.
    void sweep() {
        presence_.sweep([this](uint32_t participant, uint64_t token) {
            for (uint32_t i = 0, top = table_.size(); i < top; ++i)
                if (load(table_[i].ticket) != 0 && load(table_[i].participant) == participant &&
                    load(table_[i].participant_token) == token)
                    leave(i);
        });
    }

    void wake_head() {
        uint32_t i = head();
        if (i != kNobody) wake(i);
    }
    void wake(uint32_t i) { futex_wake(table_[i].wake); }
    void wake_all() {
        for (uint32_t i = 0, top = table_.size(); i < top; ++i)
            if (load(table_[i].ticket) != 0) wake(i);
    }
    // Wakes whoever follows the step or waits for the head to take.
    void turn() { futex_wake(head_.turn); }

    uint32_t& turn_word() { return head_.turn; }
    Table<Waiter>& table() { return table_; }
    Waiter& operator[](uint32_t i) { return table_[i]; }
    uint32_t waiting() {
        uint32_t waiting = 0;
        for (uint32_t i = 0, top = table_.size(); i < top; ++i) {
            uint64_t ticket = load(table_[i].ticket);
            waiting += ticket != 0 && !is_cancelled(ticket) && alive(i);
        }
        return waiting;
    }

  private:
    bool is_cancelled(uint64_t ticket) const { return ticket <= load(head_.cancelled_through); }

    LineHead& head_;
    Presence& presence_;
    Table<Waiter> table_;
};

}  // namespace shmacc
