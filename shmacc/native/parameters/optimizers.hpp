// Applies an update's gradients to the rows of an array or table: one loop, and a rule for each optimizer.
//
// The docstrings of shmacc/optim.py give the formulas, in the order of their operations. Results are the same to the
// bit for every width of vectors, since no operations are fused (CMakeLists.txt). Coefficients are computed in double
// and rounded to the type of the array.
//
// A few rows at a time are copied, with their slots, then counted as copied, and only then changed
// (parameters/update.hpp says why). Most of the time is spent on cache misses, so rows are prefetched. The copies are
// read only after a death, so they are streamed past the caches if they are many.
#pragma once

#include <cmath>

#include "base/assertions.hpp"
#include "base/errors.hpp"
#include "base/words.hpp"
#include "parameters/constraints.hpp"

namespace shmacc {

// Rules. kSlots: how many numbers of optimizer state each element has; if kRowwise, each group of elements. A rule is
// called with the content, slots and gradient of one element, or of one group.
template <class Rule>
constexpr bool kRowwise = false;

struct NewContents {
    static constexpr uint32_t kSlots = 0;
    template <class T>
    void operator()(T& p, T g) const {
        p = g;
    }
};

template <class T>
struct Sgd {
    static constexpr uint32_t kSlots = 0;
    T rate;
    void operator()(T& p, T g) const { p -= rate * g; }
};

template <class T, bool kNesterov>
struct Momentum {
    static constexpr uint32_t kSlots = 1;
    T rate, momentum;
    void operator()(T& p, T& m, T g) const {
        m = m * momentum + g;
        if constexpr (kNesterov)
            p -= g * rate + m * momentum * rate;
        else
            p -= m * rate;
    }
};

template <class T>
struct Adagrad {
    static constexpr uint32_t kSlots = 1;
    T rate, epsilon;
    void operator()(T& p, T& a, T g) const {
        a += g * g;
        p -= rate * g / (std::sqrt(a) + epsilon);
    }
};

// kL2: there is an l2 penalty. It is computed twice for each element: a row may be too wide to store it.
template <class T, bool kL2>
struct RowwiseAdagrad {
    static constexpr uint32_t kSlots = 1;
    T rate, epsilon, l2;
    void operator()(T* __restrict__ p, T& a, const T* __restrict__ g, uint64_t group) const {
        const auto decayed = [=](uint64_t j) { return kL2 ? g[j] + l2 * p[j] : g[j]; };
        a += mean_of_squares(decayed, group);
        const T factor = rate / (std::sqrt(a) + epsilon);
        for (uint64_t j = 0; j < group; ++j) p[j] -= factor * decayed(j);
    }

  private:
    // Always uses eight sums, so that vectors of any width give the same result to the bit.
    template <class Numbers>
    static T mean_of_squares(Numbers g, uint64_t group) {
        T sums[8] = {};
        uint64_t j = 0;
        for (; j + 8 <= group; j += 8)
            for (uint64_t k = 0; k < 8; ++k) sums[k] += g(j + k) * g(j + k);
        for (uint64_t k = 0; j < group; ++j, ++k) sums[k] += g(j) * g(j);
        const T sum = ((sums[0] + sums[4]) + (sums[2] + sums[6])) + ((sums[1] + sums[5]) + (sums[3] + sums[7]));
        return sum / static_cast<T>(group);
    }
};

template <class T, bool kL2>
constexpr bool kRowwise<RowwiseAdagrad<T, kL2>> = true;

template <class T, bool kTorchs>
struct Rmsprop {
    static constexpr uint32_t kSlots = 1;
    T rate, decay, epsilon;  // decay: 1 - rho
    void operator()(T& p, T& r, T g) const {
        r += (g * g - r) * decay;
        p -= rate * g / (kTorchs ? std::sqrt(r) + epsilon : std::sqrt(r + epsilon));
    }
};

template <class T, bool kTorchs>
struct RmspropMomentum {
    static constexpr uint32_t kSlots = 2;
    T rate, decay, momentum, epsilon;
    void operator()(T& p, T& r, T& m, T g) const {
        r += (g * g - r) * decay;
        if constexpr (kTorchs) {
            m = m * momentum + g / (std::sqrt(r) + epsilon);
            p -= rate * m;
        } else {
            m = m * momentum + rate * g / std::sqrt(r + epsilon);
            p -= m;
        }
    }
};

template <class T>
struct Adam {
    static constexpr uint32_t kSlots = 2;
    T rate, decay_1, decay_2, epsilon;  // rate: corrected for the bias; decays: 1 - beta
    void operator()(T& p, T& m, T& v, T g) const {
        m += (g - m) * decay_1;
        v += (g * g - v) * decay_2;
        p -= rate * m / (std::sqrt(v) + epsilon);
    }
};

template <class T, bool kSquareRoot>
struct Ftrl {
    static constexpr uint32_t kSlots = 2;
    T rate, l1, twice_l2;
    double power;
    void operator()(T& p, T& a, T& linear, T g) const {
        const T sum = a + g * g;
        const T root = raised(sum);
        linear += g - (root - raised(a)) / rate * p;
        const T shrunk = (std::copysign(l1, linear) - linear) / (root / rate + twice_l2);
        p = std::abs(linear) > l1 ? shrunk : T{0};
        a = sum;
    }

  private:
    T raised(T number) const {
        if constexpr (kSquareRoot)
            return std::sqrt(number);
        else
            return static_cast<T>(std::pow(static_cast<double>(number), power));
    }
};

// A rule with weight decay.
template <class Rule, class T>
struct Decayed : Rule {
    T l2;  // l2 * element is added to its gradient; 0 if the decay is decoupled
    T kept;  // the element is multiplied by this before the rule is applied; 1 if the decay is not decoupled
};
template <class Rule>
constexpr bool kDecays = false;
template <class Rule, class T>
constexpr bool kDecays<Decayed<Rule, T>> = true;
template <class T>
constexpr bool kDecays<RowwiseAdagrad<T, true>> = true;

// Calls act(rule). of_rows: the gradient is sparse.
template <class T, class Act>
auto with_rule(const OptimizerSpec& optimizer, double rate, const Corrections& corrections, bool of_rows,
               Act act) {
    const auto number = [&](size_t i) { return static_cast<T>(optimizer.numbers[i]); };
    const double* const numbers = optimizer.numbers;
    const T learning_rate = static_cast<T>(rate);
    switch (static_cast<OptimizerKind>(optimizer.base())) {  // no default, so g++ warns of a missing case
        case kSgd:
            if (numbers[1] == 0) return act(Sgd<T>{learning_rate});
            if (numbers[2] == 0) return act(Momentum<T, false>{learning_rate, number(1)});
            return act(Momentum<T, true>{learning_rate, number(1)});
        case kAdagrad:
            if (numbers[3] == 0) return act(Adagrad<T>{learning_rate, number(2)});
            if (optimizer.weight_decay() == 0)
                return act(RowwiseAdagrad<T, false>{learning_rate, number(2), 0});
            return act(RowwiseAdagrad<T, true>{learning_rate, number(2), number(4)});
        case kRmsprop: {
            const T decay = static_cast<T>(1 - numbers[1]);
            const auto of = [&](auto torchs) {
                if (numbers[2] == 0) return act(Rmsprop<T, torchs.value>{learning_rate, decay, number(3)});
                return act(RmspropMomentum<T, torchs.value>{learning_rate, decay, number(2), number(3)});
            };
            return optimizer.has(kAsTorch) ? of(std::true_type()) : of(std::false_type());
        }
        case kAdam:
        case kAdamW: {
            const double corrected = rate * corrections.second / corrections.first;
            const double epsilon = numbers[3] * (optimizer.has(kAsTorch) && !of_rows ? corrections.second : 1);
            return act(Adam<T>{static_cast<T>(corrected), static_cast<T>(1 - numbers[1]),
                               static_cast<T>(1 - numbers[2]), static_cast<T>(epsilon)});
        }
        case kFtrl: {
            const T twice_l2 = static_cast<T>(2 * numbers[4]);
            if (numbers[1] == -0.5) return act(Ftrl<T, true>{learning_rate, number(3), twice_l2, 0.5});
            return act(Ftrl<T, false>{learning_rate, number(3), twice_l2, -numbers[1]});
        }
        case kNoOptimizer:
        case kOptimizerKinds: break;
    }
    data_loss("an array has no optimizer");
}

template <class Rule, class T>
SHMACC_INLINE void apply_rule(const Rule& rule, T* __restrict__ p, T* __restrict__ s0, T* __restrict__ s1,
                              const T* __restrict__ g, uint64_t count, uint64_t group) {
    if constexpr (kRowwise<Rule>) {
        for (uint64_t j = 0, k = 0; j < count; j += group, ++k) rule(p + j, s0[k], g + j, group);
    } else if constexpr (Rule::kSlots == 0) {
        for (uint64_t j = 0; j < count; ++j) rule(p[j], g[j]);
    } else if constexpr (Rule::kSlots == 1) {
        for (uint64_t j = 0; j < count; ++j) rule(p[j], s0[j], g[j]);
    } else {
        for (uint64_t j = 0; j < count; ++j) rule(p[j], s0[j], s1[j], g[j]);
    }
}

// Computes decayed gradients in pieces: a row may have any width. Readers take no lock, so each element is stored once.
template <class Rule, class T>
SHMACC_INLINE void apply_rule(const Decayed<Rule, T>& rule, T* p, T* s0, T* s1, const T* g, uint64_t count,
                              uint64_t group) {
    constexpr uint64_t kPiece = 256;
    T changed[kPiece], decayed[kPiece];
    for (uint64_t begin = 0; begin < count; begin += kPiece) {
        const uint64_t piece = std::min(kPiece, count - begin);
        for (uint64_t j = 0; j < piece; ++j) changed[j] = p[begin + j] * rule.kept;
        for (uint64_t j = 0; j < piece; ++j) decayed[j] = g[begin + j] + rule.l2 * changed[j];
        const Rule& plain = rule;
        apply_rule(plain, changed, Rule::kSlots > 0 ? s0 + begin : s0, Rule::kSlots > 1 ? s1 + begin : s1,
                   rule.l2 == 0 ? g + begin : decayed, piece, group);
        copy_numbers(p + begin, changed, piece);
    }
}

template <class T>
struct Entry {
    T* contents;
    T* slots[2];
    uint64_t numbers;
    uint64_t at;
};
template <class Rule, class T>
SHMACC_INLINE Entry<T> entry_of(const TouchedArray<T>& array, uint64_t i, uint64_t width) {
    const uint64_t entry = array.rows ? static_cast<uint64_t>(array.rows[i]) : i;
    return {array.contents + entry * array.stride,
            {Rule::kSlots > 0 ? array.slots[0] + entry * array.slot_stride : nullptr,
             Rule::kSlots > 1 ? array.slots[1] + entry * array.slot_stride : nullptr},
            array.rows ? width : std::min(width, array.total - entry * width),
            entry};
}

// kWidth: an entry's width, or 0 for any.
template <uint64_t kWidth, class Rule, class T>
SHMACC_INLINE void update_entries(const Rule& given_rule, const TouchedArray<T>& given, Saving& saving) {
    constexpr uint64_t kAhead = 16;
    const Rule rule = given_rule;
    const TouchedArray<T> array = given;
    const uint64_t width = kWidth ? kWidth : array.width;
    const uint64_t group = kRowwise<Rule> ? array.group : 1;
    const uint64_t slot_width = kRowwise<Rule> ? width / group : width;
    const bool streamed = saving.streamed;
    T* const room = array.constrained ? reinterpret_cast<T*>(array.constrained->room.get()) : nullptr;
    // Saves several entries before it changes them: stores past the caches cost up to four times as much if changes
    // come between them.
    const uint64_t together =
        array.rows ? std::clamp<uint64_t>(kTogetherBytes / sizeof(T) / std::max<uint64_t>(width, 1), 1, 8) : 1;
    if (array.total > 0 && array.count > 0) {  // an array: its rows ascend
        const Entry<T> last = entry_of<Rule>(array, array.count - 1, width);
        SHMACC_ASSERT(last.at * array.stride + last.numbers <= array.total);
    }
    unsigned char* to = saving.to;
    uint64_t saved = saving.count;
    for (uint64_t begin = 0, end; begin < array.count; begin = end) {
        end = std::min(begin + together, array.count);
        for (uint64_t i = begin; array.rows && i < end && i + kAhead < array.count; ++i) {
            const auto later = static_cast<uint64_t>(array.rows[i + kAhead]);
            prefetch_row(array.contents + later * array.stride, width);
            for (uint32_t k = 0; k < Rule::kSlots; ++k)
                prefetch_row(array.slots[k] + later * array.slot_stride, slot_width);
        }
        uint64_t unsaved = 0;
        for (uint64_t i = begin; i < end; ++i) {
            const Entry<T> entry = entry_of<Rule>(array, i, width);
            if (entry.at >= array.new_from) {
                ++unsaved;
                continue;
            }
            if (array.stride > width) {  // a table: slots follow the contents
                to = save_numbers(to, entry.contents, array.stride, streamed);
                continue;
            }
            const uint64_t numbers = kWidth ? kWidth : entry.numbers;
            const uint64_t of_slots = kRowwise<Rule> ? numbers / group : numbers;
            to = save_numbers(to, entry.contents, numbers, streamed);
            if constexpr (Rule::kSlots > 0) to = save_numbers(to, entry.slots[0], of_slots, streamed);
            if constexpr (Rule::kSlots > 1) to = save_numbers(to, entry.slots[1], of_slots, streamed);
        }
        saved += end - begin - unsaved;
        compiler_barrier();
        store_relaxed(*saving.saved, saved);
        compiler_barrier();
        for (uint64_t i = begin; i < end; ++i) {
            const Entry<T> entry = entry_of<Rule>(array, i, width);
            const uint64_t numbers = kWidth ? kWidth : entry.numbers;
            T* const changed = room ? room + (i - begin) * width : entry.contents;
            if (room) copy_numbers(changed, entry.contents, numbers);
            apply_rule(rule, changed, entry.slots[0], entry.slots[1], array.gradient + i * width, numbers,
                       group);
        }
        if constexpr (!std::is_same_v<Rule, NewContents>)
            if (room) put_constrained(array.constrained->by, array.constrained->row, room, given, begin, end);
    }
    saving.to = to;
    saving.count = saved;
}

#if defined(__x86_64__)
template <uint64_t kWidth, class Rule, class T>
__attribute__((target("avx2"))) void update_entries_wide(const Rule& rule, const TouchedArray<T>& array,
                                                         Saving& saving) {
    update_entries<kWidth>(rule, array, saving);
}
#endif
template <uint64_t kWidth, class Rule, class T>
void update_entries_plain(const Rule& rule, const TouchedArray<T>& array, Saving& saving) {
    update_entries<kWidth>(rule, array, saving);
}

// Rules with decay, and x86-64 without AVX2, have only the loop for any width: each loop takes seconds to compile.
template <class Rule, class T>
void update_array(const Rule& rule, const TouchedArray<T>& array, Saving& saving) {
#if defined(__x86_64__)
    if (!__builtin_cpu_supports("avx2")) return update_entries_plain<0>(rule, array, saving);
    const auto run = [&](auto width) { update_entries_wide<width.value>(rule, array, saving); };
#else
    const auto run = [&](auto width) { update_entries_plain<width.value>(rule, array, saving); };
#endif
    if constexpr (!kDecays<Rule>) {
        if (array.rows && array.width == 64) return run(std::integral_constant<uint64_t, 64>());
        if (array.rows && array.width == 16) return run(std::integral_constant<uint64_t, 16>());
    }
    return run(std::integral_constant<uint64_t, 0>());
}

}  // namespace shmacc
