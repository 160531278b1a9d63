// Processes that are gone, or have failed: what of that ends a wait.
//
// A wait for gradients that asks for it ends with the news: processes that had applied, and that have died or failed since.
// They are collected, and marked as told, with all lanes' locks: so each ends one wait, the first one after it that asks,
// whatever has happened in between. A wait for the step that asks for it ends while there are only former chiefs:
// processes that have taken, and are dead or failed; and nobody alive has taken, or waits in the queue to take. Nothing is
// marked: it is so for all waits, until somebody takes again. A process that has left in order is none of either.
//
// Where it is recorded: of a process that is attached and has failed, in its own entry (presence.hpp). Of one that is
// gone, too, until a sweep frees that entry; the sweep first makes a record in a table of its own, if the process had
// applied, or had taken:
//
//   sweep   free -> being written -> kDead, kFailed if it is news; with kTold, if it had only taken
//   tell    kDead, kFailed -> kTold with it, if it had taken; else free
//
// A sweep looks for a record of the process that another one left, which may have died: so one death is one record, also if
// two lanes sweep at a time, since nobody frees a record meanwhile. Where records give way (below) there may be two: readers
// know them by their identity. A record is written under its identity before it has a fate, so a half-written one is
// nobody's news: the entry is still there, and the next sweep writes it again.
//
// The table has kMaxDeparted entries; if all are in use, the oldest gives way. It costs nothing but 64 bytes a process
// (and, of one that has failed, 1 KiB for the reason), and is read by those alone who ask. If there is no memory for
// another page of it, the oldest one gives way as well: a sweep does not fail.
//
// Each instant of death: in a sweep, as above; while telling, before the token: it is news to the next wait; after it: the
// wait that it ends is that of the process that died here.
#pragma once

#include <vector>

#include "protocol/events.hpp"
#include "segment/presence.hpp"

namespace shmacc {

struct Departure {
    uint64_t token;
    uint32_t pid;
    bool is_here;  // an entry of the participants; else a record
    uint32_t entry;
    std::string reason;
};

class Departures {
  public:
    Departures(Mapping& mapping, Header& header, Presence& presence)
        : file_(mapping.file()), presence_(presence),
          table_(mapping, kDepartedRegion, kMaxDeparted, header.departed_top) {}

    // This process, which is attached, has failed. It may go on.
    void fail(const std::string& reason) {
        // Before it counts: a process that finds the failure finds the reason.
        write_reason(file_, presence_.index(), identity_of(presence_.token()), reason);
        presence_.fail();
    }

    // A sweep found this participant's process gone: records it. Returns whether the process died.
    bool record(uint32_t participant, uint64_t token) {
        const Participant entry = load_words(presence_.table()[participant]);
        const uint32_t ending = load_relaxed(entry.ending);
        const bool died = is_here(token) && ending == kNotEnding;
        const bool failed = (token & kFateBits) == kFailed || ending == kEndsFailed;
        const bool news = died ? has_applied(entry) : has_failed(entry, token);
        if (!news && !(has_taken(entry) && (died || failed))) return died;
        const uint32_t i = entry_for(token);
        if (i == kMaxDeparted) return died;
        Departed& made = table_[i];
        made.pid_namespace = entry.pid_namespace;
        made.at_ns = timestamp_ns();
        made.applied_step = entry.applied_step;
        made.applied = entry.applied;
        made.pid = entry.pid;
        made.took = has_taken(entry);
        if (!died || has_failed(entry, token))
            write_reason(file_, reason_of_departed(i), identity_of(token),
                         read_reason(file_, participant, identity_of(token)));
        const uint64_t fate = (died ? kDead : kFailed) | (news ? uint64_t{0} : uint64_t{kTold});
        store(made.token, with_fate(token, fate));
        return died;
    }

    // Whether `news` would return any, after a sweep. Needs no lock.
    bool any() {
        bool found = false;
        for_each([&](uint32_t i) { found = found || is_news(load(table_[i].token)); });
        presence_.for_each([&](uint32_t i, uint64_t token) {
            const Participant& entry = presence_.table()[i];
            found = found || has_failed(entry, token) || (has_applied(entry) && died(i, token));
            return !found;
        });
        return found;
    }
    // Needs all lanes' locks, after a sweep.
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
                    store(table_[i].token, table_[i].took ? token | kTold : uint64_t{0});
            });
        }
        for (uint32_t i = table_.size(); i-- > 0 && load(table_[i].token) == 0;) table_.last_use(i);
    }

    // The processes that have taken, if all of them are gone. Needs no lock.
    std::vector<Departure> chiefs() {
        std::vector<Departure> chiefs;
        bool led = false;
        presence_.for_each([&](uint32_t i, uint64_t token) {
            const Participant& entry = presence_.table()[i];
            if (!has_taken(entry)) return true;
            led = is_here(token) && !ends(i) && presence_.alive(i, token);
            if (!led && !(is_here(token) && load_relaxed(entry.ending) == kEndsInOrder))
                chiefs.push_back(of_participant(i, token));
            return !led;
        });
        if (led) return {};
        for_each([&](uint32_t i) {
            const uint64_t token = load(table_[i].token);
            if ((token & kFateBits) != 0 && table_[i].took) chiefs.push_back(of_record(i, token));
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
    // A process that ends has left, as far as others are concerned.
    bool ends(uint32_t i) { return load_relaxed(presence_.table()[i].ending) != kNotEnding; }
    bool died(uint32_t i, uint64_t token) { return is_here(token) && !ends(i) && !presence_.alive(i, token); }

    // The process's own entry; else a free or the oldest one, marked with its identity, without a fate.
    // kMaxDeparted: there is none.
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
    Table<Departed> table_;
};

}  // namespace shmacc
