// Writes to read-only arrays raise an exception, where the kernel would end the process.
//
// NumPy refuses to write to such an array. torch has no read-only tensors, so an optimizer's step, load_state_dict,
// nn.init or an embedding with max_norm writes to the memory, which raises SIGSEGV. Three ways were tried:
//
//   - Give the process writable private copies of the pages, and check torch's version counters later. But tensor.data
//     and numpy() write without counting, and until the check the process trains on contents that only it has.
//   - Let a signal handler name the array before the process dies. But the program is lost.
//   - Both together, as here. The handler makes the array's pages private and writable, so the write succeeds, in
//     pages of this process alone. It also asks the interpreter to raise an exception as soon as it can. The
//     interpreter calls `undo_writes` before it raises; so does each use of the arrays through this library. That call
//     drops the private pages, so the array is the shared one again, and read-only.
//
// For this, read-only arrays are mapped MAP_PRIVATE. In Linux a private page that was never written is the file's page
// and shows what others write, like MAP_SHARED; a written page becomes this process's own, and MADV_DONTNEED turns it
// back into the file's page. This needs no descriptor, so it also works after `close`.
//
// Undoing. Each call may fail: MADV_DONTNEED in locked memory (where mprotect has copied the whole array already), all
// of them under a filter of system calls. MADV_DONTNEED_LOCKED drops locked pages and keeps them locked; kernels before
// 5.18 lack it, and there the array is unlocked, and locked again in full (msync says whether it was locked). What
// still fails is tried by mapping the file anew over the array, if its descriptor is still open. (The kernel checks
// limits, such as that of locked memory, before it unmaps the old pages. After that it allocates only small objects,
// which fails in a dying process only. So an error leaves the old mapping.) If that fails too, the array shows this
// process's own contents for good: the error says so, and each later use of the handle raises it again
// (Handle::segment).
//
// When the exception comes. Python's main thread raises it at the end of the next call that Python code makes, at the
// next turn of a loop, or at the beginning of the next function: right after `array.fill_(0)`, but after `array += 1`
// only at the next of these places, so a `try` around this line alone does not catch it. The main thread also raises
// the exception for another thread's write. What is raised inside a finalizer or a callback, Python prints ("Exception
// ignored") and drops; the write is undone all the same. In hooks of os.fork that would also break the hook: so
// `before_fork` undoes the write, and the exception comes after the fork, in the parent. (Hooks that were registered
// after these may still be hit.) If Python's queue of calls is full, the next use of the library raises it. The same
// holds if there is no memory for the exception: then a MemoryError comes first, and the write is undone by then.
//
// The handler. (In a thread that has blocked SIGSEGV the kernel ends the process.) The signal is synchronous: the
// interrupted code is a store into an array, which holds no lock that the handler needs. Other faults, and signals that
// were sent, go to the handler that was there before; if SIGSEGV was ignored, a sent signal changes nothing.
// faulthandler.disable() removes this handler if faulthandler was enabled first, and a program may set another one.
// `stand_guard` sets it again at the next use of the arrays, if no handler is set then; until then a write ends the
// process. A handler that a program sets after this one stays, and gets the write as a fault: so call
// faulthandler.enable() first.
//
// With SHMACC_GUARD=0 in the environment when a process gets its first read-only array, it has no handler and no hooks,
// and the kernel ends a process that writes.
#pragma once

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>

#include "python/interpreter.hpp"

#ifndef MADV_DONTNEED_LOCKED
#define MADV_DONTNEED_LOCKED 24
#endif
#ifndef MADV_POPULATE_READ
#define MADV_POPULATE_READ 22
#endif

namespace shmacc {

inline void* map_private(void* at, uint64_t bytes, int fd, uint64_t offset) {
    return mmap(at, bytes, PROT_READ, MAP_PRIVATE | MAP_NORESERVE | (at ? MAP_FIXED : 0), fd,
                static_cast<off_t>(offset));
}
// Copies every page, so that it no longer shows what others write.
inline bool make_own(void* memory, uint64_t bytes) {
    if (mprotect(memory, bytes, PROT_READ | PROT_WRITE) != 0) return false;
    for (uint64_t at = 0; at < bytes; at += kPage)
        __atomic_fetch_or(static_cast<unsigned char*>(memory) + at, 0, __ATOMIC_RELAXED);
    return true;
}

inline constexpr const char* kUndone = ". The write was undone";

// A read-only array's memory. The list only grows, since a handler may be reading it; entries are used again.
struct ReadOnlyArray {
    std::atomic<bool> used{true};
    std::atomic<uintptr_t> begin{0};
    std::atomic<uint64_t> bytes{0};  // 0: nothing is guarded
    std::atomic<bool> written{false};
    std::atomic<bool> released{false};  // the first write turns all arrays of `owner` into private copies
    const void* owner = nullptr;
    std::string name;
    std::weak_ptr<const SegmentFile> file;  // expires when the segment is closed
    uint64_t offset = 0;  // in the file
    std::shared_ptr<std::string> spoiled;  // Handle::spoiled
    ReadOnlyArray* next = nullptr;

    void* memory() const { return reinterpret_cast<void*>(begin.load()); }
    bool make_writable() const { return mprotect(memory(), bytes, PROT_READ | PROT_WRITE) == 0; }

    struct Undone {
        bool done;
        std::string how;
    };
    // Allocates nothing before it has tried everything: without memory for the text, the write is undone all the same.
    Undone undo() const {
        const auto drop = [this](int advice) { return madvise(memory(), bytes, advice) == 0; };
        // Read-only first: a write after that faults, and the next undo_writes undoes it.
        const bool read_only = mprotect(memory(), bytes, PROT_READ) == 0;
        if (read_only && drop(MADV_DONTNEED)) return {true, kUndone};
        if (read_only && drop(MADV_DONTNEED_LOCKED)) {
            drop(MADV_POPULATE_READ);  // if it fails, the pages come when they are read
            return {true, kUndone};
        }
        const char* failed = read_only ? "madvise: " : "mprotect: ";
        int error = errno;
        const bool locked = msync(memory(), bytes, MS_INVALIDATE) != 0 && errno == EBUSY;
        if (locked) munlock(memory(), bytes);  // if it fails, so do the calls below that need it
        bool done = read_only && locked && drop(MADV_DONTNEED);
        const std::shared_ptr<const SegmentFile> open = done ? nullptr : file.lock();
        if (open && open->status().open) {
            done = map_private(memory(), bytes, open->fd(), offset) != MAP_FAILED;
            failed = "mmap: ";
            error = errno;
        }
        const int not_locked = locked && mlock(memory(), bytes) != 0 ? errno : 0;
        std::string how = done ? kUndone
                               : std::string(". The write could not be undone (") + failed +
                                     std::strerror(error) +
                                     "): in this process the array stays as it was written. Close this "
                                     "object, attach again, and read the arrays anew";
        if (not_locked)
            how += std::string("; its pages are not locked any more (mlock: ") + std::strerror(not_locked) +
                   ")";
        return {done, how};
    }
};

inline std::atomic<ReadOnlyArray*> read_only_arrays{nullptr};
inline std::atomic<bool> some_written{false};
inline std::optional<Error> untold;  // an error that undo_writes has still to return
inline bool owed = false;  // there was no memory for a write's error, which the next use of the library raises
inline bool forking = false;  // Python runs hooks of a fork
inline std::atomic<const struct sigaction*> handler_before{nullptr};
inline int (*raise_written)(void*) = nullptr;  // calls undo_writes and sets Python's error (module.cpp)

inline constexpr const char* kInstead =
    " is read-only in this process, but something wrote to it. Rounds and restored checkpoints change it, "
    "nothing else. Load or initialise a model before it is shared (initial=...), and a checkpoint by the "
    "replicas' load_state_dict; call a Replica's step() in place of an optimizer's; in a round change .grad; "
    "for other writes take a copy (copy.deepcopy(model), tensor.clone())";
inline constexpr const char* kNoCopy =
    " cannot become this process's own: the system gives no memory for copies";

// Makes the array writable, for a write that faulted. Returns whether to try the write again.
inline bool let_write(ReadOnlyArray& array) {
    if (array.released) {
        for (ReadOnlyArray* each = read_only_arrays; each; each = each->next)
            if (each->owner == array.owner && each->bytes > 0 && !make_own(each->memory(), each->bytes))
                return false;
        return true;
    }
    if (!array.make_writable()) return false;
    // In this order: an undo before a store makes the array read-only again, and the write faults once more.
    array.written = true;
    some_written = true;
    Py_AddPendingCall(raise_written, nullptr);  // if the queue is full, the next use of the library raises
    return true;
}

inline void on_fault(int number, siginfo_t* info, void* context);
inline bool set_handler() {
    struct sigaction action{};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    return sigaction(SIGSEGV, &action, nullptr) == 0;
}

// Treats the signal as if this handler had never been set.
inline void pass_on(int number, siginfo_t* info, void* context) {
    const struct sigaction& before = *handler_before;
    const bool sent = info->si_code <= 0;
    if (before.sa_flags & SA_SIGINFO) return before.sa_sigaction(number, info, context);
    if (before.sa_handler == SIG_IGN && sent) return;
    if (before.sa_handler != SIG_DFL && before.sa_handler != SIG_IGN) return before.sa_handler(number);
    sigaction(SIGSEGV, &before, nullptr);
    if (!sent) return;  // a real fault happens again after the return
    // Raise the signal again; if the process survives it (as a container's first process does), set the guard again.
    sigset_t this_one, blocked;
    sigemptyset(&this_one);
    sigaddset(&this_one, SIGSEGV);
    raise(number);
    pthread_sigmask(SIG_UNBLOCK, &this_one, &blocked);
    pthread_sigmask(SIG_SETMASK, &blocked, nullptr);
    set_handler();
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
        for (const char* text : {"shmacc: ", array->name.c_str(), array->released ? kNoCopy : kInstead, ".\n"})
            if (write(STDERR_FILENO, text, std::strlen(text)) < 0) break;
        break;
    }
    errno = error;
    pass_on(number, info, context);
}

// Undoes what this process has written to read-only arrays since the last call. Returns the error that reports it;
// nullopt: nothing was written. If there is no memory for an error, throws std::bad_alloc after all arrays were tried;
// the next call tries those without an error again, and reports them. Needs the GIL.
inline std::optional<Error> undo_writes() {
    std::optional<Error> told = std::exchange(untold, std::nullopt);
    const bool some = some_written.exchange(false);
    if (!std::exchange(owed, false) && !some) return told;
    for (ReadOnlyArray* array = read_only_arrays; array; array = array->next) {
        if (!array->written.exchange(false) || array->released) continue;
        try {
            const auto [done, how] = array->undo();
            Error error(Failure::kFailedPrecondition, array->name + kInstead + how, {{"_interrupts", 1}});
            if (!done) *array->spoiled = error.what();
            if (!told || !done) told = std::move(error);
        } catch (const std::bad_alloc&) {
            array->written = owed = true;
        }
    }
    if (!owed) return told;
    untold = std::move(told);
    throw std::bad_alloc();
}

// Hooks of os.fork. They do not raise: Python would drop the exception.
inline void before_fork() {
    forking = true;
    try {
        untold = undo_writes();
    } catch (const std::bad_alloc&) {
        some_written = true;  // after_fork_in_parent asks again
    }
}
inline void after_fork_in_parent() {
    forking = false;
    if (untold || some_written) Py_AddPendingCall(raise_written, nullptr);
}
inline void after_fork_in_child() {
    forking = false;
    untold.reset();  // the parent raises it
}

// Made when the module is imported: without memory for a function nanobind ends the process.
inline PyObject* fork_hooks = nullptr;
inline void make_fork_hooks() {
    nb::dict hooks = new_dict();
    hooks["before"] = nb::cpp_function(&before_fork);
    hooks["after_in_parent"] = nb::cpp_function(&after_fork_in_parent);
    hooks["after_in_child"] = nb::cpp_function(&after_fork_in_child);
    fork_hooks = hooks.release().ptr();
}

inline bool guard_wanted() {
    const char* const asked = std::getenv("SHMACC_GUARD");
    const std::string text = asked ? asked : "";
    if (text != "" && text != "0" && text != "1")
        throw Error(Failure::kInvalidArgument,
                    "The environment variable SHMACC_GUARD must be 0 (a write to a read-only array ends the "
                    "process) or 1 (it raises), but is '" +
                        text + "'");
    return text != "0";
}

// Call before read-only arrays are used. Sets the handler at the first call, and again if no handler is set any more.
// Returns false if the process shall have no guard. Needs the GIL.
inline bool stand_guard() {
    static const bool wanted = guard_wanted();
    if (!wanted) return false;
    struct sigaction now{};
    if (sigaction(SIGSEGV, nullptr, &now) != 0) now.sa_handler = SIG_DFL;
    const bool nobodys = !(now.sa_flags & SA_SIGINFO) &&
                         (now.sa_handler == SIG_DFL || now.sa_handler == SIG_IGN);
    const struct sigaction* const before = handler_before;
    if (before && !nobodys) return true;
    if (!before) {
        const nb::object hooked = method(imported("os"), "register_at_fork");
        const nb::tuple nothing;
        checked(call_python([&] { return PyObject_Call(hooked.ptr(), nothing.ptr(), fork_hooks); }));
    }
    // A new object each time, since a handler may be reading the old one.
    if (!before || before->sa_flags != now.sa_flags || before->sa_handler != now.sa_handler)
        handler_before = new struct sigaction(now);
    if (!set_handler())
        throw Error(Failure::kFailedPrecondition,
                    std::string("The handler that guards read-only arrays against writes cannot be set "
                                "(sigaction: ") +
                        std::strerror(errno) + "); with SHMACC_GUARD=0 in the environment there is none");
    return true;
}

// Guards memory that is mapped private and read-only, until this object is destroyed, which has to be before the
// memory is unmapped.
class WriteGuard {
  public:
    struct Of {
        const void* owner;  // the same for all arrays that are released together
        std::string name;
        std::shared_ptr<std::string> spoiled;
    };
    WriteGuard(void* memory, uint64_t bytes, const SegmentFile& file, uint64_t offset, Of of)
        : array_(free_entry()) {
        array_->owner = of.owner;
        array_->name = std::move(of.name);
        array_->file = file.weak_from_this();
        array_->offset = offset;
        array_->spoiled = std::move(of.spoiled);
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

}  // namespace shmacc
