// The thread for which another thread makes a call. A coroutine's calls are made in threads of their own, for the
// thread of its event loop: that one owns the round that the call opens, and may end the wait.
//
// `leave`, then a wake-up of this process's waits (Handle::end_wait). A wait looks at `has_left` after it has
// joined the queue or loaded its futex word, and before it sleeps: so it sees the store, or is woken.
#pragma once

#include <nanobind/nanobind.h>

#include <atomic>

namespace shmacc {

class Caller {
  public:
    unsigned long thread() const { return thread_; }
    bool has_left() const { return left_; }
    void leave() { left_ = true; }

  private:
    const unsigned long thread_ = PyThread_get_thread_ident();
    std::atomic<bool> left_{false};
};

}  // namespace shmacc
