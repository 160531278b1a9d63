// The commit protocol: every operation is atomic, whichever process dies at whichever instant.
//
// The committed state consists of records, each kept twice (like LMDB's two meta pages): one RoundState for all
// lanes together, a LaneState for each lane. A `generation` determines which copy is current: copy[generation &
// 1]. An operation changes its own copy of the current record. To commit, it writes this copy over the record
// that is not current, and then stores generation + 1: one aligned 8-byte store. Before that store the
// operation has not happened; after it, it has.
//
// An operation commits to one record only. An operation that adds gradients or changes memory commits the
// LaneState of one lane, with that lane's lock. An operation that empties the accumulator, moves the step,
// seals, or opens a round commits the RoundState, with all lanes' locks. A lane's contents belong to a round
// number, and are void once RoundState::round has moved on: so one store empties all members of all lanes.
//
// A member of a lane has a MemberState, kept twice too, so that an apply writes only the members that it
// touches. A copy carries the generation of the lane's commit that wrote it.
//
//   Invariant: of a member's copies with at most the lane's generation, the one with the larger generation is
//              current. A copy with a greater generation belongs to an operation that has not committed.
//
// Two operations change both records: `restore` starts a new round with contents in the first lane; a change of
// parameters (update.hpp) commits the arrays and the step together. Each holds all locks and stores the
// RoundState first, with the generation that the lane will have (RoundState::needs). The lane's commit then
// commits both; until then the previous RoundState counts. If the process dies before that, `settle` takes the
// RoundState's generation back, before the lane can reach the needed generation.
//
// Members' copies are written only between `begin` and the commit, over the copies that are not current. If the
// operation dies there, its copies would become valid when the lane reaches their generation. So `recover`,
// which commits next in the lane, clears them first.
//
// Data outside these records is written so that it means nothing before the commit:
//   * new rows go to places >= MemberState::rows, new index entries point to such places;
//   * a grown index is built in the region that is not current;
//   * a dense sum is written to the buffer that is not current;
//   * a new shape is written to the one of two that is not current;
//   * a reservation that has grown but is not recorded yet is reserved again by the process that needs it.
//     (Only the undo log's reservation is committed beforehand, in a commit of its own: `recover` reads only
//     what LaneState records as reserved.)
// The first apply of a round may find rows of an older round in a member. They are void: the apply starts with
// no rows, and writes over them.
//
// Some rows are changed in place: rows to which an apply adds, and rows of the current round over which
// `restore` writes its own. (`restore` builds its index in the region that is not current. Arrays of parameters
// are changed in place, too: undo_arrays.hpp describes their log, and update.hpp why it suffices.) An undo log
// protects these rows: `begin` stamps the lane's journal with the generation that the operation would commit;
// `publish` stores how many undo records are complete (`restore` saves row numbers, too, in records of their
// own); only then does the operation change the rows of these records.
//
//   Invariant: if journal.generation != generation + 1, the places below `rows` of all members of the current
//              round contain committed rows. Otherwise they do once the first journal.records undo records are put
//              back.
//
// A process that acquires a lane's lock looks for an operation that did not commit (`interrupted`), and undoes
// it first (`recover`). So the order is the same everywhere: acquire, recover, operate. Each instant of death:
//   in begin, before the stamp      the stamp belongs to an older operation: there is nothing to undo.
//   after the stamp                 the records counted belong to this operation: `records` was set to 0
//                                   before the stamp, and is raised only after a record is complete.
//   while changing a row            its record is published: the whole row is put back.
//   while writing members' copies   they are not current; `recover` clears them.
//   while writing the other record  it is not current, and the next commit overwrites it.
//   after the commit                journal.generation == generation: nothing to undo.
//   in recover                      the next owner does it again, with the same result: the stamp is valid
//                                   until recover's own commit.
// A RoundState is committed in the same way, and nothing is changed in place for it.
// Index entries left behind by an undone operation point to places >= rows, or later to a place that belongs to
// another row; a lookup compares the row number in the place, so they only occupy entries. No record says which
// member's index contains them: LaneState::leftovers counts them for the lane, and each index assumes that it
// contains all that were left since it was built.
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
// entry's tag is stored after its place number. (Rows that are streamed into the undo log: undo_rows.hpp.)
//
// Two readers without the lock need fences: `snapshot`; and inspection, which reads rows through the descriptor
// and checks afterwards whether an operation ran.
//   record, then generation   The generation is stored with release and loaded with acquire: a reader that
//                 sees a generation sees its whole copy, and the members' copies of that operation.
//   generation, then the next record   A copy is overwritten once the generation has moved on; a reader that
//                 loads one of the new words must find the new generation when it looks again. A store
//                 with release does not order later stores, and one session may commit twice (a recovery and
//                 then its own operation; a longer undo log before its use). So `commit` begins with a
//                 store_barrier, which pairs with the load_barrier of `snapshot`. It stands before the words,
//                 not after the generation: the last commit may be another process's. The lock orders that
//                 commit's stores before this barrier, and so before the words, for every reader.
//   stamp, then rows in place   `begin` ends with a store_barrier: a reader that saw a changed row and then
//                 passed a load_barrier sees the stamp, or a later generation.
//   shape of a round   start_round has a barrier for the same reason as `commit`.
// A torn copy that escaped all this would fail its checksum or have another generation's number: an error,
// never a wrong result.
//
// Rejected: redo from gradients staged in shared memory (as many bytes, and additions cannot be repeated);
// copies of rows elsewhere (free rows get scattered, and the pointers need an undo of their own);
// undo by subtraction (not exact).
#pragma once

#include <algorithm>

#include "base/assertions.hpp"
#include "base/errors.hpp"
#include "base/member_specs.hpp"
#include "base/words.hpp"

namespace shmacc {

// A record kept twice, and the generation that determines which copy is current.
template <class Record>
class Committed {
  public:
    // needed: the first lane's generation, to compare with RoundState::needs.
    Committed(uint64_t& generation, Record (&copies)[2], const uint64_t* needed = nullptr)
        : generation_(generation), copies_(copies), needed_(needed) {}

    // Forgets a record that did not become valid. Needs at least one lock, before anything is committed. Several
    // processes may do this at the same time: the next record cannot be committed meanwhile, since that needs all
    // locks.
    void settle() {
        const uint64_t generation = load(generation_);
        if (!is_valid(copies_[generation & 1])) store(generation_, generation - 1);
    }

    // The committed record. Needs a lock under which nobody can commit another one.
    Record current() const {
        const uint64_t generation = load(generation_);
        store_relaxed(current_, generation);
        const Record record = copies_[generation & 1];
        verify(record, generation);
        return record;
    }
    // The committed record once more, later in the same operation, under the same lock.
    Record again() const {
        const Record record = copies_[load_relaxed(current_) & 1];
        verify(record, load_relaxed(current_));
        return record;
    }

    // The committed record without the lock, as it was at some instant during the call.
    Record snapshot() const {
        for (int attempt = 0;; ++attempt) {
            const uint64_t latest = load(generation_);
            // If the latest record is not valid yet (RoundState::needs), the one before it is committed.
            const uint64_t generation = latest - !is_valid(copies_[latest & 1]);
            const Record record = load_words(copies_[generation & 1]);
            load_barrier();
            // The copy that was read is overwritten only on the way to generation + 2.
            const uint64_t now = load(generation_);
            if (now == latest || now == generation || attempt == kSnapshotAttempts) {
                verify(record, generation);
                return record;
            }
        }
    }

    void commit(Record& record) {
        SHMACC_ASSERT(is_current(record) && in_range(record));  // so the copy that is not current is overwritten
        ++record.generation;
        record.checksum = checksum_of(record);
        store_barrier();
        store_words(copies_[record.generation & 1], record);
        store(generation_, record.generation);
        store_relaxed(current_, record.generation);
    }

    // Whether the record is of the generation that this process has read or committed last.
    bool is_current(const Record& record) const { return record.generation == load_relaxed(current_); }
    // The generation of the record that `snapshot` would return. A restore changes it only with the second of
    // its two commits, even if its process is stopped between the two.
    uint64_t generation() const {
        for (int attempt = 0;; ++attempt) {
            const uint64_t latest = load(generation_);
            const uint64_t generation = latest - !is_valid(copies_[latest & 1]);
            load_barrier();
            if (load(generation_) == latest || attempt == kSnapshotAttempts) return generation;
        }
    }

    // After this, no size that is derived from the record overflows.
    static void verify(const Record& record, uint64_t generation) {
        if (record.generation != generation || record.checksum != checksum_of(record))
            data_loss("its committed state has a wrong checksum");
        if (!in_range(record)) data_loss("its committed state has a number out of range");
    }

  private:
    static constexpr int kSnapshotAttempts = 1000000;

    bool is_valid(const Record& record) const {
        if constexpr (std::is_same_v<Record, RoundState>)
            return load_relaxed(record.needs) <= load(*needed_);
        else
            return true;
    }

    static bool in_range(const RoundState& state) {
        return state.sealed <= 1 && state.final.phase <= kUpdateIn;
    }
    static bool in_range(const LaneState& state) {
        bool fits = state.count >= 0 && state.weight >= 0;
        for (uint64_t bytes : state.reserved) fits = fits && bytes <= kRegionSpan;
        return fits;
    }

    uint64_t& generation_;
    Record (&copies_)[2];
    const uint64_t* const needed_;
    // The generation that this process last read or committed.
    mutable uint64_t current_ = 0;
};

// Which of a member's copies is current at this generation of its lane.
inline uint32_t current_copy(const MemberStates& states, uint64_t generation) {
    const uint64_t first = load_relaxed(states.copies[0].generation);
    const uint64_t second = load_relaxed(states.copies[1].generation);
    if (second > generation) return 0;
    return first > generation || second > first;
}

inline bool in_range(const MemberState& state) {
    bool fits = state.count >= 0 && state.count < INT64_MAX && state.weight >= 0 && state.rows <= kMaxRows &&
                state.index <= 1 && state.index_buckets <= kMaxRows && state.index_stamp <= UINT32_MAX &&
                state.row_elements <= kRegionSpan / sizeof(double);
    for (uint64_t bytes : state.reserved) fits = fits && bytes <= kRegionSpan;
    return fits;
}
// Whether a state that is in range needs no more than is reserved.
inline bool is_reserved(const MemberState& state, const MemberSpec& spec) {
    const uint64_t row_bytes = state.row_elements * spec.number_bytes();
    if (spec.kind == kDense)
        return state.shape <= kDeclaredShape && state.buffer <= 1 && state.rows == 0 &&
               (state.count == 0 || row_bytes <= state.reserved[kRows0 + state.buffer]);
    const bool table = spec.kind == kTable;
    return state.rows * sizeof(RowPlace) <= state.reserved[kPlaces] &&
           static_cast<unsigned __int128>(state.rows) * row_bytes <= state.reserved[kRows0] &&
           state.index_buckets * sizeof(Bucket) <= state.reserved[kIndex0 + state.index] &&
           (table ? state.in_table : state.rows) <= state.index_buckets * kBucketEntries &&
           (table ? state.in_table <= state.rows && state.free_place <= state.rows &&
                        state.removed <= INT64_MAX - static_cast<int64_t>(kMaxRows) &&
                        state.rows * sizeof(int64_t) <= state.reserved[kRows1]
                  : state.shape <= kDeclaredShape && state.buffer <= 1);
}
// After this, no size that is derived from the state overflows, or exceeds what is reserved.
inline void verify(const MemberState& state, uint64_t generation, const MemberSpec& spec) {
    if (state.generation > generation || state.checksum != checksum_of(state))
        data_loss("the committed state of a member has a wrong checksum");
    if (!in_range(state)) data_loss("the committed state of a member has a number out of range");
    if (!is_reserved(state, spec))
        data_loss("the committed state of a member and its reserved sizes disagree");
}

}  // namespace shmacc
