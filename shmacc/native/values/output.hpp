// Memory for results, which the caller keeps or drops.
//
// A take of many rows mostly waits for page faults, so this asks for huge pages for large results. malloc keeps freed
// memory for the next take, but returns pieces of more than 32 MiB to the kernel, which zeroes their pages once more
// before the next take overwrites them. So the last few such pieces are kept here. The kernel is told that it may
// take their pages whenever it is short of memory (MADV_FREE), so other programs do not lack that memory.
//
// Nothing is kept where this would not help other users of memory: if the process's address space is limited (NumPy's
// next array needs it), if the kernel promises memory for all address space (strict overcommit), or if the kernel
// cannot take the pages (mlockall).
#pragma once

#include <malloc.h>
#include <sys/resource.h>

#include <mutex>

#include "base/mapping.hpp"

namespace shmacc {

// The pieces that this process keeps. A forked child has copies of them; if another thread held the lock at the fork,
// the child keeps and finds nothing.
class KeptMemory {
  public:
    static constexpr uint64_t kLarge = 32 << 20;  // malloc keeps no larger pieces (DEFAULT_MMAP_THRESHOLD_MAX)

    static KeptMemory& instance() {
        static KeptMemory* const kept = new KeptMemory;  // results may be dropped while the process exits
        return *kept;
    }
    // Takes out the last kept piece that has this size, or up to twice the size; null: there is none.
    void* find(uint64_t bytes) {
        const std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock) return nullptr;
        for (size_t age = 0; age < kPieces; ++age) {
            void*& piece = pieces_[(next_ + 2 * kPieces - 1 - age) % kPieces];
            const uint64_t size = piece ? malloc_usable_size(piece) : 0;
            if (size >= bytes && size / 2 <= bytes) return std::exchange(piece, nullptr);
        }
        return nullptr;
    }
    // Keeps a piece; frees the oldest one if there is no room. If the piece must not be kept, frees it and all other
    // pieces, since the limit that forbids it may be new.
    void keep(void* piece) {
        const std::unique_lock lock(mutex_, std::try_to_lock);
        if (!lock) return std::free(piece);
        if (!address_space_is_free() || !offer_to_kernel(piece)) {
            std::free(piece);
            free_pieces();
            return;
        }
        std::free(std::exchange(pieces_[next_], piece));
        next_ = (next_ + 1) % kPieces;
    }

    // Returns whether there was anything to free.
    bool free_all() {
        const std::unique_lock lock(mutex_, std::try_to_lock);
        return lock && free_pieces();
    }

  private:
    static constexpr size_t kPieces = 4;

    bool free_pieces() {
        bool any = false;
        for (void*& piece : pieces_) {
            any = any || piece;
            std::free(std::exchange(piece, nullptr));
        }
        return any;
    }
    static bool offer_to_kernel(void* piece) {
        const uint64_t begin = reinterpret_cast<uint64_t>(piece), end = begin + malloc_usable_size(piece);
        return madvise(reinterpret_cast<void*>(page_up(begin)), end / kPage * kPage - page_up(begin),
                       MADV_FREE) == 0;
    }
    // The answer is not cached: limits change, and a piece of this size costs milliseconds anyway.
    static bool address_space_is_free() {
        for (const auto resource : {RLIMIT_AS, RLIMIT_DATA}) {
            rlimit limit{};
            if (getrlimit(resource, &limit) != 0 || limit.rlim_cur != RLIM_INFINITY) return false;
        }
        constexpr char kStrict = '2';
        char policy = kStrict;  // assumed if the file cannot be read
        const Descriptor fd(::open("/proc/sys/vm/overcommit_memory", O_RDONLY | O_CLOEXEC));
        return fd && read(fd.get(), &policy, 1) == 1 && policy != kStrict;
    }

    std::mutex mutex_;
    void* pieces_[kPieces] = {};
    size_t next_ = 0;
};

// Memory for one result.
class Output {
  public:
    explicit Output(uint64_t bytes) : bytes_(bytes) {
        uint64_t size = std::max<uint64_t>(bytes, 1);
        if (bytes > KeptMemory::kLarge) {
            memory_.reset(KeptMemory::instance().find(bytes));
            if (memory_) return;
            size += size / 16;  // so a larger result can reuse it; untouched pages cost nothing
        }
        memory_.reset(allocate(size));
        if (!memory_ && KeptMemory::instance().free_all()) memory_.reset(allocate(size));
        if (!memory_) throw std::bad_alloc();
        constexpr uint64_t kHuge = 1 << 21;
        const uint64_t from = (reinterpret_cast<uint64_t>(memory_.get()) + kHuge - 1) / kHuge * kHuge;
        const uint64_t to = (reinterpret_cast<uint64_t>(memory_.get()) + bytes) / kHuge * kHuge;
        if (from < to) madvise(reinterpret_cast<void*>(from), to - from, MADV_HUGEPAGE);
    }
    // Keeps or frees released memory.
    static void drop(void* memory) {
        if (malloc_usable_size(memory) > KeptMemory::kLarge)
            KeptMemory::instance().keep(memory);
        else
            std::free(memory);
    }
    void* get() const { return memory_.get(); }
    void* release() { return memory_.release(); }
    uint64_t bytes() const { return bytes_; }

  private:
    struct Drop {
        void operator()(void* memory) const { drop(memory); }
    };

    // Large memory begins with a cache line, since it is written in whole lines (reduction.hpp).
    static void* allocate(uint64_t size) {
        constexpr uint64_t kLine = 64;
        return size >= KeptMemory::kLarge ? std::aligned_alloc(kLine, (size + kLine - 1) / kLine * kLine)
                                          : std::malloc(size);
    }

    uint64_t bytes_;
    std::unique_ptr<void, Drop> memory_;
};

}  // namespace shmacc
