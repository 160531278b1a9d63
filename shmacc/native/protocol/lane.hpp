// A lane of a segment: its records and memory, and the lock that a process needs to change them.
//
// An operation works on copies (LaneState; a Member for each member that it touches) and commits them (commit.hpp).
#pragma once

#include <memory>

#include "base/mapping.hpp"
#include "protocol/commit.hpp"
#include "protocol/lock.hpp"
#include "values/row_index.hpp"

namespace shmacc {

class Member;

// How much of a table of parameters this process has compared with the table's index (table_index.hpp).
struct Compared {
    bool all = false;
    uint64_t next = 0;  // the first place that is not compared yet
};

class Lane {
  public:
    // states: the lane's part of the States region.
    Lane(std::shared_ptr<SegmentFile> file, const Config& config, const MemberSpecs& specs, uint32_t number,
         unsigned char* states)
        : number_(number), alone_(config.lanes == 1), parameters_(config.kind == kParameters), specs_(specs),
          header_(*reinterpret_cast<LaneHeader*>(states)),
          members_(reinterpret_cast<MemberStates*>(states + sizeof(LaneHeader))),
          mapping_(std::move(file), first_region(config, number), regions_of_lane(config)),
          hash_key_(config.hash_key), committed_(header_.generation, header_.state),
          compared_(parameters_ ? config.members : 0) {}

    void use(sem_t* semaphore) {
        lock_ = std::make_unique<Lock>(mapping_.file(), lane_byte(number_), semaphore, header_.fairness);
    }
    bool is_the_only_one() const { return alone_; }
    bool has_parameters() const { return parameters_; }
    bool lockable() const { return lock_ != nullptr; }
    Lock& lock() { return *lock_; }
    void after_fork_in_child() {
        mapping_.after_fork_in_child();
        if (lock_) lock_->after_fork_in_child();
    }

    const Committed<LaneState>& committed() const { return committed_; }
    Mapping& mapping() { return mapping_; }
    // One of the lane's own regions, mapped as far as it is reserved.
    unsigned char* region(LaneRegion number, const LaneState& state) {
        return mapping_.at_least(number, state.reserved[number], state.reserved[number]);
    }
    const MemberSpecs& specs() const { return specs_; }
    const uint64_t (&hash_key() const)[4] { return hash_key_; }
    // How much of a member's table this process has compared. Needs the lock.
    Compared& compared(uint32_t member) { return compared_[member]; }
    // The number of members, plus 1 for the set of contributors.
    uint32_t member_count() const { return static_cast<uint32_t>(specs_.size()); }
    MemberStates& states(uint32_t member) { return members_[member]; }
    Unchecked& unchecked() { return header_.unchecked; }
    const MemberState& current(uint32_t member, const LaneState& state) const {
        return members_[member].copies[current_copy(members_[member], state.generation)];
    }

    // How many rows all members have in this round; approximate without the lock.
    uint64_t rows(uint64_t round) const {
        uint64_t rows = 0;
        for (uint32_t i = 0; i + 1 < member_count(); ++i) {
            const MemberState& member = members_[i].copies[current_copy(members_[i], committed_.generation())];
            if (load_relaxed(member.round) == round) rows += load_relaxed(member.rows);
        }
        return rows;
    }

    bool interrupted(const LaneState& state) const {
        return load(header_.journal.generation) == state.generation + 1;
    }
    // Needs the lock. Returns the current state; ask `interrupted` whether an operation must be undone first.
    LaneState current() {
        begun_ = false;
        const LaneState state = committed_.current();
        for (uint32_t region = 0; region < kLaneRegions; ++region)
            mapping_.limit(region, state.reserved[region]);  // other processes may have made holes above that
        return state;
    }

    // From here on, the operation may change rows in place, and write members' copies.
    void begin(const LaneState& state, uint64_t new_rows) {
        SHMACC_ASSERT(may_begin() && committed_.is_current(state));
        begun_ = true;
        store_relaxed(header_.journal.records, uint64_t{0});
        store_relaxed(header_.journal.new_rows, new_rows);
        compiler_barrier();
        store_relaxed(header_.journal.generation, state.generation + 1);
        store_barrier();
    }
    Journal& journal() { return header_.journal; }
    // Says that the first `records` undo records are complete.
    void publish(uint64_t records) {
        compiler_barrier();
        store_relaxed(header_.journal.records, records);
        compiler_barrier();
    }
    // members: all members that the operation has changed. Needs `begin` before.
    inline void commit(LaneState& state, std::vector<Member>& members);
    void commit(LaneState& state) {
        SHMACC_ASSERT(lock_->is_mine());
        committed_.commit(state);
        begun_ = false;
    }

    // Reserves room for an undo log of this size, and commits the new sizes at once: `recover` checks the log
    // against the committed size. An error gives the new memory back.
    void reserve_undo(LaneState& state, uint64_t log_bytes, uint64_t row_bytes) {
        SHMACC_ASSERT(may_begin());
        const uint64_t log = state.reserved[kUndoLog], rows = state.reserved[kUndoRows];
        try {
            ensure_reserved(state, kUndoLog, log_bytes);
            ensure_reserved(state, kUndoRows, row_bytes);
        } catch (...) {
            give_back(state, committed_.again());
            throw;
        }
        if (log == state.reserved[kUndoLog] && rows == state.reserved[kUndoRows]) return;
        LaneState now = committed_.again();
        now.reserved[kUndoLog] = state.reserved[kUndoLog];
        now.reserved[kUndoRows] = state.reserved[kUndoRows];
        commit(now);
        state.generation = now.generation;
    }
    void ensure_reserved(LaneState& state, LaneRegion region, uint64_t bytes) {
        state.needed[region] = std::max(state.needed[region], bytes);
        if (bytes <= state.reserved[region]) return;
        SHMACC_ASSERT(region < kLaneRegions && may_begin());
        const uint64_t grown = with_room(bytes);
        mapping_.grow(region, state.reserved[region], grown, committed_.again().reserved[region]);
        state.reserved[region] = grown;
    }
    // Starts this round in the lane, which has nothing of it yet.
    void begin_round(LaneState& state, uint64_t round) {
        bool small = false;
        for (uint32_t region : {kUndoLog, kUndoRows})
            small |= is_large(state.reserved[region], state.needed[region]);
        state.small_rounds = small ? state.small_rounds + round - state.round : 0;
        if (state.small_rounds >= kSmallRounds) {
            for (uint32_t region : {kUndoLog, kUndoRows})
                if (is_large(state.reserved[region], state.needed[region]))
                    state.reserved[region] = with_room(state.needed[region]);
            state.small_rounds = 0;
        }
        state.needed[kUndoLog] = state.needed[kUndoRows] = 0;
        state.round = round;
        state.count = state.weight = 0;
    }
    // Lets a restore's commit give back the undo log, which is large: it has all old contents. before: the state before
    // reserve_undo committed larger sizes. Stores these sizes in `before`, so that `give_back` sees the difference.
    static void keep_no_undo(LaneState& before, LaneState& now) {
        for (uint32_t region : {kUndoLog, kUndoRows}) {
            before.reserved[region] = std::max(before.reserved[region], now.reserved[region]);
            now.reserved[region] = now.needed[region] = 0;
        }
    }
    void give_back(const LaneState& before, const LaneState& now) {
        for (uint32_t region = 0; region < kLaneRegions; ++region)
            if (now.reserved[region] < before.reserved[region]) {
                SHMACC_ASSERT(may_begin());  // after `begin`, the operation may be using the memory
                mapping_.punch(region, now.reserved[region]);
            }
    }

    // Whether the lock's holder has begun an operation, and neither committed nor undone it.
    bool has_begun() const { return begun_; }
    bool may_begin() const { return lock_->is_mine() && !begun_; }

    // The bytes of a region that are reserved, by a committed state. region: its number in the lane's mapping.
    uint64_t recorded(const LaneState& state, uint32_t region) const {
        if (region < kLaneRegions) return state.reserved[region];
        region -= kLaneRegions;
        return current(region / kMemberRegions, state).reserved[region % kMemberRegions];
    }
    uint64_t recorded(const LaneState& state) const {
        uint64_t bytes = 0;
        for (uint32_t i = 0; i < kLaneRegions; ++i) bytes += page_up(state.reserved[i]);
        for (uint32_t i = 0; i < member_count(); ++i)
            for (uint64_t each : current(i, state).reserved) bytes += page_up(each);
        return bytes;
    }

    // Sizes grow by a sixteenth, at least by 64 KiB; small ones double. So memory stays near what the rows need.
    static uint64_t with_room(uint64_t bytes) {
        return page_up(bytes + std::max<uint64_t>(bytes / 16, std::min<uint64_t>(bytes, 65536)));
    }
    // A round leaves its memory to the next one. Memory is given back only after kSmallRounds rounds in a row have
    // left much of it unused: to reserve it again costs a large round several times its apply. So large rounds pay
    // that cost at most once in kSmallRounds rounds. Let `most` be the bytes that a region needed in the largest of
    // this round and the kSmallRounds rounds before it:
    //
    //   a member holds at most 5/4 of `most`, plus kSpare, in that region (in the index: twice that).
    //
    // Rounds without gradients count. Memory is given back by the first gradient of a later round, or by a take or
    // a new step that finds a member idle for kSmallRounds rounds (AllLanesSession::give_memory_back).
    static constexpr uint64_t kSpare = 1 << 17;  // a segment stays within 1 MiB of its need
    static constexpr uint64_t kSmallRounds = 8;
    static bool is_large(uint64_t reserved, uint64_t needed) { return reserved > needed / 4 * 5 + kSpare; }

  private:
    const uint32_t number_;
    const bool alone_;
    const bool parameters_;
    const MemberSpecs& specs_;
    LaneHeader& header_;
    MemberStates* const members_;
    Mapping mapping_;
    const uint64_t (&hash_key_)[4];
    Committed<LaneState> committed_;
    std::unique_ptr<Lock> lock_;
    std::vector<Compared> compared_;
    bool begun_ = false;
};

// A member of a lane, for an operation with the lane's lock: what was committed, and what the operation makes of it.
class Member {
  public:
    // The member as committed at the generation of `lane_state`, which must outlive this object.
    Member(Lane& lane, uint32_t number, LaneState& lane_state)
        : lane_(&lane), lane_state_(&lane_state), number_(number),
          copy_(current_copy(lane.states(number), lane_state.generation)),
          state(lane.states(number).copies[copy_]) {
        SHMACC_ASSERT(number < lane.member_count() && lane.committed().is_current(lane_state));
        verify(state, lane_state.generation, spec());
        for (uint32_t region = 0; region < kMemberRegions; ++region)
            lane.mapping().limit(number_of(region), state.reserved[region]);
        before = state;
    }

    uint32_t number() const { return number_; }
    const MemberSpec& spec() const { return lane_->specs()[number_]; }
    Lane& lane() const { return *lane_; }
    uint64_t row_bytes() const { return spec().row_bytes(state); }

    template <class T>
    T* array(uint32_t region, uint64_t count) {
        return lane_->mapping().array<T>(number_of(region), count, state.reserved[region]);
    }
    void ensure_reserved(uint32_t region, uint64_t bytes, bool with_room = true) {
        if (bytes <= state.reserved[region]) return;
        SHMACC_ASSERT(region < kMemberRegions && lane_->may_begin());
        const uint64_t grown = with_room ? Lane::with_room(bytes) : page_up(bytes);
        lane_->mapping().grow(number_of(region), state.reserved[region], grown, before.reserved[region]);
        state.reserved[region] = grown;
    }
    Index index(const RowHash& hash) {
        auto* const buckets = array<Bucket>(kIndex0 + static_cast<uint32_t>(state.index), state.index_buckets);
        return Index(buckets, state.index_buckets, static_cast<uint32_t>(state.index_stamp), hash);
    }
    // Empties a region. Returns whether it will have only zeros when it is reserved again.
    bool empty(uint32_t region) {
        SHMACC_ASSERT(region != kIndex0 + before.index);
        return lane_->mapping().punch(number_of(region), 0);
    }
    // which: 0 or 1; each member has two shapes.
    Shape& shape(uint64_t which) {
        const uint64_t at = number_ * uint64_t{2} + which;
        return lane_->mapping().array<Shape>(kShapes, at + 1, lane_state_->reserved[kShapes])[at];
    }
    Shape& new_shape(uint64_t which) {
        lane_->ensure_reserved(*lane_state_, kShapes, (number_ + uint64_t{1}) * 2 * sizeof(Shape));
        return shape(which);
    }
    LaneState& lane_state() const { return *lane_state_; }

    // Starts this round in the member, which has nothing of it yet. all: give unused memory back at once, not only
    // after Lane::kSmallRounds small rounds. Returns whether the commit gives memory back.
    inline bool begin_round(uint64_t round, bool all = false);
    // Starts a new round. The old one stays current until the commit. The index is built anew; the caller must save the
    // rows (Undo::save_all).
    void replace_round(uint64_t round) {
        forget_index();
        start_round(round);
    }
    void give_back() { give_back(before, state); }
    void roll_back() { give_back(state, before); }

    // Writes the new state over the copy that is not current.
    void write(uint64_t generation) {
        SHMACC_ASSERT(lane_->has_begun() && generation == lane_state_->generation + 1);
        SHMACC_ASSERT(in_range(state) && is_reserved(state, spec()));
        state.generation = generation;
        state.checksum = checksum_of(state);
        store_words(lane_->states(number_).copies[copy_ ^ 1], state);
    }

  private:
    uint32_t number_of(uint32_t region) const { return kLaneRegions + number_ * kMemberRegions + region; }
    void give_back(const MemberState& larger, const MemberState& now) {
        for (uint32_t region = 0; region < kMemberRegions; ++region)
            if (now.reserved[region] < larger.reserved[region]) {
                SHMACC_ASSERT(lane_->may_begin());
                lane_->mapping().punch(number_of(region), now.reserved[region]);
            }
    }
    inline bool shrink(uint64_t rows, uint64_t row_bytes, uint64_t rounds);
    void start_round(uint64_t round) {
        ++state.index_stamp;
        state.index_filled = 0;
        state.rows = 0;
        state.count = state.weight = 0;
        state.round = round;
    }
    void forget_index() {
        state.reserved[kIndex0 + state.index] = 0;
        state.index_buckets = state.index_stamp = 0;
    }

    Lane* lane_;
    LaneState* lane_state_;
    uint32_t number_;
    uint32_t copy_;

  public:
    MemberState state;  // to be changed, then committed
    MemberState before;  // as committed
};

// Returns whether the state records less reserved memory now.
inline bool Member::shrink(uint64_t rows, uint64_t row_bytes, uint64_t rounds) {
    uint64_t needed[kMemberRegions] = {};
    needed[kPlaces] = rows * sizeof(RowPlace);
    needed[kRows0] = std::max<uint64_t>(rows, 1) * row_bytes;
    needed[kRows1] = spec().kind == kDense ? row_bytes : 0;
    const bool large_index = state.index_buckets > 2 * Index::buckets_for(rows) + Lane::kSpare / sizeof(Bucket);
    bool small = large_index;
    for (uint32_t region = kPlaces; region < kMemberRegions; ++region)
        small |= Lane::is_large(state.reserved[region], needed[region]);
    state.small_rounds = small ? state.small_rounds + rounds : 0;
    if (state.small_rounds < Lane::kSmallRounds) return false;
    for (uint32_t region = kPlaces; region < kMemberRegions; ++region)
        if (Lane::is_large(state.reserved[region], needed[region]))
            state.reserved[region] = Lane::with_room(needed[region]);
    if (large_index) forget_index();
    state.small_rounds = 0;
    return true;
}

inline bool Member::begin_round(uint64_t round, bool all) {
    const uint64_t passed = all ? Lane::kSmallRounds : round - state.round - 1;
    bool shrunk = !all && shrink(state.rows, row_bytes(), 1);
    if (passed > 0) shrunk |= shrink(0, 0, passed);
    if (state.index_stamp == UINT32_MAX) forget_index();
    start_round(round);
    return shrunk;
}

inline void Lane::commit(LaneState& state, std::vector<Member>& members) {
    store_barrier();  // before the copies, as in Committed::commit (commit.hpp)
    for (Member& member : members) member.write(state.generation + 1);
    commit(state);
    for (Member& member : members) member.give_back();
}

}  // namespace shmacc
