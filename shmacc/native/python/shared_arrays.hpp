// Arrays in shared memory: segments of the kinds kArrays and kParameters.
//
// Such a segment gets its name, is attached and loses its name like any other (opening.hpp). It has one lane, in which
// nothing is ever accumulated. The Directory describes each array's name, dtype and shape like a dense member's; array
// m is at the front of member m's Rows0 region, in C order.
//
//   Invariant: a segment that has a name has all its arrays reserved, with the contents that they were made with or
//              what processes have written since.
//
// For this the arrays are reserved and written in a file without a name: a full /dev/shm, a signal handler that raises,
// or the death of the creator at any instant leaves nothing behind, and nobody sees an array that is half written.
// When a process dies, what it has written into shared arrays stays: nothing records what to undo. Parameters are
// written by updates alone (parameters/update.hpp). If the arrays cannot fit, none of them is reserved: to try would
// fill /dev/shm for other processes for a while, and make a container exceed its memory.
//
// No lock is taken. A NumPy array that was handed out is the mapping itself. The mapping lives for as long as the array
// or a view of it (numpy#23305), even if the handle, the descriptor or the name is gone. A process reserves an array
// once more before it maps it (mapping.hpp says why). If another program truncates the file, the next access ends in a
// SIGBUS: this cannot be prevented.
#pragma once

#include <map>
#include <memory>
#include <vector>

#include "python/handle.hpp"
#include "python/write_guard.hpp"

namespace shmacc {

// The bytes that an array occupies: whole pages, and at least one, since a mapping cannot be empty.
inline uint64_t reserved_for(uint64_t bytes) { return page_up(std::max<uint64_t>(bytes, 1)); }

// region: an index into kArrayRegions.
inline uint32_t region_of_array(const Config& config, uint32_t number, uint32_t region) {
    return first_region(config, 0) + kLaneRegions + number * kMemberRegions + kArrayRegions[region];
}

// The arrays of a segment that is being made.
class NewArrays {
  public:
    // given: for each member, in order, its regions as a list of (bytes, contents). Contents: None for zeros; if they
    // are shorter than the region, they are repeated.
    explicit NewArrays(const nb::list& given) : members_(given.size()) {
        for (uint32_t member = 0; member < members_; ++member) {
            uint32_t region = 0;
            for (const nb::handle item : nb::cast<nb::list>(given[member])) {
                const auto [bytes, contents] = unpacked<uint64_t, nb::object>(item);
                if (bytes > kRegionSpan || region >= std::size(kArrayRegions))
                    throw Error(Failure::kInvalidArgument,
                                "An array has more than 2**40 bytes, or two slots");
                Array& made = arrays_.emplace_back(Array{member, region++, bytes, nullptr});
                if (contents.is_none()) continue;
                made.contents = std::make_unique<ArrayBuffer<unsigned char>>(contents, 1);
                if (made.contents->size() > bytes || (made.contents->size() == 0 && bytes > 0))
                    throw Error(Failure::kInvalidArgument, "An array's contents have the wrong size");
            }
        }
    }

    size_t members() const { return members_; }
    std::vector<ArrayBytes> reserved() const {
        std::vector<ArrayBytes> reserved(members_);
        for (const Array& array : arrays_) reserved[array.member][array.region] = reserved_for(array.bytes);
        return reserved;
    }

    // Reserves all arrays, then writes them. If they do not fit, throws before it touches a page (or later, if others
    // take the room meanwhile). This takes long, so it runs without the GIL: the file has no name, so no other thread
    // finds it. If another thread forks meanwhile, the child inherits the descriptor, and with it the memory.
    void fill(const SegmentFile& file, const Config& config) const {
        uint64_t total = 0;
        for (const Array& array : arrays_) total += reserved_for(array.bytes);
        const std::string what = "the arrays have " + std::to_string(total) + " bytes in total";
        const struct statvfs space = space_of_directory();
        if (space.f_blocks && total > free_bytes(space))  // no blocks: /dev/shm has no limit (size=0)
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
        const auto region_of = [&](const Array& array) {
            return region_offset(region_of_array(config, array.member, array.region));
        };
        for (const Array& array : arrays_) {
            in_pieces(reserved_for(array.bytes), [&](uint64_t from, uint64_t bytes) {
                if (int failed = reserve_pieces(file.fd(), region_of(array) + from, bytes))
                    system_failure(what + ", and reserving", failed, left);
                left -= bytes;
                return bytes;
            });
        }
        for (const Array& array : arrays_) {
            if (!array.contents) continue;
            const uint64_t period = array.contents->size();
            in_pieces(array.bytes, [&](uint64_t from, uint64_t bytes) -> uint64_t {
                const ssize_t written = pwrite(file.fd(), array.contents->data() + from % period,
                                               std::min(bytes, period - from % period),
                                               static_cast<off_t>(region_of(array) + from));
                if (written < 0 && errno != EINTR) system_failure("Writing an array", errno);
                return written < 0 ? 0 : static_cast<uint64_t>(written);
            });
        }
    }

  private:
    struct Array {
        uint32_t member, region;
        uint64_t bytes;
        std::unique_ptr<ArrayBuffer<unsigned char>> contents;
    };
    static constexpr uint64_t kFilledAtOnce = 32 * kPiece;  // bytes filled between two checks for signals

    const size_t members_;
    std::vector<Array> arrays_;
};

// An array's memory in this process. Its constructor alone needs the file.
class ArrayMapping {
  public:
    // guarded: the guard of a read-only array; nullopt: the array is writable, or this process has no guard.
    ArrayMapping(const SegmentFile& file, uint32_t region, uint64_t bytes, bool writable,
                 std::optional<WriteGuard::Of> guarded)
        : bytes_(reserved_for(bytes)), writable_(writable) {
        file.check_open();
        reserve_in_file(file.fd(), region_offset(region), bytes_);
        base_ = writable ? mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd(),
                                static_cast<off_t>(region_offset(region)))
                         : map_private(nullptr, bytes_, file.fd(), region_offset(region));
        if (base_ == MAP_FAILED) mapping_failed(bytes_, errno);
        try {
            if (guarded) guard_.emplace(base_, bytes_, file, region_offset(region), std::move(*guarded));
        } catch (...) {
            unmap(base_, bytes_);
            throw;
        }
    }
    ~ArrayMapping() {
        guard_.reset();
        unmap(base_, bytes_);
    }
    ArrayMapping(const ArrayMapping&) = delete;
    ArrayMapping& operator=(const ArrayMapping&) = delete;
    void* base() const { return base_; }

    // at_once: see MappedArrays. Returns false if there is no guard, and the private copies cannot be made.
    bool release(bool at_once) {
        if (guard_) guard_->release(at_once);
        if (guard_ || writable_) return true;
        return at_once ? mprotect(base_, bytes_, PROT_READ | PROT_WRITE) == 0 : make_own(base_, bytes_);
    }

  private:
    const uint64_t bytes_;
    const bool writable_;
    void* base_;
    std::optional<WriteGuard> guard_;
};

// The arrays of a handle's segment, as NumPy arrays.
class MappedArrays {
  public:
    // dtypes: each array's NumPy dtype. Throws DataLossError unless there is room in the segment for all arrays.
    MappedArrays(nb::object handle, const nb::list& dtypes, bool writable)
        : object_(std::move(handle)), handle_(nb::cast<Handle&>(object_)), writable_(writable) {
        OpenSegment& segment = handle_.intact();
        if (!has_arrays(segment.config().kind) || dtypes.size() != segment.config().members)
            throw Error(Failure::kInvalidArgument, "The segment has no such arrays");
        need_numpy();
        uint64_t reserved = 0;
        for (uint32_t i = 0; i < dtypes.size(); ++i) {
            if (!PyArray_DescrCheck(dtypes[i].ptr())) throw nb::type_error("this is no dtype");
            const MemberSpec& spec = (*segment.specs())[i];
            if (spec.kind == kTable) continue;
            if (spec.kind != kDense || !spec.round) data_loss("an array's shape is not known");
            Dims dims = *spec.round;
            const SlotShape slots = slots_of(spec.optimizer, dims);
            for (uint32_t region = 0; region <= slots.count; ++region) {
                if (region == 1 && slots.rowwise && !dims.empty()) dims.pop_back();
                arrays_[{i, region}] = {dtypes[i], dims, size_of(dims, dtypes[i]), nullptr};
                reserved += reserved_for(arrays_[{i, region}].bytes);
            }
        }
        if (reserved > segment.file().occupied())
            data_loss("its arrays are larger than what the segment occupies");
    }

    // Returns an ndarray, which keeps its memory mapped and `keeper` alive. slot: 0 for the array itself, 1 or 2 for a
    // slot of its optimizer.
    nb::object array(uint32_t number, nb::object keeper, uint32_t slot) {
        if (!writable_) {
            guarded_ = stand_guard();
            handle_.check_writes();
        }
        const OpenSegment::Use segment = handle_.attached();
        const auto found = arrays_.find({number, slot});
        if (found == arrays_.end()) throw Error(Failure::kInvalidArgument, "The segment has no such array");
        const Array& array = found->second;
        std::shared_ptr<ArrayMapping> mapping = array.mapping;
        if (!mapping) mapping = map(*segment, found->first);
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

    // Allows writes to read-only arrays from now on. The first write turns all of them into private copies of this
    // process. at_once: no process changes the arrays any more, so a write need turn only its own page into a private
    // copy. Without a guard, all arrays become private copies here; throws if that fails.
    void release(bool at_once) {
        for (auto& [place, array] : arrays_)
            if (array.mapping && !array.mapping->release(at_once))
                throw Error(Failure::kResourceExhausted, std::string("The arrays") + kNoCopy);
    }
    // Drops the mappings; arrays that were handed out keep theirs.
    void forget() {
        for (auto& [place, array] : arrays_) array.mapping.reset();
    }

  private:
    using Place = std::pair<uint32_t, uint32_t>;  // an array's number, and an index into kArrayRegions
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

    // Bounds the other dimensions even if one is 0, as NumPy does.
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

    // Runs without the GIL, since reserving much takes long. Meanwhile another thread may map the same array, or close
    // the handle.
    std::shared_ptr<ArrayMapping> map(OpenSegment& segment, const Place& place) {
        Array& array = arrays_[place];
        const Config& config = segment.config();
        std::optional<WriteGuard::Of> guarded;
        if (!writable_ && guarded_) guarded = WriteGuard::Of{this, name(segment, place), handle_.spoiled()};
        std::shared_ptr<ArrayMapping> made;
        {
            WithoutGil released;
            made = std::make_shared<ArrayMapping>(segment.file(),
                                                  region_of_array(config, place.first, place.second),
                                                  array.bytes, writable_, std::move(guarded));
        }
        if (array.mapping) return array.mapping;
        if (!handle_.closed()) array.mapping = made;
        return made;
    }

    static std::string name(const OpenSegment& segment, const Place& place) {
        const Config& config = segment.config();
        return "Array '" + (*segment.specs())[place.first].name + "' of " +
               (config.kind == kParameters ? "parameters '" : "shared arrays '") + name_of(config) + "'";
    }

    const nb::object object_;
    Handle& handle_;
    const bool writable_;
    bool guarded_ = false;
    std::map<Place, Array> arrays_;
};

}  // namespace shmacc
