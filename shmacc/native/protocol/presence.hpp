// The processes that are attached, the proof that they live, and what became of processes that are gone.
//
// At its first operation a process takes record locks on two bytes, and holds them until it leaves or ends. The
// lock on presence_byte(i), the first that is free, allocates entry i to the process. If the entry contains no
// token, the process also locks life_byte(i), and writes a fresh token. From then on it is attached, and the
// second lock proves that the process of this token lives. The kernel drops both locks when the process ends,
// and no earlier.
//
// A dead process leaves its token behind. No other process gets the entry until a sweep, under a lane's lock,
// has removed the dead process's takes from the queue. A newcomer that looks at such an entry holds the first
// byte for a moment, but never the second: so even a newcomer that is stopped there does not make a dead
// waiter look alive. A newcomer that found entries of dead processes sweeps as soon as it has an entry; if no entry was
// free, it sweeps before it searches again. So forked children that come and die do not use up the entries.
//
// Entries from `top` on are never looked at. `top` rises before a token is written. A sweep lowers `top` entry
// by entry, while it holds the entry's presence byte and the entry has no token. A process that has the entry,
// or is about to take it, holds that byte. So `top` stays above all entries in use and all that the dead left.
//
// Leaving takes no lock of the segment. So while a sweep judges a token, its process may leave, and another
// process may get the entry. A process that leaves changes its token before it unlocks its bytes: so it is dead only
// if the token is still there after its bytes were found unlocked. The sweep frees the entry only if it still
// contains the token that was judged; no token is ever used twice, not even by the same process.
//
// Record locks do not distinguish threads, and a sweep runs without the GIL. Another thread may claim the
// process's entry meanwhile: therefore `claim` sets index_ before the token, and `sweep` has `placed`.
//
// What becomes of a process. It leaves in order, or leaves as failed, or dies. A process that leaves in order
// frees its entry. The others leave an entry behind whose token says kFailed, or kHere although the process is
// dead. A sweep frees such an entry; if a wait is still to be told, the sweep first makes a record elsewhere
// (departures.hpp). So the table has entries only of attached processes, and of gone processes that no sweep
// has found yet.
//
// A process that has failed may go on, with another handle or a thread in an operation. Then its token stays kHere, and
// `failures` counts its failures. The process whose wait is told of them stores their number in `told`, with half of
// the failed process's token. So `told` means nothing for the next process of the entry, even if the failed process
// leaves at that moment.
//
// A worker is a process that has applied, or has said which contributor it is: `contributor` without `applied_ns`. It
// says so in one store, before its first gradient is looked at; a death before that store is not reported.
//
// `applied_ns` and `took_ns` are set before the commit that they announce: a process that dies between the two is
// reported as if it had applied (or taken), as it was about to. An operation adds its bit to `roles` before it does
// anything else. No operation reads `roles`: they tell inspection what a process was there for. Each instant of death:
//   before the role is added        the process is not known to have done this, and it has changed nothing.
//   after it is added               the process counts as one that does this, as it was about to.
//   in claim, before the token      the entry is free.
//   in fail, before `failures`      the process counts as dead, not as failed.
//   in leave, before the token      the process counts as dead; if it had failed, with the reason of its failure.
//   in leave, after the token       the process has left; the kernel drops the locks on its bytes.
//   in sweep, before the token      the next sweep does the same again. It may find the process's takes removed
//                                   from the queue, and the record made; it writes the record once more.
//   in sweep, after the token       done; only the event may be missing, which no process relies on.
#pragma once

#include <unistd.h>

#include <algorithm>

#include "base/mapping.hpp"
#include "base/process.hpp"
#include "protocol/lock.hpp"

namespace shmacc {

// A table in shared memory. Its entries are reserved a page at a time before they are touched. Entries from
// `top` on are free.
template <class Entry>
class Entries {
  public:
    Entries(Mapping& mapping, uint32_t region, uint32_t capacity, uint32_t& top)
        : mapping_(mapping), region_(region), capacity_(capacity), top_(top),
          entries_(reinterpret_cast<Entry*>(mapping.map_table(region, uint64_t{capacity} * sizeof(Entry)))) {}

    // Returns how many entries may be in use, and reserves them, so that they can be touched.
    uint32_t size() {
        uint32_t top = std::min(load(top_), capacity_);
        reserve(top);
        return top;
    }
    // Does what `size` does, but without memory for another page it returns how many entries are reserved already. For
    // what must not fail, and may miss an entry.
    uint32_t reserved_size() noexcept {
        try {
            return size();
        } catch (...) {
            const auto reserved = static_cast<uint32_t>(load(reserved_) / sizeof(Entry));
            return std::min({load(top_), capacity_, reserved});
        }
    }
    Entry& operator[](uint32_t i) {
        SHMACC_ASSERT(i < capacity_);
        return entries_[i];
    }
    // Returns entry i, even if it was never used before, and raises `top` above it.
    Entry& first_use(uint32_t i) {
        SHMACC_ASSERT(i < capacity_);
        reserve(i + 1);
        uint32_t top = load(top_);
        while (top <= i &&
               !__atomic_compare_exchange_n(&top_, &top, i + 1, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) {
        }
        return entries_[i];
    }
    // Does what first_use does; returns false if the table is full, or there is no memory for another page.
    bool try_first_use(uint32_t i) {
        if (i >= capacity_) return false;
        try {
            first_use(i);
            return true;
        } catch (const Error&) {
            return false;
        }
    }
    // Call when the last entry, i, is free: it is not scanned any more until it is used again.
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

// How many failures of this process have been told to waits. token: the process's.
inline uint32_t failures_told(const Participant& entry, uint64_t token) {
    const uint64_t told = load(entry.told);
    return told >> 32 == token >> 32 ? static_cast<uint32_t>(told) : 0;
}
inline bool has_applied(const Participant& entry) { return load_relaxed(entry.applied_ns) != 0; }
inline bool has_taken(const Participant& entry) { return load_relaxed(entry.took_ns) != 0; }
// Several threads of the process may note roles at the same time.
inline void note_role(Participant& entry, Role role) {
    if (!(load_relaxed(entry.roles) & role)) __atomic_fetch_or(&entry.roles, role, __ATOMIC_RELAXED);
}
inline bool is_worker(const Participant& entry) {
    return has_applied(entry) || load_relaxed(entry.contributor) >= 0;
}
// Whether the process is a worker, and has a failure that no wait was told of yet.
inline bool has_failed(const Participant& entry, uint64_t token) {
    return is_worker(entry) && load(entry.failures) != failures_told(entry, token);
}

class Presence {
  public:
    Presence(Mapping& mapping, Header& header)
        : fd_(mapping.file().fd()),
          table_(mapping, kParticipantsRegion, kMaxParticipants, header.participants_top) {}

    static constexpr uint32_t kNobody = UINT32_MAX;
    enum class Claim { kDone, kDoneBesideDead, kFull };

    // Takes a free entry. Needs no lock of the segment, only those on the entry's bytes.
    Claim claim(const ProcessIdentity& process) {
        const uint64_t fresh = with_fate(fresh_bits() | 16, kHere);  // 16: so that applier_of exceeds kNobodys
        bool met_dead = false;
        SHMACC_ASSERT(!claimed());
        for (uint32_t i = 0; i < kMaxParticipants; ++i) {
            if (!set_record_lock(fd_, presence_byte(i), F_WRLCK)) continue;
            bool dead = false, taken = false;
            try {
                dead = load(table_.first_use(i).token) != 0;  // not swept yet
                taken = !dead && set_record_lock(fd_, life_byte(i), F_WRLCK);
            } catch (...) {  // no memory for the entry or the lock: the process is not attached
                set_record_lock(fd_, presence_byte(i), F_UNLCK);
                throw;
            }
            if (!taken) {
                set_record_lock(fd_, presence_byte(i), F_UNLCK);
                met_dead |= dead;
                continue;
            }
            Participant& entry = table_[i];
            entry.pid_namespace = process.pid_namespace;
            entry.start_ticks = process.start_ticks;
            entry.attached_ns = entry.seen_ns = timestamp_ns();
            entry.applied_ns = entry.applied_step = 0;
            entry.contributor = -1;
            entry.pid = static_cast<uint32_t>(getpid());
            entry.activity = kIdle;
            entry.applied = entry.dropped = entry.taken = 0;
            entry.told = entry.given_up = 0;
            entry.took_ns = 0;
            entry.roles = entry.failures = entry.ending = 0;
            token_ = fresh;
            index_ = i;  // before a sweep can see the token
            store(entry.token, token_);
            claimed_ = true;
            return met_dead ? Claim::kDoneBesideDead : Claim::kDone;
        }
        return Claim::kFull;
    }

    // Records which contributor this process is, before its first gradient. Negative: it names none.
    void be_contributor(int64_t contributor) {
        SHMACC_ASSERT(claimed());
        Participant& entry = own();
        if (contributor < 0 || has_applied(entry)) return;
        note_role(entry, kAppliesIt);
        store_relaxed(entry.contributor, contributor);
    }
    // Records that this process has failed, but stays attached.
    void note_failure() {
        SHMACC_ASSERT(claimed());
        Participant& entry = own();
        if (is_worker(entry) || has_taken(entry)) store(entry.failures, entry.failures + 1);
    }
    // Records that this process is ending. Its threads may go on until it has ended.
    void announce_end(bool failed) {
        if (claimed()) store(own().ending, uint32_t{failed ? kEndsFailed : kEndsInOrder});
    }
    void leave(const SegmentFile::Status& file, bool failed) {
        if (!claimed()) return;
        const uint32_t i = index_;
        claimed_ = false;
        index_ = kNobody;
        if (file.intact) {
            const bool tells = has_failed(table_[i], token_) || (failed && has_taken(table_[i]));
            store(table_[i].token, tells ? with_fate(token_, kFailed) : 0);
        }
        if (!file.open) return;  // other code has closed the descriptor, and so dropped the locks
        set_record_lock(fd_, life_byte(i), F_UNLCK);
        set_record_lock(fd_, presence_byte(i), F_UNLCK);
    }

    // Call in a forked child: the parent keeps the entry, and the locks on its bytes.
    void after_fork_in_child() {
        claimed_ = false;
        index_ = kNobody;
    }

    bool claimed() const { return claimed_; }
    uint32_t index() const { return index_; }
    uint64_t token() const { return token_; }
    Participant& own() { return table_[index_]; }
    Entries<Participant>& table() { return table_; }

    // Whether the process that had entry i under this token lives. (F_GETLK does not show a process its own
    // locks.) The token was stored with release after the lock was taken: a reader that sees the token finds
    // the lock.
    bool alive(uint32_t i, uint64_t token) {
        if (!is_here(token)) return false;
        if (i == index_) return token == token_;
        return i < table_.size() && load(table_[i].token) == token && others_hold(fd_, life_byte(i), 1);
    }
    // Calls each(i, token) for each entry that is in use, until `each` returns false.
    template <class Each>
    void for_each(Each each) {
        for (uint32_t i = 0, top = table_.size(); i < top; ++i)
            if (const uint64_t token = load(table_[i].token); token != 0 && !each(i, token)) return;
    }
    static bool anybody_else(int fd) { return others_hold(fd, kPresenceBytes, 2 * kMaxParticipants); }

    // Needs all lanes' locks. Marks the failures of this participant as told.
    void tell(uint32_t i, uint64_t token) {
        store(table_[i].told, token >> 32 << 32 | load(table_[i].failures));
    }

    // Needs a lane's lock. Frees the entries of processes that are gone. For each, calls judge(i, copy of the entry)
    // first; if that returned true and this call freed the entry, calls died(copy of the entry). Sweeps in two lanes
    // may run at the same time: each frees only tokens that it has judged.
    template <class Judge, class Died>
    void sweep(Judge judge, Died died) {
        const bool placed = claimed();
        for_each([&](uint32_t i, uint64_t token) {
            if (alive(i, token)) return true;
            const Participant entry = load_words(table_[i]);
            load_barrier();
            // The entry's process has just left, or another sweep has freed the entry.
            if (load(table_[i].token) != token) return true;
            const bool has_died = judge(i, entry);
            if (__atomic_compare_exchange_n(&table_[i].token, &token, uint64_t{0}, false, __ATOMIC_ACQ_REL,
                                            __ATOMIC_RELAXED) &&
                has_died)
                died(entry);
            return true;
        });
        // If this process has no entry, another thread may be claiming one, and locking the same byte.
        if (!placed) return;
        for (uint32_t i = table_.size(); i-- > 0 && load(table_[i].token) == 0;) {
            if (!set_record_lock(fd_, presence_byte(i), F_WRLCK)) break;
            // Checked again with the byte held: another process may have claimed the entry meanwhile, and died.
            if (load(table_[i].token) == 0) table_.last_use(i);
            set_record_lock(fd_, presence_byte(i), F_UNLCK);
        }
    }

  private:
    int fd_;
    Entries<Participant> table_;
    std::atomic<uint32_t> index_{kNobody};  // set during the claim
    std::atomic<bool> claimed_{false};  // set at the end of the claim
    uint64_t token_ = 0;  // written before index_
};

}  // namespace shmacc
