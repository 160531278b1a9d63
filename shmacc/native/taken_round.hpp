// A round on its way to Python: what a take took, as arrays, and what of it did not get to its caller.
//
// From the take's commit on only this process has the round, while memory may run out for the arrays and for what
// Python makes of them, and a signal handler may raise. So the round has its place before it is taken: an object
// of Python's, made by the caller, that the take fills at its commit. Its arrays are made when they are asked for.
// If they do not get to the caller, the handle keeps that very object for its next take of the same sort: one
// that advances the step or does not (a mean is no partial), one that seals or does not (a caller that asks for a
// seal gets one).
//
//   Invariant: from the commit on the round is in a TakenRound, whatever fails. To put it there, to keep it,
//              and to pass it on to another TakenRound needs no memory and runs no Python.
#pragma once

#include "python.hpp"
#include "round_copy.hpp"

namespace shmacc {

class TakenRound {
  public:
    TakenRound(bool advance, bool seal) : advance_(advance), seal_(seal) {}

    bool advances() const { return advance_; }
    bool seals() const { return seal_; }

    // For the take's commit.
    std::optional<Taken>& place(const Config& config) {
        form_ = {config.kind, config.sum, config.components,
                 config.declared_rank != kUnknownRank && config.declared_rank > 0 ? config.declared_dims[0]
                                                                                  : -1};
        return taken_;
    }

    int64_t count() const { return taken().count; }
    int64_t step() const { return taken().step; }
    // Of the round that it opened; 0: none.
    uint64_t serial() const { return taken_ ? taken_->serial : 0; }
    const nb::object& indices() {
        return once(arrays_.indices, [&](Taken& taken) { return row_numbers(taken.indices); });
    }
    const nb::object& row_counts() {
        return once(arrays_.row_counts, [&](Taken& taken) { return row_numbers(taken.contributions); });
    }
    // In the type of sums; None if nothing was accumulated.
    const nb::object& values() {
        return once(arrays_.values, [&](Taken& taken) -> nb::object {
            if (!taken.dims) return nb::none();
            Dims dims = *taken.dims;
            if (form_.kind == kSparse) dims.insert(dims.begin(), static_cast<int64_t>(taken.rows));
            return with_sum_type(form_.sum, [&](auto zero) {
                return array_of<decltype(zero)>(taken.values, dims, form_.components);
            });
        });
    }
    // Sparse: the declared first dimension, -1 if there is none, then those of a row; None if nothing was accumulated.
    const nb::object& shape() {
        return once(arrays_.shape, [&](Taken& taken) -> nb::object {
            if (!taken.dims) return nb::none();
            Dims dims = *taken.dims;
            dims.insert(dims.begin(), form_.first_dim);
            Output numbers(dims.size() * sizeof(int64_t));
            std::copy(dims.begin(), dims.end(), static_cast<int64_t*>(numbers.get()));
            return array_of<int64_t>(numbers, {static_cast<int64_t>(dims.size())});
        });
    }

  private:
    friend class KeptRounds;

    struct Form {
        uint32_t kind, sum, components;
        int64_t first_dim;
    };
    struct Arrays {
        nb::object indices, values, shape, row_counts;
    };

    const Taken& taken() const {
        if (!taken_) throw Error(Failure::kFailedPrecondition, "Nothing has been taken yet");
        return *taken_;
    }
    template <class Make>
    const nb::object& once(nb::object& made, Make make) {
        taken();
        if (!made.is_valid()) made = make(*taken_);
        return made;
    }
    nb::object row_numbers(Output& numbers) {
        return array_of<int64_t>(numbers, {static_cast<int64_t>(taken_->rows)});
    }

    const bool advance_, seal_;
    const Origin origin_;  // a forked child has a copy of what its parent has
    Form form_{};
    std::optional<Taken> taken_;
    Arrays arrays_;
    bool was_kept_ = false;
    nb::object next_;
};

// Of one handle, oldest first. The GIL guards it.
class KeptRounds {
  public:
    // Whether there was anything to keep. To have taken nothing is nothing lost.
    bool keep(nb::object round) {
        TakenRound& kept = in(round);
        if (!kept.taken_ || kept.taken_->count == 0 || kept.serial() != 0) return false;
        nb::object* at = &first_;
        while (at->is_valid() && !kept.was_kept_) at = &in(*at).next_;
        kept.was_kept_ = true;  // once more in vain: it goes in front again
        kept.next_ = std::move(*at);
        *at = std::move(round);
        return true;
    }
    // Passes the oldest one of its sort on to `to`, if there is one.
    bool pass_on(TakenRound& to) {
        for (nb::object* at = &first_; at->is_valid();) {
            TakenRound& kept = in(*at);
            const bool own = kept.origin_.is_here();
            if (own && (kept.advance_ != to.advance_ || kept.seal_ != to.seal_)) {
                at = &kept.next_;
                continue;
            }
            const nb::object out = std::move(*at);
            *at = std::move(kept.next_);
            if (!own) continue;
            to.form_ = kept.form_;
            to.taken_ = std::move(kept.taken_);
            to.arrays_ = std::move(kept.arrays_);
            to.was_kept_ = true;
            return true;
        }
        return false;
    }

  private:
    static TakenRound& in(const nb::object& round) { return *nb::inst_ptr<TakenRound>(round); }

    nb::object first_;
};

}  // namespace shmacc
