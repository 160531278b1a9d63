// The kinds of segments, members and optimizers: numbers with names.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <iterator>

namespace shmacc {

// A number of the layout and its name. Python gets all of these from python/layout.cpp, and defines none itself.
struct NamedNumber {
    uint32_t number;
    const char* name;
};
template <size_t kCount>
constexpr bool is_named(const NamedNumber (&table)[kCount], uint32_t number) {
    for (const NamedNumber& entry : table)
        if (entry.number == number) return true;
    return false;
}

// Kinds of segments and members. A member is sparse or dense; in parameters it is dense or a table.
enum Kind : uint32_t { kSparse = 1, kDense = 2, kGroup = 3, kArrays = 4, kParameters = 5, kTable = 6 };
constexpr NamedNumber kKindNames[] = {{kSparse, "sparse"}, {kDense, "dense"},           {kGroup, "group"},
                                      {kArrays, "arrays"}, {kParameters, "parameters"}, {kTable, "table"}};
constexpr bool has_arrays(uint32_t kind) { return kind == kArrays || kind == kParameters; }
enum Reduction : uint32_t { kMean = 1, kSum = 2, kCmean = 3 };
constexpr NamedNumber kReductionNames[] = {{kMean, "MEAN"}, {kSum, "SUM"}, {kCmean, "CMEAN"}};
// The types of sums. Half types are summed as float32, integers in 64 bits, complex numbers as pairs.
enum Sum : uint32_t { kFloat32 = 1, kFloat64 = 2, kInt64 = 3, kUint64 = 4 };
constexpr NamedNumber kSumNames[] = {{kFloat32, "float32"},
                                     {kFloat64, "float64"},
                                     {kInt64, "int64"},
                                     {kUint64, "uint64"}};

// How updates change an array of parameters (parameters/optimizers.hpp).
enum OptimizerKind : uint32_t {
    kNoOptimizer,
    kSgd,
    kAdagrad,
    kRmsprop,
    kAdam,
    kFtrl,
    kAdamW,
    kOptimizerKinds
};
constexpr NamedNumber kOptimizerNames[] = {
    {kSgd, "SGD"},   {kAdagrad, "Adagrad"}, {kRmsprop, "RMSprop"},
    {kAdam, "Adam"}, {kFtrl, "Ftrl"},       {kAdamW, "AdamW"},
};
static_assert(std::size(kOptimizerNames) + 1 == kOptimizerKinds, "every optimizer has a name");
// An option is a bit that is added to an optimizer's kind.
enum OptimizerOption : uint32_t { kWeightDecay = 0x100, kAsTorch = 0x200 };
constexpr NamedNumber kOptimizerOptions[] = {{kWeightDecay, "weight_decay"}, {kAsTorch, "as_torch"}};
// A condition for the rows that an update has changed (parameters/constraints.hpp). Added to an optimizer's kind.
enum ConstraintKind : uint32_t {
    kNoConstraint,
    kUnitNorm = 0x1000,
    kMaxNorm = 0x2000,
    kNonNeg = 0x3000,
    kClip = 0x4000,
    kConstraintBits = 0xF000
};
constexpr NamedNumber kConstraintNames[] = {{kUnitNorm, "UnitNorm"},
                                            {kMaxNorm, "MaxNorm"},
                                            {kNonNeg, "NonNeg"},
                                            {kClip, "Clip"}};

// An optimizer and its numbers; never changed. numbers: the fields of the class in optim.py, in their order; the
// learning rate comes first. With kWeightDecay the fifth is the weight decay. The last two belong to the constraint.
struct OptimizerSpec {
    static constexpr size_t kOwnNumbers = 5;

    uint64_t kind;  // with its options and its constraint added
    double numbers[kOwnNumbers + 2];

    uint32_t base() const {
        return static_cast<uint32_t>(kind) & ~(kWeightDecay | kAsTorch | kConstraintBits);
    }
    bool has(OptimizerOption option) const { return (kind & option) != 0; }
    ConstraintKind constraint() const { return static_cast<ConstraintKind>(kind & kConstraintBits); }
    // Whether the constraint limits whole rows, not each number.
    bool constrains_norms() const { return constraint() == kUnitNorm || constraint() == kMaxNorm; }
    bool known() const {
        return kind <= UINT32_MAX && base() < kOptimizerKinds && (base() != kNoOptimizer || kind == 0) &&
               !(base() == kFtrl && has(kWeightDecay)) &&
               (constraint() == kNoConstraint || is_named(kConstraintNames, constraint()));
    }
    const double* limits() const { return numbers + kOwnNumbers; }  // of the constraint
    // How many of the numbers a segment stores.
    size_t stored_numbers() const {
        if (kind == kNoOptimizer) return 0;
        return constraint() == kNoConstraint ? kOwnNumbers : std::size(numbers);
    }
    double weight_decay() const { return has(kWeightDecay) ? numbers[kOwnNumbers - 1] : 0; }
    // Whether weight decay multiplies the element, instead of being added to its gradient.
    bool decoupled() const {
        switch (static_cast<OptimizerKind>(base())) {  // no default, so g++ warns of a missing case
            case kAdamW: return true;
            case kNoOptimizer:
            case kSgd:
            case kAdagrad:
            case kRmsprop:
            case kAdam:
            case kFtrl:
            case kOptimizerKinds: break;
        }
        return false;
    }
};

// How the initial contents of a table's rows are made (parameters/initial.hpp).
enum InitialKind : uint64_t { kConstant = 1, kUniform = 2, kNormal = 3 };
constexpr NamedNumber kInitialNames[] = {{kConstant, "Constant"}, {kUniform, "Uniform"}, {kNormal, "Normal"}};
// Properties of a table; never changed. numbers: the fields of the class in init.py, in order, without the seed.
struct TableSpec {
    uint64_t initial;
    double numbers[2];
    uint64_t seed;
    uint64_t max_rows;
};

constexpr uint64_t sum_bytes(uint32_t sum) { return sum == kFloat32 ? 4 : 8; }
// Calls act(T{}), where T is the C++ type of these sums. unpack_directory has checked that `sum` is a Sum.
template <class Act>
auto with_sum_type(uint32_t sum, Act act) {
    switch (static_cast<Sum>(sum)) {  // no default, so that g++ warns of a missing case
        case kFloat32: return act(float{});
        case kFloat64: return act(double{});
        case kInt64: return act(int64_t{});
        case kUint64: return act(uint64_t{});
    }
    std::abort();
}

}  // namespace shmacc
