// Gradients that are used as they are: NumPy's own arrays, of the type of sums, of a shape that fits.
//
// Most are, so this is looked at first, and at once. What is not plain is not wrong: Python converts it, or finds
// the words for what is wrong (arrays.py, gradients.py).
#pragma once

#include "python/python.hpp"

namespace shmacc {

// The value as a NumPy array, no subclass, of that type (NumPy's number), that an ArrayBuffer can read directly; or null.
inline PyArrayObject* plain_array(nb::handle value, int type_number) {
    need_numpy();
    if (!PyArray_CheckExact(value.ptr())) return nullptr;
    auto* array = reinterpret_cast<PyArrayObject*>(value.ptr());
    return PyArray_TYPE(array) == type_number && PyArray_ISCARRAY_RO(array) ? array : nullptr;
}
inline bool is_plain(nb::handle value, int type_number) { return plain_array(value, type_number); }

// A declared shape: integers, and None for what is unknown. Whether the array's dimensions from `first` on fit it;
// the array may have more of them.
inline bool has_dims(PyArrayObject* array, const nb::tuple& declared, int first) {
    const int rank = static_cast<int>(PyTuple_GET_SIZE(declared.ptr()));
    if (PyArray_NDIM(array) < rank) return false;
    for (int i = first; i < rank; ++i) {
        PyObject* const dim = PyTuple_GET_ITEM(declared.ptr(), i);
        if (dim != Py_None && PyLong_AsLongLong(dim) != PyArray_DIM(array, i)) return false;
    }
    return true;
}

// Whether a gradient of a dense member is plain. No declared shape: any will do.
inline bool is_plain_dense(nb::handle value, int type_number, const std::optional<nb::tuple>& declared) {
    PyArrayObject* const array = plain_array(value, type_number);
    if (!array || !declared) return array;
    return PyArray_NDIM(array) == PyTuple_GET_SIZE(declared->ptr()) && has_dims(array, *declared, 0);
}

// Whether the rows of a plain gradient of a sparse member are strictly ascending; nothing if it is not plain.
inline std::optional<bool> plain_rows_ascend(nb::handle indices, nb::handle values, int type_number,
                                             const std::optional<nb::tuple>& declared) {
    PyArrayObject* const keys = plain_array(indices, NPY_INT64);
    PyArrayObject* const rows = plain_array(values, type_number);
    if (!keys || !rows || PyArray_NDIM(keys) != 1 || PyArray_NDIM(rows) == 0 ||
        PyArray_DIM(keys, 0) != PyArray_DIM(rows, 0))
        return {};
    int64_t limit = INT64_MAX;
    if (declared) {
        if (!has_dims(rows, *declared, 1)) return {};
        PyObject* const first = PyTuple_GET_SIZE(declared->ptr()) ? PyTuple_GET_ITEM(declared->ptr(), 0)
                                                                  : Py_None;
        if (first != Py_None) limit = PyLong_AsLongLong(first);
    }
    const RowCheck check = check_rows(static_cast<const int64_t*>(PyArray_DATA(keys)),
                                      static_cast<uint64_t>(PyArray_DIM(keys, 0)), limit);
    if (check.over >= 0 || check.negative >= 0) return {};
    return check.ascending;
}

}  // namespace shmacc
