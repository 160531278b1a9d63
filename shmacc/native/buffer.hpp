// The dense accumulator's two buffers: an apply writes the new sum into the buffer that is not current, and
// the commit switches them. Nothing is changed in place, so nothing needs to be undone.
#pragma once

#include "gradient.hpp"
#include "kernels.hpp"
#include "round.hpp"

namespace shmacc {

template <class T>
class Buffer {
  public:
    Buffer(State& state, Mapping& mapping, Committed& committed)
        : state_(state), mapping_(mapping), committed_(committed) {}

    void add_gradient(const T* values, bool first) {
        const uint64_t count = state_.row_elements;
        const uint32_t other = kRows0Region + (state_.buffer ? 0 : 1);
        ensure_reserved(state_, mapping_, other, count * sizeof(T));
        committed_.begin(state_, 0);
        T* to = mapping_.array<T>(state_, other, count);
        if (first)
            std::copy(values, values + count, to);
        else if (!add_into(to, sums(), values, count))
            Gradient<T>::sum_overflows();
        state_.buffer = other - kRows0Region;
    }

    bool read(T* values, const Reduce& reduce) {
        return reduce_into(values, sums(), state_.row_elements, reduce.gradients, reduce);
    }

  private:
    const T* sums() {
        return mapping_.array<T>(state_, kRows0Region + static_cast<uint32_t>(state_.buffer),
                                 state_.row_elements);
    }

    State& state_;
    Mapping& mapping_;
    Committed& committed_;
};

}  // namespace shmacc
