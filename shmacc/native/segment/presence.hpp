// The processes that are attached, the proof which of them live, and what became of those that are gone.
//
// A process takes record locks on two bytes at its first operation, and holds them until it leaves or ends.
// The first free presence_byte(i) that it finds *is* the allocation of entry i. If the entry contains no
// token, it takes life_byte(i) too, and writes a fresh token: from then on it is attached, and the second
// lock proves that the process of this token lives. The kernel drops both with the process, and no earlier.
//
// A dead process leaves its token behind, and its entry is not given to another process until a sweep, under
// the segment's lock, has removed it from the queue. A newcomer that looks at such an entry holds the first
// byte for a moment, but never the second: so even a newcomer that is stopped there does not make a dead
// waiter look alive. A newcomer that found entries of the dead sweeps once it has an entry, or if there is
// none, before it searches again: so however many children of fork come and die, entries are free as soon as
// a process needs one.
//
// `top` bounds the entries that are ever looked at. It rises before a token is written, and falls in a sweep,
// entry by entry, while the sweeper holds the entry's presence byte and there is no token: a process that has
// the entry, or is about to take it, holds that byte, so `top` never falls below an entry in use, nor below a
// dead one's.
//
// Leaving takes no lock of the segment. So while a sweep judges a token its process may leave, and the entry
// may belong to another one by the time that it is freed: it is freed only if it still contains the token
// that was judged, and no token is ever used twice, not even by the same process.
//
// Record locks do not distinguish threads, and a sweep runs without the GIL. Another thread may claim the
// process's entry meanwhile: hence the order in which `claim` publishes it, and `placed` in `sweep`.
//
// What becomes of a process. It leaves in order, or failed, or it dies. In order, its entry is free; an entry of the
// others, in which the token says kFailed, or kHere of a process that does not live, is freed by a sweep, which makes a
// record of it elsewhere if others are still to be told (departures.hpp). So the table has no entries but those of the
// attached, and of the gone that nobody has met yet.
//
// A process that has failed may go on: it has another handle, or a thread in an operation. Then its entry stays kHere,
// and `failures` counts. Another process that has told somebody writes into `told` how many are no news any more, together
// with half of the token: for if the process leaves at that moment, the entry may be another one's, to which that number
// means nothing.
//
// `applied_ns` and `took` are set before the commit that they announce: a process that dies in between is told of as
// one that had applied, which it was about to have. Each instant of death:
//   in claim, before the token      the entry is free.
//   in fail, before `failures`      it dies as one that has not failed.
//   in leave, before the token      likewise; or it dies, and the reason is that of its failure.
//   in leave, after it              it has left; the kernel drops the bytes.
//   in sweep, before the token      the next sweep finds what this one did. Takes in the queue may be removed already, and
//                                   the record be there, which is then written once more.
//   in sweep, after it              done; only the event may be missing, which is for people.
#pragma once

#include <unistd.h>

#include <algorithm>

#include "segment/lock.hpp"
#include "segment/mapping.hpp"
#include "segment/process.hpp"

namespace shmacc {

// Entries of a table in shared memory, reserved in steps of a page before they are touched. Entries from `top`
// on are free.
template <class Entry>
class Table {
  public:
    Table(Mapping& mapping, uint32_t region, uint32_t capacity, uint32_t& top)
        : mapping_(mapping), region_(region), capacity_(capacity), top_(top),
          entries_(reinterpret_cast<Entry*>(mapping.map_table(region, uint64_t{capacity} * sizeof(Entry)))) {}

    // How many entries may be looked at.
    uint32_t size() {
        uint32_t top = std::min(load(top_), capacity_);
        reserve(top);
        return top;
    }
    Entry& operator[](uint32_t i) { return entries_[i]; }
    // Entry i, which may not have been used before.
    Entry& first_use(uint32_t i) {
        reserve(i + 1);
        uint32_t top = load(top_);
        while (top <= i &&
               !__atomic_compare_exchange_n(&top_, &top, i + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        }
        return entries_[i];
    }
    // As above; returns false if the table is full, or there is no memory for another page.
    bool try_first_use(uint32_t i) {
        if (i >= capacity_) return false;
        try {
            first_use(i);
            return true;
        } catch (const Error&) {
            return false;
        }
    }
    // Entry i, the last one, is free, and is not scanned until it is used again.
    void last_use(uint32_t i) {
        uint32_t top = i + 1;
        __atomic_compare_exchange_n(&top_, &top, i, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED);
    }

  private:
    void reserve(uint32_t count) {
        uint64_t bytes = page_up(uint64_t{count} * sizeof(Entry));
        uint64_t reserved = load(reserved_);
        if (bytes <= reserved) return;
        mapping_.reserve(region_, reserved, bytes - reserved);
        store(reserved_, bytes);  // threads may race here: reserving twice is harmless
    }

    Mapping& mapping_;
    uint32_t region_;
    uint32_t capacity_;
    uint32_t& top_;
    Entry* entries_;
    uint64_t reserved_ = 0;
};

// How many failures of the process with this token are no news any more.
inline uint32_t failures_told(const Participant& entry, uint64_t token) {
    const uint64_t told = load(entry.told);
    return told >> 32 == token >> 32 ? static_cast<uint32_t>(told) : 0;
}
inline bool has_applied(const Participant& entry) { return load_relaxed(entry.applied_ns) != 0; }
inline bool has_taken(const Participant& entry) { return load_relaxed(entry.took) != 0; }
// Whether the process has failed after it had applied, and nobody was told of that.
inline bool has_failed(const Participant& entry, uint64_t token) {
    return has_applied(entry) && load(entry.failures) != failures_told(entry, token);
}

class Presence {
  public:
    Presence(Mapping& mapping, Header& header)
        : fd_(mapping.file().fd()),
          table_(mapping, kParticipantsRegion, kMaxParticipants, header.participants_top) {}

    static constexpr uint32_t kNobody = UINT32_MAX;
    enum class Claim { kDone, kDoneBesideDead, kFull };

    // Takes a free entry. Needs no lock but the bytes' own.
    Claim claim(const ProcessIdentity& process) {
        bool met_dead = false;
        for (uint32_t i = 0; i < kMaxParticipants; ++i) {
            if (!set_record_lock(fd_, presence_byte(i), F_WRLCK)) continue;
            Participant& entry = table_.first_use(i);
            const bool dead = load(entry.token) != 0;  // not swept yet
            if (dead || !set_record_lock(fd_, life_byte(i), F_WRLCK)) {
                set_record_lock(fd_, presence_byte(i), F_UNLCK);
                met_dead |= dead;
                continue;
            }
            entry.pid_namespace = process.pid_namespace;
            entry.start_ticks = process.start_ticks;
            entry.attached_ns = entry.seen_ns = timestamp_ns();
            entry.applied_ns = entry.applied_step = 0;
            entry.contributor = -1;
            entry.pid = static_cast<uint32_t>(getpid());
            entry.activity = kIdle;
            entry.applied = entry.dropped = entry.taken = 0;
            entry.told = entry.given_up = 0;
            entry.failures = entry.took = entry.ending = 0;
            token_ = with_fate(fresh_bits() | 16, kHere);  // so that applier_of is not kNobodys
            index_ = i;  // before the token is there to be judged
            store(entry.token, token_);
            claimed_ = true;
            return met_dead ? Claim::kDoneBesideDead : Claim::kDone;
        }
        return Claim::kFull;
    }

    // The process, which is attached, has failed, and does not leave for that.
    void fail() {
        Participant& entry = own();
        if (has_applied(entry) || has_taken(entry)) store(entry.failures, entry.failures + 1);
    }
    // This process is ending. Its threads may go on until it has ended.
    void end(bool failed) {
        if (claimed()) store(own().ending, uint32_t{failed ? kEndsFailed : kEndsInOrder});
    }
    void leave(const SegmentFile::State& file, bool failed) {
        if (!claimed()) return;
        const uint32_t i = index_;
        claimed_ = false;
        index_ = kNobody;
        if (file.intact) store(table_[i].token, after_leaving(table_[i], token_, failed));
        if (!file.open) return;  // other code has closed the descriptor, and so dropped the locks
        set_record_lock(fd_, life_byte(i), F_UNLCK);
        set_record_lock(fd_, presence_byte(i), F_UNLCK);
    }

    // In a forked child: the entry, and the lock that proves it, are the parent's.
    void after_fork_in_child() {
        claimed_ = false;
        index_ = kNobody;
    }

    bool claimed() const { return claimed_; }
    uint32_t index() const { return index_; }
    uint64_t token() const { return token_; }
    Participant& own() { return table_[index_]; }
    Table<Participant>& table() { return table_; }

    // Whether the process that had entry i under this token lives. (A process's own locks do not show.) The
    // token was stored with release after the lock was taken: a reader that sees the token finds the lock.
    bool alive(uint32_t i, uint64_t token) {
        if (!is_here(token)) return false;
        if (i == index_) return token == token_;
        return i < table_.size() && load(table_[i].token) == token && others_hold(fd_, life_byte(i), 1);
    }
    // Calls each(i, token) for each entry that is in use, until it returns false.
    template <class Each>
    void for_each(Each each) {
        for (uint32_t i = 0, top = table_.size(); i < top; ++i)
            if (const uint64_t token = load(table_[i].token); token != 0 && !each(i, token)) return;
    }
    static bool anybody_else(int fd) { return others_hold(fd, kPresenceBytes, 2 * kMaxParticipants); }

    // With all lanes' locks: that this process has failed is no news any more.
    void tell(uint32_t i, uint64_t token) {
        store(table_[i].told, token >> 32 << 32 | load(table_[i].failures));
    }

    // Under a lane's lock: frees the entries of those that are gone. Of each, first judge(entry, token), and if that was
    // true and this call has freed it, died(what the entry was). In two lanes two may do so at a time: each frees the
    // tokens that it has judged.
    template <class Judge, class Died>
    void sweep(Judge judge, Died died) {
        const bool placed = claimed();
        for_each([&](uint32_t i, uint64_t token) {
            if (alive(i, token)) return true;
            const Participant entry = load_words(table_[i]);
            const bool has_died = judge(i, token);
            if (__atomic_compare_exchange_n(&table_[i].token, &token, uint64_t{0}, false, __ATOMIC_ACQ_REL,
                                            __ATOMIC_RELAXED) &&
                has_died)
                died(entry);
            return true;
        });
        // A process that has an entry claims no other one: so none of its threads tries for the same byte.
        if (!placed) return;
        for (uint32_t i = table_.size(); i-- > 0 && load(table_[i].token) == 0;) {
            if (!set_record_lock(fd_, presence_byte(i), F_WRLCK)) break;
            // Checked again with the byte held: another process may have claimed the entry meanwhile, and
            // died.
            if (load(table_[i].token) == 0) table_.last_use(i);
            set_record_lock(fd_, presence_byte(i), F_UNLCK);
        }
    }

  private:
    static uint64_t after_leaving(const Participant& entry, uint64_t token, bool failed) {
        return has_failed(entry, token) || (failed && has_taken(entry)) ? with_fate(token, kFailed) : 0;
    }

    int fd_;
    Table<Participant> table_;
    std::atomic<uint32_t> index_{kNobody};  // while it claims, and from then on
    std::atomic<bool> claimed_{false};  // from the end of the claim on
    uint64_t token_ = 0;  // written before index_
};

}  // namespace shmacc
