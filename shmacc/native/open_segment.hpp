// A segment as one process has it open: its parts, and the way to acquire the lock.
//
// There is one OpenSegment for each process and segment, shared by all handles and threads. It is open while
// a handle or an operation uses it, and closed with the last of them: the process is no longer attached then.
// Uses are counted separately from the pointers to it: in a forked child the pointers on the stacks of the
// parent's other threads are never destroyed, and operations that those threads had begun are not the
// child's.
//
// How a segment gets its name and loses it: opening.hpp.
#pragma once

#include <cctype>
#include <exception>
#include <memory>
#include <optional>

#include "buffer.hpp"
#include "rows.hpp"
#include "semaphore.hpp"
#include "wait_queue.hpp"

namespace shmacc {

class OpenSegment {
  public:
    // The process's OpenSegment on this file, if it has one that is open. With the GIL.
    static std::shared_ptr<OpenSegment> of(const SegmentFile& file) {
        auto segment = file.open_segment.lock();
        if (!segment || !segment->is_open()) return nullptr;
        segment->after_fork();
        return segment;
    }
    // The same, made if there is none.
    static std::shared_ptr<OpenSegment> on(const std::shared_ptr<SegmentFile>& file, const Config& config) {
        auto segment = of(*file);
        if (!segment) file->open_segment = segment = std::make_shared<OpenSegment>(file, config);
        return segment;
    }

    OpenSegment(std::shared_ptr<SegmentFile> file, const Config& config)
        : config_(config), mapping_(std::make_unique<Mapping>(std::move(file))),
          header_(reinterpret_cast<Header*>(mapping_->at_least(kHeaderRegion, kHeaderBytes))),
          committed_(header_, *mapping_, config_), presence_(*mapping_, header_),
          wait_queue_(*mapping_, header_, presence_) {}

    OpenSegment(const OpenSegment&) = delete;
    OpenSegment& operator=(const OpenSegment&) = delete;
    ~OpenSegment() {
        if (is_open()) close();  // it was never used
    }

    // Keeps the segment open: for a handle, or an operation that runs. Made and destroyed with the GIL.
    class Use {
      public:
        Use(std::shared_ptr<OpenSegment> segment, uint32_t OpenSegment::* count)
            : segment_(std::move(segment)), count_(count) {
            segment_->after_fork();
            ++((*segment_).*count_);
        }
        Use(Use&& other) noexcept = default;
        Use& operator=(Use&&) = delete;
        ~Use() {
            if (!segment_) return;
            // An operation that a forked child returns to, out of a signal handler that has forked, is no
            // longer counted in the child.
            if (count_ == &OpenSegment::operations_ && !origin_.is_here()) return;
            segment_->after_fork();
            --((*segment_).*count_);
            if (segment_->handles_ == 0 && segment_->operations_ == 0) segment_->close();
        }
        OpenSegment& operator*() const { return *segment_; }
        OpenSegment* operator->() const { return segment_.get(); }
        const std::shared_ptr<OpenSegment>& shared() const { return segment_; }

      private:
        std::shared_ptr<OpenSegment> segment_;
        uint32_t OpenSegment::* count_;
        Origin origin_;
    };
    static Use for_handle(std::shared_ptr<OpenSegment> segment) {
        return Use(std::move(segment), &OpenSegment::handles_);
    }
    static Use for_operation(std::shared_ptr<OpenSegment> segment) {
        return Use(std::move(segment), &OpenSegment::operations_);
    }

    bool is_open() const { return mapping_ != nullptr; }

    // With the GIL, before any other use of an OpenSegment that this process may have from its parent.
    void after_fork() {
        if (of_generation_ == fork_generation) return;
        of_generation_ = fork_generation;
        operations_ = 0;
        attached_ = false;
        presence_.after_fork_in_child();
        mapping_->after_fork_in_child();
        if (lock_) lock_->after_fork_in_child();
    }

    // Opens the semaphore in front of the lock. If it is missing, this process makes it, provided that it
    // would belong to the segment's owner; otherwise the process does without, and its waits may take up to
    // Lock::kSlice longer.
    void open_semaphore(const std::string& path) {
        const struct stat file = mapping_->file().status();
        const bool may_make = geteuid() == file.st_uid || geteuid() == 0;
        if (lock_) {  // this process keeps the one it has, with or without a name
            if (may_make && access(path.c_str(), F_OK) != 0 && errno == ENOENT)
                NamedSemaphore::make(path, config_.mode, file.st_uid);
            return;
        }
        for (int attempt = 0;; ++attempt) {
            switch (semaphore_.open(path, config_.mode, file.st_uid)) {
                case NamedSemaphore::Found::kOpened: break;
                case NamedSemaphore::Found::kMissing:
                    if (attempt < kSemaphoreAttempts && may_make) {
                        NamedSemaphore::make(path, config_.mode, file.st_uid);
                        continue;
                    }
                    semaphore_.use_own();
                    break;
                case NamedSemaphore::Found::kAnothers:
                    throw Error(Failure::kPermissionDenied,
                                path + " does not belong to the segment's owner, uid " +
                                    std::to_string(file.st_uid) +
                                    "; remove it, and the next process that attaches makes a new one");
                case NamedSemaphore::Found::kNoSemaphore:
                    if (attempt < kSemaphoreAttempts && unlink(path.c_str()) == 0) continue;
                    data_loss(path + " is not a semaphore and cannot be removed: " + std::strerror(errno));
            }
            break;
        }
        lock_ = std::make_unique<Lock>(*mapping_, semaphore_.get(), header_->fairness);
    }

    // Attaches the process, if it is not attached yet. The result is Presence::Claim::kFull if all entries
    // are taken, by the dead or by the living; entries of the dead are free after a sweep.
    Presence::Claim claim() {
        return presence_.claimed() ? Presence::Claim::kDone : presence_.claim(this_process());
    }

    // Whether the process has a presence, and has made the second check since (opening.hpp).
    bool attached() const { return attached_; }
    void now_attached() { attached_ = true; }

    // Holds the lock, with the state recovered: an operation works on this.
    class Session {
      public:
        Session(OpenSegment& segment, int64_t deadline, Interruption& interruption) : segment_(segment) {
            const auto how = segment.lock_->acquire(deadline, interruption);
            held_ = how != Lock::Acquired::kNot;
            if (!held_) return;
            try {
                // The caller checked at the start; after a wait the file may have changed.
                if (how == Lock::Acquired::kAfterWaiting) segment_.check_file();
                state = segment_.committed_.current();
                segment_.mapping_->limit(state);
                if (segment_.committed_.interrupted(state)) segment_.recover(state, 1);
                before = state;
            } catch (...) {
                segment_.lock_->release(segment_.mapping_->file().state().intact);
                throw;
            }
        }
        ~Session() { release(); }
        Session(const Session&) = delete;
        Session& operator=(const Session&) = delete;

        bool held() const { return held_; }
        void commit() {
            segment_.committed_.commit(state);
            give_back(*segment_.mapping_, before, state);
        }
        // Undoes the changes in place of an operation that fails.
        void roll_back() {
            State committed = segment_.committed_.current();
            if (segment_.committed_.interrupted(committed)) segment_.recover(committed, 0);
            give_back(*segment_.mapping_, state, committed);
        }
        void release() {
            if (held_) segment_.lock_->release();
            held_ = false;
        }

        State state;  // to be changed, then committed
        State before;  // as committed when the lock was acquired

      private:
        OpenSegment& segment_;
        bool held_ = false;
    };

    // Whether cleanup may touch the segment: the error on the way out may be that the file was truncated.
    bool reachable() const { return std::uncaught_exceptions() == 0 || mapping_->file().state().intact; }
    // Before anything mapped is touched: a truncated file's pages are gone.
    void check_intact() const {
        if (mapping_->file().status().st_size != static_cast<off_t>(kFileSize))
            data_loss("its file was truncated");
    }
    // The same, and NotFoundError if the name was removed while in use.
    void check_file() const {
        const struct stat found = mapping_->file().status();
        if (found.st_size != static_cast<off_t>(kFileSize)) data_loss("its file was truncated");
        load_barrier();  // a name that is gone: was the segment marked before? (mark_given_up)
        if (found.st_nlink == 0 && !load(header_->unlinked))
            throw Error(Failure::kNotFound,
                        "The segment was removed under its users (systemd's RemoveIPC does that at "
                        "logout; so does `rm`, and `shmacc-inspect clean` if the only users left were "
                        "forked children that had not used it yet); processes that attach from now on get "
                        "another segment");
    }

    uint64_t row_bytes(const State& state) const { return state.row_elements * sum_bytes(config_.sum); }

    Header& header() { return *header_; }
    // As it was when the segment was opened, and checked.
    const Config& config() const { return config_; }
    Mapping& mapping() { return *mapping_; }
    Committed& committed() { return committed_; }
    Presence& presence() { return presence_; }
    WaitQueue& wait_queue() { return wait_queue_; }
    Lock* lock() { return lock_.get(); }
    SegmentFile& file() { return mapping_->file(); }

  private:
    static constexpr int kSemaphoreAttempts = 8;  // it may be removed again while it is being opened

    // The kernel drops the remaining record locks with the descriptor.
    void close() {
        presence_.leave(mapping_->file().state());
        lock_.reset();
        mapping_.reset();
    }

    void recover(State& state, uint64_t deaths) {
        committed_.recover(state, config().kind == kSparse ? row_bytes(state) : 0, deaths);
    }

    const Config config_;
    std::unique_ptr<Mapping> mapping_;
    Header* header_;
    Committed committed_;
    Presence presence_;
    WaitQueue wait_queue_;
    NamedSemaphore semaphore_;
    std::unique_ptr<Lock> lock_;
    uint64_t of_generation_ = fork_generation;
    bool attached_ = false;
    uint32_t handles_ = 0;
    uint32_t operations_ = 0;
};

}  // namespace shmacc
