// Gradients from Python: arrays, which are kept for as long as their apply lasts.
#pragma once

#include "accumulators/member_gradient.hpp"
#include "python/interpreter.hpp"

namespace shmacc {

// A gradient of one member and the arrays that it reads. Made and destroyed with the GIL.
class Incoming {
  public:
    virtual ~Incoming() = default;
    virtual MemberGradient& gradient() = 0;
};

template <class T>
class IncomingRows : public Incoming {
  public:
    // counts: contributions of each row, or None for `weight` each.
    IncomingRows(uint32_t member, const MemberSpec& spec, int64_t count, int64_t weight, nb::handle indices,
                 nb::handle values, nb::handle counts, bool ascending)
        : keys_(indices, 1), numbers_(values, spec.components) {
        if (!counts.is_none()) counts_.emplace(counts, 1);
        Dims dims = numbers_.dims(1);
        const uint64_t width = product(dims) * spec.components;
        if (keys_.size() > kMaxRows || numbers_.size() != keys_.size() * width ||
            (counts_ && counts_->size() != keys_.size()))
            throw Error(Failure::kInvalidArgument, "Sizes of indices, values and contributions disagree");
        gradient_.emplace(member, std::move(dims), count, weight, keys_.data(), numbers_.data(),
                          counts_ ? counts_->data() : nullptr, static_cast<uint32_t>(keys_.size()), width,
                          ascending);
    }
    MemberGradient& gradient() override { return *gradient_; }

  private:
    ArrayBuffer<int64_t> keys_;
    ArrayBuffer<T> numbers_;
    std::optional<ArrayBuffer<int64_t>> counts_;
    std::optional<SparseMemberGradient<T>> gradient_;
};

template <class T>
class IncomingArray : public Incoming {
  public:
    IncomingArray(uint32_t member, const MemberSpec& spec, int64_t count, int64_t weight, nb::handle values)
        : numbers_(values, spec.components) {
        Dims dims = numbers_.dims(0);
        if (numbers_.size() != product(dims) * spec.components)
            throw Error(Failure::kInvalidArgument, "Sizes of values and shape disagree");
        gradient_.emplace(member, std::move(dims), count, weight, numbers_.data(), numbers_.size());
    }
    MemberGradient& gradient() override { return *gradient_; }

  private:
    ArrayBuffer<T> numbers_;
    std::optional<DenseMemberGradient<T>> gradient_;
};

// terms: None for a gradient that counts once, has no contributor, and waits for ever; else (count, weight,
// contributors, timeout). contributors: None; a number, for a single gradient; or an ascending array, for a partial.
inline ApplyRequest of_terms(int64_t local_step, nb::handle terms) {
    ApplyRequest request{local_step, 0, 1, 1, nullptr, 0, {}, false, kForever, 0};
    if (terms.is_none()) return request;
    const auto given = nb::borrow<nb::tuple>(terms);
    request.count = nb::cast<int64_t>(given[0]);
    request.weight = nb::cast<int64_t>(given[1]);
    const nb::handle contributors = given[2];
    if (PyLong_Check(contributors.ptr())) {
        request.contributors.push_back(nb::cast<int64_t>(contributors));
    } else if (!contributors.is_none()) {
        const ArrayBuffer<int64_t> all(contributors, 1);
        request.contributors.assign(all.data(), all.data() + all.size());
        request.partial = true;
    }
    request.deadline = deadline_after(nb::cast<std::optional<double>>(given[3]));
    return request;
}

// given: (member, count, weight, indices or None, values, counts or None, ascending), as gradients.py makes it.
inline std::unique_ptr<Incoming> incoming(const MemberSpecs& specs, const nb::tuple& given) {
    const auto member = nb::cast<uint32_t>(given[0]);
    if (given.size() != 7 || member + 1 >= specs.size())
        throw Error(Failure::kInvalidArgument, "The segment has no such member");
    const MemberSpec& spec = specs[member];
    const auto count = nb::cast<int64_t>(given[1]), weight = nb::cast<int64_t>(given[2]);
    const bool sparse = !nb::handle(given[3]).is_none();
    if (sparse != (spec.kind == kSparse))
        throw Error(Failure::kInvalidArgument, "The member is of the other kind");
    return with_sum_type(spec.sum, [&](auto zero) -> std::unique_ptr<Incoming> {
        using T = decltype(zero);
        if (sparse)
            return std::make_unique<IncomingRows<T>>(member, spec, count, weight, given[3], given[4],
                                                     given[5], nb::cast<bool>(given[6]));
        return std::make_unique<IncomingArray<T>>(member, spec, count, weight, given[4]);
    });
}

// The gradients of several members, which one apply adds.
class Arrivals {
  public:
    Arrivals(const MemberSpecs& specs, const nb::list& given) {
        members_.reserve(given.size());
        gradients_.reserve(given.size());
        for (const nb::handle member : given) {
            members_.push_back(incoming(specs, nb::borrow<nb::tuple>(member)));
            gradients_.push_back(&members_.back()->gradient());
        }
    }
    const std::vector<MemberGradient*>& gradients() const { return gradients_; }

    // Throws if a member occurs twice: only one of its gradients would be added, silently.
    void refuse_repeats(const MemberSpecs& specs) const {
        std::vector<bool> seen(specs.size());
        for (const MemberGradient* gradient : gradients_) {
            const uint32_t member = gradient->member();
            if (seen[member])
                throw Error(Failure::kInvalidArgument, "It occurs more than once").of_member(specs[member].name);
            seen[member] = true;
        }
    }

  private:
    std::vector<std::unique_ptr<Incoming>> members_;
    std::vector<MemberGradient*> gradients_;
};

}  // namespace shmacc
