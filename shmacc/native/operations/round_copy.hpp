// What a take hands out, reduced into the caller's memory: a round before it is consumed, or partials in no segment.
//
// What several lanes, or several partials, have of a member is added up in their order.
#pragma once

#include <optional>

#include "operations/member_gradient.hpp"
#include "operations/merge.hpp"
#include "operations/operation.hpp"
#include "rows/output.hpp"

namespace shmacc {

// What a round has of a member, without values.
struct MemberInRound {
    uint32_t number;
    int64_t count;  // gradients that had it
    int64_t weight;  // of these
    Dims dims;
};

struct TakenMember : MemberInRound {
    uint64_t rows;
    Output indices, values, contributions;
};

struct Taken {
    uint64_t serial;  // of the round that it opened; 0: it opened none
    uint64_t half_updated;  // Config::token of parameters with an update by that round that is not in yet; or 0
    int64_t count;
    int64_t weight;
    int64_t step;
    std::vector<TakenMember> members;
    uint64_t contributor_count;
    Output contributors;
};

struct TakeRequest {
    int64_t num_required;
    int64_t at_least;  // is enough at the deadline
    int64_t deadline;
    bool partial;  // sums, which are not divided
    uint32_t shards;  // rows are handed out shard by shard
    bool advance_step;
    bool seal;
    bool hold;  // opens the round instead of consuming it
    OnDeath on_death;
    pthread_t loop_thread;  // the round is opened for this one (OwnRound); none: for that of the call
};

// The tables that a sparse member has in its lanes.
template <class T>
class Tables {
  public:
    Tables(std::vector<Member>& in_lanes, uint32_t shards) : in_lanes_(in_lanes), shards_(shards) {
        std::vector<RowSource<T>> sources;
        for (Member& member : in_lanes) {
            // The sizes are proved before anything is allocated that the segment only claims to hold.
            const uint64_t count = member.state.rows;
            const Slot* slots = member.array<Slot>(kSlots, count);
            const T* rows = member.array<T>(kRows0, count * member.state.row_elements);
            if (in_lanes.size() > 1 && count > 0)
                sources.push_back(
                    {&slots->row, &slots->contributions, sizeof(Slot) / sizeof(int64_t), rows, count});
        }
        if (in_lanes.size() > 1) merge_.emplace(std::move(sources), in_lanes[0].state.row_elements, shards);
    }
    uint64_t rows() const { return merge_ ? merge_->rows() : in_lanes_[0].state.rows; }

    // All rows, shard by shard and ascending in each, reduced. values may be null: row numbers alone. False: a
    // result does not fit.
    bool read(int64_t* keys, T* values, int64_t* contributions, const Reduce& reduce) {
        if (merge_) return merge_->read(keys, values, contributions, reduce);
        return Rows<T>(in_lanes_[0]).read(keys, values, contributions, reduce, shards_);
    }

  private:
    std::vector<Member>& in_lanes_;
    const uint32_t shards_;
    std::optional<Merge<T>> merge_;
};

// The sum of arrays, reduced: what a round has of a dense member. False: a result does not fit.
template <class T>
bool reduce_arrays(T* out, const std::vector<const T*>& arrays, uint64_t size, const Reduce& reduce) {
    constexpr uint64_t kPiece = 1024;  // numbers that stay in the first-level cache
    const bool streamed = is_streamed(out, size * sizeof(T), kPiece * sizeof(T));
    if (arrays.size() == 1 && !streamed) return reduce_into(out, arrays[0], size, reduce.divisor, reduce);
    T sum[kPiece];
    bool fits = true;
    for (uint64_t at = 0; at < size; at += kPiece) {
        const uint64_t count = std::min(kPiece, size - at);
        const T* sums = arrays[0] + at;
        for (size_t i = 1; i < arrays.size(); ++i) {
            fits = (i == 1 ? add_into(sum, sums, arrays[1] + at, count) : add_many(sum, arrays[i] + at, count)) &&
                   fits;
            sums = sum;
        }
        fits = (streamed && count == kPiece
                    ? reduce_row<kPiece, true>(out + at, sums, count, reduce.divisor, reduce)
                    : reduce_into(out + at, sums, count, reduce.divisor, reduce)) &&
               fits;
    }
    if (streamed) end_of_stream();
    return fits;
}

// Adds to what was taken the rows of `source`, a Tables or a Merge, reduced. False: a result does not fit.
template <class T, class Source>
bool take_rows(Taken& taken, MemberInRound member, Source& source, uint64_t row_bytes, const Reduce& reduce) {
    const uint64_t rows = source.rows();
    TakenMember& out = taken.members.emplace_back(
        TakenMember{std::move(member), rows, Output(rows * sizeof(int64_t)), Output(rows * row_bytes),
                    Output(rows * sizeof(int64_t))});
    return source.read(static_cast<int64_t*>(out.indices.get()), static_cast<T*>(out.values.get()),
                       static_cast<int64_t*>(out.contributions.get()), reduce);
}
// The same of a dense member: the sum of these arrays.
template <class T>
bool take_arrays(Taken& taken, MemberInRound member, const std::vector<const T*>& arrays, uint64_t size,
                 const Reduce& reduce) {
    TakenMember& out = taken.members.emplace_back(
        TakenMember{std::move(member), 0, Output(0), Output(size * sizeof(T)), Output(0)});
    return reduce_arrays(static_cast<T*>(out.values.get()), arrays, size, reduce);
}

// A round as a take will hand it out, and the identity of the round that it copies. Made with all lanes' locks.
class RoundCopy {
  public:
    // heads: the round is another take's, so this one gets nothing.
    RoundCopy(RoundSession& session, const MemberSpecs& specs, const TakeRequest& request, bool heads)
        : taken{0, 0, 0, 0, session.state.step, {}, 0, Output(0)}, nothing_(heads),
          round_(session.state.round), applied_(session.applied()) {
        if (heads || session.count() == 0) return;
        taken.count = session.count();
        taken.weight = session.weight();
        const auto members = static_cast<uint32_t>(specs.size()) - 1;
        for (uint32_t number = 0; number < members; ++number) {
            std::vector<Member> in_lanes = session.in_lanes(number);
            if (in_lanes.empty()) continue;
            const bool fits = with_sum_type(specs[number].sum, [&](auto zero) {
                return read<decltype(zero)>(in_lanes, specs[number], request);
            });
            if (!fits) does_not_fit(specs, number);
        }
        std::vector<Member> in_lanes = session.in_lanes(members);
        if (in_lanes.empty()) return;
        Tables<float> set(in_lanes, 1);
        taken.contributor_count = set.rows();
        taken.contributors = Output(set.rows() * sizeof(int64_t));
        Output ones(set.rows() * sizeof(int64_t)), none(0);
        set.read(static_cast<int64_t*>(taken.contributors.get()), static_cast<float*>(none.get()),
                 static_cast<int64_t*>(ones.get()), not_reduced());
    }

    // Every change of a round increments one of these, or is a new step (set_step).
    bool is_of(const RoundSession& session, bool heads) const {
        return nothing_ == heads && round_ == session.state.round && applied_ == session.applied() &&
               taken.step == session.state.step;
    }
    // Whether the round is another take's.
    bool nothing() const { return nothing_; }
    uint64_t bytes() const {
        uint64_t bytes = taken.contributors.bytes();
        for (const TakenMember& member : taken.members)
            bytes += member.indices.bytes() + member.values.bytes() + member.contributions.bytes();
        return bytes;
    }

    Taken taken;

  private:
    template <class T>
    bool read(std::vector<Member>& in_lanes, const MemberSpec& spec, const TakeRequest& request) {
        Member& first = in_lanes[0];
        MemberInRound sum{first.number(), 0, 0, {}};
        for (const Member& member : in_lanes) {
            sum.count += member.state.count;
            sum.weight += member.state.weight;
            if (member.state.row_elements != first.state.row_elements)
                data_loss("its lanes' shapes disagree");
        }
        if (sum.weight <= 0 || taken.weight < sum.weight) data_loss("its weights disagree");
        sum.dims = round_dims(first);
        const Reduce reduce = request.partial ? not_reduced() : reduce_by(spec, sum.weight, taken.weight);
        if (spec.kind == kSparse) {
            Tables<T> tables(in_lanes, request.shards);
            return take_rows<T>(taken, std::move(sum), tables, first.row_bytes(), reduce);
        }
        std::vector<const T*> arrays;  // proved before anything is allocated
        for (Member& member : in_lanes) arrays.push_back(Buffer<T>(member).sums());
        return take_arrays<T>(taken, std::move(sum), arrays, first.state.row_elements, reduce);
    }

    [[noreturn]] static void does_not_fit(const MemberSpecs& specs, uint32_t number) {
        const Error error(Failure::kOutOfRange,
                          "A result does not fit the accumulator's dtype; the round stays as it is, and "
                          "take_partial hands out its 64-bit sums");
        throw specs[number].name.empty() ? error : error.of_member(specs[number].name);
    }

    bool nothing_;
    uint64_t round_, applied_;
};

// Partials that are in no segment, reduced as a round of theirs would be: what a shard does with the pieces that hosts
// have sent (shmacc.ray). They are read where they are, and written once.
class ReducedPartials {
  public:
    // count, weight: of the whole round, also of gradients that have nothing here.
    ReducedPartials(const MemberSpecs& specs, int64_t count, int64_t weight, int64_t step)
        : specs_(specs), taken_{0, 0, count, weight, step, {}, 0, Output(0)} {}

    // What the partials have, in their order; each gradient belongs to some member.
    Taken of(const std::vector<MemberGradient*>& gradients) {
        for (uint32_t number = 0; number + 1 < specs_.size(); ++number) {
            std::vector<MemberGradient*> own;
            for (MemberGradient* gradient : gradients)
                if (gradient->member() == number) own.push_back(gradient);
            if (own.empty()) continue;
            try {
                if (!with_sum_type(specs_[number].sum, [&](auto zero) { return add<decltype(zero)>(own); }))
                    throw Error(Failure::kOutOfRange, "A result does not fit the accumulator's dtype");
            } catch (const Error& error) {
                throw specs_[number].name.empty() ? error : error.of_member(specs_[number].name);
            }
        }
        return std::move(taken_);
    }

  private:
    // Of one member. False: a result does not fit.
    template <class T>
    bool add(const std::vector<MemberGradient*>& own) {
        const MemberGradient& first = *own[0];
        const MemberSpec& spec = specs_[first.member()];
        MemberInRound sum{first.member(), 0, 0, first.dims()};
        for (const MemberGradient* gradient : own) {
            if (gradient->dims() != first.dims())
                throw Error(Failure::kInvalidArgument, "Partials of different shapes");
            if (__builtin_add_overflow(sum.count, gradient->count(), &sum.count) ||
                __builtin_add_overflow(sum.weight, gradient->weight(), &sum.weight) ||
                sum.count > taken_.count || sum.weight > taken_.weight)
                throw Error(Failure::kInvalidArgument, "Partials of more gradients than the round has");
        }
        const Reduce reduce = reduce_by(spec, sum.weight, taken_.weight);
        if (spec.kind == kSparse) {
            std::vector<RowSource<T>> sources;
            for (const MemberGradient* gradient : own) sources.push_back(rows_of<T>(*gradient));
            const uint64_t width = static_cast<const SparseMemberGradient<T>&>(first).width();
            Merge<T> merge(std::move(sources), width, 1);
            return take_rows<T>(taken_, std::move(sum), merge, width * sizeof(T), reduce);
        }
        std::vector<const T*> arrays;
        for (const MemberGradient* gradient : own)
            arrays.push_back(static_cast<const DenseMemberGradient<T>*>(gradient)->values());
        const uint64_t size = static_cast<const DenseMemberGradient<T>&>(first).size();
        return take_arrays<T>(taken_, std::move(sum), arrays, size, reduce);
    }
    template <class T>
    static RowSource<T> rows_of(const MemberGradient& gradient) {
        const auto& rows = static_cast<const SparseMemberGradient<T>&>(gradient);
        if (!rows.ascending())
            throw Error(Failure::kInvalidArgument, "The rows of a partial must ascend, and be counted");
        return rows.source();
    }

    const MemberSpecs& specs_;
    Taken taken_;
};

}  // namespace shmacc
