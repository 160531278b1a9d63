// Views of segments for Python: what a SegmentReader sees, as dictionaries and lists.
#pragma once

#include <array>

#include "inspection/segment_reader.hpp"
#include "python/description.hpp"
#include "python/handle.hpp"
#include "python/table_copy.hpp"
#include "segment/opening.hpp"

namespace shmacc {

class SegmentView : public SegmentReader {
  public:
    using SegmentReader::SegmentReader;
    // Returns a view of the same segment that reports on one member in one lane: its *table*. (A newly opened view
    // reports on the first lane's first member.) The last member is the set of contributors.
    SegmentView table(uint32_t lane, uint32_t member) const {
        if (lane >= config_.lanes || member >= specs_.size())
            throw Error(Failure::kInvalidArgument, "The segment has no such lane or member");
        SegmentView view = *this;
        view.lane_ = lane;
        view.member_ = member;
        return view;
    }

    // The configuration of the segment and of the viewed member.
    nb::dict config() const {
        nb::dict out = describe(config_, specs_);
        const nb::dict member = describe(specs_[member_]);
        for (const char* key : {"dtype", "sum", "components", "reduction", "declared"})
            out[key] = member[key];
        out["member_kind"] = member["kind"];
        out["member"] = member["name"];
        return out;
    }
    // The committed state of the segment and of the viewed member, as of some instant during the call; see `snapshot`.
    nb::dict state() const {
        const Snapshot seen = snapshot();
        const SeenLane& lane = seen.lanes[lane_];
        nb::dict out = describe(seen.totals);
        out["finished"] = seen.finished > seen.totals.round.restores;
        out["kept_free"] = seen.kept_free;
        if (given_up(seen.totals.round.holder)) out["round"] = nb::none();
        describe_table(out, seen, lane_, member_);
        // Grows with every commit of the round or of the viewed lane.
        out["generation"] = seen.totals.round.generation + lane.state.generation;
        out["leftovers"] = lane.state.leftovers - lane.members[member_].leftovers_before;
        // Whether an operation is running, or its process died: then rows may differ from the committed ones.
        out["in_operation"] = lane.in_operation;
        // How many undo records of the running operation are complete (commit.hpp).
        out["undo_records"] = lane.undo_records;
        out["round_shape"] = in_round(seen, lane_, member_)
                                 ? nb::cast(round_dims(&seen.shape, specs_[member_], lane.members[member_]))
                                 : nb::none();
        out["all_reserved"] = seen.reserved;
        return out;
    }
    // Describes every member in every lane, lane by lane. The set of contributors is the last member.
    nb::list tables() const {
        const Snapshot seen = snapshot();
        nb::list out = new_list();
        for (uint32_t i = 0; i < config_.lanes; ++i)
            for (uint32_t j = 0; j < specs_.size(); ++j) {
                nb::dict table = new_dict();
                describe_table(table, seen, i, j);
                out.append(table);
            }
        return out;
    }
    nb::list events() const {
        const auto header = read_header();
        nb::list out = new_list();
        for (const Event& event : header->events) {
            if (event.serial == 0) continue;
            nb::dict item = describe(event);
            const bool failed = event.kind == kFailure;
            item["reason"] = failed ? reason(reason_of_event(event.serial), event.serial) : nb::str("");
            out.append(item);
        }
        return out;
    }
    nb::list participants() const {
        nb::list out = new_list();
        const std::vector<Participant> table = participants_table();
        for (uint32_t i = 0; i < table.size(); ++i) {
            if (!is_here(table[i].token)) continue;
            nb::dict item = describe(table[i]);
            item["entry"] = i;
            int pid = 0;
            item["alive"] = alive(i, table[i].token, &pid);
            // A living process's pid in this process's pid namespace, from the kernel; 0: it has none there.
            item["pid_here"] = pid;
            out.append(item);
        }
        return out;
    }
    // Returns attached processes that have failed; and workers and takers that are gone because they died or failed.
    nb::list departures() const {
        nb::list out = new_list();
        const std::vector<Participant> attached = participants_table();
        for (uint32_t i = 0; i < attached.size(); ++i) {
            const Participant& entry = attached[i];
            if (entry.token == 0 || entry.failures == 0) continue;
            nb::dict item = departure(entry, i);
            item["attached"] = is_here(entry.token);
            item["news"] = has_failed(entry, entry.token);
            item["at_ns"] = nb::none();
            out.append(item);
        }
        const auto departed = entries_of<Departed>(kDepartedRegion, offsetof(Header, departed_top),
                                                   kMaxDeparted);
        for (uint32_t i = 0; i < departed.size(); ++i) {
            const Departed& entry = departed[i];
            if ((entry.token & kFateBits) == 0) continue;
            nb::dict item = departure(entry, reason_of_departed(i));
            item["attached"] = false;
            item["news"] = (entry.token & kTold) == 0;
            item["at_ns"] = wall_ns_of(entry.at_ns);
            out.append(item);
        }
        return out;
    }
    // Returns when a process last began an operation or attached, when a gradient was last accepted, and when a process
    // last took (0: never). It looks at all processes' entries, and at those of processes that left, if no other
    // process has got them since. Entries are given from the front, so the first empty page is the end.
    nb::tuple last_used_ns() const {
        constexpr uint32_t kStep = static_cast<uint32_t>(kPage / sizeof(Participant));
        int64_t seen = wall_ns_of(config_.created_ns), applied = 0, took = 0;
        std::array<Participant, kStep> page;
        for (uint32_t first = 0; first < kMaxParticipants; first += kStep) {
            read_exactly(region_offset(kParticipantsRegion) + first * sizeof(Participant), page.data(), kPage);
            bool empty = true;
            for (const Participant& entry : page) {
                seen = std::max(seen, wall_ns_of(entry.seen_ns));
                applied = std::max(applied, wall_ns_of(entry.applied_ns));
                took = std::max(took, wall_ns_of(entry.took_ns));
                empty = empty && entry.attached_ns == 0;
            }
            if (empty) break;
        }
        return nb::make_tuple(seen, applied, took);
    }
    // How rounds spent their time, whom they waited for, and all lanes' counters of unchecked gradients (Unchecked).
    nb::dict pace() const {
        const Pace seen = header<Pace>(offsetof(Header, pace));
        nb::dict out = new_dict();
        out["waiting_ns"] = seen.waiting_ns;
        out["block_ns"] = seen.block_ns;
        out["between_ns"] = seen.between_ns;
        nb::list late = new_list();
        for (const Late& entry : seen.late)
            if (entry.rounds > 0) late.append(nb::make_tuple(entry.who, entry.rounds, entry.late_ns));
        out["late"] = late;
        Unchecked sum{};
        for (uint32_t i = 0; i < config_.lanes; ++i) {
            Unchecked of_lane{};
            read_exactly(lane_offset(i) + offsetof(LaneHeader, unchecked), &of_lane, sizeof of_lane);
            sum.gradients += of_lane.gradients;
            sum.steps += of_lane.steps;
            sum.most_steps = std::max(sum.most_steps, of_lane.most_steps);
        }
        out["unchecked"] = nb::make_tuple(sum.gradients, sum.steps, sum.most_steps);
        return out;
    }
    nb::list waiters() const {
        nb::list out = new_list();
        const uint64_t cancelled = header<uint64_t>(offsetof(Header, wait_queue) +
                                                    offsetof(QueueHead, cancelled_through));
        constexpr size_t kTop = offsetof(Header, wait_queue) + offsetof(QueueHead, top);
        for (const Waiter& entry : entries_of<Waiter>(kWaitersRegion, kTop, kMaxWaiters)) {
            if (entry.ticket == 0 || entry.ticket <= cancelled) continue;
            nb::dict item = describe(entry);
            item["alive"] = alive(entry.participant, entry.participant_token);
            out.append(item);
        }
        return out;
    }
    // The next two return (whether another process holds the lock, its pid or 0).
    nb::tuple lock_state(uint32_t lane) const { return held_by(lane_byte(lane)); }
    nb::tuple name_lock_state() const { return held_by(kNameByte); }
    // Reads from a region as it is now. region: a fixed one, or one of the viewed lane or member (kViewedRegions).
    nb::bytes read(uint32_t region, uint64_t offset, uint64_t count) const {
        if (region >= kViewedRegions || offset > kRegionSpan || count > kRegionSpan - offset)
            throw Error(Failure::kInvalidArgument, "The segment has no such bytes");
        file().check_occupied(count);
        nb::bytes out(nullptr, count);
        read_exactly(offset_of(region) + offset, const_cast<char*>(out.c_str()), count);
        return out;
    }
    // The rows of the viewed sparse member in this round, as SegmentReader reads them.
    nb::bytes places(uint64_t undo_records) const {
        const std::vector<RowPlace> places = committed_places(undo_records);
        return nb::bytes(places.data(), places.size() * sizeof(RowPlace));
    }
    nb::tuple unchanged(uint64_t undo_records) const {
        const auto [rows, saved_at] = unchanged_rows(undo_records);
        return nb::make_tuple(nb::bytes(rows.data(), rows.size()), saved_at);
    }
    // Compares a copy of the viewed sparse member or table with a copy of its index. Copying a million rows takes a
    // hundredth of a second, comparing them ten times as long. Returns None if the index was replaced, or an
    // accumulator's round ended, while the copies were made.
    //
    // Gradients may arrive while the copies are made. Within a round a row keeps its place and its number, and its
    // entry in the index keeps its position until the index is replaced; so rows that were there before are compared
    // with an index that is read later. The same holds for a table of parameters, whatever updates end meanwhile: a
    // place that, by its stamp, was given at the generation of the first look has had its id all the time (table.hpp).
    nb::object compare() const {
        const bool by_id = specs_[member_].kind == kTable;
        const Snapshot before = snapshot();
        const MemberState table = before.lanes[lane_].members[member_];
        const uint64_t generation = before.lanes[lane_].state.generation;
        const uint64_t places = by_id || in_round(before, lane_, member_) ? table.rows : 0;
        if (table.index > 1 || places > kMaxRows || table.index_buckets > kRegionSpan / sizeof(Bucket))
            data_loss("its index is out of range");
        file().check_occupied(std::max(table.index_buckets * sizeof(Bucket), places * sizeof(RowPlace)));

        TableCopy copy(PlacesInUse{nullptr, places, generation}, by_id);
        const uint32_t first_region = kFixedRegions + kLaneRegions;
        std::vector<RowPlace> piece(std::min<uint64_t>(places, 4096));
        for (uint64_t first = 0; first < places; first += piece.size()) {
            const uint64_t count = std::min<uint64_t>(piece.size(), places - first);
            read_exactly(offset_of(first_region + kPlaces) + first * sizeof(RowPlace), piece.data(),
                         count * sizeof(RowPlace));
            for (uint64_t i = 0; i < count; ++i) copy.add(piece[i]);
        }
        std::vector<Bucket> buckets(table.index_buckets);
        read_exactly(offset_of(first_region + kIndex0 + static_cast<uint32_t>(table.index)), buckets.data(),
                     buckets.size() * sizeof(Bucket));
        const Snapshot after = snapshot();
        const MemberState& later = after.lanes[lane_].members[member_];
        if (later.index_stamp != table.index_stamp || later.index != table.index ||
            later.index_buckets != table.index_buckets ||
            (!by_id && after.totals.round.round != before.totals.round.round))
            return nb::none();

        const auto stamp = static_cast<uint32_t>(table.index_stamp);
        nb::dict out = copy.compare(Index(buckets.data(), buckets.size(), stamp, RowHash(config_.hash_key)),
                                    buckets.size(), after.lanes[lane_].state.generation);
        out["rows"] = by_id ? table.in_table : places;
        // The most contributions that a row can have.
        out["possible"] = by_id ? 0 : later.weight;
        out["committed"] = after.lanes[lane_].state.generation != generation;
        out["in_operation"] = after.lanes[lane_].in_operation;
        return out;
    }

    // Removes the names if they are this segment's; if_unused: only if no living process is attached. Returns the
    // removed names; null: they are another segment's, or this segment is in use.
    std::optional<std::vector<std::string>> unlink(const std::string& path, const std::string& semaphore_path,
                                                   bool if_unused) const {
        const auto writable = SegmentFile::open(path, SegmentFile::Access::kWrite, std::nullopt);
        if (writable != file_) return std::nullopt;
        return unlink_names(*writable, path, semaphore_path, if_unused, true);
    }

  private:
    // A member without contents of the current round is described as empty.
    void describe_table(nb::dict& out, const Snapshot& seen, uint32_t lane, uint32_t member) const {
        const MemberState& table = seen.lanes[lane].members[member];
        const bool in_round = this->in_round(seen, lane, member);
        out["member_count"] = in_round ? table.count : 0;
        out["member_weight"] = in_round ? table.weight : 0;
        out["rows"] = in_round ? table.rows : 0;
        out["row_elements"] = table.row_elements;
        out["buffer"] = table.buffer;
        out["index"] = table.index;
        out["index_buckets"] = table.index_buckets;
        out["index_stamp"] = table.index_stamp;
        out["index_filled"] = in_round ? table.index_filled : 0;
        out["lane"] = lane;
        out["member"] = member;
        std::vector<uint64_t> reserved(kFixedRegions);
        const LaneState& state = seen.lanes[lane].state;
        reserved.insert(reserved.end(), state.reserved, std::end(state.reserved));
        reserved.insert(reserved.end(), table.reserved, std::end(table.reserved));
        out["reserved"] = nb::cast(reserved);
        out["by_id"] = nb::none();
        if (specs_[member].kind != kTable) return;
        nb::dict by_id = new_dict();
        by_id["slots"] = table.rows;
        by_id["rows"] = table.in_table;
        by_id["removed"] = table.removed;
        by_id["generation"] = state.generation;
        out["by_id"] = by_id;
    }

    // Entry: Participant or Departed.
    template <class Entry>
    nb::dict departure(const Entry& entry, uint32_t reason_number) const {
        nb::dict out = new_dict();
        out["died"] = (entry.token & kFateBits & ~uint64_t{kTold}) == kDead;
        out["pid"] = entry.pid;
        out["pid_namespace"] = entry.pid_namespace;
        out["applied"] = entry.applied;
        out["token"] = entry.token;
        out["attached_ns"] = wall_ns_of(entry.attached_ns);
        out["took_ns"] = wall_ns_of(entry.took_ns);
        out["roles"] = entry.roles;
        out["reason"] = reason(reason_number, identity_of(entry.token));
        return out;
    }
    nb::object reason(uint32_t number, uint64_t of) const {
        return checked(in_python(read_reason(file(), number, of)));
    }
    nb::tuple held_by(int64_t byte) const {
        int pid = 0;
        const bool held = others_hold(file().fd(), byte, 1, &pid);
        return nb::make_tuple(held, pid);
    }
};

}  // namespace shmacc
