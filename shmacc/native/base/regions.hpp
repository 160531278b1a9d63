// The regions of a segment's file: their numbers and names, where they begin, and the bytes of the locks.
#pragma once

#include <cstdint>
#include <iterator>

#include "base/kinds.hpp"

namespace shmacc {

// The numbers of the file's regions. After the fixed regions come each lane's own regions, and its members'.
enum Region : uint32_t {
    kHeaderRegion,
    kDirectoryRegion,
    kParticipantsRegion,
    kWaitersRegion,
    kStatesRegion,
    kDepartedRegion,
    kReasonsRegion,
    kFixedRegions
};
enum LaneRegion : uint32_t { kUndoLog, kUndoRows, kShapes, kLaneRegions };
enum MemberRegion : uint32_t { kIndex0, kIndex1, kPlaces, kRows0, kRows1, kMemberRegions };
// The regions of an array of parameters: its contents, then its optimizer's slots.
constexpr uint32_t kArrayRegions[] = {kRows0, kIndex0, kIndex1};

// The regions of a table: rows with the optimizer's numbers; last steps or free links; ids with their stamps.
constexpr uint32_t kTableRegions[] = {kRows0, kRows1, kPlaces};
static_assert(std::size(kTableRegions) == std::size(kArrayRegions));

// A view of one table (segment_reader.hpp) has the fixed regions, those of one lane, and those of one member.
constexpr uint32_t kViewedRegions = kFixedRegions + kLaneRegions + kMemberRegions;

constexpr NamedNumber kRegionNames[] = {
    {kHeaderRegion, "header"},
    {kDirectoryRegion, "directory"},
    {kParticipantsRegion, "participants"},
    {kWaitersRegion, "waiters"},
    {kStatesRegion, "states"},
    {kDepartedRegion, "departed"},
    {kReasonsRegion, "reasons"},
    {kFixedRegions + kUndoLog, "undo log"},
    {kFixedRegions + kUndoRows, "undo rows"},
    {kFixedRegions + kShapes, "shapes"},
    {kFixedRegions + kLaneRegions + kIndex0, "index 0"},
    {kFixedRegions + kLaneRegions + kIndex1, "index 1"},
    {kFixedRegions + kLaneRegions + kPlaces, "slots"},
    {kFixedRegions + kLaneRegions + kRows0, "rows 0"},
    {kFixedRegions + kLaneRegions + kRows1, "rows 1"},
};
static_assert(std::size(kRegionNames) == kViewedRegions, "every region has a name");

constexpr uint32_t kMaxMembers = 4096;
constexpr uint32_t kMaxLanes = 32;
constexpr uint64_t kRegionSpan = uint64_t{1} << 40;
constexpr uint64_t region_offset(uint32_t region) { return kRegionSpan * region; }

// Bytes past the end of the file; only the kernel's record locks use them.
constexpr int64_t kNameByte = int64_t{1} << 60;
constexpr int64_t lane_byte(uint32_t lane) { return kNameByte + 1 + lane; }
constexpr uint32_t kMaxParticipants = 4096;
constexpr int64_t kPresenceBytes = lane_byte(kMaxLanes);
// The two bytes of an entry are adjacent, so that the kernel merges a process's locks on them into one: each
// lock operation walks all locks on the file.
constexpr int64_t presence_byte(uint32_t i) { return kPresenceBytes + 2 * int64_t{i}; }  // allocates entry i
constexpr int64_t life_byte(uint32_t i) { return presence_byte(i) + 1; }  // proves that i's process lives

}  // namespace shmacc
