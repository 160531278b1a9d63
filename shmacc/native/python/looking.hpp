// What a handle tells of its segment and of the processes attached to it, without the lock.
//
// Everything is read before the first Python object is made: making one may collect garbage, run finalizers, and
// let another thread close the handle.
#pragma once

#include "protocol/session.hpp"
#include "python/description.hpp"

namespace shmacc {

// The entries of participants that belong to living processes; asks the kernel about each, once.
inline std::vector<bool> living(OpenSegment& segment) {
    Presence& presence = segment.presence();
    std::vector<bool> living(presence.table().size());
    for (uint32_t i = 0; i < living.size(); ++i) {
        uint64_t token = load(presence.table()[i].token);
        living[i] = token != 0 && presence.alive(i, token);
    }
    return living;
}

// (the pids of some living processes that are attached, how many more there are at most): asks the kernel
// about kAsked of them, since the cost of a question grows with their number.
inline nb::tuple some_attached(Presence& presence) {
    constexpr uint32_t kAsked = 16;
    std::vector<uint32_t> pids;
    if (presence.claimed()) pids.push_back(presence.own().pid);
    uint32_t more = 0;
    for (uint32_t i = 0, asked = 0, top = presence.table().size(); i < top; ++i) {
        const uint64_t token = load(presence.table()[i].token);
        if (token == 0 || i == presence.index()) continue;
        if (asked == kAsked) {
            ++more;
            continue;
        }
        ++asked;
        if (presence.alive(i, token)) pids.push_back(load_relaxed(presence.table()[i].pid));
    }
    return nb::make_tuple(pids, more);
}

inline nb::dict describe_config(OpenSegment& segment) {
    const Config config = segment.config();
    const std::shared_ptr<const MemberSpecs> specs = segment.specs();
    return describe(config, *specs);
}

inline nb::dict describe_state(OpenSegment& segment) {
    const Totals now = totals(segment, true);
    const RoundHolder& holder = now.round.holder;
    const std::vector<bool> alive = living(segment);
    const auto at = static_cast<uint32_t>(std::min<uint64_t>(holder.participant, kMaxParticipants));
    const bool held = holder.serial != 0 && at < alive.size() && alive[at] &&
                      load(segment.presence().table()[at].token) == holder.token;
    const uint32_t pid = held ? load_relaxed(segment.presence().table()[at].pid) : 0;
    const uint32_t waiting = segment.wait_queue().waiting([&](uint32_t i, uint64_t token) {
        return i < alive.size() && alive[i] && load(segment.presence().table()[i].token) == token;
    });
    nb::dict out = describe(now);
    out["round_pid"] = pid;
    out["waiting"] = waiting;
    out["attached"] = std::count(alive.begin(), alive.end(), true);
    return out;
}

}  // namespace shmacc
