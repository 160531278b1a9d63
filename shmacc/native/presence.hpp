// Which processes are attached, and which of them live.
//
// A process that attaches takes record locks on two bytes, and holds them until it leaves or ends. The first
// it finds free, kPresenceByte + i, *is* the allocation of entry i. If the entry bears no token, it takes
// kLifeByte + i too, and writes its token: from now on it is attached, and the second byte is the proof that
// the process of this token lives. The kernel drops both with the process, and no earlier.
//
// A dead process leaves its token behind, and its entry is not given to anybody else until a sweep, under the
// segment's lock, has taken it out of the line. A newcomer that looks at such an entry holds the first byte for a
// moment, but never the second: so not even one that is stopped there lends its life to a dead waiter.
#pragma once

#include <unistd.h>

#include <algorithm>

#include "lock.hpp"
#include "mapping.hpp"

namespace shmacc {

struct ProcessIdentity {  // looked up once a process, by Python
    uint64_t pid_namespace;
    uint64_t start_ticks;
};

// Entries of a table in shared memory, reserved in steps of a page before they are touched. `top` is how
// many have ever been used; it only grows.
template <class Entry>
class Table {
  public:
    Table(Mapping& mapping, uint32_t region, uint32_t capacity, uint32_t& top)
        : mapping_(mapping), region_(region), capacity_(capacity), top_(top),
          entries_(reinterpret_cast<Entry*>(
              mapping.map_table(region, uint64_t{capacity} * sizeof(Entry)))) {}

    uint32_t capacity() const { return capacity_; }
    // How many entries may be looked at.
    uint32_t size() {
        uint32_t top = std::min(load(top_), capacity_);
        reserve(top);
        return top;
    }
    Entry& operator[](uint32_t i) { return entries_[i]; }
    // Entry i, which may never have been used.
    Entry& first_use(uint32_t i) {
        reserve(i + 1);
        uint32_t top = load(top_);
        while (top <= i && !__atomic_compare_exchange_n(&top_, &top, i + 1, false, __ATOMIC_ACQ_REL,
                                                        __ATOMIC_ACQUIRE)) {
        }
        return entries_[i];
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
    Presence(Mapping& mapping, Header* header)
        : fd_(mapping.fd()),
          table_(mapping, kParticipantsRegion, kMaxParticipants, header->participants_top) {}

    static constexpr uint32_t kNobody = UINT32_MAX;

    // Takes a free entry. Needs no lock but the bytes' own.
    void claim(uint64_t token, const ProcessIdentity& identity) {
        for (uint32_t i = 0; i < kMaxParticipants; ++i) {
            if (!set_record_lock(fd_, kPresenceByte + i, F_WRLCK)) continue;
            Participant& entry = table_.first_use(i);
            if (load(entry.token) != 0 ||  // a dead one's, not swept yet
                !set_record_lock(fd_, kLifeByte + i, F_WRLCK)) {
                set_record_lock(fd_, kPresenceByte + i, F_UNLCK);
                continue;
            }
            entry.pid_namespace = identity.pid_namespace;
            entry.start_ticks = identity.start_ticks;
            entry.attached_ns = entry.seen_ns = wall_ns();
            entry.applied_ns = entry.applied_step = 0;
            entry.pid = static_cast<uint32_t>(getpid());
            entry.activity = kIdle;
            entry.applied = entry.dropped = entry.taken = 0;
            store(entry.token, token);
            index_ = i;
            token_ = token;
            return;
        }
        throw Error(Failure::kResourceExhausted,
                    std::to_string(kMaxParticipants) + " processes are attached to the segment already");
    }

    // whole: whether the table can still be written to.
    void leave(bool whole) {
        if (index_ == kNobody) return;
        if (whole) store(table_[index_].token, uint64_t{0});
        set_record_lock(fd_, kLifeByte + index_, F_UNLCK);
        set_record_lock(fd_, kPresenceByte + index_, F_UNLCK);
        index_ = kNobody;
    }

    // In a forked child: the entry, and the lock that proves it, are the parent's.
    void after_fork_in_child() { index_ = kNobody; }

    bool claimed() const { return index_ != kNobody; }
    uint32_t index() const { return index_; }
    uint64_t token() const { return token_; }
    Participant& own() { return table_[index_]; }
    Table<Participant>& table() { return table_; }

    // Whether the process that had entry i under this token lives. (A process's own locks do not show.) The
    // token was stored with release after the lock was taken: a reader that sees the token finds the lock.
    bool alive(uint32_t i, uint64_t token) {
        if (i == index_) return token == token_;
        return i < table_.size() && load(table_[i].token) == token &&
               others_hold(fd_, kLifeByte + i, 1);
    }
    static bool anybody_else(int fd) { return others_hold(fd, kPresenceByte, 2 * kMaxParticipants); }

    // Under the segment's lock: frees the entries of the dead; `each` is told their tokens first.
    template <class Each>
    void sweep(Each each) {
        for (uint32_t i = 0, top = table_.size(); i < top; ++i) {
            uint64_t token = load(table_[i].token);
            if (token == 0 || alive(i, token)) continue;
            each(token);
            store(table_[i].token, uint64_t{0});
        }
    }

  private:
    int fd_;
    Table<Participant> table_;
    uint32_t index_ = kNobody;
    uint64_t token_ = 0;
};

}  // namespace shmacc
