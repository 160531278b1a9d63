// A digest of what updates have changed, by which hosts tell whether their copies of parameters are equal.
//
// The digest does not depend on where a table keeps its rows. Each NaN counts as the same number, since processors
// differ in the NaN that an operation returns.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace shmacc {

class Digest {
  public:
    // before: the digest of the updates before this one.
    explicit Digest(uint64_t before) : hashes_{before, 1, 2, 3} {}

    void add(uint64_t word) { hashes_[0] = mixed(hashes_[0], word); }
    // Adds numbers, or bytes of any type.
    template <class T>
    void add(const T* numbers, uint64_t count) {
        const auto* bytes = reinterpret_cast<const unsigned char*>(numbers);
        uint64_t left = count * sizeof(T);
        uint64_t hashes[kStreams];  // which stay in registers
        std::copy_n(hashes_, kStreams, hashes);
        for (; left >= kStreams * sizeof(uint64_t); left -= kStreams * sizeof(uint64_t))
            for (uint64_t& hash : hashes) {
                hash = mixed(hash, word_of<T>(bytes, sizeof(uint64_t)));
                bytes += sizeof(uint64_t);
            }
        std::copy_n(hashes, kStreams, hashes_);
        for (uint64_t size; left > 0; left -= size, bytes += size) {
            size = left < sizeof(uint64_t) ? left : sizeof(uint64_t);
            add(word_of<T>(bytes, size));
        }
    }
    uint64_t value() const {
        uint64_t all = hashes_[0];
        for (uint64_t i = 1; i < kStreams; ++i) all = mixed(all, hashes_[i]);
        return all;
    }
    // The digest of a single word. Such digests may be added up in any order.
    static uint64_t of(uint64_t word) { return mixed(0x9e3779b97f4a7c15u, word); }

  private:
    static constexpr uint64_t kStreams = 4;  // in turn, since each waits for its multiplication

    static uint64_t mixed(uint64_t hash, uint64_t word) {
        hash = (hash ^ word) * 0xff51afd7ed558ccdu;
        return hash ^ hash >> 32;
    }
    // Packs numbers into a word: the next eight bytes, or the last few. Every NaN becomes the same one.
    template <class T>
    static uint64_t word_of(const unsigned char* bytes, uint64_t size) {
        uint64_t word = 0;
        std::memcpy(&word, bytes, size);
        if constexpr (std::is_same_v<T, float>) {
            // In each half: without its sign a NaN is above infinity, so this sum carries into the sign's bit.
            constexpr uint64_t kSigns = 0x8000000080000000u, kUntilCarry = 0x007fffff007fffffu;
            const uint64_t nan = ((word & ~kSigns) + kUntilCarry) & kSigns;
            if (nan) word |= (nan >> 31) * UINT32_MAX;
        } else if constexpr (std::is_same_v<T, double>) {
            if ((word & INT64_MAX) > 0x7ff0000000000000u) word = UINT64_MAX;
        }
        return word;
    }

    uint64_t hashes_[kStreams];
};

}  // namespace shmacc
