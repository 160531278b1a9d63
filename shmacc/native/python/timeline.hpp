// Timelines: after a restore, no gradient that was computed before it is accepted, whatever its step.
//
// A restore begins a timeline, numbered by RoundState::restores. Under the lane's lock an apply drops a gradient of an
// older timeline than the current one, as it drops a gradient of an older step. But a gradient's step is a plain
// number, so to which timeline does the gradient belong? To the one in which its step was read. (An int that carries
// its timeline would say so itself; but files, JSON and torch.load refuse integers of other classes.)
//
// A Reads remembers the reads of one handle. A reader is a thread, or a task of asyncio (by Python's context
// variables). So a thread's read says nothing of another thread's gradient. A task, a call of asyncio.to_thread and a
// forked child have their creator's last read until they read themselves. (Tasks of trio share their thread's.) A read
// is whatever gives the caller the step at which it computes its next gradient: global_step, wait_step, steps, takes,
// the end of a round's block. `stats`, `state`, `running` and refused applies are no reads: a program may call them
// while it computes. The timeline of a gradient:
//
//   1  If its reader's last read was of this very step, or in the newest timeline that the handle knows: the timeline
//      of that read. (So a step ahead of the current one is accepted in the same timeline, as in TensorFlow.)
//   2  Else, if somebody has read this step or a later one in the newest timeline: the newest. Another reader may have
//      read it for the gradient's reader (a wait in an executor's thread, a step handed to a pool).
//   3  Else: the timeline of the reader's last read. If the reader has read nothing: an older timeline, if the step was
//      read there; else the newest.
//
// When the handle is opened, or this handle sets, advances or restores the step, nobody has read the step, but rules 2
// and 3 count it (`note`). So a program that restores, and applies at steps that it knows, need not read the step. Rule
// 1 does not count it: the process that has restored may still apply a gradient that it computed before. NEVER_STALE is
// a step that nobody reads: such a gradient is of its reader's last timeline, or of the newest if there is none. If a
// program never reads the step (it counts, or trains asynchronously), its gradients would be dropped for ever. So if
// nobody has read by this handle in this process, a dropped gradient makes known which timeline is current (`told`),
// and the next gradient counts. Here a read that came from a forked child's parent, or with a pickle, does not count.
//
// Limits. A step from elsewhere (a queue, another handle) falls under rules 2 and 3: without a read by this handle, its
// gradients are dropped after a restore. A pool's late gradient of an old timeline is accepted if the pool's dispatcher
// has meanwhile read the same step in the new one. A current gradient is dropped if another thread reads the step for
// it, and its own thread last read that very number before the restore: then rule 1 misleads. If a thread outside of a
// loop reads again in the same timeline, a task or call that has inherited its read inherits this one, too. Then rule 1
// may miss the gradient's step, and after a restore rule 2 accepts it once the new timeline has come to this step.
#pragma once

#include <optional>

#include "python/interpreter.hpp"
#include "segment/caller.hpp"

namespace shmacc {

// A step, and the timeline in which it was read.
struct StepRead {
    int64_t step;
    uint64_t timeline;
};

// One handle's reads. The GIL guards it.
class Reads {
  public:
    Reads() = default;
    ~Reads() {
        if (variable_) variable_->next_free = std::exchange(first_free_, variable_);
    }
    Reads(const Reads&) = delete;
    Reads& operator=(const Reads&) = delete;

    // Notes a step of a timeline, though no thread or task has read it.
    void note(const StepRead& read) {
        if (read.timeline > newest_.timeline) {
            older_ = std::max(older_, newest_.step);
            newest_ = read;
        } else if (read.timeline == newest_.timeline) {
            newest_.step = std::max(newest_.step, read.step);
        } else {
            older_ = std::max(older_, read.step);
        }
    }
    // Notes a read by the calling thread or task. If memory runs out, does only what `note` does.
    void note_own(const StepRead& read) noexcept {
        read_in_ = fork_generation;
        keep(read, fork_generation);
    }
    // Notes a read that another process has passed on: a forked child's parent, or the process that made a pickle.
    void inherit(const StepRead& read) noexcept { keep(read, kAnothers); }
    // Notes that a gradient was dropped. timeline: the current one, which is newer; 0: dropped for another reason.
    void told(int64_t local_step, uint64_t timeline) {
        if (local_step == kNeverStale) told_ = std::max(told_, timeline);
    }

    const StepRead& newest() const { return newest_; }
    // The last read of the calling thread or task; nullopt: it has not read yet.
    std::optional<StepRead> own() const {
        const std::optional<Own> last = record();
        return last ? std::optional(last->read) : std::nullopt;
    }
    // The timeline of a gradient that the calling thread or task applies.
    uint64_t timeline_of(int64_t local_step) const {
        if (older_ == kNone && told_ <= newest_.timeline)
            return newest_.timeline;  // all reads were in one timeline
        const std::optional<Own> own = record();
        const StepRead* const last = own ? &own->read : nullptr;
        if (local_step == kNeverStale) {
            const uint64_t timeline = last ? last->timeline : newest_.timeline;
            const bool was_read = last ? own->in == fork_generation : read_in_ == fork_generation;
            return was_read ? timeline : std::max(told_, timeline);
        }
        if (last && (last->step == local_step || last->timeline == newest_.timeline)) return last->timeline;
        if (local_step <= newest_.step) return newest_.timeline;
        if (last) return last->timeline;
        return newest_.timeline - (local_step <= older_);  // if there is an older timeline, the newest is not 0
    }

  private:
    struct Own {
        uint64_t serial;  // the handle's
        StepRead read;
        uint64_t in;  // the process that has read it: its fork_generation, or kAnothers
    };
    static constexpr int64_t kNone = INT64_MIN;
    static constexpr uint64_t kAnothers = UINT64_MAX;

    // The value of a context variable. A copy of a context has the same value, so that a task or another thread may see
    // it.
    struct Kept {
        Own own;
        ThreadNumber thread;  // the thread that has read; kNoThread: a task has
        std::shared_ptr<Own> latest;  // the last read of that thread, which all that it keeps share; null: a task's
    };

    std::optional<Own> record() const {
        const Kept* const kept = variable_ ? variable_->get() : nullptr;
        if (!kept || kept->own.serial != serial_) return std::nullopt;
        const StepRead& read = kept->own.read;
        const StepRead& latest = kept->latest ? kept->latest->read : read;
        const bool differs = latest.step != read.step || latest.timeline != read.timeline;
        return differs && kept->thread == this_thread() && !in_loop() ? *kept->latest : kept->own;
    }
    // In one timeline a thread changes in place what it keeps, which takes no memory (see Variable::set) and less time.
    // In another timeline it sets a new value, since a task or call that has inherited the old one may still compute
    // from that. If this raises, the thread's own gradients are of the new timeline all the same. A task may see its
    // creator's value, so it sets its own.
    void keep(const StepRead& read, uint64_t in) noexcept {
        note(read);
        try {
            const ThreadNumber thread = in_loop() ? kNoThread : this_thread();
            const Own own{serial_, read, in};
            if (!variable_) variable_ = new_variable();
            Kept* const kept = variable_->get();
            std::shared_ptr<Own> latest;
            if (kept && thread != kNoThread && kept->thread == thread && kept->own.serial == serial_) {
                *kept->latest = own;
                if (kept->own.read.timeline == read.timeline) {
                    kept->own = own;
                    return;
                }
                latest = kept->latest;
            } else if (thread != kNoThread) {
                latest = std::make_shared<Own>(own);
            }
            variable_->set(std::make_unique<Kept>(Kept{own, thread, std::move(latest)}));
        } catch (nb::python_error&) {
        } catch (const std::exception&) {
        }
    }
    // Whether a loop of asyncio runs in this thread, so that tasks take turns in it.
    static bool in_loop() {
        static nb::object* running = nullptr;
        if (!running) {
            PyObject* const events = PyDict_GetItemString(PyImport_GetModuleDict(), "asyncio.events");
            if (!events) return false;
            running = new nb::object(method(events, "_get_running_loop"));
        }
        return !called(*running).is_none();
    }

    // A context variable. The stable ABI has no functions for it, so its methods are looked up once.
    class Variable {
      public:
        Variable() {
            const nb::object made = called(method(imported("contextvars"), "ContextVar"),
                                           nb::str("shmacc: last step read"));
            get_ = method(made, "get");
            set_ = method(made, "set");
            const nb::object token = method(imported("contextvars"), "Token");
            token_bytes_ = nb::cast<size_t>(method(token, "__basicsize__")) + kCollectors;
        }
        // Returns what this context holds; null: nothing. The result lives as long as the context holds it.
        Kept* get() const {
            const nb::object found = called(get_, nb::none());
            return found.is_none() ? nullptr : static_cast<Kept*>(PyCapsule_GetPointer(found.ptr(), nullptr));
        }
        // Python's ContextVar.set makes a token, then changes the context, and crashes if there is memory for neither
        // (3.11 to 3.14). So this first finds a block for the token, which Python gets when it is free again. (It is
        // no help if a test makes single allocations fail.)
        void set(std::unique_ptr<Kept> kept) const {
            const nb::object capsule = checked(PyCapsule_New(kept.get(), nullptr, [](PyObject* dropped) {
                delete static_cast<Kept*>(PyCapsule_GetPointer(dropped, nullptr));
            }));
            kept.release();
            void* const block = PyObject_Malloc(token_bytes_);
            if (!block) throw std::bad_alloc();
            PyObject_Free(block);
            called(set_, capsule);
        }

        Variable* next_free = nullptr;

      private:
        static constexpr size_t kCollectors = 2 * sizeof(void*);  // the garbage collector's part of an object
        nb::object get_, set_;
        size_t token_bytes_;
    };
    // Context variables are never freed, since contexts keep what was set in them. So a handle that ends leaves its
    // variable to later handles, in a list that needs no memory: a destructor must not throw.
    static inline Variable* first_free_ = nullptr;
    static Variable* new_variable() {
        if (!first_free_) return new Variable;
        return std::exchange(first_free_, first_free_->next_free);
    }
    static uint64_t next_serial() {
        static uint64_t last = 0;
        return ++last;
    }

    StepRead newest_{kNone, 0};  // the highest step known of the newest timeline known
    int64_t older_ = kNone;  // the highest step known of older timelines
    uint64_t told_ = 0;
    uint64_t read_in_ = kAnothers;  // the fork_generation of the process that has read by this handle
    const uint64_t serial_ = next_serial();
    Variable* variable_ = nullptr;
};

}  // namespace shmacc
