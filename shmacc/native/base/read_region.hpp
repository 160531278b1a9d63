// A region of a segment in a process's memory, for readers that take no lock.
//
// A lane's lock guards a Mapping. No lock guards a ReadRegion: its readers share it, so it is never unmapped
// while one of them reads, and it never moves. A region that has outgrown its ReadRegion gets another one, of
// twice the size. Memory is touched only as far as this process has reserved it itself, as mapping.hpp says; a
// table never gives memory back, so reserved memory stays reserved.
#pragma once

#include <array>
#include <memory>

#include "base/mapping.hpp"

namespace shmacc {

class ReadRegion {
  public:
    // number: the region's number in the file.
    ReadRegion(const SegmentFile& file, uint32_t number, uint64_t bytes)
        : number_(number), bytes_(std::min(page_up(std::max<uint64_t>(2 * bytes, kPage)), kRegionSpan)),
          base_(mmap(nullptr, bytes_, PROT_READ, MAP_SHARED, file.fd(),
                     static_cast<off_t>(region_offset(number)))) {
        if (base_ == MAP_FAILED) mapping_failed(bytes_, errno);
    }
    ~ReadRegion() { unmap(base_, bytes_); }
    ReadRegion(const ReadRegion&) = delete;
    ReadRegion& operator=(const ReadRegion&) = delete;

    uint64_t bytes() const { return bytes_; }
    // Proves the first `bytes` reserved, and returns the region. `bytes`: at most bytes(), and recorded as reserved.
    const unsigned char* proved(const SegmentFile& file, uint64_t bytes) {
        const uint64_t proved = load(proved_);
        if (bytes > proved) {
            file.check_occupied(bytes);
            reserve_in_file(file.fd(), region_offset(number_) + proved, page_up(bytes) - proved);
            // If two threads race, the smaller size may be stored last: then the rest is only reserved again.
            store(proved_, page_up(bytes));
        }
        return static_cast<const unsigned char*>(base_);
    }

  private:
    const uint32_t number_;
    const uint64_t bytes_;
    void* const base_;
    uint64_t proved_ = 0;
};

// The regions of a member that a process has read so far; the others are null. Each reader has its own copy.
using ReadRegions = std::array<std::shared_ptr<ReadRegion>, kMemberRegions>;

}  // namespace shmacc
