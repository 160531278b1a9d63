// Calls that one thread makes for another. A worker thread makes a coroutine's call for the event loop. Meanwhile the
// loop's thread goes on, and may end the wait.
//
// Caller: to end a wait, the loop's thread calls `leave`, then wakes this process's waits (Handle::end_wait). A
// wait looks at `has_left` after it has joined the queue or loaded its futex word, and before it sleeps: so it
// sees the store, or is woken.
//
// OwnRound: a worker thread's call opens a round, and the loop's thread takes the round over when the loop
// resumes the coroutine. Until then the round is only offered: the loop's thread does not know of it. If the
// loop's thread meanwhile makes a call that waits for the round's end, it would wait for itself. So the call
// gives the round up instead (Operation::give_up_offered), as if the gradients had not come yet, and the
// coroutine's wait begins again. Once the loop's thread has the round, such a call is an error. Other threads
// just wait. A thread that opens a round for itself has it at once; if it applies and would wait for the
// round's end, that is an error, too. (A take by another handle waits in the queue: it may have a timeout.)
#pragma once

#include <atomic>

#include "base/layout.hpp"

namespace shmacc {

// A thread's number, which no other thread of the process has or had. (pthread_self may give a new thread the number
// of an ended thread that had a round open.)
using ThreadNumber = uint64_t;
constexpr ThreadNumber kNoThread = 0;
inline ThreadNumber this_thread() {
    static std::atomic<ThreadNumber> last{kNoThread};
    thread_local const ThreadNumber own = ++last;
    return own;
}

class Caller {
  public:
    ThreadNumber thread() const { return thread_; }
    bool has_left() const { return left_; }
    void leave() { left_ = true; }

  private:
    const ThreadNumber thread_ = this_thread();
    std::atomic<bool> left_{false};
};

// The last round that this process has opened in a segment. A segment has one open round at a time: an older round
// has ended, and `hold` returns false for it. A forked child forgets its parent's round (OpenSegment::after_fork).
class OwnRound {
  public:
    enum class Whose { kOthers, kOffered, kHeld, kThreads };

    // Needs all lanes' locks. loop: the event loop's thread, to which the round is offered; kNoThread: the round is
    // this thread's.
    void opened(const RoundHolder& holder, ThreadNumber loop) {
        token_ = holder.token;
        thread_ = loop == kNoThread ? this_thread() : loop;
        offered_ = loop != kNoThread;
        serial_ = holder.serial;
    }
    // The loop's thread calls this. Returns false if the round was given up, or another round was opened since.
    bool hold(uint64_t serial) {
        if (serial_ != serial) return false;
        held_ = serial;
        return true;
    }
    // Returns whose the open round is, as seen by this thread, before it waits for the round's end.
    Whose to_this_thread(const RoundHolder& holder) const {
        if (serial_ != holder.serial || token_ != holder.token || thread_ != this_thread())
            return Whose::kOthers;
        if (!offered_) return Whose::kThreads;
        return held_ == holder.serial ? Whose::kHeld : Whose::kOffered;
    }
    void give_up() { serial_ = 0; }

  private:
    std::atomic<uint64_t> serial_{0};
    std::atomic<uint64_t> token_{0};  // this process's
    std::atomic<ThreadNumber> thread_{kNoThread};
    std::atomic<bool> offered_{false};
    std::atomic<uint64_t> held_{0};  // serial of the round taken over; another one may be offered meanwhile
};

}  // namespace shmacc
