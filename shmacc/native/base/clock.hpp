// Clocks and deadlines, and what may interrupt a wait.
#pragma once

#include <atomic>
#include <cstdint>
#include <ctime>

namespace shmacc {

inline int64_t clock_ns(clockid_t clock) {
    timespec now;
    clock_gettime(clock, &now);
    return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}
inline int64_t monotonic_ns() { return clock_ns(CLOCK_MONOTONIC); }

// How far this process's clocks are ahead of the machine's. They differ in a time namespace, such as that of a
// container that was moved from another machine.
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

// Converts a timestamp to time since the epoch, by the present wall clock. A timestamp in the future comes from
// an earlier boot, in a /dev/shm on a disk.
inline int64_t wall_ns_of(int64_t timestamp) {
    if (timestamp <= 0) return timestamp;
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
    // Whether every event that `check` looks for also ends a futex wait, as a signal to this very thread does.
    virtual bool ends_sleep() const = 0;
};

// For a short wait that nothing may interrupt.
class Uninterrupted : public Interruption {
  public:
    void check() override {}
    bool ends_sleep() const override { return true; }
};

}  // namespace shmacc
