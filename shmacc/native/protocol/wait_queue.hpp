// The queue of waiting takes: first come, first served; dead processes' entries are removed.
//
// An entry is in the queue while its ticket is not 0. Tickets only grow; the head is the living entry with
// the lowest ticket. The waiting process itself takes, under all lanes' locks, when it is the head and its
// number is reached. So nothing is ever handed to a process that may be dead: a waiter that dies, times out
// or is cancelled has consumed nothing.
//
//   join    under all lanes' locks: stores the fields, then the ticket. A process that dies before that has not joined.
//   leave   one store by the waiter itself; it needs no lock (a timeout must not depend on the lock's owner).
//   cancel  one store cancels every ticket given so far; a count tells takes that wait for the lock and have no
//           ticket yet. The waiters see the cancel when woken; or when their slice ends, if the cancelling
//           process died before it woke them.
//   wake    each waiter sleeps on a futex word of its own entry, and checks again when its slice ends, so a
//           lost wake-up (its sender was killed) costs a slice, never a hang. A wake often follows a commit, or stands
//           in a destructor, so it must not throw. If there is no memory to read the whole table, it is lost, too.
//   order   a take that joins stores its ticket, then looks for the head, a cancel and a closed handle. A take
//           that leaves, a cancel and a handle's close store their own word, then look for tickets to wake. One
//           of the two sides must see the other's store, or a waiter would sleep through a slice that should
//           have ended early. So each side has a full_barrier between store and look (every processor lets a load
//           pass an earlier store). For all else it is enough to store a word last and to load it first: a ticket
//           after the fields of its entry, a futex word after the change that it announces.
//   death   a take or an apply may find an entry in front of it whose process is proved dead. It sweeps that
//           entry, under a lane's lock.
//
// Entries from `top` on are free. `join` raises `top`, with all lanes' locks; `known_head` lowers `top`, with one
// lane's lock. So no ticket appears while `top` is lowered, and an entry with a ticket is always below `top`. A
// reader without the lock may load `top` just before it changes. If `top` is lowered, the entries above it are
// free; if it is raised, the take that joins there checks the round and the cancels afterwards, as always after
// joining (Take::take). Each change is one store; a death before it leaves `top` too high: scans are longer.
//
// A take with num_required 0 takes whatever is there: it never joins, and does not wait until the head's number is
// reached. But once that number is reached, the round belongs to the head, and such a take gets nothing.
//
// TensorFlow closes a round in the very apply that reaches the head's number: a gradient that comes later
// belongs to the next round, and is stale if it was computed for this one. Here the head must come and take
// first, so such a gradient waits for it (HeadGrace in queue_entry.hpp). If the head lives but does not come
// (it is stopped), the apply goes on after HeadGrace::kHeadGrace, and its gradient joins the round: a take asks
// for at least num_required gradients.
//
// Slices. A sleeper finds out some things only when its slice ends: that a process in front of it died, that
// the process that should have woken it died, that the file was truncated or its name removed, and that a signal came
// without ending its sleep. The first few takes in the queue check every kWaitSlice, so that a dead process delays the
// others by one such slice at most. Takes further back, and processes that wait for a step, sleep up to kLongSlice:
// otherwise hundreds of idle sleepers would keep a processor busy. The first slices are short, since a signal that
// comes just before the sleep begins is noticed only when the slice ends. Where a signal need not end the sleep
// (Interruption::ends_sleep), all slices are short.
//
// Futexes rather than one semaphore for each waiter: nothing more to create, to leak or to clean up, and the
// kernel keys them by the file's inode and offset, so any process that maps the segment can wait and wake.
#pragma once

#include <linux/futex.h>
#include <sys/syscall.h>

#include "protocol/departures.hpp"

namespace shmacc {

constexpr int64_t kWaitSlice = 50 * kMillisecond;
constexpr int64_t kLongSlice = 10 * kWaitSlice;

// Sleeps until the word is woken or differs from `seen`, the deadline passes, the slice ends, or a signal comes.
inline void futex_wait(uint32_t& word, uint32_t seen, int64_t deadline, int64_t slice = kWaitSlice) {
    int64_t left = slice;
    if (deadline != kForever) left = std::clamp<int64_t>(deadline - monotonic_ns(), 0, left);
    timespec timeout{static_cast<time_t>(left / 1000000000), static_cast<long>(left % 1000000000)};
    if (syscall(SYS_futex, &word, FUTEX_WAIT, seen, &timeout, nullptr, 0) == 0) return;
    if (errno == EAGAIN || errno == EINTR || errno == ETIMEDOUT) return;
    timeout = {0, std::min<int64_t>(left, kMillisecond)};  // it cannot sleep on the word, but must not spin
    nanosleep(&timeout, nullptr);
}
inline void futex_wake(uint32_t& word) {
    __atomic_add_fetch(&word, 1, __ATOMIC_ACQ_REL);
    syscall(SYS_futex, &word, FUTEX_WAKE, INT32_MAX, nullptr, nullptr, 0);
}

class WaitQueue {
  public:
    static constexpr uint32_t kNobody = UINT32_MAX;

    WaitQueue(Mapping& mapping, Header& header, const Committed<RoundState>& round, Presence& presence,
              Departures& departures, Events& events)
        : head_(header.wait_queue), round_(round), presence_(presence), departures_(departures),
          events_(events), table_(mapping, kWaitersRegion, kMaxWaiters, header.wait_queue.top) {}

    // Needs all lanes' locks. Returns the entry's index.
    uint32_t join(int64_t num_required) {
        SHMACC_ASSERT(presence_.claimed() && num_required > 0);
        for (uint32_t i = 0; i < kMaxWaiters; ++i) {
            Waiter& entry = table_.first_use(i);
            if (load(entry.ticket) != 0) continue;
            store_relaxed(entry.participant, presence_.index());
            store_relaxed(entry.participant_token, presence_.token());
            entry.num_required = num_required;
            entry.since_ns = timestamp_ns();
            entry.overdue = 0;
            uint64_t ticket = load(head_.next_ticket) + 1;
            store(head_.next_ticket, ticket);
            store(entry.ticket, ticket);
            full_barrier();
            return i;
        }
        throw Error(Failure::kResourceExhausted,
                    std::to_string(kMaxWaiters) + " takes wait in the queue already");
    }

    void leave(uint32_t i) { store(table_[i].ticket, uint64_t{0}); }

    void cancel() {
        __atomic_add_fetch(&head_.cancels, 1, __ATOMIC_ACQ_REL);
        store(head_.cancelled_through, load(head_.next_ticket));
        wake_all();
    }
    uint64_t cancels() const { return load(head_.cancels); }
    bool cancelled(uint32_t i) { return is_cancelled(load(table_[i].ticket)); }

    // The entry that is served next; kNobody if no take waits. Does not check whether its process lives.
    uint32_t head() { return scan(table_.size()).head; }
    // Whether entry i is so near the head that its take checks the entries in front of it.
    bool is_near(uint32_t i) {
        const uint64_t ticket = load(table_[i].ticket);
        uint32_t before = 0;
        for (uint32_t j = 0, top = table_.size(); j < top && before < kNear; ++j) {
            const uint64_t other = load(table_[j].ticket);
            before += other != 0 && other < ticket;
        }
        return before < kNear;
    }
    bool alive(uint32_t i) {
        return presence_.alive(load_relaxed(table_[i].participant), load(table_[i].participant_token));
    }
    // The result of a scan: the head and its ticket; without a head, the last ticket that was given.
    struct Known {
        uint32_t head = kNobody;
        uint64_t ticket = UINT64_MAX;
    };
    // Needs a lane's lock. Returns the living head, and removes dead entries in front of it. known: the result
    // of this process's last call in the same lane.
    uint32_t living_head(Known& known) {
        for (;;) {
            uint32_t i = known_head(known);
            if (i == kNobody || alive(i)) return i;
            sweep();
            leave(i);
        }
    }
    // Needs a lane's lock. Frees the entries of dead processes, here and in the table of participants.
    void sweep() {
        const auto judge = [this](uint32_t participant, const Participant& entry) {
            for (uint32_t i = 0, top = table_.size(); i < top; ++i)
                if (load(table_[i].ticket) != 0 && load_relaxed(table_[i].participant) == participant &&
                    load(table_[i].participant_token) == entry.token)
                    leave(i);
            return departures_.record(participant, entry);
        };
        presence_.sweep(judge, [this](const Participant& process) {
            events_.add(kDeath, process, round_.snapshot().step);
        });
    }

    void wake_head() noexcept {
        full_barrier();
        uint32_t i = scan(table_.reserved_size()).head;
        if (i != kNobody) wake(i);
    }
    void wake(uint32_t i) { futex_wake(table_[i].wake); }
    void wake_all() noexcept {
        full_barrier();
        for (uint32_t i = 0, top = table_.reserved_size(); i < top; ++i)
            if (load(table_[i].ticket) != 0) wake(i);
    }
    // Wakes the takes of this process.
    void wake_own() noexcept {
        full_barrier();
        for (uint32_t i = 0, top = table_.reserved_size(); i < top; ++i)
            if (load(table_[i].ticket) != 0 && load_relaxed(table_[i].participant) == presence_.index())
                wake(i);
    }
    // Wakes the calls that wait for the step, or for the head's take.
    void announce_progress() noexcept { futex_wake(head_.progress); }

    uint32_t& progress_word() { return head_.progress; }
    Waiter& operator[](uint32_t i) { return table_[i]; }
    // Counts the waiting takes for whose process lives(participant, token) returns true.
    template <class Lives>
    uint32_t waiting(Lives lives) {
        uint32_t waiting = 0;
        for (uint32_t i = 0, top = table_.size(); i < top; ++i) {
            const Waiter& entry = table_[i];
            uint64_t ticket = load(entry.ticket);
            waiting += ticket != 0 && !is_cancelled(ticket) &&
                       lives(load_relaxed(entry.participant), load(entry.participant_token));
        }
        return waiting;
    }
    bool anybody_waits() {
        return waiting([this](uint32_t i, uint64_t token) { return presence_.alive(i, token); }) > 0;
    }

  private:
    static constexpr uint32_t kNear = 8;

    struct Scan {
        uint32_t head;
        uint64_t ticket;  // the head's
        uint32_t top;  // one past the last entry in use
    };
    // size: how many entries are reserved.
    Scan scan(uint32_t size) {
        Scan found{kNobody, UINT64_MAX, 0};
        for (uint32_t i = 0; i < size; ++i) {
            uint64_t ticket = load(table_[i].ticket);
            if (ticket == 0) continue;
            found.top = i + 1;
            if (is_cancelled(ticket) || ticket >= found.ticket) continue;
            found.ticket = ticket;
            found.head = i;
        }
        return found;
    }
    // Needs a lane's lock. Returns what `head` does, without a scan each time: tickets only grow, and are given with
    // all lanes' locks. So the last result is valid until the head leaves or is cancelled; if no take waited, until a
    // ticket is given.
    uint32_t known_head(Known& known) {
        const uint64_t ticket = known.head == kNobody ? load(head_.next_ticket)
                                                      : load(table_[known.head].ticket);
        if (ticket == known.ticket && (known.head == kNobody || !is_cancelled(ticket))) return known.head;
        const Scan found = scan(table_.size());
        if (found.top < load(head_.top)) store(head_.top, found.top);
        known = {found.head, found.head == kNobody ? load(head_.next_ticket) : found.ticket};
        return known.head;
    }
    bool is_cancelled(uint64_t ticket) const { return ticket <= load(head_.cancelled_through); }

    QueueHead& head_;
    const Committed<RoundState>& round_;
    Presence& presence_;
    Departures& departures_;
    Events& events_;
    Entries<Waiter> table_;
};

}  // namespace shmacc
