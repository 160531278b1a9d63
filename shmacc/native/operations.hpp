// What can be done to an accumulator: each operation is one stay under the lock, without any Python in it
// (no signal handler, finaliser or thread switch can come between), ended by a commit.
#pragma once

#include <cstdlib>
#include <optional>

#include "place.hpp"

namespace shmacc {

// A stopped process may hold the lock for ever; a call with a deadline still gets a look at the lock.
constexpr int64_t kLockPatience = 100 * kMillisecond;

inline int64_t lock_deadline(int64_t deadline) {
    return deadline == kForever ? kForever : std::max(deadline, monotonic_ns() + kLockPatience);
}

struct FreeDeleter {
    void operator()(void* memory) const { std::free(memory); }
};

// Memory handed out to the caller. Plain malloc, which keeps up to 32 MiB of freed memory for the next take;
// large pieces ask for huge pages, since faults are what a take of many rows waits for.
class Output {
  public:
    explicit Output(uint64_t bytes) : memory_(std::malloc(std::max<uint64_t>(bytes, 1))) {
        if (!memory_) throw std::bad_alloc();
        constexpr uint64_t kHuge = 1 << 21;
        const uint64_t from = (reinterpret_cast<uint64_t>(memory_.get()) + kHuge - 1) / kHuge * kHuge;
        const uint64_t to = (reinterpret_cast<uint64_t>(memory_.get()) + bytes) / kHuge * kHuge;
        if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
    }
    void* get() const { return memory_.get(); }
    void* release() { return memory_.release(); }

  private:
    std::unique_ptr<void, FreeDeleter> memory_;
};

struct Taken {
    int64_t count;
    int64_t step;
    std::optional<Dims> dims;  // none: nothing was ever accumulated
    uint64_t rows;
    uint64_t row_elements;
    Output indices, values, contributions;
};

struct TakeRequest {
    int64_t num_required;
    int64_t deadline;
    bool divide;        // MEAN and CMEAN; a partial is not divided
    bool advance_step;
    bool seal;
    int64_t lowest;     // integers: what the dtype holds
    uint64_t highest;
};

// Says in the participant's entry what the process is doing, for those who look.
class Doing {
  public:
    Doing(Core& core, Activity activity) : core_(core), entry_(core.presence().own()) {
        now(activity);
        store_relaxed(entry_.seen_ns, wall_ns());
    }
    ~Doing() {
        if (origin_.is_here() && core_.reachable()) now(kIdle);
    }
    void now(Activity activity) { store_relaxed(entry_.activity, uint32_t{activity}); }
    Participant& entry() { return entry_; }

  private:
    Core& core_;
    Participant& entry_;
    const Origin origin_;
};

class Operations {
  public:
    Operations(Core& core, Interruption& interruption) : core_(core), interruption_(interruption) {}

    // add(state) puts the gradient in. False: dropped, as stale or because of a seal.
    // bytes: of the gradient's values.
    template <class Add>
    bool apply(const Dims& dims, int64_t local_step, int64_t gradients, uint64_t bytes, Add add) {
        Doing doing(core_, kWaitsForLock);
        for (Patience patience;;) {
            Core::Session session(core_, kForever, interruption_);
            doing.now(kApplies);
            State& state = session.state;
            // Read before the line is looked at: who leaves it needs no lock, and wakes once only.
            const uint32_t seen = load(core_.line().turn_word());
            if (local_step < state.step || state.sealed) {
                drop(session, doing, gradients);
                return false;
            }
            Line& line = core_.line();
            uint32_t head = line.living_head();
            if (head != Line::kNobody && !Place::of_this_thread(core_, head) &&
                patience.must_wait(line[head], state)) {
                session.release();
                doing.now(kWaitsForTurn);
                futex_wait(line.turn_word(), seen, patience.until());
                core_.check_file();
                interruption_.check();
                continue;
            }
            check_shape(state, dims);
            if (__builtin_add_overflow(state.count, gradients, &state.count) ||
                __builtin_add_overflow(state.applied, gradients, &state.applied))
                throw Error(Failure::kOutOfRange, "The number of gradients would exceed 64 bits");
            try {
                if (session.before.count == 0) start_round(core_.header(), core_.config(), state, dims);
                add(state);
            } catch (...) {
                session.roll_back();
                throw;
            }
            state.applied_bytes += bytes;
            session.commit();
            Participant& entry = doing.entry();
            entry.applied += static_cast<uint64_t>(gradients);
            entry.applied_ns = wall_ns();
            entry.applied_step = state.step;
            bool reached = head != Line::kNobody && state.count >= line[head].num_required;
            session.release();
            if (reached) line.wake(head);
            return true;
        }
    }

    // For a gradient that is malformed as far as the round goes: true if it is dropped anyway.
    bool drop_if_stale(int64_t local_step, int64_t gradients) {
        Doing doing(core_, kWaitsForLock);
        Core::Session session(core_, kForever, interruption_);
        if (local_step >= session.state.step && !session.state.sealed) return false;
        drop(session, doing, gradients);
        return true;
    }

    // Waits for its turn and num_required gradients; hands out all that are there.
    //
    // The copy of a large round takes milliseconds, and a signal that comes meanwhile must still find a take
    // that has consumed nothing. So signals are looked at between copy and commit: without the lock, since
    // handlers are Python's, but with the place in line, so that nobody else takes the round and no gradient
    // joins it meanwhile (the head's number is reached: applies wait). It may change all the same: by
    // advance_step, an apply out of patience, a death that costs the place, the handler itself. Then the copy is
    // made again; after kLooks looks, without another one. Who dies between copy and commit took nothing.
    Taken take(const TakeRequest& request) {
        Doing doing(core_, kWaitsForLock);
        Place place(core_);
        Cancellable interruption(interruption_, place);
        std::optional<Copy> copy;
        for (int looks = 0;;) {
            uint32_t seen = 0;
            bool look = false;
            {
                Core::Session session(core_, lock_deadline(request.deadline), interruption);
                if (!session.held()) deadline_exceeded(request);
                doing.now(kTakes);
                if (place.joined()) seen = load(place.wake_word());  // before anything is looked at
                place.check_cancelled();
                State& state = session.state;
                Line& line = core_.line();
                const uint32_t head = line.living_head();
                const bool first = head == Line::kNobody || Place::of_this_thread(core_, head);
                const bool heads = !first && state.count >= line[head].num_required;
                if (request.num_required == 0 || (first && state.count >= request.num_required)) {
                    if (!copy || !copy->is_of(state, heads)) {
                        copy.reset();  // two at a time might not fit
                        copy.emplace(copy_of(state, request, heads));
                        look = copy->bytes > kQuickCopy && looks++ < kLooks;
                    }
                    if (!look) {
                        consume(session, request, *copy);
                        doing.entry().taken += static_cast<uint64_t>(copy->taken.count);
                        place.leave();
                        session.release();
                        line.turn();
                        line.wake_head();
                        return std::move(copy->taken);
                    }
                    if (!place.joined() && request.num_required > 0) place.join(request.num_required);
                } else {
                    copy.reset();
                    if (past(request.deadline)) deadline_exceeded(request);
                    // Perhaps just freed of a dead one in front of it.
                    if (heads) line.wake(head);
                    if (!place.joined()) {
                        place.join(request.num_required);
                        continue;  // once more, now in line: nothing that happens from here on is missed
                    }
                }
            }
            interruption.check();  // before the commit; or woken, but not served: perhaps by a close
            if (look) continue;
            doing.now(kWaitsInLine);
            wait_turn(place, seen, request);
        }
    }

    // The old step.
    int64_t set_step(int64_t step) {
        Doing doing(core_, kWaitsForLock);
        Core::Session session(core_, kForever, interruption_);
        int64_t old = session.state.step;
        session.state.step = step;
        session.commit();
        session.release();
        core_.line().turn();
        return old;
    }

    // How many gradients of older steps were dropped.
    int64_t advance_step(int64_t step) {
        Doing doing(core_, kWaitsForLock);
        Core::Session session(core_, kForever, interruption_);
        State& state = session.state;
        if (step <= state.step) return 0;
        int64_t dropped = state.count;
        reset_round(state);
        state.discarded += static_cast<uint64_t>(dropped);
        state.step = step;
        state.sealed = 0;
        session.commit();
        session.release();
        core_.line().turn();
        return dropped;
    }

    void unseal() {
        Doing doing(core_, kWaitsForLock);
        Core::Session session(core_, kForever, interruption_);
        session.state.sealed = 0;
        session.commit();
    }

    int64_t wait_step(int64_t after, int64_t deadline) {
        Doing doing(core_, kWaitsForStep);
        for (Slices slices;; slices.next(interruption_.ends_sleep())) {
            uint32_t seen = load(core_.line().turn_word());
            int64_t step = core_.committed().glimpse().step;
            if (step > after) return step;
            if (past(deadline))
                throw Error(Failure::kDeadlineExceeded,
                            "The global step is still " + std::to_string(step) + ", not past " +
                                std::to_string(after),
                            {{"step", step}});
            futex_wait(core_.line().turn_word(), seen, deadline, slices.now());
            core_.check_file();
            interruption_.check();
        }
    }

  private:
    static bool past(int64_t deadline) { return deadline != kForever && monotonic_ns() >= deadline; }

    [[noreturn]] void deadline_exceeded(const TakeRequest& request) {
        const State state = core_.committed().glimpse();
        throw Error(Failure::kDeadlineExceeded,
                    std::to_string(state.count) + " of the " + std::to_string(request.num_required) +
                        " required gradients had arrived",
                    {{"accumulated", state.count}, {"required", request.num_required}, {"step", state.step}});
    }

    void drop(Core::Session& session, Doing& doing, int64_t gradients) {
        session.state.dropped += static_cast<uint64_t>(gradients);
        session.commit();
        doing.entry().dropped += static_cast<uint64_t>(gradients);
    }

    // TensorFlow's checks against the round (semantics: rows 8a, 8b; dense: 3).
    void check_shape(const State& state, const Dims& dims) {
        if (state.count == 0) return;
        Dims round = round_dims(core_.header().shapes[state.shape], core_.config(), state);
        if (core_.config().kind == kDense) {
            if (dims != round)
                throw Error(Failure::kInvalidArgument, "Shape mismatch: expected " + in_brackets(round) +
                                                           ", got " + in_brackets(dims));
            return;
        }
        if (dims.size() != round.size())
            throw Error(Failure::kInvalidArgument,
                        "Shape mismatch: expected values rank " + std::to_string(round.size() + 1) +
                            ", got " + std::to_string(dims.size() + 1));
        for (size_t i = 0; i < dims.size(); ++i)
            if (dims[i] != round[i])
                throw Error(Failure::kInvalidArgument,
                            "Shape mismatch: expected values dim " + std::to_string(i + 1) + " to be " +
                                std::to_string(round[i]) + ", got " + std::to_string(dims[i]));
    }

    void wait_turn(Place& place, uint32_t seen, const TakeRequest& request) {
        Line& line = core_.line();
        uint32_t& word = place.wake_word();
        for (Slices slices;;) {
            futex_wait(word, seen, request.deadline, slices.now());
            core_.check_file();
            if (load(word) != seen) return;  // woken: every moment counts
            interruption_.check();
            place.check_cancelled();
            if (past(request.deadline)) return;
            // Nobody woke us: is it our turn all the same, or does a dead one stand before us? Not worth asking
            // as long as we could not take: the apply that changes that takes the dead out, and wakes the head.
            if (core_.committed().glimpse().count >= request.num_required) {
                const uint32_t head = line.head();
                if (head == Line::kNobody || Place::of_this_thread(core_, head) || !line.alive(head)) return;
            }
            slices.next(interruption_.ends_sleep() && !line.is_near(place.entry()));
        }
    }

    void reset_round(State& state) {
        end_round(state, core_.row_bytes(state), Index::buckets_for(state.rows));
    }

    // A copy takes less than a signal could wait for, about 0.1 ms.
    static constexpr uint64_t kQuickCopy = 1 << 20;
    static constexpr int kLooks = 2;

    // What a take is going to hand out, and whose copy it is.
    struct Copy {
        Taken taken;
        uint64_t bytes;
        bool nothing;  // the round is the head's
        uint64_t applied, discarded, takes;
        // Whatever changes a round counts one of these up.
        bool is_of(const State& state, bool heads) const {
            return nothing == heads && applied == state.applied && discarded == state.discarded &&
                   takes == state.takes;
        }
    };

    // heads: the round is another take's, so this one gets nothing.
    Copy copy_of(State& state, const TakeRequest& request, bool heads) {
        const bool any = state.count > 0 && !heads;
        const bool sparse = core_.config().kind == kSparse;
        const uint64_t rows = any ? state.rows : 0;
        const uint64_t elements = any ? state.row_elements : 0;
        const uint64_t values = (sparse ? rows : 1) * elements * sum_bytes(core_.config().sum);
        const uint64_t numbers = rows * sizeof(int64_t);
        std::optional<Dims> dims;
        if (any) dims = round_dims(core_.header().shapes[state.shape], core_.config(), state);
        // The sizes are proved first: nothing is allocated for what the segment only claims to hold.
        if (sparse) core_.mapping().array<Slot>(state, kSlotsRegion, rows);
        const uint32_t region = kRows0Region + static_cast<uint32_t>(sparse ? 0 : state.buffer);
        core_.mapping().array<unsigned char>(state, region, values);
        Copy copy{Taken{any ? state.count : 0, state.step, std::move(dims), rows, elements, Output(numbers),
                        Output(values), Output(numbers)},
                  values + 2 * numbers, heads, state.applied, state.discarded, state.takes};
        Reduce reduce{request.divide, !sparse || core_.config().reduction == kCmean, state.count,
                      request.lowest, request.highest};
        bool fits = true;
        if (any) switch (core_.config().sum) {
            case kFloat32: fits = read<float>(state, copy.taken, reduce); break;
            case kFloat64: fits = read<double>(state, copy.taken, reduce); break;
            case kInt64: fits = read<int64_t>(state, copy.taken, reduce); break;
            case kUint64: fits = read<uint64_t>(state, copy.taken, reduce); break;
        }
        if (!fits)
            throw Error(Failure::kOutOfRange,
                        "A result does not fit the accumulator's dtype; the round stays as it is, and "
                        "take_partial hands out its 64-bit sums");
        return copy;
    }

    // The take becomes true: the round is what was copied.
    void consume(Core::Session& session, const TakeRequest& request, Copy& copy) {
        State& state = session.state;
        if (request.advance_step && state.step == INT64_MAX)
            throw Error(Failure::kOutOfRange, "The global step is 2**63 - 1 and cannot move on");
        copy.taken.step = state.step;
        core_.committed().begin(state, 0);
        if (!copy.nothing) reset_round(state);
        state.taken += static_cast<uint64_t>(copy.taken.count);
        state.takes += 1;
        if (request.advance_step) ++state.step;
        if (request.seal) state.sealed = 1;
        session.commit();
    }

    template <class T>
    bool read(State& state, Taken& taken, const Reduce& reduce) {
        auto* values = static_cast<T*>(taken.values.get());
        if (core_.config().kind == kDense)
            return Buffer<T>(state, core_.mapping(), core_.committed()).read(values, reduce);
        return Rows<T>(state, core_.mapping(), core_.committed())
            .read(static_cast<int64_t*>(taken.indices.get()), values,
                  static_cast<int64_t*>(taken.contributions.get()), reduce);
    }

    Core& core_;
    Interruption& interruption_;
};

}  // namespace shmacc
