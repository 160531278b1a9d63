// Converts the records of a segment to Python dictionaries.
#pragma once

#include "python.hpp"

namespace shmacc {

inline nb::dict describe(const Config& config) {
    nb::dict out;
    out["name"] = std::string(config.name, config.name_length);
    out["kind"] = config.kind;
    out["dtype"] = config.dtype;
    out["sum"] = config.sum;
    out["components"] = config.components;
    out["reduction"] = config.reduction;
    out["is_private"] = config.is_private != 0;
    out["token"] = config.token;
    out["hash_key"] = nb::cast(std::vector<uint64_t>(config.hash_key, std::end(config.hash_key)));
    out["created_ns"] = config.created_ns;
    out["mode"] = config.mode;
    if (config.declared_rank == kUnknownRank)
        out["declared"] = nb::none();
    else
        out["declared"] = nb::cast(Dims(config.declared_dims, config.declared_dims + config.declared_rank));
    return out;
}

inline nb::dict describe(const State& state) {
    nb::dict out;
    out["generation"] = state.generation;
    out["step"] = state.step;
    out["count"] = state.count;
    out["sealed"] = state.sealed != 0;
    out["rows"] = state.rows;
    out["row_elements"] = state.row_elements;
    out["buffer"] = state.buffer;
    out["index"] = state.index;
    out["index_buckets"] = state.index_buckets;
    out["index_stamp"] = state.index_stamp;
    out["index_filled"] = state.index_filled;
    out["reserved"] = nb::cast(std::vector<uint64_t>(state.reserved, state.reserved + kRegions));
    out["applied"] = state.applied;
    out["dropped"] = state.dropped;
    out["discarded"] = state.discarded;
    out["taken"] = state.taken;
    out["takes"] = state.takes;
    out["recoveries"] = state.recoveries;
    out["applied_bytes"] = state.applied_bytes;
    out["round"] = nb::none();
    if (state.holder.serial != 0) {
        nb::dict round;
        round["participant"] = state.holder.participant;
        round["token"] = state.holder.token;
        round["since_ns"] = state.holder.since_ns;
        out["round"] = round;
    }
    return out;
}

inline nb::dict describe(const Participant& entry) {
    nb::dict out;
    out["token"] = entry.token;
    out["pid"] = entry.pid;
    out["pid_namespace"] = entry.pid_namespace;
    out["start_ticks"] = entry.start_ticks;
    out["attached_ns"] = entry.attached_ns;
    out["seen_ns"] = entry.seen_ns;
    out["applied_ns"] = entry.applied_ns;
    out["applied_step"] = entry.applied_step;
    out["activity"] = entry.activity;
    out["applied"] = entry.applied;
    out["dropped"] = entry.dropped;
    out["taken"] = entry.taken;
    return out;
}

inline nb::dict describe(const Waiter& entry) {
    nb::dict out;
    out["ticket"] = entry.ticket;
    out["participant"] = entry.participant;
    out["num_required"] = entry.num_required;
    out["since_ns"] = entry.since_ns;
    out["overdue"] = entry.overdue != 0;
    return out;
}

}  // namespace shmacc
