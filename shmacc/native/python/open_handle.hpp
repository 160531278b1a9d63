// A handle's segment: how it is attached, used, waited in, named, and left.
#pragma once

#include <deque>

#include "accumulators/apply.hpp"
#include "accumulators/step.hpp"
#include "accumulators/take.hpp"
#include "parameters/update.hpp"
#include "python/description.hpp"
#include "python/failure_reason.hpp"
#include "python/interpreter.hpp"
#include "python/name_lock.hpp"
#include "python/write_guard.hpp"

namespace shmacc {

constexpr const char* kLeft = "The operation was cancelled: its caller has left";
constexpr int64_t kSweepPatience = 2000 * kMillisecond;  // a large round may hold the lock for long

class OpenHandle {
  protected:
    class Waiting : public Interruption {
      public:
        Waiting(WithoutGil& released, const OpenHandle& handle, const Caller* caller = nullptr)
            : released_(released), handle_(handle), caller_(caller) {}
        void check() override {
            released_.check_signals();
            if (caller_ && caller_->has_left()) throw Error(Failure::kCancelled, kLeft);
            if (handle_.closed_)
                throw Error(Failure::kCancelled,
                            "The operation was cancelled: its accumulator's handle was closed");
        }
        // `close` and `end_wait` wake the wait; a signal does only if it comes to this thread.
        bool ends_sleep() const override { return released_.signals_come_here(); }

      private:
        WithoutGil& released_;
        const OpenHandle& handle_;
        const Caller* const caller_;
    };

    // Act: a class of operations, such as Apply, Take or Update.
    template <class Act, class Call>
    auto run(Call call, const Caller* caller = nullptr) {
        const OpenSegment::Use segment = attached();
        try {
            WithoutGil released;
            return run_in<Act>(*segment, released, call, caller);
        } catch (const Error& error) {
            if (error.failure() == Failure::kFinished) refuse_other_parameters();
            throw;
        }
    }
    template <class Act, class Call>
    auto run_in(OpenSegment& segment, WithoutGil& released, Call call, const Caller* caller = nullptr) {
        Waiting waiting(released, *this, caller);
        Act act(segment, waiting);
        try {
            return call(act);
        } catch (const Error& error) {
            if (error.failure() == Failure::kFinished)
                waiting.check();  // if closing this handle has finished the accumulator, report that
            throw;
        }
    }

  public:
    // Runs an operation on the segments of several handles. The operation must hold none of their locks while it waits.
    template <class Handle, class Call>
    static void run_on(const std::vector<Handle*>& handles, Call call) {
        WithoutGil released;
        class All : public Interruption {
          public:
            void check() override {
                for (Waiting& each : waits) each.check();
            }
            bool ends_sleep() const override { return waits.front().ends_sleep(); }
            std::deque<Waiting> waits;
        } all;
        for (const Handle* handle : handles) all.waits.emplace_back(released, *handle);
        call(all);
    }

    // own_names: the paths of segment and semaphore, if `close` shall remove them (private, or unlink_on_close).
    explicit OpenHandle(std::shared_ptr<OpenSegment> segment,
                        std::optional<std::pair<std::string, std::string>> own_names = {})
        : segment_(OpenSegment::for_handle(std::move(segment))), own_names_(std::move(own_names)),
          owns_(own_names_.has_value()) {
        if ((*segment_)->config().kind == kParameters) parameters_.push_back(this);
    }
    OpenHandle(const OpenHandle&) = delete;
    OpenHandle& operator=(const OpenHandle&) = delete;

    // For a process that ends while its threads still work: tells others that it has left, and closes nothing.
    void announce_end(nb::handle error) {
        if (!segment_) return;
        if (maker_.is_here()) unlink_own_names();
        if (finishes()) (*segment_)->finish_for_others();
        if (!segment_ || !(*segment_)->file().status().intact) return;
        const std::optional<std::string> failure = failure_of(error);
        if (!segment_) return;  // failure_of runs Python, and another thread has closed the handle
        (*segment_)->note_failure(failure);
        (*segment_)->presence().announce_end(failure.has_value());
    }
    bool closed() const { return closed_; }

    // The segment of this handle. The GIL guards the pointer.
    OpenSegment& segment() const {
        if (!segment_) throw Error(Failure::kFailedPrecondition, "The accumulator's handle is closed");
        refuse_spoiled();
        (*segment_)->after_fork();
        return **segment_;
    }
    // If not empty: the error that each use raises, since a write to one of this handle's arrays could not be undone.
    const std::shared_ptr<std::string>& spoiled() const { return spoiled_; }
    // Undoes writes to the read-only arrays of all handles; throws if there were any.
    void check_writes() const {
        if (const auto error = undo_writes()) throw *error;
        if (!closed_) refuse_spoiled();
    }
    OpenSegment& intact() const {
        segment().check_intact();
        return segment();
    }
    OpenSegment& in_file() const {
        segment().check_file();
        return segment();
    }
    // Returns a use for an operation: it keeps the segment open, even if another thread closes the handle.
    OpenSegment::Use attached() {
        segment().check_file();
        // In a forked child: note this handle, since a child that ends must leave each handle that it has used. Do this
        // first: it runs Python, which may raise, or close the handle.
        if (!(segment_->is_here() && (*segment_)->attached()) && !finalizing()) {
            note_object();
            called(method(imported("shmacc._segment.exit_hooks"), "used_in_child"), object_.get());
            segment().check_file();
        }
        segment_->adopt();
        OpenSegment::Use use = OpenSegment::for_operation(segment_->shared());
        if (!use->attached()) attach_child(*use);
        return use;
    }

    // Attaches. Returns false if the segment was unlinked, or the name now leads to another one; then start over.
    bool enter(const std::string& path, const std::string& semaphore_path) {
        note_object();
        intact();
        const OpenSegment::Use use = OpenSegment::for_operation(segment_->shared());
        OpenSegment& segment = *use;
        try {
            segment.open_semaphore(semaphore_path);
            claim(segment);
            if (!with_name_lock(segment.file(), true, [&] { return look_again(segment, path, semaphore_path); }))
                return false;
        } catch (...) {
            // open_semaphore may have made a semaphore after another process had removed the segment and its names:
            // nobody else would remove it.
            const SegmentFile::Status file = segment.file().status();
            if (file.open && !file.named) ::unlink(semaphore_path.c_str());
            throw;
        }
        sweep(segment, 0);
        return true;
    }
    void unlink(const std::string& path, const std::string& semaphore_path) {
        if (!segment_ || spoiled_->empty()) segment();
        const OpenSegment::Use use = OpenSegment::for_operation(segment_->shared());
        unlink_names(use->file(), path, semaphore_path, false, true);
        own_names_.reset();
    }
    bool unlinked() const { return load(intact().header().unlinked) != 0; }

    nb::dict config() const { return describe_config(segment()); }
    nb::dict state() const { return describe_state(intact()); }
    uint32_t mode() const { return segment().file().attributes().st_mode & 07777u; }
    uint32_t owner() const { return segment().file().attributes().st_uid; }

    // Gives this handle the duty to remove these names when it is closed. While another process that lives has the
    // duty, this handle does not get it, but asks again when it is closed. So the process that continues a dead one's
    // run also removes the names. Nobody has the duty if the segment was made to stay (Header::keeper). Needs a handle
    // that has entered. inherits: whether a handle that has not made the segment may get the duty.
    void keep_names(const std::string& path, const std::string& semaphore_path, bool inherits) {
        intact();
        if (!inherits && !own_names_) return;
        std::pair names(path, semaphore_path);  // first: without memory nothing has changed
        take_duty_over(*OpenSegment::for_operation(segment_->shared()), true);
        own_names_ = std::move(names);
    }

    // Undoes a dead process's unfinished update of the parameters with that token, if this process has them open.
    // Skips a handle that another thread has made but not entered yet, since it has no lock, and one that Python is
    // destroying.
    static void recover_parameters(uint64_t token, int64_t deadline) {
        std::vector<std::pair<OpenHandle*, nb::object>> found;  // the object keeps the handle alive
        for (OpenHandle* handle : parameters_)
            if (!handle->closed_ && (*handle->segment_)->config().token == token &&
                (*handle->segment_)->lanes()[0]->lockable())
                if (nb::object object = handle->object_.get(); object.is_valid())
                    found.emplace_back(handle, std::move(object));
        for (const auto& [handle, object] : found) {
            try {
                handle->run<Update>([&](Update& act) { act.recover(deadline); });
            } catch (const Error&) {
                if (!handle->closed_) throw;  // else another thread has closed it meanwhile
            }
        }
    }

  protected:
    // Closes the handle, and then calls give_up(segment) if the segment is not damaged. error: the exception because of
    // which the process leaves, or None. All of it is C++, so no Python signal handler can interrupt it half way.
    template <class GiveUp>
    void close(nb::handle error, GiveUp give_up) {
        if (!segment_) return;
        const std::optional<std::string> failure = failure_of(error);
        if (maker_.is_here()) unlink_own_names();
        if (!segment_) return;  // another thread has closed it meanwhile
        closed_ = true;
        if (finishes()) (*segment_)->finish();
        OpenSegment::Use segment = std::move(*segment_);
        segment_.reset();
        if (!segment->file().status().intact) return;
        segment->note_failure(failure);
        // Waits of this handle look at closed_ when woken.
        segment->wait_queue().wake_all();
        segment->wait_queue().announce_progress();
        give_up(*segment);
    }
    // Removes this handle from `parameters`.
    void withdraw() {
        parameters_.erase(std::remove(parameters_.begin(), parameters_.end(), this), parameters_.end());
    }
    // The loop of a finished run ends without an error. But if a program attaches to the group of an earlier run and
    // makes new parameters, these would stay untrained, and nobody would notice: so this throws. Parameters of this
    // process count as new if they are at an earlier step than the run, and the run has trained parameters that this
    // process does not have.
    void refuse_other_parameters() const {
        if (!segment_ || closed_) return;
        OpenSegment& segment = **segment_;
        const RoundState round = segment.round().snapshot();
        const uint64_t trained = round.final.parameters;
        if (!trained) return;
        const OpenHandle* other = nullptr;
        for (const OpenHandle* handle : parameters_) {
            if (handle->closed_) continue;
            OpenSegment& parameters = **handle->segment_;
            if (parameters.config().token == trained) return;
            if (parameters.round().snapshot().step < round.step && share_a_member(segment, parameters))
                other = handle;
        }
        if (other)
            throw Error(Failure::kFailedPrecondition,
                        "The accumulator '" + name_of(segment.config()) + "' is finished, at step " +
                            std::to_string(round.step) + ", and has trained other parameters than '" +
                            name_of((*other->segment_)->config()) + "', which are at step " +
                            std::to_string((*other->segment_)->round().snapshot().step) +
                            " and would stay untrained: make both new (if_exists=\"replace\"), or load a "
                            "checkpoint of both");
    }

    std::optional<OpenSegment::Use> segment_;  // nullopt: closed

  private:
    void refuse_spoiled() const {
        if (!spoiled_->empty()) throw Error(Failure::kFailedPrecondition, *spoiled_);
    }
    static bool share_a_member(const OpenSegment& one, const OpenSegment& other) {
        if (one.config().kind != kGroup) return true;
        for (uint32_t i = 0; i < one.config().members; ++i)
            for (uint32_t j = 0; j < other.config().members; ++j)
                if ((*one.specs())[i].name == (*other.specs())[j].name) return true;
        return false;
    }
    // For OpenSegment::note_failure. A forked child that has not used its parent's handle is not attached: it must not
    // report its own exception as its parent's.
    std::optional<std::string> failure_of(nb::handle error) {
        OpenSegment& segment = **segment_;
        segment.after_fork();
        const Presence& presence = segment.presence();
        return reason_of(error, presence.claimed() ? presence.token() : 0);
    }
    // Whether closing this handle finishes the run: if it removes the names, nobody can take any more. Only the
    // creator's handle does so, not a forked child's. The names are removed before the run is finished: at no instant
    // may a name lead to a finished run.
    bool finishes() const {
        return segment_ && owns_ && maker_.is_here() && !has_arrays((*segment_)->config().kind) &&
               (*segment_)->file().status().intact;
    }
    void take_duty_over(OpenSegment& segment, bool with_signals) {
        with_name_lock(segment.file(), with_signals, [&] {
            Presence& presence = segment.presence();
            const uint64_t keeper = load(segment.header().keeper);
            bool vacant = keeper != kNotKept;
            presence.for_each([&](uint32_t i, uint64_t token) {
                if (token == keeper && presence.alive(i, token)) vacant = false;
                return vacant;
            });
            if (!vacant) return;
            owns_ = true;
            store(segment.header().keeper, presence.token());
        });
    }
    void unlink_own_names() {
        if (!own_names_) return;
        const auto [path, semaphore_path] = *own_names_;
        const OpenSegment::Use segment = OpenSegment::for_operation(segment_->shared());
        if (!owns_ && segment->file().status().intact) take_duty_over(*segment, false);
        if (!owns_) return;
        if (segment->file().status().open) {
            unlink_names(segment->file(), path, semaphore_path, false, false);
        } else if (segment->file().is_at(path)) {  // other code has closed its descriptor
            const auto reopened = SegmentFile::open(path, SegmentFile::Access::kWrite, std::nullopt);
            if (reopened && reopened->id() == segment->file().id())
                unlink_names(*reopened, path, semaphore_path, false, false);
        }
        own_names_.reset();  // only now: after an error the caller can try again
    }
    // Attaches a forked child, in its first operation; see opening.hpp.
    void attach_child(OpenSegment& segment) {
        claim(segment);
        with_name_lock(segment.file(), true, [&] {
            segment.check_file();
            segment.now_attached();
        });
    }
    void claim(OpenSegment& segment) {
        const auto claimed = segment.claim();
        if (claimed == Presence::Claim::kDoneBesideDead) sweep(segment, 0);
        if (claimed != Presence::Claim::kFull) return;
        const bool swept = sweep(segment, kSweepPatience);
        if (segment.claim() == Presence::Claim::kFull)
            throw Error(Failure::kResourceExhausted,
                        "All " + std::to_string(kMaxParticipants) + " entries for processes are in use" +
                            (swept
                                 ? ""
                                 : "; a process keeps the lock, so those of dead processes cannot be freed"));
    }
    // Frees the entries of dead processes. Returns false if the lock stayed taken for `patience` nanoseconds.
    bool sweep(OpenSegment& segment, int64_t patience) {
        WithoutGil released;
        Waiting waiting(released, *this);
        LaneSession session(segment, std::nullopt, false, monotonic_ns() + patience, waiting);
        if (session.held()) segment.wait_queue().sweep();
        return session.held();
    }
    void note_object();

    static inline std::vector<OpenHandle*> parameters_;  // handles of parameters; the GIL guards it

    std::atomic<bool> closed_{false};
    std::optional<std::pair<std::string, std::string>> own_names_;  // to be removed by whichever process has the duty
    bool owns_;  // whether this handle has the duty
    OwnObject object_;
    const Origin maker_;
    const std::shared_ptr<std::string> spoiled_ = std::make_shared<std::string>();
};

}  // namespace shmacc
