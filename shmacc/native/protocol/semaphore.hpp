// The named semaphores in front of the lanes' locks: one file for all, made and opened by descriptor.
//
// The file's name contains the segment's token, so no other process can make it first. It is complete, with
// owner and mode, before it has the name (O_TMPFILE and linkat, as for the segment). The file under the name is
// checked before it is opened, without following links: it must be a regular file of a semaphore file's size.
// Without this check it might be a hard link to a segment's file, and to close it would drop this process's locks. The
// file is mapped only if it belongs to the segment's owner: another user might truncate it, and its next use would
// raise SIGBUS.
//
// The file contains a glibc sem_t for each lane, as sem_open would make it. sem_open itself is not used: it chooses
// owner and mode by uid and umask, and cannot report whom the file belongs to.
//
// While a new segment is being made, its semaphore already has a name, but the segment has none. A flock on the
// semaphore's file protects it from the cleaner. The kernel releases the flock with the descriptor: so a cleaner
// that finds neither a flock nor a segment with that token may remove the semaphore.
#pragma once

#include <semaphore.h>
#include <sys/file.h>
#include <sys/mman.h>

#include "base/segment_file.hpp"

namespace shmacc {

class NamedSemaphore {
  public:
    enum class Found { kOpened, kMissing, kAnothers, kNoSemaphore };

    // Makes `count` semaphores in a file, and gives the file this name. While the returned descriptor is open, a
    // cleaner leaves the file alone. Returns no descriptor if the name is taken.
    static Descriptor make(const std::string& path, uint32_t count, mode_t mode, uid_t owner) {
        Descriptor fd = open_above_streams(kDirectory, O_TMPFILE | O_RDWR, 0600);
        if (!fd) system_failure("Making a semaphore", errno);
        std::vector<sem_t> fresh(count);
        for (sem_t& semaphore : fresh) sem_init(&semaphore, 1, 1);
        const size_t bytes = count * sizeof(sem_t);
        const ssize_t written = pwrite(fd.get(), fresh.data(), bytes, 0);
        if (written != static_cast<ssize_t>(bytes))
            system_failure("Making a semaphore", written < 0 ? errno : ENOSPC, bytes);
        if (owner != geteuid() && fchown(fd.get(), owner, static_cast<gid_t>(-1)) != 0)
            system_failure("Making a semaphore", errno);
        if (fchmod(fd.get(), mode) != 0 || flock(fd.get(), LOCK_EX | LOCK_NB) != 0)
            system_failure("Making a semaphore", errno);
        if (!link_to(fd.get(), path)) return Descriptor();
        return fd;
    }

    // Whether the segment of this semaphore may still be in the making. False: its creator has finished or died, or the
    // semaphore does not exist or cannot be opened.
    static bool is_being_made(const std::string& path) {
        struct stat found{};
        const Descriptor fd = open_file(path, O_RDONLY, found);
        if (!fd && is_lack(errno)) system_failure("Opening a semaphore", errno);
        if (!fd || flock(fd.get(), LOCK_SH | LOCK_NB) == 0) return false;
        if (errno != EWOULDBLOCK) system_failure("Asking who makes a semaphore", errno);
        return true;
    }

    // Opens the file of that name if it looks like a semaphore's. If not, returns no descriptor and sets errno (EINVAL:
    // it looks different).
    static Descriptor open_file(const std::string& path, int access, struct stat& found) {
        const Descriptor look(::open(path.c_str(), O_PATH | O_CLOEXEC | O_NOFOLLOW));
        if (!look || fstat(look.get(), &found) != 0) return Descriptor();
        constexpr off_t kOne = sizeof(sem_t);
        if (!S_ISREG(found.st_mode) || found.st_size < kOne || found.st_size > kOne * kMaxLanes ||
            found.st_size % kOne != 0) {
            errno = EINVAL;
            return Descriptor();
        }
        return open_above_streams("/proc/self/fd/" + std::to_string(look.get()), access);
    }

    // Gives this name to an open file that has none; false if the name is taken.
    static bool link_to(int fd, const std::string& path) {
        const std::string open_file = "/proc/self/fd/" + std::to_string(fd);
        if (linkat(AT_FDCWD, open_file.c_str(), AT_FDCWD, path.c_str(), AT_SYMLINK_FOLLOW) == 0) return true;
        if (errno == EEXIST) return false;
        system_failure("Making a name in /dev/shm", errno);
    }

    NamedSemaphore() = default;
    NamedSemaphore(const NamedSemaphore&) = delete;
    NamedSemaphore& operator=(const NamedSemaphore&) = delete;
    ~NamedSemaphore() {
        if (first_) munmap(first_, count_ * sizeof(sem_t));
    }

    // owner: the segment's owner. A mode that differs from the segment's is corrected, if this user has the right to.
    Found open(const std::string& path, uint32_t count, mode_t mode, uid_t owner) {
        struct stat found{};
        const Descriptor fd = open_file(path, O_RDWR, found);
        if (!fd) {
            if (is_lack(errno)) system_failure("Opening a semaphore", errno);
            if (errno == ENOENT) return Found::kMissing;
            return errno == EACCES ? Found::kAnothers : Found::kNoSemaphore;
        }
        if (found.st_uid != owner) return Found::kAnothers;
        const mode_t permissions = found.st_mode & 07777u;
        if (permissions != mode && (geteuid() == owner || geteuid() == 0)) fchmod(fd.get(), mode);
        if (found.st_size != static_cast<off_t>(count * sizeof(sem_t))) return Found::kNoSemaphore;
        map(fd.get(), MAP_SHARED, count);
        return Found::kOpened;
    }

    // Uses semaphores that no other process has. The threads of this process can still sleep on them; they notice
    // releases by other processes when a slice ends (lock.hpp).
    void use_own(uint32_t count) {
        map(-1, MAP_SHARED | MAP_ANONYMOUS, count);
        for (uint32_t i = 0; i < count; ++i) sem_init(first_ + i, 1, 1);
    }

    sem_t* get(uint32_t i) const { return first_ + i; }

  private:
    // Whether descriptors or memory have run out: such an error says nothing about the file.
    static bool is_lack(int error) { return error == EMFILE || error == ENFILE || error == ENOMEM; }

    void map(int fd, int flags, uint32_t count) {
        void* at = mmap(nullptr, count * sizeof(sem_t), PROT_READ | PROT_WRITE, flags, fd, 0);
        if (at == MAP_FAILED) system_failure("Mapping a semaphore", errno);
        first_ = static_cast<sem_t*>(at);
        count_ = count;
    }

    sem_t* first_ = nullptr;
    uint32_t count_ = 0;
};

}  // namespace shmacc
