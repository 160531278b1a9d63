// A segment's records of processes: attached, waiting and departed ones, why they failed, and what happened.
#pragma once

#include <cstdint>
#include <iterator>

#include "base/regions.hpp"

namespace shmacc {

// Events in the segment, for people who ask later. The last kEvents events are kept.
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
constexpr NamedNumber kEventNames[] = {
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
    uint32_t pid_namespace;
    uint32_t roles;  // the process's, until then
};
constexpr uint32_t kEvents = 64;

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
constexpr NamedNumber kActivityNames[] = {
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

// The roles of a process: all that it has ever begun to do in the segment, as a set of bits.
enum Role : uint32_t {
    kAppliesIt = 1,  // or has said which contributor it is
    kTakesIt = 2,  // or opens rounds
    kUpdatesIt = 4,  // changes parameters, or sets the step
    kLooksOn = 8,  // copies what is there, or waits for the step
    kSaves = 16  // copies what a checkpoint needs
};
constexpr NamedNumber kRoleNames[] = {
    {kAppliesIt, "applies"}, {kTakesIt, "takes"}, {kUpdatesIt, "updates"},
    {kLooksOn, "looks on"},  {kSaves, "saves"},
};

// The lowest bits of a token say what became of the process. The other bits identify one attachment of one process,
// and are never used twice. kTold is added once no wait needs to be told of the fate.
enum Fate : uint64_t { kHere = 1, kDead = 2, kFailed = 3, kTold = 4, kFateBits = 7 };
constexpr bool is_here(uint64_t token) { return (token & kFateBits) == kHere; }
constexpr uint64_t identity_of(uint64_t token) { return token & ~uint64_t{kFateBits}; }
constexpr uint64_t with_fate(uint64_t token, uint64_t fate) { return identity_of(token) | fate; }
// The number in a contributor's place that says which process applied (RowPlace::applier); greater than kNobodys.
constexpr int64_t applier_of(uint64_t token) { return static_cast<int64_t>(token >> 3); }
constexpr int64_t kNobodys = 1;  // `restore` put the contributor there

// Only the entry's own process writes it, except `token` and `told`. Others read it for display, and to learn what
// became of the process.
struct Participant {
    alignas(64) uint64_t token;  // 0: free
    uint32_t pid_namespace;  // inode of /proc/self/ns/pid, which has 32 bits
    uint32_t roles;  // Role
    uint64_t start_ticks;  // field 22 of /proc/self/stat
    int64_t attached_ns;
    int64_t seen_ns;
    int64_t applied_ns;  // last accepted apply; 0: none
    int64_t applied_step;  // global step at the last accepted apply
    int64_t contributor;  // of the last accepted apply; before the first, of an announced apply or replica; -1: none
    uint32_t pid;
    uint32_t activity;
    uint64_t applied;
    uint64_t dropped;
    uint64_t taken;
    uint64_t told;  // how many of its failures have been told to waits; see Presence
    uint64_t given_up;  // serial of the last round that it gave up; see RoundHolder
    int64_t took_ns;  // when it last took, or opened a round; 0: never
    uint32_t failures;
    uint32_t ending;  // Ending
};
static_assert(sizeof(Participant) == 128, "entries must not share a cache line");

// How a process is ending. Its threads may go on until it has ended.
enum Ending : uint32_t { kNotEnding, kEndsInOrder, kEndsFailed };

// A process that is gone; see departures.hpp.
struct Departed {
    alignas(64) uint64_t token;  // 0: free; no fate: being written; else kDead or kFailed, perhaps with kTold
    int64_t at_ns;  // when it was found to be gone
    int64_t applied_step;  // as in Participant
    uint64_t applied;
    int64_t attached_ns;
    int64_t took_ns;
    uint32_t pid;
    uint32_t pid_namespace;
    uint32_t roles;
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

constexpr uint32_t kMaxWaiters = 4096;
struct Waiter {
    alignas(64) uint64_t ticket;  // 0: free
    uint64_t participant_token;
    int64_t num_required;
    int64_t since_ns;
    uint32_t participant;
    uint32_t wake;  // futex
    uint32_t overdue;  // 1: has not taken although its num_required was reached; applies do not wait for it
};
static_assert(sizeof(Waiter) == 64, "entries must not share a cache line");

}  // namespace shmacc
