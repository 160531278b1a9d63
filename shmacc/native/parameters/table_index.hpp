// The index of a table of parameters, under the lane's lock: finds the places of ids, and is compared with the rows.
//
// An index that something has overwritten misses some rows: an update would make a second row for such an id. So each
// process compares all places with the index before its first update. Later, at each update, it compares at least as
// many as the update adds.
#pragma once

#include "protocol/lane.hpp"
#include "values/row_index.hpp"

namespace shmacc {

// Ids, ascending, each once.
struct Ids {
    const int64_t* ids;
    uint64_t count;
};

// The places in use at a committed generation (for the lock's owner: the current one).
struct PlacesInUse {
    const RowPlace* table;
    uint64_t rows;
    uint64_t generation;

    bool in_use(int64_t stamp) const {
        return stamp > 0 && (stamp & 1) == 0 && static_cast<uint64_t>(stamp) >> 1 <= generation;
    }
    bool have(uint64_t place, int64_t id) const {
        return place < rows && load(table[place].row) == id && in_use(load(table[place].stamp));
    }
    void fetch(uint64_t place) const { __builtin_prefetch(&table[place]); }
};

// Each operation on a table has a TableIndex. After the operation has changed the table, it uses only `now`: the other
// members describe the committed rows.
class TableIndex {
  public:
    explicit TableIndex(Member& member)
        : member_(member), state_(member.state), rows_(state_.rows), hash_(member.lane().hash_key()) {}

    PlacesInUse in_use() {
        return {member_.array<RowPlace>(kPlaces, rows_), rows_, member_.lane_state().generation};
    }
    Index now() { return member_.index(hash_); }
    // Calls found(i, place) for each id, in any order; kAbsent: it is not in the table.
    template <class Found>
    void find(const Ids& wanted, Found found) {
        if (rows_ == 0 || state_.index_buckets == 0) {
            for (uint32_t i = 0; i < wanted.count; ++i) found(i, kAbsent);
            return;
        }
        try {
            now().find_each(wanted.ids, static_cast<uint32_t>(wanted.count), in_use(), found);
        } catch (const Error&) {  // all buckets are full
            tell_damage(wanted.ids[0], false);
        }
    }
    // Compares at most `most` further places; throws if the index misses a row. Returns whether all are compared now.
    bool compare(uint64_t most) {
        Compared& compared = member_.lane().compared(member_.number());
        try {
            for (uint64_t left = std::min(most, rows_); left > 0;) {
                if (compared.next >= rows_) compared = {true, 0};
                const uint64_t count = std::min({left, rows_ - compared.next, kCompared});
                compare(compared.next, count);
                compared.next += count;
                left -= count;
            }
        } catch (const Error&) {
            compared = {};
            throw;
        }
        compared.all |= compared.next >= rows_;
        return compared.all;
    }

    // Whether the index leads to every row, and nowhere else.
    bool is_sound() {
        try {
            for (uint64_t first = 0; first < rows_; first += kCompared)
                compare(first, std::min(kCompared, rows_ - first));
        } catch (const Error&) {
            return false;
        }
        return state_.index_buckets == 0 || now().is_sound(member_.lane_state().generation);
    }
    // Checks the buckets where new ids go, and compares as many other rows with the index. So damage that comes after
    // this process has compared all rows is found before it hides many. fresh: positions of the new ids in ids.
    void check_around(const int64_t* ids, const std::vector<uint32_t>& fresh) {
        if (rows_ == 0 || state_.index_buckets == 0) return;
        const Index index = now();
        for (const uint32_t i : fresh)
            if (!index.is_sound_around(ids[i], member_.lane_state().generation)) {
                member_.lane().compared(member_.number()) = {};
                tell_damage(ids[i], false);
            }
        compare(std::max<uint64_t>(fresh.size(), kLeastCompared));
    }

  private:
    static constexpr uint64_t kCompared = 1024, kLeastCompared = 64;

    // Throws if the index misses a row of these places. count: at most kCompared.
    void compare(uint64_t first, uint64_t count) {
        const PlacesInUse known = in_use();
        uint64_t places[kCompared];
        int64_t ids[kCompared];
        Ids there{ids, 0};
        for (uint64_t place = first; place < first + count; ++place) {
            if (!known.in_use(known.table[place].stamp)) continue;
            places[there.count] = place;
            ids[there.count++] = known.table[place].row;
        }
        const int64_t* damaged = nullptr;
        bool twice = false;
        find(there, [&](uint32_t i, uint32_t place) {
            if (place == places[i]) return;
            damaged = &ids[i];
            twice = place != kAbsent;
        });
        if (damaged) tell_damage(*damaged, twice);
    }
    [[noreturn]] void tell_damage(int64_t id, bool twice) const {
        const std::string table = "table '" + member_.spec().name + "'", row = std::to_string(id);
        data_loss((twice ? table + " has two rows of id " + row
                         : "the index of " + table + " does not lead to the rows of some ids, as " + row) +
                  "; nothing was changed. End the processes that update it, then " +
                  (twice
                       ? ""
                       : "save what can still be read, which is every row, and make the index anew from it: "
                         "params.restore(params.state()); or ") +
                  "load a checkpoint (shmacc.load)");
    }

    Member& member_;
    const MemberState& state_;
    const uint64_t rows_;
    const RowHash hash_;
};

}  // namespace shmacc
