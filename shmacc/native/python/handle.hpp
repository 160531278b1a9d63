// The C++ side of one accumulator object: it uses the process's OpenSegment, and can be closed on its own. Python has
// checked all arguments (gradients.py); sizes are checked again here, since memory safety depends on them.
#pragma once

#include <deque>

#include "python/description.hpp"
#include "python/failure_reason.hpp"
#include "python/gradients.hpp"
#include "python/name_lock.hpp"
#include "python/taken_round.hpp"
#include "python/timeline.hpp"
#include "python/write_guard.hpp"

namespace shmacc {

constexpr const char* kLeft = "The operation was cancelled: its caller has left";
constexpr int64_t kSweepPatience = 2000 * kMillisecond;  // a large round may hold the lock for long

// What an apply answered: whether the gradient counts; none: the apply has not ended, or has failed. The apply sets it
// in the call that commits. A returned answer would be lost if a signal handler raised right after the call.
struct Answer {
    std::optional<bool> counts;
};

class Handle {
  private:
    class Waiting : public Interruption {
      public:
        Waiting(WithoutGil& released, const Handle& handle, const Caller* caller = nullptr)
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
        const Handle& handle_;
        const Caller* const caller_;
    };

    // Act: Apply, Take or Step.
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
    // An operation on several handles' segments, which holds none of their locks while it waits.
    template <class Call>
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
    explicit Handle(std::shared_ptr<OpenSegment> segment,
                    std::optional<std::pair<std::string, std::string>> own_names = {})
        : segment_(OpenSegment::for_handle(std::move(segment))), own_names_(std::move(own_names)),
          owns_(own_names_.has_value()) {
        if ((*segment_)->config().kind == kParameters) parameters_.push_back(this);
    }
    ~Handle() {
        parameters_.erase(std::remove(parameters_.begin(), parameters_.end(), this), parameters_.end());
        try {
            close();
        } catch (...) {  // the segment's name may stay: the cleaner removes it
        }
    }

    // error: the exception because of which the process leaves, or None. No Python signal handler can interrupt this
    // half way, since all of it is C++.
    void close(nb::handle error = nb::none()) {
        if (!segment_) return;
        const std::optional<std::string> failure = failure_of(error);
        if (maker_.is_here()) unlink_own_names();
        if (!segment_) return;  // another thread has closed it meanwhile
        closed_ = true;
        if (finishes()) (*segment_)->finish();
        const KeptRounds kept = std::exchange(kept_, {});  // dropped last: that may run Python
        OpenSegment::Use segment = std::move(*segment_);
        segment_.reset();
        if (!segment->file().status().intact) return;
        segment->note_failure(failure);
        // Waits of this handle look at closed_ when woken.
        segment->wait_queue().wake_all();
        segment->wait_queue().announce_progress();
        give_rounds_up(*segment);
    }
    // Closes the handle at the end of a process. Also leaves the segment if the process has other handles on it, as a
    // forked child has its parent's handles.
    void leave(nb::handle error) {
        if (!segment_) return;
        const std::shared_ptr<OpenSegment> segment = segment_->shared();
        close(error);
        segment->leave();
    }
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
    // Not empty: what to raise at each use, since a write to one of this handle's arrays could not be undone.
    const std::shared_ptr<std::string>& spoiled() const { return spoiled_; }
    // Undoes writes to read-only arrays; throws if there were any, to this handle's or others'.
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
    // For an operation: keeps the segment open while another thread closes the handle.
    OpenSegment::Use attached() {
        segment().check_file();
        // In a forked child: note this handle, since at its end the child must leave each one that it has used. This
        // comes first: it runs Python, which may raise, or close the handle.
        if (!(segment_->is_here() && (*segment_)->attached()) && !finalizing()) {
            method(nb::module_::import_("shmacc._segment.exit_hooks"), "used_in_child")(nb::find(this));
            segment().check_file();
        }
        segment_->adopt();
        OpenSegment::Use use = OpenSegment::for_operation(segment_->shared());
        if (!use->attached()) attach_child(*use);
        return use;
    }

    // This process is this contributor: from now on its death or failure is news. It is already, if it has applied.
    void be_contributor(int64_t contributor) {
        Presence& presence = segment().presence();
        if (presence.claimed() && has_applied(presence.own())) return;
        attached()->presence().be_contributor(contributor);
    }
    // terms: see `of_terms`.
    bool apply_sparse(nb::handle indices, nb::handle values, nb::handle counts, bool ascending,
                      int64_t local_step, nb::handle terms) {
        return apply_one<GivenRows>(local_step, terms, indices, values, counts, ascending);
    }
    bool apply_dense(nb::handle values, int64_t local_step, nb::handle terms) {
        return apply_one<GivenArray>(local_step, terms, values);
    }
    // gradients: of distinct members.
    bool apply_group(const nb::list& gradients, int64_t local_step, nb::handle terms, Answer* answer) {
        const OpenSegment::Use segment = attached();
        ApplyRequest request = of_terms(local_step, terms);
        const std::vector<MemberGradient*> members = gradients_of(*segment->specs(), gradients);
        const bool counts = apply(*segment, members.data(), members.size(), request);
        if (answer) answer->counts = counts;
        return counts;
    }
    bool drop_if_stale(int64_t local_step, int64_t gradients, std::optional<double> timeout) {
        ApplyRequest request{local_step, reads_.timeline_of(local_step), gradients, 0, nullptr, 0, {},
                             false,      deadline_after(timeout),        0};
        const bool dropped = run<Apply>([&](Apply& act) { return act.drop_if_stale(request); });
        reads_.told(local_step, request.behind);
        return dropped;
    }
    // Whether a gradient of this step, by the calling thread or task, would be dropped as one of before a restore.
    bool behind(int64_t local_step) const {
        return reads_.timeline_of(local_step) < in_file().round().snapshot().restores;
    }

    // Puts the result in `taken`. A returned result would be lost if a signal handler raised right after the call,
    // since handlers run between bytecodes. If the result does not reach the user, the caller passes it to `keep`.
    void take(RoundResult& taken, int64_t num_required, int64_t at_least, std::optional<double> timeout,
              bool raise_departures) {
        const OpenSegment::Use segment = begin_take(num_required);
        if (!take_kept(taken))
            take_in(*segment, taken, num_required, at_least, timeout, false, raise_departures, nullptr);
        note_taken(taken);
    }
    // The calling thread or task has the round of `taken`, and so knows the step after it.
    void note_taken(const RoundResult& taken) { reads_.note_own(taken.read()); }
    // Puts a kept result, which did not reach its caller, in `taken`. Returns whether there was one.
    bool take_kept(RoundResult& taken) { return kept_.pass_on(taken); }
    // Keeps a result that did not reach its caller for this handle's next take of the same sort. Returns whether there
    // was anything to keep.
    bool keep(nb::object taken) { return !closed_ && kept_.keep(std::move(taken)); }

    // Hands out the round as `take` would, but keeps it, and takes no gradients of its step, until `consume_round`. The
    // round belongs to this thread, or with a `caller` is offered to the caller's thread.
    void open_round(RoundResult& taken, int64_t num_required, int64_t at_least, std::optional<double> timeout,
                    bool raise_departures, const Caller* caller) {
        const OpenSegment::Use segment = begin_take(num_required);
        HeldRounds::Opening opening(rounds_);
        const auto note = [&] {
            if (taken.serial() == 0) return;
            opening.add(taken.serial(), caller != nullptr);
            // If `close` ran after the take's commit, it did not know of this round.
            if (closed_) give_rounds_up(*segment);
        };
        try {
            take_in(*segment, taken, num_required, at_least, timeout, true, raise_departures, caller);
        } catch (...) {
            note();
            throw;
        }
        note();
    }
    // The calling thread takes over the round that it was offered. False: the round was given up meanwhile.
    bool hold_round(uint64_t serial) { return segment().own_round().hold(serial); }
    // Puts what a take would give now in `taken`.
    void look(RoundResult& taken, std::optional<double> timeout) {
        const int64_t deadline = deadline_after(timeout);
        const OpenSegment::Use segment = attached();
        need_numpy();
        run<Take>([&](Take& act) {
            taken.to_fill(segment->specs()) = std::move(
                act.look(taken.advances(), taken.division(*segment->specs()), deadline).taken);
        });
    }
    // Adds up the pieces of a round. A piece is (table, numbers, counts, values, count, weight).
    nb::tuple reduce(const nb::list& pieces, int64_t count, int64_t weight) {
        const OpenSegment::Use segment = attached();
        need_numpy();
        const IncomingPieces incoming(pieces);
        Columns reduced;
        {
            const WithoutGil released;
            reduced = ReducedPieces(*segment->specs(), count, weight).of(incoming.pieces());
        }
        return arrays_of(reduced);
    }
    // For a caller that waits for gradients without a take.
    void check_departures() {
        run<Take>([&](Take& act) { act.check_departures(); });
    }
    // Returns whether the round was still open. After an error it still is, so the caller may try again.
    bool consume_round(uint64_t serial) {
        segment();
        if (!rounds_.has(serial)) return false;
        const bool updated = rounds_.is_updated(serial);
        const bool consumed = run<Take>([&](Take& act) { return act.consume_round(serial, updated); });
        rounds_.remove(serial);
        return consumed;
    }
    // Does nothing if the round has ended.
    void give_up_round(uint64_t serial) {
        if (!segment_ || !rounds_.has(serial)) return;
        rounds_.remove(serial);
        if ((*segment_)->file().status().intact) (*segment_)->give_up_round(serial);
    }

    int64_t set_step(int64_t step, std::optional<double> timeout) {
        const int64_t deadline = deadline_after(timeout);
        const auto [old, timeline] = run<Step>([&](Step& act) { return act.set_step(step, deadline); });
        reads_.note({step, timeline});
        return old;
    }
    int64_t advance_step(int64_t step, std::optional<double> timeout) {
        const int64_t deadline = deadline_after(timeout);
        const auto [dropped, timeline] = run<Step>([&](Step& act) { return act.advance_step(step, deadline); });
        reads_.note({step, timeline});
        return dropped;
    }
    void note_restored(const StepRead& to) { reads_.note(to); }
    bool belong_to(uint64_t parameters) {
        return run<Step>([&](Step& act) { return act.belong_to(parameters); });
    }
    void unseal(std::optional<double> timeout) {
        const int64_t deadline = deadline_after(timeout);
        run<Step>([&](Step& act) { act.unseal(deadline); });
    }
    // These two return the step and its timeline. A thread that waits for a task (caller) gives the task the timeline,
    // and the task says that it has read the step (read_in_thread).
    Step::At wait_step(int64_t after, std::optional<double> timeout, bool raise_departures,
                       const Caller* caller) {
        const int64_t deadline = deadline_after(timeout);
        const Step::At at =
            run<Step>([&](Step& act) { return act.wait_step(after, deadline, raise_departures); }, caller);
        if (!caller) note_read(at);
        return at;
    }
    std::optional<Step::At> next_step(nb::handle last, std::optional<double> timeout, bool raise_departures,
                                      const Caller* caller) {
        std::optional<Step::At> from;
        if (!last.is_none()) from = unpacked<int64_t, uint64_t>(last);
        const int64_t deadline = deadline_after(timeout);
        const std::optional<Step::At> at =
            run<Step>([&](Step& act) { return act.next_step(from, deadline, raise_departures); }, caller);
        if (!at) refuse_other_parameters();
        if (at && !caller) note_read(*at);
        return at;
    }
    // The calling thread or task knows this step, of this timeline, and may compute a gradient at it.
    void note_read(const Step::At& at) noexcept { reads_.note_own({std::get<0>(at), std::get<1>(at)}); }
    void read_in_thread(nb::handle at) { note_read(unpacked<int64_t, uint64_t>(at)); }
    // The last such step; none: there is none.
    std::optional<Step::At> last_read() const {
        const std::optional<StepRead> last = reads_.own();
        if (!last) return {};
        return Step::At(last->step, last->timeline);
    }
    // For a pickle: the newest step that this handle knows, and `last_read`.
    nb::tuple known_steps() const {
        const StepRead newest = reads_.newest();
        return nb::make_tuple(Step::At(newest.step, newest.timeline), last_read());
    }
    void inherit_steps(nb::handle newest, nb::handle last) {
        const auto read = [](nb::handle at) {
            const auto [step, timeline] = unpacked<int64_t, uint64_t>(at);
            return StepRead{step, timeline};
        };
        reads_.note(read(newest));
        if (!last.is_none()) reads_.inherit(read(last));
    }
    int64_t read_step() {
        const RoundState round = in_file().round().snapshot();
        note_read(Step::At(round.step, round.restores));
        return round.step;
    }
    void finish() { attached()->finish(); }
    void keep_free(uint64_t bytes) { store_relaxed(attached()->header().kept_free, bytes); }
    // Ends the call that waits for this caller. The call fails unless it already has what it waited for.
    void end_wait(Caller& caller) {
        caller.leave();
        if (!segment_ || !(*segment_)->file().status().intact) return;  // closed: no call waits any more
        const OpenSegment::Use segment = OpenSegment::for_operation(segment_->shared());
        segment->wait_queue().wake_own();
        segment->wait_queue().announce_progress();
    }
    // Needs no lock: a stopped process must not prevent the cancelling of waiting takes.
    void cancel() {
        const OpenSegment::Use segment = attached();
        segment->wait_queue().cancel();
        segment->events().add(kCancelled, segment->presence().own(), segment->round().snapshot().step);
        segment->wait_queue().announce_progress();
    }

    // An operation on parameters (python/changes.hpp).
    template <class Act, class Call>
    auto update(Call call) {
        return run<Act>(call);
    }
    // Undoes a dead process's unfinished update of the parameters with that token, if this process has them open.
    // Skips a handle that another thread has made but not entered yet, since that has no lock.
    static void recover_parameters(uint64_t token, int64_t deadline) {
        std::vector<nb::object> found;
        for (Handle* handle : parameters_)
            if (!handle->closed_ && (*handle->segment_)->config().token == token &&
                (*handle->segment_)->lanes()[0]->lockable())
                found.push_back(nb::find(handle));
        for (const nb::object& handle : found) {
            Handle& own = *nb::inst_ptr<Handle>(handle);
            try {
                own.run<Update>([&](Update& act) { act.recover(deadline); });
            } catch (const Error&) {
                if (!own.closed_) throw;  // else another thread has closed it meanwhile
            }
        }
    }
    bool holds_round(uint64_t serial) { return !closed_ && rounds_.has(serial); }
    void note_update(uint64_t serial) { rounds_.note_update(serial); }

    int64_t step() const { return in_file().round().snapshot().step; }
    // Whether the run goes on.
    bool running() const {
        if (!finished()) return true;
        refuse_other_parameters();
        return false;
    }
    bool finished() const {
        OpenSegment& segment = in_file();
        return segment.finished(segment.round().snapshot());
    }
    int64_t count() const { return totals(in_file()).count; }

    // -- for handles.py ------------------------------------------------------------------------
    // Attaches. False: the segment was unlinked, or the name now leads to another one; start over.
    bool enter(const std::string& path, const std::string& semaphore_path) {
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
        if (!has_arrays(segment.config().kind)) note_opened(segment);
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

    // From now on this handle has the duty to remove these names, or takes it over from a process that is dead, now or
    // when this handle is closed: whoever goes on with its run ends it. Not from one that lives, and not if the segment
    // was made to stay (Header::keeper). Needs a handle that has entered.
    // inherits: if not, only the maker's handle notes that it has the duty.
    void keep_names(const std::string& path, const std::string& semaphore_path, bool inherits) {
        intact();
        if (!inherits && !own_names_) return;
        take_duty_over(*OpenSegment::for_operation(segment_->shared()), true);
        own_names_.emplace(path, semaphore_path);
    }

  private:
    void refuse_spoiled() const {
        if (!spoiled_->empty()) throw Error(Failure::kFailedPrecondition, *spoiled_);
    }
    // The loop of a finished run ends without an error. But if this process has parameters that the run did not train,
    // new ones beside the group of an earlier run, they would stay untrained and nobody would be told. They count as such
    // if the run belongs to others that this process does not have, and they are of an earlier step.
    void refuse_other_parameters() const {
        if (!segment_ || closed_) return;
        OpenSegment& segment = **segment_;
        const RoundState round = segment.round().snapshot();
        const uint64_t trained = round.final.parameters;
        if (!trained) return;
        const Handle* other = nullptr;
        for (const Handle* handle : parameters_) {
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
    static bool share_a_member(const OpenSegment& one, const OpenSegment& other) {
        if (one.config().kind != kGroup) return true;
        for (uint32_t i = 0; i < one.config().members; ++i)
            for (uint32_t j = 0; j < other.config().members; ++j)
                if ((*one.specs())[i].name == (*other.specs())[j].name) return true;
        return false;
    }
    // For OpenSegment::fail. A forked child that has not used its parent's handle is not attached: it must not report
    // its own exception as its parent's.
    std::optional<std::string> failure_of(nb::handle error) {
        OpenSegment& segment = **segment_;
        segment.after_fork();
        const Presence& presence = segment.presence();
        return reason_of(error, presence.claimed() ? presence.token() : 0);
    }
    // Whether closing this handle finishes the run: if it removes the names, nobody can take any more. Only the
    // creator's handle does so, not a forked child's. The names are removed first: if the process dies in between, no
    // name must lead to a finished run.
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
    void note_opened(OpenSegment& segment) {
        try {
            const RoundState round = segment.round().snapshot();
            reads_.note({round.step, round.restores});
        } catch (const Error&) {  // it is damaged, which its operations will say
        }
    }
    // Applies a gradient of the only member; Given makes it of these arrays, without an object of Python.
    template <template <class> class Given, class... Arrays>
    bool apply_one(int64_t local_step, nb::handle terms, const Arrays&... arrays) {
        const OpenSegment::Use segment = attached();
        const MemberSpecs& specs = *segment->specs();
        ApplyRequest request = of_terms(local_step, terms);
        return with_sum_type(specs.front().sum, [&](auto zero) {
            Given<decltype(zero)> given(0, request.count, request.weight, arrays...);
            check_fits(given, specs);
            MemberGradient* const gradient = &given;
            return apply(*segment, &gradient, 1, request);
        });
    }
    bool apply(OpenSegment& segment, MemberGradient* const* members, size_t member_count,
               ApplyRequest& request) {
        request.members = members;
        request.member_count = member_count;
        request.timeline = reads_.timeline_of(request.local_step);
        const bool added = apply_without_gil(segment, request);
        if (!added) reads_.told(request.local_step, request.behind);
        return added;
    }
    bool apply_without_gil(OpenSegment& segment, ApplyRequest& request) {
        WithoutGil released;
        for (size_t i = 0; i < request.member_count; ++i) request.members[i]->sort();
        return run_in<Apply>(segment, released, [&](Apply& act) { return act.apply(request); });
    }

    OpenSegment::Use begin_take(int64_t num_required) {
        OpenSegment::Use segment = attached();
        rounds_.refuse_in_round();
        need_numpy();  // before something is taken, since this may fail for lack of memory
        if (num_required > segment->config().capacity)
            throw Error(Failure::kInvalidArgument,
                        "num_required is " + std::to_string(num_required) + ", but the capacity is " +
                            std::to_string(segment->config().capacity) + ": it would never be reached");
        return segment;
    }
    void take_in(OpenSegment& segment, RoundResult& taken, int64_t num_required, int64_t at_least,
                 std::optional<double> timeout, bool hold, bool raise_departures, const Caller* caller) {
        const Division* const division = taken.division(*segment.specs());
        const ThreadNumber loop = caller ? caller->thread() : kNoThread;
        const TakeRequest request{num_required, at_least,         deadline_after(timeout),
                                  division,     taken.advances(), taken.seals(),
                                  hold,         raise_departures, loop};
        run<Take>([&](Take& act) { act.take(request, taken.to_fill(segment.specs())); }, caller);
    }

    void give_rounds_up(OpenSegment& segment) {
        while (const uint64_t serial = rounds_.pop()) segment.give_up_round(serial);
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
    // Frees the entries of dead processes. False: the lock stayed taken for `patience` nanoseconds.
    bool sweep(OpenSegment& segment, int64_t patience) {
        WithoutGil released;
        Waiting waiting(released, *this);
        LaneSession session(segment, std::nullopt, false, monotonic_ns() + patience, waiting);
        if (session.held()) segment.wait_queue().sweep();
        return session.held();
    }
    static inline std::vector<Handle*> parameters_;  // handles of parameters; the GIL guards it

    HeldRounds rounds_;
    Reads reads_;
    KeptRounds kept_;  // the GIL guards it
    std::optional<OpenSegment::Use> segment_;
    std::atomic<bool> closed_{false};
    std::optional<std::pair<std::string, std::string>> own_names_;  // to be removed by whichever process has the duty
    bool owns_;  // whether this handle has the duty
    const Origin maker_;
    const std::shared_ptr<std::string> spoiled_ = std::make_shared<std::string>();
};

}  // namespace shmacc
