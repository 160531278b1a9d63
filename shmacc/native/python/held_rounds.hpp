// The rounds that one handle has open: which thread owns each, and in which process. The GIL guards it.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

#include "python/python.hpp"

namespace shmacc {

class HeldRounds {
  public:
    // Before a round is opened, so that `add` does not fail after it, for this and other threads.
    class Opening {
      public:
        explicit Opening(HeldRounds& held) : held_(held) {
            held_.rounds_.reserve(held_.rounds_.size() + held_.opening_ + 1);
            ++held_.opening_;
        }
        ~Opening() { --held_.opening_; }
        Opening(const Opening&) = delete;
        Opening& operator=(const Opening&) = delete;
        // for_loop: it is no thread's; see LoopRound.
        void add(uint64_t serial, bool for_loop) {
            held_.rounds_.push_back({serial, for_loop ? 0 : PyThread_get_thread_ident(), Origin()});
        }

      private:
        HeldRounds& held_;
    };

    // The thread that would have to end the round would wait for its end.
    void refuse_in_round() const {
        for (const Round& round : rounds_)
            if (round.thread == PyThread_get_thread_ident() && round.opened.is_here())
                throw Error(Failure::kFailedPrecondition,
                            "This thread has a round of this accumulator open; it must end before another "
                            "take or round");
    }
    // A forked child does not hold its parent's rounds.
    bool has(uint64_t serial) const {
        return std::any_of(rounds_.begin(), rounds_.end(), [serial](const Round& round) {
            return round.serial == serial && round.opened.is_here();
        });
    }
    void remove(uint64_t serial) {
        rounds_.erase(std::remove_if(rounds_.begin(), rounds_.end(),
                                     [serial](const Round& round) { return round.serial == serial; }),
                      rounds_.end());
    }
    // Any of them, removed; 0: there is none.
    uint64_t pop() {
        while (!rounds_.empty()) {
            const Round last = rounds_.back();
            rounds_.pop_back();
            if (last.opened.is_here()) return last.serial;
        }
        return 0;
    }

  private:
    struct Round {
        uint64_t serial;
        unsigned long thread;
        Origin opened;
    };

    std::vector<Round> rounds_;
    size_t opening_ = 0;
};

}  // namespace shmacc
