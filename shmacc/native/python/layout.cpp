// Exports to Python what it needs to know of the layout (shmacc/_base/layout.py).
#include "base/layout.hpp"

#include <semaphore.h>

#include "python/interpreter.hpp"

namespace shmacc {
namespace {

template <size_t kCount>
nb::dict by_name(const NamedNumber (&table)[kCount]) {
    nb::dict numbers;
    for (const NamedNumber& entry : table) numbers[entry.name] = entry.number;
    return numbers;
}

}  // namespace

void export_layout(nb::module_& m) {
    m.attr("VERSION") = kVersion;
    m.attr("MAX_RANK") = kMaxRank;
    m.attr("MAX_MEMBERS") = kMaxMembers;
    m.attr("MAX_LANES") = kMaxLanes;
    m.attr("REGIONS") = by_name(kRegionNames);
    m.attr("EVENTS") = by_name(kEventNames);
    m.attr("KINDS") = by_name(kKindNames);
    m.attr("REDUCTIONS") = by_name(kReductionNames);
    m.attr("SUMS") = by_name(kSumNames);
    m.attr("OPTIMIZERS") = by_name(kOptimizerNames);
    nb::list decoupled;
    for (const NamedNumber& kind : kOptimizerNames)
        if (OptimizerSpec{kind.number, {}}.decoupled()) decoupled.append(kind.name);
    m.attr("DECOUPLED") = nb::tuple(decoupled);
    m.attr("OPTIMIZER_OPTIONS") = by_name(kOptimizerOptions);
    m.attr("CONSTRAINTS") = by_name(kConstraintNames);
    m.attr("INITIALS") = by_name(kInitialNames);
    m.attr("MAX_ROWS") = kMaxRows;
    m.attr("ACTIVITIES") = by_name(kActivityNames);
    m.attr("ROLES") = by_name(kRoleNames);
    nb::dict sizes;
    for (const NamedNumber& sum : kSumNames) sizes[sum.name] = sum_bytes(sum.number);
    m.attr("SUM_BYTES") = sizes;
    m.attr("REGION_SPAN") = kRegionSpan;
    m.attr("PAGE_BYTES") = kPage;
    m.attr("HEADER_BYTES") = kHeaderBytes;
    m.attr("PARTICIPANT_BYTES") = sizeof(Participant);
    m.attr("WAITER_BYTES") = sizeof(Waiter);
    m.attr("DEPARTED_BYTES") = sizeof(Departed);
    m.attr("BUCKET_BYTES") = sizeof(Bucket);
    m.attr("BUCKET_ENTRIES") = kBucketEntries;
    m.attr("ROW_PLACE_BYTES") = sizeof(RowPlace);
    m.attr("SEMAPHORE_BYTES") = sizeof(sem_t);
}

}  // namespace shmacc
