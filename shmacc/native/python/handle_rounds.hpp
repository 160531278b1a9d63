// A handle's takes and rounds. (Blocks of rounds: round_block.hpp.)
#pragma once

#include "python/columns.hpp"
#include "python/open_handle.hpp"
#include "python/taken_round.hpp"
#include "python/timeline.hpp"

namespace shmacc {

class HandleRounds : public OpenHandle {
  public:
    using OpenHandle::OpenHandle;

    void close(nb::handle error = nb::none()) {
        OpenHandle::close(error, [this](OpenSegment& segment) { give_rounds_up(segment); });
        const KeptRounds dropped = closed() ? std::exchange(kept_, {})
                                            : KeptRounds();  // last, since it may run Python
    }
    // Closes the handle at the end of a process. Leaves the segment even if the process has other handles on it: a
    // forked child has its parent's handles.
    void leave(nb::handle error) {
        if (!segment_) return;
        const std::shared_ptr<OpenSegment> segment = segment_->shared();
        close(error);
        segment->leave();
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
    // Notes that the calling thread or task has the round of `taken`: so it knows the step after that round.
    void note_taken(const RoundResult& taken) { reads_.note_own(taken.read()); }
    // Puts a kept result, which did not reach its caller, in `taken`. Returns whether there was one.
    bool take_kept(RoundResult& taken) { return kept_.pass_on(taken); }
    // Keeps a result that did not reach its caller for this handle's next take of the same sort (taken_round.hpp).
    // Returns whether there was anything to keep.
    bool keep(nb::object taken) { return !closed() && kept_.keep(std::move(taken)); }

    // Hands out the round as `take` would, but keeps it open until `consume_round`; no gradient of its step is accepted
    // meanwhile. The round belongs to this thread, or with a `caller` is offered to the caller's thread.
    void open_round(RoundResult& taken, int64_t num_required, int64_t at_least, std::optional<double> timeout,
                    bool raise_departures, const Caller* caller) {
        const OpenSegment::Use segment = begin_take(num_required);
        HeldRounds::Opening opening(rounds_);
        const auto note = [&] {
            if (taken.serial() == 0) return;
            opening.add(taken.serial(), caller != nullptr);
            // If `close` ran after the take's commit, it did not know of this round.
            if (closed()) give_rounds_up(*segment);
        };
        try {
            take_in(*segment, taken, num_required, at_least, timeout, true, raise_departures, caller);
        } catch (...) {
            note();
            throw;
        }
        note();
    }
    // The calling thread takes over the round that it was offered. Returns false if the round was given up meanwhile.
    bool hold_round(uint64_t serial) { return segment().own_round().hold(serial); }
    // Puts into `taken` what a take would give now.
    void look(RoundResult& taken, std::optional<double> timeout) {
        const int64_t deadline = deadline_after(timeout);
        const OpenSegment::Use segment = attached();
        need_numpy();
        run<Take>([&](Take& act) {
            taken.to_fill(segment->specs()) = std::move(
                act.look(taken.advances(), taken.division(*segment->specs()), deadline).taken);
        });
    }
    // Adds up the pieces of a round. A piece is (parts, numbers, counts, values, count, weight).
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
    // Throws if workers are gone. For a caller that waits for gradients without a take.
    void check_departures() {
        run<Take>([&](Take& act) { act.check_departures(); });
    }
    // Returns whether the round was still open. After an error it stays open, except if its update has begun.
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

    bool holds_round(uint64_t serial) { return !closed() && rounds_.has(serial); }
    void note_update(uint64_t serial) { rounds_.note_update(serial); }

  protected:
    Reads reads_;

  private:
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

    HeldRounds rounds_;
    KeptRounds kept_;  // the GIL guards it
};

}  // namespace shmacc
