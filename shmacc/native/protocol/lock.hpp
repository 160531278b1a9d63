// A lane's lock: its holder may write the lane's data; a process that holds all lanes' locks may write what
// they share.
//
// The kernel decides: the owner is the process that holds the POSIX record lock on one byte of the segment's
// own file. The kernel drops the lock when the process ends, however it ends, and at no other time; pids play
// no part, so pid namespaces and reused pids cannot mislead it (sgl-project/sglang#28089); a process that is
// merely stopped keeps it.
//
// In front of the record lock is a named semaphore, which is a hint and nothing more: it lets waiters sleep until
// a release instead of spinning on the record lock, and its value proves nothing (a killed process would keep it:
// posix_ipc#53, python/cpython#88304). To acquire the lane, a process
// waits for a permit of the semaphore, at most for a slice of time. Then it tries the record lock, even without
// a permit; if it gets the record lock, it owns the lane. If not, its permit is thrown away. To release the lane,
// the owner drops the record lock, then makes sure that there is a permit.
//
//   Invariant: a process that writes to committed state holds the record lock.
//   Progress:  if no process holds the record lock, then either there is a permit, or every waiter's slice
//              ends within kSlice and one of them gets the lock; its release makes a permit.
//
// Each instant of death:
//   after the semaphore, before the record lock   the permit is lost; slices end; the next release
//                                                 finds the value 0 and posts.
//   holding the record lock                       the kernel drops it; as above. The next owner undoes what
//                                                 was half written (commit.hpp).
//   after the record lock, before the post        as in the first case.
// Two releasers may both see 0 and both post: the value is 2 then. The next process that takes a permit but
// fails to get the record lock uses up the surplus permit.
//
// Memory order. On every machine an owner sees all stores of the last owner: dropping a record lock and setting
// one both change the kernel's list of the file's locks under a spinlock, whose release follows the stores of
// the last owner and whose acquire precedes the loads of the next. The same holds if the kernel drops the lock
// of a killed process, which it does after every thread of the process has executed its last instruction and
// given up the open files in the kernel. Between the threads of one process the mutex orders them. The
// semaphore and the words of fairness are hints and need no order.
//
// Fairness. A critical section usually lasts microseconds; to sleep and wake takes tens of microseconds. So a
// process without a permit spins briefly before it sleeps. But then a process that applies in a loop would
// always be faster than one that must wake up first. A process that was passed over for a millisecond therefore
// asks (Fairness::asked), and the next release keeps others off for as long as a sleeper takes to wake. This
// decides only which process tries first, never which process owns the lock. It expires by itself, whichever
// process dies and whatever the words contain.
//
// Rejected: a robust process-shared mutex (it trusts the bytes of the segment, and thread ids across pid
// namespaces); open-file-description locks (a forked child shares them, and so keeps the lock of a dead
// parent); an owner's pid next to the semaphore (it is wrong for the instants before it is written).
//
// Record locks belong to a process. Hence threads first wait for a mutex of their own process, and a forked
// child starts with a fresh mutex. Closing any other descriptor of the file would drop the lock;
// segment_file.hpp prevents that.
#pragma once

#include <fcntl.h>
#include <semaphore.h>

#include <algorithm>
#include <chrono>
#include <mutex>
#include <new>

#include "base/assertions.hpp"
#include "base/clock.hpp"
#include "base/errors.hpp"
#include "base/layout.hpp"
#include "base/segment_file.hpp"
#include "base/words.hpp"

namespace shmacc {

// Sets or drops the record lock on a byte. Returns false if another process holds the lock, or if the descriptor is not
// the segment's any more, which callers see from SegmentFile::status. After any other error, such as a lack of memory
// for a lock (ENOLCK), locking throws: false would mean that another process holds the lock. Unlocking tries until
// there is memory: a process that gave up would keep others out for as long as it lives.
inline bool set_record_lock(int fd, int64_t byte, short type) {
    struct flock lock{};
    lock.l_type = type;
    lock.l_whence = SEEK_SET;
    lock.l_start = byte;
    lock.l_len = 1;
    while (fcntl(fd, F_SETLK, &lock) != 0) {
        if (errno == EINTR) continue;
        if (errno == EAGAIN || errno == EACCES || errno == EBADF) return false;
        if (type != F_UNLCK) system_failure("Locking a byte of the segment", errno);
        if (errno != ENOLCK) return false;
        const timespec moment{0, kMillisecond};
        nanosleep(&moment, nullptr);
    }
    return true;
}

// Whether another process holds a record lock in [first, first + count). *pid: the holder's pid in this process's pid
// namespace (0: it has none there).
inline bool others_hold(int fd, int64_t first, int64_t count, int* pid = nullptr) {
    struct flock lock{};
    lock.l_type = F_WRLCK;
    lock.l_whence = SEEK_SET;
    lock.l_start = first;
    lock.l_len = count;
    while (fcntl(fd, F_GETLK, &lock) != 0)  // a failed call proves neither that a process lives nor that it is dead
        if (errno != EINTR) system_failure("Asking who holds a lock", errno == ENOMEM ? ENOLCK : errno);
    if (lock.l_type == F_UNLCK) return false;
    if (pid) *pid = std::max(0, static_cast<int>(lock.l_pid));
    return true;
}

class Lock {
  public:
    static constexpr int64_t kSlice = 20 * kMillisecond;

    // byte: the byte of the file whose record lock is this lock.
    Lock(const SegmentFile& file, int64_t byte, sem_t* queue, Fairness& fairness)
        : file_(file), fd_(file.fd()), byte_(byte), queue_(queue), fairness_(fairness) {}

    enum class Acquired { kNot, kAtOnce, kAfterWaiting };

    // Returns kNot if the deadline (monotonic; kForever: none) passed.
    Acquired acquire(int64_t deadline, Interruption& interruption) {
        const auto how = threads_.try_lock() ? Acquired::kAtOnce : Acquired::kAfterWaiting;
        if (how != Acquired::kAtOnce && !queue_with_threads(deadline, interruption)) return Acquired::kNot;
        // The caller has just checked the file; after a wait for the mutex, `usable` checks it again.
        if ((how == Acquired::kAtOnce || usable()) && permit_at_once() && record_lock()) return how;
        const int64_t since = monotonic_ns();
        // The first slices are short: if the permit died with its owner, one of them ends soon.
        for (int64_t slice = kMillisecond;; slice = std::min(2 * slice, kSlice)) {
            wait_for_permit(deadline, slice);  // until a permit, the end of a slice, or a signal
            const auto [open, intact, named] = file_.status();
            if (open && record_lock()) {
                if (intact) store(fairness_.keep_off_ns, int64_t{0});
                return Acquired::kAfterWaiting;
            }
            if (intact && monotonic_ns() - since >= kMillisecond) store(fairness_.asked, uint64_t{1});
            // `check` below may run a signal handler that uses this accumulator: this thread must not hold the
            // mutex then.
            threads_.unlock();
            file_.check_open();
            if (!intact) data_loss("its file was truncated");
            if (past(deadline)) return Acquired::kNot;
            interruption.check();
            if (!queue_with_threads(deadline, interruption)) return Acquired::kNot;
        }
    }

    // Acquires the lock if that needs no wait; returns whether it did.
    bool try_acquire() {
        if (!threads_.try_lock()) return false;
        if (load(fairness_.keep_off_ns) == 0 && sem_trywait(queue_) == 0 && record_lock()) return true;
        threads_.unlock();
        return false;
    }

    // intact: whether the file still has its full length. If not, its pages are gone and must not be touched.
    void release(bool intact = true) {
        SHMACC_ASSERT(is_mine());
        store_relaxed(holder_, pthread_t());
        if (intact && load(fairness_.asked)) {
            store(fairness_.asked, uint64_t{0});
            store(fairness_.keep_off_ns, monotonic_ns() + kComing);
        }
        set_record_lock(fd_, byte_, F_UNLCK);
        int value = 0;
        if (sem_getvalue(queue_, &value) == 0 && value <= 0) sem_post(queue_);
        threads_.unlock();
    }

    // Call in a forked child, where the parent's threads, which may have locked the mutex, do not exist.
    void after_fork_in_child() {
        new (&threads_) std::timed_mutex;
        holder_ = pthread_t();
    }

    // Whether this thread holds the lock.
    bool is_mine() const { return load_relaxed(holder_) == pthread_self(); }

    int queue_value() const {
        int value = 0;
        sem_getvalue(queue_, &value);
        return value;
    }

  private:
    bool usable() const {
        const SegmentFile::Status file = file_.status();
        return file.open && file.intact;
    }
    // Returns false if the deadline passed. Holds no lock while it checks for interruptions.
    bool queue_with_threads(int64_t deadline, Interruption& interruption) {
        while (!threads_.try_lock_for(std::chrono::nanoseconds(slice_until(deadline, kSlice)))) {
            if (past(deadline)) return false;
            interruption.check();
        }
        return true;
    }
    // Needs the threads' mutex, and unlocks it if the kernel cannot answer.
    bool record_lock() {
        try {
            SHMACC_ASSERT(load_relaxed(holder_) == pthread_t());
            if (!set_record_lock(fd_, byte_, F_WRLCK)) return false;
            store_relaxed(holder_, pthread_self());
            return true;
        } catch (...) {
            threads_.unlock();
            throw;
        }
    }
    static int64_t slice_until(int64_t deadline, int64_t slice) {
        if (deadline == kForever) return slice;
        return std::clamp<int64_t>(deadline - monotonic_ns(), 0, slice);
    }
    void wait_for_permit(int64_t deadline, int64_t slice) {
        int64_t until = monotonic_ns() + slice_until(deadline, slice);
        timespec when{static_cast<time_t>(until / 1000000000), static_cast<long>(until % 1000000000)};
        sem_clockwait(queue_, CLOCK_MONOTONIC, &when);
    }

    bool permit_at_once() {
        if (load(fairness_.keep_off_ns) == 0 && sem_trywait(queue_) == 0) return true;
        for (const int64_t since = monotonic_ns();;) {
            for (int i = 0; i < 16; ++i) relax();
            const int64_t now = monotonic_ns();
            // A time too far ahead is damage: it must keep no process from the lock.
            const int64_t keep_off = load(fairness_.keep_off_ns);
            const bool kept_off = keep_off > now && keep_off - now <= kComing;
            if (!kept_off && queue_value() > 0 && sem_trywait(queue_) == 0) {
                if (keep_off != 0) store(fairness_.keep_off_ns, int64_t{0});
                return true;
            }
            if (now - since >= (kept_off ? kLook + kComing : kLook)) return false;
        }
    }
    static void relax() {
#ifdef __SSE2__
        __builtin_ia32_pause();
#endif
    }

    static constexpr int64_t kLook = 20000;  // nanoseconds: as long as one or two small applies take
    static constexpr int64_t kComing = 100000;  // nanoseconds: as long as a wake-up in a virtual machine takes

    const SegmentFile& file_;
    const int fd_;
    const int64_t byte_;
    sem_t* queue_;
    Fairness& fairness_;
    std::timed_mutex threads_;
    pthread_t holder_{};
};

}  // namespace shmacc
