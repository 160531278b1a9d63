// Which process this is, and that a child of fork is another one.
//
// A forked child has its parent's memory but none of its record locks and threads. Nothing is done about
// that in the fork itself: no lock is taken around it, and a child that never uses shmacc pays for one
// addition. Whatever belongs to a process remembers the fork generation it belongs to, and is put in order
// when it is first used in another one (OpenSegment::after_fork).
#pragma once

#include <fcntl.h>
#include <pthread.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdint>
#include <cstdlib>
#include <cstring>

namespace shmacc {

// How many forks lie between the process that loaded the extension and this one. Changes only in a child of
// fork, while it has a single thread.
inline uint64_t fork_generation = 0;

// Where something was made: a forked child has copies of what its parent's operations hold, and they are not
// its to put in order.
class Origin {
  public:
    bool is_here() const { return generation_ == fork_generation; }

  private:
    uint64_t generation_ = fork_generation;
};

inline void watch_forks() {
    pthread_atfork(nullptr, nullptr, [] { ++fork_generation; });
}

struct ProcessIdentity {
    uint64_t pid_namespace = 0;  // inode of /proc/self/ns/pid; 0: /proc does not say
    uint64_t start_ticks = 0;    // field 22 of /proc/self/stat; 0: likewise
};

namespace detail {

inline uint64_t own_start_ticks() {
    char text[1024];
    const int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    if (fd < 0) return 0;
    const ssize_t got = read(fd, text, sizeof text - 1);
    close(fd);
    if (got <= 0) return 0;
    text[got] = 0;
    // The command's name, in parentheses, may hold anything; field 3 follows it.
    const char* at = std::strrchr(text, ')');
    for (int field = 2; at && field < 22; ++field) {
        at = std::strchr(at, ' ');
        if (at) ++at;
    }
    return at ? std::strtoull(at, nullptr, 10) : 0;
}

inline ProcessIdentity identify() {
    ProcessIdentity identity;
    struct stat found{};
    if (stat("/proc/self/ns/pid", &found) == 0) identity.pid_namespace = found.st_ino;
    identity.start_ticks = own_start_ticks();
    return identity;
}

}  // namespace detail

// What nobody else has, of whatever pid namespace; never 0.
inline uint64_t fresh_token() {
    uint64_t token = 0;
    if (getrandom(&token, sizeof token, 0) != static_cast<ssize_t>(sizeof token))
        abort();  // cannot be: so few bytes are always there once the system has started
    return token | 1;
}

// With the GIL.
inline const ProcessIdentity& this_process() {
    static ProcessIdentity identity;
    static uint64_t of_generation = UINT64_MAX;
    if (of_generation != fork_generation) {
        identity = detail::identify();
        of_generation = fork_generation;
    }
    return identity;
}

}  // namespace shmacc
