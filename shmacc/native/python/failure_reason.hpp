// Describes why a process has failed: by the exception that left one of its blocks, or that ends the process.
#pragma once

#include "python/interpreter.hpp"

namespace shmacc {

// Whether the process ends in order: without an exception, or by a SystemExit of 0 or None.
inline bool is_in_order(nb::handle error) {
    if (error.is_none()) return true;
    if (!PyErr_GivenExceptionMatches(error.ptr(), PyExc_SystemExit)) return false;
    const nb::object code = nb::getattr(error, "code", nb::none());
    return code.is_none() || (PyLong_Check(code.ptr()) && PyObject_IsTrue(code.ptr()) == 0);
}

// The exception that the parent was handling when it forked this process; in the child Python never stops handling it.
inline PyObject* parents_exception = nullptr;

// Returns the exception to report. A program that handles an exception by sys.exit(1), as torch.multiprocessing.spawn
// does in its workers, has failed by that exception: the SystemExit's number says nothing. A program may have set
// contexts that form a cycle, so this ends after kMost of them, and returns the given exception.
inline nb::object failed_by(nb::handle error) {
    constexpr int kMost = 1000;
    nb::object cause = nb::borrow(error);
    for (int seen = 0; seen < kMost; ++seen) {
        if (!PyErr_GivenExceptionMatches(cause.ptr(), PyExc_SystemExit)) return cause;
        if (!PyLong_Check(attribute_or(cause, "code", nb::none()).ptr())) return cause;
        nb::object handled = nb::steal(PyException_GetContext(cause.ptr()));
        if (!handled || handled.ptr() == parents_exception) return cause;
        cause = std::move(handled);
    }
    return nb::borrow(error);
}

inline PyObject* base_of_errors = nullptr;  // shmacc.errors.ShmaccError

// Cuts out the middle of a UTF-8 text, since the errors of this library say at their end what to do.
inline std::string without_middle(const std::string& text, size_t most) {
    if (text.size() <= most) return text;
    const auto inside = [&text](size_t at) { return (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80; };
    const std::string gap = " ... ";
    size_t head = (most - gap.size()) / 2, tail = text.size() - head;
    while (inside(head)) --head;
    while (tail < text.size() && inside(tail)) ++tail;
    return text.substr(0, head) + gap + text.substr(tail);
}

// The type's name and 200 characters of the text. An error of this library keeps its whole text, if a Reason has room.
// An exception that cannot be described has no text.
inline std::string describe_exception(nb::handle error) {
    constexpr Py_ssize_t kMostOfName = 100, kMostOfText = 200;
    const bool own = base_of_errors && PyErr_GivenExceptionMatches(error.ptr(), base_of_errors);
    std::string text;
    const auto append = [&text](PyObject* whole, Py_ssize_t most, const char* before) {
        const nb::object given = nb::steal(whole);
        const nb::object part = nb::steal(given ? PyUnicode_Substring(given.ptr(), 0, most) : nullptr);
        const nb::object bytes = nb::steal(part ? PyUnicode_AsEncodedString(part.ptr(), "utf-8", "replace")
                                                : nullptr);
        if (!bytes) PyErr_Clear();
        if (!bytes || PyBytes_Size(bytes.ptr()) == 0) return;
        text += before;
        text.append(PyBytes_AsString(bytes.ptr()), static_cast<size_t>(PyBytes_Size(bytes.ptr())));
    };
    append(PyObject_GetAttrString(reinterpret_cast<PyObject*>(Py_TYPE(error.ptr())), "__name__"), kMostOfName,
           "");
    append(call_python([error] { return PyObject_Str(error.ptr()); }), own ? PY_SSIZE_T_MAX : kMostOfText,
           ": ");
    return own ? without_middle(text, sizeof Reason::text) : text;
}

// Returns whether the process has reported this exception since it attached, and marks the exception as reported: the
// same exception may leave several blocks, and then end the process. stay: the token in Presence, which differs for
// each process and each time that it attaches. So an exception is not known if another process has failed with it and
// pickled it, or if a program raises it again after it has attached anew.
inline bool is_known(nb::handle error, uint64_t stay) {
    constexpr const char* kFailedIn = "_shmacc_failed_in";
    const nb::object before = attribute_or(error, kFailedIn, nb::make_tuple());
    const nb::int_ here(stay);
    if (call_python([&] { return PySequence_Contains(before.ptr(), here.ptr()); }) == 1) return true;
    PyErr_Clear();  // if an attribute of that name is no sequence
    const nb::tuple added = nb::make_tuple(here);
    const nb::object after = nb::steal(
        call_python([&] { return PySequence_Concat(before.ptr(), added.ptr()); }));
    if (!after || call_python([&] { return PyObject_SetAttrString(error.ptr(), kFailedIn, after.ptr()); }) != 0)
        PyErr_Clear();
    return false;
}

// Returns the reason for OpenSegment::note_failure if a process leaves a segment with this exception; nullopt: it has
// not failed. Empty: reported before, no memory, or nobody waits for the process (stay 0: it is not attached).
inline std::optional<std::string> reason_of(nb::handle error, uint64_t stay) {
    if (is_in_order(error)) return std::nullopt;
    if (stay == 0) return "";
    try {
        const nb::object cause = failed_by(error);
        return is_known(cause, stay) ? "" : describe_exception(cause);
    } catch (...) {
        PyErr_Clear();
        return "";
    }
}

}  // namespace shmacc
