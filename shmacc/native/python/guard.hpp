// Writes to read-only arrays raise an exception, where the kernel would end the process.
//
// NumPy refuses to write to such an array. torch has no read-only tensors, so an optimizer's step, load_state_dict,
// nn.init or an embedding with max_norm writes to the memory, which raises SIGSEGV. Three ways were tried:
//
//   - Give the process writable private copies of the pages, and check torch's version counters later. But tensor.data
//     and numpy() write without counting, and until the check the process trains on contents that only it has.
//   - Let a signal handler name the array before the process dies. But the program is lost.
//   - Both together, as here. The handler makes the array's pages private and writable, so the write succeeds, in
//     pages of this process alone. It also asks the interpreter to raise an exception as soon as it can: in the
//     main thread that is right after the call that wrote. `check_writes` then drops the private pages, so the
//     array is the shared one again, and read-only.
//
// For this, read-only arrays are mapped MAP_PRIVATE. In Linux a private page that was never written is the file's page
// and shows what others write, like MAP_SHARED; a written page becomes this process's own, and MADV_DONTNEED turns it
// back into the file's page. This needs no descriptor, so it also works after `close`.
//
// The signal is synchronous: the interrupted code is a store into an array, which holds no lock that the handler
// needs. Other faults go to the handler that was there before.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <mutex>

#include "python/python.hpp"

namespace shmacc {

// A read-only array's memory. The list only grows, since a handler may be walking along it; entries are used again.
struct ReadOnlyArray {
    std::atomic<bool> used{true};
    std::atomic<uintptr_t> begin{0};
    std::atomic<uint64_t> bytes{0};  // 0: nothing is guarded
    std::atomic<bool> written{false};
    std::atomic<bool> released{false};  // the first write turns all arrays of `owner` into private copies
    const void* owner = nullptr;
    std::string name;
    ReadOnlyArray* next = nullptr;

    void* memory() const { return reinterpret_cast<void*>(begin.load()); }
    bool make_writable() const { return mprotect(memory(), bytes, PROT_READ | PROT_WRITE) == 0; }
};

inline std::atomic<ReadOnlyArray*> read_only_arrays{nullptr};
inline struct sigaction handler_before;
inline int (*raise_written)(void*) = nullptr;  // calls check_writes and sets Python's error (module.cpp)

inline constexpr const char* kInstead =
    " is read-only in this process, but something wrote to it. Rounds and restored checkpoints change it, "
    "nothing else. Load or initialise a model before it is shared (initial=...), and a checkpoint by the "
    "replicas' load_state_dict; call a Replica's step() in place of an optimizer's; in a round change .grad; "
    "for other writes take a copy (copy.deepcopy(model), tensor.clone())";

// Copies every page of the owner's arrays, so that they no longer show what others write.
inline bool make_own(const void* owner) {
    for (ReadOnlyArray* array = read_only_arrays; array; array = array->next) {
        if (array->owner != owner || array->bytes == 0) continue;
        if (!array->make_writable()) return false;
        for (uint64_t at = 0; at < array->bytes; at += kPage)
            __atomic_fetch_or(static_cast<unsigned char*>(array->memory()) + at, 0, __ATOMIC_RELAXED);
    }
    return true;
}

// Makes the array writable, for a write that faulted. Returns whether to try the write again.
inline bool let_write(ReadOnlyArray& array) {
    if (array.released) return make_own(array.owner);
    if (!array.make_writable()) return false;
    // In this order: an undo between the two makes the array read-only again, and the write faults once more.
    array.written = true;
    Py_AddPendingCall(raise_written, nullptr);  // if the queue is full, a call in it finds this write, too
    return true;
}

inline void on_fault(int number, siginfo_t* info, void* context) {
    const int error = errno;
    const auto address = reinterpret_cast<uintptr_t>(info->si_addr);
    for (ReadOnlyArray* array = info->si_code > 0 ? read_only_arrays.load() : nullptr; array;
         array = array->next) {
        if (address - array->begin >= array->bytes) continue;
        if (let_write(*array)) {
            errno = error;
            return;
        }
        for (const char* text : {"shmacc: ", array->name.c_str(), kInstead, ".\n"})
            if (write(STDERR_FILENO, text, std::strlen(text)) < 0) break;
        break;
    }
    errno = error;
    if (handler_before.sa_flags & SA_SIGINFO) {
        handler_before.sa_sigaction(number, info, context);
    } else if (handler_before.sa_handler != SIG_DFL && handler_before.sa_handler != SIG_IGN) {
        handler_before.sa_handler(number);
    } else {  // a real fault happens again after the return; a signal that was sent has to be raised again
        sigaction(SIGSEGV, &handler_before, nullptr);
        if (info->si_code <= 0) raise(number);
    }
}

// Guards memory that is mapped private and read-only, until this object is destroyed, which has to be before the
// memory is unmapped.
class WriteGuard {
  public:
    // owner: the same for all arrays that are released together.
    WriteGuard(void* memory, uint64_t bytes, const void* owner, std::string name) : array_(free_entry()) {
        static std::once_flag installed;
        std::call_once(installed, [] {
            struct sigaction action{};
            action.sa_sigaction = on_fault;
            action.sa_flags = SA_SIGINFO | SA_ONSTACK;
            sigemptyset(&action.sa_mask);
            sigaction(SIGSEGV, &action, &handler_before);
        });
        array_->owner = owner;
        array_->name = std::move(name);
        array_->begin = reinterpret_cast<uintptr_t>(memory);
        array_->bytes = bytes;
    }
    ~WriteGuard() {
        array_->bytes = 0;
        array_->written = array_->released = false;
        array_->used = false;
    }
    WriteGuard(const WriteGuard&) = delete;
    WriteGuard& operator=(const WriteGuard&) = delete;

    void release(bool at_once) {
        array_->released = true;
        if (at_once)
            array_->make_writable();  // if it fails, it is made writable at the first write, or never
    }

  private:
    static ReadOnlyArray* free_entry() {
        for (ReadOnlyArray* array = read_only_arrays; array; array = array->next) {
            bool used = false;
            if (array->used.compare_exchange_strong(used, true)) return array;
        }
        auto* made = new ReadOnlyArray;
        made->next = read_only_arrays;
        while (!read_only_arrays.compare_exchange_weak(made->next, made)) {
        }
        return made;
    }

    ReadOnlyArray* const array_;
};

// Undoes what this process has written to read-only arrays since the last call. Throws FailedPreconditionError if it
// has written anything.
inline void check_writes() {
    std::string names;
    for (ReadOnlyArray* array = read_only_arrays; array; array = array->next) {
        if (!array->written.exchange(false) || array->released) continue;
        // In this order: a write in between faults, and is undone by the next call.
        mprotect(array->memory(), array->bytes, PROT_READ);
        madvise(array->memory(), array->bytes, MADV_DONTNEED);
        if (names.empty()) names = array->name;
    }
    if (!names.empty())
        throw Error(Failure::kFailedPrecondition, names + kInstead + ". The write was undone");
}

}  // namespace shmacc
