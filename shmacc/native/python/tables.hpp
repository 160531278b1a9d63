// Reads tables of parameters for Python, without a lock and without the GIL.
#pragma once

#include "parameters/table_reader.hpp"
#include "python/handle.hpp"

namespace shmacc {

class TableAccess {
  public:
    TableAccess(nb::object handle, uint32_t number)
        : object_(std::move(handle)), handle_(nb::cast<Handle&>(object_)), number_(number) {
        const OpenSegment& segment = handle_.intact();
        if (number >= segment.config().members || (*segment.specs())[number].kind != kTable)
            throw Error(Failure::kInvalidArgument, "The segment has no such table");
    }

    // Copies the ids' rows into `to`, which must have their size. slot: 0 for the rows, 1 or 2 for an optimizer's slot.
    void rows(nb::handle ids, uint32_t slot, nb::handle to) {
        const ArrayBuffer<int64_t> wanted(ids, 1);
        const ArrayBuffer<unsigned char> target(to, 1, kWritable);
        read([&](TableReader& reader, const MemberSpec& spec) {
            const RecordShape& shape = reader.shape();
            if (slot > shape.slots.count)
                throw Error(Failure::kInvalidArgument, "The table has no such slot");
            const uint64_t width = slot ? shape.slot_width : shape.width;
            const uint64_t from = slot ? shape.width + (slot - 1) * shape.slot_width : 0;
            if (target.size() != wanted.size() * width * spec.number_bytes())
                throw Error(Failure::kInvalidArgument, "Sizes of ids and their rows disagree");
            if (width == 0) return;
            with_number(spec.sum == kFloat64, [&](auto zero) {
                auto* const numbers = reinterpret_cast<decltype(zero)*>(target.writable());
                reader.copy(wanted.data(), wanted.size(), from, width, numbers);
            });
        });
    }
    void contains(nb::handle ids, nb::handle to) { read_each(ids, to, &TableReader::contains); }
    void last_steps(nb::handle ids, nb::handle to) { read_each(ids, to, &TableReader::last_steps); }
    nb::object ids(std::optional<int64_t> before) {
        need_numpy();
        std::vector<int64_t> found;
        read([&](TableReader& reader, const MemberSpec&) { found = reader.all(before); });
        Output memory(found.size() * sizeof(int64_t));
        std::copy(found.begin(), found.end(), static_cast<int64_t*>(memory.get()));
        return array_of<int64_t>(memory, found.size());
    }
    // Returns (rows, rows ever removed, updates, bytes in shared memory).
    std::tuple<uint64_t, int64_t, int64_t, uint64_t> state() {
        MemberState state{};
        read([&](TableReader& reader, const MemberSpec&) { state = reader.state(); });
        uint64_t bytes = 0;
        for (const uint64_t reserved : state.reserved) bytes += reserved;
        return {state.in_table, state.removed, state.count, bytes};
    }

  private:
    template <class Call>
    void read(Call call) {
        const OpenSegment::Use segment = handle_.attached();
        ReadRegions regions = regions_;
        {
            const WithoutGil released;
            TableReader reader(*segment, number_, std::move(regions));
            call(reader, (*segment->specs())[number_]);
            regions = reader.regions();
        }
        regions_ = std::move(regions);  // another thread may set it as well: both values are sound
    }
    // Calls a function of TableReader that writes one T for each id.
    template <class T>
    void read_each(nb::handle ids, nb::handle to, void (TableReader::*act)(const int64_t*, uint64_t, T*)) {
        const ArrayBuffer<int64_t> wanted(ids, 1);
        const ArrayBuffer<T> target(to, 1, kWritable);
        if (target.size() != wanted.size()) throw Error(Failure::kInvalidArgument, "Sizes disagree");
        read([&](TableReader& reader, const MemberSpec&) {
            (reader.*act)(wanted.data(), wanted.size(), target.writable());
        });
    }

    const nb::object object_;
    Handle& handle_;
    const uint32_t number_;
    ReadRegions regions_;
};

// given: kind and numbers, as optim.py makes them.
inline OptimizerSpec optimizer_spec(const nb::tuple& given) {
    const auto [kind, its_numbers] = unpacked<uint64_t, nb::object>(given);
    const auto numbers = vector_of<double>(its_numbers);
    OptimizerSpec optimizer{kind, {}};
    if (!optimizer.known() || numbers.size() > std::size(optimizer.numbers))
        throw Error(Failure::kInvalidArgument, "The optimizer is out of range");
    std::copy(numbers.begin(), numbers.end(), optimizer.numbers);
    return optimizer;
}

inline TableSpec table_spec(uint64_t initial, const std::vector<double>& numbers, uint64_t seed,
                            uint64_t max_rows) {
    TableSpec table{initial, {}, seed, max_rows};
    if (initial > UINT32_MAX || !is_named(kInitialNames, static_cast<uint32_t>(initial)) ||
        numbers.size() > std::size(table.numbers))
        throw Error(Failure::kInvalidArgument, "A table's initial contents are out of range");
    std::copy(numbers.begin(), numbers.end(), table.numbers);
    return table;
}

// Writes the initial contents of these rows into an array of float32 or float64. initial: TableSpec's initial, numbers
// and seed.
inline void initial_rows(const nb::tuple& initial, nb::handle ids, uint64_t width, bool is_double,
                         nb::handle to) {
    const auto [kind, numbers, seed] = unpacked<uint64_t, nb::object, uint64_t>(initial);
    const TableSpec table = table_spec(kind, vector_of<double>(numbers), seed, 1);
    const ArrayBuffer<int64_t> wanted(ids, 1);
    const ArrayBuffer<unsigned char> target(to, 1, kWritable);
    if (target.size() != wanted.size() * width * (is_double ? 8 : 4))
        throw Error(Failure::kInvalidArgument, "Sizes of ids and their rows disagree");
    const WithoutGil released;
    with_number(is_double, [&](auto zero) {
        auto* const rows = reinterpret_cast<decltype(zero)*>(target.writable());
        for (uint64_t i = 0; i < wanted.size(); ++i)
            initial_row(table, wanted.data()[i], rows + i * width, width);
    });
}

}  // namespace shmacc
