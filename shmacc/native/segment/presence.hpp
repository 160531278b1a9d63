// The processes that are attached, and the proof which of them live.
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
            entry.attached_ns = entry.seen_ns = wall_ns();
            entry.applied_ns = entry.applied_step = 0;
            entry.contributor = -1;
            entry.pid = static_cast<uint32_t>(getpid());
            entry.activity = kIdle;
            entry.applied = entry.dropped = entry.taken = 0;
            token_ = fresh_token();
            index_ = i;  // before the token is there to be judged
            store(entry.token, token_);
            claimed_ = true;
            return met_dead ? Claim::kDoneBesideDead : Claim::kDone;
        }
        return Claim::kFull;
    }

    void leave(const SegmentFile::State& file) {
        if (!claimed()) return;
        const uint32_t i = index_;
        claimed_ = false;
        index_ = kNobody;
        if (file.intact) store(table_[i].token, uint64_t{0});
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
        if (i == index_) return token == token_;
        return i < table_.size() && load(table_[i].token) == token && others_hold(fd_, life_byte(i), 1);
    }
    // Whether a dead process, for which `matters`, has left its entry to be swept.
    template <class Matters>
    bool any_dead(Matters matters) {
        for (uint32_t i = 0, top = table_.size(); i < top; ++i) {
            const uint64_t token = load(table_[i].token);
            if (token != 0 && i != index_ && matters(table_[i]) && !alive(i, token)) return true;
        }
        return false;
    }
    static bool anybody_else(int fd) { return others_hold(fd, kPresenceBytes, 2 * kMaxParticipants); }

    // Under a lane's lock: frees the entries of the dead; `each` is first called with entry and token. In two lanes
    // two may do so at a time: each frees the tokens that it has judged.
    template <class Each>
    void sweep(Each each) {
        const bool placed = claimed();
        for (uint32_t i = 0, top = table_.size(); i < top; ++i) {
            uint64_t token = load(table_[i].token);
            if (token == 0 || alive(i, token)) continue;
            each(i, token);
            __atomic_compare_exchange_n(&table_[i].token, &token, uint64_t{0}, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_RELAXED);
        }
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
    int fd_;
    Table<Participant> table_;
    std::atomic<uint32_t> index_{kNobody};  // while it claims, and from then on
    std::atomic<bool> claimed_{false};  // from the end of the claim on
    uint64_t token_ = 0;  // written before index_
};

}  // namespace shmacc
