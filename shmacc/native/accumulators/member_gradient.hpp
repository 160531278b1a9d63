// A gradient that is being added has a MemberGradient for each of its members. Only `prepare` and `add` need the lock.
#pragma once

#include "accumulators/dense_sums.hpp"
#include "accumulators/sparse_sums.hpp"

namespace shmacc {

class MemberGradient {
  public:
    // count, weight: number and weight of the gradients that have this member (a partial is the sum of several).
    MemberGradient(uint32_t member, Dims dims, int64_t count, int64_t weight)
        : member_(member), dims_(std::move(dims)), count_(count), weight_(weight) {}
    virtual ~MemberGradient() = default;
    MemberGradient(const MemberGradient&) = delete;
    MemberGradient& operator=(const MemberGradient&) = delete;

    uint32_t member() const { return member_; }
    const Dims& dims() const { return dims_; }
    int64_t count() const { return count_; }
    int64_t weight() const { return weight_; }

    // Whether the gradient fits this member in kind, sums, and size.
    virtual bool fits(const MemberSpec& spec) const = 0;
    virtual uint64_t bytes() const = 0;  // of values
    virtual void sort() = 0;

    // How many rows and bytes `add` will need.
    struct Need {
        uint64_t new_rows = 0;
        uint64_t undo_rows = 0;
        uint64_t undo_bytes = 0;
    };
    // Reserves memory, under the lane's lock. If it throws, nothing that is committed has changed.
    virtual Need prepare(Member& member) = 0;
    // Adds the gradient, between Lane::begin and the commit.
    virtual void add(Member& member, Undo& undo) = 0;

  protected:
    // size: how many numbers the gradient has for these dims.
    template <class Combine>
    bool fits(const MemberSpec& spec, Kind kind, uint64_t size) const {
        return spec.kind == kind && size == product(dims_) * spec.components &&
               with_sums(spec, [](auto sums) { return std::is_same_v<decltype(sums), Combine>; });
    }

  private:
    const uint32_t member_;
    const Dims dims_;
    const int64_t count_, weight_;
};

template <class Combine>
class SparseMemberGradient : public MemberGradient {
    using T = typename Combine::Number;

  public:
    // counts: see SortedRows. All arrays must outlive this.
    SparseMemberGradient(uint32_t member, Dims dims, int64_t count, int64_t weight, const int64_t* keys,
                         const T* values, const int64_t* counts, uint32_t rows, uint64_t width, bool ascending)
        : MemberGradient(member, std::move(dims), count, weight), width_(width),
          bytes_(rows * width * sizeof(T)), rows_(keys, values, counts, weight, rows, width, ascending) {}

    bool fits(const MemberSpec& spec) const override {
        return MemberGradient::fits<Combine>(spec, kSparse, width_);
    }
    uint64_t bytes() const override { return bytes_; }
    void sort() override { rows_.sort(); }
    Need prepare(Member& member) override {
        found_ = SparseSums<Combine>(member).prepare(rows_);
        const uint64_t added = rows_.count() - found_.fresh;
        return {found_.fresh, added, added * member.row_bytes()};
    }
    void add(Member& member, Undo& undo) override { SparseSums<Combine>(member).add(rows_, found_, undo); }

  private:
    const uint64_t width_, bytes_;
    SortedRows<Combine> rows_;
    typename SparseSums<Combine>::Found found_;
};

template <class Combine>
class DenseMemberGradient : public MemberGradient {
    using T = typename Combine::Number;

  public:
    DenseMemberGradient(uint32_t member, Dims dims, int64_t count, int64_t weight, const T* values,
                        uint64_t size)
        : MemberGradient(member, std::move(dims), count, weight), values_(values), size_(size) {}

    bool fits(const MemberSpec& spec) const override {
        return MemberGradient::fits<Combine>(spec, kDense, size_);
    }
    uint64_t bytes() const override { return size_ * sizeof(T); }
    void sort() override {}
    Need prepare(Member& member) override {
        DenseSums<Combine>(member).prepare();
        return {};
    }
    void add(Member& member, Undo&) override {
        DenseSums<Combine>(member).add(values_, member.state.count == count());
    }

  private:
    const T* values_;
    const uint64_t size_;
};

}  // namespace shmacc
