// The copy that a take hands out: the round, reduced into the caller's memory before it is consumed.
#pragma once

#include <cstdlib>
#include <optional>

#include "open_segment.hpp"

namespace shmacc {

struct FreeDeleter {
    void operator()(void* memory) const { std::free(memory); }
};

// Memory handed out to the caller. Plain malloc, which keeps up to 32 MiB of freed memory for the next take;
// large pieces ask for huge pages, since a take of many rows mostly waits for page faults.
class Output {
  public:
    explicit Output(uint64_t bytes) : bytes_(bytes), memory_(std::malloc(std::max<uint64_t>(bytes, 1))) {
        if (!memory_) throw std::bad_alloc();
        constexpr uint64_t kHuge = 1 << 21;
        const uint64_t from = (reinterpret_cast<uint64_t>(memory_.get()) + kHuge - 1) / kHuge * kHuge;
        const uint64_t to = (reinterpret_cast<uint64_t>(memory_.get()) + bytes) / kHuge * kHuge;
        if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
    }
    void* get() const { return memory_.get(); }
    void* release() { return memory_.release(); }
    uint64_t bytes() const { return bytes_; }

  private:
    uint64_t bytes_;
    std::unique_ptr<void, FreeDeleter> memory_;
};

struct Taken {
    uint64_t serial;  // of the round that it opened; 0: it consumed it
    int64_t count;
    int64_t step;
    std::optional<Dims> dims;  // none: nothing was ever accumulated
    uint64_t rows;
    Output indices, values, contributions;
};

struct TakeRequest {
    int64_t num_required;
    int64_t deadline;
    bool divide;        // MEAN and CMEAN; a partial is not divided
    bool advance_step;
    bool seal;
    bool hold;          // opens the round instead of consuming it
    int64_t lowest;     // integers: what the dtype holds
    uint64_t highest;
};

// A round as a take will hand it out, and the identity of the round that it copies. Made under the lock.
class RoundCopy {
  public:
    // heads: the round is another take's, so this one gets nothing.
    RoundCopy(OpenSegment& segment, State& state, const TakeRequest& request, bool heads)
        : taken(empty(segment, state, heads)), nothing_(heads), applied_(state.applied),
          discarded_(state.discarded), takes_(state.takes) {
        if (!taken.dims) return;
        const Config& config = segment.config();
        const Reduce reduce{request.divide, config.kind == kDense || config.reduction == kCmean, state.count,
                            request.lowest, request.highest};
        const bool fits = with_sum_type(config.sum, [&](auto zero) {
            using T = decltype(zero);
            auto* values = static_cast<T*>(taken.values.get());
            if (config.kind == kDense)
                return Buffer<T>(state, segment.mapping(), segment.committed()).read(values, reduce);
            return Rows<T>(state, segment.mapping(), segment.committed())
                .read(static_cast<int64_t*>(taken.indices.get()), values,
                      static_cast<int64_t*>(taken.contributions.get()), reduce);
        });
        if (!fits)
            throw Error(Failure::kOutOfRange,
                        "A result does not fit the accumulator's dtype; the round stays as it is, and "
                        "take_partial hands out its 64-bit sums");
    }

    // Every change of a round increments one of these.
    bool is_of(const State& state, bool heads) const {
        return nothing_ == heads && applied_ == state.applied && discarded_ == state.discarded &&
               takes_ == state.takes;
    }
    // Whether the round is another take's.
    bool nothing() const { return nothing_; }
    uint64_t bytes() const {
        return taken.indices.bytes() + taken.values.bytes() + taken.contributions.bytes();
    }

    Taken taken;

  private:
    static Taken empty(OpenSegment& segment, const State& state, bool heads) {
        if (state.count == 0 || heads)
            return {0, 0, state.step, std::nullopt, 0, Output(0), Output(0), Output(0)};
        const bool sparse = segment.config().kind == kSparse;
        const uint64_t rows = sparse ? state.rows : 0;
        const uint64_t values = (sparse ? rows : 1) * segment.row_bytes(state);
        // The sizes are proved first: nothing is allocated for what the segment only claims to hold.
        if (sparse) segment.mapping().array<Slot>(state, kSlotsRegion, rows);
        const auto region = static_cast<Region>(kRows0Region + (sparse ? 0 : state.buffer));
        segment.mapping().array<unsigned char>(state, region, values);
        return {0,
                state.count,
                state.step,
                round_dims(segment.header().shapes[state.shape], segment.config(), state),
                rows,
                Output(rows * sizeof(int64_t)),
                Output(values),
                Output(rows * sizeof(int64_t))};
    }

    bool nothing_;
    uint64_t applied_, discarded_, takes_;
};

}  // namespace shmacc
