// Partials that are in no segment, reduced as a round of theirs would be: what a shard does with the pieces that hosts
// have sent (shmacc.ray). They are read where they are, and written once.
#pragma once

#include "operations/round_copy.hpp"

namespace shmacc {

class ReducedPartials {
  public:
    // count, weight: of the whole round, also of gradients that have nothing here.
    ReducedPartials(const MemberSpecs& specs, int64_t count, int64_t weight, int64_t step)
        : specs_(specs), taken_{0, count, weight, step, {}, 0, Output(0)} {}

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
    // False: a result does not fit.
    template <class T>
    bool add(const std::vector<MemberGradient*>& gradients) {
        const MemberGradient& first = *gradients[0];
        const MemberSpec& spec = specs_[first.member()];
        int64_t count = 0, weight = 0;
        for (const MemberGradient* gradient : gradients) {
            if (gradient->dims() != first.dims())
                throw Error(Failure::kInvalidArgument, "Partials of different shapes");
            if (__builtin_add_overflow(count, gradient->count(), &count) ||
                __builtin_add_overflow(weight, gradient->weight(), &weight) || count > taken_.count ||
                weight > taken_.weight)
                throw Error(Failure::kInvalidArgument, "Partials of more gradients than the round has");
        }
        Reduce reduce{spec.reduction != kSum, 0, spec.lowest, spec.highest};
        return spec.kind == kSparse ? add_rows<T>(gradients, spec, count, weight, reduce)
                                    : add_arrays<T>(gradients, spec, count, weight, reduce);
    }
    template <class T>
    bool add_rows(const std::vector<MemberGradient*>& gradients, const MemberSpec& spec, int64_t count,
                  int64_t weight, Reduce& reduce) {
        if (spec.reduction == kCmean) reduce.divisor = taken_.weight;
        std::vector<RowSource<T>> sources;
        for (const MemberGradient* gradient : gradients) {
            const auto* const rows = static_cast<const SparseMemberGradient<T>*>(gradient);
            if (!rows->ascending())
                throw Error(Failure::kInvalidArgument, "The rows of a partial must ascend, and be counted");
            sources.push_back(rows->source());
        }
        const uint64_t width = static_cast<const SparseMemberGradient<T>*>(gradients[0])->width();
        Merge<T> merge(std::move(sources), width, 1);
        const uint64_t rows = merge.rows();
        TakenMember& out = taken_.members.emplace_back(
            TakenMember{gradients[0]->member(), count, weight, gradients[0]->dims(), rows,
                        Output(rows * sizeof(int64_t)), Output(rows * width * sizeof(T)),
                        Output(rows * sizeof(int64_t))});
        return merge.read(static_cast<int64_t*>(out.indices.get()), static_cast<T*>(out.values.get()),
                          static_cast<int64_t*>(out.contributions.get()), reduce);
    }
    template <class T>
    bool add_arrays(const std::vector<MemberGradient*>& gradients, const MemberSpec& spec, int64_t count,
                    int64_t weight, Reduce& reduce) {
        reduce.divisor = spec.reduction == kCmean ? taken_.weight : weight;
        const auto* const first = static_cast<const DenseMemberGradient<T>*>(gradients[0]);
        const uint64_t size = first->size();
        TakenMember& out = taken_.members.emplace_back(TakenMember{first->member(), count, weight,
                                                                   first->dims(), 0, Output(0),
                                                                   Output(size * sizeof(T)), Output(0)});
        std::vector<const T*> arrays;
        for (const MemberGradient* gradient : gradients)
            arrays.push_back(static_cast<const DenseMemberGradient<T>*>(gradient)->values());
        return reduce_arrays(static_cast<T*>(out.values.get()), arrays, size, reduce);
    }

    const MemberSpecs& specs_;
    Taken taken_;
};

}  // namespace shmacc
