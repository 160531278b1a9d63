// The extension module: shmacc._core.
#define SHMACC_HAS_NUMPY
#include "python/found.hpp"
#include "python/handle.hpp"
#include "python/name_lock.hpp"
#include "python/plain_gradients.hpp"
#include "python/shared_arrays.hpp"
#include "python/tables.hpp"

namespace shmacc {

void need_numpy() {
    if (!PyArray_API && _import_array() < 0) throw nb::python_error();
}

// Classes and functions that are bound in units of their own.
void bind_handle(nb::module_& m);
void bind_inspection(nb::module_& m);
void bind_parameters(nb::module_& m);
void export_layout(nb::module_& m);

namespace {

// (name, kind, dtype, sum, components, reduction, declared, lowest, highest, optimizer, table), as spec.py makes it.
MemberSpec member_spec(const nb::tuple& given) {
    const nb::object declared = given[6];
    MemberSpec spec{nb::cast<uint32_t>(given[1]),
                    nb::cast<uint32_t>(given[2]),
                    nb::cast<uint32_t>(given[3]),
                    nb::cast<uint32_t>(given[4]),
                    nb::cast<uint32_t>(given[5]),
                    declared.is_none() ? std::nullopt : std::optional(vector_of<int64_t>(declared)),
                    nb::cast<int64_t>(given[7]),
                    nb::cast<uint64_t>(given[8]),
                    nb::cast<std::string>(given[0]),
                    {}};
    if (spec.name.size() > kMaxMemberName)
        throw Error(Failure::kInvalidArgument, "A member's name is too long");
    if (spec.declared && spec.declared->size() > kMaxRank)
        throw Error(Failure::kInvalidArgument, "A shape has at most 64 dimensions");
    spec.set_round();
    spec.optimizer = optimizer_spec(nb::cast<nb::tuple>(given[9]));
    if (spec.kind == kTable) {
        const auto [initial, parameters, seed,
                    max_rows] = unpacked<uint64_t, nb::object, uint64_t, std::optional<uint64_t>>(given[10]);
        spec.table = table_spec(initial, vector_of<double>(parameters), seed, max_rows.value_or(kMaxRows));
        if (!has_rows_of_known_size(spec))
            throw Error(Failure::kInvalidArgument, "The table is out of range");
    }
    return spec;
}

// Returns an attached handle on a new segment; None if the name is taken, or was removed meanwhile. arrays: for
// NewArrays; empty if the segment has no arrays.
nb::object create(const std::string& path, const std::string& semaphore_path, const std::string& name,
                  uint32_t kind, const nb::list& members, uint32_t reduction, uint32_t lanes,
                  std::optional<int64_t> capacity, bool is_private, bool unlink_on_close, uint64_t token,
                  const nb::bytes& hash_key, uint32_t mode, const nb::list& arrays) {
    Config config{};
    if (hash_key.size() != sizeof config.hash_key)
        throw Error(Failure::kInvalidArgument, "The hash's key has the wrong length");
    std::memcpy(config.hash_key, hash_key.data(), sizeof config.hash_key);
    config.kind = kind;
    config.reduction = reduction;
    config.lanes = lanes;
    config.capacity = capacity.value_or(kUnbounded);
    config.is_private = is_private;
    config.token = token;
    config.mode = mode;
    this_process();
    config.created_ns = timestamp_ns();
    if (name.size() > kMaxName || members.size() < 1 || members.size() > kMaxMembers || lanes < 1 ||
        lanes > kMaxLanes || config.capacity < 1)
        throw Error(Failure::kInvalidArgument, "The configuration is out of range");
    config.name_length = static_cast<uint32_t>(name.size());
    std::copy(name.begin(), name.end(), config.name);
    MemberSpecs specs;
    for (const nb::handle member : members) specs.push_back(member_spec(nb::borrow<nb::tuple>(member)));
    const NewArrays made_with(arrays);
    if (made_with.members() != (has_arrays(kind) ? specs.size() : 0))
        throw Error(Failure::kInvalidArgument, "The configuration is out of range");
    std::optional<std::pair<std::string, std::string>> own_names;
    if (is_private || unlink_on_close) own_names.emplace(path, semaphore_path);
    const auto fill = [&](const SegmentFile& made, const Config& made_config) {
        if (made_with.members() > 0) made_with.fill(made, made_config);
    };
    const auto file = create_segment(path, semaphore_path, config, specs, unlink_on_close,
                                     made_with.reserved(), fill);
    if (!file) return nb::none();
    try {
        if (!file->open_by_name(path)) {
            unlink(semaphore_path.c_str());
            return nb::none();
        }
        const Opened opened = open_segment_file(path, SegmentFile::Access::kWrite, std::nullopt);
        if (opened.file != file) return nb::none();
        auto made = std::make_unique<Handle>(OpenSegment::on(file, opened.config, opened.specs),
                                             std::move(own_names));
        Handle& handle = *made;
        nb::object object = give_to_python(std::move(made));  // before it attaches, so that Python closes it
        return handle.enter(path, semaphore_path) ? object : nb::none();
    } catch (...) {
        // A segment that cannot be attached, for lack of space for instance, is removed again, if possible.
        try {
            with_name_lock(*file, false, [&] { take_back_new(*file, path, semaphore_path); });
        } catch (const Error&) {
        }
        throw;
    }
}

nb::tuple open_segment(const std::string& path, nb::handle owners) {
    const Owners allowed = owners.is_none() ? std::nullopt : Owners(vector_of<uint32_t>(owners));
    return open_found(path, SegmentFile::Access::kWrite, allowed, [](Opened opened) {
        return give_to_python(
            std::make_unique<Handle>(OpenSegment::on(opened.file, opened.config, std::move(opened.specs))));
    });
}

// In the order of Failure. The classes are looked up once, in advance: a translator that ran Python code could be
// interrupted by the interpreter's end.
constexpr const char* kErrorNames[] = {
    "InvalidArgumentError",    "DeadlineExceededError",  "CancelledError",        "NotFoundError",
    "FailedPreconditionError", "ResourceExhaustedError", "PermissionDeniedError", "OutOfRangeError",
    "DataLossError",           "AlreadyExistsError",     "WorkerDiedError",       "FinishedError",
    "ChiefDiedError",          "InternalError",
};
PyObject* error_classes[std::size(kErrorNames)];

void set_error(const Error& error) {
    PyObject* type = error_classes[static_cast<int>(error.failure())];
    const nb::object message = nb::steal(in_python(error.what()));
    if (!message) return;
    nb::object made = nb::steal(
        call_python([&] { return PyObject_CallFunctionObjArgs(type, message.ptr(), nullptr); }));
    if (!made) return;
    for (const auto& [name, value] : error.fields()) {
        const nb::object number = nb::steal(PyLong_FromLongLong(value));
        if (!number || PyObject_SetAttrString(made.ptr(), name, number.ptr()) != 0) return;
    }
    const auto set_tuples = [&](const auto& lists, auto make) {
        for (const auto& [name, values] : lists) {
            const nb::object list = nb::steal(PyTuple_New(static_cast<Py_ssize_t>(values.size())));
            if (!list) return false;
            for (size_t i = 0; i < values.size(); ++i) {
                PyObject* const item = make(values[i]);
                if (!item) return false;
                PyTuple_SetItem(list.ptr(), static_cast<Py_ssize_t>(i), item);
            }
            if (PyObject_SetAttrString(made.ptr(), name, list.ptr()) != 0) return false;
        }
        return true;
    };
    if (set_tuples(error.lists(), PyLong_FromLongLong) && set_tuples(error.texts(), in_python))
        PyErr_SetObject(type, made.ptr());
}

// Without memory for the error itself, Python's MemoryError is set, which is its base.
void set_no_memory(const char* what) {
    try {
        set_error(Error(Failure::kResourceExhausted, what));
    } catch (const std::bad_alloc&) {
        PyErr_NoMemory();
    }
}

// Called by the interpreter, after a write to a read-only array. If there is no memory for the write's error, this
// raises another one, and the next use of the library raises the write's. (Not the next call of this function: Python
// has a call in its queue for each array that was written, and would make it while the program handles the first.)
int raise_refused_write(void*) {
    if (forking) return 0;  // after_fork_in_parent asks again
    if (owed && !some_written) return 0;
    std::optional<Error> error;
    try {
        error = undo_writes();
        if (!error) return 0;
        set_error(*error);
    } catch (const std::bad_alloc&) {
        set_no_memory("This process has no memory left to report a write to a read-only array");
    }
    if (error && PyErr_ExceptionMatches(PyExc_MemoryError)) {
        untold = std::move(error);
        owed = true;
    }
    return -1;
}

// The GIL guards what a handle keeps in this process. A free-threaded interpreter enables its GIL for this extension,
// which does not declare that it needs no GIL. But a user can forbid that.
void refuse_without_gil() {
    const nb::object sys = nb::module_::import_("sys");
    if (nb::hasattr(sys, "_is_gil_enabled") && !nb::cast<bool>(sys.attr("_is_gil_enabled")()))
        throw nb::import_error(
            "shmacc needs the GIL, which PYTHON_GIL=0 or -X gil=0 keeps a free-threaded Python from "
            "enabling: start Python without it, and its threads take turns; processes run in parallel all "
            "the same");
}

// nanobind keeps one registry of types for the process. A second interpreter would replace the first one's types there,
// and make the first one's objects unknown. So this refuses a second interpreter before nanobind begins.
bool refuse_in_subinterpreter() {
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) == 0) return false;  // the main one
    PyErr_SetString(
        PyExc_ImportError,
        "shmacc works in a process's main interpreter only, and this is a sub-interpreter; processes "
        "are what it is for: use them in its place");
    return true;
}

// Opens a file as os.open does, but returns an object that owns the descriptor from the start, and whose number is
// above the standard streams (libmdbx#144, monero#6147).
Descriptor open_file(nb::handle path, int flags, mode_t mode) {
    PyObject* encoded = nullptr;
    if (!PyUnicode_FSConverter(path.ptr(), &encoded)) nb::raise_python_error();
    const nb::bytes name = nb::steal<nb::bytes>(encoded);
    int error = 0;
    Descriptor opened = [&] {
        WithoutGil released;
        Descriptor file = open_above_streams(name.c_str(), flags, mode);
        error = errno;
        return file;
    }();
    if (opened) return opened;
    errno = error;
    PyErr_SetFromErrnoWithFilenameObject(PyExc_OSError, path.ptr());
    nb::raise_python_error();
}

// nanobind's table of instances grows when there are more instances than ever before, in functions that are `noexcept`:
// there a lack of memory would end the process. So it grows here, to what few processes need; since nanobind 2.11 it
// never shrinks.
void make_room_for_instances() {
    std::vector<nb::object> made(1000);
    for (nb::object& each : made) each = nb::cast(Descriptor());
}

int (*execute)(PyObject*);  // nanobind's function for Py_mod_exec
int execute_in_main(PyObject* m) { return refuse_in_subinterpreter() ? -1 : execute(m); }

}  // namespace
}  // namespace shmacc

// NB_MODULE defines PyInit__core, here renamed. Python calls the PyInit__core below, which calls the renamed one.
#define PyInit__core init_by_nanobind
extern "C" PyObject* init_by_nanobind();
NB_MODULE(_core, m) {
    using namespace shmacc;
    refuse_without_gil();
    nb::set_leak_warnings(false);  // handles may outlive the interpreter in daemon threads
    nb::module_ errors = nb::module_::import_("shmacc.errors");
    main_thread.find();
    nb::module_::import_("contextvars");  // timeline.hpp needs it where no Python may run
    for (size_t i = 0; i < std::size(kErrorNames); ++i)
        error_classes[i] = nb::object(errors.attr(kErrorNames[i])).release().ptr();
    base_of_errors = nb::object(errors.attr("ShmaccError")).release().ptr();
    nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
        // Null: no C++ exception, but Python unwinding this thread, which asked for the GIL at shutdown (take_gil).
        if (!pointer) sleep_until_the_end();
        try {
            std::rethrow_exception(pointer);
        } catch (const Error& error) {
            set_error(error);
        } catch (const std::bad_alloc&) {
            set_no_memory("This process has no memory left for the result or its sorting");
        }
    });

    nb::class_<Descriptor>(m, "Descriptor").def("fileno", &Descriptor::get).def("close", [](Descriptor& self) {
        self = Descriptor();
    });
    m.def("open_file", &open_file, nb::arg("path"), nb::arg("flags"), nb::arg("mode") = 0);

    bind_handle(m);
    bind_inspection(m);
    bind_parameters(m);

    m.def("open", &open_segment, nb::arg("path"), nb::arg("owners").none());
    m.def("create", &create, nb::arg("path"), nb::arg("semaphore_path"), nb::arg("name"), nb::arg("kind"),
          nb::arg("members"), nb::arg("reduction"), nb::arg("lanes"), nb::arg("capacity").none(),
          nb::arg("is_private"), nb::arg("unlink_on_close"), nb::arg("token"), nb::arg("hash_key"),
          nb::arg("mode"), nb::arg("arrays"));
    m.def("is_in_order", &is_in_order, nb::arg("error").none());
    m.def(
        "note_parents_exception", [](nb::handle error) { parents_exception = error.ptr(); },
        nb::arg("error").none());
    m.def("remove_unfinished", &remove_unfinished, nb::arg("path"));
    m.def("boottime_offset_ns", [] {
        this_process();
        return clock_offset.boottime_ns.load(std::memory_order_relaxed);
    });
    m.def("semaphore_is_being_made", &NamedSemaphore::is_being_made, nb::arg("path"));
    m.attr("CONVERTS_HALVES") = converts_halves();
    m.def("widen", &convert_halves<uint16_t, float, &widen>, nb::arg("halves"), nb::arg("floats"));
    m.def("narrow", &convert_halves<float, uint16_t, &narrow>, nb::arg("floats"), nb::arg("halves"));
    m.def("weigh", &weigh_values, nb::arg("values"), nb::arg("sum"), nb::arg("components"), nb::arg("weight"),
          nb::arg("to"));
    m.def("plain_array", &plain_array, nb::arg("value").none(), nb::arg("type_number"));
    m.def(
        "check_rows",
        [](nb::handle indices, int64_t limit) {
            ArrayBuffer<int64_t> keys(indices, 1);
            RowCheck check = check_rows(keys.data(), keys.size(), limit);
            return nb::make_tuple(check.ascending, check.over, check.negative);
        },
        nb::arg("indices"), nb::arg("limit"));
    m.def(
        "repeated_row",
        [](nb::handle indices) {
            ArrayBuffer<int64_t> keys(indices, 1);
            if (keys.size() > kMaxRows) throw Error(Failure::kInvalidArgument, "More rows than 2**32");
            return repeated_row(keys.data(), keys.size());
        },
        nb::arg("indices"));
    m.def(
        "memory",
        [](uint64_t bytes) {
            need_numpy();
            Output memory(bytes);
            return array_of<uint8_t>(memory, bytes);
        },
        nb::arg("bytes"));
    m.def("merge_columns", &merge_columns_of, nb::arg("rows"), nb::arg("counts"), nb::arg("lengths"));
    m.def("put_values", &put_values_of, nb::arg("wholes"), nb::arg("firsts"), nb::arg("lengths"),
          nb::arg("positions"), nb::arg("values"));
    raise_written = &raise_refused_write;
    make_fork_hooks();
    make_room_for_instances();
    if (const int failed = watch_forks())
        throw nb::import_error(
            (std::string("shmacc cannot watch for forks: pthread_atfork: ") + std::strerror(failed)).c_str());
    export_layout(m);
}
#undef PyInit__core

// From Python 3.13 on this function runs in the main interpreter for all interpreters; only the slots of the module
// definition that it returns run in the importing interpreter.
extern "C" NB_EXPORT PyObject* PyInit__core() {
    using namespace shmacc;
    if (refuse_in_subinterpreter()) return nullptr;
    PyObject* const made = init_by_nanobind();
    if (!made || !PyObject_TypeCheck(made, &PyModuleDef_Type)) return made;
    for (PyModuleDef_Slot* slot = reinterpret_cast<PyModuleDef*>(made)->m_slots; slot->slot != 0; ++slot) {
        if (slot->slot != Py_mod_exec || slot->value == reinterpret_cast<void*>(execute_in_main)) continue;
        execute = reinterpret_cast<int (*)(PyObject*)>(slot->value);
        slot->value = reinterpret_cast<void*>(execute_in_main);
    }
    return made;
}
