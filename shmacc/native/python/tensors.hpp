// Views other packages' arrays as NumPy arrays on the same memory: torch's tensors, and arrays that export a buffer, as
// JAX's do.
//
// foreign.py and arrays.py do the same, but their calls take several times as long as the apply of a few rows. They
// convert the values that are not converted here, or report the error. No package is imported here: a program that has
// a tensor has imported torch.
#pragma once

#include "python/interpreter.hpp"

namespace shmacc {

// Names that are looked up for each tensor, made once, since making a string takes as long as the look-up.
class Names {
  public:
    static const Names& get() {
        static const Names names;
        return names;
    }
    PyObject* const torch = make("torch");
    PyObject* const tensor = make("Tensor");
    PyObject* const requires_grad = make("requires_grad");
    PyObject* const dtype = make("dtype");
    PyObject* const numpy = make("numpy");
    PyObject* const array = make("__array__");

    // Torch's name of a type (NumPy's type number); null: torch has no such type, or spells it differently.
    PyObject* torch_dtype(int type_number) const {
        switch (type_number) {
            case NPY_FLOAT32: return float32_;
            case NPY_FLOAT64: return float64_;
            case NPY_INT32: return int32_;
            case NPY_INT64: return int64_;
            case NPY_UINT64: return uint64_;
            case NPY_COMPLEX64: return complex64_;
            case NPY_COMPLEX128: return complex128_;
            default: return nullptr;
        }
    }

  private:
    // The string is never freed: there is one for the process.
    static PyObject* make(const char* name) {
        PyObject* const made = PyUnicode_InternFromString(name);
        if (!made) throw nb::python_error();
        return made;
    }
    PyObject* const float32_ = make("float32");
    PyObject* const float64_ = make("float64");
    PyObject* const int32_ = make("int32");
    PyObject* const int64_ = make("int64");
    PyObject* const uint64_ = make("uint64");
    PyObject* const complex64_ = make("complex64");
    PyObject* const complex128_ = make("complex128");
};

inline nb::object attribute(PyObject* of, PyObject* name) {
    return checked(call_python([=] { return PyObject_GetAttr(of, name); }));
}

// Returns a tensor's array. null: the value is no tensor of torch's own class with that type (NumPy's type number), or
// requires grad. The array keeps the tensor alive, and torch resizes no tensor that has an array.
inline nb::object array_of_tensor(PyObject* value, int type_number) {
    const Names& names = Names::get();
    const nb::object torch = nb::borrow(PyDict_GetItem(PyImport_GetModuleDict(), names.torch));
    PyObject* const dtype = names.torch_dtype(type_number);
    if (!dtype || !torch || !PyModule_Check(torch.ptr())) return {};
    // Look into the dict: asking for an attribute could load a lazy module.
    PyObject* const has = PyModule_GetDict(torch.ptr());
    if (PyDict_GetItem(has, names.tensor) != reinterpret_cast<PyObject*>(Py_TYPE(value))) return {};
    // numpy() itself accepts tensors that require grad where torch records no gradients, and is slow to refuse a type.
    if (attribute(value, names.requires_grad).ptr() != Py_False ||
        attribute(value, names.dtype).ptr() != PyDict_GetItem(has, dtype))
        return {};
    return checked(call_python([&] { return PyObject_CallMethodObjArgs(value, names.numpy, nullptr); }));
}

// Returns the array of another package's object if NumPy reads it by its buffer; else null. Refuses subclasses of
// NumPy's own array, since some have a mask.
inline nb::object array_of_buffer(PyObject* value) {
    if (!PyObject_CheckBuffer(value) || PyArray_Check(value)) return {};
    if (!PyObject_HasAttr(reinterpret_cast<PyObject*>(Py_TYPE(value)), Names::get().array)) return {};
    const nb::object memory = checked(call_python([=] { return PyMemoryView_FromObject(value); }));
    return checked(call_python([&] { return PyArray_FROM_O(memory.ptr()); }));
}

}  // namespace shmacc
