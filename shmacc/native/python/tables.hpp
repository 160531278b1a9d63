// Reads tables of parameters for Python, without a lock and without the GIL.
#pragma once

#include "operations/id_reader.hpp"
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

    // Copies the ids' rows into an array of that size. slot: 0: the rows; from 1 on: a slot of the optimizer.
    void rows(nb::handle ids, uint32_t slot, nb::handle to) {
        const ArrayBuffer<int64_t> wanted(ids, 1);
        const ArrayBuffer<unsigned char> target(to, 1, PyBUF_WRITABLE);
        read([&](IdReader& reader, const MemberSpec& spec) {
            const RecordShape& shape = reader.shape();
            if (slot > shape.slots.count)
                throw Error(Failure::kInvalidArgument, "The table has no such slot");
            const uint64_t width = slot ? shape.slot_width : shape.width;
            const uint64_t from = slot ? shape.width + (slot - 1) * shape.slot_width : 0;
            if (target.size() != wanted.size() * width * spec.number_bytes())
                throw Error(Failure::kInvalidArgument, "Sizes of ids and their rows disagree");
            if (width == 0) return;
            if (spec.sum == kFloat32)
                reader.copy(wanted.data(), wanted.size(), from, width,
                            reinterpret_cast<float*>(target.writable()));
            else
                reader.copy(wanted.data(), wanted.size(), from, width,
                            reinterpret_cast<double*>(target.writable()));
        });
    }
    void contains(nb::handle ids, nb::handle to) {
        const ArrayBuffer<int64_t> wanted(ids, 1);
        const ArrayBuffer<uint8_t> target(to, 1, PyBUF_WRITABLE);
        if (target.size() != wanted.size()) throw Error(Failure::kInvalidArgument, "Sizes disagree");
        read([&](IdReader& reader, const MemberSpec&) {
            reader.contains(wanted.data(), wanted.size(), target.writable());
        });
    }
    void last_steps(nb::handle ids, nb::handle to) {
        const ArrayBuffer<int64_t> wanted(ids, 1);
        const ArrayBuffer<int64_t> target(to, 1, PyBUF_WRITABLE);
        if (target.size() != wanted.size()) throw Error(Failure::kInvalidArgument, "Sizes disagree");
        read([&](IdReader& reader, const MemberSpec&) {
            reader.last_steps(wanted.data(), wanted.size(), target.writable());
        });
    }
    nb::object ids(std::optional<int64_t> before) {
        need_numpy();
        std::vector<int64_t> found;
        read([&](IdReader& reader, const MemberSpec&) { found = reader.all(before); });
        Output memory(found.size() * sizeof(int64_t));
        std::copy(found.begin(), found.end(), static_cast<int64_t*>(memory.get()));
        return array_of<int64_t>(memory, found.size());
    }
    // Returns (rows, rows ever removed, updates, bytes in shared memory).
    std::tuple<uint64_t, int64_t, int64_t, uint64_t> state() {
        MemberState state{};
        read([&](IdReader& reader, const MemberSpec&) { state = reader.state(); });
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
            IdReader reader(*segment, number_, std::move(regions));
            call(reader, (*segment->specs())[number_]);
            regions = reader.regions();
        }
        regions_ = std::move(regions);  // another thread may set it as well: both values are sound
    }

    const nb::object object_;
    Handle& handle_;
    const uint32_t number_;
    ReadRegions regions_;
};

// Writes the initial contents of these rows into an array of float32 or float64. initial: TableSpec's initial, numbers
// and seed.
inline void initial_rows(const std::tuple<uint64_t, std::vector<double>, uint64_t>& initial, nb::handle ids,
                         uint64_t width, bool is_double, nb::handle to) {
    const auto& [kind, numbers, seed] = initial;
    TableSpec table{kind, {}, seed, 1};
    if (numbers.size() > std::size(table.numbers) || !is_named(kInitialNames, static_cast<uint32_t>(kind)))
        throw Error(Failure::kInvalidArgument, "The initial contents are out of range");
    std::copy(numbers.begin(), numbers.end(), table.numbers);
    const ArrayBuffer<int64_t> wanted(ids, 1);
    const ArrayBuffer<unsigned char> target(to, 1, PyBUF_WRITABLE);
    if (target.size() != wanted.size() * width * (is_double ? 8 : 4))
        throw Error(Failure::kInvalidArgument, "Sizes of ids and their rows disagree");
    const WithoutGil released;
    for (uint64_t i = 0; i < wanted.size(); ++i) {
        if (is_double)
            initial_row(table, wanted.data()[i], reinterpret_cast<double*>(target.writable()) + i * width,
                        width);
        else
            initial_row(table, wanted.data()[i], reinterpret_cast<float*>(target.writable()) + i * width,
                        width);
    }
}

}  // namespace shmacc
