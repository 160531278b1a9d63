// The interface between C++ and the interpreter: the GIL, signals, arrays in both directions.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#define NPY_NO_DEPRECATED_API NPY_1_7_API_VERSION
// NumPy's functions are found once, by module.cpp.
#define PY_ARRAY_UNIQUE_SYMBOL shmacc_numpy
#ifndef SHMACC_HAS_NUMPY
#define NO_IMPORT_ARRAY
#endif
#include <numpy/arrayobject.h>

#include "base/clock.hpp"
#include "base/errors.hpp"
#include "base/member_specs.hpp"
#include "base/process.hpp"
#include "values/halves.hpp"
#include "values/output.hpp"
#include "values/weights.hpp"

namespace nb = nanobind;

// Replaces nanobind's caster, which is `noexcept`: without memory for the copy it would end the process.
template <>
struct nb::detail::type_caster<std::string> {
    NB_TYPE_CASTER(std::string, const_name("str"))

    bool from_python(handle given, uint32_t, cleanup_list*) {
        if (!PyUnicode_Check(given.ptr())) return false;
        Py_ssize_t bytes;
        const char* const text = PyUnicode_AsUTF8AndSize(given.ptr(), &bytes);
        if (!text) throw python_error();
        value.assign(text, static_cast<size_t>(bytes));
        return true;
    }
    static handle from_cpp(const std::string& text, rv_policy, cleanup_list*) {
        return PyUnicode_FromStringAndSize(text.data(), static_cast<Py_ssize_t>(text.size()));
    }
};

namespace shmacc {

// Takes over the new reference that a Python function returned. Null: throws Python's error.
inline nb::object checked(PyObject* made) {
    if (!made) throw nb::python_error();
    return nb::steal(made);
}

// nanobind's constructors do not check whether Python had memory for a dict or list, so the next write to it would go
// through a null pointer.
inline nb::dict new_dict() { return nb::borrow<nb::dict>(checked(PyDict_New())); }
inline nb::list new_list() { return nb::borrow<nb::list>(checked(PyList_New(0))); }

// When a thread asks for the GIL while the interpreter shuts down, Python unwinds the thread's stack, which no
// destructor survives. Such a thread sleeps here instead until the process is gone.
[[noreturn]] inline void sleep_until_the_end() {
    for (;;) pause();  // never returns: the catch block that called this must not end and rethrow
}

// Calls a C function that throws nothing itself, but may ask for the GIL. The call must make no object that has a
// destructor.
template <class Call>
auto call_python(Call call) {
    try {
        return call();
    } catch (...) {
        sleep_until_the_end();
    }
}

// These may run Python code, so Python may unwind the thread (call_python). nanobind's own calls have temporary
// objects, whose destructors would then drop references without the GIL; and `object.attr(name)(...)` passes on a null
// pointer if there is no memory for the name.
template <class... Arguments>
nb::object called(nb::handle function, const Arguments&... arguments) {
    return checked(call_python(
        [&] { return PyObject_CallFunctionObjArgs(function.ptr(), arguments.ptr()..., nullptr); }));
}
inline nb::object method(nb::handle object, const char* name) {
    return checked(call_python([&] { return PyObject_GetAttrString(object.ptr(), name); }));
}
inline nb::object imported(const char* module) {
    return checked(call_python([&] { return PyImport_ImportModule(module); }));
}
// Returns `otherwise` after any error.
inline nb::object attribute_or(nb::handle object, const char* name, nb::object otherwise) {
    PyObject* const found = call_python([&] { return PyObject_GetAttrString(object.ptr(), name); });
    if (found) return nb::steal(found);
    PyErr_Clear();
    return otherwise;
}

// Leads from a C++ object, which stays in a list until its destructor, to its Python object. This holds no reference.
// `nb::find` will not do: while Python destroys an object, weak references call back before the destructor, and
// nanobind would make a second Python object then, which would outlive the C++ object.
class OwnObject {
  public:
    // Call it while Python uses the object.
    template <class T>
    void find(const T* owner) {
        object_ = nb::find(owner).ptr();
    }
    // Returns a reference; an invalid one if Python is destroying the object, or if it has not been found.
    nb::object get() const { return object_ && Py_REFCNT(object_) > 0 ? nb::borrow(object_) : nb::object(); }

  private:
    PyObject* object_ = nullptr;
};

// These replace nanobind's casters for std::tuple and std::vector, which allocate Python objects on the stable ABI,
// report a lack of memory as a wrong type, and are `noexcept`.
template <class... T, size_t... i>
std::tuple<T...> unpacked(const nb::tuple& given, std::index_sequence<i...>) {
    return {nb::cast<T>(given[i])...};
}
template <class... T>
std::tuple<T...> unpacked(nb::handle given) {
    return unpacked<T...>(nb::borrow<nb::tuple>(given), std::index_sequence_for<T...>());
}
template <class T>
std::vector<T> vector_of(nb::handle given) {
    std::vector<T> all;
    for (const nb::handle item : given) all.push_back(nb::cast<T>(item));
    return all;
}

#ifdef Py_LIMITED_API
extern "C" int Py_IsFinalizing();  // in the limited API since 3.13; nanobind asks for 3.12's
#endif

inline bool finalizing() {
#if PY_VERSION_HEX >= 0x030d0000
    return Py_IsFinalizing();
#else
    return _Py_IsFinalizing();
#endif
}

// Whether this is Python's only thread; false if that cannot be known. Does not clear Python's error.
inline bool is_only_thread() {
    const nb::error_scope before;
    const nb::object frames = nb::borrow(PySys_GetObject("_current_frames"));  // a program may replace it
    const nb::object now = nb::steal(frames ? PyObject_CallNoArgs(frames.ptr()) : nullptr);
    return now && PyDict_Size(now.ptr()) == 1;
}

inline void take_gil(PyThreadState* state) {
    while (finalizing()) pause();
    call_python([state] { PyEval_RestoreThread(state); });
}

// Python's main thread, which alone runs signal handlers, as it was when this module was imported. Mostly it is the
// process's first thread; but a program that embeds Python may run it in another one. In a forked child it is the first
// thread, whichever thread has forked.
class MainThread {
  public:
    void find() {
        const nb::object found = nb::module_::import_("threading").attr("main_thread")();
        number_ = nb::cast<unsigned long>(found.attr("ident"));
        process_ = Origin();
    }
    bool is_this() const { return number_ == PyThread_get_thread_ident() && process_.is_here(); }

  private:
    unsigned long number_ = 0;  // of no thread
    Origin process_;
};
inline MainThread main_thread;

// Releases the GIL while it exists, but not in the thread that shuts the interpreter down: `take_gil` could not
// distinguish that thread from others. And no other thread could use the GIL meanwhile.
class WithoutGil {
  public:
    WithoutGil() : state_(finalizing() ? nullptr : PyEval_SaveThread()) {}
    ~WithoutGil() {
        if (state_) take_gil(state_);
    }
    WithoutGil(const WithoutGil&) = delete;
    WithoutGil& operator=(const WithoutGil&) = delete;

    // In Python's main thread: takes the GIL, runs signal handlers, and passes on their exceptions. If a handler has
    // forked, this throws in the child, which must not continue its parent's call.
    void check_signals() {
        const bool first = getpid() == gettid();
        if (!first && !main_thread.is_this()) {
            alone_ = true;  // this thread runs no handlers
            return;
        }
        const Origin origin;
        const bool released = state_ != nullptr;
        if (released) take_gil(state_);
        const bool raised = call_python(PyErr_CheckSignals) != 0;
        std::optional<nb::python_error> error;
        if (raised) error.emplace();
        alone_ = first && is_only_thread();
        if (released) state_ = PyEval_SaveThread();
        if (error) throw std::move(*error);
        if (!origin.is_here())
            throw Error(
                Failure::kCancelled,
                "The operation was cancelled: a signal handler forked, and only the parent goes on with it");
    }

    // Whether the signals that `check_signals` handles interrupt this thread's system calls. The kernel delivers a
    // process's signals to its first thread; but another Python thread may send a signal to itself, or simulate one.
    bool signals_come_here() const { return alone_; }

  private:
    PyThreadState* state_;
    bool alone_ = false;  // not known yet
};

// Returns the text, which need not be UTF-8, as a Python string. Null, with Python's error, if there is no memory.
inline PyObject* in_python(const std::string& text) {
    return PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), "replace");
}

inline int64_t deadline_after(std::optional<double> seconds) {
    if (!seconds) return kForever;
    constexpr double kCentury = 3.2e9;
    if (*seconds > kCentury) return kForever;
    return monotonic_ns() + static_cast<int64_t>(*seconds * 1e9);
}

// Gives an object to Python, or destroys it if Python has no memory: otherwise memory would be
// lost, and the process would stay attached by a handle that nobody can close.
template <class T>
nb::object give_to_python(std::unique_ptr<T> made) {
    nb::object object = nb::cast(made.get(), nb::rv_policy::take_ownership);
    made.release();
    return object;
}

// Wraps an object that Python passes back unread in a capsule, which costs less than a bound class. name: that of T.
template <class T>
nb::object given(std::unique_ptr<T> made, const char* name) {
    nb::object capsule = checked(PyCapsule_New(made.get(), name, [](PyObject* self) {
        delete static_cast<T*>(PyCapsule_GetPointer(self, PyCapsule_GetName(self)));
    }));
    made.release();
    return capsule;
}
template <class T>
T& made_as(nb::handle given, const char* name) {
    void* const made = PyCapsule_GetPointer(given.ptr(), name);
    if (!made) throw nb::python_error();
    return *static_cast<T*>(made);
}

constexpr uint32_t kAnyNumber = 0;
constexpr int kWritable = NPY_ARRAY_C_CONTIGUOUS | NPY_ARRAY_WRITEABLE;

// Loads NumPy's functions. Call it before they are used: inspection imports the module without NumPy.
void need_numpy();

// The memory of a NumPy array, for the lifetime of this object. It asks the array directly: a Py_buffer holds the array
// no more firmly, and takes a twentieth of a small apply.
template <class T>
class ArrayBuffer {
  public:
    // components: how many T make an element of the array; kAnyNumber: any number (see `components`).
    ArrayBuffer(nb::handle array, uint32_t components, int flags = NPY_ARRAY_C_CONTIGUOUS) {
        need_numpy();
        if (!PyArray_Check(array.ptr())) throw nb::type_error("this must be a NumPy array");
        array_ = nb::borrow(array);
        if (!PyArray_CHKFLAGS(get(), flags))
            throw nb::type_error(flags == kWritable ? "the array must be contiguous and writable"
                                                    : "the array must be contiguous");
        if (itemsize() % sizeof(T) || (components != kAnyNumber && components != this->components()))
            throw nb::type_error("the array's elements have the wrong size");
    }
    ArrayBuffer(const ArrayBuffer&) = delete;
    ArrayBuffer& operator=(const ArrayBuffer&) = delete;
    const T* data() const { return writable(); }
    T* writable() const { return static_cast<T*>(PyArray_DATA(get())); }
    uint64_t size() const { return static_cast<uint64_t>(PyArray_NBYTES(get())) / sizeof(T); }
    uint32_t components() const { return static_cast<uint32_t>(itemsize() / sizeof(T)); }
    // The array's dimensions without the first `skipped` ones, which it must have.
    Dims dims(int skipped) const {
        if (PyArray_NDIM(get()) < skipped) throw nb::type_error("the array has too few dimensions");
        return Dims(PyArray_DIMS(get()) + skipped, PyArray_DIMS(get()) + PyArray_NDIM(get()));
    }

  private:
    PyArrayObject* get() const { return reinterpret_cast<PyArrayObject*>(array_.ptr()); }
    uint64_t itemsize() const { return static_cast<uint64_t>(PyArray_ITEMSIZE(get())); }

    nb::object array_;
};

// Converts an array's elements into the memory of another array, which must have as many.
template <class From, class To, void (*convert)(const From*, To*, uint64_t)>
void convert_halves(nb::handle from, nb::handle to) {
    ArrayBuffer<From> source(from, 1);
    ArrayBuffer<To> target(to, 1, kWritable);
    if (source.size() != target.size()) throw Error(Failure::kInvalidArgument, "The arrays differ in size");
    WithoutGil released;
    convert(source.data(), target.writable(), source.size());
}

// Multiplies a gradient's values by its weight. Both arrays have the type of sums (complex: pairs). Returns false if a
// product does not fit.
inline bool weigh_values(nb::handle values, uint32_t sum, uint32_t components, int64_t weight, nb::handle to) {
    return with_sum_type(sum, [&](auto zero) {
        using T = decltype(zero);
        ArrayBuffer<T> source(values, components);
        ArrayBuffer<T> target(to, components, kWritable);
        if (source.size() != target.size())
            throw Error(Failure::kInvalidArgument, "The arrays differ in size");
        WithoutGil released;
        return weigh(source.data(), target.writable(), source.size(), weight);
    });
}

template <class T>
constexpr int kNumpyType = std::is_same_v<T, float>     ? NPY_FLOAT32
                           : std::is_same_v<T, double>  ? NPY_FLOAT64
                           : std::is_same_v<T, int64_t> ? NPY_INT64
                           : std::is_same_v<T, uint8_t> ? NPY_UINT8
                                                        : NPY_UINT64;

// Returns a NumPy array that takes over an Output's memory; two components make a complex number. If this throws, the
// Output keeps its memory. It calls NumPy directly: nanobind's conversion of arrays is much code, and a take that was
// just woken finds no code in the caches. Call need_numpy first.
template <class T>
nb::object array_of(Output& output, const int64_t* dims, size_t rank, uint32_t components = 1) {
    static_assert(std::is_same_v<int64_t, npy_intp>);
    const int type = components == 1 ? kNumpyType<T> : sizeof(T) == 4 ? NPY_COMPLEX64 : NPY_COMPLEX128;
    nb::object array = nb::steal(PyArray_SimpleNewFromData(static_cast<int>(rank), dims, type, output.get()));
    if (!array) throw nb::python_error();
    PyObject* owner = PyCapsule_New(output.get(), nullptr, nullptr);
    if (!owner || PyArray_SetBaseObject(reinterpret_cast<PyArrayObject*>(array.ptr()), owner) < 0)
        throw nb::python_error();
    PyCapsule_SetDestructor(owner,
                            [](PyObject* capsule) { Output::drop(PyCapsule_GetPointer(capsule, nullptr)); });
    output.release();
    return array;
}
template <class T>
nb::object array_of(Output& output, uint64_t size) {
    const auto length = static_cast<int64_t>(size);
    return array_of<T>(output, &length, 1);
}

}  // namespace shmacc
