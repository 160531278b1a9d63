// The identity of this process, and the detection of forks.
//
// A forked child has its parent's memory but none of its record locks and threads. At the fork, shmacc takes no
// lock, and only adds 1 to the fork generation. Objects that belong to a process record their fork generation,
// and are reset when they are first used in another generation (OpenSegment::after_fork).
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "segment/support.hpp"

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

// Returns 0 or the error's number.
inline int watch_forks() {
    return pthread_atfork(nullptr, nullptr, [] { ++fork_generation; });
}

struct ProcessIdentity {
    uint64_t pid_namespace = 0;  // inode of /proc/self/ns/pid; 0: unknown
    uint64_t start_ticks = 0;  // field 22 of /proc/self/stat; 0: unknown
};

inline uint64_t own_start_ticks() {
    char text[1024];
    const int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    const ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0) return 0;
    text[got] = 0;
    // The command's name, in parentheses, may contain any characters; field 3 follows it.
    const char* at = std::strrchr(text, ')');
    for (int field = 2; at && field < 22; ++field) {
        at = std::strchr(at, ' ');
        if (at) ++at;
    }
    return at ? std::strtoull(at, nullptr, 10) : 0;
}

// Random bits that no other process has, in any pid namespace.
inline uint64_t fresh_bits() {
    uint64_t bits = 0;
    while (getrandom(&bits, sizeof bits, 0) != static_cast<ssize_t>(sizeof bits))
        if (errno != EINTR)  // a filter of system calls: once the system has started, there are always 8 bytes
            throw Error(Failure::kFailedPrecondition,
                        std::string("The system gives no random numbers (getrandom: ") +
                            std::strerror(errno) + "), by which processes are told apart");
    return bits;
}

// Needs the GIL.
inline const ProcessIdentity& this_process() {
    static ProcessIdentity identity;
    static uint64_t of_generation = UINT64_MAX;
    if (of_generation != fork_generation) {
        struct stat found{};
        identity = {stat("/proc/self/ns/pid", &found) == 0 ? found.st_ino : 0, own_start_ticks()};
        of_generation = fork_generation;
    }
    return identity;
}

}  // namespace shmacc
