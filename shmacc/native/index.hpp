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

#include "kernels.hpp"
#include "layout.hpp"
#include "support.hpp"

namespace shmacc {

constexpr uint32_t kAbsent = UINT32_MAX;

// Keys that follow each other in a gradient and stand in consecutive slots; or, with kAbsent, in none.
struct Run {
    uint32_t slot;
    uint32_t length;
};

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

    // Where the keys stand among the first `rows` slots: runs that together cover all of them, in order.
    // Keys ascend. Returns how many runs there are, at most one a key.
    uint32_t find(const int64_t* keys, uint32_t count, const Slot* table, uint64_t rows, Run* runs) const {
        RunList list{runs, runs};
        if (rows == 0 || count_ == 0) {
            if (count > 0) list.add(kAbsent, count);
            return static_cast<uint32_t>(list.end - list.begin);
        }
        for (uint32_t base = 0; base < count; base += kBlock) {
            const uint32_t block = std::min(kBlock, count - base);
            const uint32_t later = std::min(kBlock, count - base - block);
            if (find_neighbours(keys + base, block, later, table, rows, list)) continue;
            find_block(keys + base, block, table, rows, list);
        }
        return static_cast<uint32_t>(list.end - list.begin);
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
    static constexpr uint32_t kBlock = 64;

    struct RunList {
        Run* begin;
        Run* end;
        // The next `length` keys stand at `slot` and after it, or, with kAbsent, nowhere.
        void add(uint32_t slot, uint32_t length) {
            if (end > begin) {
                Run& last = end[-1];
                if (slot == kAbsent ? last.slot == kAbsent
                                    : last.slot != kAbsent && last.slot + last.length == slot) {
                    last.length += length;
                    return;
                }
            }
            *end++ = {slot, length};
        }
    };

    // Slots are given out in order of first touch, so rows that came in together stand together: a gradient
    // like an earlier one finds its rows one after the other, and a stretch of neighbouring rows at the
    // same distance from each other. Where the block's ends lie so, its inner keys are looked for there
    // first, without the index. Right or wrong, the row number in the slot decides. Where the `later` keys
    // after the block would stand is fetched meanwhile.
    bool find_neighbours(const int64_t* keys, uint32_t count, uint32_t later, const Slot* table,
                         uint64_t rows, RunList& list) const {
        const uint64_t first = search(hash_row(keys[0]), keys[0], table, rows);
        if (first == kAbsent) return false;
        auto leads = [&](uint64_t slot, int64_t key) { return slot < rows && table[slot].row == key; };
        const uint64_t span = static_cast<uint64_t>(keys[count - 1]) - static_cast<uint64_t>(keys[0]);
        if (leads(first + count - 1, keys[count - 1])) {
            if (stand_at(table + first, keys, count)) {
                list.add(static_cast<uint32_t>(first), count);
                return true;
            }
            for (uint32_t i = 0; i < count; ++i) {
                bool found = table[first + i].row == keys[i];
                list.add(found ? static_cast<uint32_t>(first + i)
                               : search(hash_row(keys[i]), keys[i], table, rows),
                         1);
            }
            return true;
        }
        if (span < rows && leads(first + span, keys[count - 1])) {
            // Keys ascend from keys[0] to keys[count - 1]; a caller's memory may change meanwhile, so
            // the bound is checked all the same.
            auto expected = [&](uint32_t i) {
                return first + (static_cast<uint64_t>(keys[i]) - static_cast<uint64_t>(keys[0]));
            };
            for (uint32_t i = count; i < count + later; ++i)
                __builtin_prefetch(&table[std::min(expected(i), rows - 1)]);
            for (uint32_t i = 0; i < count; ++i) {
                const uint64_t slot = expected(i);
                list.add(leads(slot, keys[i]) ? static_cast<uint32_t>(slot)
                                              : search(hash_row(keys[i]), keys[i], table, rows),
                         1);
            }
            return true;
        }
        return false;
    }

    // Three passes, each fetching for the next: the misses of a block overlap.
    void find_block(const int64_t* keys, uint32_t count, const Slot* table, uint64_t rows,
                    RunList& list) const {
        uint64_t hashes[kBlock];
        uint32_t slots[kBlock];
        for (uint32_t i = 0; i < count; ++i) {
            hashes[i] = hash_row(keys[i]);
            __builtin_prefetch(&buckets_[home(hashes[i])]);
        }
        for (uint32_t i = 0; i < count; ++i) {
            uint32_t slot = first_match(hashes[i]);
            if (slot >= rows) slot = kAbsent;
            slots[i] = slot;
            __builtin_prefetch(&table[slot == kAbsent ? 0 : slot]);
        }
        for (uint32_t i = 0; i < count; ++i) {
            bool found = slots[i] != kAbsent && table[slots[i]].row == keys[i];
            list.add(found ? slots[i] : search(hashes[i], keys[i], table, rows), 1);
        }
    }

    // The first slot with a matching tag in the home bucket or the one after it, where most overflow goes.
    uint32_t first_match(uint64_t hash) const {
        uint64_t at = home(hash);
        for (int probe = 0; probe < 2; ++probe) {
            const Bucket& bucket = buckets_[at];
            if (bucket.stamp != stamp_) break;
            if (uint32_t matches = matching(bucket, tag(hash)))
                return bucket.slots[__builtin_ctz(matches)];
            if (bucket.tags[kBucketEntries - 1] == 0 || ++at == count_) break;
        }
        return kAbsent;
    }

    uint64_t home(uint64_t hash) const { return ((hash & 0xffffffffu) * count_) >> 32; }
    static uint16_t tag(uint64_t hash) {
        const uint64_t bits = hash >> 48;
        return static_cast<uint16_t>(bits + (bits == 0));
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
