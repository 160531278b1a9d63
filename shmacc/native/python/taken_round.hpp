// A handle's rounds: those that a take hands to Python, those that did not reach their caller, and open ones.
//
// From the take's commit on only this process has the round. But memory may run out for the arrays and for what Python
// makes of them, and a signal handler may raise. So the caller makes a Python object before the take, and the take puts
// the round into this object at its commit. The round's arrays are made when they are asked for. If the round does not
// reach the caller, the handle keeps the object for its next take of the same sort. Two takes are of the same sort if
// both advance the step or neither does (a mean is no partial), both seal or neither does (a caller that asks for a
// seal gets one), and both are divided among the same shards or neither is.
//
//   Invariant: from the commit on the round is in a RoundResult, whatever fails. Putting it there, keeping it, and
//              passing it on to another RoundResult need no memory and run no Python.
#pragma once

#include "accumulators/round_copy.hpp"
#include "python/columns.hpp"
#include "python/timeline.hpp"

namespace shmacc {

class RoundResult {
  public:
    // ends: see `division_of`.
    RoundResult(bool advance, bool seal, nb::handle ends = nb::none())
        : advance_(advance), seal_(seal), division_(division_of(ends)) {}

    bool advances() const { return advance_; }
    bool seals() const { return seal_; }
    // How the round is divided among shards; null: it is not divided.
    const Division* division(const MemberSpecs& specs) const {
        if (!division_) return nullptr;
        if (division_->ends.size() != (specs.size() - 1) * division_->shards)
            throw Error(Failure::kInvalidArgument, "The division is that of other members");
        return &*division_;
    }

    // Where the take puts the round at its commit.
    std::optional<Taken>& to_fill(const std::shared_ptr<const MemberSpecs>& specs) {
        specs_ = specs;
        return taken_;
    }

    int64_t count() const { return taken().count; }
    int64_t weight() const { return taken().weight; }
    int64_t step() const { return taken().step; }
    // The step after this take, and its timeline.
    StepRead read() const {
        const int64_t step = taken().step;
        return {advance_ && step < INT64_MAX ? step + 1 : step, taken_->timeline};
    }
    // Serial of the round that the take opened; 0: none, or it was consumed.
    uint64_t serial() const { return taken_ ? taken_->serial : 0; }
    void end() { taken_->serial = 0; }
    uint64_t half_updated() const { return taken_ ? taken_->half_updated : 0; }
    const nb::object& contributors() {
        taken();
        if (!contributors_.is_valid())
            contributors_ = array_of<int64_t>(taken_->contributors, taken_->contributor_count);
        return contributors_;
    }

    // Returns (number, count, weight) of each member in the round. The next functions take an index into this list, and
    // throw for a divided round, which has its rows and values in `columns`.
    std::vector<std::tuple<uint32_t, int64_t, int64_t>> members() const {
        std::vector<std::tuple<uint32_t, int64_t, int64_t>> members;
        for (const TakenMember& member : taken().members)
            members.emplace_back(member.number, member.count, member.weight);
        return members;
    }
    const nb::object& indices(uint32_t i) {
        return once(i, &Arrays::indices,
                    [&](TakenMember& member) { return array_of<int64_t>(member.indices, member.rows); });
    }
    const nb::object& row_counts(uint32_t i) {
        return once(i, &Arrays::row_counts,
                    [&](TakenMember& member) { return array_of<int64_t>(member.contributions, member.rows); });
    }
    // A member's values, in the type of sums.
    const nb::object& values(uint32_t i) {
        return once(i, &Arrays::values, [&](TakenMember& member) {
            const MemberSpec& spec = (*specs_)[member.number];
            int64_t dims[kMaxRank + 1] = {static_cast<int64_t>(member.rows)};
            std::copy(member.dims.begin(), member.dims.end(), dims + 1);
            const bool sparse = spec.kind == kSparse;
            return with_sum_type(spec.sum, [&](auto zero) {
                return array_of<decltype(zero)>(member.values, dims + !sparse, member.dims.size() + sparse,
                                                spec.components);
            });
        });
    }
    // A sparse member's shape: the declared first dimension, or -1 if none is declared, then a row's dimensions.
    const nb::object& shape(uint32_t i) {
        return once(i, &Arrays::shape, [&](TakenMember& member) {
            const uint64_t rank = member.dims.size() + 1;
            Output numbers(rank * sizeof(int64_t));
            auto* const dims = static_cast<int64_t*>(numbers.get());
            dims[0] = (*specs_)[member.number].declared_rows();
            std::copy(member.dims.begin(), member.dims.end(), dims + 1);
            return array_of<int64_t>(numbers, rank);
        });
    }

    // Each shard's columns of a divided round. Can be called once.
    nb::list columns() {
        taken();
        if (!division_) throw Error(Failure::kFailedPrecondition, "The round was not divided among shards");
        nb::list made;
        for (Columns& shard : taken_->shards) made.append(arrays_of(shard));
        taken_->shards.clear();
        return made;
    }

  private:
    friend class KeptRounds;

    struct Arrays {
        nb::object indices, values, shape, row_counts;
    };

    const Taken& taken() const {
        if (!taken_) throw Error(Failure::kFailedPrecondition, "Nothing has been taken yet");
        return *taken_;
    }
    template <class Make>
    const nb::object& once(uint32_t i, nb::object Arrays::* which, Make make) {
        if (division_) throw Error(Failure::kFailedPrecondition, "The round was divided among shards");
        if (i >= taken().members.size())
            throw Error(Failure::kInvalidArgument, "Nothing was taken of such a member");
        if (arrays_.size() < taken_->members.size()) arrays_.resize(taken_->members.size());
        nb::object& made = arrays_[i].*which;
        if (!made.is_valid()) made = make(taken_->members[i]);
        return made;
    }

    const bool advance_, seal_;
    const std::optional<Division> division_;
    const Origin origin_;  // a forked child must not use the copies of its parent's rounds
    std::shared_ptr<const MemberSpecs> specs_;
    std::optional<Taken> taken_;
    std::vector<Arrays> arrays_;
    nb::object contributors_;
    bool was_kept_ = false;
    nb::object next_;
};

// Rounds that one handle keeps, oldest first. The GIL guards them.
class KeptRounds {
  public:
    // Returns whether there was anything to keep. An empty round is not kept: nothing is lost with it.
    bool keep(nb::object round) {
        RoundResult& kept = in(round);
        if (!kept.taken_ || kept.taken_->count == 0 || kept.serial() != 0) return false;
        nb::object* at = &first_;
        while (at->is_valid() && !kept.was_kept_) at = &in(*at).next_;
        kept.was_kept_ = true;  // a kept round that does not reach its next caller either goes to the front
        kept.next_ = std::move(*at);
        *at = std::move(round);
        return true;
    }
    // Passes the oldest kept round of the same sort on to `to`, if there is one.
    bool pass_on(RoundResult& to) {
        for (nb::object* at = &first_; at->is_valid();) {
            RoundResult& kept = in(*at);
            const bool own = kept.origin_.is_here();
            if (own && (kept.advance_ != to.advance_ || kept.seal_ != to.seal_ ||
                        !(kept.division_ == to.division_))) {
                at = &kept.next_;
                continue;
            }
            const nb::object out = std::move(*at);
            *at = std::move(kept.next_);
            if (!own) continue;
            to.specs_ = std::move(kept.specs_);
            to.taken_ = std::move(kept.taken_);
            to.arrays_ = std::move(kept.arrays_);
            to.contributors_ = std::move(kept.contributors_);
            to.was_kept_ = true;
            return true;
        }
        return false;
    }

  private:
    static RoundResult& in(const nb::object& round) { return *nb::inst_ptr<RoundResult>(round); }

    nb::object first_;
};

// The rounds that one handle has open, each with the thread and the process that own it. The GIL guards this list.
class HeldRounds {
  public:
    // Make it before a round is opened: it reserves memory, so that `add` cannot fail, even if other threads add too.
    class Opening {
      public:
        explicit Opening(HeldRounds& held) : held_(held) {
            held_.rounds_.reserve(held_.rounds_.size() + held_.opening_ + 1);
            ++held_.opening_;
        }
        ~Opening() { --held_.opening_; }
        Opening(const Opening&) = delete;
        Opening& operator=(const Opening&) = delete;
        // for_loop: the round is taken for an event loop, and no thread has it yet (see OwnRound).
        void add(uint64_t serial, bool for_loop) {
            held_.rounds_.push_back({serial, for_loop ? kNoThread : this_thread(), Origin(), false});
        }

      private:
        HeldRounds& held_;
    };

    // Throws if this thread has a round open: only the thread itself can end it, so it would wait in vain.
    void refuse_in_round() const {
        for (const Held& round : rounds_)
            if (round.thread == this_thread() && round.opened.is_here())
                throw Error(Failure::kFailedPrecondition,
                            "This thread has a round of this accumulator open; it must end before another "
                            "take or round");
    }
    bool has(uint64_t serial) { return find(serial) != nullptr; }
    // Notes that the round's update is in, even if RoundState does not say so.
    void note_update(uint64_t serial) {
        if (Held* const round = find(serial)) round->updated = true;
    }
    bool is_updated(uint64_t serial) {
        const Held* const round = find(serial);
        return round && round->updated;
    }
    void remove(uint64_t serial) {
        rounds_.erase(std::remove_if(rounds_.begin(), rounds_.end(),
                                     [serial](const Held& round) { return round.serial == serial; }),
                      rounds_.end());
    }
    // Removes one of this process's rounds and returns its serial; 0: there is none.
    uint64_t pop() {
        while (!rounds_.empty()) {
            const Held last = rounds_.back();
            rounds_.pop_back();
            if (last.opened.is_here()) return last.serial;
        }
        return 0;
    }

  private:
    struct Held {
        uint64_t serial;
        ThreadNumber thread;
        Origin opened;
        bool updated;
    };
    // A forked child does not hold its parent's rounds.
    Held* find(uint64_t serial) {
        for (Held& round : rounds_)
            if (round.serial == serial && round.opened.is_here()) return &round;
        return nullptr;
    }

    std::vector<Held> rounds_;
    size_t opening_ = 0;
};

}  // namespace shmacc
