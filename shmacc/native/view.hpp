// A view of a segment for inspection: without attaching, without its lock, without mapping it.
//
// Everything is read through the descriptor: a hole reads as zeros and stays a hole, so a view reserves
// nothing, however full /dev/shm is and whatever sizes the segment claims; a file that is truncated meanwhile
// is an error, never a SIGBUS; and the right to read is enough. A size that the segment claims is compared
// with the space that the file occupies before memory is allocated for it.
#pragma once

#include "description.hpp"
#include "handle.hpp"
#include "opening.hpp"

namespace shmacc {

class SegmentView {
  public:
    SegmentView(std::shared_ptr<SegmentFile> file, const Config& config, MemberSpecs specs)
        : file_(std::move(file)), config_(config), specs_(std::move(specs)) {}

    void close() { file_.reset(); }

    nb::dict config() const { return describe(config_, specs_); }
    // The committed state of everything, as it was at some instant during the call. "lanes": of each lane its record,
    // and "members": the state of each member that has something of the round, then that of the contributors.
    nb::dict state() const {
        const Snapshot seen = snapshot();
        nb::dict out = describe(seen.totals);
        out["lanes"] = nb::list();
        for (uint32_t i = 0; i < config_.lanes; ++i) {
            const SeenLane& lane = seen.lanes[i];
            nb::dict item = describe(lane.state);
            // An operation runs, or died: rows may differ from the committed ones.
            item["in_operation"] = lane.in_operation;
            nb::list members;
            for (uint32_t j = 0; j < specs_.size(); ++j) {
                const MemberState& state = lane.members[j];
                nb::dict member = describe(state);
                member["lane"] = i;
                member["member"] = j;
                member["in_round"] = state.round == seen.totals.round.round && state.count > 0;
                member["in_operation"] = lane.in_operation;
                member["shape"] = lane.shapes[j] ? nb::cast(*lane.shapes[j]) : nb::none();
                members.append(member);
            }
            item["members"] = members;
            nb::borrow<nb::list>(out["lanes"]).append(item);
        }
        return out;
    }
    nb::list events() const {
        const auto header = whole_header();
        nb::list out;
        for (const Event& event : header->events)
            if (event.serial != 0) out.append(describe(event));
        return out;
    }
    nb::list participants() const {
        nb::list out;
        const std::vector<Participant> table = participants_table();
        for (uint32_t i = 0; i < table.size(); ++i) {
            if (table[i].token == 0) continue;
            nb::dict item = describe(table[i]);
            item["entry"] = i;
            item["alive"] = alive(i, table[i].token);
            out.append(item);
        }
        return out;
    }
    nb::list waiters() const {
        nb::list out;
        const uint64_t cancelled = header<uint64_t>(offsetof(Header, wait_queue) +
                                                    offsetof(QueueHead, cancelled_through));
        const uint32_t top = header<uint32_t>(offsetof(Header, wait_queue) + offsetof(QueueHead, top));
        for (const Waiter& entry : table<Waiter>(kWaitersRegion, std::min(top, kMaxWaiters))) {
            if (entry.ticket == 0 || entry.ticket <= cancelled) continue;
            nb::dict item = describe(entry);
            item["alive"] = alive(entry.participant, entry.participant_token);
            out.append(item);
        }
        return out;
    }
    // (held by another process, its pid or 0): a lane's lock, and the name lock.
    nb::tuple lock_state(uint32_t lane) const { return held_by(lane_byte(lane)); }
    nb::tuple name_lock_state() const { return held_by(kNameByte); }
    // The value of the semaphore of that name; none if there is none, or it is not this user's to read.
    static std::optional<int> semaphore_value(const std::string& path) {
        struct stat found{};
        sem_t semaphore{};
        const Descriptor fd = NamedSemaphore::open_file(path, O_RDONLY, found);
        if (!fd || pread(fd.get(), &semaphore, sizeof semaphore, 0) != static_cast<ssize_t>(sizeof semaphore))
            return std::nullopt;
        int value = 0;
        sem_getvalue(&semaphore, &value);
        return value;
    }
    // Bytes of a region as they stand now.
    nb::bytes read(uint32_t region, uint64_t offset, uint64_t count) const {
        if (region >= first_region(config_, config_.lanes) || offset > kRegionSpan || count > kRegionSpan - offset)
            throw Error(Failure::kInvalidArgument, "The segment has no such bytes");
        check_occupied(count);
        nb::bytes out(nullptr, count);
        read_exactly(region_offset(region) + offset, const_cast<char*>(out.c_str()), count);
        return out;
    }

    bool unlinked() const { return header<uint64_t>(offsetof(Header, unlinked)) != 0; }
    bool used() const { return in_use(file()); }
    // Removes the names if they are this segment's; if_unused: only if no living process is attached.
    bool unlink(const std::string& path, const std::string& semaphore_path, bool if_unused) const {
        const auto writable = SegmentFile::open(path, SegmentFile::Access::kWrite, std::nullopt);
        if (writable != file_) return false;
        return unlink_names(*writable, path, semaphore_path, if_unused, true);
    }
    uint64_t allocated_bytes() const { return static_cast<uint64_t>(file().status().st_blocks) * 512; }

  private:
    struct SeenLane {
        LaneState state;
        bool in_operation;
        std::vector<MemberState> members;
        std::vector<std::optional<Dims>> shapes;
    };
    struct Snapshot {
        Totals totals;
        std::vector<SeenLane> lanes;
    };

    nb::tuple held_by(int64_t byte) const {
        int pid = 0;
        const bool held = others_hold(file().fd(), byte, 1, &pid);
        return nb::make_tuple(held, pid);
    }

    SegmentFile& file() const {
        if (!file_) throw Error(Failure::kFailedPrecondition, "The view is closed");
        return *file_;
    }

    std::unique_ptr<Header> whole_header() const {
        auto seen = std::make_unique<Header>();
        read_exactly(0, seen.get(), sizeof(Header));
        return seen;
    }
    Snapshot snapshot() const {
        check_occupied(bytes_of_states(config_));
        for (int attempt = 0;; ++attempt) {
            const auto before = generations();
            const auto header = whole_header();
            std::vector<unsigned char> states(bytes_of_states(config_));
            read_exactly(region_offset(kStatesRegion), states.data(), states.size());
            std::optional<Snapshot> seen;
            try {
                seen = interpret(*header, before, states);
            } catch (const Error&) {
                if (generations() == before || attempt == kAttempts) throw;
                continue;
            }
            // Copies are overwritten only on the way to the generation after the next one.
            if (generations() == before || attempt == kAttempts) return std::move(*seen);
        }
    }
    // Of the round, then of each lane.
    std::vector<uint64_t> generations() const {
        std::vector<uint64_t> all{header<uint64_t>(offsetof(Header, generation))};
        for (uint32_t i = 0; i < config_.lanes; ++i) {
            uint64_t generation = 0;
            read_exactly(lane_offset(i) + offsetof(LaneHeader, generation), &generation, sizeof generation);
            all.push_back(generation);
        }
        return all;
    }
    uint64_t lane_offset(uint32_t lane) const {
        return region_offset(kStatesRegion) + lane * bytes_of_lane(config_);
    }
    Snapshot interpret(const Header& header, const std::vector<uint64_t>& generations,
                       const std::vector<unsigned char>& states) const {
        Snapshot out{};
        Totals& sum = out.totals;
        sum.round = header.state[generations[0] & 1];
        Committed<RoundState>::verify(sum.round, generations[0]);
        uint64_t claimed = 0;
        for (uint32_t i = 0; i < config_.lanes; ++i) {
            const auto* lane = reinterpret_cast<const LaneHeader*>(&states[i * bytes_of_lane(config_)]);
            const auto* members = reinterpret_cast<const MemberStates*>(lane + 1);
            const uint64_t generation = generations[i + 1];
            SeenLane& seen = out.lanes.emplace_back();
            seen.state = lane->state[generation & 1];
            Committed<LaneState>::verify(seen.state, generation);
            seen.in_operation = lane->journal.generation == generation + 1;
            for (uint64_t bytes : seen.state.reserved) claimed += bytes;
            for (uint32_t j = 0; j < specs_.size(); ++j) {
                const MemberState& state = members[j].copies[current_copy(members[j], generation)];
                verify(state, generation, specs_[j]);
                for (uint64_t bytes : state.reserved) claimed += bytes;
                const bool in_round = state.round == sum.round.round && state.count > 0;
                if (in_round && j + 1 < specs_.size()) sum.rows += state.rows;
                seen.members.push_back(state);
                seen.shapes.push_back(in_round ? std::optional(shape(i, j, state)) : std::nullopt);
            }
            sum.count += count_of(seen.state, sum.round);
            sum.weight += weight_of(seen.state, sum.round);
            sum.applied += seen.state.applied;
            sum.dropped += seen.state.dropped;
            sum.applied_bytes += seen.state.applied_bytes;
            sum.recoveries += seen.state.recoveries;
        }
        check_occupied(claimed);
        return out;
    }
    Dims shape(uint32_t lane, uint32_t member, const MemberState& state) const {
        Shape stored{};
        if (state.shape != kDeclaredShape)
            read_exactly(region_offset(first_region(config_, lane) + kShapes) +
                             (member * uint64_t{2} + state.shape) * sizeof(Shape),
                         &stored, sizeof stored);
        return round_dims(&stored, specs_[member], state);
    }

    std::vector<Participant> participants_table() const {
        const uint32_t top = header<uint32_t>(offsetof(Header, participants_top));
        return table<Participant>(kParticipantsRegion, std::min(top, kMaxParticipants));
    }
    template <class Entry>
    std::vector<Entry> table(uint32_t region, uint32_t count) const {
        std::vector<Entry> entries(count);
        read_exactly(region_offset(region), entries.data(), count * sizeof(Entry));
        return entries;
    }
    template <class Word>
    Word header(size_t offset) const {
        Word word;
        read_exactly(offset, &word, sizeof word);
        return word;
    }

    bool alive(uint32_t i, uint64_t token) const {
        if (i >= kMaxParticipants) return false;
        if (const auto segment = OpenSegment::of(file()); segment && segment->presence().index() == i)
            return token == segment->presence().token();
        uint64_t now = 0;
        if (!others_hold(file().fd(), life_byte(i), 1)) return false;
        read_exactly(region_offset(kParticipantsRegion) + i * sizeof(Participant), &now, sizeof now);
        return now == token;
    }

    void check_occupied(uint64_t bytes) const {
        if (bytes > allocated_bytes()) data_loss("a recorded size is larger than what the segment occupies");
    }
    void read_exactly(uint64_t offset, void* to, uint64_t count) const {
        uint64_t done = 0;
        while (done < count) {
            const ssize_t got = pread(file().fd(), static_cast<char*>(to) + done, count - done,
                                      static_cast<off_t>(offset + done));
            if (got < 0 && errno == EINTR) continue;
            if (got <= 0) data_loss("its file was truncated");
            done += static_cast<uint64_t>(got);
        }
        load_barrier();  // before the check whether an operation ran meanwhile (commit.hpp)
    }

    static constexpr int kAttempts = 1000;

    std::shared_ptr<SegmentFile> file_;
    Config config_;
    MemberSpecs specs_;
};

}  // namespace shmacc
