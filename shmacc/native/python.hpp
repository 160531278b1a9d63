// Between C++ and the interpreter: the GIL, signals, arrays in and out.
#pragma once

#include <cxxabi.h>
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "operations.hpp"

namespace nb = nanobind;

namespace shmacc {

inline bool finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

// A thread that asks for the GIL while the interpreter shuts down is made to exit by unwinding its stack, which
// no destructor survives; it sleeps instead until the process is gone.
inline void take_gil(PyThreadState* state) {
    while (finalizing()) pause();
    try {
        PyEval_RestoreThread(state);
    } catch (abi::__forced_unwind&) {
        for (;;) pause();  // never left, so never rethrown
    }
}

class WithoutGil {
  public:
    WithoutGil() : state_(PyEval_SaveThread()) {}
    ~WithoutGil() { take_gil(state_); }

    // With the GIL, in the main thread: lets signal handlers run; what they raise goes on as an exception.
    void check_signals() {
        if (getpid() != gettid()) return;
        take_gil(state_);
        int raised = PyErr_CheckSignals();
        std::optional<nb::python_error> error;
        if (raised) error.emplace();
        state_ = PyEval_SaveThread();
        if (error) throw std::move(*error);
    }

  private:
    PyThreadState* state_;
};

inline ProcessIdentity this_process{};  // set by Python at import and after fork
inline uint64_t this_token = 0;

inline int64_t deadline_after(std::optional<double> seconds) {
    if (!seconds) return kForever;
    constexpr double kCentury = 3.2e9;
    if (*seconds > kCentury) return kForever;
    return monotonic_ns() + static_cast<int64_t>(*seconds * 1e9);
}

// The memory of an array in, for as long as this lives.
template <class T>
class View {
  public:
    // components: how many T make an element of the array.
    View(nb::handle array, uint32_t components) {
        if (PyObject_GetBuffer(array.ptr(), &view_, PyBUF_C_CONTIGUOUS) != 0) throw nb::python_error();
        if (static_cast<size_t>(view_.itemsize) != sizeof(T) * components) {
            PyBuffer_Release(&view_);
            throw nb::type_error("an array of another element size was expected");
        }
    }
    ~View() { PyBuffer_Release(&view_); }
    View(const View&) = delete;
    View& operator=(const View&) = delete;
    const T* data() const { return static_cast<const T*>(view_.buf); }
    uint64_t size() const { return static_cast<uint64_t>(view_.len) / sizeof(T); }

  private:
    Py_buffer view_{};
};

// A NumPy array that owns what an Output held.
template <class T>
nb::object array_of(Output& output, std::initializer_list<size_t> shape) {
    void* memory = output.release();
    nb::capsule owner(memory, [](void* pointer) noexcept { std::free(pointer); });
    return nb::cast(nb::ndarray<nb::numpy, T>(memory, shape, owner));
}

}  // namespace shmacc
