// Converts what Python passes to an update of parameters. Its arrays are kept for as long as the update lasts.
//
// Row numbers are read several times under the lock, and again after a death. So they must be a private copy, which
// Python cannot change meanwhile (arrays.py: row_numbers). Values may change: any bytes are valid numbers.
#pragma once

#include "parameters/load.hpp"
#include "python/handle.hpp"

namespace shmacc {

// The changes, and the arrays that they read. Made and destroyed with the GIL.
class IncomingChanges {
  public:
    // given: in order of the arrays, tuples (number, region, learning rate, rows, values, bytes of the region). If the
    // learning rate is None, the values are new contents. Rows ascend; None: the whole array. A table has ids in place
    // of rows, and in place of bytes (ids to remove, or None for all others; last steps or None; for rows to forget
    // (the step that they were last updated before, ids to keep), or None).
    explicit IncomingChanges(const OpenSegment& segment, const nb::list& given) {
        if (segment.config().kind != kParameters)
            throw Error(Failure::kInvalidArgument, "The segment has no parameters");
        for (const nb::handle item : given) {
            const auto [array, region, rate, rows, values, rest] =
                unpacked<uint32_t, uint32_t, std::optional<double>, nb::object, nb::object, nb::object>(item);
            if (array >= segment.config().members || region >= std::size(kArrayRegions) ||
                (rate && (region != 0 || (*segment.specs())[array].optimizer.kind == kNoOptimizer)))
                throw Error(Failure::kInvalidArgument, "The segment has no such array");
            if ((*segment.specs())[array].kind == kTable) {
                changes_.push_back(of_table((*segment.specs())[array], array, rate, rows, values, rest));
                continue;
            }
            const auto bytes = nb::cast<uint64_t>(rest);
            const auto& numbers = values_.emplace_back(values, 1);
            ArrayChange change{array, region, rate, numbers.data(), bytes};
            if (rows.is_none()) {
                if (numbers.size() != bytes) refuse_sizes();
            } else {
                const auto& keys = rows_.emplace_back(rows, 1);
                change.rows = keys.data();
                change.count = keys.size();
                if (change.count > 0) change.row_bytes = numbers.size() / change.count;
                if (change.row_bytes * change.count != numbers.size()) refuse_sizes();
                const uint64_t rows_there = change.row_bytes ? bytes / change.row_bytes : 0;
                if (change.row_bytes && (change.rows[0] < 0 || !strictly_ascending(change.rows, change.count) ||
                                         static_cast<uint64_t>(change.rows[change.count - 1]) >= rows_there))
                    throw Error(Failure::kInvalidArgument,
                                "The rows of an update must ascend, from 0 to below " +
                                    std::to_string(rows_there) + ", as a round hands them out");
            }
            changes_.push_back(change);
        }
    }
    std::vector<ArrayChange> get() const { return changes_; }

  private:
    ArrayChange of_table(const MemberSpec& spec, uint32_t number, std::optional<double> rate,
                         const nb::object& rows, const nb::object& values, const nb::object& rest) {
        const auto [removed, steps, forget] = unpacked<nb::object, nb::object, nb::object>(rest);
        const Ids ids = ascending_ids(rows);
        const auto& numbers = values_.emplace_back(values, 1);
        ArrayChange change{number, 0, rate, numbers.data(), 0, ids.ids, ids.count};
        change.removal.all_others = removed.is_none();
        if (!removed.is_none()) change.removal.ids = ascending_ids(removed);
        if (!forget.is_none()) {
            const auto [before, kept] = unpacked<int64_t, nb::object>(forget);
            change.removal.updated_before = before;
            change.removal.kept = ascending_ids(kept);
        }
        const RecordShape shape = record_of(spec);
        if (ids.count > 0) change.row_bytes = numbers.size() / ids.count;
        const bool of_row = change.row_bytes == shape.width * spec.number_bytes();
        const bool whole = !rate && change.row_bytes == shape.numbers() * spec.number_bytes();
        if (change.row_bytes * ids.count != numbers.size() || (ids.count > 0 && !of_row && !whole))
            refuse_sizes();
        if (!steps.is_none()) {
            const auto& given = rows_.emplace_back(steps, 1);
            if (given.size() != ids.count) refuse_sizes();
            change.steps = given.data();
        }
        return change;
    }
    Ids ascending_ids(const nb::object& given) {
        const auto& ids = rows_.emplace_back(given, 1);
        if (ids.size() > kMaxRows || (ids.size() > 0 && ids.data()[0] < 0) ||
            !strictly_ascending(ids.data(), ids.size()))
            throw Error(Failure::kInvalidArgument, "The ids of an update must ascend, from 0 on");
        return {ids.data(), ids.size()};
    }
    [[noreturn]] static void refuse_sizes() {
        throw Error(Failure::kInvalidArgument, "Sizes of an array, its rows and its values disagree");
    }

    std::deque<ArrayBuffer<unsigned char>> values_;
    std::deque<ArrayBuffer<int64_t>> rows_;
    std::vector<ArrayChange> changes_;
};

// Merges a gradient's rows as an apply does: returns row numbers and rows, in ascending order, each once. indices:
// memory of their own, which nobody writes to.
template <class T>
nb::tuple merged(nb::handle indices, nb::handle values) {
    const ArrayBuffer<int64_t> keys(indices, 1);
    const ArrayBuffer<T> numbers(values, 1);
    const uint64_t width = product(numbers.dims(1));
    if (keys.size() > kMaxRows || numbers.size() != keys.size() * width)
        throw Error(Failure::kInvalidArgument, "Sizes of indices and values disagree");
    Gradient<T> gradient(keys.data(), numbers.data(), nullptr, 1, static_cast<uint32_t>(keys.size()), width,
                         false);
    std::optional<Output> rows, row_numbers;
    {
        const WithoutGil released;
        gradient.sort();
        row_numbers.emplace(gradient.count() * sizeof(int64_t));
        rows.emplace(gradient.count() * width * sizeof(T));
        std::copy_n(gradient.keys(), gradient.count(), static_cast<int64_t*>(row_numbers->get()));
        for (uint32_t i = 0; i < gradient.count(); ++i)
            std::copy_n(gradient.row(i, width), width, static_cast<T*>(rows->get()) + i * width);
    }
    return nb::make_tuple(array_of<int64_t>(*row_numbers, gradient.count()),
                          array_of<T>(*rows, gradient.count() * width));
}
inline nb::tuple merged_rows(nb::handle indices, nb::handle values, bool is_double) {
    need_numpy();
    return is_double ? merged<double>(indices, values) : merged<float>(indices, values);
}

// Updates the parameters by the round `serial`, which `rounds` has open. False: they had this update already.
inline bool update_parameters(Handle& handle, Handle& rounds, uint64_t serial, int64_t step,
                              const nb::list& changes, std::optional<double> timeout) {
    const OpenSegment::Use segment = handle.attached();
    const OpenSegment::Use accumulator = rounds.attached();
    if (!rounds.holds_round(serial))
        throw Error(Failure::kFailedPrecondition, "The round has ended, or is another process's");
    const IncomingChanges incoming(*segment, changes);
    const UpdateRequest request{step, incoming.get(), deadline_after(timeout)};
    UpdatedRound round(*accumulator, serial, *segment);
    const auto note = [&] {
        if (round.is_in()) rounds.note_update(serial);
    };
    try {
        const bool is_new = handle.update([&](Update& act) { return act.update(request, round); });
        note();
        return is_new;
    } catch (...) {  // for instance from a signal handler that ran after the update
        note();
        throw;
    }
}

// parameters: (handle, step, changes, updates of each array); accumulators: (handle, step, members, terms), the last
// two as for `Handle::apply_group`. No segment is named twice.
inline void load_segments(const nb::list& parameters, const nb::list& accumulators,
                          std::optional<double> timeout) {
    const int64_t deadline = deadline_after(timeout);
    std::vector<Handle*> handles;
    std::vector<OpenSegment::Use> uses;
    const auto attached = [&](const nb::handle& item) {
        handles.push_back(&nb::cast<Handle&>(item[0]));
        return &*uses.emplace_back(handles.back()->attached());
    };
    std::deque<IncomingChanges> changes;
    std::vector<Load::Arrays> arrays;
    for (const nb::handle item : parameters) {
        OpenSegment* const segment = attached(item);
        changes.emplace_back(*segment, nb::list(item[2]));
        arrays.push_back(
            {segment, nb::cast<int64_t>(item[1]), changes.back().get(), vector_of<int64_t>(item[3])});
        if (arrays.back().updates.size() != segment->config().members)
            throw Error(Failure::kInvalidArgument, "The segment has no such arrays");
    }
    std::deque<Arrivals> arrivals;
    std::vector<Load::Gradients> gradients;
    std::vector<StepRead> restored(nb::len(accumulators));
    std::vector<Handle*> readers;
    for (const nb::handle item : accumulators) {
        OpenSegment* const segment = attached(item);
        readers.push_back(handles.back());
        arrivals.emplace_back(*segment->specs(), nb::list(item[2]));
        StepRead& to = restored[gradients.size()];
        to.step = nb::cast<int64_t>(item[1]);
        gradients.push_back({segment, of_terms(to.step, item[3]), &to.timeline});
        gradients.back().request.members = arrivals.back().gradients().data();
        gradients.back().request.member_count = arrivals.back().gradients().size();
    }
    Handle::run_on(handles, [&](Interruption& interruption) {
        for (const Arrivals& each : arrivals)
            for (MemberGradient* gradient : each.gradients()) gradient->sort();
        Load(std::move(arrays), std::move(gradients), deadline, interruption).run();
    });
    for (size_t i = 0; i < readers.size(); ++i) readers[i]->note_restored(restored[i]);
}

// places: (number, region, array to copy into). tables: (number, whether to read the optimizer's slots, too). Returns
// the step, how often each array was updated, and for each table the arrays (ids, rows' numbers as bytes, last steps).
inline nb::tuple read_parameters(Handle& handle, const nb::list& places, const nb::list& tables,
                                 std::optional<double> timeout) {
    const OpenSegment::Use segment = handle.attached();
    if (segment->config().kind != kParameters)
        throw Error(Failure::kInvalidArgument, "The segment has no parameters");
    std::deque<ArrayBuffer<unsigned char>> views;
    std::vector<Update::ArrayCopy> asked;
    for (const nb::handle item : places) {
        const auto [array, region, to] = unpacked<uint32_t, uint32_t, nb::object>(item);
        if (array >= segment->config().members || region >= std::size(kArrayRegions))
            throw Error(Failure::kInvalidArgument, "The segment has no such array");
        const auto& view = views.emplace_back(to, 1, PyBUF_WRITABLE);
        asked.push_back({array, region, view.writable(), view.size()});
    }
    std::vector<Update::TableCopy> copies;
    for (const nb::handle item : tables) {
        const auto [table, whole] = unpacked<uint32_t, bool>(item);
        if (table >= segment->config().members || (*segment->specs())[table].kind != kTable)
            throw Error(Failure::kInvalidArgument, "The segment has no such table");
        copies.push_back({table, whole});
    }
    need_numpy();
    std::vector<int64_t> updates;
    const int64_t deadline = deadline_after(timeout);
    const int64_t step = handle.update([&](Update& act) { return act.read(asked, copies, updates, deadline); });
    nb::list read = new_list();
    for (Update::TableCopy& copy : copies) {
        const RecordShape shape = record_of((*segment->specs())[copy.table]);
        const uint64_t bytes = (copy.whole ? shape.numbers() : shape.width) *
                               (*segment->specs())[copy.table].number_bytes();
        read.append(nb::make_tuple(array_of<int64_t>(*copy.ids, copy.rows),
                                   array_of<uint8_t>(*copy.records, copy.rows * bytes),
                                   array_of<int64_t>(*copy.steps, copy.rows)));
    }
    return nb::make_tuple(step, updates, read);
}

}  // namespace shmacc
