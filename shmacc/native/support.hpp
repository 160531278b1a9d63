// Errors, clocks, ordered loads and stores: what every other header here uses.
#pragma once

#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <ctime>
#include <exception>
#include <string>
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
};

class Error : public std::exception {
  public:
    // Attributes of the class in shmacc.errors.
    using Fields = std::vector<std::pair<const char*, int64_t>>;

    Error(Failure failure, std::string message, Fields fields = {})
        : failure_(failure), message_(std::move(message)), fields_(std::move(fields)) {}
    const char* what() const noexcept override { return message_.c_str(); }
    Failure failure() const { return failure_; }
    const Fields& fields() const { return fields_; }

  private:
    Failure failure_;
    std::string message_;
    Fields fields_;
};

[[noreturn]] inline void data_loss(const std::string& what) {
    throw Error(Failure::kDataLoss, "The segment is damaged: " + what);
}

// Shared words are read and written by several processes; a process may be killed between any two of
// its instructions, so the order in which stores become visible is the order of these calls.
template <class T>
T load(const T& word) {
    return __atomic_load_n(&word, __ATOMIC_ACQUIRE);
}
template <class T>
void store(T& word, T value) {
    __atomic_store_n(&word, value, __ATOMIC_RELEASE);
}
// Stores before this stay before stores after it (compiler and machine).
inline void store_barrier() { std::atomic_thread_fence(std::memory_order_release); }

inline int64_t clock_ns(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}
inline int64_t monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }
inline int64_t wall_ns() { return clock_ns(CLOCK_REALTIME_COARSE); }

constexpr int64_t kForever = INT64_MAX;
constexpr int64_t kMillisecond = 1000000;

// What a wait asks for again and again: may throw (a signal handler raised, the handle was closed). Called
// without the lock.
class Interruption {
  public:
    virtual ~Interruption() = default;
    virtual void check() = 0;
    // Whether all that `check` looks for also ends a futex wait, as a signal to this very thread does.
    virtual bool ends_sleep() const = 0;
};

}  // namespace shmacc
