// Compiles the optimizers for each type of an array's numbers.
#include "parameters/optimizers.hpp"

namespace shmacc {

SlotShape slots_of(const OptimizerSpec& optimizer, const Dims& dims) {
    if (optimizer.kind == kNoOptimizer) return {0, 1, false};
    const uint64_t last = dims.empty() || dims.back() == 0 ? 1 : static_cast<uint64_t>(dims.back());
    return with_rule<float>(optimizer, 0, {1, 1}, false, [last](auto rule) {
        return SlotShape{rule.kSlots, kRowwise<decltype(rule)> ? last : 1, kRowwise<decltype(rule)>};
    });
}

double initial_of_slot(const OptimizerSpec& optimizer, uint32_t number) {
    if (number > 0) return 0;
    if (optimizer.base() == kAdagrad) return optimizer.numbers[1];
    return optimizer.base() == kFtrl ? optimizer.numbers[2] : 0;
}

static Corrections corrections_after(int64_t updates, const OptimizerSpec& optimizer) {
    if (optimizer.base() != kAdam && optimizer.base() != kAdamW) return {1, 1};
    const auto count = static_cast<double>(updates);
    return {1 - std::pow(optimizer.numbers[1], count), std::sqrt(1 - std::pow(optimizer.numbers[2], count))};
}

template <class T>
void optimize(const OptimizerSpec& optimizer, const Rate& given, int64_t updates,
              const TouchedArray<T>& array, Saving& saving) {
    const double rate = given.rate;
    const Corrections corrections = given.corrections ? *given.corrections
                                                      : corrections_after(updates, optimizer);
    const double decay = optimizer.weight_decay();
    const bool decoupled = optimizer.decoupled();
    with_rule<T>(optimizer, rate, corrections, array.rows != nullptr, [&](auto rule) {
        using Rule = decltype(rule);
        if constexpr (!kRowwise<Rule>)
            if (decay != 0)
                return update_array(Decayed<Rule, T>{rule, static_cast<T>(decoupled ? 0 : decay),
                                                     static_cast<T>(decoupled ? 1 - rate * decay : 1)},
                                    array, saving);
        update_array(rule, array, saving);
    });
}
template void optimize(const OptimizerSpec&, const Rate&, int64_t, const TouchedArray<float>&, Saving&);
template void optimize(const OptimizerSpec&, const Rate&, int64_t, const TouchedArray<double>&, Saving&);

template <class T>
void constrain(const OptimizerSpec& optimizer, T* rows, uint64_t numbers, uint64_t row) {
    if (optimizer.constraint() == kNoConstraint || numbers == 0) return;
    const TouchedArray<T> all{rows, {}, nullptr, nullptr, 1, numbers, numbers};
    put_constrained(optimizer, row, rows, all, 0, 1);
}
template void constrain(const OptimizerSpec&, float*, uint64_t, uint64_t);
template void constrain(const OptimizerSpec&, double*, uint64_t, uint64_t);

template <class T>
void replace(const TouchedArray<T>& array, Saving& saving) {
    update_array(NewContents{}, array, saving);
}
template void replace(const TouchedArray<unsigned char>&, Saving&);
template void replace(const TouchedArray<float>&, Saving&);
template void replace(const TouchedArray<double>&, Saving&);

}  // namespace shmacc
