// What a take takes, on its way to the caller.
//
// From the take's commit on only this process has the round, while memory may run out for the arrays and
// for what Python makes of them, and a signal handler may raise. So the round has its place before it is
// taken: an object of Python's, made by the caller, that the take fills at its commit. If the content does
// not get to the caller, the handle keeps that very object for its next take of the same sort: one that
// advances the step or does not (a mean is no partial), one that seals or does not (who asks for a seal
// gets one).
//
//   Invariant: from the commit on the round is in a TakenRound, whatever fails. To put it there, to keep it,
//              and to pass it on to another TakenRound needs no memory and runs no Python.
#pragma once

#include "operations.hpp"
#include "python.hpp"

namespace shmacc {

class TakenRound {
  public:
    TakenRound(bool advance, bool seal) : advance_(advance), seal_(seal) {}

    bool advances() const { return advance_; }
    bool seals() const { return seal_; }

    // For the take's commit.
    std::optional<Taken>& place() { return taken_; }

    // (count, step, indices, values, shape, contributions); values in the sums' type; sparse: shape begins with
    // the declared first dimension or -1. No values and no shape if nothing was accumulated. After need_numpy.
    nb::object content(const Config& config) {
        if (!content_.is_valid()) make_content(config);
        return content_;
    }

  private:
    friend class KeptRounds;

    // Until all objects are there, the memory stays with `taken_`: then it can be tried again.
    void make_content(const Config& config) {
        Taken& taken = *taken_;
        nb::object values = nb::none(), shape = nb::none();
        if (taken.dims) {
            Dims dims = *taken.dims;
            if (config.kind == kSparse) {
                const bool declared = config.declared_rank != kUnknownRank && config.declared_rank > 0;
                dims.insert(dims.begin(), declared ? config.declared_dims[0] : -1);
                Output numbers(dims.size() * sizeof(int64_t));
                std::copy(dims.begin(), dims.end(), static_cast<int64_t*>(numbers.get()));
                shape = array_on<int64_t>(numbers, {static_cast<int64_t>(dims.size())});
                hand_over(numbers, shape);
                dims[0] = static_cast<int64_t>(taken.rows);
            }
            switch (config.sum) {
                case kFloat32: values = array_on<float>(taken.values, dims, config.components); break;
                case kFloat64: values = array_on<double>(taken.values, dims, config.components); break;
                case kInt64: values = array_on<int64_t>(taken.values, dims); break;
                default: values = array_on<uint64_t>(taken.values, dims); break;
            }
        }
        const Dims rows{static_cast<int64_t>(taken.rows)};
        const nb::object indices = array_on<int64_t>(taken.indices, rows);
        const nb::object contributions = array_on<int64_t>(taken.contributions, rows);
        content_ = nb::make_tuple(taken.count, taken.step, indices, values, shape, contributions);
        if (taken.dims) hand_over(taken.values, values);
        hand_over(taken.indices, indices);
        hand_over(taken.contributions, contributions);
    }

    const bool advance_, seal_;
    const Origin origin_;  // a forked child has a copy of what its parent has
    std::optional<Taken> taken_;
    nb::object content_;
    bool was_kept_ = false;
    nb::object next_;
};

// Of one handle, oldest first. The GIL guards it.
class KeptRounds {
  public:
    // Whether there was anything to keep. To have taken nothing is nothing lost.
    bool keep(nb::object round) {
        TakenRound& kept = in(round);
        if (!kept.taken_ || kept.taken_->count == 0) return false;
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
            to.taken_ = std::move(kept.taken_);
            to.content_ = std::move(kept.content_);
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
