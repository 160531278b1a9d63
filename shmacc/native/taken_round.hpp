// A round on its way to Python: the result of a take, as arrays, and the rounds that did not reach their
// callers.
#pragma once

#include "python.hpp"
#include "round_copy.hpp"

namespace shmacc {

// Its object is made before the take, and its arrays at their first use: so no allocation that may fail comes
// between the commit and the object that holds the round. Arrays that could not be made are made at the next
// attempt. The GIL guards it.
class TakenRound {
  public:
    explicit TakenRound(const Config& config)
        : kind_(config.kind), sum_(config.sum), components_(config.components),
          first_dim_(config.declared_rank != kUnknownRank && config.declared_rank > 0 ? config.declared_dims[0]
                                                                                      : -1) {}

    void fill(Taken taken) { taken_.emplace(std::move(taken)); }

    int64_t count() const { return taken_ ? taken_->count : 0; }
    int64_t step() const { return taken_ ? taken_->step : 0; }
    const nb::object& indices() {
        return once(indices_, [&] { return rows_of(taken_->indices); });
    }
    const nb::object& row_counts() {
        return once(row_counts_, [&] { return rows_of(taken_->contributions); });
    }
    // In the type of sums; None if nothing was accumulated.
    const nb::object& values() {
        return once(values_, [&]() -> nb::object {
            if (!taken_->dims) return nb::none();
            Dims dims = *taken_->dims;
            if (kind_ == kSparse) dims.insert(dims.begin(), static_cast<int64_t>(taken_->rows));
            return with_sum_type(sum_, [&](auto zero) {
                return array_of<decltype(zero)>(taken_->values, dims, components_);
            });
        });
    }
    // Sparse: the declared first dimension, -1 if there is none, then those of a row; None if nothing was accumulated.
    const nb::object& shape() {
        return once(shape_, [&]() -> nb::object {
            if (!taken_->dims) return nb::none();
            Dims dims = *taken_->dims;
            dims.insert(dims.begin(), first_dim_);
            Output numbers(dims.size() * sizeof(int64_t));
            std::copy(dims.begin(), dims.end(), static_cast<int64_t*>(numbers.get()));
            return array_of<int64_t>(numbers, {static_cast<int64_t>(dims.size())});
        });
    }
    // A forked child has a copy of its parent's round.
    bool is_of_this_process() const { return taker_.is_here(); }

  private:
    template <class Make>
    const nb::object& once(nb::object& made, Make make) {
        if (!taken_) throw Error(Failure::kFailedPrecondition, "Nothing has been taken yet");
        if (!made.is_valid()) made = make();
        return made;
    }
    nb::object rows_of(Output& numbers) {
        return array_of<int64_t>(numbers, {static_cast<int64_t>(taken_->rows)});
    }

    const uint32_t kind_, sum_, components_;
    const int64_t first_dim_;
    const Origin taker_;
    std::optional<Taken> taken_;
    nb::object indices_, values_, shape_, row_counts_;
};

// The rounds that a handle's takes took but that did not reach their callers. The GIL guards it.
class KeptRounds {
  public:
    // Before a take, so that `add` does not fail after it.
    void make_room() { kept_.reserve(kept_.size() + 1); }
    void add(nb::object round, bool advance, bool seal) {
        if (nb::cast<const TakenRound&>(round).count() > 0)
            kept_.push_back({advance, seal, std::move(round)});
    }
    // The oldest round of this process that a take of this sort left: a forked child also has copies of its
    // parent's.
    nb::object next(bool advance, bool seal) {
        for (auto kept = kept_.begin(); kept != kept_.end();) {
            const bool own = nb::cast<const TakenRound&>(kept->round).is_of_this_process();
            if (own && (kept->advance != advance || kept->seal != seal)) {
                ++kept;
                continue;
            }
            nb::object round = std::move(kept->round);
            kept = kept_.erase(kept);
            if (own) return round;
        }
        return {};
    }

  private:
    struct Kept {
        bool advance, seal;
        nb::object round;
    };
    std::vector<Kept> kept_;
};

}  // namespace shmacc
