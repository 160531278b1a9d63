// Errors, clocks, ordered loads and stores.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <exception>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace shmacc {

// The classes of shmacc.errors; module.cpp turns one into the other by name.
enum class Failure {
    kInvalidArgument,
    kDeadlineExceeded,
    kCancelled,
    kNotFound,
    kFailedPrecondition,
    kResourceExhausted,
    kPermissionDenied,
    kOutOfRange,
    kDataLoss,
    kAlreadyExists,
    kWorkerDied,
    kFinished,
    kChiefDied,
};

class Error : public std::exception {
  public:
    // Attributes of the class in shmacc.errors: numbers, tuples of numbers, and tuples of texts.
    using Fields = std::vector<std::pair<const char*, int64_t>>;
    using Lists = std::vector<std::pair<const char*, std::vector<int64_t>>>;
    using Texts = std::vector<std::pair<const char*, std::vector<std::string>>>;

    Error(Failure failure, std::string message, Fields fields = {}, Lists lists = {}, Texts texts = {})
        : failure_(failure), message_(std::move(message)), fields_(std::move(fields)),
          lists_(std::move(lists)), texts_(std::move(texts)) {}
    const char* what() const noexcept override { return message_.c_str(); }
    Failure failure() const { return failure_; }
    const Fields& fields() const { return fields_; }
    std::optional<int64_t> field(const std::string& name) const {
        for (const auto& field : fields_)
            if (name == field.first) return field.second;
        return std::nullopt;
    }
    const Lists& lists() const { return lists_; }
    const Texts& texts() const { return texts_; }
    // The same error, with the name of a group's member.
    Error of_member(const std::string& name) const {
        return Error(failure_, "Member '" + name + "': " + message_, fields_, lists_, texts_);
    }

  private:
    Failure failure_;
    std::string message_;
    Fields fields_;
    Lists lists_;
    Texts texts_;
};

[[noreturn]] inline void data_loss(const std::string& what) {
    throw Error(Failure::kDataLoss, "The segment is damaged: " + what);
}

// Memory order. What must be ordered, and why, is explained in commit.hpp (everything that an operation
// writes), lock.hpp, presence.hpp and wait_queue.hpp. In short:
//
//   * Readers without the lock use atomic words, with the orders below; plain words would be a data race.
//   * The lock's next owner needs no order: the lock passes through the kernel, which orders everything.
//   * A process is killed between two instructions. The order of instructions alone, which `compiler_barrier`
//     keeps, determines the state that a death leaves.
//
// tools/model/litmus checks these orders against the memory models of C++, AArch64 and x86-64. On x86-64 all but
// full_barrier are ordinary instructions, or none.
template <class T>
T load(const T& word) {
    return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}
template <class T>
void store(T& word, T value) {
    __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}
// Without order: for values that are only displayed, and next to barriers.
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
// Both of the above; and stores before this stay before loads after it, which even x86-64 reorders.
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

inline int64_t clock_ns(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}
inline int64_t monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }

// How far this process's clocks are ahead of the machine's: a time namespace, as of a container that was moved,
// has clocks of its own. Before 1.0.0 a process took its own clock for the machine's.
struct ClockOffset {
    std::atomic<int64_t> monotonic_ns{0};
    std::atomic<int64_t> boottime_ns{0};
};
inline ClockOffset clock_offset;  // set by `this_process`

// The clock of all times in a segment. Nobody can set it, so ages within a boot are right; and no segment in
// memory outlives a boot. It is the coarse clock because every operation reads it.
inline int64_t timestamp_ns() {
    return clock_ns(CLOCK_MONOTONIC_COARSE) - clock_offset.monotonic_ns.load(std::memory_order_relaxed);
}

// A timestamp in 32 bits, in units of 67 ms: enough for nine years after a boot.
constexpr int kShortTime = 26;
inline uint32_t short_time(int64_t timestamp) { return static_cast<uint32_t>(timestamp >> kShortTime); }

// Converts a timestamp to time since the epoch, by the present wall clock. Before 1.0.0 it was time since the
// epoch: such a number is past 2001, while a timestamp is less than 31 years. A timestamp in the future comes
// from an earlier boot, in a /dev/shm on a disk.
inline int64_t wall_ns_of(int64_t timestamp) {
    constexpr int64_t kIn2001 = 1000000000000000000;
    if (timestamp <= 0 || timestamp >= kIn2001) return timestamp;
    int64_t now, wall;
    do {  // reads both clocks in one tick: so a timestamp always gives the same time, until the clock is set
        now = timestamp_ns();
        wall = clock_ns(CLOCK_REALTIME_COARSE);
    } while (timestamp_ns() != now);
    return wall - (timestamp > now ? now : now - timestamp);
}

constexpr int64_t kForever = INT64_MAX;
constexpr int64_t kMillisecond = 1000000;
inline bool past(int64_t deadline) { return deadline != kForever && monotonic_ns() >= deadline; }

// Called repeatedly by a wait, without the lock; may throw (a signal handler raised, the handle was closed).
class Interruption {
  public:
    virtual ~Interruption() = default;
    virtual void check() = 0;
    // Whether every event that `check` looks for also ends a futex wait, as a signal to this very thread
    // does.
    virtual bool ends_sleep() const = 0;
};

// For a short wait that nothing may interrupt.
class Uninterrupted : public Interruption {
  public:
    void check() override {}
    bool ends_sleep() const override { return true; }
};

}  // namespace shmacc
