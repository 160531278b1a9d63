// A segment that this process has open.
//
// There is one OpenSegment for each process and segment, shared by all handles and threads. It is open while
// a handle or an operation uses it. The last use closes it; the process is no longer attached then.
// Uses are counted separately from the pointers to the OpenSegment: in a forked child the pointers on the stacks
// of the parent's other threads are never destroyed, and operations that those threads had begun are not the
// child's. The parent's handles are not the child's either, until the child uses them: they keep the segment open,
// but do not keep the child attached. The child leaves with the last handle that it has opened or used.
//
// How a segment gets its name and loses it: opening.hpp.
#pragma once

#include <atomic>
#include <cctype>
#include <exception>
#include <memory>
#include <optional>

#include "protocol/recovery.hpp"
#include "protocol/semaphore.hpp"
#include "protocol/wait_queue.hpp"
#include "segment/caller.hpp"

namespace shmacc {

class OpenSegment {
  public:
    // Returns the process's OpenSegment on this file; null if it has none that is open. Needs the GIL.
    static std::shared_ptr<OpenSegment> of(const SegmentFile& file) {
        auto segment = file.open_segment.lock();
        if (!segment || !segment->is_open()) return nullptr;
        segment->after_fork();
        return segment;
    }
    // Returns the process's OpenSegment, as above, but opens the segment if this process has not.
    static std::shared_ptr<OpenSegment> on(const std::shared_ptr<SegmentFile>& file, const Config& config,
                                           MemberSpecs specs) {
        auto segment = of(*file);
        if (!segment)
            file->open_segment = segment = std::make_shared<OpenSegment>(file, config, std::move(specs));
        return segment;
    }

    OpenSegment(const std::shared_ptr<SegmentFile>& file, const Config& config, MemberSpecs specs)
        : config_(config), specs_(std::make_shared<const MemberSpecs>(std::move(specs))),
          mapping_(std::make_unique<Mapping>(file, 0, kFixedRegions)),
          header_(*reinterpret_cast<Header*>(mapping_->at_least(kHeaderRegion, kHeaderBytes))),
          states_(mapping_->at_least(kStatesRegion, bytes_of_states(config_))),
          round_(header_.generation, header_.state, &reinterpret_cast<LaneHeader*>(states_)->generation),
          events_(*file, header_), presence_(*mapping_, header_), departures_(*mapping_, header_, presence_),
          wait_queue_(*mapping_, header_, round_, presence_, departures_, events_), known_heads_(config.lanes) {
        for (uint32_t i = 0; i < config_.lanes; ++i)
            lanes_.push_back(
                std::make_unique<Lane>(file, config_, *specs_, i, states_ + i * bytes_of_lane(config_)));
        file->kept_free = &header_.kept_free;
    }

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
            ++segment_->users_;
        }
        Use(Use&& other) noexcept = default;
        Use& operator=(Use&&) = delete;
        ~Use() {
            if (!segment_) return;
            // A signal handler may fork in the middle of an operation. The child returns into that operation,
            // but does not count it any more.
            if (count_ == &OpenSegment::operations_ && !origin_.is_here()) return;
            segment_->after_fork();
            --((*segment_).*count_);
            if (origin_.is_here()) --segment_->users_;
            if (segment_->handles_ == 0 && segment_->operations_ == 0)
                segment_->close();
            else if (segment_->users_ == 0)
                segment_->leave();
        }
        // Whether this process has made or used the handle. False in a forked child until it uses its parent's.
        bool is_here() const { return origin_.is_here(); }
        // Call before a handle is used: in a forked child, the parent's handle becomes the child's.
        void adopt() {
            segment_->after_fork();
            if (origin_.is_here()) return;
            origin_ = Origin();
            ++segment_->users_;
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

    // In a forked child, resets what is the parent's. Needs the GIL. Call before any other use of an
    // OpenSegment that may come from the parent.
    void after_fork() {
        if (of_generation_ == fork_generation) return;
        of_generation_ = fork_generation;
        operations_ = users_ = 0;
        attached_ = failed_ = false;
        ending_ = false;
        own_round_.give_up();
        presence_.after_fork_in_child();
        mapping_->after_fork_in_child();
        for (const auto& lane : lanes_) lane->after_fork_in_child();
    }

    // Opens the semaphores in front of the lanes' locks. If they are missing, this process makes them, provided
    // that they would belong to the segment's owner. A process that may not make them uses private ones; its waits can
    // take up to Lock::kSlice longer.
    void open_semaphore(const std::string& path) {
        const struct stat file = mapping_->file().attributes();
        const bool may_make = geteuid() == file.st_uid || geteuid() == 0;
        if (lanes_[0]->lockable()) {  // this process has semaphores; makes missing ones for others
            if (may_make && access(path.c_str(), F_OK) != 0 && errno == ENOENT)
                NamedSemaphore::make(path, config_.lanes, config_.mode, file.st_uid);
            return;
        }
        for (int attempt = 0;; ++attempt) {
            switch (semaphores_.open(path, config_.lanes, config_.mode, file.st_uid)) {
                case NamedSemaphore::Found::kOpened: break;
                case NamedSemaphore::Found::kMissing:
                    if (attempt < kSemaphoreAttempts && may_make) {
                        NamedSemaphore::make(path, config_.lanes, config_.mode, file.st_uid);
                        continue;
                    }
                    semaphores_.use_own(config_.lanes);
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
        for (uint32_t i = 0; i < config_.lanes; ++i) lanes_[i]->use(semaphores_.get(i));
    }

    // Attaches the process, if it is not attached yet. Presence::Claim::kFull: all entries are taken, by living or
    // dead processes; a sweep frees those of the dead.
    Presence::Claim claim() {
        return presence_.claimed() ? Presence::Claim::kDone : presence_.claim(this_process());
    }

    // Detaches a process that ends without closing all its handles. The next operation, if there is one, attaches it
    // again. While another thread's operation runs, other processes are only told that this one is ending: it may end
    // before that thread runs again.
    void leave() {
        if (!is_open()) return;
        if (operations_ > 0) {
            if (mapping_->file().status().intact) presence_.announce_end(failed_);
            return;
        }
        presence_.leave(mapping_->file().status(), failed_);
        attached_ = failed_ = false;
    }
    // The last handle that was closed determines how the process leaves. reason: why the process failed; "": the reason
    // was recorded before; nullopt: the process has not failed.
    void note_failure(const std::optional<std::string>& reason) {
        failed_ = reason.has_value();
        if (!reason || reason->empty() || !presence_.claimed()) return;
        departures_.note_failure(*reason);
        events_.add_failure(presence_.own(), round_.snapshot().step, *reason);
    }

    // Whether the process is attached, and has made the second check since (opening.hpp).
    bool attached() const { return attached_; }
    void now_attached() { attached_ = true; }

    // Whether cleanup may touch the segment: not if an error is being thrown because the file was truncated.
    bool reachable() const { return std::uncaught_exceptions() == 0 || mapping_->file().status().intact; }
    // Call before anything mapped is touched: a truncated file's pages are gone.
    struct stat check_intact() const {
        const struct stat found = mapping_->file().attributes();
        if (found.st_size != static_cast<off_t>(file_size(config_))) data_loss("its file was truncated");
        return found;
    }
    // Does what check_intact does, and throws NotFoundError if the name was removed while in use (systemd#2039).
    void check_file() const {
        const struct stat found = check_intact();
        load_barrier();  // if the name is gone, a mark made before is seen (mark_given_up)
        if (found.st_nlink == 0 && !load(header_.unlinked))
            throw Error(Failure::kNotFound,
                        "The segment was removed under its users (systemd's RemoveIPC does that at "
                        "logout; so does `rm`, and `shmacc-inspect clean` if the only users left were "
                        "forked children that had not used it yet); processes that attach from now on get "
                        "another segment");
    }

    // With all lanes' locks: gives back pages that no commit records. A process that dies while it reserves memory
    // leaves such pages: it has not begun yet (Lane::begin), so recovery does not look for them. What the file occupies
    // besides the recorded sizes is known only roughly (the fixed regions grow, too), so this acts only after that has
    // grown by more than Lane::kSpare. Allocates nothing, since it follows a commit. lanes: the states of all lanes.
    void give_unrecorded_back(const LaneState* lanes) {
        SHMACC_ASSERT(has_all_locks());
        if (!file().status().intact) return;
        uint64_t recorded = 0;
        for (size_t i = 0; i < lanes_.size(); ++i) recorded += lanes_[i]->recorded(lanes[i]);
        const auto besides = [&] { return file().occupied() - std::min(file().occupied(), recorded); };
        if (besides() > besides_recorded_ + Lane::kSpare)
            for (size_t i = 0; i < lanes_.size(); ++i)
                if (!lanes_[i]->mapping().punch_unrecorded(
                        [&](uint32_t region) { return lanes_[i]->recorded(lanes[i], region); }))
                    return;  // the next look tries again
        besides_recorded_ = besides();
    }

    Header& header() { return header_; }
    // The values as read and checked when the segment was opened.
    const Config& config() const { return config_; }
    const std::shared_ptr<const MemberSpecs>& specs() const { return specs_; }
    Committed<RoundState>& round() { return round_; }
    // Needs all lanes' locks.
    void commit(RoundState& state) {
        SHMACC_ASSERT(has_all_locks());
        round_.commit(state);
    }
    bool has_all_locks() const {
        return std::all_of(lanes_.begin(), lanes_.end(),
                           [](const auto& lane) { return lane->lock().is_mine(); });
    }
    std::vector<std::unique_ptr<Lane>>& lanes() { return lanes_; }
    Events& events() { return events_; }
    Presence& presence() { return presence_; }
    WaitQueue& wait_queue() { return wait_queue_; }
    Departures& departures() { return departures_; }
    OwnRound& own_round() { return own_round_; }
    // Whether nothing is accepted or taken any more. `finish` stores a number greater than that of all restores
    // so far. So a restore, which is one commit, makes the segment usable again, and a slow finish does not end
    // what was restored meanwhile. `finish` needs no lock, since a stopped process may hold one. An operation
    // that has just missed the store, under a lock, counts as earlier than the finish.
    bool finished(const RoundState& round) const {
        return !ending_ && load(header_.finished) > round.restores;
    }
    void finish() {
        const RoundState round = round_.snapshot();
        for (uint64_t seen = load(header_.finished); seen <= round.restores;) {
            if (!__atomic_compare_exchange_n(&header_.finished, &seen, round.restores + 1, false,
                                             __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
                continue;
            if (presence_.claimed()) events_.add(kFinished, presence_.own(), round.step);
            break;
        }
        wait_queue_.wake_all();
        wait_queue_.announce_progress();
    }
    // Does what `finish` does, when this process ends. Its own threads, which may still work, do not see it: they would
    // raise errors while the interpreter shuts down.
    void finish_for_others() {
        ending_ = true;
        finish();
    }
    // Gives up this process's round; the step reopens unchanged. One store, which needs no lock and
    // cannot fail; serials only grow.
    void give_up_round(uint64_t serial) {
        if (!presence_.claimed()) return;
        SHMACC_ASSERT(serial != 0);
        uint64_t& given_up = presence_.own().given_up;
        for (uint64_t seen = load(given_up); seen < serial;)
            if (__atomic_compare_exchange_n(&given_up, &seen, serial, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
                break;
        wait_queue_.announce_progress();
        wait_queue_.wake_head();
    }
    // Needs the lane's lock. Undoes what an uncommitted operation left; returns the current state. If this process
    // dies before it writes the event, LaneState::recoveries still counts the recovery. A process that has no
    // participant's entry yet, and sweeps because all are taken, writes no event.
    LaneState recovered(uint32_t lane) {
        SHMACC_ASSERT(lanes_[lane]->lock().is_mine());
        LaneState state = lanes_[lane]->current();
        if (lanes_[lane]->interrupted(state)) {
            recover(*lanes_[lane], state, 1);
            if (presence_.claimed()) events_.add(kRecovered, presence_.own(), round_.snapshot().step);
        }
        return state;
    }
    // Needs the lane's lock.
    uint32_t living_head(uint32_t lane) { return wait_queue_.living_head(known_heads_[lane]); }
    // The lane that this process's applies try first.
    uint32_t last_lane() {
        const uint32_t last = load_relaxed(last_lane_);
        return last == kNoLane ? presence_.index() % config_.lanes : last;
    }
    void set_last_lane(uint32_t lane) { store_relaxed(last_lane_, lane); }
    SegmentFile& file() { return mapping_->file(); }

  private:
    static constexpr uint32_t kNoLane = UINT32_MAX;

    static constexpr int kSemaphoreAttempts = 8;  // another process may remove it while it is being opened

    // The kernel drops the remaining record locks with the descriptor.
    void close() {
        presence_.leave(mapping_->file().status(), failed_);
        mapping_->file().kept_free = nullptr;
        lanes_.clear();
        mapping_.reset();
    }

    const Config config_;
    const std::shared_ptr<const MemberSpecs> specs_;
    std::unique_ptr<Mapping> mapping_;
    Header& header_;
    unsigned char* const states_;
    Committed<RoundState> round_;
    Events events_;
    Presence presence_;
    Departures departures_;
    uint64_t besides_recorded_ = 0;  // bytes, when give_unrecorded_back last looked
    WaitQueue wait_queue_;
    OwnRound own_round_;
    std::vector<WaitQueue::Known> known_heads_;
    NamedSemaphore semaphores_;
    std::vector<std::unique_ptr<Lane>> lanes_;
    uint32_t last_lane_ = kNoLane;
    uint64_t of_generation_ = fork_generation;
    bool attached_ = false;
    bool failed_ = false;
    std::atomic<bool> ending_{false};
    uint32_t handles_ = 0;
    uint32_t operations_ = 0;
    uint32_t users_ = 0;  // handles and operations that are this process's own
};

}  // namespace shmacc
