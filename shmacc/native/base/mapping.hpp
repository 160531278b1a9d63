// The segment's file in a process's memory: one descriptor, one mapping for each region. A Mapping has either the
// fixed regions, or the regions of one lane, which the lane's lock guards.
//
// Two rules prevent SIGBUS. First, a process touches memory only after it has itself reserved the memory with
// posix_fallocate, which fails harmlessly if /dev/shm is full (without that: pytorch#5040, kubernetes#28272). A record
// that another process has reserved the memory is not enough: it may be wrong, and to touch a missing page raises
// SIGBUS if /dev/shm is full. Second, every operation begins with a check of the file's size (OpenSegment::check_file),
// since another process might truncate the file.
//
//   Invariant: under the lock, [0, proved) of a region is mapped, has been reserved by this process, and is no
//              more than what the state records as reserved.
//
// Holes are made only above the recorded size: when an operation gives memory back, when an index is rebuilt,
// and after a reservation has failed. `punch` lowers `proved` in this process. `limit` lowers it in the other
// processes, when they read the next state of the lane or member. If the record has risen again by then,
// the process that raised it has reserved the pages first.
//
// If the record exceeds what a process has proved, the process reserves and maps only the difference, at once.
// The record grows by a sixteenth at a time (lane.hpp), so that is rare.
//
// A thread changes a region's fields without the GIL and without any lock that a fork waits for. So a child may
// be forked between an mremap and the change of `base`, which then points nowhere. Therefore `resizing_` names
// the region from before the system call until all its fields are changed. A child has each thread's stores up
// to some instant (fork write-protects pages; a later store waits until the fork is over), and the mapping from
// before or after the whole system call. If `resizing_` names no region in the child, fields and mappings agree.
// If it names one, the child forgets that region, and maps it again when needed; only the old address range
// stays mapped.
#pragma once

#include <fcntl.h>
#include <linux/falloc.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <algorithm>

#include "base/assertions.hpp"
#include "base/segment_file.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace shmacc {

constexpr uint64_t kPage = 4096;
constexpr uint64_t page_up(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

// Blocks all signals in this thread while it exists.
class WithoutSignals {
  public:
    WithoutSignals() {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~WithoutSignals() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
    WithoutSignals(const WithoutSignals&) = delete;
    WithoutSignals& operator=(const WithoutSignals&) = delete;

  private:
    sigset_t before_;
};

constexpr uint64_t kPiece = 1 << 21;  // a huge page, where tmpfs has them

// Reserves a part of the file. Returns 0 or the error's number; after an error, a front part may be reserved.
//
// Why in pieces: kernels before 6.11 abort the call at any signal and undo all its pages. A timer that fires
// during every large call would keep the call from ever completing, under the lock. An interrupted piece is
// tried again with signals blocked; what still interrupts it (SIGSTOP, a debugger, a frozen control group) is
// rare. Signal handlers run between the pieces.
inline int reserve_pieces(int fd, uint64_t offset, uint64_t bytes) {
    auto reserve = [fd](uint64_t from, uint64_t to) {
        return posix_fallocate(fd, static_cast<off_t>(from), static_cast<off_t>(to - from));
    };
    const uint64_t end = offset + bytes;
    for (uint64_t from = offset, to; from < end; from = to) {
        to = std::min(end, (from / kPiece + 1) * kPiece);
        int failed = reserve(from, to);
        if (failed == EINTR) {
            WithoutSignals off;
            while (failed == EINTR) failed = reserve(from, to);
        }
        if (failed != 0) return failed;
    }
    return 0;
}

// Reserves a part of the file, or throws. Memory reserved before the error stays reserved, so this is only for
// memory that is recorded as reserved already, for tables that all processes use without the lock, and for
// files that are discarded after an error.
inline void reserve_in_file(int fd, uint64_t offset, uint64_t bytes) {
    if (int failed = reserve_pieces(fd, offset, bytes)) system_failure("Reserving", failed, bytes);
}

[[noreturn]] inline void mapping_failed(uint64_t bytes, int error) {
    throw Error(Failure::kResourceExhausted,
                "Mapping " + std::to_string(bytes) + " bytes of the segment failed: " + std::strerror(error));
}

// Unmaps memory to which nothing points any more. If it fails, only its addresses stay taken.
inline void unmap(void* memory, uint64_t bytes) { static_cast<void>(munmap(memory, bytes)); }

class Mapping {
  public:
    // first: the number of this mapping's first region in the file.
    Mapping(std::shared_ptr<SegmentFile> file, uint32_t first, uint32_t count)
        : file_(std::move(file)), first_(first), regions_(count), resizing_(count) {}
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping() {
        for (const Mapped& region : regions_)
            if (region.base) unmap(region.base, region.mapped);
    }

    SegmentFile& file() const { return *file_; }

    // Returns a region whose first `bytes` are mapped and proved reserved. recorded: how many bytes of the
    // region are recorded as reserved. Pointers into it are valid until the next call for the same region with
    // more bytes.
    unsigned char* at_least(uint32_t region, uint64_t bytes, uint64_t recorded = 0) {
        if (bytes > regions_[region].proved) follow(region, page_up(std::max(bytes, recorded)));
        SHMACC_ASSERT(bytes <= regions_[region].proved && regions_[region].proved <= regions_[region].mapped);
        return regions_[region].base;
    }
    template <class T>
    T* array(uint32_t region, uint64_t count, uint64_t recorded) {
        if (count > kRegionSpan / sizeof(T)) data_loss("a size does not fit its region");
        return reinterpret_cast<T*>(at_least(region, count * sizeof(T), recorded));
    }

    // Maps a small table in full and for good, so that it can be read without the lock; its entries must be
    // reserved before they are touched.
    unsigned char* map_table(uint32_t region, uint64_t bytes) {
        map(region, bytes);
        return regions_[region].base;
    }
    void reserve(uint32_t region, uint64_t from, uint64_t bytes) {
        reserve_in_file(file_->fd(), offset_of(region) + from, bytes);
    }

    // Under the lock: reserves [from, to) of a region. committed: how many bytes the committed state records as
    // reserved; more than `from` if the operation has given memory up. The kernel makes all pages at once, at a third
    // of the cost of a fault for each page; if it refuses, they come by faults. An error gives back the (empty) pages
    // above the recorded size.
    //
    // Room is checked before the growth, so that the growth does not even briefly take memory that is kept for others.
    // It is checked again afterwards, because lanes and segments that grow at the same time may all have seen the same
    // free memory. The second check counts what they have reserved, so after a growth that succeeds, kept memory is
    // free.
    void grow(uint32_t region, uint64_t from, uint64_t to, uint64_t committed) {
        if (to > kRegionSpan)
            throw Error(Failure::kResourceExhausted, "More than 2**40 bytes in one region of a segment");
        SHMACC_ASSERT(from < to && to % kPage == 0);
        file_->check_room(to - from);
        at_least(region, from);
        const uint64_t recorded = std::max(from, committed);
        if (int failed = reserve_pieces(file_->fd(), offset_of(region) + from, to - from)) {
            punch(region, recorded);
            system_failure("Reserving", failed, to - from);
        }
        try {
            file_->check_room(to - from, to - from);
            map(region, to);
        } catch (...) {
            punch(region, recorded);
            throw;
        }
        regions_[region].proved = to;
        madvise(regions_[region].base + from / kPage * kPage, to - from / kPage * kPage, MADV_POPULATE_WRITE);
    }

    // Under the lock: gives the pages of a region from `from` on back to the system; the file keeps its size. Returns
    // false if the filesystem refuses: the pages and their contents stay until the region is punched again.
    bool punch(uint32_t region, uint64_t from) {
        from = page_up(from);
        SHMACC_ASSERT(from <= kRegionSpan);
        limit(region, from);
        return make_hole(offset_of(region) + from, offset_of(region + 1));
    }

    // With all locks: punches each region above its recorded size, recorded(region). Returns false as `punch` does.
    template <class Recorded>
    bool punch_unrecorded(Recorded recorded) {
        bool done = true;
        uint64_t from = offset_of(0) + page_up(recorded(0));
        for (uint32_t region = 1; region <= regions_.size(); ++region) {
            const bool end = region == regions_.size();
            const uint64_t kept = end ? 0 : page_up(recorded(region));
            SHMACC_ASSERT(kept <= kRegionSpan);
            if (kept == 0 && !end) continue;  // not in use: the next call's hole includes this region
            done = make_hole(from, offset_of(region)) && done;
            from = offset_of(region) + kept;
        }
        return done;
    }

    // Under the lock: counts nothing above the recorded size as proved, since other processes may have made
    // holes there.
    void limit(uint32_t region, uint64_t recorded) {
        regions_[region].proved = std::min(regions_[region].proved, recorded);
    }

    // Whether this region is mapped, and proved reserved, up to `end`.
    bool reaches(uint32_t region, const void* end) const {
        const Mapped& at = regions_[region];
        return end >= at.base && end <= at.base + at.proved;
    }

    // Call in a forked child: forgets the region that a thread of the parent was resizing at the fork.
    void after_fork_in_child() {
        const uint32_t region = load(resizing_);
        if (region == regions_.size()) return;
        regions_[region] = {};
        store(resizing_, static_cast<uint32_t>(regions_.size()));
    }

  private:
    struct Mapped {
        unsigned char* base = nullptr;
        uint64_t mapped = 0;
        uint64_t proved = 0;
    };

    uint64_t offset_of(uint32_t region) const { return region_offset(first_ + region); }
    bool make_hole(uint64_t from, uint64_t to) {
        const auto try_it = [&] {
            return fallocate(file_->fd(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                             static_cast<off_t>(from), static_cast<off_t>(to - from)) == 0;
        };
        return try_it() || (errno == EINTR && try_it());
    }

    // Reserves and maps what another process has recorded as reserved. A wrong record is detected here: it
    // exceeds the space that the whole file occupies, or the reservation fails.
    void follow(uint32_t region, uint64_t bytes) {
        file_->check_occupied(bytes);
        reserve(region, regions_[region].proved, bytes - regions_[region].proved);
        map(region, bytes);
        regions_[region].proved = bytes;
    }
    void map(uint32_t region, uint64_t bytes) {
        Mapped& at = regions_[region];
        if (bytes <= at.mapped) return;
        store(resizing_, region);
        store_barrier();
        void* base = at.base ? mremap(at.base, at.mapped, bytes, MREMAP_MAYMOVE)
                             : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, file_->fd(),
                                    static_cast<off_t>(offset_of(region)));
        const int failed = base == MAP_FAILED ? errno : 0;
        if (!failed) {
            at.base = static_cast<unsigned char*>(base);
            at.mapped = bytes;
        }
        store(resizing_, static_cast<uint32_t>(regions_.size()));
        if (failed) mapping_failed(bytes, failed);
    }

    std::shared_ptr<SegmentFile> file_;
    const uint32_t first_;
    std::vector<Mapped> regions_;
    uint32_t resizing_;  // a region; regions_.size(): none
};

}  // namespace shmacc
