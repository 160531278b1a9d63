// Changes that must happen together with the end of a Python statement: a block begins, or a loop gets a step.
//
// A signal handler may raise between any two instructions of Python, and after each call, but not in the extension. So
// a Python function cannot safely change an object and return: if an exception comes between the two, the object says
// that the caller has something that it does not have. These objects change in the call that returns.
#pragma once

#include "python/handle.hpp"

namespace shmacc {

// Runs a generator as the block of a ``with`` statement, as contextlib.contextmanager does. An exception is raised
// either inside the generator, which then undoes what it has begun, or inside the block, and the generator gets it.
class GeneratorBlock {
  public:
    explicit GeneratorBlock(nb::object generator) : generator_(std::move(generator)) {}

    nb::object enter() {
        if (std::exchange(entered_, true))
            throw Error(Failure::kFailedPrecondition,
                        "This round has been entered already; make another one");
        return called(method(generator_, "send"), nb::none());
    }
    // error: the exception that leaves the block, and that Python passes on after this call; or None.
    void exit(nb::handle error, nb::handle traceback) {
        try {
            if (error.is_none())
                called(method(generator_, "send"), nb::none());
            else
                called(method(generator_, "throw"), error);
        } catch (nb::python_error& raised) {
            if (error.is_none() && raised.matches(PyExc_StopIteration)) return;
            const bool wrapped = raised.matches(PyExc_RuntimeError) &&
                                 PyErr_GivenExceptionMatches(error.ptr(), PyExc_StopIteration) &&
                                 raised.value().attr("__cause__").is(error);  // as Python does
            if (!wrapped && !raised.value().is(error)) throw;
            if (!traceback.is_none()) PyException_SetTraceback(error.ptr(), traceback.ptr());
            return;
        }
        throw std::runtime_error("The block's generator has not ended");
    }

    // For Python's garbage collector: the generator of a subclass may refer back to its block.
    template <class Visit>
    int visit(Visit visit) {
        return generator_.is_valid() ? visit(generator_.ptr()) : 0;
    }
    void clear() {
        entered_ = true;
        generator_.reset();
    }

  private:
    nb::object generator_;
    bool entered_ = false;
};

// Yields the steps of a run in a loop. A step counts as seen when the caller has received it.
class FollowedSteps {
  public:
    FollowedSteps(nb::object handle, std::optional<double> timeout, bool raise_departures)
        : handle_(std::move(handle)), timeout_(timeout), raise_departures_(raise_departures) {
        nb::cast<Handle&>(handle_);
    }
    int64_t next() {
        if (ended_) throw nb::stop_iteration();
        const auto now = nb::inst_ptr<Handle>(handle_)->next_step(last_, timeout_, raise_departures_, nullptr);
        ended_ = !now;
        if (!now) throw nb::stop_iteration();
        last_ = nb::cast(*now);
        return std::get<0>(*now);
    }

  private:
    const nb::object handle_;
    const std::optional<double> timeout_;
    const bool raise_departures_;
    nb::object last_ = nb::none();  // the last step, and the number of restores
    bool ended_ = false;
};

}  // namespace shmacc
