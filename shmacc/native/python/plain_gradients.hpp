// Plain gradients need no conversion: they are arrays of the type of sums, and their shape fits. These are NumPy's own
// arrays, other packages' tensors viewed as arrays (tensors.hpp), or arrays made from lists (numbers.hpp).
//
// Most gradients are plain, so this fast path comes first. Python converts the others, or reports the error (arrays.py,
// gradient_checks.py).
#pragma once

#include "python/handle.hpp"
#include "python/numbers.hpp"
#include "python/tensors.hpp"

namespace shmacc {

// Whether an ArrayBuffer can read an object directly: it is a NumPy array of that type (NumPy's type number), and of no
// subclass.
inline bool is_plain(PyObject* value, int type_number) {
    auto* array = reinterpret_cast<PyArrayObject*>(value);
    return PyArray_CheckExact(value) && PyArray_TYPE(array) == type_number && PyArray_ISCARRAY_RO(array);
}

// The fast path failed: returns, so that Python retries and reports the error. But if a signal handler raised the
// exception, passes it on, as signals.py does, with the function that called the extension in its traceback.
inline void pass_on(nb::python_error& error) {
    const bool ends_program = !error.matches(PyExc_Exception);
    error.restore();
    if (ends_program) throw nb::python_error();
    if (PyFrameObject* const frame = PyEval_GetFrame()) PyTraceBack_Here(frame);
    const nb::python_error raised;
    called(method(imported("shmacc._base.signals"), "pass_on"), raised.value());
}

// Returns the value as a plain array of that type; None: it is not plain.
inline nb::object plain_array(nb::handle value, int type_number) {
    need_numpy();
    if (is_plain(value.ptr(), type_number)) return nb::borrow(value);
    if (type_number < 0 || PyArray_CheckExact(value.ptr())) return nb::none();
    try {
        nb::object array = array_of_numbers(value.ptr(), type_number);
        if (!array) array = array_of_tensor(value.ptr(), type_number);
        if (!array) array = array_of_buffer(value.ptr());
        return array && is_plain(array.ptr(), type_number) ? array : nb::none();
    } catch (nb::python_error& error) {
        pass_on(error);
        return nb::none();
    }
}

// Returns row numbers as a plain array of int64; None: they are not plain. int32, which JAX makes, is converted.
//
// The array is always a private copy. Row numbers are read several times: they are checked, sorted, looked up and put
// into tables, mostly without the GIL. If Python could change them meanwhile, the check would prove nothing. Values may
// change: any bytes are valid numbers.
inline nb::object plain_indices(nb::handle value) {
    nb::object given = plain_array(value, NPY_INT64);
    const bool wide = !given.is_none();
    if (!wide) given = plain_array(value, NPY_INT32);
    if (given.is_none()) return given;
    auto* const array = reinterpret_cast<PyArrayObject*>(given.ptr());
    nb::object own = nb::steal(call_python([&] {
        return wide ? PyArray_SimpleNew(PyArray_NDIM(array), PyArray_DIMS(array), NPY_INT64)
                    : PyArray_Cast(array, NPY_INT64);
    }));
    if (own && wide)  // NumPy's own way to copy is slower, by a tenth of a small apply
        std::memcpy(PyArray_DATA(reinterpret_cast<PyArrayObject*>(own.ptr())), PyArray_DATA(array),
                    static_cast<size_t>(PyArray_NBYTES(array)));
    if (own) return own;
    PyErr_Clear();  // there is no memory for the copy: Python reports that
    return nb::none();
}

// Whether the array's rank, and its dimensions from `first` on, fit the declared shape (None: an unknown dimension).
inline bool has_dims(PyArrayObject* array, const nb::tuple& declared, int first) {
    const int rank = static_cast<int>(PyTuple_Size(declared.ptr()));
    if (PyArray_NDIM(array) != rank) return false;
    for (int i = first; i < rank; ++i) {
        PyObject* const dim = PyTuple_GetItem(declared.ptr(), i);
        if (dim != Py_None && PyLong_AsLongLong(dim) != PyArray_DIM(array, i)) return false;
    }
    return true;
}

using Declared = std::optional<nb::tuple>;  // nullopt: any shape will do

// Returns a dense member's gradient as a plain array; None: it is not plain.
inline nb::object plain_value(nb::handle value, int type_number, const Declared& declared) {
    nb::object plain = plain_array(value, type_number);
    if (plain.is_none() || !declared) return plain;
    auto* const array = reinterpret_cast<PyArrayObject*>(plain.ptr());
    return has_dims(array, *declared, 0) ? plain : nb::none();
}

struct PlainRows {
    nb::object indices, values;
    bool ascending;  // strictly
};
inline std::optional<PlainRows> plain_slices(nb::handle indices, nb::handle values, int type_number,
                                             const Declared& declared) {
    nb::object row_numbers = plain_indices(indices);
    if (row_numbers.is_none()) return {};
    nb::object numbers = plain_array(values, type_number);
    if (numbers.is_none()) return {};
    auto* const keys = reinterpret_cast<PyArrayObject*>(row_numbers.ptr());
    auto* const rows = reinterpret_cast<PyArrayObject*>(numbers.ptr());
    if (PyArray_NDIM(keys) != 1 || PyArray_NDIM(rows) == 0 || PyArray_DIM(keys, 0) != PyArray_DIM(rows, 0))
        return {};
    int64_t limit = INT64_MAX;
    if (declared && PyTuple_Size(declared->ptr()) > 0) {  // with rank 0 any shape fits: gradient_checks.py
        if (!has_dims(rows, *declared, 1)) return {};
        PyObject* const first = PyTuple_GetItem(declared->ptr(), 0);
        if (first != Py_None) limit = PyLong_AsLongLong(first);
    }
    const RowCheck check = check_rows(static_cast<const int64_t*>(PyArray_DATA(keys)),
                                      static_cast<uint64_t>(PyArray_DIM(keys, 0)), limit);
    if (check.over >= 0 || check.negative >= 0) return {};
    return PlainRows{std::move(row_numbers), std::move(numbers), check.ascending};
}

// The next two functions apply a gradient if it is plain. If not, they do nothing and return None.
inline std::optional<bool> apply_plain_rows(Handle& handle, nb::handle indices, nb::handle values,
                                            int type_number, const Declared& declared, int64_t local_step,
                                            nb::handle terms) {
    const std::optional<PlainRows> rows = plain_slices(indices, values, type_number, declared);
    if (!rows) return {};
    return handle.apply_sparse(rows->indices, rows->values, Py_None, rows->ascending, local_step, terms);
}
inline std::optional<bool> apply_plain_dense(Handle& handle, nb::handle value, int type_number,
                                             const Declared& declared, int64_t local_step, nb::handle terms) {
    const nb::object plain = plain_value(value, type_number, declared);
    if (plain.is_none()) return {};
    return handle.apply_dense(plain, local_step, terms);
}

// The next two functions make the gradient of one member if it is plain. If not, they return None.
inline nb::object plain_rows(uint32_t member, uint32_t sum, uint32_t reduction, nb::handle indices,
                             nb::handle values, int type_number, const Declared& declared) {
    const std::optional<PlainRows> rows = plain_slices(indices, values, type_number, declared);
    if (!rows) return nb::none();
    return sparse_gradient(member, sum, reduction, rows->indices, rows->values, Py_None, rows->ascending, 1, 1);
}
inline nb::object plain_dense(uint32_t member, uint32_t sum, uint32_t reduction, nb::handle value,
                              int type_number, const Declared& declared) {
    const nb::object plain = plain_value(value, type_number, declared);
    if (plain.is_none()) return plain;
    return dense_gradient(member, sum, reduction, plain, 1, 1);
}

}  // namespace shmacc
