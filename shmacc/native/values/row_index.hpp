// The hash from row number to place: open addressing over buckets of one cache line.
//
// The cost of a lookup does not grow with the number of rows (tensorflow#6460).
//
// A bucket holds ten entries: a place number and a 16-bit tag each. The tag has other bits of the hash than those that
// choose the bucket; 0: the entry is free. A lookup touches one line of the index, and then the places whose tags
// match: their row numbers decide. Entries are filled from the front and never freed one by one, so a search ends at
// the first free entry. A bucket counts as empty if its stamp is not the round's, so a new round empties all by a new
// stamp. (In an accumulator the first places are in use. In a table of parameters each place says whether it is:
// table.hpp.)
//
// 6.4 bytes per entry and a load of 0.72 to 0.9 keep the index near 8 bytes per row; growing by a quarter
// moves each row about four times in its life.
//
// Row numbers may come from an attacker who wants applies to be slow. If the hash were known, thirty thousand rows for
// the same bucket would be quickly calculated, and each lookup would walk past all of them, under the lock. So the hash
// has a key: 256 random bits, drawn when the segment is made (Config::hash_key), read as two 128-bit numbers a and b.
//
//   y(row) = the upper 64 bits of (a * row + b) mod 2^128     (Dietzfelbinger's multiply-add-shift)
//   hash   = mix(y), a fixed and invertible mix
//
//   Claim: over the keys, the hashes of two different rows are independent and uniform, whatever the rows.
//   Let u = a * row + b, v = a * other + b and other - row = 2^s * (an odd number); s <= 63. As b is uniform and
//   independent of a, so is u. Given u, v = u + a * (other - row) is u plus a uniform multiple of 2^s: the bits of v
//   from s on are uniform, and the upper 64 bits are among these. An invertible mix of both keeps this.
//
// So two rows share a home bucket, or a tag, under no more keys than random rows would, and any set of rows that is
// chosen without the key is expected to have as many collisions as random rows. For linear probing this bounds the
// expected cost of inserting any n rows by O(n log n) (Pagh, Pagh and Ruzic; Patrascu and Thorup); with a known hash it
// may be n^2. The mix is for the rows of ordinary programs: without it the homes of 0, 1, 2, ... would lie at equal
// steps around the table, and cluster under one key in a few hundred; with it they are spread like random ones.
//
// Not prevented: a user with the right to read the segment can read the key. (The token would be a worse key: it is in
// the semaphore's name, which every user of the machine can list.) Nor does this stop an attacker who times applies of
// single rows and chooses the next row by the result.
//
// Rejected alternatives:
//   - A folded multiplication ("mum", wyhash) has no proof; some known pairs collide under far too many seeds, and rows
//     2^31 apart cluster.
//   - The row xored with a seed before a fixed mix: an attacker can search offline for differences that pass the mix
//     far more often than by chance, whatever the seed.
//   - SipHash takes longer than the rest of a lookup in the caches, and would only stop the attacker who times applies.
//
// The index's contents are not trusted: probes are bounded, and only place numbers below the rows in use are used.
#pragma once

#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "base/errors.hpp"
#include "base/layout.hpp"
#include "base/words.hpp"
#include "values/kernels.hpp"

namespace shmacc {

constexpr uint32_t kAbsent = UINT32_MAX;

// Successive keys of a gradient that have consecutive places; if `place` is kAbsent, keys that have no places.
struct Run {
    uint32_t place;
    uint32_t length;
};

// The hash of row numbers under a segment's key; tests/hazards/test_flooded_index.py repeats it.
class RowHash {
  public:
    explicit RowHash(const uint64_t (&key)[4])
        : factor_(Wide{key[0]} << 64 | key[1]), addend_(Wide{key[2]} << 64 | key[3]) {}

    uint64_t operator()(int64_t row) const {
        const auto y = static_cast<uint64_t>((factor_ * static_cast<uint64_t>(row) + addend_) >> 64);
        return (y ^ (y >> 32)) * 0xd6e8feb86659fd93u;  // the upper 32 and the lower 16 bits are used
    }

  private:
    __extension__ using Wide = unsigned __int128;
    Wide factor_;
    Wide addend_;
};

// The places of an accumulator: the first `rows` ones are in use.
struct FirstRows {
    const RowPlace* table;
    uint64_t rows;

    bool have(uint64_t place, int64_t row) const { return place < rows && table[place].row == row; }
    void fetch(uint64_t place) const { __builtin_prefetch(&table[place]); }
};

class Index {
  public:
    Index(Bucket* buckets, uint64_t count, uint32_t stamp, const RowHash& hash)
        : buckets_(buckets), count_(count), stamp_(stamp), hash_(hash) {}

    // How many buckets these rows need, with room to grow by a quarter before the next rebuild.
    static uint64_t buckets_for(uint64_t rows) { return rows * 10 / (kBucketEntries * 72 / 10) + 1; }
    static bool crowded(uint64_t filled, uint64_t buckets) {
        return filled * 10 > buckets * kBucketEntries * 9;
    }

    // Finds the places of ascending keys among the first `rows` places. `runs` gets runs that together cover all keys,
    // in order. Returns the number of runs, at most one for each key.
    uint32_t find(const int64_t* keys, uint32_t count, const RowPlace* table, uint64_t rows, Run* runs) const {
        RunList list{runs, runs};
        if (rows == 0 || count_ == 0) {
            if (count > 0) list.add(kAbsent, count);
            return static_cast<uint32_t>(list.end - list.begin);
        }
        for (uint32_t base = 0; base < count; base += kBlock) {
            const uint32_t block = std::min(kBlock, count - base);
            const uint32_t later = std::min(kBlock, count - base - block);
            const FirstRows known{table, rows};
            if (find_neighbours(keys + base, block, later, known, list)) continue;
            find_block(keys + base, block, known, [&](uint32_t, uint32_t place) { list.add(place, 1); });
        }
        return static_cast<uint32_t>(list.end - list.begin);
    }
    // Calls found(i, place) for each key, in order of i; place: kAbsent if the key has none. Keys may be in any order.
    // known: has the functions of FirstRows.
    template <class Known, class Found>
    void find_each(const int64_t* keys, uint32_t count, const Known& known, Found found) const {
        for (uint32_t base = 0; base < count; base += kBlock)
            find_block(keys + base, std::min(kBlock, count - base), known,
                       [&](uint32_t i, uint32_t place) { found(base + i, place); });
    }

    // The bucket where the search for a row begins, and the row's tag.
    struct Home {
        uint32_t bucket;
        uint16_t tag;
    };
    // Returns the home of a row, and prefetches its bucket.
    Home home_of(int64_t row) const {
        const uint64_t hash = hash_(row);
        const uint64_t at = home(hash);
        __builtin_prefetch(&buckets_[at], 1);
        return {static_cast<uint32_t>(at), tag(hash)};
    }
    // Whether buckets can be those of an index: they have its stamp or an older one, and are filled from the front.
    // is_sound checks all; is_sound_around checks those that a search for an absent `row` passes. generation: the
    // current one, the largest of all stamps. (From 2^32 on, stamps do not tell which is older.)
    bool is_sound_around(int64_t row, uint64_t generation) const {
        uint64_t at = home(hash_(row));
        for (uint64_t probe = 0; probe < count_; ++probe) {
            const Bucket& bucket = buckets_[at];
            if (!is_sound(bucket, generation)) return false;
            if (bucket.stamp != stamp_ || bucket.tags[kBucketEntries - 1] == 0) return true;
            if (++at == count_) at = 0;
        }
        return false;
    }
    bool is_sound(uint64_t generation) const {
        return std::all_of(buckets_, buckets_ + count_,
                           [&](const Bucket& bucket) { return is_sound(bucket, generation); });
    }
    // Adds a row, which must be absent; there must be a free entry.
    void insert(const Home& home, uint32_t place) {
        uint64_t at = home.bucket;
        for (uint64_t probe = 0; probe < count_; ++probe) {
            Bucket& bucket = buckets_[at];
            if (bucket.stamp != stamp_) {
                std::memset(bucket.tags, 0, sizeof bucket.tags);
                store(bucket.stamp, stamp_);  // until this store the bucket counts as empty
            }
            uint32_t free = matching(bucket, 0);
            if (free) {
                int entry = __builtin_ctz(free);
                bucket.places[entry] = place;
                store(bucket.tags[entry], home.tag);  // until this store the entry is free
                return;
            }
            if (++at == count_) at = 0;
        }
        is_full();
    }

  private:
    static constexpr uint32_t kBlock = 64;

    struct RunList {
        Run* begin;
        Run* end;
        // Adds `length` keys. They have `place` and the places after it; if `place` is kAbsent, they have no places.
        void add(uint32_t place, uint32_t length) {
            if (end > begin) {
                Run& last = end[-1];
                if (place == kAbsent ? last.place == kAbsent
                                     : last.place != kAbsent && last.place + last.length == place) {
                    last.length += length;
                    return;
                }
            }
            *end++ = {place, length};
        }
        // The place after that of the last key.
        uint64_t next() const {
            return end > begin && end[-1].place != kAbsent ? uint64_t{end[-1].place} + end[-1].length : kAbsent;
        }
    };

    // Guesses a block's places without the index. Places are assigned in order of arrival, so rows that arrived
    // together have adjacent places. If a gradient resembles an earlier one, its rows may be in consecutive places, or
    // (rows of a dense range) in places as far apart as their numbers. So the first key is tried right after the
    // previous block's last place. If the last key is then where one of the two patterns puts it, the keys between are
    // tried by the same pattern. The row number in a place decides whether a guess is right. The second pattern also
    // prefetches the places that it expects for the `later` keys after the block.
    bool find_neighbours(const int64_t* keys, uint32_t count, uint32_t later, const FirstRows& known,
                         RunList& list) const {
        const RowPlace* const table = known.table;
        const uint64_t rows = known.rows;
        uint64_t first = list.next();
        if (!known.have(first, keys[0])) first = search(hash_(keys[0]), keys[0], known);
        if (first == kAbsent) return false;
        const uint64_t span = static_cast<uint64_t>(keys[count - 1]) - static_cast<uint64_t>(keys[0]);
        if (known.have(first + count - 1, keys[count - 1])) {
            if (stand_at(table + first, keys, count)) {
                list.add(static_cast<uint32_t>(first), count);
                return true;
            }
            for (uint32_t i = 0; i < count; ++i) {
                bool found = table[first + i].row == keys[i];
                list.add(found ? static_cast<uint32_t>(first + i) : search(hash_(keys[i]), keys[i], known), 1);
            }
            return true;
        }
        if (span < rows && known.have(first + span, keys[count - 1])) {
            // Keys ascend from keys[0] to keys[count - 1]. But a caller's memory may change meanwhile, so each place is
            // checked, too.
            auto expected = [&](uint32_t i) {
                return first + (static_cast<uint64_t>(keys[i]) - static_cast<uint64_t>(keys[0]));
            };
            for (uint32_t i = count; i < count + later; ++i)
                __builtin_prefetch(&table[std::min(expected(i), rows - 1)]);
            for (uint32_t i = 0; i < count; ++i) {
                const uint64_t place = expected(i);
                list.add(known.have(place, keys[i]) ? static_cast<uint32_t>(place)
                                                    : search(hash_(keys[i]), keys[i], known),
                         1);
            }
            return true;
        }
        return false;
    }

    // Makes three passes, each prefetching for the next, so that the cache misses of a block overlap.
    template <class Known, class Found>
    void find_block(const int64_t* keys, uint32_t count, const Known& known, Found found) const {
        uint64_t hashes[kBlock];
        uint32_t places[kBlock];
        for (uint32_t i = 0; i < count; ++i) {
            hashes[i] = hash_(keys[i]);
            __builtin_prefetch(&buckets_[home(hashes[i])]);
        }
        for (uint32_t i = 0; i < count; ++i) {
            uint32_t place = first_match(hashes[i]);
            if (place >= known.rows) place = kAbsent;
            places[i] = place;
            known.fetch(place == kAbsent ? 0 : place);
        }
        for (uint32_t i = 0; i < count; ++i)
            found(i, known.have(places[i], keys[i]) ? places[i] : search(hashes[i], keys[i], known));
    }

    bool is_sound(const Bucket& bucket, uint64_t generation) const {
        if (bucket.stamp != stamp_) return bucket.stamp < stamp_ || generation > UINT32_MAX;
        const uint32_t free = matching(bucket, 0);
        return free == 0 || free + (free & -free) == 1u << kBucketEntries;
    }
    // The first place with a matching tag in the home bucket or the next one, where most of the overflow goes.
    uint32_t first_match(uint64_t hash) const {
        uint64_t at = home(hash);
        for (int probe = 0; probe < 2; ++probe) {
            const Bucket& bucket = buckets_[at];
            if (load_relaxed(bucket.stamp) != stamp_) break;
            if (uint32_t matches = matching(bucket, tag(hash))) return bucket.places[__builtin_ctz(matches)];
            if (bucket.tags[kBucketEntries - 1] == 0 || ++at == count_) break;
        }
        return kAbsent;
    }

    uint64_t home(uint64_t hash) const { return ((hash >> 32) * count_) >> 32; }
    static uint16_t tag(uint64_t hash) {
        const uint64_t bits = hash & 0xffffu;
        return static_cast<uint16_t>(bits + (bits == 0));
    }

    template <class Known>
    uint32_t search(uint64_t hash, int64_t row, const Known& known) const {
        uint64_t at = home(hash);
        for (uint64_t probe = 0; probe < count_; ++probe) {
            const Bucket& bucket = buckets_[at];
            if (load_relaxed(bucket.stamp) != stamp_) return kAbsent;
            for (uint32_t matches = matching(bucket, tag(hash)); matches; matches &= matches - 1) {
                uint32_t place = bucket.places[__builtin_ctz(matches)];
                if (known.have(place, row)) return place;
            }
            if (bucket.tags[kBucketEntries - 1] == 0) return kAbsent;
            if (++at == count_) at = 0;
        }
        is_full();
    }
    // A sound index is never full (`crowded`). A full one is an error: if the row were just reported as absent, each
    // search would walk past all buckets.
    [[noreturn]] static void is_full() { data_loss("its index is full"); }

    // Bit i: tags[i] equals `tag`.
    static uint32_t matching(const Bucket& bucket, uint16_t tag) {
#ifdef __SSE2__
        __m128i wanted = _mm_set1_epi16(static_cast<short>(tag));
        __m128i first = _mm_load_si128(reinterpret_cast<const __m128i*>(bucket.tags));
        uint32_t last;
        std::memcpy(&last, bucket.tags + 8, 4);
        __m128i found = _mm_packs_epi16(_mm_cmpeq_epi16(first, wanted),
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
    RowHash hash_;
};

// Puts absent rows into the index. Each row is inserted kAhead rows later, so that its bucket is fetched meanwhile.
class Inserts {
  public:
    explicit Inserts(const Index& index) : index_(index) {}

    void add(int64_t row, uint64_t place) {
        Waiting& next = waiting_[added_ % kAhead];
        if (added_ >= kAhead) index_.insert(next.home, next.place);
        next = {index_.home_of(row), static_cast<uint32_t>(place)};
        ++added_;
    }
    void finish() {
        for (uint64_t i = added_ < kAhead ? 0 : added_ - kAhead; i < added_; ++i)
            index_.insert(waiting_[i % kAhead].home, waiting_[i % kAhead].place);
    }

  private:
    static constexpr uint64_t kAhead = 32;

    struct Waiting {
        Index::Home home;
        uint32_t place;
    };

    Index index_;
    uint64_t added_ = 0;
    Waiting waiting_[kAhead];
};

}  // namespace shmacc
