// How rounds spend their time, and for whom they wait: for people who ask why a training is slow.
//
// All time from the first take on is in one of three sums, as the processes that take see it: waiting for gradients
// (from the call of the take, or the end of the round before if that is later, until the round is there), in the
// block of a round, and between (from the end of a round until the next call). A block that was given up, or whose
// process died, counts as "between".
//
// The late contributors. A take that required several gradients waited for the last of them. So its round adds to one
// entry: how much later than the mean of the others the last gradient came. A new entry replaces the one with the least
// time. So contributors that are late again and again keep their entries, with all the time added to them.
//
// Everything here is written with all lanes' locks, by plain stores without a checksum, and never read by the protocol.
// A process that dies after these stores, before its commit, has counted time that did pass, once. A process that dies
// between two of these stores leaves each sum either right or without this round. Bytes that other code has overwritten
// show as wrong numbers.
#pragma once

#include <algorithm>

#include "segment/open_segment.hpp"

namespace shmacc {

class PaceKeeper {
  public:
    explicit PaceKeeper(OpenSegment& segment) : segment_(segment), pace_(segment.header().pace) {}

    // Call when a take gets this round. called: when the take was called; required: how many gradients it required.
    void got(const RoundState& round, int64_t required, int64_t gradients, int64_t called) {
        SHMACC_ASSERT(segment_.has_all_locks());
        const int64_t until = pace_.until_ns, now = timestamp_ns(), from = std::max(called, until);
        if (until != 0) add(pace_.between_ns, until, called);
        add(pace_.waiting_ns, from, now);
        store_relaxed(pace_.until_ns, now);
        if (now > from && required > 1 && gradients > 1) find_late(round.step, gradients);
    }
    // Call when the block of the round that was opened at `opened` has ended in order.
    void left_block(int64_t opened) {
        SHMACC_ASSERT(segment_.has_all_locks());
        const int64_t now = timestamp_ns();
        add(pace_.block_ns, std::max(opened, pace_.until_ns), now);
        store_relaxed(pace_.until_ns, now);
    }

  private:
    // Adds nothing if `from` is not before `to`: it may be of an earlier boot, or be anything in a damaged segment.
    static void add(uint64_t& sum, int64_t from, int64_t to) {
        if (from < to) store_relaxed(sum, sum + static_cast<uint64_t>(to) - static_cast<uint64_t>(from));
    }
    // Finds the contributor that this round's take waited for last.
    void find_late(int64_t step, int64_t gradients) {
        Entries<Participant>& table = segment_.presence().table();
        const uint32_t top = table.size();
        // Looks at a few entries per gradient at most, so that takes of few gradients stay fast among many processes.
        if (top > 64 + 4 * static_cast<uint64_t>(gradients)) return;
        const Participant* last = nullptr;
        double sum = 0;  // of the times at which the others came
        uint64_t others = 0;
        int64_t came = 0;
        for (uint32_t i = 0; i < top; ++i) {
            const Participant& entry = table[i];
            const int64_t at = load_relaxed(entry.applied_ns);
            if (at <= 0 || load_relaxed(entry.applied_step) != step || load_relaxed(entry.token) == 0)
                continue;
            const bool later = last == nullptr || at > came;
            if (last != nullptr) {
                sum += static_cast<double>(later ? came : at);
                ++others;
            }
            if (later) {
                last = &entry;
                came = at;
            }
        }
        if (others == 0) return;
        const double late = static_cast<double>(came) - sum / static_cast<double>(others);
        if (late >= 1)
            add_late(load_relaxed(last->contributor) >= 0 ? load_relaxed(last->contributor)
                                                          : -static_cast<int64_t>(load_relaxed(last->pid)),
                     static_cast<uint64_t>(late));
    }
    void add_late(int64_t who, uint64_t late_ns) {
        Late* at = nullptr;
        for (Late& entry : pace_.late) {
            if (entry.rounds > 0 && entry.who == who) {
                at = &entry;
                break;
            }
            if (at == nullptr || (at->rounds > 0 && (entry.rounds == 0 || entry.late_ns < at->late_ns)))
                at = &entry;
        }
        const Late before = at->rounds > 0 && at->who == who ? *at : Late{who, 0, 0};
        store_relaxed(at->rounds, uint64_t{0});
        store_relaxed(at->who, who);
        store_relaxed(at->late_ns, before.late_ns + late_ns);
        store_relaxed(at->rounds, before.rounds + 1);
    }

    OpenSegment& segment_;
    Pace& pace_;
};

}  // namespace shmacc
