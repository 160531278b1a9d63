// Ordered loads and stores of shared memory.
//
// What must be ordered, and why, is explained in commit.hpp (everything that an operation writes), lock.hpp,
// presence.hpp and wait_queue.hpp. In short:
//
//   * Readers without the lock use atomic words, with the orders below; plain words would be a data race.
//   * The lock's next owner needs no order: the lock passes through the kernel, which orders everything.
//   * A process is killed between two instructions. The order of instructions alone, which `compiler_barrier`
//     keeps, determines the state that a death leaves.
//
// tools/model/litmus checks these orders against the memory models of C++, AArch64 and x86-64. On x86-64 all but
// full_barrier are ordinary instructions, or none.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace shmacc {

template <class T>
T load(const T& word) {
    return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}
template <class T>
void store(T& word, T value) {
    __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}
// These two impose no order: for values that are only displayed, and for accesses beside a barrier.
template <class T>
T load_relaxed(const T& word) {
    return __atomic_load_n(&word, __ATOMIC_RELAXED);
}
template <class T>
void store_relaxed(T& word, T value) {
    __atomic_store_n(&word, value, __ATOMIC_RELAXED);
}
// Loads and stores before this stay before stores after it. (A store with release orders what precedes it,
// not what follows.)
inline void store_barrier() { std::atomic_thread_fence(std::memory_order_release); }
// Loads before this, including the kernel's in a system call, stay before loads and stores after it.
inline void load_barrier() { std::atomic_thread_fence(std::memory_order_acquire); }
// Does what the two above do; and stores before this stay before loads after it, which even x86-64 reorders.
inline void full_barrier() { std::atomic_thread_fence(std::memory_order_seq_cst); }
// Instructions before this stay before those after it, as seen by a signal, and so by a death.
inline void compiler_barrier() { std::atomic_signal_fence(std::memory_order_acq_rel); }

// Records of 8-byte words in shared memory, copied word by word without order: the copy may mix several stores,
// but no word is torn.
using AnyWord = uint64_t __attribute__((may_alias));
template <class Record>
constexpr bool kIsWords = std::is_trivially_copyable_v<Record> && sizeof(Record) % 8 == 0 &&
                          alignof(Record) % 8 == 0;

template <class Record>
Record load_words(const Record& shared) {
    static_assert(kIsWords<Record>);
    Record copy;
    const auto* from = reinterpret_cast<const AnyWord*>(&shared);
    auto* to = reinterpret_cast<AnyWord*>(&copy);
    for (size_t i = 0; i < sizeof(Record) / 8; ++i) to[i] = load_relaxed(from[i]);
    return copy;
}
template <class Record>
void store_words(Record& shared, const Record& record) {
    static_assert(kIsWords<Record>);
    const auto* from = reinterpret_cast<const AnyWord*>(&record);
    auto* to = reinterpret_cast<AnyWord*>(&shared);
    for (size_t i = 0; i < sizeof(Record) / 8; ++i) store_relaxed(to[i], from[i]);
}

}  // namespace shmacc
