// A table of parameters: rows whose ids are not known beforehand, changed under the lock, read without it.
//
// A table uses the regions of an accumulator's sparse member (layout.hpp), with the same index. But its rows come and
// go one by one, so each place has a stamp that says whether it is in use: the lane's generation when the place was
// given to its id, or when it was freed.
//
//   Invariant: at the committed generation g, the table's rows are the places below MemberState::rows whose stamp says
//              that they were given at g or before. No two of them have the same id, and the index leads to each.
//              The other places below MemberState::rows form a linked list, which starts at MemberState::free_place:
//              each stores the next free place's number instead of its step.
//
// An update, between `begin` and its commit, which makes generation G = g + 1:
//   1  saves the ids, stamps and steps that it is going to change in places below `rows`, and counts them as saved
//   2  writes the steps, and stamps the places that it assigns to new ids as given at G
//   3  writes the new rows' first contents; then, row by row, saves and changes rows (parameters/optimizers.hpp)
//   4  writes the new ids
//   5  stamps the places of removed ids as free from G on, and links them
//   6  adds entries to the index; or builds a new one, in the region that is not current, with stamp G
// An update gives new ids only places that were free at g. Places that it frees itself are for later updates.
//
// At each instant of death the log has the old content of places below `rows`, and `recover` puts it back
// (undo_arrays.hpp) before it commits G itself. Rows of free places need not be put back: nobody reads them. Places
// from `rows` on may keep a stamp of G, but nobody reads them until a later update gives them to ids, and stamps them
// again. A dead update's index entries lead to places that are free or have another id; a lookup compares stamp and id,
// so it ignores them (LaneState::leftovers counts such entries). A dead update's new index is not current, and no
// later index gets its stamp.
//
// Readers take no lock, and never wait. A reader loads the committed state, of a generation g. In the index of this
// state it finds a place below `rows` that has the id and, by its stamp, was given at g or before. It copies the row
// and checks that the place's id and stamp are unchanged. Then it has the id's row, because:
//
//   * The stamp of a place in use changes only in step 5, and changes back only if step 5 is undone. Until then no id
//     gets the place: an update assigns only places that a commit has freed, and a commit is not undone. No
//     generation is used twice. So an unchanged stamp means that the place belonged to the id all the time. An
//     unchanged id proves less: while the reader slept, the place may have gone to another id, and then back.
//   * The numbers of the place's next id are written after a barrier (Lane::begin's), and the place was stamped as free
//     before that barrier. A reader that has copied one of these numbers and passed a load_barrier sees that stamp or
//     a later one.
//   * A stamp above g comes from an update that had not committed when the reader began: the id is being added,
//     so the reader may find it or not. No stamp of g or before comes from a dead update: its places have been put
//     back, or lie from `rows` on, and the reader loaded `rows` together with g.
//
// If a reader finds no such place, or another stamp afterwards, then this very id has changed, or the index is not
// current any more. So the reader loads the state again, and searches again if the index is another one. (It compares
// the index's stamp, not its region: a new index is built in the region of the last but one, which a reader that slept
// may still be reading.) An id that is in the table at g is in the index of g, and entries are neither removed nor
// moved. So a reader never misses an id that was in the table when it began and was not removed since.
//
// No memory is given back to the system, since a reader may be in any region at any time: reading a hole would fill it,
// or kill the reader if /dev/shm is full.
#pragma once

#include "parameters/digest.hpp"
#include "parameters/initial.hpp"
#include "parameters/table_index.hpp"
#include "parameters/touched_array.hpp"

namespace shmacc {

// The record of each place in a table's Rows0: the row, then the optimizer's slots for it.
struct RecordShape {
    uint64_t width;  // numbers in the row
    uint64_t slot_width;  // numbers in each optimizer's slot
    SlotShape slots;

    uint64_t numbers() const { return width + slots.count * slot_width; }
};
inline RecordShape record_of(const MemberSpec& spec) {
    uint64_t width = 1;
    for (const int64_t dim : *spec.round) width *= static_cast<uint64_t>(dim);
    const SlotShape slots = slots_of(spec.optimizer, *spec.round);
    return {width, width / slots.group, slots};
}
// The first contents of a row. Readers also see them for an id that is not in the table.
template <class T>
void first_row(const MemberSpec& spec, int64_t id, T* row, uint64_t width) {
    initial_row(spec.table, id, row, width);
    constrain(spec.optimizer, row, width, width);
}
template <class T>
void initial_record(const MemberSpec& spec, const RecordShape& shape, int64_t id, T* record) {
    first_row(spec, id, record, shape.width);
    for (uint32_t k = 0; k < shape.slots.count; ++k)
        std::fill_n(record + shape.width + k * shape.slot_width, shape.slot_width,
                    static_cast<T>(initial_of_slot(spec.optimizer, k)));
}

// Calls act(T{}), where T is the type of the parameters' numbers.
template <class Act>
void with_number(bool is_double, Act act) {
    if (is_double)
        act(double{});
    else
        act(float{});
}

// The rows that an operation removes from a table, after its changes.
struct Removal {
    Ids ids = {};
    bool all_others = false;  // all rows that the operation does not change
    std::optional<int64_t> updated_before = {};  // also rows last updated before this, except changed and `kept` ones
    Ids kept = {};
};

// Changes a table, or reads all of it, under the lane's lock: one object for each operation.
class Table {
  public:
    explicit Table(Member& member)
        : member_(member), state_(member.state), spec_(member.spec()), shape_(record_of(spec_)),
          committed_rows_(state_.rows), index_(member) {
        if (state_.rows > 0 && state_.row_elements != shape_.numbers())
            data_loss("a table's rows have another width than it has");
        state_.row_elements = shape_.numbers();
    }

    const RecordShape& shape() const { return shape_; }
    // Call after prepare. The places of the changed ids, in the order of the ids.
    const std::vector<int64_t>& places() const { return places_; }
    uint64_t committed_rows() const { return committed_rows_; }
    // How many index entries are left over if the operation dies before its commit.
    uint64_t new_entries() const { return rebuilds_ ? 0 : fresh_.size(); }
    int64_t* steps() { return member_.array<int64_t>(kRows1, end_); }
    template <class T>
    T* records() {
        return member_.array<T>(kRows0, end_ * shape_.numbers());
    }

    // Finds a place for each id, and reserves room for new ids. Nothing is changed yet, and nothing throws after this
    // in a sound segment.
    void prepare(const Ids& changed, const Removal& removal) {
        const int64_t* const links = member_.array<int64_t>(kRows1, committed_rows_);
        const PlacesInUse known = index_.in_use();
        if (changed.count > kMaxRows || removal.ids.count > kMaxRows || removal.kept.count > kMaxRows)
            refuse_size();
        ids_ = changed.ids;
        places_.resize(changed.count);
        const auto found = [&](uint32_t i, uint64_t place) {
            places_[i] = static_cast<int64_t>(place);
            if (place == kAbsent) fresh_.push_back(i);
        };
        // A change that replaces all rows needs no index, and rebuilds a damaged index.
        rebuilds_ = removal.all_others && !index_.is_sound();
        if (rebuilds_)
            find_without_index(changed, known, found);
        else
            index_.find(changed, found);
        if (!fresh_.empty() && !removal.all_others) index_.check_around(ids_, fresh_);
        free_ = state_.free_place;
        end_ = committed_rows_;
        for (const uint32_t i : fresh_) places_[i] = next_free(known, links);
        index_.find(removal.ids, [&](uint32_t i, uint32_t place) {
            if (place != kAbsent) {
                freed_.push_back(place);
                return;
            }
            const int64_t* const at = std::lower_bound(changed.ids, changed.ids + changed.count,
                                                       removal.ids.ids[i]);
            if (at != changed.ids + changed.count && *at == removal.ids.ids[i])
                freed_.push_back(static_cast<uint64_t>(places_[at - changed.ids]));
        });
        if (removal.all_others || removal.updated_before) free_others(removal, known, links);
        std::sort(freed_.begin(), freed_.end());
        freed_.erase(std::unique(freed_.begin(), freed_.end()), freed_.end());
        in_table_ = state_.in_table + fresh_.size() - std::min(freed_.size(), state_.in_table + fresh_.size());
        if (in_table_ > spec_.table.max_rows)
            throw Error(Failure::kResourceExhausted,
                        "Table '" + spec_.name + "' would have " + std::to_string(in_table_) +
                            " rows, but its max_rows is " + std::to_string(spec_.table.max_rows) +
                            ", and it has " + std::to_string(state_.in_table) + "; nothing was changed: " +
                            (removal.all_others
                                 ? "make the table with a larger one"
                                 : "remove rows in the same update (remove=, forget=), or leave "
                                   "the table out of it (taken.without)"));
        for (const int64_t place : places_)
            if (place < static_cast<int64_t>(committed_rows_)) touched_.push_back(place);
        for (const uint32_t i : fresh_)
            if (places_[i] < static_cast<int64_t>(committed_rows_)) marked_.push_back(places_[i]);
        for (const uint64_t place : freed_)
            if (place < committed_rows_) marked_.push_back(static_cast<int64_t>(place));
        reserve();
    }

    // An update saves first ids, stamps and steps of the places that it assigns to new ids or frees (`marked`), then
    // steps and rows of the places whose rows it changes (`touched`).
    SavedArray saved_marks() const {
        SavedArray saved{member_.number(), marked_.size(), 1, {}};
        saved.regions[1] = {sizeof(int64_t), committed_rows_ * sizeof(int64_t)};
        saved.regions[2] = {sizeof(RowPlace), committed_rows_ * sizeof(RowPlace)};
        return saved;
    }
    const std::vector<int64_t>& marked() const { return marked_; }
    const std::vector<int64_t>& touched() const { return touched_; }
    SavedArray saved_steps() const {
        SavedArray saved{member_.number(), touched_.size(), 1, {}};
        saved.regions[1] = {sizeof(int64_t), committed_rows_ * sizeof(int64_t)};
        return saved;
    }
    SavedArray saved_rows() const {
        const uint64_t bytes = shape_.numbers() * spec_.number_bytes();
        SavedArray saved{member_.number(), bytes ? touched_.size() : 0, 1, {}};
        saved.regions[0] = {bytes, committed_rows_ * bytes};
        return saved;
    }

    // Does steps 1 to 3. new_steps: the last step of each changed id; null: all get new_step.
    template <class T>
    void give(Saving& saving, const int64_t* new_steps, int64_t new_step) {
        SHMACC_ASSERT(member_.lane().has_begun() && end_ * sizeof(int64_t) <= state_.reserved[kRows1]);
        SHMACC_ASSERT(end_ * shape_.numbers() * sizeof(T) <= state_.reserved[kRows0]);
        RowPlace* const table = member_.array<RowPlace>(kPlaces, end_);
        int64_t* const steps = this->steps();
        for (const int64_t place : marked_) {
            saving.to = save_numbers(saving.to, &steps[place], 1, false);
            saving.to = save_numbers(saving.to, &table[place], 1, false);
        }
        for (size_t i = 0; i < touched_.size(); ++i) {
            if (i + kAhead < touched_.size()) __builtin_prefetch(&steps[touched_[i + kAhead]], 1);
            saving.to = save_numbers(saving.to, &steps[touched_[i]], 1, false);
        }
        saving.count += marked_.size() + touched_.size();
        compiler_barrier();
        store_relaxed(*saving.saved, saving.count);
        compiler_barrier();
        for (size_t i = 0; i < places_.size(); ++i) steps[places_[i]] = new_steps ? new_steps[i] : new_step;
        for (const uint32_t i : fresh_) {
            SHMACC_ASSERT(places_[i] < static_cast<int64_t>(end_));
            store_relaxed(table[places_[i]].stamp, stamp_of_given(generation()));
        }
        store_barrier();
        T* const records = this->records<T>();
        for (const uint32_t i : fresh_)
            initial_record(spec_, shape_, ids_[i],
                           records + static_cast<uint64_t>(places_[i]) * shape_.numbers());
    }
    // Does steps 4 to 6.
    void name() {
        SHMACC_ASSERT(member_.lane().has_begun() && end_ * sizeof(RowPlace) <= state_.reserved[kPlaces]);
        RowPlace* const table = member_.array<RowPlace>(kPlaces, end_);
        int64_t* const steps = this->steps();
        for (const uint32_t i : fresh_) store(table[places_[i]].row, ids_[i]);
        state_.free_place = free_;
        for (size_t i = freed_.size(); i-- > 0;) {
            store(table[freed_[i]].stamp, stamp_of_free(generation()));
            store_relaxed(steps[freed_[i]], static_cast<int64_t>(state_.free_place));
            state_.free_place = freed_[i] + 1;
        }
        state_.rows = end_;
        state_.in_table = in_table_;
        state_.removed += static_cast<int64_t>(freed_.size());
        if (rebuilds_) {
            build_index(table);
            return;
        }
        Inserts inserts(index_.now());
        for (const uint32_t i : fresh_) inserts.add(ids_[i], static_cast<uint64_t>(places_[i]));
        inserts.finish();
        state_.index_filled += fresh_.size();
    }

    // Adds the changed rows to a digest, and the ids of the removed rows (their order does not count).
    template <class T>
    void add_changed(Digest& digest) {
        const T* const records = this->records<T>();
        const RowPlace* const table = member_.array<RowPlace>(kPlaces, end_);
        for (size_t i = 0; i < places_.size(); ++i) {
            digest.add(static_cast<uint64_t>(ids_[i]));
            digest.add(records + static_cast<uint64_t>(places_[i]) * shape_.numbers(), shape_.numbers());
        }
        uint64_t removed = 0;
        for (const uint64_t place : freed_) removed += Digest::of(static_cast<uint64_t>(table[place].row));
        digest.add(removed);
        digest.add(in_table_);
    }

    // All ids, ascending, with their places. Do not call it after `prepare`.
    std::vector<std::pair<int64_t, uint64_t>> all() {
        const auto found = by_id(index_.in_use());
        const auto same = [](const auto& one, const auto& next) { return one.first == next.first; };
        if (found.size() != state_.in_table ||
            std::adjacent_find(found.begin(), found.end(), same) != found.end())
            data_loss("a table's rows are not as many as it has, or one is there twice");
        return found;
    }

  private:
    static constexpr size_t kAhead = 16;

    // The ids that are in the table, ascending, with their places.
    std::vector<std::pair<int64_t, uint64_t>> by_id(const PlacesInUse& known) const {
        std::vector<std::pair<int64_t, uint64_t>> found;
        found.reserve(std::min(state_.in_table, committed_rows_));
        for (uint64_t place = 0; place < committed_rows_; ++place)
            if (known.in_use(known.table[place].stamp)) found.emplace_back(known.table[place].row, place);
        std::sort(found.begin(), found.end());
        return found;
    }
    template <class Found>
    void find_without_index(const Ids& wanted, const PlacesInUse& known, Found found) const {
        const auto there = by_id(known);
        auto at = there.begin();
        for (uint32_t i = 0; i < wanted.count; ++i) {
            while (at != there.end() && at->first < wanted.ids[i]) ++at;
            found(i, at != there.end() && at->first == wanted.ids[i] ? at->second : kAbsent);
        }
    }
    [[noreturn]] static void refuse_size() {
        throw Error(Failure::kResourceExhausted, "A table has at most 2**32 rows and 2**40 bytes");
    }
    // The generation that the running update will commit.
    uint64_t generation() const { return member_.lane_state().generation + 1; }
    int64_t next_free(const PlacesInUse& known, const int64_t* links) {
        if (free_ == 0) return static_cast<int64_t>(end_++);
        const uint64_t place = free_ - 1;
        if (place >= committed_rows_ || known.in_use(known.table[place].stamp) ||
            ++reused_ > committed_rows_ - state_.in_table)
            data_loss("a table's free places are no list");
        free_ = static_cast<uint64_t>(links[place]);
        return static_cast<int64_t>(place);
    }
    // Finds the places that `all_others` or `updated_before` frees. steps: each place's last step.
    void free_others(const Removal& removal, const PlacesInUse& known, const int64_t* steps) {
        std::vector<bool> kept(committed_rows_);
        for (const int64_t place : places_)
            if (static_cast<uint64_t>(place) < committed_rows_) kept[static_cast<uint64_t>(place)] = true;
        index_.find(removal.kept, [&](uint32_t, uint32_t place) {
            if (place != kAbsent) kept[place] = true;
        });
        for (uint64_t place = 0; place < committed_rows_; ++place)
            if (!kept[place] && known.in_use(known.table[place].stamp) &&
                (removal.all_others || steps[place] < *removal.updated_before))
                freed_.push_back(place);
    }
    uint32_t other_index() const { return state_.index ? kIndex0 : kIndex1; }
    void reserve() {
        const uint64_t bytes = shape_.numbers() * spec_.number_bytes();
        if (end_ > kMaxRows || (bytes && end_ > kRegionSpan / bytes)) refuse_size();
        member_.ensure_reserved(kPlaces, end_ * sizeof(RowPlace));
        member_.ensure_reserved(kRows0, end_ * bytes);
        member_.ensure_reserved(kRows1, end_ * sizeof(int64_t));
        const uint64_t leftovers = member_.lane_state().leftovers - state_.leftovers_before;
        rebuilds_ |= !fresh_.empty() &&
                     Index::crowded(state_.index_filled + leftovers + fresh_.size(), state_.index_buckets);
        if (rebuilds_) {
            // Room for nearly twice the rows: if a table grows little by little, each row then moves to a new index
            // about twice, instead of five times.
            const uint64_t least = Index::buckets_for(state_.in_table + fresh_.size());
            buckets_ = least + least / 2;
            member_.ensure_reserved(other_index(), buckets_ * sizeof(Bucket), false);
            member_.array<Bucket>(other_index(), buckets_);
        }
        member_.array<RowPlace>(kPlaces, end_);
        member_.array<unsigned char>(kRows0, end_ * bytes);
        steps();
    }
    void build_index(const RowPlace* table) {
        SHMACC_ASSERT(other_index() != kIndex0 + member_.before.index);
        SHMACC_ASSERT(!Index::crowded(in_table_, buckets_));
        state_.index = other_index() - kIndex0;
        state_.index_buckets = buckets_;
        state_.index_stamp = static_cast<uint32_t>(generation());
        state_.index_filled = in_table_;
        state_.leftovers_before = member_.lane_state().leftovers;
        const PlacesInUse known{table, end_, generation()};
        Inserts inserts(index_.now());
        for (uint64_t place = 0; place < end_; ++place)
            if (known.in_use(table[place].stamp)) inserts.add(table[place].row, place);
        inserts.finish();
    }

    Member& member_;
    MemberState& state_;
    const MemberSpec& spec_;
    const RecordShape shape_;
    const uint64_t committed_rows_;
    TableIndex index_;
    const int64_t* ids_ = nullptr;
    std::vector<int64_t> places_;
    std::vector<uint32_t> fresh_;  // positions of new ids in ids_
    std::vector<uint64_t> freed_;
    std::vector<int64_t> marked_;  // places below committed_rows_ that are assigned to new ids or freed
    std::vector<int64_t> touched_;  // places below committed_rows_ of changed ids
    uint64_t in_table_ = 0, free_ = 0, end_ = 0, reused_ = 0, buckets_ = 0;
    bool rebuilds_ = false;
};

}  // namespace shmacc
