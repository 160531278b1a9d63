// A view of a segment for inspection: without attaching, without its lock, without mapping it.
//
// Everything is read through the descriptor: a hole reads as zeros and stays a hole, so a view reserves
// nothing, however full /dev/shm is and whatever sizes the segment claims; a file that is truncated meanwhile
// is an error, never a SIGBUS; and the right to read is enough. A size that the segment claims is compared
// with the space that the file occupies before memory is allocated for it.
#pragma once

#include <array>

#include "description.hpp"
#include "handle.hpp"
#include "opening.hpp"

namespace shmacc {

class SegmentView {
  public:
    SegmentView(std::shared_ptr<SegmentFile> file, const Config& config)
        : file_(std::move(file)), config_(config) {}

    void close() { file_.reset(); }

    nb::dict config() const { return describe(config_); }
    nb::dict state() const {
        const Snapshot seen = snapshot();
        nb::dict out = describe(seen.state);
        // An operation runs, or died: rows may differ from the committed ones.
        out["in_operation"] = seen.in_operation;
        // How many of its undo records are complete (commit.hpp).
        out["undo_records"] = seen.undo_records;
        out["round_shape"] = seen.round ? nb::cast(*seen.round) : nb::none();
        return out;
    }
    nb::list participants() const {
        nb::list out;
        const std::vector<Participant> table = participants_table();
        for (uint32_t i = 0; i < table.size(); ++i) {
            if (table[i].token == 0) continue;
            nb::dict item = describe(table[i]);
            item["entry"] = i;
            int pid = 0;
            item["alive"] = alive(i, table[i].token, &pid);
            // The pid of a living process in this process's pid namespace, as the kernel has it; 0: it has none.
            item["pid_here"] = pid;
            out.append(item);
        }
        return out;
    }
    // When a process last began an operation or attached, and when a gradient was last accepted (0: never), as far
    // as the table still has it: a process that has left keeps what it wrote until another one gets its entry.
    // Entries are given from the front, so a page without anything is the end.
    nb::tuple last_used_ns() const {
        constexpr uint32_t kStep = static_cast<uint32_t>(kPage / sizeof(Participant));
        int64_t seen = config_.created_ns, applied = 0;
        std::array<Participant, kStep> page;
        for (uint32_t first = 0; first < kMaxParticipants; first += kStep) {
            read_exactly(region_offset(kParticipantsRegion) + first * sizeof(Participant), page.data(), kPage);
            bool empty = true;
            for (const Participant& entry : page) {
                seen = std::max(seen, entry.seen_ns);
                applied = std::max(applied, entry.applied_ns);
                empty = empty && entry.attached_ns == 0;
            }
            if (empty) break;
        }
        return nb::make_tuple(seen, applied);
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
    // (held by another process, its pid or 0): the lock, and the name lock.
    nb::tuple lock_state() const { return held_by(kLockByte); }
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
        if (region >= kRegions || offset > kRegionSpan || count > kRegionSpan - offset)
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
    // How many names the file has, of this library and others; 0: it was removed.
    uint64_t links() const { return file().status().st_nlink; }
    uint64_t allocated_bytes() const { return static_cast<uint64_t>(file().status().st_blocks) * 512; }

  private:
    struct Snapshot {
        State state;
        bool in_operation;
        uint64_t undo_records;
        std::optional<Dims> round;
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

    // The committed state, and the records that belong to it, as they were at some instant during the call.
    Snapshot snapshot() const {
        auto seen = std::make_unique<Header>();
        for (int attempt = 0;; ++attempt) {
            const auto generation = header<uint64_t>(offsetof(Header, generation));
            read_exactly(0, seen.get(), sizeof(Header));
            // The copy is overwritten only on the way to generation + 2.
            if (header<uint64_t>(offsetof(Header, generation)) != generation && attempt < kAttempts) continue;
            const bool in_operation = seen->journal.generation == generation + 1;
            Snapshot out{seen->state[generation & 1], in_operation, in_operation ? seen->journal.records : 0, {}};
            Committed::verify(out.state, generation, config_);
            uint64_t claimed = 0;
            for (uint64_t bytes : out.state.reserved) claimed += bytes;
            check_occupied(claimed);
            if (out.state.count > 0)
                out.round = round_dims(seen->shapes[out.state.shape], config_, out.state);
            return out;
        }
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

    // *pid: as others_hold has it.
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
};

}  // namespace shmacc
