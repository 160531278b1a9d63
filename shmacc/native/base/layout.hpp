// The layout of a segment, byte for byte.
//
// A segment is one sparse file in /dev/shm whose size is fixed for life: every region has a terabyte of the
// file to itself and is reserved (posix_fallocate) from its front as it is needed. Holes in a tmpfs file cost
// nothing. So a region grows in place, and nothing ever moves.
//
// A segment accumulates gradients of one or more members (the tensors of a group; a single accumulator is a
// group of one), in one or more lanes: an apply adds to one lane, a take adds up all lanes.
//
//   Header        Config (never changes), the two RoundStates with the generation that determines which is
//                 current, the wait queue's head, the events
//   Directory     the members: kind, dtype, declared shape, name (never changes; member_specs.hpp)
//   Participants  one entry for each attached process; entry i belongs to the process that holds the kernel's
//                 record locks on its bytes (presence.hpp)
//   Waiters       one entry for each waiting take
//   States        for each lane its LaneHeader (two LaneStates, the journal), then two MemberStates a member
//   Departed      processes that died, or failed and left; some waits ask for them (departures.hpp)
//   Reasons       why processes failed: one Reason for each participant, departed process and event
//
// For each lane:
//   UndoLog       which rows the running apply changes in place, and their contributions before it
//   UndoRows      copies of these rows from before the apply, one after the other
//   Shapes        two shapes for each member, for rounds whose shape is not the declared one
// and for each member of the lane (the last member is the set of contributors: a sparse member with a row of width 0
// for each contributor):
//   Index0/1      hash table from row number to place; one is current, a larger one is built in the other
//   Places        {row number, contributions} of each row in use, in order of first use
//   Rows0         the rows' sums, one place after the other; for a dense member one of two buffers
//   Rows1         a dense member's other buffer
//
// Shared arrays and parameters have one lane, in which nothing is accumulated. Array m is the front of member
// m's Rows0. For parameters, Index0 and Index1 contain the array's optimizer slots (kArrayRegions), and the
// undo log belongs to the running update (SavedArray). A table of parameters uses its regions as a sparse
// member does, except:
//   Places        {id, stamp} of each place that was ever given to an id (stamp_of_given, stamp_of_free)
//   Rows0         for each place the row, then the optimizer's numbers for it
//   Rows1         for each place the step of the round that last changed the row; for a free place the next free one
//
// All words are native and little-endian. The version is checked first, so a segment of another layout is
// refused, never misread.
//
// Everything that two processes must agree on stands in this file and in the four files that it includes. Python reads
// it from them (python/layout.cpp).
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/kinds.hpp"
#include "base/processes.hpp"
#include "base/regions.hpp"
#include "base/rows.hpp"

namespace shmacc {

constexpr char kMagic[8] = {'s', 'h', 'm', 'a', 'c', 'c', '\r', '\n'};
constexpr uint32_t kVersion = 3;
constexpr uint32_t kMaxRank = 64;  // NumPy's own limit
constexpr uint32_t kUnknownRank = 0xffffffffu;
constexpr uint32_t kMaxName = 200;

// FNV-like mix of 8-byte words: detects overwritten records, but does not protect against forged ones (every
// field is also range-checked before it is used). Four hashes in turn, since each waits for its multiplication.
inline uint64_t mix_words(const void* data, size_t bytes) {
    constexpr uint64_t kFactor = 0xff51afd7ed558ccdu;
    constexpr size_t kStreams = 4;
    uint64_t hashes[kStreams] = {0x9e3779b97f4a7c15u, 1, 2, 3};
    const auto* at = static_cast<const unsigned char*>(data);
    const size_t words = bytes / 8;
    for (size_t i = 0; i < words; ++i) {
        uint64_t word;
        std::memcpy(&word, at + i * 8, 8);
        uint64_t& hash = hashes[i % kStreams];
        hash = (hash ^ word) * kFactor;
        hash ^= hash >> 32;
    }
    for (size_t i = 1; i < kStreams; ++i) {
        hashes[0] = (hashes[0] ^ hashes[i]) * kFactor;
        hashes[0] ^= hashes[0] >> 32;
    }
    return hashes[0];
}

template <class Record>
uint64_t checksum_of(const Record& record) {
    return mix_words(&record, offsetof(Record, checksum));
}

// Written before the segment has a name, never changed.
struct Config {
    char magic[8];
    uint32_t version;
    uint32_t kind;
    uint32_t members;
    uint32_t lanes;
    uint32_t reduction;  // for members without their own
    uint32_t is_private;
    uint32_t mode;
    uint32_t name_length;
    int64_t capacity;  // gradients that may be pending
    uint64_t token;  // identifies this segment among all that had the name
    uint64_t hash_key[4];  // random; for the index's hash, see row_index.hpp
    int64_t created_ns;  // by timestamp_ns, like all times in a segment except `keep_off_ns`
    uint64_t directory_bytes;
    uint64_t directory_checksum;
    char name[kMaxName];
    uint64_t checksum;
};

constexpr int64_t kUnbounded = INT64_MAX;

inline std::string name_of(const Config& config) { return std::string(config.name, config.name_length); }

// The number of members, plus 1 for the set of contributors.
constexpr uint32_t tables_of(const Config& config) { return config.members + 1; }
constexpr uint32_t regions_of_lane(const Config& config) {
    return kLaneRegions + tables_of(config) * kMemberRegions;
}
constexpr uint32_t first_region(const Config& config, uint32_t lane) {
    return kFixedRegions + lane * regions_of_lane(config);
}
constexpr uint64_t file_size(const Config& config) {
    return region_offset(first_region(config, config.lanes));
}
static_assert(kRegionSpan * (kFixedRegions + kMaxLanes * (kLaneRegions + (kMaxMembers + 1) * kMemberRegions)) <
                  static_cast<uint64_t>(kNameByte),
              "the locks' bytes lie past the end of every file");

// The process that has the round open (Take::open_round). The round is over if that process is dead, or has
// given the round up (Participant::given_up). Then the step reopens unchanged, and this record stays until the
// next commit.
struct RoundHolder {
    uint64_t serial;  // 0: no round is open
    uint64_t participant;
    uint64_t token;  // the participant's
    int64_t since_ns;
};

// Whether an update of parameters by this round has begun (parameters/update.hpp). From its start until it is in
// (complete), the round's gradients do not change, even if no process holds the round.
enum FinalPhase : uint64_t { kNotFinal, kUpdateBegun, kUpdateIn };
struct FinalRound {
    uint64_t phase;
    uint64_t serial;  // RoundHolder::serial of the block that reached this phase
    uint64_t pid;  // of the block's process
    int64_t since_ns;  // when the update began
    uint64_t parameters;  // Config::token of the updated parameters, kept for all later rounds; 0: none yet
};

// If several hosts have a copy of the same parameters each: names this copy's last update. The copy has that update and
// all before it, and no other change. All 0: this is no copy, or it was changed in another way.
struct Lineage {
    uint64_t phase;  // FinalRound::phase: kNotFinal
    uint64_t term;
    uint64_t number;
    uint64_t digest;  // of all that these updates have changed, to tell copies apart that should be equal
};

// State of the round in all lanes. Changed only with all lanes' locks. Kept twice; see commit.hpp.
struct RoundState {
    uint64_t generation;
    uint64_t round;  // counts up; lanes' contents of other rounds are void
    int64_t step;
    uint64_t sealed;  // 1: applies are refused
    uint64_t discarded;  // gradients accepted, then dropped by advance_step, ever
    uint64_t taken;  // gradients handed out, ever
    uint64_t takes;  // takes that returned a result, ever
    uint64_t opened;  // rounds that were opened, ever
    union {
        uint64_t spread;  // the number of the round whose contributors may be in any lane, after a partial
        int64_t begun;  // a copy of parameters: gradients of steps before this may come from a half-made change
    };
    uint64_t needs;  // the record is valid once the first lane has reached this generation
    uint64_t dropped;  // gradients dropped by all lanes up to the last take
    uint64_t restores;  // how many restores there were, ever; see Header::finished
    RoundHolder holder;
    union {
        FinalRound final;
        Lineage lineage;  // a copy of parameters
    };
    uint64_t checksum;
};

// State of a lane. Changed only with the lane's lock. Kept twice; see commit.hpp.
struct LaneState {
    uint64_t generation;
    uint64_t round;  // the round to which the next two fields belong
    int64_t count;  // gradients
    int64_t weight;  // sum of the gradients' weights
    uint64_t applied;  // gradients accepted, ever
    uint64_t dropped;  // gradients refused as stale or because of a seal, ever
    uint64_t repeated;  // gradients not added, since their contributor was in the round already, ever
    uint64_t applied_bytes;  // accepted gradients' values, in bytes of the sums' type, ever
    uint64_t recoveries;  // operations interrupted by a death and undone, ever
    uint64_t leftovers;  // index entries that undone operations may have left behind, ever
    uint64_t small_rounds;  // how many rounds in a row have left much reserved memory unused
    uint64_t needed[kLaneRegions];  // most bytes that this round needed
    uint64_t reserved[kLaneRegions];
    uint64_t checksum;
};

// The counters among these fields, by their names in Stats (shmacc/_segment/stats.py), which reports each of them.
// Lanes' counters are added up.
template <class State>
struct Counter {
    const char* name;
    uint64_t State::* number;
};
constexpr Counter<RoundState> kRoundCounters[] = {{"discarded", &RoundState::discarded},
                                                  {"taken", &RoundState::taken},
                                                  {"takes", &RoundState::takes}};
constexpr Counter<LaneState> kLaneCounters[] = {{"applied", &LaneState::applied},
                                                {"dropped", &LaneState::dropped},
                                                {"repeated", &LaneState::repeated},
                                                {"applied_bytes", &LaneState::applied_bytes},
                                                {"recoveries", &LaneState::recoveries}};

// State of one member in a lane. Kept twice; the newer copy that the lane has committed is current (commit.hpp).
struct MemberState {
    uint64_t generation;
    uint64_t round;  // the round to which the next four fields belong
    int64_t count;  // gradients that had this member; parameters: updates of it
    union {
        int64_t weight;  // sum of these gradients' weights
        int64_t removed;  // table: rows removed, ever
    };
    uint64_t rows;  // sparse: places in use; dense: 0; table: places that were ever given to an id
    uint64_t row_elements;  // numbers in a row (dense: in the array; table: with the optimizer's)
    union {
        uint64_t shape;  // which of the two in Shapes is the round's; kDeclaredShape: the declared one
        uint64_t free_place;  // table: the first free place plus 1; 0: none is free
    };
    union {
        uint64_t buffer;  // dense: which Rows region holds the sum
        uint64_t in_table;  // table: rows that it contains
    };
    uint64_t index;  // which Index region is current
    uint64_t index_buckets;
    uint64_t index_stamp;  // buckets with another stamp are empty
    uint64_t index_filled;  // entries in use, except those that undone applies left after leftovers_before
    uint64_t leftovers_before;  // LaneState::leftovers when index_filled was last exact
    uint64_t small_rounds;  // how many rounds in a row have left much reserved memory unused
    uint64_t reserved[kMemberRegions];
    uint64_t checksum;
};

constexpr uint64_t kDeclaredShape = 2;

// Dims of a round's values; sparse: without the leading one.
struct Shape {
    uint64_t rank;
    int64_t dims[kMaxRank];
};

struct Journal {
    uint64_t generation;  // the undo records belong to the operation that would commit this generation
    uint64_t records;  // undo records that are complete
    uint64_t new_rows;  // index entries that the operation may have left behind
};

struct QueueHead {
    uint64_t next_ticket;
    uint64_t cancelled_through;  // every ticket up to this one is cancelled
    uint64_t cancels;  // how many cancels; compared by takes that wait for the lock and have no ticket yet
    uint32_t top;  // waiter entries from here on are free
    uint32_t progress;  // futex: changes with the step, and when a take or a waiter leaves
};

// Which process gets the lock first; only hints, see lock.hpp.
struct Fairness {
    uint64_t asked;  // 1: a process was passed over for a while
    int64_t keep_off_ns;  // until then (CLOCK_MONOTONIC) only processes that slept may take a permit; 0: all may
};

// Who was the last of a round, how often, and how much later than the mean of the others. who: a contributor; or -pid,
// if the process names no contributor.
struct Late {
    int64_t who;
    uint64_t rounds;  // 0: a free entry
    uint64_t late_ns;
};
constexpr uint32_t kLate = 16;

// How the time of the segment was spent; for display only (pace.hpp).
struct Pace {
    int64_t until_ns;  // the next three fields count the time until then; 0: nothing is counted yet
    uint64_t waiting_ns;
    uint64_t block_ns;
    uint64_t between_ns;
    Late late[kLate];
};
// The gradients that a lane accepted with local_step = kNeverStale. For display only.
struct Unchecked {
    uint64_t gradients;
    uint64_t steps;  // for each of these gradients the steps since its process's previous gradient, added up
    uint64_t most_steps;
};
constexpr int64_t kNeverStale = INT64_MAX;

// Values of Header::keeper. kNotKept: the segment was made without unlink_on_close. kToBeKept: it was made with
// unlink_on_close, and its maker has not attached yet.
constexpr uint64_t kNotKept = 0, kToBeKept = 1;

// Packs a number of bytes and a digest of it (the upper 16 bits) into one word, so that one store changes both.
constexpr uint64_t kMostKept = (uint64_t{1} << 48) - 1;
inline uint64_t kept_word(uint64_t bytes) {
    const uint64_t kept = std::min(bytes, kMostKept);
    return kept ? kept | mix_words(&kept, sizeof kept) << 48 : 0;
}

struct Header {
    alignas(64) Config config;
    alignas(64) uint64_t unlinked;  // 1: unlinked on purpose
    uint64_t keeper;  // the token of the process that removes the names at its end; or kNotKept, or kToBeKept
    alignas(64) uint64_t generation;
    uint64_t finished;  // greater than RoundState::restores: nothing is accepted or taken any more
    uint64_t kept_free;  // bytes that the segment leaves to other programs when it grows, as a kept_word
    alignas(64) RoundState state[2];
    alignas(64) QueueHead wait_queue;
    alignas(64) uint32_t participants_top;  // participant entries from here on are free
    uint32_t departed_top;  // departed entries from here on are free
    alignas(64) uint64_t next_event;  // serial of the last event
    Event events[kEvents];
    alignas(64) Pace pace;
};

constexpr uint64_t kHeaderBytes = 8192;
static_assert(sizeof(Header) <= kHeaderBytes, "the header outgrew its reservation");

// Stands at the start of a lane's part of the States region.
struct LaneHeader {
    alignas(64) uint64_t generation;
    alignas(64) LaneState state[2];
    alignas(64) Journal journal;
    alignas(64) Fairness fairness;
    Unchecked unchecked;
};
static_assert(sizeof(LaneHeader) == 512);
struct MemberStates {
    alignas(64) MemberState copies[2];
};
constexpr uint64_t bytes_of_lane(const Config& config) {
    return sizeof(LaneHeader) + tables_of(config) * sizeof(MemberStates);
}
constexpr uint64_t bytes_of_states(const Config& config) { return config.lanes * bytes_of_lane(config); }

}  // namespace shmacc
