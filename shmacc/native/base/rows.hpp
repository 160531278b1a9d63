// Rows as a segment stores them: their places, the buckets of the index, and what undo logs save of them.
#pragma once

#include <cstdint>
#include <iterator>

#include "base/regions.hpp"

namespace shmacc {

struct RowPlace {
    int64_t row;
    union {
        int64_t contributions;
        int64_t applier;  // contributors: who applied (applier_of)
        int64_t stamp;  // table: stamp_of_given, stamp_of_free
    };
};
// Stamps of a table's place: the operation that committed `generation` gave the place to an id, or freed it.
constexpr int64_t stamp_of_given(uint64_t generation) { return static_cast<int64_t>(generation << 1); }
constexpr int64_t stamp_of_free(uint64_t generation) { return static_cast<int64_t>(generation << 1 | 1); }

constexpr uint32_t kBucketEntries = 10;

// One cache line of the index: ten entries of a 16-bit tag (0: free) and a place number.
struct Bucket {
    alignas(64) uint16_t tags[kBucketEntries];
    uint32_t stamp;
    uint32_t places[kBucketEntries];
};
static_assert(sizeof(Bucket) == 64, "a bucket is one cache line");

constexpr uint64_t kMaxRows = 0xfffffff0u;  // places are 32-bit numbers

// What the undo log saves of consecutive places of a member. Their old contributions follow (int64 each); with
// kUndoNumbers their old row numbers instead.
struct UndoRecord {
    uint32_t first_place;
    uint16_t places;
    uint16_t member;  // with kUndoNumbers added, if row numbers follow
};
constexpr uint16_t kUndoNumbers = 1 << 15;
static_assert(kMaxMembers < kUndoNumbers);
constexpr uint64_t kUndoLogBytes = sizeof(UndoRecord) + sizeof(int64_t);  // at most, for each row or row number
constexpr uint64_t kUndoAlign = 16;  // the alignment of each member's first saved row
constexpr uint64_t undo_aligned(uint64_t bytes) { return (bytes + kUndoAlign - 1) / kUndoAlign * kUndoAlign; }

// The undo log of parameters has a SavedArray for each array that the update changes, and three for a table: for links
// and ids, for steps, for rows. The numbers of its entries follow (int64 each) if they are listed. An entry is a row,
// or a piece of an array that is changed as a whole. UndoRows contains the old entries, each with its part of the
// optimizer's slots; each part starts at a multiple of kUndoAlign.
struct SavedArray {
    uint64_t member;
    uint64_t entries;
    uint64_t listed;  // 1: entry numbers follow; 0: all entries from the first on, in order
    struct {
        uint64_t entry_bytes;  // 0: the update does not change this region
        uint64_t bytes;  // size of all the region's entries, saved or not
    } regions[std::size(kArrayRegions)];
};

}  // namespace shmacc
