// How a thread waits in the queue. A take waits until it is the head, an apply until the head has taken; both
// check again when their slice ends.
//
// A thread that waits may run Python (a signal handler, a finaliser), which may use the accumulator that the
// thread waits for. The waiting take cannot go on before that code returns, so the code must not wait for that
// take: `QueueEntry::of_this_thread` recognises it.
//
// If such code forks, the child has a copy of the take, but the entry is the parent's: the child's take ends
// with an error, and leaves the entry alone.
#pragma once

#include "segment/open_segment.hpp"

namespace shmacc {

// A take's entry in the queue; released however the take ends.
class QueueEntry {
  public:
    explicit QueueEntry(OpenSegment& segment)
        : segment_(segment), wait_queue_(segment.wait_queue()), cancels_(wait_queue_.cancels()),
          outer_(innermost_) {
        innermost_ = this;
    }
    ~QueueEntry() {
        innermost_ = outer_;
        if (!joined() || !origin_.is_here() || !segment_.reachable()) return;
        quit();
        wait_queue_.wake_head();  // another take may be the head now
        wait_queue_.announce_progress();
    }
    QueueEntry(const QueueEntry&) = delete;
    QueueEntry& operator=(const QueueEntry&) = delete;

    bool joined() const { return index_ != WaitQueue::kNobody; }
    uint32_t index() const { return index_; }
    uint32_t& wake_word() const { return wait_queue_[index_].wake; }
    void join(int64_t num_required) {
        index_ = wait_queue_.join(num_required);
        ticket_ = load(wait_queue_[index_].ticket);
    }
    void quit() {
        if (joined()) wait_queue_.leave(index_);
        index_ = WaitQueue::kNobody;
    }
    void check_cancelled() {
        if (joined() && !origin_.is_here())
            throw Error(Failure::kCancelled,
                        "The operation was cancelled: the process was forked in the middle of it");
        if (joined() && load(wait_queue_[index_].ticket) != ticket_) {
            index_ = WaitQueue::kNobody;
            data_loss("a waiting take's entry in the queue was overwritten");
        }
        // Checks the count and the ticket: a cancel may have come between the last check and the ticket.
        if (wait_queue_.cancels() != cancels_ || (joined() && wait_queue_.cancelled(index_)))
            throw Error(Failure::kCancelled, "TakeGrad operation was cancelled");
    }

    // Whether an entry of the queue belongs to a take that this thread is in the middle of.
    static bool of_this_thread(const OpenSegment& segment, uint32_t index) {
        for (const QueueEntry* entry = innermost_; entry; entry = entry->outer_)
            if (&entry->segment_ == &segment && entry->index_ == index && entry->origin_.is_here())
                return true;
        return false;
    }

  private:
    OpenSegment& segment_;
    WaitQueue& wait_queue_;
    const uint64_t cancels_;
    uint32_t index_ = WaitQueue::kNobody;
    uint64_t ticket_ = 0;
    const Origin origin_;
    QueueEntry* const outer_;
    static inline thread_local QueueEntry* innermost_ = nullptr;
};

// How long an apply lets the head take first, if the head's gradients are there already (wait_queue.hpp).
class HeadGrace {
  public:
    // count: the number of the round's gradients.
    bool must_wait(const Waiter& head, int64_t count) {
        overdue_ = false;
        if (count < head.num_required || head.num_required <= 0 || head.overdue) return false;
        const uint64_t ticket = load(head.ticket);
        if (ticket == 0) return true;  // the head has just left, and changed `progress`: check again
        const int64_t now = monotonic_ns();
        if (ticket != ticket_) {
            ticket_ = ticket;
            until_ = now + kHeadGrace;
        }
        overdue_ = now >= until_;
        return !overdue_;
    }
    // Whether the head's grace was over at the last must_wait: the caller then marks the head (Waiter::overdue).
    bool overdue() const { return overdue_; }
    int64_t until() const { return until_; }

  private:
    static constexpr int64_t kHeadGrace = 1000 * kMillisecond;

    uint64_t ticket_ = 0;
    int64_t until_ = kForever;
    bool overdue_ = false;
};

// How long a sleeper sleeps before it checks again (wait_queue.hpp).
class Slices {
  public:
    int64_t now() const { return slice_; }
    // may_be_long: whether this sleeper may sleep long, since no other process depends on its checks.
    void next(bool may_be_long) { slice_ = may_be_long ? std::min(2 * slice_, kLongSlice) : kWaitSlice; }

  private:
    int64_t slice_ = kWaitSlice;
};

}  // namespace shmacc
