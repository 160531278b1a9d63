// Updates of parameters: each is atomic and happens once per round, even if any process dies at any instant.
//
// Two segments take part: the accumulator whose round is open, and the parameters. Each has its own commits. An
// update takes four steps, in this order. The first three are made under the parameters' lock:
//
//   1  The accumulator's RoundState says that the update has begun: the round is final. From here on it keeps exactly
//      these gradients. After an exception, a close or the holder's death the next block gets the same gradients.
//   2  Lane::begin stamps the parameters' journal, which is no commit. Then entries are copied, counted as saved, and
//      changed.
//   3  The parameters' RoundState with the new step, then the lane's state: together one commit (RoundState::needs).
//   4  The accumulator's RoundState says that the update is in. The round may be consumed.
//
//   Invariant: the parameters contain the updates of all rounds before `step`, and no others. If their journal is
//              stamped, this is true after the next owner of their lock has put back the entries that the journal
//              counts as saved (Lane::recover).
//   Invariant: no gradient of a round was computed from parameters that the round's own update had begun to change: a
//              round whose update has begun takes no more gradients.
//
// Each instant of death:
//   before 1            nothing has happened: the round takes gradients again.
//   between 1 and 2     the round is final. The next chief that opens it makes its update.
//   between 2 and 3     as between 1 and 2. But first the next update, snapshot or restore, or the next process that
//                       attaches, puts the old entries back. Until then workers, which read without the lock, may
//                       see half an update; the gradients that they compute from it belong to a sealed step. The
//                       next chief may compute new contents from the arrays. So opening a round puts the entries
//                       back if the chief has attached the parameters by then (Handle::recover_parameters).
//   between 3 and 4     the update is in, though the round says only that it has begun. The next chief asks for the
//                       update. The parameters' step shows that it is in, so only 4 is left to do.
//   after 4             the round is consumed, by its block's end, by the next chief, or by advance_step.
// Within 3, the arrays' states and the RoundState mean nothing before the lane's commit (commit.hpp).
//
// tools/model/update.pml checks all of this with two chiefs. It finds a fault if a round does not become final, old
// entries are not put back, the parameters have no step, or a final round may end without its update.
//
// The accumulator's lock is taken while the parameters' lock is held, never the other way round. No signal handler runs
// while both are held, since it might use either segment. If a lane of the accumulator is busy, both are released.
#pragma once

#include <list>

#include "parameters/table.hpp"
#include "parameters/touched_array.hpp"
#include "segment/operation.hpp"
#include "values/output.hpp"

namespace shmacc {

// How an update or a restore changes an array.
struct ArrayChange {
    uint32_t array;
    uint32_t region;  // in kArrayRegions
    std::optional<double> rate;  // the learning rate, if the values are gradients; none: they are new contents
    const void* values;
    uint64_t bytes = 0;  // the region's size; a table's is not given
    const int64_t* rows = nullptr;  // the rows to change, or a table's ids; null: the whole array
    uint64_t count = 0;  // how many rows
    uint64_t row_bytes = 0;
    // For a table only.
    Removal removal = {};
    const int64_t* steps = nullptr;  // for each row, the step of the round that changed it last; null: this round's
};

// Holds the parameters' lock, and a copy of their committed state to change.
class ArraysSession {
  public:
    ArraysSession(OpenSegment& segment, int64_t deadline, Interruption& interruption)
        : segment_(segment), locks_(segment) {
        if (!locks_.acquire(0, deadline, interruption)) return;
        locks_.guard([&] {
            segment.round().settle();
            round = segment.round().current();
            state = before_ = segment.recovered(0);
        });
    }

    // Without a commit: gives back the memory that tables have reserved for new rows.
    ~ArraysSession() {
        if (!committed_)
            for (Member& array : arrays_) array.roll_back();
    }
    ArraysSession(const ArraysSession&) = delete;
    ArraysSession& operator=(const ArraysSession&) = delete;

    bool held() const { return locks_.held(); }
    Lane& lane() { return *segment_.lanes()[0]; }
    Member array(uint32_t number) { return Member(lane(), number, state); }

    // Compares the tables to change with their indexes, if this process has not done so. False: there is more to
    // compare, and this process has held the lock for long.
    bool compare(const std::vector<ArrayChange>& changes) {
        constexpr uint64_t kMostRows = 1 << 20;
        for (const ArrayChange& change : changes) {
            Member member = array(change.array);
            if (member.spec().kind != kTable || lane().compared(change.array).all) continue;
            if (!IdTable(member).compare(kMostRows)) return false;
        }
        return true;
    }
    // Reserves what the changes need, and writes the log. Nothing is changed yet, and nothing throws after this.
    void prepare(const std::vector<ArrayChange>& changes) {
        lane().begin_round(state, round.round + 1);
        struct Logged {
            SavedArray array;
            const int64_t* listed;
        };
        std::vector<Logged> log;
        uint64_t log_bytes = 0;
        arrays_.reserve(changes.size());  // tables_ refers to its elements
        for (const ArrayChange& change : changes) {
            if (arrays_.empty() || arrays_.back().number() != change.array)
                arrays_.push_back(array(change.array));
            if (arrays_.back().spec().kind == kTable) {
                IdTable& table = tables_.emplace_back(arrays_.back());
                table.prepare({change.rows, change.count}, change.removal);
                log.push_back({table.saved_marks(), table.marked().data()});
                log.push_back({table.saved_steps(), table.touched().data()});
                log.push_back({table.saved_rows(), table.touched().data()});
            } else {
                log.push_back({saved(change, arrays_.back()), change.rows});
            }
        }
        for (const Logged& one : log) {
            log_bytes += sizeof(SavedArray) + one.array.listed * one.array.entries * sizeof(int64_t);
            for (const auto& region : one.array.regions)
                saved_bytes_ += one.array.entries * undo_aligned(region.entry_bytes);
        }
        lane().reserve_undo(state, log_bytes, saved_bytes_);
        unsigned char* to = lane().mapping().at_least(kUndoLog, state.reserved[kUndoLog],
                                                      state.reserved[kUndoLog]);
        lane().mapping().at_least(kUndoRows, state.reserved[kUndoRows], state.reserved[kUndoRows]);
        for (const Logged& one : log) {
            std::memcpy(to, &one.array, sizeof one.array);
            to += sizeof one.array;
            const uint64_t listed = one.array.listed * one.array.entries * sizeof(int64_t);
            if (listed) std::memcpy(to, one.listed, listed);
            to += listed;
        }
    }
    // Makes the changes that were given to `prepare`. step: the step of the round.
    void change(const std::vector<ArrayChange>& changes, int64_t step) {
        uint64_t new_entries = 0;
        for (const IdTable& table : tables_) new_entries += table.new_entries();
        lane().begin(state, new_entries);
        Saving saving{lane().mapping().at_least(kUndoRows, saved_bytes_, state.reserved[kUndoRows]),
                      lane().published(), 0, saved_bytes_ >= kStreamedFrom};
        auto array = arrays_.begin();
        auto table = tables_.begin();
        for (const ArrayChange& change : changes) {
            if (array->number() != change.array) ++array;
            const bool has_rows = change.rows == nullptr || change.count > 0;
            // torch's SparseAdam also counts an update without rows.
            if (change.rate) array->state.count += has_rows || array->spec().optimizer.has(kAsTorch);
            if (array->spec().kind == kTable) {
                with_number(array->spec().sum == kFloat64, [&](auto zero) {
                    change_table<decltype(zero)>(*array, *table, change, step, saving);
                });
                ++table;
            } else if (!change.rate) {
                replace(*array, change, saving);
            } else if (has_rows) {
                with_number(array->spec().sum == kFloat64,
                            [&](auto zero) { optimize<decltype(zero)>(*array, change, saving); });
            }
        }
        if (saving.streamed) end_of_stream();
    }
    // updates: how often each changed array was updated, in order of the changes; empty: `change` has counted it.
    void commit(int64_t step, const std::vector<int64_t>& updates = {}) {
        for (size_t i = 0; i < updates.size(); ++i) arrays_[i].state.count = updates[i];
        round.step = step;
        ++round.round;
        ++round.takes;
        round.needs = state.generation + 1;
        segment_.round().commit(round);
        lane().commit(state, arrays_);
        committed_ = true;
        lane().give_back(before_, state);
        if (round.round % Lane::kSmallRounds == 0) segment_.give_unrecorded_back({state});
    }
    // For Load (load.hpp).
    void keep_no_journal() { Lane::keep_no_undo(before_, state); }
    void mark() {
        const Presence& presence = segment_.presence();
        round.sealed = 1;
        round.holder = {++round.opened, presence.index(), presence.token(), timestamp_ns()};
        segment_.round().commit(round);
    }
    void forget_mark() {
        round.sealed = 0;
        round.holder = {};
    }
    void unmark() {
        forget_mark();
        segment_.round().commit(round);
    }
    // If a load fails: gives back the memory that `prepare` has reserved.
    void give_journal_back() {
        LaneState now = lane().committed().current(), before = now;
        Lane::keep_no_undo(before, now);
        lane().commit(now);
        lane().give_back(before, now);
    }

    RoundState round;
    LaneState state;  // to be changed, then committed

  private:
    static constexpr uint64_t kPieceBytes = 4096;

    static SlotShape slots_of(const ArrayChange& change, const MemberSpec& spec) {
        return change.rate ? shmacc::slots_of(spec.optimizer, *spec.round) : SlotShape{0, 1, false};
    }
    static uint64_t group_bytes(const ArrayChange& change, const MemberSpec& spec) {
        return slots_of(change, spec).group * (change.rate ? spec.number_bytes() : 1);
    }
    // An entry's size in bytes, and the number of entries.
    static std::pair<uint64_t, uint64_t> entries_of(const ArrayChange& change, const MemberSpec& spec) {
        if (change.rows) return {change.row_bytes, change.count};
        const uint64_t group = group_bytes(change, spec);
        const uint64_t piece = group * std::max<uint64_t>(1, kPieceBytes / group);
        return {piece, (change.bytes + piece - 1) / piece};
    }
    SavedArray saved(const ArrayChange& change, Member& array) {
        const SlotShape slots = slots_of(change, array.spec());
        const auto [entry_bytes, entries] = entries_of(change, array.spec());
        if (change.rows && change.row_bytes % group_bytes(change, array.spec()))
            throw Error(
                Failure::kInvalidArgument,
                "A rowwise accumulator of an array with one dimension is of all of it, so rows alone cannot "
                "be updated");
        SavedArray saved{change.array, entries, change.rows != nullptr, {}};
        for (uint32_t i = 0; i <= slots.count; ++i) {
            const uint64_t group = i == 0 ? 1 : slots.group;
            const uint32_t region = change.region + i;
            saved.regions[region] = {entry_bytes / group, change.bytes / group};
            if (change.bytes / group > array.state.reserved[kArrayRegions[region]])
                data_loss("an array is larger than what is reserved for it");
            // Mapped now, so that nothing fails later.
            array.array<unsigned char>(kArrayRegions[region], change.bytes / group);
        }
        return saved;
    }
    template <class T>
    void optimize(Member& array, const ArrayChange& change, Saving& saving) {
        const uint64_t total = change.bytes / sizeof(T);
        const SlotShape slots = slots_of(change, array.spec());
        const auto [entry_bytes, entries] = entries_of(change, array.spec());
        TouchedArray<T> touched{array.array<T>(kArrayRegions[0], total),
                                {},
                                static_cast<const T*>(change.values),
                                change.rows,
                                entries,
                                entry_bytes / sizeof(T),
                                total,
                                slots.group};
        for (uint32_t i = 0; i < slots.count; ++i)
            touched.slots[i] = array.array<T>(kArrayRegions[i + 1], total / slots.group);
        shmacc::optimize(array.spec().optimizer, *change.rate, array.state.count, touched, saving);
    }
    template <class T>
    void change_table(Member& array, IdTable& table, const ArrayChange& change, int64_t step, Saving& saving) {
        const RecordShape& shape = table.shape();
        table.give<T>(saving, change.steps, step);
        if (change.count > 0 && shape.width > 0) {
            T* const records = table.records<T>();
            const TouchedArray<T> touched{records,
                                          {records + shape.width, records + shape.width + shape.slot_width},
                                          static_cast<const T*>(change.values),
                                          table.slots().data(),
                                          change.count,
                                          change.row_bytes / sizeof(T),
                                          0,
                                          shape.slots.group,
                                          shape.numbers(),
                                          shape.numbers(),
                                          table.committed_rows()};
            if (change.rate)
                shmacc::optimize(array.spec().optimizer, *change.rate, array.state.count, touched, saving);
            else
                shmacc::replace(touched, saving);
        }
        table.name();
    }
    void replace(Member& array, const ArrayChange& change, Saving& saving) {
        using Byte = unsigned char;
        const auto [entry_bytes, entries] = entries_of(change, array.spec());
        Byte* const contents = array.array<Byte>(kArrayRegions[change.region], change.bytes);
        const TouchedArray<Byte> touched{contents,    {},      static_cast<const Byte*>(change.values),
                                         change.rows, entries, entry_bytes,
                                         change.bytes};
        shmacc::replace(touched, saving);
    }

    OpenSegment& segment_;
    HeldLocks locks_;
    LaneState before_;
    std::vector<Member> arrays_;  // the changed arrays and tables
    std::list<IdTable> tables_;  // the tables among them
    bool committed_ = false;
    uint64_t saved_bytes_ = 0;
};

// The open round of an accumulator, which its update makes final.
class UpdatedRound {
  public:
    UpdatedRound(OpenSegment& segment, uint64_t serial, const OpenSegment& parameters)
        : segment_(segment), serial_(serial), parameters_(parameters.config()) {}

    // Makes the round final. is_in: the parameters have its update already. False: a lane stayed busy.
    bool begin(bool is_in) {
        Uninterrupted uninterrupted;
        HeldLocks locks(segment_);
        if (!locks.acquire_all(monotonic_ns() + HeldLocks::kSlice, uninterrupted)) return false;
        RoundState state = current();
        if (state.holder.serial != serial_ || !round_is_open(segment_.presence(), state))
            throw Error(Failure::kFailedPrecondition,
                        "The round was ended before its update: by advance_step, set_global_step or restore, "
                        "which do not wait for it");
        if (state.final.serial == serial_ && (is_in || state.final.phase == kUpdateIn))
            throw Error(Failure::kFailedPrecondition,
                        "This block has made its update, or skipped it: a round has one");
        if (const uint64_t of = state.final.parameters; of && of != parameters_.token)
            throw Error(
                Failure::kFailedPrecondition,
                "The accumulator '" + name_of(segment_.config()) + "' belongs to other parameters than '" +
                    name_of(parameters_) + "', which were replaced or removed since: its step, " +
                    std::to_string(state.step) +
                    ", and its gradients are of those; make both new (if_exists=\"replace\"), or load a "
                    "checkpoint of both");
        commit(state, is_in ? kUpdateIn : kUpdateBegun);
        return true;
    }
    // Notes in the round that its update is in. If a lane is busy until the deadline, the round still says that the
    // update has begun, as after a death between 3 and 4. But this process remembers that the update is in
    // (HeldRounds), so it can end the block.
    void end(int64_t deadline, Interruption& interruption) {
        is_in_ = true;
        HeldLocks locks(segment_);
        if (!locks.acquire_all(deadline, interruption)) return;
        RoundState state = current();
        if (state.holder.serial == serial_) commit(state, kUpdateIn);
    }
    bool is_in() const { return is_in_; }

  private:
    // Needs all lanes' locks. Allocates nothing, since it does not read the lanes' states.
    RoundState current() {
        segment_.round().settle();
        return segment_.round().current();
    }
    void commit(RoundState& state, FinalPhase phase) {
        if (state.final.phase == kNotFinal) state.final.since_ns = timestamp_ns();
        state.final.phase = phase;
        state.final.serial = serial_;
        state.final.pid = segment_.presence().own().pid;
        state.final.parameters = parameters_.token;
        segment_.round().commit(state);
    }

    OpenSegment& segment_;
    const uint64_t serial_;
    const Config& parameters_;
    bool is_in_ = false;
};

struct UpdateRequest {
    int64_t step;  // the round's
    std::vector<ArrayChange> changes;  // changes of the same array are adjacent
    int64_t deadline;
};

class Update : public Operation {
  public:
    using Operation::Operation;

    // False: the parameters have this round already.
    bool update(const UpdateRequest& request, UpdatedRound& round) {
        ActivityScope activity(segment_, kWaitsForLock);
        for (;; interruption_.check()) {
            activity.now(kWaitsForLock);
            ArraysSession session(segment_, request.deadline, interruption_);
            if (!session.held()) deadline_exceeded();
            activity.now(kUpdates);
            if (session.round.sealed) refuse_half_loaded();
            const int64_t step = session.round.step;
            if (step - 1 > request.step)
                throw Error(
                    Failure::kFailedPrecondition,
                    "The parameters are of step " + std::to_string(step) +
                        ", so they are past the round of step " + std::to_string(request.step) +
                        ": the accumulator is newer than they are, or its step was set back; make both new "
                        "(if_exists=\"replace\"), or load a checkpoint of both");
            const bool is_in = step - 1 == request.step;
            const bool compared = is_in || session.compare(request.changes);
            if (compared && !is_in) session.prepare(request.changes);
            if (!compared || !round.begin(is_in)) {
                if (past(request.deadline)) deadline_exceeded();
                continue;
            }
            if (is_in) return false;
            session.change(request.changes, request.step);
            session.commit(request.step + 1);
            break;
        }
        round.end(request.deadline, interruption_);
        return true;
    }

    // Undoes a dead process's unfinished update.
    void recover(int64_t deadline) {
        ActivityScope activity(segment_, kWaitsForLock);
        if (!ArraysSession(segment_, deadline, interruption_).held()) deadline_exceeded();
    }

    struct ArrayCopy {
        uint32_t array;
        uint32_t region;  // in kArrayRegions
        void* to;
        uint64_t bytes;
    };
    struct TableCopy {
        uint32_t table;
        bool whole;  // each row is followed by the optimizer's numbers for it
        uint64_t rows = 0;
        std::optional<Output> ids = {}, steps = {}, records = {};
    };
    // Copies arrays and tables, and returns their step. updates: gets each array's number of updates.
    int64_t read(const std::vector<ArrayCopy>& copies, std::vector<TableCopy>& tables,
                 std::vector<int64_t>& updates, int64_t deadline) {
        ActivityScope activity(segment_, kWaitsForLock);
        ArraysSession session(segment_, deadline, interruption_);
        if (!session.held()) deadline_exceeded();
        for (const ArrayCopy& copy : copies) {
            Member array = session.array(copy.array);
            const uint32_t region = kArrayRegions[copy.region];
            if (copy.bytes > array.state.reserved[region])
                data_loss("an array is larger than what is reserved for it");
            const auto* from = array.array<unsigned char>(region, copy.bytes);
            if (copy.bytes) std::memcpy(copy.to, from, copy.bytes);
        }
        for (TableCopy& copy : tables) read_table(session, copy);
        for (uint32_t i = 0; i + 1 < segment_.specs()->size(); ++i)
            updates.push_back(session.array(i).state.count);
        return session.round.step;
    }

  private:
    static void read_table(ArraysSession& session, TableCopy& copy) {
        Member member = session.array(copy.table);
        IdTable table(member);
        const auto all = table.all();
        const uint64_t number = member.spec().number_bytes(), stride = table.shape().numbers() * number;
        const uint64_t bytes = copy.whole ? stride : table.shape().width * number;
        copy.rows = all.size();
        auto* ids = reinterpret_cast<int64_t*>(copy.ids.emplace(all.size() * sizeof(int64_t)).get());
        auto* steps = reinterpret_cast<int64_t*>(copy.steps.emplace(all.size() * sizeof(int64_t)).get());
        auto* records = reinterpret_cast<unsigned char*>(copy.records.emplace(all.size() * bytes).get());
        const auto* last_steps = member.array<int64_t>(kRows1, member.state.rows);
        const auto* from = member.array<unsigned char>(kRows0, member.state.rows * stride);
        constexpr size_t kAhead = 16;
        for (size_t i = 0; i < all.size(); ++i) {
            if (i + kAhead < all.size()) prefetch_row(from + all[i + kAhead].second * stride, bytes);
            ids[i] = all[i].first;
            steps[i] = last_steps[all[i].second];
            if (bytes) std::memcpy(records + i * bytes, from + all[i].second * stride, bytes);
        }
    }
    [[noreturn]] static void refuse_half_loaded() {
        throw Error(
            Failure::kFailedPrecondition,
            "These parameters take no update: the process that loaded a checkpoint into them died before "
            "the end, so they and their accumulator may be of different steps; load it again");
    }
    [[noreturn]] void deadline_exceeded() {
        throw Error(
            Failure::kDeadlineExceeded,
            "Another update, snapshot or restore of the parameters, or an operation on the accumulator, "
            "kept its lock; nothing was changed",
            {{"step", segment_.round().snapshot().step}});
    }
};

}  // namespace shmacc
