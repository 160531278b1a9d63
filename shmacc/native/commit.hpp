// The commit protocol: every operation is atomic, whichever process dies at whichever instant.
//
// All committed state is one record, State, kept twice (like LMDB's two meta pages). `generation` determines
// which copy is current: state[generation & 1]. An operation works on a copy of the current State and commits
// by writing it over the other one and then storing generation + 1: one aligned 8-byte store. Before that
// store the operation has not happened, after it has.
//
// Data outside State is written so that it means nothing before the commit:
//   * new rows go to slots >= State::rows, new index entries point to such slots;
//   * a grown index is built in the region that is not current;
//   * a dense sum is written to the buffer that is not current;
//   * a grown reservation that the State does not record yet is reserved again by the process that needs it.
//     (Only the undo log's is committed beforehand, by itself: `recover` reads only what State records as
//     reserved.)
// One kind of data is changed in place: rows that are added to. For them there is an undo log: `begin` stamps
// the journal with the generation that the operation would become, `publish` stores how many old rows are
// completely saved, and only then are these rows changed.
//
//   Invariant: if journal.generation != generation + 1, all rows in slots < rows are committed ones.
//              If it is equal, they are after the first journal.records undo records are put back.
//
// `recover` runs first under every newly acquired lock if such an operation is found (`interrupted`), so the
// order is the same everywhere: acquire, recover, operate. Each instant of death:
//   in begin, before the stamp      the stamp is that of an older operation: nothing to undo, rightly.
//   after the stamp                 the records counted belong to this operation: `records` was set to 0
//                                   before the stamp, and is raised only after a record is complete.
//   while changing a row            its record is published: the whole row is put back.
//   while writing the other State   it is not current, and the next commit overwrites it.
//   after the commit                journal.generation == generation: nothing to undo.
//   in recover                      putting the rows back a second time gives the same rows; the stamp still
//                                   marks them until recover's own commit ends it.
// Index entries left behind by an undone operation point to slots >= rows, or later to a slot that belongs to
// another row; a lookup compares the row number in the slot, so they only occupy places: State::index_filled
// counts them until the next rebuild drops them.
//
// Memory order. Three kinds of readers see these stores, and each needs something else.
//
// The next owner of the lock needs no order: the kernel, through which the lock passes, orders all stores of
// the last owner before all loads of the next one (lock.hpp).
//
// After a death, the order of instructions determines which of the instants above it was. A signal is taken
// between two instructions: those before it have been executed, those after it have not. Hardware that makes
// stores visible in another order does so for other processors, and only until the kernel has released the
// dead process's lock. So a `compiler_barrier` is enough between two stores whose order matters to `recover`;
// `publish`, which runs once for every few rows, needs no fence on any machine. For the same reason an index
// entry's tag is stored after its slot number. (Rows that are streamed into the undo log: rows.hpp.)
//
// Readers without the lock need fences. They are `snapshot`, and inspection, which reads rows through the
// descriptor and checks afterwards whether an operation ran.
//   State, then generation   The generation is stored with release and loaded with acquire: a reader that
//                 sees it sees the whole copy of the State that it stands for.
//   generation, then the next State   A copy is overwritten once the generation has moved on; a reader that
//                 loads one of the new words must find the new generation when it loads it again. A store
//                 with release does not order later stores, and one session may commit twice (a recovery and
//                 then its own operation; a longer undo log before its use). So `commit` begins with a
//                 store_barrier, which pairs with the load_barrier of `snapshot`. It stands before the words
//                 and not after the generation because the last commit may be another process's: its stores
//                 come before this barrier by way of the lock, and so, for every reader, before the words
//                 that follow.
//   stamp, then rows in place   `begin` ends with a store_barrier: a reader that saw a changed row and then
//                 passed a load_barrier sees the stamp, or a later generation.
//   shape of a round   start_round has a barrier for the same reason as `commit`.
// A torn copy that escaped all this would fail its checksum or have another generation's number: an error,
// never a wrong result.
//
// Rejected: redo from gradients staged in shared memory (as many bytes, and additions cannot be repeated);
// copies of rows at other places (free rows get scattered, and the pointers need an undo of their own);
// undo by subtraction (not exact).
#pragma once

#include <algorithm>

#include "layout.hpp"
#include "mapping.hpp"
#include "support.hpp"

namespace shmacc {

class Committed {
  public:
    // config: the copy that was checked; the segment's own may be overwritten.
    Committed(Header* header, Mapping& mapping, const Config& config)
        : header_(header), mapping_(mapping), config_(config) {}

    const Config& config() const { return config_; }

    // The committed state, for the lock's owner.
    State current() const {
        uint64_t generation = load(header_->generation);
        State state = header_->state[generation & 1];
        verify(state, generation, config_);
        return state;
    }

    // The committed state without the lock, as it was at some instant during the call.
    State snapshot() const {
        for (int attempt = 0;; ++attempt) {
            uint64_t generation = load(header_->generation);
            State state = load_words(header_->state[generation & 1]);
            load_barrier();
            // The copy is overwritten only on the way to generation + 2.
            if (load(header_->generation) == generation || attempt == kSnapshotAttempts) {
                verify(state, generation, config_);
                return state;
            }
        }
    }

    void begin(const State& state, uint64_t new_rows) {
        store_relaxed(header_->journal.records, uint64_t{0});
        store_relaxed(header_->journal.new_rows, new_rows);
        compiler_barrier();
        store_relaxed(header_->journal.generation, state.generation + 1);
        store_barrier();
    }

    // The first `records` records are complete.
    void publish(uint64_t records) {
        compiler_barrier();
        store_relaxed(header_->journal.records, records);
        compiler_barrier();
    }

    void commit(State& state) {
        ++state.generation;
        state.checksum = checksum_of(state);
        store_barrier();
        store_words(header_->state[state.generation & 1], state);
        store(header_->generation, state.generation);
    }

    bool interrupted(const State& state) const {
        return load(header_->journal.generation) == state.generation + 1;
    }

    // Puts back the changes of an operation that did not commit. `deaths`: 1 if its process died, 0 if the
    // operation failed.
    void recover(State& state, uint64_t row_bytes, uint64_t deaths) {
        const uint64_t records = load(header_->journal.records);
        if (records > 0) put_back(state, records, row_bytes);
        state.index_filled += std::min(load(header_->journal.new_rows), kMaxRows);
        state.recoveries += deaths;
        commit(state);
    }

    // After this, no size that is derived from the state overflows, or exceeds what is reserved.
    static void verify(const State& state, uint64_t generation, const Config& config) {
        if (state.generation != generation || state.checksum != checksum_of(state))
            data_loss("its committed state has a wrong checksum");
        bool fits = state.count >= 0 && state.rows <= kMaxRows && state.sealed <= 1 && state.shape <= 1 &&
                    state.buffer <= 1 && state.index <= 1 && state.index_buckets <= kMaxRows &&
                    state.index_stamp <= UINT32_MAX && state.row_elements <= kRegionSpan / sizeof(double);
        for (uint64_t bytes : state.reserved) fits = fits && bytes <= kRegionSpan;
        if (!fits) data_loss("its committed state has a number out of range");
        const uint64_t row_bytes = state.row_elements * sum_bytes(config.sum);
        if (config.kind == kSparse) {
            fits = state.rows * sizeof(Slot) <= state.reserved[kSlotsRegion] &&
                   (row_bytes == 0 || state.rows <= state.reserved[kRows0Region] / row_bytes) &&
                   state.index_buckets * sizeof(Bucket) <= state.reserved[kIndex0Region + state.index] &&
                   state.rows <= state.index_buckets * kBucketEntries;
        } else {
            fits = state.rows == 0 &&
                   (state.count == 0 || row_bytes <= state.reserved[kRows0Region + state.buffer]);
        }
        if (!fits) data_loss("its committed state and its reserved sizes disagree");
    }

  private:
    void put_back(const State& state, uint64_t records, uint64_t row_bytes) {
        auto* table = mapping_.array<Slot>(state, kSlotsRegion, state.rows);
        unsigned char* rows = mapping_.array<unsigned char>(state, kRows0Region, state.rows * row_bytes);
        uint64_t log_left = state.reserved[kUndoLogRegion];
        uint64_t rows_left = state.reserved[kUndoRowsRegion];
        const unsigned char* log = mapping_.at_least(kUndoLogRegion, log_left);
        const unsigned char* saved = mapping_.at_least(kUndoRowsRegion, rows_left);
        for (uint64_t i = 0; i < records; ++i) {
            UndoRecord record;
            if (log_left < sizeof record) data_loss("its undo log is too long");
            std::memcpy(&record, log, sizeof record);
            if (uint64_t{record.first_slot} + record.slots > state.rows)
                data_loss("an undo record names no row");
            // Cannot overflow: rows * row_bytes is at most a region.
            const uint64_t log_bytes = sizeof record + record.slots * sizeof(int64_t);
            const uint64_t bytes = record.slots * row_bytes;
            if (log_bytes > log_left || bytes > rows_left) data_loss("its undo log is too long");
            for (uint32_t j = 0; j < record.slots; ++j)
                std::memcpy(&table[record.first_slot + j].contributions,
                            log + sizeof record + j * sizeof(int64_t), sizeof(int64_t));
            std::copy(saved, saved + bytes, rows + record.first_slot * row_bytes);
            log += log_bytes;
            log_left -= log_bytes;
            saved += bytes;
            rows_left -= bytes;
        }
    }

    static constexpr int kSnapshotAttempts = 1000000;

    Header* header_;
    Mapping& mapping_;
    const Config& config_;
};

}  // namespace shmacc
