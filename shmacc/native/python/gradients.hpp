// Gradients that Python makes: an apply checks them, and uses them once.
#pragma once

#include "accumulators/put_gradient.hpp"
#include "python/interpreter.hpp"

namespace shmacc {

// The arrays that a gradient reads. Made and destroyed with the GIL.
template <class T>
struct RowArrays {
    RowArrays(nb::handle indices, nb::handle values, nb::handle given_counts)
        : keys(indices, 1), numbers(values, kAnyNumber), row_dims(numbers.dims(1)),
          width(product(row_dims) * numbers.components()) {
        if (!given_counts.is_none()) counts.emplace(given_counts, 1);
        if (keys.size() > kMaxRows || numbers.size() != keys.size() * width ||
            (counts && counts->size() != keys.size()))
            throw Error(Failure::kInvalidArgument, "Sizes of indices, values and contributions disagree");
    }

    const ArrayBuffer<int64_t> keys;
    const ArrayBuffer<T> numbers;
    std::optional<ArrayBuffer<int64_t>> counts;
    Dims row_dims;
    const uint64_t width;
};
template <class T>
struct DenseArray {
    explicit DenseArray(nb::handle values) : numbers(values, kAnyNumber) {}

    const ArrayBuffer<T> numbers;
};

template <class Combine, class T = typename Combine::Number>
class GivenRows : private RowArrays<T>, public SparseMemberGradient<Combine> {
  public:
    // counts: contributions of each row, or None for `weight` each.
    GivenRows(uint32_t member, int64_t count, int64_t weight, nb::handle indices, nb::handle values,
              nb::handle counts, bool ascending)
        : RowArrays<T>(indices, values, counts),
          SparseMemberGradient<Combine>(member, std::move(this->row_dims), count, weight, this->keys.data(),
                                        this->numbers.data(), this->counts ? this->counts->data() : nullptr,
                                        static_cast<uint32_t>(this->keys.size()), this->width, ascending) {}
};

template <class Combine, class T = typename Combine::Number>
class GivenArray : private DenseArray<T>, public DenseMemberGradient<Combine> {
  public:
    GivenArray(uint32_t member, int64_t count, int64_t weight, nb::handle values)
        : DenseArray<T>(values), DenseMemberGradient<Combine>(member, this->numbers.dims(0), count, weight,
                                                              this->numbers.data(), this->numbers.size()) {}
};

constexpr const char* kGradient = "shmacc.MemberGradient";

// Makes a gradient of a sparse member. sum, reduction: the member's. The values have the type of its sums (complex:
// pairs). counts, ascending: see SortedRows.
inline nb::object sparse_gradient(uint32_t member, uint32_t sum, uint32_t reduction, nb::handle indices,
                                  nb::handle values, nb::handle counts, bool ascending, int64_t count,
                                  int64_t weight) {
    return with_sums(sum, reduction, [&](auto sums) {
        auto made = std::make_unique<GivenRows<decltype(sums)>>(member, count, weight, indices, values,
                                                                counts, ascending);
        return given<MemberGradient>(std::move(made), kGradient);
    });
}
inline nb::object dense_gradient(uint32_t member, uint32_t sum, uint32_t reduction, nb::handle values,
                                 int64_t count, int64_t weight) {
    return with_sums(sum, reduction, [&](auto sums) {
        auto made = std::make_unique<GivenArray<decltype(sums)>>(member, count, weight, values);
        return given<MemberGradient>(std::move(made), kGradient);
    });
}

inline void check_fits(const MemberGradient& gradient, const MemberSpecs& specs) {
    const uint32_t member = gradient.member();
    if (member + 1 >= specs.size() || !gradient.fits(specs[member]))
        throw Error(Failure::kInvalidArgument, "The gradient fits no member of the segment");
}

// Returns what one apply adds. Throws if a member occurs twice: only one of its gradients would be added, silently.
inline std::vector<MemberGradient*> gradients_of(const MemberSpecs& specs, const nb::list& all) {
    std::vector<MemberGradient*> gradients;
    gradients.reserve(all.size());
    std::vector<bool> seen(specs.size());
    for (const nb::handle one : all) {
        auto& gradient = made_as<MemberGradient>(one, kGradient);
        check_fits(gradient, specs);
        gradients.push_back(&gradient);
        const uint32_t member = gradient.member();
        if (seen[member])
            throw Error(Failure::kInvalidArgument, "It occurs more than once").of_member(specs[member].name);
        seen[member] = true;
    }
    return gradients;
}

// terms: None for a gradient that counts once, has no contributor, and waits for ever; else (gradients, weight,
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

}  // namespace shmacc
