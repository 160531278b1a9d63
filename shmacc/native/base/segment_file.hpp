// The one place that opens and closes segments' files.
//
// POSIX record locks belong to a process and a file: closing *any* descriptor of the file drops all of them,
// and with them the proof that the process is attached (presence.hpp) and that it owns the lock (lock.hpp).
// So a process has one SegmentFile for each file, shared by all its users (and few descriptors: pytorch#14768). The
// last user closes its descriptors, and nothing else in this library opens a file under a segment's name.
//
//   Invariant: no descriptor of a file is closed in a process while something of the process relies on a
//              record lock on that file.
//
// The GIL guards the list of open files: a thread keeps the GIL while it reads and changes the list. So a file
// that is not in the list has no other descriptor while it is being opened. The list has no lock of its own: a fork, or
// a finalizer or signal handler that opens the same name, might find it held. The system calls under the GIL do not
// block: /dev/shm is memory, and a file that is not regular is refused before it is opened.
//
// Other code may close a descriptor (a daemonizing process closes all: FBGEMM#5083), and its number may then
// lead to another file. So fstat compares the file's identity before anything is locked, reserved or mapped, and
// a descriptor of another file is neither used nor closed. A segment's file that is opened again after that gets a new
// SegmentFile, whose descriptor may have the old number. So the old SegmentFile first forgets that number, and
// hands over the descriptors that it still has: closing them would drop the locks of the new SegmentFile.
#pragma once

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/errors.hpp"
#include "base/layout.hpp"
#include "base/words.hpp"

namespace shmacc {

constexpr const char* kDirectory = "/dev/shm";

class Descriptor {
  public:
    explicit Descriptor(int fd = -1) : fd_(fd) {}
    Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        std::swap(fd_, other.fd_);
        return *this;
    }
    ~Descriptor() {
        if (fd_ >= 0) close(fd_);
    }
    int get() const { return fd_; }
    int release() { return std::exchange(fd_, -1); }
    explicit operator bool() const { return fd_ >= 0; }

  private:
    int fd_;
};

// Opens a file as open(2) does, with a descriptor above the standard streams. A process may have closed these streams,
// as daemons do, and still print: perror() writes to descriptor 2, wherever that leads. So a segment's descriptor must
// never be 0, 1 or 2. While the file is opened, O_PATH descriptors, to which nothing can be written, occupy whichever
// of these three numbers are free.
inline Descriptor open_above_streams(const std::string& path, int flags, mode_t mode = 0) {
    Descriptor streams[3];
    for (Descriptor& stream : streams) {
        stream = Descriptor(::open("/", O_PATH | O_CLOEXEC));
        if (!stream) return Descriptor();
        if (stream.get() > STDERR_FILENO) break;
    }
    return Descriptor(::open(path.c_str(), flags | O_CLOEXEC, mode));
}

inline std::string four_octal(mode_t mode) {
    char text[8];
    snprintf(text, sizeof text, "%04o", mode & 07777u);
    return text;
}

// The space of /dev/shm; zeros if the system does not report it.
inline struct statvfs space_of_directory() {
    struct statvfs space{};
    if (statvfs(kDirectory, &space) != 0) return {};
    return space;
}
inline uint64_t free_bytes(const struct statvfs& space) { return uint64_t{space.f_bavail} * space.f_frsize; }

// bytes: how many were needed; 0: not known. doing: what failed, and why.
[[noreturn]] inline void shared_memory_full(const std::string& doing, uint64_t bytes,
                                            const struct statvfs& space) {
    const uint64_t free = free_bytes(space), total = uint64_t{space.f_blocks} * space.f_frsize;
    Error::Fields fields;
    if (bytes) fields.emplace_back("needed", static_cast<int64_t>(bytes));
    const std::string needed = bytes ? std::to_string(bytes) + " more bytes were needed" : "";
    if (total == 0)  // /dev/shm has no limit of its own, or the system does not report it
        throw Error(Failure::kResourceExhausted,
                    "The system has no memory left for /dev/shm" + (bytes ? ": " + needed : "") + " (" +
                        doing + "); nothing was changed",
                    std::move(fields));
    fields.emplace_back("free", static_cast<int64_t>(free));
    fields.emplace_back("total", static_cast<int64_t>(total));
    throw Error(Failure::kResourceExhausted,
                "Shared memory is full: " + needed + (bytes ? ", " : "") + std::to_string(free) + " of " +
                    std::to_string(total) + " are free in /dev/shm (" + doing +
                    "); nothing was changed. To get more: `docker run --shm-size=...`, a larger "
                    "emptyDir with medium Memory, or `mount -o remount,size=... /dev/shm`",
                std::move(fields));
}

// kept: bytes that are left free for other programs (Header::kept_free).
[[noreturn]] inline void no_room_beside_others(uint64_t bytes, uint64_t kept, const struct statvfs& space) {
    const uint64_t free = free_bytes(space), total = uint64_t{space.f_blocks} * space.f_frsize;
    throw Error(
        Failure::kResourceExhausted,
        "Shared memory has no room: " + std::to_string(bytes) + " more bytes were needed, and " +
            std::to_string(free) + " of " + std::to_string(total) + " are free in /dev/shm, of which " +
            std::to_string(kept) +
            " are kept for Ray's object store; nothing was changed. Take gradients more often, have a "
            "larger /dev/shm, or a smaller object store",
        {{"needed", static_cast<int64_t>(bytes)},
         {"free", static_cast<int64_t>(free)},
         {"total", static_cast<int64_t>(total)},
         {"kept", static_cast<int64_t>(std::min<uint64_t>(kept, INT64_MAX))}});
}

[[noreturn]] inline void file_too_large(const std::string& what) {
    rlimit limit{};
    if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
        throw Error(
            Failure::kResourceExhausted,
            what +
                " failed: /dev/shm is no memory (tmpfs) here, but on a filesystem that has no files of a "
                "segment's length, which is nearly all a hole: mount a tmpfs there (Kubernetes: an "
                "emptyDir with `medium: Memory`)");
    throw Error(Failure::kResourceExhausted,
                what + " failed: this process may write files of at most " + std::to_string(limit.rlim_cur) +
                    " bytes (RLIMIT_FSIZE). A segment's file is longer, nearly all of it a hole that takes "
                    "no memory: `ulimit -f unlimited`, or LimitFSIZE=infinity of the service");
}

[[noreturn]] inline void unusable(const std::string& what, const std::string& why) {
    const bool proc = access("/proc/self/fd", F_OK) == 0;
    throw Error(Failure::kFailedPrecondition,
                what + " failed: " +
                    (proc
                         ? "/dev/shm cannot be used" + why
                         : "/proc is not mounted, through which files are opened: mount -t proc proc /proc"));
}

// Throws the error for a failed system call on /dev/shm. bytes: how many were needed; 0: not known.
[[noreturn]] inline void system_failure(const std::string& what, int error, uint64_t bytes = 0) {
    const std::string why = std::string(": ") + std::strerror(error);
    switch (error) {
        case EACCES:
        case EPERM:
            throw Error(Failure::kPermissionDenied, what + " failed: /dev/shm does not let this user in" + why);
        case EROFS:
            throw Error(Failure::kPermissionDenied, what + " failed: /dev/shm is mounted read-only" + why);
        case EMFILE:
        case ENFILE:
            throw Error(Failure::kResourceExhausted,
                        what + " failed: too many open files; each attached segment has one (`ulimit -n`)" +
                            why);
        case ENOLCK:
            throw Error(Failure::kResourceExhausted,
                        what + " failed: the system has no memory for a lock" + why);
        case EFBIG: file_too_large(what);
        case ENOSPC:
        case ENOMEM:
        case EDQUOT: break;
        default: unusable(what, why);
    }
    const struct statvfs space = space_of_directory();
    if (error == ENOSPC && space.f_files > 0 && space.f_favail == 0)
        throw Error(Failure::kResourceExhausted,
                    what + " failed: all " + std::to_string(space.f_files) +
                        " inodes of /dev/shm are in use (its memory is not); remove files there, or `mount "
                        "-o remount,nr_inodes=... /dev/shm`");
    shared_memory_full(what + why, bytes, space);
}

// The uids whose segments may be attached; without a list, all uids.
using Owners = std::optional<std::vector<uint32_t>>;

[[noreturn]] inline void belongs_to_another(const struct stat& found, const std::string& why) {
    throw Error(Failure::kPermissionDenied,
                "It belongs to uid " + std::to_string(found.st_uid) + ", mode " + four_octal(found.st_mode) +
                    why,
                {{"uid", found.st_uid}, {"mode", found.st_mode & 07777u}});
}

// Returns how many bytes a word of kept_word stands for.
inline uint64_t kept_bytes(uint64_t word) {
    const uint64_t bytes = word & kMostKept;
    if (word != kept_word(bytes)) data_loss("how much it leaves to others has a wrong digest");
    return bytes;
}

class OpenSegment;

class SegmentFile : public std::enable_shared_from_this<SegmentFile> {
  public:
    using Id = std::pair<dev_t, ino_t>;
    enum class Access { kRead, kWrite };

    // The file at `path`; null if there is none. Does not check its contents.
    static std::shared_ptr<SegmentFile> open(const std::string& path, Access access, const Owners& owners) {
        // An O_PATH descriptor can be closed again: that drops no record locks.
        // A link in /proc is followed to the descriptor's file, which may have no name; a link in /dev/shm is refused.
        const int follow = path.compare(0, 6, "/proc/") == 0 ? 0 : O_NOFOLLOW;
        const Descriptor look(::open(path.c_str(), O_PATH | O_CLOEXEC | follow));
        if (!look) {
            if (errno == ENOENT) return nullptr;
            system_failure("Opening it", errno);
        }
        struct stat found{};
        if (fstat(look.get(), &found) != 0) system_failure("Looking at it", errno);
        if (!S_ISREG(found.st_mode)) data_loss("it is not a regular file");
        if (owners && std::find(owners->begin(), owners->end(), found.st_uid) == owners->end())
            belongs_to_another(found,
                               "; only segments of this process's user and of root are attached, unless "
                               "owners= allows others (\"any\", or their uids)");
        const Id id{found.st_dev, found.st_ino};
        std::shared_ptr<SegmentFile> file = list()[id].lock();
        if (!file || !file->is_open(look.get())) {
            auto successor = std::make_shared<SegmentFile>(id);
            list()[id] = successor;
            if (file) file->hand_over(*successor, look.get());
            file = std::move(successor);
        }
        file->need(access, look.get(), found);
        return file;
    }

    // A new file, which has no name yet.
    static std::shared_ptr<SegmentFile> create() {
        Descriptor fd = open_above_streams(kDirectory, O_TMPFILE | O_RDWR, 0600);
        if (!fd) system_failure("Making a segment", errno);
        struct stat made{};
        if (fstat(fd.get(), &made) != 0) system_failure("Making a segment", errno);
        const Id id{made.st_dev, made.st_ino};
        auto file = std::make_shared<SegmentFile>(id);
        list()[id] = file;
        file->writable_ = std::move(fd);
        return file;
    }

    explicit SegmentFile(Id id) : id_(id) {}
    SegmentFile(const SegmentFile&) = delete;
    SegmentFile& operator=(const SegmentFile&) = delete;
    ~SegmentFile() {
        // If other code closed these descriptors, the entry in the list may be a new SegmentFile's.
        if (auto at = list().find(id_); at != list().end() && at->second.expired()) list().erase(at);
        forget_lost();
    }

    // Opens the file again by its new name, and closes the descriptor that `create` made: the process has no record
    // lock on the file yet. Returns false if the name does not lead to the file any more.
    bool open_by_name(const std::string& path) {
        // An O_PATH descriptor first, as in `open`: the name may lead to a file on which this process has locks.
        const Descriptor look(::open(path.c_str(), O_PATH | O_CLOEXEC | O_NOFOLLOW));
        if (!look && errno != ENOENT) system_failure("Opening it", errno);
        struct stat found{};
        if (!look || fstat(look.get(), &found) != 0 || Id{found.st_dev, found.st_ino} != id_) return false;
        Descriptor fd = same_file(look.get(), Access::kWrite);
        if (!fd) system_failure("Opening it", errno);
        writable_ = std::move(fd);
        return true;
    }

    int fd() const { return writable_ ? writable_.get() : readable_.get(); }
    Id id() const { return id_; }
    struct stat attributes() const {
        struct stat found{};
        const bool is_open = fstat(fd(), &found) == 0;
        if (!is_open && errno != EBADF) system_failure("Looking at its file", errno);
        if (!is_open || Id{found.st_dev, found.st_ino} != id_)
            throw Error(Failure::kFailedPrecondition,
                        "This process has closed the segment's descriptor (daemonizing closes all of them); "
                        "open the accumulator again after that");
        return found;
    }

    // The file's length. Set after it was checked, before the file is used as a segment. Atomic, since a
    // thread that opens the file again stores the same length while others read it.
    void set_size(uint64_t size) { size_.store(size, std::memory_order_relaxed); }
    uint64_t size() const { return size_.load(std::memory_order_relaxed); }

    struct Status {
        bool open;  // the descriptor is still this file's
        bool intact;  // the file still has its original length
        bool named;  // some name still leads to it
    };
    Status status() const {
        struct stat found{};
        const bool open = fstat(fd(), &found) == 0 && Id{found.st_dev, found.st_ino} == id_;
        return {open, open && static_cast<uint64_t>(found.st_size) == size(), open && found.st_nlink > 0};
    }
    // Call before anything is locked, reserved or touched.
    void check_open() const { attributes(); }
    // How many bytes of memory the file has.
    uint64_t occupied() const { return static_cast<uint64_t>(attributes().st_blocks) * 512; }
    // Checks a size that the segment's records claim, before memory is allocated or reserved for it.
    void check_occupied(uint64_t bytes) const {
        if (bytes > occupied()) data_loss("a recorded size is larger than what the segment occupies");
    }

    // Whether a name leads to this very file. Throws if that cannot be found out, since callers act on false.
    bool is_at(const std::string& path) const {
        struct stat found{};
        if (lstat(path.c_str(), &found) != 0) {
            if (errno == ENOENT) return false;
            system_failure("Looking at its name", errno);
        }
        return Id{found.st_dev, found.st_ino} == id_;
    }

    // How many bytes the segment leaves free when it grows (Header::kept_free), for Ray's store (ray#3149).
    uint64_t kept() const {
        const uint64_t* word = kept_free.load(std::memory_order_acquire);
        return word ? kept_bytes(load_relaxed(*word)) : 0;
    }
    // Whether `bytes` are free besides kept().
    bool has_room(uint64_t bytes) const {
        const uint64_t kept = this->kept();
        if (kept == 0) return true;
        struct statvfs space{};
        if (statvfs(kDirectory, &space) != 0) system_failure("Asking how much memory is free", errno);
        const uint64_t free = free_bytes(space);
        return free >= kept && free - kept >= bytes;
    }
    // Throws unless there is room for the needed bytes. reserved: how many of them are reserved already.
    void check_room(uint64_t needed, uint64_t reserved = 0) const {
        if (!has_room(needed - reserved)) no_room_beside_others(needed, kept(), space_of_directory());
    }
    std::atomic<const uint64_t*> kept_free{nullptr};  // the header's, while it is mapped

    // The process's OpenSegment on this file, if it has one (open_segment.hpp).
    std::weak_ptr<OpenSegment> open_segment;

  private:
    // look: a descriptor that was just opened. If its number is that of fd(), other code has closed fd().
    bool is_open(int look) const { return fd() != look && leads_here(fd()); }
    void forget_lost(int look = -1) {
        for (Descriptor* fd : {&readable_, &writable_})
            if (*fd && (fd->get() == look || !leads_here(fd->get()))) fd->release();
    }
    // After this call the SegmentFile never counts as open, even if other files get the numbers of its descriptors.
    void hand_over(SegmentFile& successor, int look) {
        forget_lost(look);
        successor.readable_ = std::move(readable_);
    }
    bool leads_here(int fd) const {
        struct stat found{};
        return fstat(fd, &found) == 0 && Id{found.st_dev, found.st_ino} == id_ &&
               !(fcntl(fd, F_GETFL) & O_PATH);
    }

    void need(Access access, int look, const struct stat& found) {
        if (writable_ || (access == Access::kRead && readable_)) return;
        Descriptor fd = same_file(look, access);
        if (!fd && (errno == EACCES || errno == EPERM))
            belongs_to_another(found, std::string(": ") + std::strerror(errno));
        if (!fd) system_failure("Opening it", errno);
        (access == Access::kWrite ? writable_ : readable_) = std::move(fd);
    }
    static Descriptor same_file(int look, Access access) {
        return open_above_streams("/proc/self/fd/" + std::to_string(look),
                                  access == Access::kWrite ? O_RDWR : O_RDONLY);
    }

    // Never destroyed: segments may be closed as late as the process's end.
    static std::map<Id, std::weak_ptr<SegmentFile>>& list() {
        static auto& files = *new std::map<Id, std::weak_ptr<SegmentFile>>;
        return files;
    }

    const Id id_;
    std::atomic<uint64_t> size_ = 0;
    Descriptor readable_;
    Descriptor writable_;
};

}  // namespace shmacc
