// Steps 1 and 4 of an update (update.hpp): the marks that it stores in the accumulator's round.
#pragma once

#include "segment/session.hpp"

namespace shmacc {

// The open round of an accumulator, which its update makes final.
class UpdatedRound {
  public:
    UpdatedRound(OpenSegment& segment, uint64_t serial, const OpenSegment& parameters)
        : segment_(segment), serial_(serial), parameters_(parameters.config()) {}

    // Makes the round final. is_in: the parameters have its update already. Returns false if a lane stayed busy.
    bool begin(bool is_in) {
        Uninterrupted uninterrupted;
        HeldLocks locks(segment_);
        if (!locks.acquire_all(monotonic_ns() + HeldLocks::kSlice, uninterrupted)) return false;
        RoundState state = current();
        if (state.holder.serial != serial_ || !round_is_open(segment_.presence(), state))
            throw Error(Failure::kFailedPrecondition,
                        "The round was ended before its update: by advance_step, set_global_step or restore, "
                        "which do not wait for it");
        if (state.final.serial == serial_ && (is_in || state.final.phase == kUpdateIn))
            throw Error(Failure::kFailedPrecondition,
                        "This block has made its update, or skipped it: a round has one");
        if (const uint64_t of = state.final.parameters; of && of != parameters_.token)
            throw Error(
                Failure::kFailedPrecondition,
                "The accumulator '" + name_of(segment_.config()) + "' belongs to other parameters than '" +
                    name_of(parameters_) + "': update those. If they were replaced or removed, its step, " +
                    std::to_string(state.step) +
                    ", and its gradients are of those: make both new (if_exists=\"replace\"), or load a "
                    "checkpoint of both");
        commit(state, is_in ? kUpdateIn : kUpdateBegun);
        return true;
    }
    // Notes in the round that its update is in. If a lane is busy until the deadline, the round still says that the
    // update has begun, as after a death between 3 and 4. But this process remembers that the update is in
    // (HeldRounds), so it can end the block.
    void note_in(int64_t deadline, Interruption& interruption) {
        is_in_ = true;
        HeldLocks locks(segment_);
        if (!locks.acquire_all(deadline, interruption)) return;
        RoundState state = current();
        if (state.holder.serial == serial_) commit(state, kUpdateIn);
    }
    bool is_in() const { return is_in_; }

  private:
    // Needs all lanes' locks. Allocates nothing, since it does not read the lanes' states.
    RoundState current() {
        segment_.round().settle();
        return segment_.round().current();
    }
    void commit(RoundState& state, FinalPhase phase) {
        SHMACC_ASSERT(state.holder.serial == serial_ && phase != kNotFinal);
        if (state.final.phase == kNotFinal) state.final.since_ns = timestamp_ns();
        state.final.phase = phase;
        state.final.serial = serial_;
        state.final.pid = segment_.presence().own().pid;
        state.final.parameters = parameters_.token;
        segment_.commit(state);
    }

    OpenSegment& segment_;
    const uint64_t serial_;
    const Config& parameters_;
    bool is_in_ = false;
};

}  // namespace shmacc
