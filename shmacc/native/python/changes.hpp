// Converts the changes that Python passes to an update of parameters. Keeps their arrays for as long as it lasts.
//
// Row numbers are read several times under the lock, and again after a death. So they must be a private copy, which
// Python cannot change meanwhile (arrays.py: row_numbers). Values may change: any bytes are valid numbers.
#pragma once

#include "parameters/copy.hpp"
#include "parameters/load.hpp"
#include "python/handle.hpp"

namespace shmacc {

// The changes, and the arrays that they read. Made and destroyed with the GIL.
class IncomingChanges {
  public:
    // given: for each member that changes, in order, an ArrayChange or a TableChange (change_checks.py).
    explicit IncomingChanges(const OpenSegment& segment, const nb::list& given) {
        if (segment.config().kind != kParameters)
            throw Error(Failure::kInvalidArgument, "The segment has no parameters");
        for (const nb::handle change : given) {
            const auto number = field<uint32_t>(change, "number");
            const std::optional<Rate> rate = rate_of(change);
            if (number >= segment.config().members ||
                (rate && (*segment.specs())[number].optimizer.kind == kNoOptimizer))
                throw Error(Failure::kInvalidArgument, "The segment has no such array");
            const MemberSpec& spec = (*segment.specs())[number];
            owned_.push_back(spec.kind == kTable ? of_table(spec, number, rate, change)
                                                 : of_array(spec, number, rate, change));
            changes_.push_back(owned_.back().get());
        }
    }
    const MemberChanges& get() const { return changes_; }

  private:
    using Change = std::unique_ptr<MemberChange>;

    template <class T>
    static T field(nb::handle change, const char* name) {
        return nb::cast<T>(nb::object(change.attr(name)));
    }
    static std::optional<Rate> rate_of(nb::handle change) {
        const auto rate = field<std::optional<double>>(change, "rate");
        if (!rate) return std::nullopt;
        const auto corrections = field<nb::object>(change, "corrections");
        if (corrections.is_none()) return Rate{*rate};
        const auto [first, second] = unpacked<double, double>(corrections);
        return Rate{*rate, Corrections{first, second}};
    }
    Change of_array(const MemberSpec& spec, uint32_t number, const std::optional<Rate>& rate,
                    nb::handle change) {
        std::vector<ArrayContents::Region> regions;
        for (const nb::handle values : field<nb::list>(change, "values")) {
            const auto& numbers = values_.emplace_back(values, 1);
            regions.push_back({static_cast<uint32_t>(regions.size()), numbers.data(), numbers.size()});
        }
        const auto rows = field<nb::object>(change, "rows");
        if (regions.empty() || regions.size() > std::size(kArrayRegions) ||
            (regions.size() > 1 && (rate || !rows.is_none())))
            refuse_sizes();
        ChangedRows changed;
        if (!rows.is_none()) {
            const uint64_t rows_there = spec.round->empty() ? 0 : static_cast<uint64_t>(spec.round->front());
            changed = rows_of(rows, regions[0].bytes, rows_there);
            regions[0].bytes = rows_there * changed.bytes;
        }
        // Arrays without an optimizer may have any dtype, whose size only Python knows.
        if (spec.optimizer.kind != kNoOptimizer && changed.any() &&
            regions[0].bytes != product(*spec.round) * spec.number_bytes())
            refuse_sizes();
        if (!rate) return std::make_unique<ArrayContents>(number, changed, std::move(regions));
        return std::make_unique<ArrayGradient>(number, *rate, changed, regions[0].values, regions[0].bytes);
    }
    ChangedRows rows_of(const nb::object& rows, uint64_t values_bytes, uint64_t rows_there) {
        const auto& keys = rows_.emplace_back(rows, 1);
        ChangedRows changed{keys.data(), keys.size()};
        if (changed.count > 0) changed.bytes = values_bytes / changed.count;
        if (changed.bytes * changed.count != values_bytes ||
            changed.bytes > kRegionSpan / std::max<uint64_t>(rows_there, 1))
            refuse_sizes();
        if (changed.count > 0 && (changed.rows[0] < 0 || !strictly_ascending(changed.rows, changed.count) ||
                                  static_cast<uint64_t>(changed.rows[changed.count - 1]) >= rows_there))
            throw Error(Failure::kInvalidArgument, "The rows of an update must ascend, from 0 to below " +
                                                       std::to_string(rows_there) +
                                                       ", as a round hands them out");
        return changed;
    }
    Change of_table(const MemberSpec& spec, uint32_t number, const std::optional<Rate>& rate,
                    nb::handle change) {
        const auto& numbers = values_.emplace_back(field<nb::object>(change, "values"), 1);
        TableChange::Rows changed{ascending_ids(change, "ids"), rate, numbers.data(), 0};
        Removal removal;
        removal.all_others = field<nb::object>(change, "removed").is_none();
        if (!removal.all_others) removal.ids = ascending_ids(change, "removed");
        removal.updated_before = field<std::optional<int64_t>>(change, "updated_before");
        removal.kept = ascending_ids(change, "kept");
        const RecordShape shape = record_of(spec);
        const uint64_t count = changed.ids.count;
        if (count > 0) changed.row_bytes = numbers.size() / count;
        const bool of_row = changed.row_bytes == shape.width * spec.number_bytes();
        const bool whole = !rate && changed.row_bytes == shape.numbers() * spec.number_bytes();
        if (changed.row_bytes * count != numbers.size() || (count > 0 && !of_row && !whole)) refuse_sizes();
        if (const auto steps = field<nb::object>(change, "steps"); !steps.is_none()) {
            const auto& given = rows_.emplace_back(steps, 1);
            if (given.size() != count) refuse_sizes();
            changed.steps = given.data();
        }
        return std::make_unique<TableChange>(number, changed, removal);
    }
    Ids ascending_ids(nb::handle change, const char* name) {
        const auto& ids = rows_.emplace_back(field<nb::object>(change, name), 1);
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
    std::vector<Change> owned_;
    MemberChanges changes_;
};

inline Lineage lineage_of(const nb::object& given) {
    const auto [term, number, digest] = unpacked<uint64_t, uint64_t, uint64_t>(given);
    return {kNotFinal, term, number, digest};
}

// Merges a gradient's rows as an apply does: returns row numbers and rows, in ascending order, each once. indices: a
// private array, to which nobody writes.
template <class T>
nb::tuple merged(nb::handle indices, nb::handle values) {
    const ArrayBuffer<int64_t> keys(indices, 1);
    const ArrayBuffer<T> numbers(values, 1);
    const uint64_t width = product(numbers.dims(1));
    if (keys.size() > kMaxRows || numbers.size() != keys.size() * width)
        throw Error(Failure::kInvalidArgument, "Sizes of indices and values disagree");
    SortedRows<Add<T>> gradient(keys.data(), numbers.data(), nullptr, 1, static_cast<uint32_t>(keys.size()),
                                width, false);
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

// Updates the parameters by the round `serial`, which `rounds` has open. Returns false if this was done already.
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
        const bool is_new = handle.update<Update>([&](Update& act) { return act.update(request, round); });
        note();
        return is_new;
    } catch (...) {  // for instance from a signal handler that ran after the update
        note();
        throw;
    }
}

// Changes parameters that are a copy (copy.hpp). lineage and parent: (term, number, digest). Returns true if the change
// was made now, false if the copy had it already; and the copy's digest. only_check: changes nothing.
inline nb::tuple change_copy(Handle& handle, const nb::object& lineage, const nb::object& parent,
                             int64_t step, int64_t begun, const nb::list& changes, const nb::list& updates,
                             std::optional<double> timeout, bool only_check) {
    const OpenSegment::Use segment = handle.attached();
    const IncomingChanges incoming(*segment, changes);
    CopyChange request{{},
                       lineage_of(lineage),
                       step,
                       begun,
                       incoming.get(),
                       vector_of<int64_t>(updates),
                       deadline_after(timeout),
                       only_check};
    if (!parent.is_none()) request.parent = lineage_of(parent);
    const uint64_t of_each = request.parent ? 0 : segment->config().members;
    if (request.lineage.term == 0 || request.updates.size() != of_each)
        throw Error(Failure::kInvalidArgument,
                    "No copy can have this lineage, or the segment has other arrays");
    uint64_t digest = 0;
    const bool made = handle.update<ChangeCopy>([&](ChangeCopy& act) { return act.change(request, digest); });
    return nb::make_tuple(made, digest);
}

// Runs a Load. parameters: (handle, step, changes, updates of each array). accumulators: (handle, step, gradients,
// terms); gradients and terms are those of `Handle::apply_group`. No segment is named twice.
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
        const Load::Arrays& last = arrays.back();
        if (last.updates.size() != segment->config().members || last.changes.size() != last.updates.size())
            throw Error(Failure::kInvalidArgument, "The segment has no such arrays");
    }
    std::deque<std::vector<MemberGradient*>> members;
    std::vector<Load::Gradients> gradients;
    std::vector<StepRead> restored(nb::len(accumulators));
    std::vector<Handle*> readers;
    for (const nb::handle item : accumulators) {
        OpenSegment* const segment = attached(item);
        readers.push_back(handles.back());
        members.push_back(gradients_of(*segment->specs(), nb::borrow<nb::list>(item[2])));
        StepRead& to = restored[gradients.size()];
        to.step = nb::cast<int64_t>(item[1]);
        gradients.push_back({segment, of_terms(to.step, item[3]), &to.timeline});
        gradients.back().request.members = members.back().data();
        gradients.back().request.member_count = members.back().size();
    }
    Handle::run_on(handles, [&](Interruption& interruption) {
        for (const auto& each : members)
            for (MemberGradient* gradient : each) gradient->sort();
        Load(std::move(arrays), std::move(gradients), deadline, interruption).run();
    });
    for (size_t i = 0; i < readers.size(); ++i) readers[i]->note_restored(restored[i]);
}

// copies: (number, region, array to copy into). whole: tables' rows have the optimizer's slots, too. Returns the step;
// how often each array was updated; for each table the arrays (ids, rows' numbers as bytes, last steps); and for a copy
// (term, number, digest, the step to which its last change led).
inline nb::tuple read_parameters(Handle& handle, const nb::list& copies, const nb::list& tables, bool whole,
                                 std::optional<double> timeout) {
    const OpenSegment::Use segment = handle.attached();
    if (segment->config().kind != kParameters)
        throw Error(Failure::kInvalidArgument, "The segment has no parameters");
    std::deque<ArrayBuffer<unsigned char>> views;
    std::vector<Update::ArrayCopy> asked;
    for (const nb::handle item : copies) {
        const auto [array, region, to] = unpacked<uint32_t, uint32_t, nb::object>(item);
        if (array >= segment->config().members || region >= std::size(kArrayRegions))
            throw Error(Failure::kInvalidArgument, "The segment has no such array");
        const auto& view = views.emplace_back(to, 1, kWritable);
        asked.push_back({array, region, view.writable(), view.size()});
    }
    std::vector<Update::TableCopy> table_copies;
    for (const uint32_t table : vector_of<uint32_t>(tables)) {
        if (table >= segment->config().members || (*segment->specs())[table].kind != kTable)
            throw Error(Failure::kInvalidArgument, "The segment has no such table");
        table_copies.push_back({table});
    }
    need_numpy();
    std::vector<int64_t> updates;
    const int64_t deadline = deadline_after(timeout);
    const RoundState of = handle.update<Update>(
        [&](Update& act) { return act.read(asked, table_copies, whole, updates, deadline); });
    nb::list read = new_list();
    for (Update::TableCopy& copy : table_copies) {
        const RecordShape shape = record_of((*segment->specs())[copy.table]);
        const uint64_t bytes = (whole ? shape.numbers() : shape.width) *
                               (*segment->specs())[copy.table].number_bytes();
        read.append(nb::make_tuple(array_of<int64_t>(*copy.ids, copy.rows),
                                   array_of<uint8_t>(*copy.records, copy.rows * bytes),
                                   array_of<int64_t>(*copy.steps, copy.rows)));
    }
    const Lineage& copy = of.lineage;
    return nb::make_tuple(of.step, updates, read,
                          nb::make_tuple(copy.term, copy.number, copy.digest, of.begun));
}

}  // namespace shmacc
