// What an update passes to the optimizers: the part of an array to change, and where to save this part first.
//
// The optimizers are a unit of their own (optimizers.cpp), since each is compiled for several types and widths.
#pragma once

#include "base/member_specs.hpp"
#include "values/kernels.hpp"

namespace shmacc {

// Entries that are changed together have at most this many bytes, except a single entry that is larger.
constexpr uint64_t kTogetherBytes = 4096;

// The constraint of an array, and room in which entries are changed and constrained: readers take no lock, so the array
// gets only an entry's final contents.
struct Constrained {
    // row: numbers in a row, whose norm may be constrained; an entry has whole rows. entry_bytes: the largest entry.
    Constrained(const OptimizerSpec& by, uint64_t row, uint64_t entry_bytes)
        : by(by), row(std::max<uint64_t>(row, 1)) {
        if (by.constraint() == kNoConstraint) return;
        room.reset(new double[std::max(entry_bytes, kTogetherBytes) / sizeof(double) + 1]);
    }
    const Constrained* if_any() const { return room ? this : nullptr; }

    const OptimizerSpec& by;
    const uint64_t row;
    std::unique_ptr<double[]> room;
};

// Part of an array that an update changes. An entry is a row, or a piece of an array that is changed as a whole.
template <class T>
struct TouchedArray {
    T* contents;
    T* slots[2];
    const T* gradient;  // the entries' gradients, one after the other; or their new contents
    const int64_t* rows;  // which entries; null: all, in order
    uint64_t count;  // how many entries
    uint64_t width;  // numbers in an entry; without `rows` the last entry may be shorter
    uint64_t total;  // numbers in the array
    uint64_t group = 1;  // this many numbers of the contents share one number of a slot
    uint64_t stride = width;  // numbers from the contents of one entry to those of the next one
    uint64_t slot_stride = stride / group;  // numbers from the slot of one entry to that of the next one
    uint64_t new_from = UINT64_MAX;  // entries from here on are new: they are not saved
    const Constrained* constrained = nullptr;  // null: no constraint
};

// Where entries are copied to before they are changed.
struct Saving {
    unsigned char* to;  // aligned to kUndoAlign
    uint64_t* saved;  // how many entries are completely copied: these are put back after a death
    uint64_t count;
    bool streamed;
};

template <class T>
SHMACC_INLINE unsigned char* save_numbers(unsigned char* to, const T* from, uint64_t count, bool streamed) {
    const uint64_t bytes = count * sizeof(T);
    if (streamed)
        stream(to, from, bytes);
    else
        std::memcpy(to, from, bytes);
    return to + undo_aligned(bytes);
}

// The optimizer's slots for an array of these dimensions. group: how many numbers of the array share one number of a
// slot. rowwise: slots lack the array's last dimension, even if that is 1.
struct SlotShape {
    uint32_t count;
    uint64_t group;
    bool rowwise;
};
SlotShape slots_of(const OptimizerSpec& optimizer, const Dims& dims);
// The initial value of an optimizer's slot.
double initial_of_slot(const OptimizerSpec& optimizer, uint32_t number);

// Adam's corrections of the bias after some updates: 1 - beta_1**updates, and the square root of 1 - beta_2**updates.
// std::pow is not the same to the bit on every processor, so copies on several hosts are given them.
struct Corrections {
    double first, second;
};
// The learning rate of an update, and Adam's corrections; nullopt: computed from the array's number of updates.
struct Rate {
    double rate;
    std::optional<Corrections> corrections = {};
};

// Changes the entries as the optimizer does. updates: how often the array was updated, this time included.
template <class T>
void optimize(const OptimizerSpec& optimizer, const Rate& rate, int64_t updates, const TouchedArray<T>& array,
              Saving& saving);

// Applies the optimizer's constraint, if it has one, to rows of `row` numbers, one after the other.
template <class T>
void constrain(const OptimizerSpec& optimizer, T* rows, uint64_t numbers, uint64_t row);

// Gives the entries their new contents.
template <class T>
void replace(const TouchedArray<T>& array, Saving& saving);

}  // namespace shmacc
