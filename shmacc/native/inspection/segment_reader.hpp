// Reads a segment for inspection: without attaching, without its lock, without mapping it.
//
// Everything is read through the descriptor. So a hole reads as zeros and stays a hole: a reader takes up no space in
// /dev/shm, whatever sizes the segment claims. A truncated file is an error, never a SIGBUS. Read permission is enough.
// A size that the segment claims is compared with the space that the file occupies before memory is allocated for it.
#pragma once

#include "protocol/undo_rows.hpp"
#include "segment/opening.hpp"
#include "segment/session.hpp"

namespace shmacc {

class SegmentReader {
  public:
    SegmentReader(std::shared_ptr<SegmentFile> file, const Config& config, MemberSpecs specs)
        : file_(std::move(file)), config_(config), specs_(std::move(specs)) {}
    void close() { file_.reset(); }
    bool unlinked() const { return header<uint64_t>(offsetof(Header, unlinked)) != 0; }
    bool used() const { return in_use(file()); }
    // How many names the file has, including hard links that others have made; 0: it was removed.
    uint64_t links() const { return file().attributes().st_nlink; }
    uint64_t allocated_bytes() const { return file().occupied(); }

  protected:
    struct SeenLane {
        LaneState state;
        bool in_operation;
        uint64_t undo_records;
        std::vector<MemberState> members;
    };
    struct Snapshot {
        Totals totals;
        uint64_t finished, kept_free;
        uint64_t reserved;  // bytes reserved by all lanes and members
        std::vector<SeenLane> lanes;
        Shape shape;  // the viewed member's in this round, if it is not the declared one
    };

    bool in_round(const Snapshot& seen, uint32_t lane, uint32_t member) const {
        const MemberState& table = seen.lanes[lane].members[member];
        return table.round == seen.totals.round.round && table.count > 0;
    }
    bool given_up(const RoundHolder& holder) const {
        if (holder.serial == 0 || holder.participant >= kMaxParticipants) return false;
        Participant entry{};
        read_exactly(region_offset(kParticipantsRegion) + holder.participant * sizeof entry, &entry,
                     sizeof entry);
        return entry.token == holder.token && entry.given_up >= holder.serial;
    }

    SegmentFile& file() const {
        if (!file_) throw Error(Failure::kFailedPrecondition, "The view is closed");
        return *file_;
    }

    std::unique_ptr<Header> read_header() const {
        auto seen = std::make_unique<Header>();
        read_exactly(0, seen.get(), sizeof(Header));
        return seen;
    }
    // All lanes as they were at one instant. If the segment is too busy for that, each lane is read at an instant of
    // its own, but in the same round.
    Snapshot snapshot() const {
        file().check_occupied(bytes_of_states(config_));
        for (int attempt = 0;; ++attempt) {
            std::vector<uint64_t> before = generations();
            const auto header = read_header();
            std::vector<unsigned char> states(bytes_of_states(config_));
            const bool together = attempt < kTogether;
            if (together)
                read_exactly(region_offset(kStatesRegion), states.data(), states.size());
            else
                for (uint32_t i = 0; i < config_.lanes; ++i)
                    before[i + 1] = read_lane(i, &states[i * bytes_of_lane(config_)]);
            // The copied data is valid if the generations are unchanged: an operation overwrites only the copies that
            // are not current.
            const auto still = [&] {
                return together ? generations() == before : generations()[0] == before[0];
            };
            try {
                Snapshot seen = interpret(*header, before, states);
                seen.shape = read_shape(seen.lanes[lane_].members[member_]);
                if (still() || attempt == kAttempts) return seen;
            } catch (const Error&) {
                if ((together && still()) || attempt == kAttempts) throw;
            }
        }
    }
    // Reads a lane's states, and returns their generation.
    uint64_t read_lane(uint32_t lane, unsigned char* to) const {
        for (int attempt = 0;; ++attempt) {
            const uint64_t generation = generation_of(lane);
            read_exactly(lane_offset(lane), to, bytes_of_lane(config_));
            if (generation_of(lane) == generation || attempt == kTogether) return generation;
        }
    }
    uint64_t generation_of(uint32_t lane) const {
        uint64_t generation = 0;
        read_exactly(lane_offset(lane) + offsetof(LaneHeader, generation), &generation, sizeof generation);
        return generation;
    }
    // The generation of the round, then that of each lane.
    std::vector<uint64_t> generations() const {
        std::vector<uint64_t> all{header<uint64_t>(offsetof(Header, generation))};
        for (uint32_t i = 0; i < config_.lanes; ++i) all.push_back(generation_of(i));
        return all;
    }
    uint64_t lane_offset(uint32_t lane) const {
        return region_offset(kStatesRegion) + lane * bytes_of_lane(config_);
    }
    Snapshot interpret(const Header& header, const std::vector<uint64_t>& generations,
                       const std::vector<unsigned char>& states) const {
        Snapshot out{};
        out.finished = header.finished;
        out.kept_free = kept_bytes(header.kept_free);
        Totals& sum = out.totals;
        sum.round = header.state[generations[0] & 1];
        if (sum.round.needs > generations[1]) {  // it is not valid yet (commit.hpp)
            sum.round = header.state[(generations[0] - 1) & 1];
            Committed<RoundState>::verify(sum.round, generations[0] - 1);
        } else {
            Committed<RoundState>::verify(sum.round, generations[0]);
        }
        for (uint32_t i = 0; i < config_.lanes; ++i) {
            const auto* lane = reinterpret_cast<const LaneHeader*>(&states[i * bytes_of_lane(config_)]);
            const auto* members = reinterpret_cast<const MemberStates*>(lane + 1);
            const uint64_t generation = generations[i + 1];
            const LaneState& state = lane->state[generation & 1];
            Committed<LaneState>::verify(state, generation);
            const bool in_operation = lane->journal.generation == generation + 1;
            SeenLane& seen = out.lanes.emplace_back(
                SeenLane{state, in_operation, in_operation ? lane->journal.records : 0, {}});
            for (uint64_t bytes : state.reserved) out.reserved += bytes;
            for (uint32_t j = 0; j < specs_.size(); ++j) {
                const MemberState& member = members[j].copies[current_copy(members[j], generation)];
                verify(member, generation, specs_[j]);
                for (uint64_t bytes : member.reserved) out.reserved += bytes;
                if (member.round == sum.round.round && j + 1 < specs_.size()) sum.rows += member.rows;
                seen.members.push_back(member);
            }
            sum.add(state);
        }
        file().check_occupied(out.reserved);
        return out;
    }
    Shape read_shape(const MemberState& table) const {
        Shape stored{};
        if (specs_[member_].kind != kTable && table.shape != kDeclaredShape)
            read_exactly(offset_of(kFixedRegions + kShapes) +
                             (member_ * uint64_t{2} + table.shape) * sizeof(Shape),
                         &stored, sizeof stored);
        return stored;
    }
    // Returns the viewed member's places as committed: a copy, into which the first `undo_records` records of the
    // viewed lane's undo log are put back, as a recovery would do it (undo_rows.hpp). If an operation ran meanwhile,
    // the records do not fit the snapshot, and may look damaged.
    std::vector<RowPlace> committed_places(uint64_t undo_records) const {
        const Snapshot seen = snapshot();
        std::vector<RowPlace> places(rows_of_round(seen));
        read_exactly(offset_of(kFixedRegions + kLaneRegions + kPlaces), places.data(),
                     places.size() * sizeof(RowPlace));
        each_undone(seen, undo_records, [&](const SavedRows& rows) { rows.put_back(places.data()); });
        return places;
    }
    // Returns 1 for each row that still has its committed sums, else 0; and the offset in UndoRows of the saved sums.
    std::pair<std::vector<char>, uint64_t> unchanged_rows(uint64_t undo_records) const {
        const Snapshot seen = snapshot();
        std::vector<char> unchanged(rows_of_round(seen), 1);
        std::optional<uint64_t> saved_at;
        each_undone(seen, undo_records, [&](const SavedRows& rows) {
            if (rows.numbers) return;
            if (!saved_at) saved_at = rows.sums_at;
            std::fill_n(unchanged.begin() + rows.first_place, rows.places, char{0});
        });
        return {std::move(unchanged), saved_at.value_or(0)};
    }
    uint64_t rows_of_round(const Snapshot& seen) const {
        return in_round(seen, lane_, member_) ? seen.lanes[lane_].members[member_].rows : 0;
    }
    // Calls act for each undo record of the viewed member, if the member has rows in this round.
    template <class Act>
    void each_undone(const Snapshot& seen, uint64_t records, Act act) const {
        if (records == 0 || rows_of_round(seen) == 0) return;
        const SeenLane& lane = seen.lanes[lane_];
        std::vector<unsigned char> log(lane.state.reserved[kUndoLog]);
        read_exactly(offset_of(kFixedRegions + kUndoLog), log.data(), log.size());
        read_undo(
            log.data(), lane.state, specs_, records,
            [&](uint32_t member) -> const MemberState& { return lane.members[member]; },
            [&](const SavedRows& rows) {
                if (rows.member == member_) act(rows);
            });
    }
    // Returns where a region begins in the file. region: its number in kRegionNames, for the viewed lane and member.
    uint64_t offset_of(uint32_t region) const {
        const uint32_t of_lane = kFixedRegions + kLaneRegions;
        if (region >= kFixedRegions) region += lane_ * regions_of_lane(config_);
        if (region >= of_lane + lane_ * regions_of_lane(config_)) region += member_ * kMemberRegions;
        return region_offset(region);
    }

    std::vector<Participant> participants_table() const {
        return entries_of<Participant>(kParticipantsRegion, offsetof(Header, participants_top),
                                       kMaxParticipants);
    }
    // top: the offset of the word that says how many entries may be in use; there are at most `most`.
    template <class Entry>
    std::vector<Entry> entries_of(uint32_t region, size_t top, uint32_t most) const {
        std::vector<Entry> entries(std::min(header<uint32_t>(top), most));
        read_exactly(region_offset(region), entries.data(), entries.size() * sizeof(Entry));
        return entries;
    }
    template <class Word>
    Word header(size_t offset) const {
        Word word;
        read_exactly(offset, &word, sizeof word);
        return word;
    }

    // pid: gets the process's pid, as from others_hold.
    bool alive(uint32_t i, uint64_t token, int* pid = nullptr) const {
        if (i >= kMaxParticipants) return false;
        if (const auto segment = OpenSegment::of(file()); segment && segment->presence().index() == i) {
            if (pid) *pid = static_cast<int>(getpid());
            return token == segment->presence().token();
        }
        uint64_t now = 0;
        if (!others_hold(file().fd(), life_byte(i), 1, pid)) return false;
        read_exactly(region_offset(kParticipantsRegion) + i * sizeof(Participant), &now, sizeof now);
        return now == token;
    }

    void read_exactly(uint64_t offset, void* to, uint64_t count) const {
        uint64_t done = 0;
        while (done < count) {
            const ssize_t got = pread(file().fd(), static_cast<char*>(to) + done, count - done,
                                      static_cast<off_t>(offset + done));
            if (got < 0 && errno == EINTR) continue;
            if (got < 0) system_failure("Reading it", errno);
            if (got == 0) data_loss("its file was truncated");
            done += static_cast<uint64_t>(got);
        }
        load_barrier();  // before the check whether an operation ran meanwhile (commit.hpp)
    }

    static constexpr int kTogether = 100, kAttempts = kTogether + 10;

    std::shared_ptr<SegmentFile> file_;
    Config config_;
    MemberSpecs specs_;
    uint32_t lane_ = 0;
    uint32_t member_ = 0;
};

}  // namespace shmacc
