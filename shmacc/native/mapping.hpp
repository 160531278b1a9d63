// A process's view of the segment's file: one descriptor, one mapping a region.
//
// Two rules keep SIGBUS out. Nothing is touched before posix_fallocate has reserved it (a full /dev/shm
// is an error with the state intact), also by a process that maps what another one has reserved. And the
// file's size is checked at every entry (`still_whole`), since somebody else might truncate it.
#pragma once

#include <fcntl.h>
#include <linux/falloc.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "layout.hpp"
#include "support.hpp"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif

namespace shmacc {

constexpr uint64_t kPage = 4096;
constexpr uint64_t page_up(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

inline void reserve_in_file(int fd, uint64_t offset, uint64_t bytes) {
    int failed;
    do {
        failed = posix_fallocate(fd, static_cast<off_t>(offset), static_cast<off_t>(bytes));
    } while (failed == EINTR);
    if (failed == 0) return;
    struct statvfs space {};
    fstatvfs(fd, &space);
    throw Error(Failure::kResourceExhausted,
                "Shared memory is full: " + std::to_string(bytes) + " more bytes were needed, " +
                    std::to_string(uint64_t{space.f_bavail} * space.f_frsize) + " of " +
                    std::to_string(uint64_t{space.f_blocks} * space.f_frsize) +
                    " are free in /dev/shm (" + std::strerror(failed) +
                    "); nothing was changed. To get more: `docker run --shm-size=...`, a larger "
                    "emptyDir with medium Memory, or `mount -o remount,size=... /dev/shm`");
}

class Mapping {
  public:
    explicit Mapping(int fd) : fd_(fd) {}
    Mapping(const Mapping&) = delete;
    Mapping& operator=(const Mapping&) = delete;
    ~Mapping() {
        for (uint32_t region = 0; region < kRegions; ++region)
            if (base_[region]) munmap(base_[region], mapped_[region]);
        // Also lets go of every record lock that this process has on the file.
        close(fd_);
    }

    int fd() const { return fd_; }

    // The first `bytes` of a region, mapped and reserved. Pointers into it are good until the next call
    // for the same region with more bytes.
    unsigned char* at_least(uint32_t region, uint64_t bytes) {
        if (bytes > mapped_[region]) extend(region, page_up(bytes));
        return base_[region];
    }
    template <class T>
    T* array(uint32_t region, uint64_t count) {
        if (count > kRegionSpan / sizeof(T)) data_loss("a size does not fit its region");
        return reinterpret_cast<T*>(at_least(region, count * sizeof(T)));
    }

    // A small table, mapped whole and for good, so that it can be read without the lock; its entries are
    // to be reserved before they are touched.
    unsigned char* map_table(uint32_t region, uint64_t bytes) {
        map(region, bytes);
        return base_[region];
    }
    void reserve(uint32_t region, uint64_t from, uint64_t bytes) {
        reserve_in_file(fd_, region_offset(region) + from, bytes);
    }

    // Reserves [from, to) of a region, and has the kernel make the pages in one go: a third of the cost
    // of a fault for each.
    void grow(uint32_t region, uint64_t from, uint64_t to) {
        if (to > kRegionSpan)
            throw Error(Failure::kResourceExhausted, "More than 2**40 bytes in one region of a segment");
        reserve(region, from, to - from);
        unsigned char* base = at_least(region, to);
        madvise(base + from / kPage * kPage, to - from / kPage * kPage, MADV_POPULATE_WRITE);
    }

    // Gives the pages of a region from `from` on back to the system; the file keeps its size.
    void punch(uint32_t region, uint64_t from) {
        from = page_up(from);
        fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  static_cast<off_t>(region_offset(region) + from),
                  static_cast<off_t>(kRegionSpan - from));
    }

    struct FileState {
        bool whole;  // as long as it was made
        bool named;  // some name still leads to it
    };
    FileState file_state() const {
        struct stat found {};
        fstat(fd_, &found);
        load_barrier();  // a name that is gone: was the segment marked before? (Core::check_file)
        return {static_cast<uint64_t>(found.st_size) == kFileSize, found.st_nlink > 0};
    }

  private:
    // Somebody has reserved this already, or so it is recorded. If the record lies, it is found out here: by
    // what the whole file occupies, or by reserving it.
    void extend(uint32_t region, uint64_t bytes) {
        struct stat found {};
        fstat(fd_, &found);
        if (bytes > kRegionSpan || bytes > static_cast<uint64_t>(found.st_blocks) * 512)
            data_loss("a recorded size is larger than what the segment occupies");
        reserve(region, 0, bytes);
        map(region, bytes);
    }
    void map(uint32_t region, uint64_t bytes) {
        void* base = base_[region]
                         ? mremap(base_[region], mapped_[region], bytes, MREMAP_MAYMOVE)
                         : mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd_,
                                static_cast<off_t>(region_offset(region)));
        if (base == MAP_FAILED)
            throw Error(Failure::kResourceExhausted,
                        "Mapping " + std::to_string(bytes) +
                            " bytes of the segment failed: " + std::strerror(errno));
        base_[region] = static_cast<unsigned char*>(base);
        mapped_[region] = bytes;
    }

    int fd_;
    unsigned char* base_[kRegions] = {};
    uint64_t mapped_[kRegions] = {};
};

}  // namespace shmacc
