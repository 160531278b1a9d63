// The segment or other file that is found at a path.
#pragma once

#include "python/interpreter.hpp"
#include "segment/opening.hpp"

namespace shmacc {

inline constexpr const char* kFoundNames[] = {"segment", "nothing", "unfinished", "held unfinished",
                                              "other version"};

// Returns the kind of file at the path (kFoundNames), its layout version, and, for a segment, the result of `make`.
template <class Make>
nb::tuple open_found(const std::string& path, SegmentFile::Access access, const Owners& owners, Make make) {
    Opened opened = open_segment_file(path, access, owners);
    nb::object made = nb::none();
    if (opened.found == Found::kSegment) made = make(std::move(opened));
    return nb::make_tuple(kFoundNames[static_cast<int>(opened.found)], opened.config.version, made);
}

}  // namespace shmacc
