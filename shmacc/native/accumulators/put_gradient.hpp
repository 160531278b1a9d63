// Puts a gradient into a lane: its members and its contributors.
#pragma once

#include "accumulators/member_gradient.hpp"
#include "segment/session.hpp"

namespace shmacc {

// A gradient, or a partial: the sum of several gradients.
struct ApplyRequest {
    int64_t local_step;
    uint64_t timeline;  // the timeline in which the step was read (python/timeline.hpp)
    int64_t count;
    int64_t weight;
    MemberGradient* const* members;
    size_t member_count;
    std::vector<int64_t> contributors;  // ascending
    // If a contributor is in the round already, a partial fails, and a single gradient is accepted but not added.
    bool partial;
    int64_t deadline;
    uint64_t behind;  // set by the operation: the current timeline, if the gradient is of an older one; else 0
    bool repeated = false;  // set by the operation: whether its contributor was in the round already
};

class PutGradient {
  public:
    // session: has the lane's lock; the caller commits it afterwards.
    PutGradient(OpenSegment& segment, LaneSession& session, const ApplyRequest& request)
        : segment_(segment), session_(session), request_(request) {}

    // Adds the whole gradient; if this throws, nothing has changed.
    void put() {
        LaneState& state = session_.state;
        SHMACC_ASSERT(request_.count >= 0 && request_.weight >= request_.count);
        session_.begin_round();
        if (__builtin_add_overflow(state.count, request_.count, &state.count) ||
            __builtin_add_overflow(state.weight, request_.weight, &state.weight) ||
            __builtin_add_overflow(state.applied, static_cast<uint64_t>(request_.count), &state.applied))
            throw Error(Failure::kOutOfRange, "The number of gradients would exceed 64 bits");
        try {
            add_members();
        } catch (...) {
            session_.roll_back();
            throw;
        }
    }

  private:
    void add_members() {
        const size_t count = request_.member_count + !request_.contributors.empty();
        session_.expect(count);
        MemberGradient::Need need;
        of_each([&](MemberGradient& gradient) { prepare(gradient, need); });
        std::optional<SparseMemberGradient<Add<float>>> contributors;
        const std::vector<int64_t> appliers(request_.contributors.size(),
                                            session_.replaces_round()
                                                ? kNobodys
                                                : applier_of(segment_.presence().token()));
        if (!request_.contributors.empty()) {
            contributors.emplace(static_cast<uint32_t>(segment_.specs()->size()) - 1, Dims{0}, request_.count,
                                 request_.weight, request_.contributors.data(), nullptr, appliers.data(),
                                 static_cast<uint32_t>(request_.contributors.size()), 0, true);
            contributors->sort();
            prepare(*contributors, need);
        }
        if (session_.replaces_round())
            for (const Member& member : session_.members()) {
                if (!session_.replaces(member)) continue;
                need.undo_rows += 2 * member.before.rows;  // the rows and their numbers
                need.undo_bytes += member.before.rows * member.spec().row_bytes(member.before);
            }
        if (need.undo_rows > 0)
            session_.lane().reserve_undo(session_.state, need.undo_rows * kUndoLogBytes, need.undo_bytes);
        session_.lane().begin(session_.state, need.new_rows);
        Undo undo(session_.lane(), session_.state, need.undo_bytes);
        if (session_.replaces_round())
            for (Member& member : session_.members())
                if (session_.replaces(member)) undo.save_all(member);
        SHMACC_ASSERT(session_.members().size() == count);
        auto member = session_.members().begin();
        of_each([&](MemberGradient& gradient) { gradient.add(*member++, undo); });
        if (contributors) contributors->add(*member, undo);
    }
    void prepare(MemberGradient& gradient, MemberGradient::Need& need) {
        Member& member = session_.member(gradient.member());
        check_shape(member, gradient.dims());
        if (session_.everywhere()) check_other_lanes(gradient);
        if (member.state.count == 0) start_round(member, gradient.dims());
        member.state.count += gradient.count();  // no overflow: the lane's count and weight are no smaller
        member.state.weight += gradient.weight();
        const MemberGradient::Need more = gradient.prepare(member);
        need.new_rows += more.new_rows;
        need.undo_rows += more.undo_rows;
        need.undo_bytes += more.undo_bytes + kUndoAlign;
        session_.state.applied_bytes += gradient.bytes();
    }
    void check_other_lanes(const MemberGradient& gradient) {
        for (uint32_t i = 0; i < segment_.lanes().size(); ++i) {
            if (i == session_.lane_number()) continue;
            LaneState state = segment_.recovered(i);
            Member other(*segment_.lanes()[i], gradient.member(), state);
            if (other.state.round == session_.round.round) check_shape(other, gradient.dims());
        }
    }
    // Calls act for each member's gradient. An error gets the member's name, if the member has one.
    template <class Act>
    void of_each(Act act) {
        for (size_t i = 0; i < request_.member_count; ++i) {
            try {
                act(*request_.members[i]);
            } catch (const Error& error) {
                const std::string& name = (*segment_.specs())[request_.members[i]->member()].name;
                if (name.empty()) throw;
                throw error.of_member(name);
            }
        }
    }

    OpenSegment& segment_;
    LaneSession& session_;
    const ApplyRequest& request_;
};

}  // namespace shmacc
