// The copy of a round that a take hands out. Sums are reduced into the caller's memory before the round is consumed; a
// member's sums in several lanes are added up in the order of the lanes.
#pragma once

#include <optional>

#include "accumulators/dense_sums.hpp"
#include "accumulators/sparse_sums.hpp"
#include "segment/operation.hpp"
#include "values/columns.hpp"
#include "values/merge.hpp"
#include "values/output.hpp"

namespace shmacc {

// A member's part of a round, without values.
struct MemberInRound {
    uint32_t number;
    int64_t count;  // gradients that had the member
    int64_t weight;  // their weight
    Dims dims;
};

struct TakenMember : MemberInRound {
    uint64_t rows;
    Output indices, values, contributions;
};

struct Taken {
    uint64_t serial;  // the serial of the round that the take opened; 0: it opened none
    uint64_t half_updated;  // Config::token of the parameters if the round's update has begun and is unfinished; else 0
    int64_t count;  // of gradients, which may be more than were required (tensorflow#24005)
    int64_t weight;
    int64_t step;
    uint64_t timeline;  // RoundState::restores
    std::vector<TakenMember> members;
    std::vector<Columns> shards;  // a divided round's row numbers and values, which its TakenMembers lack
    uint64_t contributor_count;
    Output contributors;
};

struct TakeRequest {
    int64_t num_required;
    int64_t at_least;  // this many are enough at the deadline (tensorflow#41430)
    int64_t deadline;
    const Division* division;  // how members are divided among shards; null: they are not
    bool advance_step;  // if not, the take hands out a partial: sums that are not reduced
    bool seal;
    bool hold;  // opens the round instead of consuming it
    bool raise_departures;  // throws when workers are gone, instead of waiting on
    ThreadNumber loop_thread;  // the thread that the round is opened for (OwnRound); kNoThread: the calling thread
};

// A sparse member's sums in each lane.
template <class Combine>
class LaneSums {
    using T = typename Combine::Number;

  public:
    explicit LaneSums(std::vector<Member>& in_lanes) : in_lanes_(in_lanes) {
        std::vector<RowSource<T>> sources;
        for (Member& member : in_lanes) {
            // Proves the sizes that the segment claims, before memory is allocated for them.
            const uint64_t count = member.state.rows;
            const RowPlace* places = member.array<RowPlace>(kPlaces, count);
            const T* rows = member.array<T>(kRows0, count * member.state.row_elements);
            if (in_lanes.size() > 1 && count > 0)
                sources.push_back(
                    {&places->row, &places->contributions, sizeof(RowPlace) / sizeof(int64_t), rows, count});
        }
        if (in_lanes.size() > 1) merge_.emplace(std::move(sources), in_lanes[0].state.row_elements);
    }
    uint64_t rows() const { return merge_ ? merge_->rows() : in_lanes_[0].state.rows; }

    // Writes all rows, reduced, in ascending order. Returns false if a result does not fit.
    bool read(RowTargets<T>& to, const Reduce& reduce) {
        return merge_ ? merge_->read(to, reduce) : SparseSums<Combine>(in_lanes_[0]).read(to, reduce);
    }

  private:
    std::vector<Member>& in_lanes_;
    std::optional<Merge<Combine>> merge_;
};

// What a take will hand out, and numbers that tell whether the round has changed since. Needs all lanes' locks.
class RoundCopy {
  public:
    // heads: another take is the head of the queue and the round belongs to it, so this take gets nothing.
    RoundCopy(AllLanesSession& session, const MemberSpecs& specs, const TakeRequest& request, bool heads)
        : taken{0, 0, 0, 0, session.state.step, session.state.restores, {}, {}, 0, Output(0)},
          nothing_(heads), round_(session.state.round), applied_(session.applied()) {
        if (heads || session.count() == 0) return;
        taken.count = session.count();
        taken.weight = session.weight();
        const auto members = static_cast<uint32_t>(specs.size()) - 1;
        std::optional<ColumnsWriter> columns;
        if (request.division) columns.emplace(room_of(session, specs, *request.division));
        for (uint32_t number = 0; number < members; ++number) {
            std::vector<Member> in_lanes = session.in_lanes(number);
            if (in_lanes.empty()) continue;
            const bool fits = with_sums(specs[number], [&](auto sums) {
                return read<decltype(sums)>(in_lanes, specs[number], request, columns);
            });
            if (!fits) does_not_fit(specs, number, request.advance_step);
        }
        if (columns) taken.shards = columns->written();
        std::vector<Member> in_lanes = session.in_lanes(members);
        if (in_lanes.empty()) return;
        LaneSums<Add<float>> set(in_lanes);
        taken.contributor_count = set.rows();
        taken.contributors = Output(set.rows() * sizeof(int64_t));
        Output ones(set.rows() * sizeof(int64_t)), none(0);
        read_rows(set, taken.contributors, none, ones, 0, not_reduced());
    }

    // Whether the copy is still right: each change of a round changes its number, `applied`, or the step (set_step).
    bool is_of(const AllLanesSession& session, bool heads) const {
        return nothing_ == heads && round_ == session.state.round && applied_ == session.applied() &&
               taken.step == session.state.step;
    }
    // Whether the round belongs to another take.
    bool nothing() const { return nothing_; }
    uint64_t bytes() const {
        uint64_t bytes = taken.contributors.bytes();
        for (const TakenMember& member : taken.members)
            bytes += member.indices.bytes() + member.values.bytes() + member.contributions.bytes();
        for (const Columns& shard : taken.shards)
            bytes += shard.numbers.bytes() + shard.values.bytes() + shard.counts.bytes();
        return bytes;
    }

    Taken taken;

  private:
    template <class Combine>
    bool read(std::vector<Member>& in_lanes, const MemberSpec& spec, const TakeRequest& request,
              std::optional<ColumnsWriter>& columns) {
        using T = typename Combine::Number;
        Member& first = in_lanes[0];
        MemberInRound sum{first.number(), 0, 0, {}};
        for (const Member& member : in_lanes) {
            sum.count = added(sum.count, member.state.count);
            sum.weight = added(sum.weight, member.state.weight);
            if (member.state.row_elements != first.state.row_elements)
                data_loss("its lanes' shapes disagree");
        }
        if (sum.weight <= 0 || taken.weight < sum.weight) data_loss("its weights disagree");
        sum.dims = round_dims(first);
        const Reduce reduce = request.advance_step ? reduce_by(spec, sum.weight, taken.weight) : not_reduced();
        const uint64_t width = first.state.row_elements;
        const PartHeader line{sum.number, sum.count, sum.weight, 0};
        TakenMember& out = taken.members.emplace_back(
            TakenMember{std::move(sum), 0, Output(0), Output(0), Output(0)});
        if (spec.kind == kSparse) {
            LaneSums<Combine> sums(in_lanes);
            if (columns)
                return columns->write_rows<T>(line, width,
                                              [&](RowTargets<T>& to) { return sums.read(to, reduce); });
            out.rows = sums.rows();
            out.indices = Output(out.rows * sizeof(int64_t));
            out.contributions = Output(out.rows * sizeof(int64_t));
            out.values = Output(out.rows * first.row_bytes());
            return read_rows(sums, out.indices, out.values, out.contributions, width, reduce);
        }
        std::vector<const T*> arrays;  // their sizes are proved before memory is allocated
        for (Member& member : in_lanes) arrays.push_back(DenseSums<Combine>(member).sums());
        if (columns)
            return divide<Combine>(*columns, line, arrays, *request.division, spec.components, width, reduce);
        out.values = Output(width * sizeof(T));
        return Merge<Combine>::reduce_arrays(static_cast<T*>(out.values.get()), arrays, width, reduce);
    }
    template <class Combine>
    static bool read_rows(LaneSums<Combine>& sums, Output& rows, Output& values, Output& counts,
                          uint64_t width, const Reduce& reduce) {
        using T = typename Combine::Number;
        const uint64_t row_bytes = width * sizeof(T);
        RowTargets<T> to({{static_cast<int64_t*>(rows.get()), static_cast<int64_t*>(counts.get()),
                           static_cast<T*>(values.get()), sums.rows()}},
                         is_streamed(values.get(), sums.rows() * row_bytes, row_bytes));
        return sums.read(to, reduce);
    }
    // Reduces a dense member, and writes each shard's run of elements into that shard's columns.
    template <class Combine, class T = typename Combine::Number>
    static bool divide(ColumnsWriter& columns, PartHeader line, std::vector<const T*> arrays,
                       const Division& division, uint32_t components, uint64_t numbers, const Reduce& reduce) {
        bool fits = true;
        const auto member = static_cast<uint32_t>(line.number);
        for (uint32_t shard = 0; shard < division.shards; ++shard) {
            const auto [begin, end] = division.run(member, shard, numbers / components);
            line.length = static_cast<int64_t>(end - begin);
            T* const out = columns.elements<T>(shard, line, components);
            const uint64_t count = (end - begin) * components;
            fits = Merge<Combine>::reduce_arrays(out, arrays, count, reduce) && fits;
            for (const T*& array : arrays) array += count;
        }
        return fits;
    }
    // Returns the room that each shard's columns need. A row that several lanes have counts once for each.
    static std::vector<ColumnsRoom> room_of(AllLanesSession& session, const MemberSpecs& specs,
                                            const Division& division) {
        std::vector<ColumnsRoom> rooms(division.shards);
        for (uint32_t number = 0; number + 1 < specs.size(); ++number) {
            std::vector<Member> in_lanes = session.in_lanes(number);
            if (in_lanes.empty()) continue;
            const uint64_t row_bytes = in_lanes[0].row_bytes();
            if (specs[number].kind == kSparse) {
                std::vector<uint64_t> rows(division.shards);
                for (Member& member : in_lanes) {
                    // Proves the sizes that the segment claims, before memory is allocated for them.
                    const RowPlace* const places = member.array<RowPlace>(kPlaces, member.state.rows);
                    if (member.row_bytes() != row_bytes) data_loss("its lanes' shapes disagree");
                    member.array<unsigned char>(kRows0, member.state.rows * row_bytes);
                    for (uint64_t i = 0; i < member.state.rows; ++i)
                        ++rows[shard_of(places[i].row, division.shards)];
                }
                for (uint32_t shard = 0; shard < division.shards; ++shard) {
                    rooms[shard].rows += rows[shard];
                    rooms[shard].add_part(rows[shard] * row_bytes);
                }
            } else {
                const uint64_t elements = in_lanes[0].state.row_elements / specs[number].components;
                const uint64_t element_bytes = elements ? row_bytes / elements : 0;
                for (uint32_t shard = 0; shard < division.shards; ++shard) {
                    const auto [begin, end] = division.run(number, shard, elements);
                    rooms[shard].add_part((end - begin) * element_bytes);
                }
            }
        }
        return rooms;
    }

    // A partial has 64-bit sums, as each lane has: only adding up several lanes can exceed them.
    [[noreturn]] static void does_not_fit(const MemberSpecs& specs, uint32_t number, bool reduced) {
        const Error error(
            Failure::kOutOfRange,
            reduced ? "A result does not fit the accumulator's dtype; the round stays as it is, and "
                      "take_partial hands out its 64-bit sums"
                    : "The 64-bit sums of the lanes do not add up to one of 64 bits; the round stays as it "
                      "is, until advance_step drops it or restore replaces it (with one lane the apply that "
                      "makes a sum too large is refused)");
        throw specs[number].name.empty() ? error : error.of_member(specs[number].name);
    }

    bool nothing_;
    uint64_t round_, applied_;
};

}  // namespace shmacc
