// The hash from row number to slot: open addressing over buckets of one cache line.
//
// A bucket holds ten 16-bit tags (other bits of the hash than those that choose the bucket; 0: free) and ten
// slot numbers: a lookup touches one line of the index and, on a matching tag, the slot it points to, whose row
// number decides. Places are filled from the front and never freed one by one, so the first free one ends a
// search. A bucket whose stamp is not the round's is empty: a new round empties all by counting up.
//
// 6.4 bytes a place and a load of 0.72 to 0.9 keep the index near 8 bytes a row; growing by a quarter costs
// each row four moves in its life.
//
// Nothing here is trusted: probes are bounded, and a slot number is used only if it is below the rows in use.
#pragma once

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "layout.hpp"
#include "support.hpp"

namespace shmacc {

constexpr uint32_t kAbsent = UINT32_MAX;

inline uint64_t hash_row(int64_t row) {
    uint64_t x = static_cast<uint64_t>(row) * 0x9e3779b97f4a7c15u;
    x = (x ^ (x >> 32)) * 0xd6e8feb86659fd93u;
    return x ^ (x >> 32);
}

class Index {
  public:
    Index(Bucket* buckets, uint64_t count, uint32_t stamp) : buckets_(buckets), count_(count), stamp_(stamp) {}

    // Buckets for so many rows, with room to grow by a quarter before the next rebuild.
    static uint64_t buckets_for(uint64_t rows) { return rows * 10 / (kBucketEntries * 72 / 10) + 1; }
    static bool crowded(uint64_t filled, uint64_t buckets) {
        return filled * 10 > buckets * kBucketEntries * 9;
    }

    // slots[i] = the slot of keys[i], or kAbsent, among the first `rows` slots.
    void find(const int64_t* keys, uint32_t count, const Slot* table, uint64_t rows, uint32_t* slots) const {
        if (rows == 0 || count_ == 0) {
            std::fill(slots, slots + count, kAbsent);
            return;
        }
        // Three passes over a block, each fetching for the next: the misses of a block overlap.
        constexpr uint32_t kBlock = 64;
        uint64_t hashes[kBlock];
        for (uint32_t base = 0; base < count; base += kBlock) {
            uint32_t block = std::min(kBlock, count - base);
            for (uint32_t i = 0; i < block; ++i) {
                hashes[i] = hash_row(keys[base + i]);
                __builtin_prefetch(&buckets_[home(hashes[i])]);
            }
            for (uint32_t i = 0; i < block; ++i) {
                const Bucket& bucket = buckets_[home(hashes[i])];
                uint32_t matches = bucket.stamp == stamp_ ? matching(bucket, tag(hashes[i])) : 0;
                uint32_t slot = matches ? bucket.slots[__builtin_ctz(matches)] : kAbsent;
                if (slot >= rows) slot = kAbsent;
                slots[base + i] = slot;
                __builtin_prefetch(&table[slot == kAbsent ? 0 : slot]);
            }
            for (uint32_t i = 0; i < block; ++i) {
                uint32_t slot = slots[base + i];
                if (slot == kAbsent || table[slot].row != keys[base + i])
                    slots[base + i] = search(hashes[i], keys[base + i], table, rows);
            }
        }
    }

    // The row must be absent, and there must be a free place.
    void insert(int64_t row, uint32_t slot) {
        uint64_t hash = hash_row(row);
        uint64_t at = home(hash);
        for (uint64_t probe = 0; probe < count_; ++probe) {
            Bucket& bucket = buckets_[at];
            if (bucket.stamp != stamp_) {
                std::memset(bucket.tags, 0, sizeof bucket.tags);
                store(bucket.stamp, stamp_);  // killed before this: still empty
            }
            uint32_t free = matching(bucket, 0);
            if (free) {
                int place = __builtin_ctz(free);
                bucket.slots[place] = slot;
                store(bucket.tags[place], tag(hash));  // killed before this: still free
                return;
            }
            if (++at == count_) at = 0;
        }
        data_loss("its index is full");
    }

    void prefetch(int64_t row) const { __builtin_prefetch(&buckets_[home(hash_row(row))], 1); }

  private:
    uint64_t home(uint64_t hash) const { return ((hash & 0xffffffffu) * count_) >> 32; }
    static uint16_t tag(uint64_t hash) {
        auto bits = static_cast<uint16_t>(hash >> 48);
        return bits ? bits : uint16_t{1};
    }

    uint32_t search(uint64_t hash, int64_t row, const Slot* table, uint64_t rows) const {
        uint64_t at = home(hash);
        for (uint64_t probe = 0; probe < count_; ++probe) {
            const Bucket& bucket = buckets_[at];
            if (bucket.stamp != stamp_) return kAbsent;
            for (uint32_t matches = matching(bucket, tag(hash)); matches; matches &= matches - 1) {
                uint32_t slot = bucket.slots[__builtin_ctz(matches)];
                if (slot < rows && table[slot].row == row) return slot;
            }
            if (bucket.tags[kBucketEntries - 1] == 0) return kAbsent;
            if (++at == count_) at = 0;
        }
        return kAbsent;
    }

    // Bit i: tags[i] equals `tag`.
    static uint32_t matching(const Bucket& bucket, uint16_t tag) {
#ifdef __SSE2__
        __m128i wanted = _mm_set1_epi16(static_cast<short>(tag));
        __m128i first = _mm_load_si128(reinterpret_cast<const __m128i*>(bucket.tags));
        uint32_t last;
        std::memcpy(&last, bucket.tags + 8, 4);
        __m128i found = _mm_packs_epi16(
            _mm_cmpeq_epi16(first, wanted),
            _mm_cmpeq_epi16(_mm_cvtsi32_si128(static_cast<int>(last)), wanted));
        return static_cast<uint32_t>(_mm_movemask_epi8(found)) & ((1u << kBucketEntries) - 1);
#else
        uint32_t found = 0;
        for (uint32_t i = 0; i < kBucketEntries; ++i) found |= uint32_t{bucket.tags[i] == tag} << i;
        return found;
#endif
    }

    Bucket* buckets_;
    uint64_t count_;
    uint32_t stamp_;
};

}  // namespace shmacc
