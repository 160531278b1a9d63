// A segment as one process has it open: the parts put together, and the way into the lock.
//
// There is one Core for each process and segment, shared by all handles and threads. It is open while a handle
// or an operation uses it, and closed with the last of them: the process is no longer attached then. Uses are
// counted apart from the pointers to it: in a forked child the pointers on the stacks of the parent's other
// threads are never given up, and operations that those threads had begun are not the child's.
//
// How a segment comes to its name and leaves it is opening.hpp's.
#pragma once

#include <cctype>
#include <exception>
#include <memory>
#include <optional>

#include "buffer.hpp"
#include "line.hpp"
#include "rows.hpp"
#include "semaphore.hpp"

namespace shmacc {

class Core {
  public:
    // The process's Core on this file, if it has one that is open. With the GIL.
    static std::shared_ptr<Core> of(const SegmentFile& file) {
        auto core = file.core.lock();
        if (!core || !core->is_open()) return nullptr;
        core->after_fork();
        return core;
    }
    // The same, made if there is none.
    static std::shared_ptr<Core> on(const std::shared_ptr<SegmentFile>& file, const Config& config) {
        auto core = of(*file);
        if (!core) file->core = core = std::make_shared<Core>(file, config);
        return core;
    }

    Core(std::shared_ptr<SegmentFile> file, const Config& config)
        : config_(config), mapping_(std::make_unique<Mapping>(std::move(file))),
          header_(reinterpret_cast<Header*>(mapping_->at_least(kHeaderRegion, kHeaderBytes))),
          committed_(header_, *mapping_, config_), presence_(*mapping_, header_),
          line_(*mapping_, header_, presence_) {}

    Core(const Core&) = delete;
    Core& operator=(const Core&) = delete;
    ~Core() {
        if (is_open()) close();  // it never came to be used
    }

    // A reason to stay open: a handle, or an operation that runs. Made and destroyed with the GIL.
    class Use {
      public:
        Use(std::shared_ptr<Core> core, uint32_t Core::*count) : core_(std::move(core)), count_(count) {
            core_->after_fork();
            ++((*core_).*count_);
        }
        Use(Use&& other) noexcept = default;
        Use& operator=(Use&&) = delete;
        ~Use() {
            if (!core_) return;
            // An operation that goes on in a forked child, out of a signal handler that has forked, is not
            // counted there any more.
            if (count_ == &Core::operations_ && !origin_.is_here()) return;
            core_->after_fork();
            --((*core_).*count_);
            if (core_->handles_ == 0 && core_->operations_ == 0) core_->close();
        }
        Core& operator*() const { return *core_; }
        Core* operator->() const { return core_.get(); }
        const std::shared_ptr<Core>& shared() const { return core_; }

      private:
        std::shared_ptr<Core> core_;
        uint32_t Core::*count_;
        Origin origin_;
    };
    static Use for_handle(std::shared_ptr<Core> core) { return Use(std::move(core), &Core::handles_); }
    static Use for_operation(std::shared_ptr<Core> core) { return Use(std::move(core), &Core::operations_); }

    bool is_open() const { return mapping_ != nullptr; }

    // With the GIL, before anything else is done with a Core that this process may have from its parent.
    void after_fork() {
        if (of_generation_ == fork_generation) return;
        of_generation_ = fork_generation;
        operations_ = 0;
        attached_ = false;
        presence_.after_fork_in_child();
        mapping_->after_fork_in_child();
        if (lock_) lock_->after_fork_in_child();
    }

    // The semaphore in front of the lock. Whoever finds it missing makes it, if it would have the segment's
    // owner; others do without, which costs them waits of up to Lock::kSlice.
    void open_semaphore(const std::string& path) {
        const struct stat segment = mapping_->file().status();
        const bool may_make = geteuid() == segment.st_uid || geteuid() == 0;
        if (lock_) {  // this process keeps the one it has, with or without a name
            if (may_make && access(path.c_str(), F_OK) != 0 && errno == ENOENT)
                NamedSemaphore::make(path, config_.mode, segment.st_uid);
            return;
        }
        for (int attempt = 0;; ++attempt) {
            switch (semaphore_.open(path, config_.mode, segment.st_uid)) {
                case NamedSemaphore::Found::kOpened: break;
                case NamedSemaphore::Found::kMissing:
                    if (attempt < kSemaphoreAttempts && may_make) {
                        NamedSemaphore::make(path, config_.mode, segment.st_uid);
                        continue;
                    }
                    semaphore_.use_own();
                    break;
                case NamedSemaphore::Found::kAnothers:
                    throw Error(Failure::kPermissionDenied,
                                path + " is not of the segment's owner, uid " + std::to_string(segment.st_uid) +
                                    "; remove it, and the next process that attaches makes it anew");
                case NamedSemaphore::Found::kNoSemaphore:
                    if (attempt < kSemaphoreAttempts && unlink(path.c_str()) == 0) continue;
                    data_loss(path + " is no semaphore, and cannot be removed: " + std::strerror(errno));
            }
            break;
        }
        lock_ = std::make_unique<Lock>(*mapping_, semaphore_.get(), header_->courtesy);
    }

    // Makes the process one of those attached, if it is none yet. If all places are taken, by the dead or
    // by the living, it says so; what the dead have is free after a sweep.
    Presence::Claim claim() {
        return presence_.claimed() ? Presence::Claim::kDone : presence_.claim(this_process());
    }

    // Whether the process has a presence, and has looked again since (opening.hpp).
    bool attached() const { return attached_; }
    void now_attached() { attached_ = true; }

    // The lock, held, with everything in order: what an operation works on.
    class Session {
      public:
        Session(Core& core, int64_t deadline, Interruption& interruption)
            : core_(core) {
            const auto how = core.lock_->acquire(deadline, interruption);
            held_ = how != Lock::Acquired::kNot;
            if (!held_) return;
            try {
                // Checked by the caller at the start; much may have happened while waiting.
                if (how == Lock::Acquired::kAfterWaiting) core_.check_file();
                state = core_.committed_.current();
                core_.mapping_->limit(state);
                if (core_.committed_.cut_short(state)) core_.undo(state, 1);
                before = state;
            } catch (...) {
                core_.lock_->release(core_.mapping_->file().state().whole);
                throw;
            }
        }
        ~Session() { release(); }
        Session(const Session&) = delete;
        Session& operator=(const Session&) = delete;

        bool held() const { return held_; }
        void commit() {
            core_.committed_.commit(state);
            give_back(*core_.mapping_, before, state);
        }
        // Takes back what was changed in place by an operation that gives up.
        void roll_back() {
            State committed = core_.committed_.current();
            if (core_.committed_.cut_short(committed)) core_.undo(committed, 0);
            give_back(*core_.mapping_, state, committed);
        }
        void release() {
            if (held_) core_.lock_->release();
            held_ = false;
        }

        State state;   // to be changed, then committed
        State before;  // as committed when the lock was acquired

      private:
        Core& core_;
        bool held_ = false;
    };

    // For what is put in order on the way out: an error may be that the file was truncated.
    bool reachable() const { return std::uncaught_exceptions() == 0 || mapping_->file().state().whole; }
    // Before anything mapped is touched: a truncated file's pages are gone.
    void check_whole() const {
        if (mapping_->file().status().st_size != static_cast<off_t>(kFileSize))
            data_loss("its file was truncated");
    }
    // The same, and NotFoundError if the name was taken away from under its users.
    void check_file() const {
        const struct stat found = mapping_->file().status();
        if (found.st_size != static_cast<off_t>(kFileSize)) data_loss("its file was truncated");
        load_barrier();  // a name that is gone: was the segment marked before? (mark_given_up)
        if (found.st_nlink == 0 && !load(header_->unlinked))
            throw Error(Failure::kNotFound,
                        "The segment was removed under its users (systemd's RemoveIPC does that at "
                        "logout; so does `rm`, and `shmacc-inspect clean` if nobody was left but forked "
                        "children that had not used it yet); processes that attach from now on would not "
                        "meet it");
    }

    uint64_t row_bytes(const State& state) const {
        return state.row_elements * sum_bytes(config_.sum);
    }

    Header& header() { return *header_; }
    // As it was when the segment was opened, and checked.
    const Config& config() const { return config_; }
    Mapping& mapping() { return *mapping_; }
    Committed& committed() { return committed_; }
    Presence& presence() { return presence_; }
    Line& line() { return line_; }
    Lock* lock() { return lock_.get(); }
    SegmentFile& file() { return mapping_->file(); }

  private:
    static constexpr int kSemaphoreAttempts = 8;  // it may be removed again while it is being opened

    // With the descriptor the kernel drops what record locks are left.
    void close() {
        presence_.leave(mapping_->file().state());
        lock_.reset();
        mapping_.reset();
    }

    void undo(State& state, uint64_t deaths) {
        committed_.undo(state, config().kind == kSparse ? row_bytes(state) : 0, deaths);
    }

    const Config config_;
    std::unique_ptr<Mapping> mapping_;
    Header* header_;
    Committed committed_;
    Presence presence_;
    Line line_;
    NamedSemaphore semaphore_;
    std::unique_ptr<Lock> lock_;
    uint64_t of_generation_ = fork_generation;
    bool attached_ = false;
    uint32_t handles_ = 0;
    uint32_t operations_ = 0;
};

}  // namespace shmacc
