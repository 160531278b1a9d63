// The locks that an operation holds, and the recovered state on which it works.
//
// An apply holds the lock of one lane (LaneSession), so applies in different lanes run at the same time. An operation
// that changes what all lanes share, or reads the whole round, holds all locks (AllLanesSession). All locks are
// acquired in order of lanes; but a process waits long for a lock only while it holds none: signal handlers run in that
// wait, and may use the accumulator.
#pragma once

#include "protocol/round_shape.hpp"
#include "segment/open_segment.hpp"

namespace shmacc {

// The locks of one lane, or of several consecutive lanes.
class HeldLocks {
  public:
    explicit HeldLocks(OpenSegment& segment) : segment_(segment) {}
    // The segment may be gone when nothing is held: an operation that has waited may end after its handle was closed.
    ~HeldLocks() {
        if (held()) release(segment_.reachable());
    }
    HeldLocks(const HeldLocks&) = delete;
    HeldLocks& operator=(const HeldLocks&) = delete;

    // Acquires all lanes' locks. Returns false if the deadline passed.
    bool acquire_all(int64_t deadline, Interruption& interruption) {
        const auto lanes = static_cast<uint32_t>(segment_.lanes().size());
        for (;;) {
            if (!acquire(0, deadline, interruption)) return false;
            Uninterrupted uninterrupted;
            while (end_ < lanes && add(end_, std::min(deadline, monotonic_ns() + kSlice), uninterrupted)) {
            }
            if (end_ == lanes) return true;
            release(segment_.file().status().intact);
            if (past(deadline)) return false;
            interruption.check();
            segment_.check_file();
        }
    }
    bool acquire(uint32_t lane, int64_t deadline, Interruption& interruption) {
        first_ = end_ = lane;
        return add(lane, deadline, interruption);
    }
    bool try_acquire(uint32_t lane) {
        if (!segment_.lanes()[lane]->lock().try_acquire()) return false;
        first_ = lane;
        end_ = lane + 1;
        return true;
    }
    bool held() const { return first_ < end_; }
    void release() { release(true); }
    static constexpr int64_t kSlice = 20 * kMillisecond;

    // Calls a function with the locks held; releases them if it throws.
    template <class Act>
    void guard(Act act) {
        try {
            act();
        } catch (...) {
            release(segment_.file().status().intact);  // the file may have been truncated
            throw;
        }
    }

  private:
    bool add(uint32_t lane, int64_t deadline, Interruption& interruption) {
        const auto how = segment_.lanes()[lane]->lock().acquire(deadline, interruption);
        if (how == Lock::Acquired::kNot) return false;
        end_ = lane + 1;
        // The caller has checked the file, but it may have changed during the wait.
        if (how == Lock::Acquired::kAfterWaiting) guard([&] { segment_.check_file(); });
        return true;
    }
    void release(bool intact) {
        for (; end_ > first_; --end_) segment_.lanes()[end_ - 1]->lock().release(intact);
    }

    OpenSegment& segment_;
    uint32_t first_ = 0, end_ = 0;
};

// Whether a living process has the round open, and has not given it up.
inline bool round_is_open(Presence& presence, const RoundState& round) {
    const RoundHolder& holder = round.holder;
    const auto at = static_cast<uint32_t>(holder.participant);
    return holder.serial != 0 && presence.alive(at, holder.token) &&
           load(presence.table()[at].given_up) < holder.serial;
}

// The number of gradients that a lane has in this round, and their weight.
inline int64_t count_of(const LaneState& lane, const RoundState& round) {
    return lane.round == round.round ? lane.count : 0;
}
inline int64_t weight_of(const LaneState& lane, const RoundState& round) {
    return lane.round == round.round ? lane.weight : 0;
}

// Adds counts or weights of two lanes. The sum overflows only in a damaged segment; the reduction detects that.
inline int64_t added(int64_t one, int64_t other) {
    return __builtin_add_overflow(one, other, &one) ? INT64_MAX : one;
}
inline uint64_t added(uint64_t one, uint64_t other) { return one + other; }

// Numbers of all lanes, read without a lock, as they were at some instant during the call (but see `totals`).
struct Totals {
    RoundState round;
    int64_t count;
    int64_t weight;
    LaneState ever;  // only its counters
    uint64_t rows;  // if asked for

    void add(const LaneState& lane) {
        count = added(count, count_of(lane, round));
        weight = added(weight, weight_of(lane, round));
        for (const auto& counter : kLaneCounters) ever.*counter.number += lane.*counter.number;
    }
};
// Repeats the reading until no lane has changed meanwhile, at most kAttempts times. After that the lanes' numbers can
// be of different instants, but are of the same round, in which they only grow.
inline Totals totals(OpenSegment& segment, bool with_rows = false) {
    constexpr int kAttempts = 100;
    for (int attempt = 0;; ++attempt) {
        Totals sum{segment.round().snapshot(), 0, 0, {}, 0};
        std::vector<uint64_t> generations;
        for (const auto& lane : segment.lanes()) {
            const LaneState state = lane->committed().snapshot();
            generations.push_back(state.generation);
            sum.add(state);
            if (with_rows) sum.rows += lane->rows(sum.round.round);
        }
        load_barrier();
        bool same = segment.round().generation() == sum.round.generation;
        for (size_t i = 0; same && attempt < kAttempts && i < generations.size(); ++i)
            same = segment.lanes()[i]->committed().generation() == generations[i];
        if (same) return sum;
    }
}

// Changes one lane, under its lock.
class LaneSession {
  public:
    // contributor: the gradient's, which determines the lane; nullopt: it has none. everywhere: take all lanes' locks.
    LaneSession(OpenSegment& segment, std::optional<int64_t> contributor, bool everywhere, int64_t deadline,
                Interruption& interruption)
        : segment_(segment), locks_(segment), everywhere_(everywhere) {
        if (!acquire(contributor, everywhere, deadline, interruption)) return;
        locks_.guard([&] {
            segment.round().settle();  // before the lane's generation may move on
            round = segment.round().current();
            committed_round_ = round.round;
            state = before = segment.recovered(lane_);
        });
    }

    bool held() const { return locks_.held(); }
    bool everywhere() const { return everywhere_; }
    uint32_t lane_number() const { return lane_; }
    Lane& lane() { return *segment_.lanes()[lane_]; }

    // The round's gradients in all lanes. Other lanes may change meanwhile, if their locks are not held.
    struct Pending {
        int64_t count;  // gradients
        bool weight_fits;  // the weight of all lanes, with `more` added here, surely fits 64 bits
    };
    // One of several lanes may use 1/kMaxLanes of the range; more needs every lane's lock. So no lane exceeds its
    // share while another lane is changed with one lock. A gradient's count is at most its weight.
    Pending pending(int64_t more = 0) const {
        const uint64_t lanes = segment_.lanes().size();
        const int64_t share = everywhere_ || lanes == 1 ? INT64_MAX : INT64_MAX / kMaxLanes;
        int64_t count = count_of(state, round), weight = weight_of(state, round);
        bool fits = !__builtin_add_overflow(weight, more, &weight) && weight <= share;
        for (uint32_t i = 0; i < lanes; ++i) {
            if (i == lane_) continue;
            const LaneState other = segment_.lanes()[i]->committed().snapshot();
            const int64_t its = weight_of(other, round);
            count = added(count, count_of(other, round));
            fits = fits && its <= share && !(everywhere_ && __builtin_add_overflow(weight, its, &weight));
        }
        return {count, fits};
    }
    // Returns a member to change. Starts the round in it, if it has nothing of this round yet.
    Member& member(uint32_t number) {
        SHMACC_ASSERT(members_.size() < members_.capacity());  // `expect` was called: references stay valid
        Member& made = members_.emplace_back(lane(), number, state);
        if (made.state.round == round.round) return made;
        if (replaces(made))
            made.replace_round(round.round);
        else
            made.begin_round(round.round);
        return made;
    }
    // Whether the operation starts a new round. The old one stays current until the commit.
    bool replaces_round() const { return round.round != committed_round_; }
    // Whether the operation replaces this member's contents of the old round.
    bool replaces(const Member& member) const {
        return replaces_round() && member.before.round == committed_round_;
    }
    // Makes room for this many members, so that references to them stay valid.
    void expect(size_t members) { members_.reserve(members); }
    std::vector<Member>& members() { return members_; }
    void begin_round() {
        SHMACC_ASSERT(held() && state.generation >= before.generation);
        if (state.round != round.round) lane().begin_round(state, round.round);
    }

    void commit() {
        lane().commit(state, members_);
        lane().give_back(before, state);
    }
    // Commits the round and the lane. Both take effect with the lane's commit.
    void commit_with_round() {
        SHMACC_ASSERT(lane().has_begun());
        round.needs = state.generation + 1;
        segment_.commit(round);
        commit();
    }
    // Undoes the changes that a failed operation made in place.
    void roll_back() {
        if (!sound_) return;
        LaneState committed = lane().committed().again();
        if (lane().interrupted(committed)) recover(lane(), committed, 0);
        for (Member& member : members_) member.roll_back();
        lane().give_back(state, committed);
    }
    void release() { locks_.release(); }

    RoundState round;
    LaneState state;  // to be changed, then committed
    LaneState before;  // as committed

  protected:
    OpenSegment& segment_;
    const Sound sound_;

  private:
    bool acquire(std::optional<int64_t> contributor, bool everywhere, int64_t deadline,
                 Interruption& interruption) {
        const auto lanes = static_cast<uint32_t>(segment_.lanes().size());
        if (contributor) lane_ = static_cast<uint32_t>(*contributor % lanes);
        if (everywhere) return locks_.acquire_all(deadline, interruption);
        if (contributor || lanes == 1) return locks_.acquire(lane_, deadline, interruption);
        // Takes the first free lane: a process that is stopped with one lane's lock must not block other lanes.
        for (lane_ = segment_.last_lane();; lane_ = (lane_ + 1) % lanes) {
            for (uint32_t i = 0; i < lanes; ++i) {
                const uint32_t lane = (lane_ + i) % lanes;
                if (!locks_.try_acquire(lane)) continue;
                segment_.set_last_lane(lane_ = lane);
                return true;
            }
            if (locks_.acquire(lane_, std::min(deadline, monotonic_ns() + HeldLocks::kSlice), interruption))
                return true;
            if (past(deadline)) return false;
            // Check here: while only threads of this process had the locks, `acquire` has checked nothing.
            interruption.check();
            segment_.check_file();
        }
    }

    HeldLocks locks_;
    const bool everywhere_;
    uint64_t committed_round_ = 0;
    uint32_t lane_ = 0;
    std::vector<Member> members_;
};

// Changes the round, under all lanes' locks.
class AllLanesSession {
  private:
    template <class Of>
    auto sum_of(Of of) const {
        decltype(of(lanes_[0])) sum = 0;
        for (const LaneState& lane : lanes_) sum = added(sum, of(lane));
        return sum;
    }

  public:
    AllLanesSession(OpenSegment& segment, int64_t deadline, Interruption& interruption)
        : segment_(segment), locks_(segment) {
        if (!locks_.acquire_all(deadline, interruption)) return;
        locks_.guard([&] {
            segment.round().settle();
            state = segment.round().current();
            lanes_.reserve(segment.lanes().size());
            for (uint32_t i = 0; i < segment.lanes().size(); ++i) lanes_.push_back(segment.recovered(i));
        });
    }

    bool held() const { return locks_.held(); }
    int64_t count() const {
        return sum_of([this](const LaneState& lane) { return count_of(lane, state); });
    }
    int64_t weight() const {
        return sum_of([this](const LaneState& lane) { return weight_of(lane, state); });
    }
    // Gradients accepted and refused, ever.
    uint64_t applied() const {
        return sum_of([](const LaneState& lane) { return lane.applied; });
    }
    uint64_t dropped() const {
        return sum_of([](const LaneState& lane) { return lane.dropped; });
    }

    // Member `number` of each lane that has gradients with this member in this round, in order of lanes.
    std::vector<Member> in_lanes(uint32_t number) {
        std::vector<Member> in_lanes;
        in_lanes.reserve(lanes_.size());
        for (uint32_t i = 0; i < lanes_.size(); ++i) {
            const Member& member = in_lanes.emplace_back(*segment_.lanes()[i], number, lanes_[i]);
            if (member.state.round != state.round || member.state.count == 0) in_lanes.pop_back();
        }
        return in_lanes;
    }

    // Empties all lanes; takes effect at the commit.
    void next_round() {
        SHMACC_ASSERT(held() && lanes_.size() == segment_.lanes().size());
        if (state.round % Lane::kSmallRounds == 0) give_memory_back(false);
        ++state.round;
        state.holder = {};
        state.final = {kNotFinal, 0, 0, 0, state.final.parameters};
    }
    void commit() { segment_.commit(state); }
    void release() { locks_.release(); }
    // Gives back memory of lanes and members that had no gradients for kSmallRounds rounds. all: of all lanes and
    // members; then there must be no pending gradient. Each lane commits by itself: its contents stay the same.
    void give_memory_back(bool all) {
        for (uint32_t i = 0; i < lanes_.size(); ++i) {
            Lane& lane = *segment_.lanes()[i];
            LaneState& now = lanes_[i];
            const LaneState before = now;
            std::vector<Member> shrunk;
            for (uint32_t number = 0; number < lane.member_count(); ++number) {
                if (!all && !idle(lane.current(number, now))) continue;
                Member member(lane, number, now);
                if (member.begin_round(state.round, all)) shrunk.push_back(std::move(member));
            }
            if (all) {
                now.needed[kUndoLog] = now.needed[kUndoRows] = 0;
                now.small_rounds = Lane::kSmallRounds;
            }
            if (all || state.round - now.round >= Lane::kSmallRounds) lane.begin_round(now, state.round);
            if (!all && shrunk.empty() && now.reserved[kUndoRows] == before.reserved[kUndoRows]) continue;
            lane.begin(now, 0);
            lane.commit(now, shrunk);
            lane.give_back(before, now);
        }
        segment_.give_unrecorded_back(lanes_.data());
    }

    RoundState state;  // to be changed, then committed

  private:
    bool idle(const MemberState& member) const {
        return state.round - member.round >= Lane::kSmallRounds &&
               std::any_of(std::begin(member.reserved), std::end(member.reserved),
                           [](uint64_t bytes) { return Lane::is_large(bytes, 0); });
    }

    OpenSegment& segment_;
    HeldLocks locks_;
    std::vector<LaneState> lanes_;
};

}  // namespace shmacc
