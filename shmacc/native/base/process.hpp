// The identity of this process, and the detection of forks.
//
// A forked child has its parent's memory but none of its record locks and threads (OpenBLAS#294). At the fork,
// shmacc takes no lock, and only adds 1 to the fork generation. Objects that belong to a process record their
// fork generation, and are reset when they are first used in another generation (OpenSegment::after_fork).
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "base/clock.hpp"
#include "base/errors.hpp"
#include "base/words.hpp"

namespace shmacc {

// The number of forks between the process that loaded the extension and this one. Changes only in a child of
// fork, while it has a single thread.
inline uint64_t fork_generation = 0;

// Remembers in which process an object was made: a forked child has copies of the objects of its parent's
// operations, and must not clean them up.
class Origin {
  public:
    bool is_here() const { return generation_ == fork_generation; }

  private:
    uint64_t generation_ = fork_generation;
};

// Counts forks from now on. Returns 0, or an error number.
inline int watch_forks() {
    return pthread_atfork(nullptr, nullptr, [] { ++fork_generation; });
}

struct ProcessIdentity {
    uint32_t pid_namespace = 0;  // inode of /proc/self/ns/pid; 0: unknown
    uint64_t start_ticks = 0;  // field 22 of /proc/self/stat, by the machine's clock; 0: unknown
};

// Reads the beginning of a file, as a string; returns its length, or 0.
template <size_t kSize>
size_t read_text(const char* path, char (&text)[kSize]) {
    text[0] = 0;
    const int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    const ssize_t got = read(fd, text, kSize - 1);
    close(fd);
    text[got > 0 ? got : 0] = 0;
    return got > 0 ? static_cast<size_t>(got) : 0;
}

inline uint64_t inode_of(const char* path) {
    struct stat found{};
    return stat(path, &found) == 0 ? found.st_ino : 0;
}

// Reads the offsets of the time namespace in which new children begin. They count only if this process is in it, too:
// an unshare(2) moves only the children. Without timens_offsets (Linux before 5.6, no /proc) there are none.
inline void read_clock_offset() {
    int64_t monotonic_ns = 0, boottime_ns = 0;
    char text[256];
    if (inode_of("/proc/self/ns/time") == inode_of("/proc/self/ns/time_for_children") &&
        read_text("/proc/self/timens_offsets", text)) {
        const auto read_clock = [&](const char* clock, int64_t& to) {
            const char* at = std::strstr(text, clock);
            long long seconds = 0, nanoseconds = 0;
            if (at && std::sscanf(at + std::strlen(clock), "%lld %lld", &seconds, &nanoseconds) == 2)
                to = seconds * 1000000000 + nanoseconds;
        };
        read_clock("monotonic", monotonic_ns);
        read_clock("boottime", boottime_ns);
    }
    clock_offset.monotonic_ns.store(monotonic_ns, std::memory_order_relaxed);
    clock_offset.boottime_ns.store(boottime_ns, std::memory_order_relaxed);
}

inline uint64_t own_start_ticks() {
    char text[1024];
    if (!read_text("/proc/self/stat", text)) return 0;
    // The command's name, in parentheses, may contain any characters; field 3 follows it.
    const char* at = std::strrchr(text, ')');
    for (int field = 2; at && field < 22; ++field) {
        at = std::strchr(at, ' ');
        if (at) ++at;
    }
    if (!at) return 0;
    const int64_t tick_ns = 1000000000 / sysconf(_SC_CLK_TCK);
    const int64_t ahead = clock_offset.boottime_ns.load(std::memory_order_relaxed) / tick_ns;
    return std::strtoull(at, nullptr, 10) - static_cast<uint64_t>(ahead);
}

// Random bits that no other process has, in any pid namespace.
inline uint64_t fresh_bits() {
    uint64_t bits = 0;
    while (getrandom(&bits, sizeof bits, 0) != static_cast<ssize_t>(sizeof bits))
        if (errno != EINTR)  // a filter of system calls refuses: a system that has started always has 8 bytes
            throw Error(Failure::kFailedPrecondition,
                        std::string("The system gives no random numbers (getrandom: ") +
                            std::strerror(errno) + "), by which processes are told apart");
    return bits;
}

// Needs the GIL. Called before the first timestamp in each process.
inline const ProcessIdentity& this_process() {
    static ProcessIdentity identity;
    static uint64_t of_generation = UINT64_MAX;
    if (of_generation != fork_generation) {
        read_clock_offset();
        identity = {static_cast<uint32_t>(inode_of("/proc/self/ns/pid")), own_start_ticks()};
        of_generation = fork_generation;
    }
    return identity;
}

}  // namespace shmacc
