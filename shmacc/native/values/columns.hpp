// Columns: the form in which hosts and shards send each other rounds. They are a few arrays, each with the data of all
// members in turn. (In a message a small array costs more than its bytes, so there are few arrays.)
//
// One column has the row numbers of all sparse members, one the counts of these rows. A column of bytes has the values
// of all members; each member's values begin at a multiple of kPartAlignment. A header for each member says how long
// its part is.
#pragma once

#include <queue>
#include <utility>

#include "values/output.hpp"
#include "values/row_targets.hpp"

namespace shmacc {

constexpr uint64_t kPartAlignment = 64;

inline uint64_t part_up(uint64_t bytes) {
    return (bytes + kPartAlignment - 1) / kPartAlignment * kPartAlignment;
}

// The header of a member's part. Headers are in ascending order of number.
struct PartHeader {
    int64_t number;
    int64_t count;  // gradients that had the member
    int64_t weight;  // their weight
    int64_t length;  // rows, or a dense member's elements
};

struct Columns {
    std::vector<PartHeader> parts;
    uint64_t rows = 0, bytes = 0;  // how many are in use; the memory may be larger
    Output numbers{0}, counts{0}, values{0};
};

// How members are divided: a row goes to its `shard_of`, a dense member is cut into one run of elements per shard.
struct Division {
    uint32_t shards;
    std::vector<int64_t> ends;  // dense member m's run for shard s ends at ends[m * shards + s]

    // Where a shard's run of a member begins and ends. elements: how many the member has.
    std::pair<uint64_t, uint64_t> run(uint32_t member, uint32_t shard, uint64_t elements) const {
        const int64_t* const own = ends.data() + uint64_t{member} * shards;
        const int64_t begin = shard ? own[shard - 1] : 0, end = own[shard];
        if (begin < 0 || begin > end || static_cast<uint64_t>(end) > elements ||
            (shard + 1 == shards && static_cast<uint64_t>(end) != elements))
            throw Error(Failure::kInvalidArgument, "The runs of a dense member are not the whole of it");
        return {static_cast<uint64_t>(begin), static_cast<uint64_t>(end)};
    }
    bool operator==(const Division& other) const { return shards == other.shards && ends == other.ends; }
};

// How much room columns need.
struct ColumnsRoom {
    uint64_t rows = 0, bytes = 0;
    void add_part(uint64_t of_bytes) { bytes = part_up(bytes) + of_bytes; }
};

// Writes the columns of one or more shards, member after member. The rows may need less than the room, since equal rows
// are added up; memory that is not touched costs nothing.
class ColumnsWriter {
  public:
    explicit ColumnsWriter(const std::vector<ColumnsRoom>& rooms) : rooms_(rooms), columns_(rooms.size()) {
        for (size_t shard = 0; shard < rooms.size(); ++shard) {
            Columns& own = columns_[shard];
            own.numbers = Output(rooms[shard].rows * sizeof(int64_t));
            own.counts = Output(rooms[shard].rows * sizeof(int64_t));
            own.values = Output(rooms[shard].bytes);
            bytes_ += rooms[shard].bytes;
        }
    }

    // Calls `read` to write a sparse member's rows into RowTargets, and returns its result. Sets the header's length.
    template <class T, class Read>
    bool write_rows(PartHeader line, uint64_t width, Read read) {
        std::vector<RowTarget<T>> targets;
        bool streamed = true;
        for (size_t shard = 0; shard < columns_.size(); ++shard) {
            Columns& own = columns_[shard];
            const uint64_t begin = part_up(own.bytes), room = rooms_[shard].bytes;
            const uint64_t rows = rooms_[shard].rows - own.rows;
            const uint64_t fit = begin > room ? 0 : width ? (room - begin) / (width * sizeof(T)) : rows;
            T* const values = reinterpret_cast<T*>(bytes_of(own) + begin);
            targets.push_back({rows_of(own.numbers) + own.rows, rows_of(own.counts) + own.rows, values,
                               std::min(rows, fit)});
            streamed = streamed && is_streamed(values, bytes_, width * sizeof(T));
        }
        const std::vector<RowTarget<T>> before = targets;
        RowTargets<T> to(std::move(targets), streamed);
        const bool fits = read(to);
        for (uint32_t shard = 0; shard < columns_.size(); ++shard) {
            const uint64_t written = before[shard].room - to.room(shard);
            line.length = static_cast<int64_t>(written);
            columns_[shard].rows += written;
            add(columns_[shard], line, written * width * sizeof(T));
        }
        return fits;
    }
    // Returns memory for a run of a dense member: line.length elements. Checks the room, since rows that were written
    // before may have changed, and taken more room, after the room was calculated.
    template <class T>
    T* elements(uint32_t shard, const PartHeader& line, uint32_t components) {
        Columns& own = columns_[shard];
        const uint64_t begin = part_up(own.bytes), room = rooms_[shard].bytes;
        const uint64_t bytes = static_cast<uint64_t>(line.length) * components * sizeof(T);
        if (bytes && (begin > room || bytes > room - begin)) data_loss("its rows change while they are read");
        add(own, line, bytes);
        return reinterpret_cast<T*>(bytes_of(own) + begin);
    }
    std::vector<Columns> written() { return std::move(columns_); }

  private:
    static int64_t* rows_of(const Output& column) { return static_cast<int64_t*>(column.get()); }
    static unsigned char* bytes_of(const Columns& columns) {
        return static_cast<unsigned char*>(columns.values.get());
    }
    static void add(Columns& to, const PartHeader& line, uint64_t bytes) {
        if (line.length == 0) return;
        to.parts.push_back(line);
        const uint64_t begin = part_up(to.bytes);
        if (begin > to.bytes)
            std::memset(bytes_of(to) + to.bytes, 0, begin - to.bytes);  // these bytes are sent, too
        to.bytes = begin + bytes;
    }

    const std::vector<ColumnsRoom> rooms_;
    std::vector<Columns> columns_;
    uint64_t bytes_ = 0;
};

// A column of row numbers, and how many of them each member has.
struct RowColumn {
    const int64_t* rows;
    uint64_t count;
    const int64_t* lengths;
    uint64_t members;

    // Whether the lengths add up to the number of rows.
    bool fits() const {
        uint64_t left = count;
        for (uint64_t i = 0; i < members; ++i) {
            if (lengths[i] < 0 || static_cast<uint64_t>(lengths[i]) > left) return false;
            left -= static_cast<uint64_t>(lengths[i]);
        }
        return left == 0;
    }
};

// Merges columns in which each member's rows ascend. `rows` and `merged_counts` get all rows of each member in
// ascending order. positions[i] gets, for each row of the i-th column, its place among its member's merged rows.
inline void merge_columns(const std::vector<RowColumn>& columns, const std::vector<const int64_t*>& counts,
                          int64_t* rows, int64_t* merged_counts, const std::vector<int64_t*>& positions) {
    struct Next {
        int64_t row;
        size_t column;
        bool operator>(const Next& other) const {
            return row != other.row ? row > other.row : column > other.column;
        }
    };
    std::vector<uint64_t> at(columns.size()), end(columns.size());
    const uint64_t members = columns.empty() ? 0 : columns[0].members;
    for (uint64_t member = 0; member < members; ++member) {
        std::priority_queue<Next, std::vector<Next>, std::greater<Next>> next;
        for (size_t i = 0; i < columns.size(); ++i) {
            end[i] = at[i] + static_cast<uint64_t>(columns[i].lengths[member]);
            if (at[i] < end[i]) next.push({columns[i].rows[at[i]], i});
        }
        for (int64_t position = 0; !next.empty(); ++position) {
            const auto [row, i] = next.top();
            next.pop();
            *rows++ = row;
            *merged_counts++ = counts[i][at[i]];
            positions[i][at[i]++] = position;
            if (at[i] < end[i]) next.push({columns[i].rows[at[i]], i});
        }
    }
}

// A caller's array, to which the values of one member are written: `size` rows or elements.
struct Whole {
    unsigned char* memory;
    uint64_t size;
    uint64_t row_bytes;
    uint64_t length;  // how many rows or elements the part has
    int64_t first;  // where the part begins, if it is a run; -1: each row has a position of its own
};

// Puts a shard's values into their arrays. positions: for each row of a part that is no run, its place in the array.
inline void put_values(const std::vector<Whole>& wholes, const int64_t* positions, uint64_t count,
                       const unsigned char* values, uint64_t bytes) {
    uint64_t all = 0, at = 0, end = 0;
    for (const Whole& whole : wholes) {
        all += whole.size * whole.row_bytes;
        const bool is_run = whole.first >= 0;
        const uint64_t first = is_run ? static_cast<uint64_t>(whole.first) : 0;
        if (first > whole.size || whole.length > whole.size - first || (!is_run && whole.length > count - at))
            throw Error(Failure::kInvalidArgument,
                        "There are more rows than positions, or than the array has");
        for (const uint64_t until = at + (is_run ? 0 : whole.length); at < until; ++at)
            if (static_cast<uint64_t>(positions[at]) >= whole.size)
                throw Error(Failure::kInvalidArgument, "A row's position is not in the array");
        end = part_up(end) + whole.length * whole.row_bytes;
    }
    if (at != count || end != bytes)
        throw Error(Failure::kInvalidArgument,
                    "There are fewer or more rows, or values, than there should be");
    const unsigned char* from = values;
    for (const Whole& whole : wholes) {
        from = values + part_up(static_cast<uint64_t>(from - values));
        const uint64_t part = whole.length * whole.row_bytes;
        if (whole.first >= 0) {
            if (part)
                std::memcpy(whole.memory + static_cast<uint64_t>(whole.first) * whole.row_bytes, from, part);
        } else {
            const bool streamed = is_streamed(whole.memory, all, whole.row_bytes);
            for (uint64_t i = 0; i < whole.length; ++i) {
                unsigned char* const to = whole.memory + static_cast<uint64_t>(*positions++) * whole.row_bytes;
                const unsigned char* const row = from + i * whole.row_bytes;
                if (streamed)
                    stream(to, row, whole.row_bytes);
                else if (whole.row_bytes)
                    std::memcpy(to, row, whole.row_bytes);
            }
        }
        from += part;
    }
    end_of_stream();
}

}  // namespace shmacc
