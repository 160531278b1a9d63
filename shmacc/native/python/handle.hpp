// The C++ side of one accumulator object: it uses the process's OpenSegment, and can be closed on its own. Python has
// checked all arguments (gradient_checks.py); sizes are checked again here, since memory safety depends on them.
#pragma once

#include "python/gradients.hpp"
#include "python/handle_rounds.hpp"

namespace shmacc {

// The answer of an apply: whether the gradient counts; nullopt: the apply has not ended, or has failed. The apply sets
// it in the call that commits. A returned answer would be lost if a signal handler raised right after the call.
struct Answer {
    std::optional<bool> counts;
};

class Handle : public HandleRounds {
  public:
    using HandleRounds::HandleRounds;
    ~Handle() {
        withdraw();
        try {
            close();
        } catch (...) {  // the segment's name may stay: the cleaner removes it
        }
    }

    // Does OpenHandle::enter; from now on the step counts as known (timeline.hpp).
    bool enter(const std::string& path, const std::string& semaphore_path) {
        if (!OpenHandle::enter(path, semaphore_path)) return false;
        if (!has_arrays(segment().config().kind)) note_opened(segment());
        return true;
    }

    // Names this process's contributor: from now on its death or failure ends waits, as if it had applied.
    void be_contributor(int64_t contributor) {
        Presence& presence = in_file().presence();
        if (presence.claimed() && has_applied(presence.own())) return;
        attached()->presence().be_contributor(contributor);
    }
    // Sets a function to call once: at this object's first gradient with kNeverStale that is not added, since the round
    // had its contributor already. It gets that contributor, and must not refer to this object.
    void on_repeat(nb::object call) { on_repeat_ = std::move(call); }

    // terms: see `of_terms`.
    bool apply_sparse(nb::handle indices, nb::handle values, nb::handle counts, bool ascending,
                      int64_t local_step, nb::handle terms) {
        return apply_one<GivenRows>(local_step, terms, indices, values, counts, ascending);
    }
    bool apply_dense(nb::handle values, int64_t local_step, nb::handle terms) {
        return apply_one<GivenArray>(local_step, terms, values);
    }
    // gradients: at most one of each member.
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
    // Whether a gradient of this step, by the calling thread or task, would be dropped because a restore came after it.
    bool behind(int64_t local_step) const {
        return reads_.timeline_of(local_step) < in_file().round().snapshot().restores;
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
    // These two return the step and its timeline, and note that they were read. But if a thread waits on behalf of a
    // task (`caller`), it notes nothing: the task does (read_in_thread).
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
    // Notes that the calling thread or task knows this step and its timeline, and may compute a gradient at it.
    void note_read(const Step::At& at) noexcept { reads_.note_own({std::get<0>(at), std::get<1>(at)}); }
    void read_in_thread(nb::handle at) { note_read(unpacked<int64_t, uint64_t>(at)); }
    // Returns the last step that the calling thread or task has read; nullopt: it has read none.
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
    void keep_free(uint64_t bytes) { store_relaxed(attached()->header().kept_free, kept_word(bytes)); }
    // Ends the call that waits on behalf of `caller`. The call fails unless it already has what it waited for.
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
    int64_t step() const { return in_file().round().snapshot().step; }
    // Whether the run goes on. Throws if it is finished, and new parameters would stay untrained.
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

  private:
    void note_opened(OpenSegment& segment) {
        try {
            const RoundState round = segment.round().snapshot();
            reads_.note({round.step, round.restores});
        } catch (const Error&) {  // the segment is damaged: its operations will report that
        }
    }
    // Applies a gradient of the only member. Given makes the gradient of these arrays, without a Python object.
    template <template <class> class Given, class... Arrays>
    bool apply_one(int64_t local_step, nb::handle terms, const Arrays&... arrays) {
        const OpenSegment::Use segment = attached();
        const MemberSpecs& specs = *segment->specs();
        ApplyRequest request = of_terms(local_step, terms);
        return with_sums(specs.front(), [&](auto sums) {
            Given<decltype(sums)> given(0, request.count, request.weight, arrays...);
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
        if (request.repeated && request.local_step == kNeverStale && !on_repeat_.is_none())
            called(std::exchange(on_repeat_, nb::none()),
                   checked(PyLong_FromLongLong(request.contributors.front())));
        return added;
    }
    bool apply_without_gil(OpenSegment& segment, ApplyRequest& request) {
        WithoutGil released;
        for (size_t i = 0; i < request.member_count; ++i) request.members[i]->sort();
        return run_in<Apply>(segment, released, [&](Apply& act) { return act.apply(request); });
    }

    nb::object on_repeat_ = nb::none();
};

inline void OpenHandle::note_object() { object_.find(static_cast<const Handle*>(this)); }

}  // namespace shmacc
