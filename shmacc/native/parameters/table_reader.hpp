// Reads a table of parameters without a lock; table.hpp explains why that is safe.
//
// Rows are read as plain memory while others may write them. What was read is used only if the stamp is unchanged
// afterwards. Numbers are aligned, so each is copied in one piece and never torn.
#pragma once

#include "base/read_region.hpp"
#include "parameters/default_floats.hpp"
#include "parameters/table.hpp"
#include "segment/open_segment.hpp"

namespace shmacc {

class TableReader {
  public:
    // regions: the regions that this process mapped in earlier reads of the table.
    TableReader(OpenSegment& segment, uint32_t member, ReadRegions regions)
        : segment_(segment), lane_(*segment.lanes()[0]), member_(member), spec_((*segment.specs())[member]),
          shape_(record_of(spec_)), hash_(lane_.hash_key()), regions_(std::move(regions)) {
        look();
    }
    const ReadRegions& regions() const { return regions_; }
    // The committed state that this reader loaded last.
    const MemberState& state() const { return state_; }
    const RecordShape& shape() const { return shape_; }

    // Calls found(i, place) for each id that is in the table, in any order, and calls it again if the place has changed
    // meanwhile. Calls absent(i) for each id that is not in the table.
    template <class Found, class Absent>
    void each(const int64_t* ids, uint64_t count, Found found, Absent absent) {
        std::vector<uint64_t> missing, left;
        look_up(count, [&](uint64_t i) { return ids[i]; }, [](uint64_t i) { return i; }, found, missing, left);
        for (int attempt = 0; !missing.empty() || !left.empty(); ++attempt) {
            load_barrier();
            const uint64_t stamp = state_.index_stamp;
            look();
            if (state_.index_stamp == stamp || attempt == kAttempts) {
                for (const uint64_t i : missing) absent(i);
            } else {
                left.insert(left.end(), missing.begin(), missing.end());
            }
            missing.clear();
            if (attempt == kAttempts && !left.empty())
                data_loss("a table's index leads to rows that change all the time");
            const std::vector<uint64_t> again = std::exchange(left, {});
            look_up(
                again.size(), [&](uint64_t i) { return ids[again[i]]; }, [&](uint64_t i) { return again[i]; },
                found, missing, left);
        }
    }

    // Copies `width` numbers of each id's record, from number `from` on. An id that is absent has initial contents.
    template <class T>
    void copy(const int64_t* ids, uint64_t count, uint64_t from, uint64_t width, T* to) {
        const DefaultFloats floats;  // so an absent row has the same bits as the row that an update will make
        const auto absent = [&](uint64_t i) {
            if (from == 0) return first_row(spec_, ids[i], to + i * width, width);
            const auto slot = static_cast<uint32_t>((from - shape_.width) /
                                                    std::max<uint64_t>(shape_.slot_width, 1));
            std::fill_n(to + i * width, width, static_cast<T>(initial_of_slot(spec_.optimizer, slot)));
        };
        with_width(width, [&](auto fixed) {
            constexpr uint64_t kWidth = fixed.value;
            each(
                ids, count,
                [&](uint64_t i, uint64_t place) {
                    const uint64_t numbers = kWidth ? kWidth : width;
                    copy_numbers(to + i * numbers,
                                 reinterpret_cast<const T*>(records_) + place * shape_.numbers() + from,
                                 numbers);
                },
                absent);
        });
    }
    void contains(const int64_t* ids, uint64_t count, uint8_t* to) {
        each(ids, count, [&](uint64_t i, uint64_t) { to[i] = 1; }, [&](uint64_t i) { to[i] = 0; });
    }
    // Writes the last step of each id; -1: it is not in the table.
    void last_steps(const int64_t* ids, uint64_t count, int64_t* to) {
        each(
            ids, count, [&](uint64_t i, uint64_t place) { to[i] = load_relaxed(steps_[place]); },
            [&](uint64_t i) { to[i] = -1; });
    }
    // The ids in ascending order; with `before`, only those whose last step is below it.
    std::vector<int64_t> all(std::optional<int64_t> before) {
        std::vector<int64_t> ids;
        for (uint64_t place = 0; place < state_.rows; ++place) {
            const int64_t stamp = load(known_.table[place].stamp);
            if (!known_.in_use(stamp)) continue;
            const int64_t id = load_relaxed(known_.table[place].row), step = load_relaxed(steps_[place]);
            load_barrier();
            if (load_relaxed(known_.table[place].stamp) == stamp && (!before || step < *before))
                ids.push_back(id);
        }
        std::sort(ids.begin(), ids.end());
        ids.erase(std::unique(ids.begin(), ids.end()), ids.end());
        return ids;
    }

  private:
    static constexpr int kAttempts = 1000000;
    static constexpr uint32_t kBlock = 4096;

    // item(i): the i-th id; number(i): its position in the arguments of `each`. missing: gets the positions of ids that
    // have no place. left: gets the positions of ids whose place changed meanwhile.
    template <class Item, class Number, class Found>
    void look_up(uint64_t count, Item item, Number number, Found found, std::vector<uint64_t>& missing,
                 std::vector<uint64_t>& left) {
        if (state_.rows == 0 || state_.index_buckets == 0) {
            for (uint64_t i = 0; i < count; ++i) missing.push_back(number(i));
            return;
        }
        const Index index(buckets_, state_.index_buckets, static_cast<uint32_t>(state_.index_stamp), hash_);
        const Fetching known{known_, records_, shape_.numbers() * spec_.number_bytes(),
                             std::min<uint64_t>(shape_.width * spec_.number_bytes(), 1024)};
        int64_t ids[kBlock];
        for (uint64_t base = 0; base < count; base += kBlock) {
            const auto block = static_cast<uint32_t>(std::min<uint64_t>(kBlock, count - base));
            for (uint32_t i = 0; i < block; ++i) ids[i] = item(base + i);
            index.find_each(ids, block, known, [&](uint32_t i, uint32_t place) {
                if (place == kAbsent) return missing.push_back(number(base + i));
                const RowPlace& at = known_.table[place];
                const int64_t stamp = load(at.stamp);
                if (known_.in_use(stamp)) {
                    found(number(base + i), place);
                    load_barrier();
                    if (load_relaxed(at.stamp) == stamp && load_relaxed(at.row) == ids[i]) return;
                }
                left.push_back(number(base + i));
            });
        }
    }

    // PlacesInUse whose `fetch` prefetches the rows, too.
    struct Fetching : PlacesInUse {
        Fetching(const PlacesInUse& known, const unsigned char* records, uint64_t stride, uint64_t bytes)
            : PlacesInUse(known), records_(records), stride_(stride), bytes_(bytes) {}
        void fetch(uint64_t place) const {
            PlacesInUse::fetch(place);
            const unsigned char* const record = records_ + place * stride_;
            for (uint64_t i = 0; i < bytes_; i += 64) __builtin_prefetch(record + i);
        }

      private:
        const unsigned char* records_;
        uint64_t stride_, bytes_;
    };

    // Loads the committed state, and maps the table's regions.
    void look() {
        for (int attempt = 0;; ++attempt) {
            const uint64_t generation = lane_.committed().snapshot().generation;
            MemberStates& states = lane_.states(member_);
            state_ = load_words(states.copies[current_copy(states, generation)]);
            // While it is overwritten, a copy fails its checksum or has a later generation: load both anew.
            if (state_.generation <= generation && state_.checksum == checksum_of(state_)) {
                known_.generation = generation;
                break;
            }
            if (attempt == kAttempts) data_loss("the committed state of a table has a wrong checksum");
        }
        verify(state_, known_.generation, spec_);
        if (state_.rows > 0 && state_.row_elements != shape_.numbers())
            data_loss("a table's rows have another width than it has");
        known_.rows = state_.rows;
        const auto index = kIndex0 + static_cast<uint32_t>(state_.index);
        buckets_ = reinterpret_cast<Bucket*>(const_cast<unsigned char*>(
            region(index, state_.index_buckets * sizeof(Bucket))));  // only `insert` writes to them
        known_.table = reinterpret_cast<const RowPlace*>(region(kPlaces, state_.rows * sizeof(RowPlace)));
        records_ = region(kRows0, state_.rows * shape_.numbers() * spec_.number_bytes());
        steps_ = reinterpret_cast<const int64_t*>(region(kRows1, state_.rows * sizeof(int64_t)));
    }
    const unsigned char* region(uint32_t number, uint64_t bytes) {
        auto& at = regions_[number];
        if (!at || at->bytes() < bytes)
            at = std::make_shared<ReadRegion>(segment_.file(),
                                              first_region(segment_.config(), 0) + kLaneRegions +
                                                  member_ * kMemberRegions + number,
                                              bytes);
        return at->proved(segment_.file(), bytes);
    }

    OpenSegment& segment_;
    Lane& lane_;
    const uint32_t member_;
    const MemberSpec& spec_;
    const RecordShape shape_;
    const RowHash hash_;
    ReadRegions regions_;
    MemberState state_{};
    PlacesInUse known_{};
    Bucket* buckets_ = nullptr;
    const unsigned char* records_ = nullptr;
    const int64_t* steps_ = nullptr;
};

}  // namespace shmacc
