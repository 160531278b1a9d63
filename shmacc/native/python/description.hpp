// The records of a segment as Python dictionaries, and what a handle reports of its segment, without the lock.
#pragma once

#include "python/interpreter.hpp"
#include "segment/session.hpp"

namespace shmacc {

// Returns the name as a Python string. Throws DataLossError if it is not UTF-8.
inline nb::object name_of(const MemberSpec& member) {
    const auto size = static_cast<Py_ssize_t>(member.name.size());
    nb::object name = nb::steal(PyUnicode_DecodeUTF8(member.name.data(), size, nullptr));
    if (name) return name;
    if (!PyErr_ExceptionMatches(PyExc_UnicodeDecodeError)) throw nb::python_error();
    PyErr_Clear();
    data_loss("a member's name is not UTF-8");
}

inline nb::dict describe(const MemberSpec& member) {
    nb::dict out = new_dict();
    out["name"] = name_of(member);
    out["kind"] = member.kind;
    out["dtype"] = member.dtype;
    out["sum"] = member.sum;
    out["components"] = member.components;
    out["reduction"] = member.reduction;
    out["declared"] = member.declared ? nb::cast(*member.declared) : nb::none();
    const auto& numbers = member.optimizer.numbers;
    out["optimizer"] = nb::make_tuple(member.optimizer.kind,
                                      std::vector<double>(std::begin(numbers), std::end(numbers)));
    out["table"] = nb::none();
    if (member.kind == kTable) {
        const TableSpec& table = member.table;
        out["table"] = nb::make_tuple(table.initial,
                                      std::vector<double>(std::begin(table.numbers), std::end(table.numbers)),
                                      table.seed,
                                      table.max_rows == kMaxRows ? nb::none() : nb::cast(table.max_rows));
    }
    return out;
}

// specs: with the set of contributors, which is not described.
inline nb::dict describe(const Config& config, const MemberSpecs& specs) {
    nb::dict out = new_dict();
    out["name"] = name_of(config);
    out["kind"] = config.kind;
    out["reduction"] = config.reduction;
    out["lanes"] = config.lanes;
    out["directory_bytes"] = config.directory_bytes;
    out["states_bytes"] = bytes_of_states(config);
    out["capacity"] = config.capacity == kUnbounded ? nb::none() : nb::cast(config.capacity);
    out["is_private"] = config.is_private != 0;
    out["token"] = config.token;
    out["hash_key"] = nb::cast(std::vector<uint64_t>(config.hash_key, std::end(config.hash_key)));
    out["created_ns"] = wall_ns_of(config.created_ns);
    out["mode"] = config.mode;
    nb::list members = new_list();
    for (size_t i = 0; i + 1 < specs.size(); ++i) members.append(describe(specs[i]));
    out["members"] = members;
    return out;
}

inline nb::dict describe(const Totals& now) {
    nb::dict out = new_dict();
    out["generation"] = now.round.generation;
    out["step"] = now.round.step;
    out["sealed"] = now.round.sealed != 0;
    out["count"] = now.count;
    out["weight"] = now.weight;
    out["all_rows"] = now.rows;
    nb::dict counters = new_dict();
    for (const auto& counter : kRoundCounters) counters[counter.name] = now.round.*counter.number;
    for (const auto& counter : kLaneCounters) counters[counter.name] = now.ever.*counter.number;
    out["counters"] = counters;
    out["round"] = nb::none();
    if (now.round.holder.serial != 0) {
        nb::dict round = new_dict();
        round["participant"] = now.round.holder.participant;
        round["token"] = now.round.holder.token;
        round["since_ns"] = wall_ns_of(now.round.holder.since_ns);
        out["round"] = round;
    }
    out["belongs_to"] = now.round.final.parameters;
    out["update"] = nb::none();
    if (now.round.final.phase != kNotFinal) {
        nb::dict update = new_dict();
        update["is_in"] = now.round.final.phase == kUpdateIn;
        update["pid"] = now.round.final.pid;
        update["since_ns"] = wall_ns_of(now.round.final.since_ns);
        out["update"] = update;
    }
    return out;
}

inline nb::dict describe(const Participant& entry) {
    nb::dict out = new_dict();
    out["token"] = entry.token;
    out["pid"] = entry.pid;
    out["pid_namespace"] = entry.pid_namespace;
    out["start_ticks"] = entry.start_ticks;
    out["attached_ns"] = wall_ns_of(entry.attached_ns);
    out["seen_ns"] = wall_ns_of(entry.seen_ns);
    out["applied_ns"] = wall_ns_of(entry.applied_ns);
    out["applied_step"] = entry.applied_step;
    out["contributor"] = entry.contributor;
    out["activity"] = entry.activity;
    out["applied"] = entry.applied;
    out["dropped"] = entry.dropped;
    out["taken"] = entry.taken;
    out["roles"] = entry.roles;
    out["took_ns"] = wall_ns_of(entry.took_ns);
    return out;
}

inline nb::dict describe(const Waiter& entry) {
    nb::dict out = new_dict();
    out["ticket"] = entry.ticket;
    out["participant"] = entry.participant;
    out["num_required"] = entry.num_required;
    out["since_ns"] = wall_ns_of(entry.since_ns);
    out["overdue"] = entry.overdue != 0;
    return out;
}

inline nb::dict describe(const Event& event) {
    nb::dict out = new_dict();
    out["serial"] = event.serial;
    out["kind"] = event.kind;
    out["token"] = event.token;
    out["pid"] = event.pid;
    out["pid_namespace"] = event.pid_namespace;
    out["at_ns"] = wall_ns_of(event.at_ns);
    out["step"] = event.step;
    out["contributor"] = event.contributor;
    out["roles"] = event.roles;
    return out;
}

// What a handle reports of its segment, and of the processes attached to it. Everything is read before the first Python
// object is made: making an object may collect garbage, run finalizers, and let another thread close the handle.

// Whether each participant's entry belongs to a living process. Asks the kernel about each entry once.
inline std::vector<bool> living(OpenSegment& segment) {
    Presence& presence = segment.presence();
    std::vector<bool> living(presence.table().size());
    for (uint32_t i = 0; i < living.size(); ++i) {
        uint64_t token = load(presence.table()[i].token);
        living[i] = token != 0 && presence.alive(i, token);
    }
    return living;
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
    const bool held = at < alive.size() && round_is_open(segment.presence(), now.round);
    const uint32_t pid = held ? load_relaxed(segment.presence().table()[at].pid) : 0;
    const uint32_t waiting = segment.wait_queue().waiting([&](uint32_t i, uint64_t token) {
        return i < alive.size() && alive[i] && load(segment.presence().table()[i].token) == token;
    });
    nb::dict out = describe(now);
    out["round_pid"] = pid;
    out["finished"] = segment.finished(now.round);
    out["kept_free"] = kept_bytes(load_relaxed(segment.header().kept_free));
    out["waiting"] = waiting;
    out["attached"] = std::count(alive.begin(), alive.end(), true);
    return out;
}

}  // namespace shmacc
