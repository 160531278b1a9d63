// Converts columns and pieces from and to Python, where they are tuples of arrays.
#pragma once

#include <deque>

#include "accumulators/pieces.hpp"
#include "python/interpreter.hpp"

namespace shmacc {

// Returns (parts, numbers, counts, values): the headers as int64 (members, 4); row numbers and counts as
// int64; values as bytes.
inline nb::tuple arrays_of(Columns& columns) {
    Output parts(columns.parts.size() * sizeof(PartHeader));
    if (!columns.parts.empty()) std::memcpy(parts.get(), columns.parts.data(), parts.bytes());
    const int64_t dims[2] = {static_cast<int64_t>(columns.parts.size()), 4};
    const nb::object lines = array_of<int64_t>(parts, dims, 2);
    const nb::object numbers = array_of<int64_t>(columns.numbers, columns.rows);
    const nb::object counts = array_of<int64_t>(columns.counts, columns.rows);
    return nb::make_tuple(lines, numbers, counts, array_of<uint8_t>(columns.values, columns.bytes));
}

// ends: Division::ends as int64 (members, shards); None: nothing is divided.
inline std::optional<Division> division_of(nb::handle ends) {
    if (ends.is_none()) return std::nullopt;
    const ArrayBuffer<int64_t> given(ends, 1);
    const Dims dims = given.dims(0);
    if (dims.size() != 2 || dims[1] < 1 || dims[1] > UINT32_MAX)
        throw Error(Failure::kInvalidArgument, "A round is divided among one shard or more");
    return Division{static_cast<uint32_t>(dims[1]), {given.data(), given.data() + given.size()}};
}

// Keeps the arrays of pieces for as long as they are read. A piece is (parts, numbers, counts, values, count, weight).
// Made and destroyed with the GIL.
class IncomingPieces {
  public:
    explicit IncomingPieces(const nb::list& given) {
        for (const nb::handle one : given) {
            const auto fields = nb::cast<nb::tuple>(one);
            if (fields.size() != 6) throw Error(Failure::kInvalidArgument, "A piece has six fields");
            const auto &parts = numbers_.emplace_back(fields[0], 1),
                       &rows = numbers_.emplace_back(fields[1], 1),
                       &counts = numbers_.emplace_back(fields[2], 1);
            const auto& values = bytes_.emplace_back(fields[3], 1);
            constexpr uint64_t kNumbers = sizeof(PartHeader) / sizeof(int64_t);
            const Dims dims = parts.dims(0);
            if (dims.size() != 2 || dims[1] != kNumbers || rows.dims(0).size() != 1 ||
                counts.size() != rows.size() || values.dims(0).size() != 1)
                throw Error(
                    Failure::kInvalidArgument,
                    "A piece's columns have one dimension, as many counts as rows, and its headers two, of "
                    "four numbers each");
            if (!is_aligned(parts) || !is_aligned(rows) || !is_aligned(counts) || !is_aligned(values))
                throw Error(Failure::kInvalidArgument,
                            "A piece's columns must begin at multiples of 8 bytes in memory");
            pieces_.push_back({reinterpret_cast<const PartHeader*>(parts.data()), parts.size() / kNumbers,
                               rows.data(), counts.data(), rows.size(), values.data(), values.size(),
                               nb::cast<int64_t>(fields[4]), nb::cast<int64_t>(fields[5])});
        }
    }
    const std::vector<Piece>& pieces() const { return pieces_; }

  private:
    // Whether a column is aligned for every type of sums.
    template <class T>
    static bool is_aligned(const ArrayBuffer<T>& column) {
        return column.size() == 0 || reinterpret_cast<uintptr_t>(column.data()) % alignof(int64_t) == 0;
    }

    std::deque<ArrayBuffer<int64_t>> numbers_;
    std::deque<ArrayBuffer<uint8_t>> bytes_;
    std::vector<Piece> pieces_;
};

// Returns the merged rows of all columns, their counts, and for each column the positions of its rows (merge_columns).
inline nb::tuple merge_columns_of(const nb::list& rows, const nb::list& counts, const nb::list& lengths) {
    need_numpy();
    std::deque<ArrayBuffer<int64_t>> buffers;
    std::vector<RowColumn> columns;
    std::vector<const int64_t*> column_counts;
    uint64_t total = 0;
    if (counts.size() != rows.size() || lengths.size() != rows.size())
        throw Error(Failure::kInvalidArgument, "There must be counts and lengths for each column");
    for (size_t i = 0; i < nb::len(rows); ++i) {
        const auto& row = buffers.emplace_back(rows[i], 1);
        const auto& count = buffers.emplace_back(counts[i], 1);
        const auto& length = buffers.emplace_back(lengths[i], 1);
        columns.push_back({row.data(), row.size(), length.data(), length.size()});
        column_counts.push_back(count.data());
        if (count.size() != row.size() || length.size() != columns[0].members || !columns.back().fits())
            throw Error(Failure::kInvalidArgument, "The columns of a shard do not fit each other");
        total += row.size();
    }
    Output merged(total * sizeof(int64_t)), merged_counts(total * sizeof(int64_t));
    std::vector<Output> positions;
    std::vector<int64_t*> position;
    for (const RowColumn& column : columns)
        position.push_back(static_cast<int64_t*>(positions.emplace_back(column.count * sizeof(int64_t)).get()));
    {
        const WithoutGil released;
        merge_columns(columns, column_counts, static_cast<int64_t*>(merged.get()),
                      static_cast<int64_t*>(merged_counts.get()), position);
    }
    nb::list made;
    for (size_t i = 0; i < columns.size(); ++i)
        made.append(array_of<int64_t>(positions[i], columns[i].count));
    return nb::make_tuple(array_of<int64_t>(merged, total), array_of<int64_t>(merged_counts, total), made);
}

// wholes: arrays of uint8 (rows or elements, bytes of each). firsts, lengths: Whole::first and Whole::length of each.
inline void put_values_of(const nb::list& wholes, nb::handle firsts, nb::handle lengths, nb::handle positions,
                          nb::handle values) {
    std::deque<ArrayBuffer<uint8_t>> arrays;
    const ArrayBuffer<int64_t> first(firsts, 1), length(lengths, 1), position(positions, 1);
    const ArrayBuffer<uint8_t> column(values, 1);
    if (first.size() != nb::len(wholes) || length.size() != nb::len(wholes))
        throw Error(Failure::kInvalidArgument, "There must be a place and a length for each array");
    std::vector<Whole> parts;
    for (size_t i = 0; i < nb::len(wholes); ++i) {
        const auto& array = arrays.emplace_back(wholes[i], 1, kWritable);
        const Dims dims = array.dims(0);
        if (dims.size() != 2 || length.data()[i] < 0)
            throw Error(Failure::kInvalidArgument, "An array has two dimensions, and no negative length");
        parts.push_back({array.writable(), static_cast<uint64_t>(dims[0]), static_cast<uint64_t>(dims[1]),
                         static_cast<uint64_t>(length.data()[i]), first.data()[i]});
    }
    const WithoutGil released;
    put_values(parts, position.data(), position.size(), column.data(), column.size());
}

}  // namespace shmacc
