// Arrays in shared memory: segments of the kind kArrays.
//
// Such a segment gets its name, is attached and loses its name like any other (opening.hpp). It has one lane,
// in which nothing is ever accumulated. The Directory has each array's name, dtype and shape as those of a
// dense member; array m is the front of member m's Rows0 region, in C order.
//
//   Invariant: where there is a name, all arrays are reserved, and have the contents that they were made with
//              or what processes have written since.
//
// That holds because they are reserved and written in a file without a name: a full /dev/shm, a signal handler that
// raises, and the death of the creator at any instant leave nothing, and nobody sees an array that is half
// written. What a process has written when it dies, stays: there is nothing to undo it by. What cannot fit is refused
// before any of it is reserved: on the way to the refusal other processes would find /dev/shm full, and a
// container would exceed its memory.
//
// No lock is taken. A NumPy array that was handed out is the mapping itself, which lives for as long as the
// array or a view of it does, whatever becomes of the handle, of the descriptor, of the name. A process reserves
// an array once more before it maps it (mapping.hpp says why). What cannot be prevented is the SIGBUS at the
// next access after another program has truncated the file.
#pragma once

#include <memory>
#include <vector>

#include "python/handle.hpp"

namespace shmacc {

// What an array occupies. One without elements has a page as well: a mapping is not empty.
inline uint64_t reserved_for(uint64_t bytes) { return page_up(std::max<uint64_t>(bytes, 1)); }

inline uint32_t region_of_array(const Config& config, uint32_t number) {
    return first_region(config, 0) + kLaneRegions + number * kMemberRegions + kRows0;
}

// The arrays of a segment that is being made.
class NewArrays {
  public:
    // In order of the members: how many bytes each has, and these bytes, or None for zeros.
    explicit NewArrays(const nb::list& given) {
        for (const nb::handle item : given) {
            const auto [bytes, contents] = nb::cast<std::tuple<uint64_t, nb::object>>(item);
            if (bytes > kRegionSpan)
                throw Error(Failure::kInvalidArgument, "An array has more than 2**40 bytes");
            Array& made = arrays_.emplace_back(Array{bytes, nullptr});
            if (contents.is_none()) continue;
            made.contents = std::make_unique<ArrayBuffer<unsigned char>>(contents, 1);
            if (made.contents->size() != bytes)
                throw Error(Failure::kInvalidArgument, "An array's contents have the wrong size");
        }
    }

    size_t size() const { return arrays_.size(); }
    std::vector<uint64_t> reserved() const {
        std::vector<uint64_t> reserved;
        for (const Array& array : arrays_) reserved.push_back(reserved_for(array.bytes));
        return reserved;
    }

    // Reserves all of them, and then writes them: if they do not fit, that is known first, before a page is touched
    // unless others take the room meanwhile. Without the GIL, since
    // it takes long: no other thread finds the file, which has no name. A child that one of them forks meanwhile
    // inherits the descriptor, and with it the memory, like any other.
    void fill(const SegmentFile& file, const Config& config) const {
        uint64_t total = 0;
        for (const uint64_t bytes : reserved()) total += bytes;
        const std::string what = "the arrays have " + std::to_string(total) + " bytes in total";
        const struct statvfs space = space_of_directory();
        if (space.f_blocks && total > free_bytes(space))  // without blocks it has no limit (size=0)
            shared_memory_full(what, total, space);
        WithoutGil released;
        uint64_t unchecked = 0, left = total;
        const auto in_pieces = [&](uint64_t bytes, auto act) {
            for (uint64_t from = 0; from < bytes;) {
                file.check_open();
                const uint64_t piece = act(from, std::min(bytes - from, kFilledAtOnce));
                from += piece;
                if ((unchecked += piece) < kFilledAtOnce) continue;
                unchecked = 0;
                released.check_signals();
            }
        };
        for (uint32_t i = 0; i < arrays_.size(); ++i) {
            const uint64_t region = region_offset(region_of_array(config, i));
            in_pieces(reserved_for(arrays_[i].bytes), [&](uint64_t from, uint64_t bytes) {
                if (int failed = reserve_pieces(file.fd(), region + from, bytes))
                    system_failure(what + ", and reserving", failed, left);
                left -= bytes;
                return bytes;
            });
        }
        for (uint32_t i = 0; i < arrays_.size(); ++i) {
            if (!arrays_[i].contents) continue;
            const uint64_t region = region_offset(region_of_array(config, i));
            in_pieces(arrays_[i].bytes, [&](uint64_t from, uint64_t bytes) -> uint64_t {
                const ssize_t written = pwrite(file.fd(), arrays_[i].contents->data() + from, bytes,
                                               static_cast<off_t>(region + from));
                if (written < 0 && errno != EINTR) system_failure("Writing an array", errno);
                return written < 0 ? 0 : static_cast<uint64_t>(written);
            });
        }
    }

  private:
    struct Array {
        uint64_t bytes;
        std::unique_ptr<ArrayBuffer<unsigned char>> contents;
    };
    static constexpr uint64_t kFilledAtOnce = 32 * kPiece;  // between two looks for signals

    std::vector<Array> arrays_;
};

// An array's memory in this process. It needs the file only to be made.
class ArrayMapping {
  public:
    ArrayMapping(const SegmentFile& file, uint32_t region, uint64_t bytes, bool writable)
        : bytes_(reserved_for(bytes)) {
        file.check_open();
        reserve_in_file(file.fd(), region_offset(region), bytes_);
        base_ = mmap(nullptr, bytes_, writable ? PROT_READ | PROT_WRITE : PROT_READ, MAP_SHARED, file.fd(),
                     static_cast<off_t>(region_offset(region)));
        if (base_ == MAP_FAILED)
            throw Error(Failure::kResourceExhausted,
                        "Mapping " + std::to_string(bytes_) +
                            " bytes of the segment failed: " + std::strerror(errno));
    }
    ~ArrayMapping() { munmap(base_, bytes_); }
    ArrayMapping(const ArrayMapping&) = delete;
    ArrayMapping& operator=(const ArrayMapping&) = delete;
    void* base() const { return base_; }

  private:
    const uint64_t bytes_;
    void* base_;
};

// The arrays that a handle's segment has, as NumPy's.
class MappedArrays {
  public:
    // dtypes: NumPy's, of each array. Throws DataLossError unless there is room in the segment for all of them.
    MappedArrays(nb::object handle, const nb::list& dtypes, bool writable)
        : object_(std::move(handle)), handle_(nb::cast<Handle&>(object_)), writable_(writable) {
        OpenSegment& segment = handle_.intact();
        if (segment.config().kind != kArrays || dtypes.size() != segment.config().members)
            throw Error(Failure::kInvalidArgument, "The segment has no such arrays");
        need_numpy();
        uint64_t reserved = 0;
        for (uint32_t i = 0; i < dtypes.size(); ++i) {
            if (!PyArray_DescrCheck(dtypes[i].ptr())) throw nb::type_error("this is no dtype");
            const MemberSpec& spec = (*segment.specs())[i];
            if (spec.kind != kDense || !spec.round) data_loss("an array's shape is not known");
            arrays_.push_back({dtypes[i], *spec.round, size_of(*spec.round, dtypes[i]), nullptr});
            reserved += reserved_for(arrays_.back().bytes);
        }
        if (reserved > static_cast<uint64_t>(segment.file().status().st_blocks) * 512)
            data_loss("its arrays are larger than what the segment occupies");
    }

    // An ndarray, which keeps its memory mapped, and `keeper` alive.
    nb::object array(uint32_t number, nb::object keeper) {
        const OpenSegment::Use segment = handle_.attached();
        if (number >= arrays_.size()) throw Error(Failure::kInvalidArgument, "The segment has no such array");
        const Array& array = arrays_[number];
        std::shared_ptr<ArrayMapping> mapping = array.mapping;
        if (!mapping) mapping = map(*segment, number);
        std::vector<npy_intp> dims(array.dims.begin(), array.dims.end());
        nb::object made = nb::steal(
            PyArray_NewFromDescr(&PyArray_Type,
                                 reinterpret_cast<PyArray_Descr*>(nb::object(array.dtype).release().ptr()),
                                 static_cast<int>(dims.size()), dims.data(), nullptr, mapping->base(),
                                 writable_ ? NPY_ARRAY_CARRAY : NPY_ARRAY_CARRAY_RO, nullptr));
        if (!made) throw nb::python_error();
        auto base = std::make_unique<Base>(Base{std::move(mapping), std::move(keeper)});
        PyObject* const capsule = PyCapsule_New(base.get(), nullptr, [](PyObject* object) {
            delete static_cast<Base*>(PyCapsule_GetPointer(object, nullptr));
        });
        if (!capsule) throw nb::python_error();
        base.release();
        if (PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(made.ptr()), capsule) < 0)
            throw nb::python_error();
        return made;
    }

    // Arrays that were handed out keep what they need.
    void forget() {
        for (Array& array : arrays_) array.mapping.reset();
    }

  private:
    struct Array {
        nb::object dtype;
        Dims dims;
        uint64_t bytes;
        std::shared_ptr<ArrayMapping> mapping;  // from the first use on, until the handle is closed
    };
    struct Base {
        std::shared_ptr<ArrayMapping> mapping;
        nb::object keeper;
    };

    // NumPy, too, bounds the dimensions next to one of 0.
    static uint64_t size_of(const Dims& dims, nb::handle dtype) {
        auto bytes = static_cast<uint64_t>(PyDataType_ELSIZE(reinterpret_cast<PyArray_Descr*>(dtype.ptr())));
        bool empty = false;
        for (const int64_t dim : dims) {
            empty |= dim == 0;
            const uint64_t factor = std::max<uint64_t>(static_cast<uint64_t>(dim), 1);
            if (factor > kRegionSpan / std::max<uint64_t>(bytes, 1))
                data_loss("an array's size is out of range");
            bytes *= factor;
        }
        return empty ? 0 : bytes;
    }

    // Without the GIL: reserving much takes long. Another thread may do the same meanwhile, or close the
    // handle.
    std::shared_ptr<ArrayMapping> map(OpenSegment& segment, uint32_t number) {
        std::shared_ptr<ArrayMapping> made;
        {
            WithoutGil released;
            made = std::make_shared<ArrayMapping>(segment.file(), region_of_array(segment.config(), number),
                                                  arrays_[number].bytes, writable_);
        }
        Array& array = arrays_[number];
        if (array.mapping) return array.mapping;
        if (!handle_.closed()) array.mapping = made;
        return made;
    }

    const nb::object object_;
    Handle& handle_;
    const bool writable_;
    std::vector<Array> arrays_;
};

}  // namespace shmacc
