// The members of a segment: what each accumulates, and its name.
//
// The members are packed one after the other into the Directory region when the segment is made, and never
// change. A process reads them once, when it opens the segment, through the descriptor. Config has their checksum.
#pragma once

#include <algorithm>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/errors.hpp"
#include "base/layout.hpp"

namespace shmacc {

using Dims = std::vector<int64_t>;

// The properties of a member, as its maker gave them.
struct MemberSpec {
    uint32_t kind;
    uint32_t dtype;  // TensorFlow's DataType number
    uint32_t sum;
    uint32_t components;  // numbers in an element: 2 for complex, else 1
    uint32_t reduction;
    std::optional<Dims> declared;  // -1: unknown
    int64_t lowest;  // integers: the dtype's range
    uint64_t highest;
    std::string name = {};

    // The declared dims of a round's values (sparse: without the first). nullopt: not all of them are known.
    std::optional<Dims> round = {};
    OptimizerSpec optimizer = {};  // only for parameters
    TableSpec table = {};  // only for a table; its declared dims are those of a row

    uint64_t number_bytes() const { return sum_bytes(sum); }
    uint64_t row_bytes(const MemberState& state) const { return state.row_elements * number_bytes(); }
    void set_round() {
        round.reset();
        if (!declared || (kind == kSparse && declared->empty())) return;
        Dims dims(declared->begin() + (kind == kSparse), declared->end());
        if (std::all_of(dims.begin(), dims.end(), [](int64_t dim) { return dim >= 0; }))
            round = std::move(dims);
    }
    int64_t declared_rows() const { return declared && !declared->empty() ? declared->front() : -1; }
};

// The set of contributors is a sparse member, in which each contributor is a row.
inline MemberSpec contributors_spec() {
    return {kSparse, 0, kFloat32, 1, kSum, Dims{-1, 0}, INT64_MIN, UINT64_MAX, "", Dims{0}};
}

// Members, then the set of contributors.
using MemberSpecs = std::vector<MemberSpec>;

constexpr uint32_t kMaxMemberName = 1024;  // bytes; 200 characters are at most 800

// A member's entry in the region starts with this. Then come the dims, the name in whole words, the numbers of the
// optimizer if there is one, and a table's TableSpec.
struct DirectoryEntry {
    uint32_t kind, dtype, sum, components, reduction;
    uint32_t declared_rank;
    int64_t lowest;
    uint64_t highest;
    uint32_t name_length;
    uint32_t optimizer;  // its kind
};
static_assert(sizeof(DirectoryEntry) % 8 == 0, "entries are whole words");

constexpr uint64_t kMaxDirectory = kMaxMembers *
                                   (sizeof(DirectoryEntry) + kMaxRank * sizeof(int64_t) + kMaxMemberName +
                                    sizeof OptimizerSpec::numbers + sizeof(TableSpec));

// How many words the name and the optimizer's numbers take.
inline size_t name_words(const DirectoryEntry& entry) { return (size_t{entry.name_length} + 7) / 8; }
inline size_t number_words(const DirectoryEntry& entry) {
    return OptimizerSpec{entry.optimizer, {}}.stored_numbers();
}

inline size_t table_words(const DirectoryEntry& entry) {
    return entry.kind == kTable ? sizeof(TableSpec) / 8 : 0;
}

inline std::vector<uint64_t> pack_directory(const MemberSpecs& members) {
    std::vector<uint64_t> words;
    for (const MemberSpec& member : members) {
        const size_t rank = member.declared ? member.declared->size() : 0;
        const DirectoryEntry entry{member.kind,
                                   member.dtype,
                                   member.sum,
                                   member.components,
                                   member.reduction,
                                   member.declared ? static_cast<uint32_t>(rank) : kUnknownRank,
                                   member.lowest,
                                   member.highest,
                                   static_cast<uint32_t>(member.name.size()),
                                   static_cast<uint32_t>(member.optimizer.kind)};
        size_t at = words.size();
        words.resize(at + sizeof entry / 8 + rank + name_words(entry) + number_words(entry) +
                     table_words(entry));
        const auto append = [&](const void* data, size_t bytes, size_t in_words) {
            if (bytes) std::memcpy(&words[at], data, bytes);
            at += in_words;
        };
        append(&entry, sizeof entry, sizeof entry / 8);
        append(member.declared ? member.declared->data() : nullptr, rank * 8, rank);
        append(member.name.data(), member.name.size(), name_words(entry));
        append(member.optimizer.numbers, number_words(entry) * 8, number_words(entry));
        append(&member.table, table_words(entry) * 8, table_words(entry));
    }
    return words;
}

// Refuses a number that only a newer version with this layout has. The checksum is right, so this is no damage.
inline void refuse_unknown(uint32_t member, const char* what, uint32_t number, bool known) {
    if (!known)
        data_loss("member " + std::to_string(member) + " has " + what + " of number " + std::to_string(number) +
                  ", which this version of shmacc does not have; a newer one has made it, and reads it");
}

// Whether the table's row shape is known, a row with any optimizer's numbers takes less than a region, and
// max_rows is in range.
inline bool has_rows_of_known_size(const MemberSpec& table) {
    if (!table.round || table.table.max_rows < 1 || table.table.max_rows > kMaxRows) return false;
    uint64_t numbers = 1;
    for (const int64_t dim : *table.round) {
        if (static_cast<uint64_t>(dim) > kRegionSpan / 64 / std::max<uint64_t>(numbers, 1)) return false;
        numbers *= static_cast<uint64_t>(dim);
    }
    return true;
}

// Throws DataLossError unless the words describe `count` members.
inline MemberSpecs unpack_directory(const std::vector<uint64_t>& words, uint32_t count) {
    MemberSpecs members;
    members.reserve(count + 1);
    size_t at = 0;
    for (uint32_t i = 0; i < count; ++i) {
        DirectoryEntry entry;
        if (words.size() - at < sizeof entry / 8) data_loss("its directory of members is too short");
        std::memcpy(&entry, &words[at], sizeof entry);
        at += sizeof entry / 8;
        refuse_unknown(i, "sums", entry.sum, is_named(kSumNames, entry.sum));
        refuse_unknown(i, "reduction", entry.reduction, is_named(kReductionNames, entry.reduction));
        refuse_unknown(i, "optimizer", entry.optimizer, OptimizerSpec{entry.optimizer, {}}.known());
        const bool known = entry.declared_rank != kUnknownRank;
        const bool fits = (!known || entry.declared_rank <= kMaxRank) && entry.name_length <= kMaxMemberName &&
                          (entry.kind == kSparse || entry.kind == kDense ||
                           (entry.kind == kTable && known && entry.sum <= kFloat64)) &&
                          entry.components >= 1 && entry.components <= 2 &&
                          (entry.optimizer == kNoOptimizer || entry.sum <= kFloat64);
        const size_t rank = known ? entry.declared_rank : 0;
        if (!fits || words.size() - at < rank + name_words(entry) + number_words(entry) + table_words(entry))
            data_loss("its directory of members is out of range");
        MemberSpec member{entry.kind,      entry.dtype, entry.sum,    entry.components,
                          entry.reduction, {},          entry.lowest, entry.highest};
        member.optimizer.kind = entry.optimizer;
        if (known) {
            member.declared.emplace(rank);
            if (rank) std::memcpy(member.declared->data(), &words[at], rank * 8);
        }
        at += rank;
        if (entry.name_length)
            member.name.assign(reinterpret_cast<const char*>(&words[at]), entry.name_length);
        at += name_words(entry);
        if (number_words(entry)) std::memcpy(member.optimizer.numbers, &words[at], number_words(entry) * 8);
        at += number_words(entry);
        if (table_words(entry)) {
            std::memcpy(&member.table, &words[at], table_words(entry) * 8);
            const auto initial = static_cast<uint32_t>(std::min<uint64_t>(member.table.initial, UINT32_MAX));
            refuse_unknown(i, "initial contents", initial, is_named(kInitialNames, initial));
        }
        at += table_words(entry);
        member.set_round();
        if (entry.kind == kTable && !has_rows_of_known_size(member))
            data_loss("its directory of members is out of range");
        members.push_back(std::move(member));
    }
    if (at != words.size()) data_loss("its directory of members is too long");
    members.push_back(contributors_spec());
    return members;
}

}  // namespace shmacc
