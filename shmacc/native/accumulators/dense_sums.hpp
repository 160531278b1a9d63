// A dense member's two buffers: an apply writes the new sum into the buffer that is not current, and the commit
// switches them. Nothing is changed in place, so nothing needs to be undone.
#pragma once

#include "protocol/round_shape.hpp"
#include "values/sorted_rows.hpp"

namespace shmacc {

template <class Combine>
class DenseSums {
    using T = typename Combine::Number;

  public:
    explicit DenseSums(Member& member) : member_(member), state_(member.state) {}

    // Reserves room for the sum.
    void prepare() { member_.ensure_reserved(kRows0 + other(), member_.row_bytes(), false); }
    // Adds a gradient, between begin and commit. first: this is the member's first gradient in the round.
    void add(const T* values, bool first) {
        SHMACC_ASSERT(member_.lane().has_begun() && other() != member_.before.buffer);
        SHMACC_ASSERT(member_.row_bytes() <= state_.reserved[kRows0 + other()]);
        const uint64_t count = state_.row_elements;
        T* to = member_.array<T>(kRows0 + other(), count);
        if (first)
            std::copy(values, values + count, to);
        else if (!Combine::into(to, sums(), values, count))
            SortedRows<Combine>::sum_overflows();
        state_.buffer = other();
    }

    const T* sums() {
        return member_.array<T>(kRows0 + static_cast<uint32_t>(state_.buffer), state_.row_elements);
    }

  private:
    uint32_t other() const { return state_.buffer ? 0 : 1; }

    Member& member_;
    MemberState& state_;
};

}  // namespace shmacc
