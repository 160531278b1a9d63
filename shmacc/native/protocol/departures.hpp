// Processes that have died or failed, and the waits that end because of them.
//
// A wait for gradients may ask to end when a worker (presence.hpp) has died or failed. Such a departure is news until a
// wait was told of it: the waiting process collects the news and marks it as told, with all lanes' locks. So each
// departure ends one wait, the first that asks for departures, however late. A wait for the step may ask to end when
// the chiefs are gone: processes that have taken are dead or have left as failed, and no living process has taken or
// waits in the queue to take. Such a departure is not marked: all such waits end, until a process takes again. A
// process that has left in order ends neither kind of wait.
//
// Where departures are recorded. The entry of an attached process records its failure (presence.hpp). A process
// that is gone leaves its entry behind, until a sweep frees it. If the process was a worker or has taken, the sweep
// first makes a record in the table of the departed:
//
//   sweep   free -> being written -> kDead or kFailed; with kTold if it is no news: the process was no
//           worker, or its failure had been told already
//   tell    kDead or kFailed -> the same with kTold, if the process had taken; else free
//
// A sweep first looks for a record of the same process: another sweep, whose process may have died, may have made it.
// So one death makes one record, even if two lanes sweep at the same time: to free a record takes all lanes' locks.
// When records give way (below), a process may get two. Readers compare identities, and count it once. A record gets
// its identity before its fate, so a half-written record is no news: the participant's entry is still there, and the
// next sweep writes the record again.
//
// The table has kMaxDeparted entries. If all are in use, or there is no memory for another page of the table,
// the oldest record gives way: a sweep does not fail. A record costs only its 64 bytes (and 1 KiB for the
// reason, if the process failed), and only waits that ask for departures read it.
//
// If a process dies
//   in a sweep                              the next sweep writes the record again, as above
//   in tell, before a departure is marked   the next wait gets the news
//   in tell, after it is marked             no other wait gets the news: the dead process's own wait had it
#pragma once

#include <vector>

#include "protocol/events.hpp"
#include "protocol/presence.hpp"

namespace shmacc {

struct Departure {
    uint64_t token;
    uint32_t pid;
    bool is_here;  // true: `entry` is in the table of participants; false: in that of the departed
    uint32_t entry;
    std::string reason;
};

class Departures {
  public:
    Departures(Mapping& mapping, Header& header, Presence& presence)
        : file_(mapping.file()), presence_(presence),
          table_(mapping, kDepartedRegion, kMaxDeparted, header.departed_top) {}

    // Records that this attached process has failed. It may go on.
    void note_failure(const std::string& reason) {
        // Write the reason first: a process that finds the failure must find the reason.
        write_reason(file_, presence_.index(), identity_of(presence_.token()), reason);
        presence_.note_failure();
    }

    // Records that a sweep found this participant's process gone. Returns whether the process died. entry: a copy.
    bool record(uint32_t participant, const Participant& entry) {
        const uint64_t token = entry.token;
        const bool died = is_here(token) && entry.ending == kNotEnding;
        const bool failed = (token & kFateBits) == kFailed || entry.ending == kEndsFailed;
        const bool news = died ? is_worker(entry) : has_failed(entry, token);
        if (!news && !(has_taken(entry) && (died || failed))) return died;
        const uint32_t i = entry_for(token);
        if (i == kMaxDeparted) return died;
        Departed& made = table_[i];
        made.at_ns = timestamp_ns();
        made.applied_step = entry.applied_step;
        made.applied = entry.applied;
        made.attached_ns = entry.attached_ns;
        made.took_ns = entry.took_ns;
        made.pid = entry.pid;
        made.pid_namespace = entry.pid_namespace;
        made.roles = entry.roles;
        if (!died || has_failed(entry, token))
            write_reason(file_, reason_of_departed(i), identity_of(token),
                         read_reason(file_, participant, identity_of(token)));
        const uint64_t fate = (died ? kDead : kFailed) | (news ? uint64_t{0} : uint64_t{kTold});
        store(made.token, with_fate(token, fate));
        return died;
    }

    // Whether news() would return anything after a sweep. Needs no lock.
    bool any() {
        bool found = false;
        for_each([&](uint32_t i) { found = found || is_news(load(table_[i].token)); });
        presence_.for_each([&](uint32_t i, uint64_t token) {
            const Participant& entry = presence_.table()[i];
            found = found || has_failed(entry, token) || (is_worker(entry) && died(i, token));
            return !found;
        });
        return found;
    }
    // Returns the departures that no wait was told of yet. Needs all lanes' locks, after a sweep.
    std::vector<Departure> news() {
        std::vector<Departure> news;
        for_each([&](uint32_t i) {
            const uint64_t token = load(table_[i].token);
            if (is_news(token)) news.push_back(of_record(i, token));
        });
        presence_.for_each([&](uint32_t i, uint64_t token) {
            if (has_failed(presence_.table()[i], token)) news.push_back(of_participant(i, token));
            return true;
        });
        return once_each(news);
    }
    // Marks these departures as told. Needs all lanes' locks, as for news().
    void tell(const std::vector<Departure>& news) {
        for (const Departure& departure : news) {
            if (departure.is_here) presence_.tell(departure.entry, departure.token);
            for_each([&](uint32_t i) {
                const uint64_t token = load(table_[i].token);
                if (identity_of(token) == identity_of(departure.token) && is_news(token))
                    store(table_[i].token, table_[i].took_ns ? token | kTold : uint64_t{0});
            });
        }
        for (uint32_t i = table_.size(); i-- > 0 && load(table_[i].token) == 0;) table_.last_use(i);
    }

    // Returns the processes that have taken if all of them are gone, else nothing. Needs no lock.
    std::vector<Departure> chiefs() {
        std::vector<Departure> chiefs;
        bool led = false;
        presence_.for_each([&](uint32_t i, uint64_t token) {
            const Participant& entry = presence_.table()[i];
            // If the token changes, the process has just left, and another may have the entry: look again.
            for (uint64_t seen = 0; token != seen; token = load(entry.token)) {
                seen = token;
                led = has_taken(entry) && is_here(token) && !ends(i) && presence_.alive(i, token);
                if (led) return false;
                load_barrier();
            }
            if (token != 0 && has_taken(entry) &&
                !(is_here(token) && load_relaxed(entry.ending) == kEndsInOrder))
                chiefs.push_back(of_participant(i, token));
            return true;
        });
        if (led) return {};
        for_each([&](uint32_t i) {
            const uint64_t token = load(table_[i].token);
            if ((token & kFateBits) != 0 && table_[i].took_ns) chiefs.push_back(of_record(i, token));
        });
        return once_each(chiefs);
    }

  private:
    static bool is_news(uint64_t token) {
        return (token & kFateBits) == kDead || (token & kFateBits) == kFailed;
    }
    template <class Each>
    void for_each(Each each) {
        for (uint32_t i = 0, top = table_.size(); i < top; ++i) each(i);
    }
    // A process that is ending counts as if it had left.
    bool ends(uint32_t i) { return load_relaxed(presence_.table()[i].ending) != kNotEnding; }
    bool died(uint32_t i, uint64_t token) { return is_here(token) && !ends(i) && !presence_.alive(i, token); }

    // Returns the record of the process with this token. If there is none, returns a free entry or the oldest, marked
    // with the process's identity and no fate. kMaxDeparted: no entry can be had.
    uint32_t entry_for(uint64_t token) {
        const uint64_t identity = identity_of(token);
        for (;;) {
            const uint32_t top = table_.size();
            uint32_t free = top, oldest = kMaxDeparted;
            for (uint32_t i = 0; i < top; ++i) {
                const uint64_t there = load(table_[i].token);
                if (there != 0 && identity_of(there) == identity) return i;
                if (there == 0) free = std::min(free, i);
                const bool is_record = (there & kFateBits) != 0;
                if (is_record && (oldest == kMaxDeparted || table_[i].at_ns < table_[oldest].at_ns))
                    oldest = i;
            }
            const bool has_free = free < top || table_.try_first_use(free);
            const uint32_t i = has_free ? free : oldest;
            if (i == kMaxDeparted) return i;
            uint64_t there = has_free ? 0 : load(table_[i].token);
            if (!has_free && (there & kFateBits) == 0) continue;
            if (__atomic_compare_exchange_n(&table_[i].token, &there, identity, false, __ATOMIC_ACQ_REL,
                                            __ATOMIC_RELAXED))
                return i;
        }
    }

    Departure of_record(uint32_t i, uint64_t token) {
        std::string reason = read_reason(file_, reason_of_departed(i), identity_of(token));
        if (reason.empty()) reason = (token & kFateBits & ~uint64_t{kTold}) == kDead ? "killed" : "failed";
        return {token, load_relaxed(table_[i].pid), false, i, std::move(reason)};
    }
    Departure of_participant(uint32_t i, uint64_t token) {
        const Participant& entry = presence_.table()[i];
        std::string reason = "killed";
        if (!died(i, token) || load(entry.failures) != failures_told(entry, token)) {
            reason = read_reason(file_, i, identity_of(token));
            if (reason.empty()) reason = "failed";
        }
        return {token, load_relaxed(entry.pid), true, i, std::move(reason)};
    }
    static std::vector<Departure> once_each(const std::vector<Departure>& all) {
        std::vector<Departure> once;
        for (const Departure& one : all) {
            const auto same = [&](const Departure& other) {
                return identity_of(other.token) == identity_of(one.token);
            };
            if (std::none_of(once.begin(), once.end(), same)) once.push_back(one);
        }
        return once;
    }

    const SegmentFile& file_;
    Presence& presence_;
    Entries<Departed> table_;
};

}  // namespace shmacc
