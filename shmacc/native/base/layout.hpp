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
//   Directory     the members: kind, dtype, declared shape, name (never changes; directory.hpp)
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
// and for each member of the lane, one of which is the set of contributors: a sparse member whose rows are the
// contributors, of width 0:
//   Index0/1      hash table from row number to slot; one is current, a larger one is built in the other
//   Slots         {row number, contributions} of each row in use, in order of first use
//   Rows0         the rows' sums, one slot after the other; for a dense member one of two buffers
//   Rows1         a dense member's other buffer
//
// Shared arrays and parameters have one lane, in which nothing is accumulated. Array m is the front of member
// m's Rows0. For parameters, Index0 and Index1 contain the array's optimizer slots (kArrayRegions), and the
// undo log belongs to the running update (SavedArray). A table of parameters uses its regions as a sparse
// member does, except:
//   Slots         {id, stamp} of each slot that was ever given to an id (stamp_of_given, stamp_of_free)
//   Rows0         for each slot the row, then the optimizer's numbers for it
//   Rows1         for each slot the step of the round that last changed the row; for a free slot the next free one
//
// All words are native and little-endian. The version is checked first, so a segment of another layout is
// refused, never misread.
//
// This file is longer than others on purpose: it contains all that two processes must agree on, and Python
// reads it from here (module.cpp). If the layout stood in several files, a change could easily miss one of
// them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <iterator>

namespace shmacc {

constexpr char kMagic[8] = {'s', 'h', 'm', 'a', 'c', 'c', '\r', '\n'};
constexpr uint32_t kVersion = 2;
constexpr uint32_t kMaxRank = 64;  // NumPy's own limit
constexpr uint32_t kUnknownRank = 0xffffffffu;
constexpr uint32_t kMaxName = 200;

// The numbers of the file's regions. After the fixed regions come those of each lane: its own, then its members'.
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
enum MemberRegion : uint32_t { kIndex0, kIndex1, kSlots, kRows0, kRows1, kMemberRegions };
// The regions of an array of parameters: its contents, then its optimizer's slots.
constexpr uint32_t kArrayRegions[] = {kRows0, kIndex0, kIndex1};

// The regions of a table: rows with the optimizer's numbers; last steps or free links; ids with their stamps.
constexpr uint32_t kTableRegions[] = {kRows0, kRows1, kSlots};
static_assert(std::size(kTableRegions) == std::size(kArrayRegions));

// A view of one table (segment_view.hpp) has the fixed regions, those of one lane, and those of one member.
constexpr uint32_t kViewedRegions = kFixedRegions + kLaneRegions + kMemberRegions;

// Names for the enumerations of this file. Python has no others (module.cpp passes these tables on).
struct Named {
    uint32_t number;
    const char* name;
};
template <size_t kCount>
constexpr bool is_named(const Named (&table)[kCount], uint32_t number) {
    for (const Named& entry : table)
        if (entry.number == number) return true;
    return false;
}
constexpr Named kRegionNames[] = {
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
    {kFixedRegions + kLaneRegions + kSlots, "slots"},
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
constexpr uint32_t kMaxWaiters = 4096;

// Kinds of segments and members. A member is sparse or dense; in parameters it is dense or a table.
enum Kind : uint32_t { kSparse = 1, kDense = 2, kGroup = 3, kArrays = 4, kParameters = 5, kTable = 6 };
constexpr Named kKindNames[] = {{kSparse, "sparse"}, {kDense, "dense"},           {kGroup, "group"},
                                {kArrays, "arrays"}, {kParameters, "parameters"}, {kTable, "table"}};
constexpr bool has_arrays(uint32_t kind) { return kind == kArrays || kind == kParameters; }
enum Reduction : uint32_t { kMean = 1, kSum = 2, kCmean = 3 };
constexpr Named kReductionNames[] = {{kMean, "MEAN"}, {kSum, "SUM"}, {kCmean, "CMEAN"}};
// The types of sums. Half types are summed as float32, integers in 64 bits, complex numbers as pairs.
enum Sum : uint32_t { kFloat32 = 1, kFloat64 = 2, kInt64 = 3, kUint64 = 4 };
constexpr Named kSumNames[] = {{kFloat32, "float32"},
                               {kFloat64, "float64"},
                               {kInt64, "int64"},
                               {kUint64, "uint64"}};

// How updates change an array of parameters (parameters/optimizers.hpp).
enum OptimizerKind : uint32_t {
    kNoOptimizer,
    kSgd,
    kAdagrad,
    kRmsprop,
    kAdam,
    kFtrl,
    kAdamW,
    kOptimizerKinds
};
constexpr Named kOptimizerNames[] = {
    {kSgd, "SGD"},   {kAdagrad, "Adagrad"}, {kRmsprop, "RMSprop"},
    {kAdam, "Adam"}, {kFtrl, "Ftrl"},       {kAdamW, "AdamW"},
};
static_assert(std::size(kOptimizerNames) + 1 == kOptimizerKinds, "every optimizer has a name");
// An option is a bit that is added to an optimizer's kind. Processes of before 1.0.0 refuse parameters that
// have an option or AdamW.
enum OptimizerOption : uint32_t { kWeightDecay = 0x100, kAsTorch = 0x200 };
constexpr Named kOptimizerOptions[] = {{kWeightDecay, "weight_decay"}, {kAsTorch, "as_torch"}};

// Never changed. numbers: the fields of the class in optim.py, in their order; the learning rate comes first. With
// kWeightDecay the last number is the weight decay.
struct OptimizerSpec {
    uint64_t kind;  // with its options added
    double numbers[5];

    uint32_t base() const { return static_cast<uint32_t>(kind) & ~(kWeightDecay | kAsTorch); }
    bool has(OptimizerOption option) const { return (kind & option) != 0; }
    bool known() const {
        return kind <= UINT32_MAX && base() < kOptimizerKinds && (base() != kNoOptimizer || kind == 0) &&
               !(base() == kFtrl && has(kWeightDecay));
    }
    double weight_decay() const { return has(kWeightDecay) ? numbers[4] : 0; }
    // Whether weight decay multiplies the element, instead of being added to its gradient.
    bool decoupled() const {
        switch (static_cast<OptimizerKind>(base())) {  // no default, so g++ warns of a missing one
            case kAdamW: return true;
            case kNoOptimizer:
            case kSgd:
            case kAdagrad:
            case kRmsprop:
            case kAdam:
            case kFtrl:
            case kOptimizerKinds: break;
        }
        return false;
    }
};

// How the initial contents of a table's rows are made (parameters/initial.hpp).
enum InitialKind : uint64_t { kConstant = 1, kUniform = 2, kNormal = 3 };
constexpr Named kInitialNames[] = {{kConstant, "Constant"}, {kUniform, "Uniform"}, {kNormal, "Normal"}};
// Properties of a table; never changed. numbers: the fields of the class in init.py, in order, without the seed.
struct TableSpec {
    uint64_t initial;
    double numbers[2];
    uint64_t seed;
    uint64_t max_rows;
};

constexpr uint64_t sum_bytes(uint32_t sum) { return sum == kFloat32 ? 4 : 8; }
// Calls act(T{}), where T is the C++ type of these sums. unpack_directory has checked that `sum` is a Sum.
template <class Act>
auto with_sum_type(uint32_t sum, Act act) {
    switch (static_cast<Sum>(sum)) {  // no default, so that g++ warns of a missing case
        case kFloat32: return act(float{});
        case kFloat64: return act(double{});
        case kInt64: return act(int64_t{});
        case kUint64: return act(uint64_t{});
    }
    std::abort();
}

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

// Whether an update of parameters by this round has begun (parameters/update.hpp). From then until the update is
// in, the round's gradients do not change, even if no process holds the round.
enum FinalPhase : uint64_t { kNotFinal, kUpdateBegun, kUpdateIn };
struct FinalRound {
    uint64_t phase;
    uint64_t serial;  // RoundHolder::serial of the block that reached this phase
    uint64_t pid;  // of the block's process
    int64_t since_ns;  // when the update began
    uint64_t parameters;  // Config::token of the updated parameters, kept for all later rounds; 0: none yet
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
    uint64_t spread;  // the number of the round in which contributors may be in other lanes than their own
    uint64_t needs;  // the record is valid from this generation of the first lane on
    uint64_t dropped;  // gradients dropped by all lanes up to the last take
    uint64_t restores;  // how many restores there were, ever; see Header::finished
    RoundHolder holder;
    FinalRound final;
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
    uint64_t rows;  // sparse: slots in use; dense: 0; table: slots that were ever given to an id
    uint64_t row_elements;  // numbers in a row (dense: in the array; table: with the optimizer's)
    union {
        uint64_t shape;  // which of the two in Shapes is the round's; kDeclaredShape: the declared one
        uint64_t free_slot;  // table: the first free slot plus 1; 0: none is free
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
    uint64_t cancels;  // how many; for takes that wait for the lock and have no ticket yet
    uint32_t top;  // waiter entries from here on are free
    uint32_t progress;  // futex: changes with the step, and when a take or a waiter leaves
};

// Which process gets the lock first; only hints, see lock.hpp.
struct Fairness {
    uint64_t asked;  // 1: a process was passed over for a while
    int64_t keep_off_ns;  // until then (CLOCK_MONOTONIC) only processes that slept may take a token; 0: all may
};

// What has happened in the segment, for people who ask later. The last kEvents events are kept.
enum EventKind : uint32_t {
    kNoEvent,
    kDeath,
    kCancelled,
    kSealed,
    kRecovered,
    kFailure,
    kFinished,
    kEventKinds
};
constexpr Named kEventNames[] = {
    {kNoEvent, ""},          {kDeath, "died"},          {kCancelled, "cancelled"},
    {kSealed, "sealed"},     {kRecovered, "recovered"}, {kFailure, "failed"},
    {kFinished, "finished"},
};
static_assert(std::size(kEventNames) == kEventKinds, "every kind of event has a name");
struct Event {
    alignas(64) uint64_t serial;  // 0: none, or being written
    uint64_t token;  // the process's
    int64_t at_ns;
    int64_t step;
    int64_t contributor;  // of the process's last gradient; -1: none
    uint32_t kind;
    uint32_t pid;
    uint32_t pid_namespace;  // the pid's; the kernel numbers namespaces with 32 bits
};
constexpr uint32_t kEvents = 64;

// The contributor (or, as a negative number, the pid of a process that names none) that was the last of `rounds`
// rounds, and by how much later than the mean of the others.
struct Late {
    int64_t who;
    uint64_t rounds;  // 0: a free entry
    uint64_t late_ns;
};
constexpr uint32_t kLate = 16;

// How the time of the segment was spent; for display only (pace.hpp). All zero in a segment of before 1.0.0,
// whose processes do not write it.
struct Pace {
    int64_t until_ns;  // all time until then is counted in the next three; 0: none
    uint64_t waiting_ns;
    uint64_t block_ns;
    uint64_t between_ns;
    Late late[kLate];
};
// The gradients that a lane accepted with local_step = kNeverStale. For display only; zero likewise.
struct Unchecked {
    uint64_t gradients;
    uint64_t steps;  // sum of the steps since their processes' gradients before
    uint64_t most_steps;
};
constexpr int64_t kNeverStale = INT64_MAX;

// Header::keeper of a segment that was made without unlink_on_close (or by a version that had no such word), and of
// one that was made with it, until its maker has attached.
constexpr uint64_t kNotKept = 0, kToBeKept = 1;

struct Header {
    alignas(64) Config config;
    alignas(64) uint64_t unlinked;  // 1: unlinked on purpose
    uint64_t keeper;  // the token of the process that removes the names at its end; or kNotKept, or kToBeKept
    alignas(64) uint64_t generation;
    uint64_t finished;  // greater than RoundState::restores: nothing is accepted or taken any more
    uint64_t kept_free;  // bytes of /dev/shm that the segment leaves to others when it grows
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
static_assert(sizeof(LaneHeader) == 512, "as before 1.0.0, when the last bytes were unused");
struct MemberStates {
    alignas(64) MemberState copies[2];
};
constexpr uint64_t bytes_of_lane(const Config& config) {
    return sizeof(LaneHeader) + tables_of(config) * sizeof(MemberStates);
}
constexpr uint64_t bytes_of_states(const Config& config) { return config.lanes * bytes_of_lane(config); }

enum Activity : uint32_t {
    kIdle,
    kWaitsForLock,
    kApplies,
    kTakes,
    kWaitsInQueue,
    kWaitsForHead,
    kWaitsForRound,
    kWaitsForRoom,
    kWaitsForStep,
    kUpdates,
    kActivities
};
constexpr Named kActivityNames[] = {
    {kIdle, "idle"},
    {kWaitsForLock, "waits for the lock"},
    {kApplies, "applies"},
    {kTakes, "takes"},
    {kWaitsInQueue, "waits in the queue"},
    {kWaitsForHead, "waits for the head of the queue"},
    {kWaitsForRound, "waits for the end of the round"},
    {kWaitsForRoom, "waits for room"},
    {kWaitsForStep, "waits for the step"},
    {kUpdates, "updates"},
};
static_assert(std::size(kActivityNames) == kActivities, "every activity has a name");

// The lowest bits of a token say what became of the process. The other bits identify one attachment of one process,
// and are never used twice. kTold is added once no wait needs to be told of the fate.
enum Fate : uint64_t { kHere = 1, kDead = 2, kFailed = 3, kTold = 4, kFateBits = 7 };
constexpr bool is_here(uint64_t token) { return (token & kFateBits) == kHere; }
constexpr uint64_t identity_of(uint64_t token) { return token & ~uint64_t{kFateBits}; }
constexpr uint64_t with_fate(uint64_t token, uint64_t fate) { return identity_of(token) | fate; }
// What a contributor's slot contains (Slot::contributions): the process that applied. Greater than kNobodys.
constexpr int64_t applier_of(uint64_t token) { return static_cast<int64_t>(token >> 3); }
constexpr int64_t kNobodys = 1;  // `restore` put the contributor there

// Only its own process writes an entry, except `token` and `told`. Others read it for display, and to learn what
// became of the process.
struct Participant {
    alignas(64) uint64_t token;  // 0: free
    uint64_t pid_namespace;  // inode of /proc/self/ns/pid
    uint64_t start_ticks;  // field 22 of /proc/self/stat
    int64_t attached_ns;
    int64_t seen_ns;
    int64_t applied_ns;  // last accepted apply; 0: none
    int64_t applied_step;  // global step at the last accepted apply
    int64_t contributor;  // of the last accepted apply, or until then that of an apply or replica to come; -1: none
    uint32_t pid;
    uint32_t activity;
    uint64_t applied;
    uint64_t dropped;
    uint64_t taken;
    uint64_t told;  // how many of its failures were told; see Presence
    uint64_t given_up;  // serial of the last round that it gave up; see RoundHolder
    uint32_t failures;
    uint32_t took;  // 1: it has taken, or opened a round
    uint32_t ending;  // Ending
    uint32_t took_at;  // when it last did, by short_time; see took_ns
};
static_assert(sizeof(Participant) == 128, "entries must not share a cache line");

// How a process is ending. Its threads may go on until it has ended.
enum Ending : uint32_t { kNotEnding, kEndsInOrder, kEndsFailed };

// A process that is gone; see departures.hpp.
struct Departed {
    alignas(64) uint64_t token;  // 0: free; no fate: being written; else kDead or kFailed, perhaps with kTold
    uint64_t pid_namespace;
    int64_t at_ns;  // when it was found to be gone
    int64_t applied_step;  // as in Participant
    uint64_t applied;
    uint32_t pid;
    uint32_t took;
    uint32_t took_at;  // this and attached_ns as in Participant; 0 if a process of before 1.0.0 made the record
    int64_t attached_ns;
};
static_assert(sizeof(Departed) == 64, "entries must not share a cache line");
constexpr uint32_t kMaxDeparted = 1024;

// Why a process failed. Written and read through the descriptor, since no page is reserved for it beforehand.
struct Reason {
    uint64_t of;  // the participant's identity, or the event's serial; any other number: the reason is not known
    uint64_t length;
    char text[1008];  // UTF-8
};
static_assert(sizeof(Reason) == 1024);
constexpr uint64_t reason_offset(uint32_t number) {
    return region_offset(kReasonsRegion) + number * sizeof(Reason);
}
constexpr uint32_t reason_of_departed(uint32_t i) { return kMaxParticipants + i; }
constexpr uint32_t reason_of_event(uint64_t serial) {
    return kMaxParticipants + kMaxDeparted + static_cast<uint32_t>(serial % kEvents);
}

struct Waiter {
    alignas(64) uint64_t ticket;  // 0: free
    uint64_t participant_token;
    int64_t num_required;
    int64_t since_ns;
    uint32_t participant;
    uint32_t wake;  // futex
    uint32_t overdue;  // 1: has not taken although its number was reached; applies no longer wait for it
};
static_assert(sizeof(Waiter) == 64, "entries must not share a cache line");

struct Slot {
    int64_t row;
    int64_t contributions;  // table: a stamp
};
// Stamps of a table's slot: the operation that committed this generation gave the slot to an id, or freed it.
constexpr int64_t stamp_of_given(uint64_t generation) { return static_cast<int64_t>(generation << 1); }
constexpr int64_t stamp_of_free(uint64_t generation) { return static_cast<int64_t>(generation << 1 | 1); }

constexpr uint32_t kBucketEntries = 10;

// One cache line of the index: ten entries of a 16-bit tag (0: free) and a slot number.
struct Bucket {
    alignas(64) uint16_t tags[kBucketEntries];
    uint32_t stamp;
    uint32_t slots[kBucketEntries];
};
static_assert(sizeof(Bucket) == 64, "a bucket is one cache line");

constexpr uint64_t kMaxRows = 0xfffffff0u;  // slots are 32-bit numbers

// Consecutive slots of a member. Their old contributions follow (int64 each), or with kUndoNumbers their old row
// numbers.
struct UndoRecord {
    uint32_t first_slot;
    uint16_t slots;
    uint16_t member;  // with kUndoNumbers added, if row numbers follow
};
constexpr uint16_t kUndoNumbers = 1 << 15;
static_assert(kMaxMembers < kUndoNumbers);
constexpr uint64_t kUndoLogBytes = sizeof(UndoRecord) + sizeof(int64_t);  // at most, for each row or row number
constexpr uint64_t kUndoAlign = 16;  // the alignment of each member's first saved row
constexpr uint64_t undo_aligned(uint64_t bytes) { return (bytes + kUndoAlign - 1) / kUndoAlign * kUndoAlign; }

// The undo log of parameters has one of these for each array that the update changes (table: one for links and
// ids, one for steps, one for rows). The numbers of its entries follow (int64 each) if they are listed. An
// entry is a row, or a piece of an array that is changed as a whole. UndoRows contains the old entries, each
// with its part of the optimizer's slots; each part starts at a multiple of kUndoAlign.
struct SavedArray {
    uint64_t member;
    uint64_t entries;
    uint64_t listed;  // 1: entry numbers follow; 0: all entries from the first on, in order
    struct {
        uint64_t entry_bytes;  // 0: the update does not change this region
        uint64_t bytes;  // size of all the region's entries, saved or not
    } regions[std::size(kArrayRegions)];
};

}  // namespace shmacc
