// The name lock, which a thread takes with the GIL held, to check a segment's name again or to remove it.
#pragma once

#include "python/interpreter.hpp"
#include "segment/opening.hpp"

namespace shmacc {

constexpr int64_t kNamePatience = 2000 * kMillisecond;  // normally the lock is held for a few system calls

// Calls a function with the name lock and the GIL held (opening.hpp says why).
template <class Act>
auto with_name_lock(SegmentFile& file, bool with_signals, Act act) {
    struct Unlock {
        const int fd;
        ~Unlock() { set_record_lock(fd, kNameByte, F_UNLCK); }
    };
    const int64_t deadline = monotonic_ns() + kNamePatience;
    for (file.check_open(); !set_record_lock(file.fd(), kNameByte, F_WRLCK); file.check_open()) {
        if (monotonic_ns() > deadline)
            throw Error(Failure::kDeadlineExceeded,
                        "Another process has been opening or removing it for 2 s (is it stopped?)");
        WithoutGil released;
        const timespec moment{0, kMillisecond};
        nanosleep(&moment, nullptr);
        if (with_signals) released.check_signals();
    }
    Unlock unlock{file.fd()};
    return act();
}

// Removes a file that is still empty and on which no living process holds a lock; this version makes no such files.
// Returns whether the name no longer leads to such a file: another process may have removed it first.
inline bool remove_unfinished(const std::string& path) {
    const Opened opened = open_segment_file(path, SegmentFile::Access::kWrite, std::nullopt);
    if (opened.found != Found::kUnfinished) return opened.found != Found::kHeldUnfinished;
    return with_name_lock(*opened.file, true, [&] {
        return !opened.file->is_at(path) || ::unlink(path.c_str()) == 0 || errno == ENOENT;
    });
}

// Removes a segment's names, and returns the removed ones. if_unused: returns null, and removes nothing, if a process
// uses the segment or `path` does not lead to it.
inline std::optional<std::vector<std::string>> unlink_names(SegmentFile& file, const std::string& path,
                                                            const std::string& semaphore_path, bool if_unused,
                                                            bool with_signals) {
    using Names = std::optional<std::vector<std::string>>;
    return with_name_lock(file, with_signals, [&]() -> Names {
        if (if_unused && (in_use(file) || !file.is_at(path))) return std::nullopt;
        if (!if_unused) mark_given_up(file);
        return remove_names(file, path, semaphore_path);
    });
}

}  // namespace shmacc
