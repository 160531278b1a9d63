// The rounds of blocks: opened when the block begins, consumed when it ends in order, given up otherwise.
//
// Each block ends by one call into the extension. The only Python code that runs during this call is signal handlers,
// while it waits for the lock. So a handler that raises finds the round open, consumed or given up, and nothing in
// between. Handlers also run between Python's instructions, even before the first instruction of a Python function. So
// these methods must not be overridden in Python, nor be called by a Python function in place of a ``with`` statement.
//
//   Invariant: a round that is open in this process has a RoundBlock, to which only the block's statement, or its
//              caller, has a reference. The RoundBlock's destructor gives up the round. This takes one store, cannot
//              fail, and runs no Python.
//
// Coroutines. A thread waits for the round, and the coroutine takes the round over when the event loop resumes it
// (coroutines.py); in between Python runs. So the coroutine runs in a Guarded. If an exception leaves the coroutine, or
// the coroutine is dropped, the round is given up; or, if it has just been consumed, kept for the handle's next take. A
// thread that is slow to start may get the round even later: it finds that its caller has left, and gives it up.
#pragma once

#include <algorithm>
#include <vector>

#include "python/handle.hpp"

namespace shmacc {

class RoundBlock {
  public:
    // make: turns a RoundResult into the result.
    RoundBlock(nb::object handle, nb::object make, int64_t num_required, int64_t at_least,
               std::optional<double> timeout, bool raise_departures)
        : handle_(std::move(handle)), make_(std::move(make)), num_required_(num_required),
          at_least_(at_least), timeout_(timeout), raise_departures_(raise_departures) {
        nb::cast<Handle&>(handle_);
    }
    ~RoundBlock() { give_up(); }

    // The rounds whose blocks have begun and not ended.
    static const std::vector<RoundBlock*>& all_open() { return open_; }
    const OwnObject& object() const { return object_; }
    const nb::object& handle_object() const { return handle_; }
    const nb::object& taken() const { return taken_; }
    const nb::object& given() const { return given_; }

    RoundBlock(const RoundBlock&) = delete;
    RoundBlock& operator=(const RoundBlock&) = delete;

    nb::object enter() {
        if (taken_.is_valid())
            throw Error(Failure::kFailedPrecondition,
                        "This round has been entered already; make another one");
        return open(timeout_, nullptr);
    }
    // kind: the type of the exception that leaves the block, or None.
    void exit(nb::handle kind) {
        if (!kind.is_none())
            give_up();
        else if (!consume())
            throw Error(Failure::kFailedPrecondition,
                        "The round was ended before its block: by advance_step, set_global_step or restore, "
                        "which do not wait for it, or by a fork (it is the parent's)");
    }

    // For coroutines.
    std::optional<double> timeout() const { return timeout_; }
    // Waits for the gradients, and makes the result.
    nb::object open(std::optional<double> timeout, const Caller* caller) {
        start();
        const int64_t deadline = deadline_after(timeout);
        try {
            handle().open_round(round(), num_required_, at_least_, timeout, raise_departures_, caller);
            if (round().half_updated()) Handle::recover_parameters(round().half_updated(), deadline);
            given_ = called(make_, taken_);
            if (caller && caller->has_left()) throw Error(Failure::kCancelled, kLeft);
            object_.find(this);
            open_.push_back(this);
            return given_;
        } catch (...) {
            give_up();
            throw;
        }
    }
    // Returns the result of a taken round that did not reach its caller; None: there is none.
    nb::object take_kept() {
        start();
        consumed_ = handle().take_kept(round());
        if (consumed_) handle().note_taken(round());
        return consumed_ ? called(make_, taken_) : nb::none();
    }
    // Hands the coroutine the round that a thread has opened for it. Returns false if the round was given up meanwhile.
    bool hold() { return serial() != 0 && handle().hold_round(serial()); }
    bool is_open() { return serial() != 0 && handle().holds_round(serial()); }
    bool is_of(nb::handle handle) const { return handle_.is(handle); }
    // Returns whether the round was still open. An error gives the round up.
    bool consume() {
        try {
            consumed_ = serial() != 0 && handle().consume_round(serial());
            if (consumed_) {
                round().end();
                handle().note_taken(round());
            }
            close();
            return consumed_;
        } catch (...) {
            give_up();
            throw;
        }
    }
    // For a result that nobody gets: the handle keeps it if the round was consumed, else the round is given up.
    void give_back() {
        if (consumed_ && handle_.is_valid())  // `clear` invalidates it
            handle().keep(taken_);
        else
            give_up();
    }

    // For Python's garbage collector.
    template <class Visit>
    int visit(Visit visit) {
        for (const nb::object* held : {&handle_, &make_, &taken_, &given_})
            if (held->is_valid())
                if (const int result = visit(held->ptr())) return result;
        return 0;
    }
    void clear() {
        give_up();
        for (nb::object* held : {&handle_, &make_, &taken_}) held->reset();
    }

  private:
    Handle& handle() { return *nb::inst_ptr<Handle>(handle_); }
    RoundResult& round() { return *nb::inst_ptr<RoundResult>(taken_); }
    uint64_t serial() { return taken_.is_valid() ? round().serial() : 0; }
    void start() {
        give_up();
        consumed_ = false;
        taken_ = give_to_python(std::make_unique<RoundResult>(true, false));
    }
    void give_up() {
        if (serial() != 0) handle().give_up_round(serial());
        close();
    }
    void close() {
        open_.erase(std::remove(open_.begin(), open_.end(), this), open_.end());
        given_.reset();
    }

    nb::object handle_, make_;
    const int64_t num_required_, at_least_;
    const std::optional<double> timeout_;
    const bool raise_departures_;
    nb::object taken_;
    nb::object given_;  // the result that `make` returned for taken_
    bool consumed_ = false;
    OwnObject object_;

    static inline std::vector<RoundBlock*> open_;  // the GIL guards it
};
// A Round is for `with`, an AsyncBlock for `async with`. Coroutines use a RoundBlock itself, without a block.
struct Round : RoundBlock {
    using RoundBlock::RoundBlock;
};
struct AsyncBlock : RoundBlock {
    using RoundBlock::RoundBlock;
};

// Runs a Python coroutine that works with a RoundBlock. Await this in place of the coroutine.
class Guarded {
  public:
    Guarded(nb::object coroutine, nb::object block)
        : coroutine_(std::move(coroutine)), block_(std::move(block)) {
        nb::cast<RoundBlock&>(block_);
    }
    Guarded(const Guarded&) = delete;
    Guarded& operator=(const Guarded&) = delete;
    // If the coroutine that awaits this object fails, the object may be dropped before its own coroutine has ended.
    ~Guarded() { drop(); }
    nb::object send(nb::handle value) {
        return guarded([&] { return called(method(coroutine_, "send"), value); });
    }
    nb::object raise(const nb::args& error) {
        return guarded([&] {
            const nb::object thrown = method(coroutine_, "throw");
            return checked(call_python([&] { return PyObject_Call(thrown.ptr(), error.ptr(), nullptr); }));
        });
    }
    void close() {
        if (coroutine_.is_valid()) guarded([&] { return called(method(coroutine_, "close")); });
    }

    // For Python's garbage collector: a task that waits refers to itself by way of its coroutines.
    template <class Visit>
    int visit(Visit visit) {
        for (const nb::object* held : {&coroutine_, &block_})
            if (held->is_valid())
                if (const int result = visit(held->ptr())) return result;
        return 0;
    }
    void clear() {
        drop();
        for (nb::object* held : {&coroutine_, &block_}) held->reset();
    }

  private:
    void drop() {
        if (std::exchange(ended_, true)) return;
        try {
            nb::inst_ptr<RoundBlock>(block_)->give_back();
        } catch (...) {  // no memory to keep what was taken
        }
    }
    template <class Call>
    nb::object guarded(Call call) {
        if (!coroutine_.is_valid())
            throw Error(Failure::kFailedPrecondition, "The coroutine has been collected");
        try {
            return call();
        } catch (nb::python_error& error) {
            ended_ = true;
            if (!error.matches(PyExc_StopIteration)) nb::inst_ptr<RoundBlock>(block_)->give_back();
            throw;
        }
    }

    nb::object coroutine_, block_;
    bool ended_ = false;
};

// The result of __aexit__ of a coroutine's block. The work is done by then, so awaiting this ends at once.
struct Ended {};

}  // namespace shmacc
