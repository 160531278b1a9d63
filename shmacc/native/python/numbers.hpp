// Converts lists of Python numbers to arrays, faster than NumPy, which asks for each number's type several times.
//
// Some lists are not converted here: ragged, empty or deep ones, and those with several types or with a number that
// does not fit. NumPy converts them, or Python reports the error (arrays.py).
#pragma once

#include <cfloat>
#include <cmath>

#include "python/interpreter.hpp"

namespace shmacc {

// The items of a list or tuple, but not of a subclass. They are valid until Python code runs, which may change a list.
class Items {
  public:
    explicit Items(PyObject* value)
        : sequence_(PyList_CheckExact(value) || PyTuple_CheckExact(value) ? value : nullptr) {}
    explicit operator bool() const { return sequence_; }
    Py_ssize_t size() const {
        return PyList_Check(sequence_) ? PyList_Size(sequence_) : PyTuple_Size(sequence_);
    }
    PyObject* operator[](Py_ssize_t i) const {
        return PyList_Check(sequence_) ? PyList_GetItem(sequence_, i) : PyTuple_GetItem(sequence_, i);
    }

  private:
    PyObject* const sequence_;
};

// Writes the number to `to`. Returns false if it has another type, or is out of range. Runs no Python code.
inline bool read_number(PyObject* number, double* to) {
    if (!PyFloat_CheckExact(number)) return false;
    *to = PyFloat_AsDouble(number);
    return true;
}
inline bool read_number(PyObject* number, float* to) {
    double wide;
    if (!read_number(number, &wide) || (std::isfinite(wide) && std::fabs(wide) > FLT_MAX)) return false;
    *to = static_cast<float>(wide);
    return true;
}
inline bool read_number(PyObject* number, int64_t* to) {
    if (!PyLong_CheckExact(number)) return false;
    int overflow = 0;
    *to = PyLong_AsLongLongAndOverflow(number, &overflow);
    return overflow == 0;
}

// Reads lists nested `rank` deep, with the given lengths; returns the end of what was written; null: they differ.
template <class T>
T* read_numbers(PyObject* value, const npy_intp* lengths, int rank, T* to) {
    const Items items(value);
    if (!items || items.size() != *lengths) return nullptr;
    for (Py_ssize_t i = 0; to && i < *lengths; ++i) {
        if (rank > 1)
            to = read_numbers(items[i], lengths + 1, rank - 1, to);
        else
            to = read_number(items[i], to) ? to + 1 : nullptr;
    }
    return to;
}

template <class T>
nb::object array_of_numbers(PyObject* value) {
    constexpr int kDeepest = 8;
    npy_intp lengths[kDeepest];
    int rank = 0;
    for (PyObject* inner = value;;) {
        const Items items(inner);
        if (!items) break;
        if (items.size() == 0 || rank == kDeepest) return {};
        lengths[rank++] = items.size();
        inner = items[0];
    }
    if (rank == 0) return {};
    nb::object array = checked(PyArray_SimpleNew(rank, lengths, kNumpyType<T>));
    T* const memory = static_cast<T*>(PyArray_DATA(reinterpret_cast<PyArrayObject*>(array.ptr())));
    return read_numbers(value, lengths, rank, memory) ? array : nb::object();
}

// Makes an array of that type (NumPy's type number) from a list or tuple; null: the value is not converted here.
inline nb::object array_of_numbers(PyObject* value, int type_number) {
    switch (type_number) {
        case NPY_FLOAT32: return array_of_numbers<float>(value);
        case NPY_FLOAT64: return array_of_numbers<double>(value);
        case NPY_INT64: return array_of_numbers<int64_t>(value);
        default: return {};
    }
}

}  // namespace shmacc
