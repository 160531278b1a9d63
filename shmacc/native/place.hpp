// How a thread waits on the line: a take for its turn, an apply for the head, anybody for the end of a slice.
//
// A thread that waits may run Python (a signal handler, a finaliser), which may use the accumulator that the
// thread waits for. The take further out cannot come before it returns, so whatever it does in there must
// not wait for that take: `Place::of_this_thread` tells.
//
// If it forks in there, the child has a copy of the take, but the place is the parent's: the child gives up,
// and leaves the place alone.
#pragma once

#include "core.hpp"

namespace shmacc {

// A take's place in line; given up however the take ends.
class Place {
  public:
    explicit Place(Core& core)
        : core_(core), line_(core.line()), cancels_(line_.cancels()), outer_(innermost_) {
        innermost_ = this;
    }
    ~Place() {
        innermost_ = outer_;
        if (!joined() || !origin_.is_here() || !core_.reachable()) return;
        leave();
        try {
            line_.wake_head();  // it may be another's turn now
            line_.turn();
        } catch (const Error&) {  // the line cannot be read: those in it look for themselves when their slices end
        }
    }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

    bool joined() const { return entry_ != Line::kNobody; }
    uint32_t entry() const { return entry_; }
    uint32_t& wake_word() const { return line_[entry_].wake; }
    void join(int64_t num_required) {
        entry_ = line_.join(num_required);
        ticket_ = load(line_[entry_].ticket);
    }
    void leave() {
        if (joined()) line_.leave(entry_);
        entry_ = Line::kNobody;
    }
    void check_cancelled() {
        if (joined() && !origin_.is_here())
            throw Error(Failure::kCancelled, "The operation was cancelled: the process was forked in the middle of it");
        if (joined() && load(line_[entry_].ticket) != ticket_) {
            entry_ = Line::kNobody;
            data_loss("a waiting take lost its place in line");
        }
        // Both: a cancel may have fallen between the last look and the ticket.
        if (line_.cancels() != cancels_ || (joined() && line_.cancelled(entry_)))
            throw Error(Failure::kCancelled, "TakeGrad operation was cancelled");
    }

    // Whether an entry of the line is that of a take which this thread is in the middle of.
    static bool of_this_thread(const Core& core, uint32_t entry) {
        for (const Place* place = innermost_; place; place = place->outer_)
            if (&place->core_ == &core && place->entry_ == entry && place->origin_.is_here()) return true;
        return false;
    }

  private:
    Core& core_;
    Line& line_;
    const uint64_t cancels_;
    uint32_t entry_ = Line::kNobody;
    uint64_t ticket_ = 0;
    const Origin origin_;
    Place* const outer_;
    static inline thread_local Place* innermost_ = nullptr;
};

// A take that waits for the lock is not deaf: a stopped process may have it.
class Cancellable : public Interruption {
  public:
    Cancellable(Interruption& inner, Place& place) : inner_(inner), place_(place) {}
    void check() override {
        inner_.check();
        place_.check_cancelled();
    }
    bool ends_sleep() const override { return inner_.ends_sleep(); }

  private:
    Interruption& inner_;
    Place& place_;
};

// An apply's patience with a head whose number is reached already (line.hpp).
class Patience {
  public:
    bool must_wait(Waiter& head, const State& state) {
        if (state.count < head.num_required || head.num_required <= 0 || head.overdue) return false;
        const uint64_t ticket = load(head.ticket);
        if (ticket == 0) return true;  // it left this moment, and turned: look again
        const int64_t now = monotonic_ns();
        if (ticket != ticket_) {
            ticket_ = ticket;
            until_ = now + kPatience;
        }
        if (now < until_) return true;
        head.overdue = 1;
        return false;
    }
    int64_t until() const { return until_; }

  private:
    static constexpr int64_t kPatience = 1000 * kMillisecond;

    uint64_t ticket_ = 0;
    int64_t until_ = kForever;
};

// How long a sleeper sleeps before it looks around (line.hpp).
class Slices {
  public:
    int64_t now() const { return slice_; }
    // may_be_long: nobody depends on what it would see.
    void next(bool may_be_long) { slice_ = may_be_long ? std::min(2 * slice_, kLongSlice) : kWaitSlice; }

  private:
    int64_t slice_ = kWaitSlice;
};

}  // namespace shmacc
