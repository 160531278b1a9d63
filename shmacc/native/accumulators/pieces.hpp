// Reduces pieces of several hosts' rounds like one round. Each shard of shmacc.ray does this.
//
// Pieces come from other processes, and are checked before use: a wrong piece is an error, and never a read outside its
// memory. Pieces are read in place, and their sums are written once.
#pragma once

#include "protocol/round_shape.hpp"
#include "values/columns.hpp"
#include "values/merge.hpp"

namespace shmacc {

struct Piece {
    const PartHeader* parts;
    uint64_t lines;
    const int64_t* numbers;
    const int64_t* counts;
    uint64_t rows;
    const unsigned char* values;
    uint64_t bytes;
    int64_t count;  // number of the host's gradients
    int64_t weight;  // their weight
};

// Reads a piece, member after member. The piece must outlive the reader.
class PieceReader {
  public:
    PieceReader(const MemberSpecs& specs, const Piece& piece)
        : specs_(specs), piece_(piece), parts_(piece.parts, piece.parts + piece.lines) {
        check_table();
        uint64_t row = 0, byte = 0;
        for (const PartHeader& line : parts_) {
            const MemberSpec& spec = specs[static_cast<size_t>(line.number)];
            const auto length = static_cast<uint64_t>(line.length);
            const uint64_t width = row_bytes(spec);
            byte = part_up(byte);
            if (byte > piece.bytes || (width && length > (piece.bytes - byte) / width)) wrong_values();
            byte += length * width;
            if (spec.kind != kSparse) continue;
            if (length > piece.rows - row) wrong_rows();
            check_rows(line, spec, row);
            row += length;
        }
        if (row != piece.rows) wrong_rows();
        if (byte != piece.bytes) wrong_values();
    }

    // Returns the header of a member's part; null: the piece has no such part. Ask in ascending order of members.
    const PartHeader* find(uint32_t number) const {
        const bool is_here = line_ < parts_.size() && parts_[line_].number == number;
        return is_here ? &parts_[line_] : nullptr;
    }
    // Returns the rows or elements of the member that find() returned last. Call it once per member.
    template <class T>
    RowSource<T> next() {
        const PartHeader& line = parts_[line_++];
        const MemberSpec& spec = specs_[static_cast<size_t>(line.number)];
        const auto length = static_cast<uint64_t>(line.length);
        byte_ = part_up(byte_);
        const auto* const values = reinterpret_cast<const T*>(piece_.values + byte_);
        byte_ += length * row_bytes(spec);
        if (spec.kind != kSparse) return {nullptr, nullptr, 1, values, length};
        const uint64_t row = row_;
        row_ += length;
        return {piece_.numbers + row, piece_.counts + row, 1, values, length};
    }

    // Bytes of a sparse member's row, or of a dense member's element.
    static uint64_t row_bytes(const MemberSpec& spec) {
        const uint64_t numbers = spec.kind == kSparse ? product(dims_of(spec)) : 1;
        return numbers * spec.components * spec.number_bytes();
    }
    static const Dims& dims_of(const MemberSpec& spec) {
        if (!spec.round)
            throw Error(Failure::kInvalidArgument, "Its shape is not declared").of_member(spec.name);
        return *spec.round;
    }

  private:
    void check_table() const {
        int64_t last = -1;
        for (const PartHeader& line : parts_) {
            bool fits = line.number > last && static_cast<uint64_t>(line.number) + 1 < specs_.size() &&
                        line.count >= 1 && line.count <= piece_.count && line.weight >= line.count &&
                        line.weight <= piece_.weight && line.length >= 1;
            if (fits) {
                const MemberSpec& spec = specs_[static_cast<size_t>(line.number)];
                fits = spec.kind == kSparse || static_cast<uint64_t>(line.length) == product(dims_of(spec));
            }
            if (!fits)
                throw Error(Failure::kInvalidArgument,
                            "A piece's headers must have ascending numbers of the group's members, counts "
                            "from 1 to " +
                                std::to_string(piece_.count) + ", weights from these to " +
                                std::to_string(piece_.weight) + ", and members' lengths");
            last = line.number;
        }
    }
    void check_rows(const PartHeader& line, const MemberSpec& spec, uint64_t begin) const {
        const int64_t declared = spec.declared_rows(), most = declared < 0 ? INT64_MAX : declared - 1;
        int64_t last = -1;
        for (uint64_t i = begin; i < begin + static_cast<uint64_t>(line.length); ++i) {
            const int64_t row = piece_.numbers[i], count = piece_.counts[i];
            if (row <= last || row > most || count < 1 || count > line.weight)
                throw Error(Failure::kInvalidArgument,
                            "The numbers of a piece's rows must ascend from 0 to below " +
                                (declared < 0 ? "2**63" : std::to_string(declared)) +
                                ", and their counts be from 1 to " + std::to_string(line.weight))
                    .of_member(spec.name);
            last = row;
        }
    }
    [[noreturn]] static void wrong_rows() {
        throw Error(Failure::kInvalidArgument, "A piece's rows do not fit its headers");
    }
    [[noreturn]] static void wrong_values() {
        throw Error(Failure::kInvalidArgument, "A piece has more or fewer values than its rows need");
    }

    const MemberSpecs& specs_;
    const Piece piece_;
    std::vector<PartHeader> parts_;  // a copy, since others might change the original after the check
    uint64_t line_ = 0, row_ = 0, byte_ = 0;
};

class ReducedPieces {
  public:
    // count, weight: of all gradients in the round, including those that have nothing in the pieces.
    ReducedPieces(const MemberSpecs& specs, int64_t count, int64_t weight)
        : specs_(specs), count_(count), weight_(weight) {}

    // Adds up the pieces, in their order, and reduces the sums.
    Columns of(const std::vector<Piece>& pieces) {
        ColumnsRoom room;
        for (const Piece& piece : pieces) {
            readers_.emplace_back(specs_, piece);
            room.rows += piece.rows;
            room.add_part(piece.bytes + piece.lines * kPartAlignment);
        }
        ColumnsWriter writer({room});
        for (uint32_t number = 0; number + 1 < specs_.size(); ++number) {
            PartHeader sum{number, 0, 0, 0};
            std::vector<PieceReader*> own;
            for (PieceReader& reader : readers_)
                if (const PartHeader* const line = reader.find(number)) {
                    add(sum, *line);
                    own.push_back(&reader);
                }
            if (own.empty()) continue;
            const MemberSpec& spec = specs_[number];
            if (!with_sums(spec, [&](auto sums) { return reduce<decltype(sums)>(writer, sum, own); }))
                throw Error(Failure::kOutOfRange, "A result does not fit the accumulator's dtype")
                    .of_member(spec.name);
        }
        return std::move(writer.written()[0]);
    }

  private:
    void add(PartHeader& sum, const PartHeader& line) const {
        if (__builtin_add_overflow(sum.count, line.count, &sum.count) ||
            __builtin_add_overflow(sum.weight, line.weight, &sum.weight) || sum.count > count_ ||
            sum.weight > weight_)
            throw Error(Failure::kInvalidArgument, "Pieces of more gradients than the round has")
                .of_member(specs_[static_cast<size_t>(line.number)].name);
        sum.length = line.length;  // used for a dense member only
    }
    // Reduces one member. Returns false if a result does not fit.
    template <class Combine>
    bool reduce(ColumnsWriter& writer, const PartHeader& sum, const std::vector<PieceReader*>& own) const {
        using T = typename Combine::Number;
        const MemberSpec& spec = specs_[static_cast<size_t>(sum.number)];
        const Reduce reduce = reduce_by(spec, sum.weight, weight_);
        std::vector<RowSource<T>> sources;
        for (PieceReader* const reader : own) sources.push_back(reader->next<T>());
        if (spec.kind == kSparse) {
            const uint64_t width = PieceReader::row_bytes(spec) / sizeof(T);
            Merge<Combine> merge(std::move(sources), width);
            return writer.write_rows<T>(sum, width, [&](RowTargets<T>& to) { return merge.read(to, reduce); });
        }
        std::vector<const T*> arrays;
        for (const RowSource<T>& source : sources) arrays.push_back(source.rows);
        T* const out = writer.elements<T>(0, sum, spec.components);
        return Merge<Combine>::reduce_arrays(out, arrays, static_cast<uint64_t>(sum.length) * spec.components,
                                             reduce);
    }

    const MemberSpecs& specs_;
    const int64_t count_, weight_;
    std::vector<PieceReader> readers_;
};

}  // namespace shmacc
