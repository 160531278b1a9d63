// A copy of a member's rows, for inspection: checks whether a search of the index finds each row.
#pragma once

#include <algorithm>
#include <limits>
#include <vector>

#include "parameters/table_index.hpp"
#include "python/interpreter.hpp"

namespace shmacc {

class TableCopy {
  public:
    // by_id: it is a table of parameters, where `known` says which places are in use. Otherwise all places are.
    TableCopy(const PlacesInUse& known, bool by_id) : known_(known), by_id_(by_id) {
        rows_.reserve(known.rows);
    }

    // Adds the next place.
    void add(const RowPlace& place) {
        bool in_use = true;
        if (by_id_) {
            in_use = known_.in_use(place.stamp);
            const uint64_t since = static_cast<uint64_t>(place.stamp) >> 1;
            if (since > known_.generation) later_.push_back(since);
            freed_ += place.stamp == stamp_of_free(known_.generation + 1);
        } else {
            least_ = std::min(least_, place.stamp);
            most_ = std::max(most_, place.stamp);
        }
        rows_.push_back(in_use ? place.row : kFree);
        compared_ += in_use;
    }

    // Compares the rows with an index, and sorts them. generation: the lane's after the last `add`.
    nb::dict compare(const Index& index, uint64_t buckets, uint64_t generation) {
        const uint64_t lost = buckets > 0 ? lost_in(index) : compared_;
        std::sort(rows_.begin(), rows_.end());
        const auto begin = rows_.end() - static_cast<std::ptrdiff_t>(compared_);
        nb::dict out = new_dict();
        out["compared"] = compared_;
        out["lost"] = lost;
        out["twice"] = std::adjacent_find(begin, rows_.end()) != rows_.end();
        out["lowest"] = compared_ > 0 ? *begin : 0;
        out["highest"] = compared_ > 0 ? rows_.back() : 0;
        out["least_count"] = least_;
        out["most_count"] = most_;
        // How many places an operation assigned or freed during the copy: they may have been in use before. If nothing
        // was committed meanwhile, only the places that the running operation has freed.
        out["changed"] = generation == known_.generation
                             ? freed_
                             : std::count_if(later_.begin(), later_.end(),
                                             [&](uint64_t since) { return since <= generation + 1; });
        return out;
    }

  private:
    static constexpr int64_t kFree = std::numeric_limits<int64_t>::min();
    static constexpr uint64_t kBlock = 4096;

    struct Known {
        const int64_t* table;
        uint64_t rows;
        bool have(uint64_t place, int64_t row) const { return place < rows && table[place] == row; }
        void fetch(uint64_t place) const { __builtin_prefetch(&table[place]); }
    };
    // Returns how many rows a search does not find. If the index has no free entry, a search would walk past all of it,
    // so it throws: then all rows count as lost.
    uint64_t lost_in(const Index& index) const {
        const Known known{rows_.data(), rows_.size()};
        uint64_t lost = 0;
        try {
            for (uint64_t first = 0; first < rows_.size(); first += kBlock) {
                const auto count = static_cast<uint32_t>(std::min<uint64_t>(kBlock, rows_.size() - first));
                index.find_each(&rows_[first], count, known, [&](uint32_t i, uint32_t at) {
                    const uint64_t place = first + i;
                    if (rows_[place] == kFree || at == place) return;
                    // The row may stand in a second place, too: search for this place alone.
                    index.find_each(&rows_[place], 1, InPlace{place, rows_.size()},
                                    [&](uint32_t, uint32_t own) { lost += own != place; });
                });
            }
        } catch (const Error&) {
            return compared_;
        }
        return lost;
    }
    // Restricts a search to a single place.
    struct InPlace {
        uint64_t place;
        uint64_t rows;
        bool have(uint64_t at, int64_t) const { return at == place; }
        void fetch(uint64_t) const {}
    };

    const PlacesInUse known_;
    const bool by_id_;
    std::vector<int64_t> rows_;  // by place
    uint64_t compared_ = 0;
    std::vector<uint64_t> later_;  // when places were given or freed, if after the generation of `known`
    uint64_t freed_ = 0;  // how many of the places the operation after `known` has freed
    int64_t least_ = std::numeric_limits<int64_t>::max(), most_ = 0;
};

}  // namespace shmacc
