// A digest of what updates have changed, by which hosts tell whether their copies of parameters are equal.
//
// It does not depend on where a table keeps its rows. Each NaN counts as the same number, since processors differ in
// the NaN that an operation returns.
#pragma once

#include <cstdint>
#include <cstring>

namespace shmacc {

class Digest {
  public:
    // before: the digest of the updates before this one.
    explicit Digest(uint64_t before) : hashes_{before, 1, 2, 3} {}

    void add(uint64_t word) { mix(0, word); }
    void add(const float* numbers, uint64_t count) { add_each(numbers, count); }
    void add(const double* numbers, uint64_t count) { add_each(numbers, count); }
    void add(const unsigned char* bytes, uint64_t count) {
        uint64_t word;
        for (; count >= sizeof word; bytes += sizeof word, count -= sizeof word) {
            std::memcpy(&word, bytes, sizeof word);
            mix(0, word);
        }
        word = 0;
        std::memcpy(&word, bytes, count);
        mix(0, word);
    }
    uint64_t value() const {
        uint64_t all = hashes_[0];
        for (uint64_t i = 1; i < kStreams; ++i) all = mixed(all, hashes_[i]);
        return all;
    }
    // Of a word alone: such digests may be added up in any order.
    static uint64_t of(uint64_t word) { return mixed(0x9e3779b97f4a7c15u, word); }

  private:
    static constexpr uint64_t kStreams = 4;  // in turn, since each waits for its multiplication

    static uint64_t mixed(uint64_t hash, uint64_t word) {
        hash = (hash ^ word) * 0xff51afd7ed558ccdu;
        return hash ^ hash >> 32;
    }
    void mix(uint64_t stream, uint64_t word) { hashes_[stream] = mixed(hashes_[stream], word); }
    template <class T>
    void add_each(const T* numbers, uint64_t count) {
        for (uint64_t i = 0; i < count; ++i) {
            uint64_t word = 0;
            std::memcpy(&word, &numbers[i], sizeof(T));
            mix(i % kStreams, numbers[i] == numbers[i] ? word : UINT64_MAX);
        }
    }

    uint64_t hashes_[kStreams];
};

}  // namespace shmacc
