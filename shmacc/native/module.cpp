// The extension module: shmacc._core.
#include "handle.hpp"
#include "view.hpp"

namespace shmacc {
namespace {

// Python's, from here on. If Python has no memory for that, it is destroyed: a process does not stay attached by
// what nobody can close.
template <class T>
nb::object give_to_python(std::unique_ptr<T> made) {
    nb::object object = nb::cast(made.get(), nb::rv_policy::take_ownership);
    made.release();
    return object;
}

// A handle on a new segment, attached; none if the name is taken, or was taken away at once.
nb::object create(const std::string& path, const std::string& semaphore_path, const std::string& name,
                  uint32_t kind, uint32_t dtype, uint32_t sum, uint32_t components, uint32_t reduction,
                  std::optional<Dims> declared, bool is_private, bool unlink_on_close, uint64_t token,
                  const nb::bytes& hash_key, uint32_t mode) {
    Config config{};
    if (hash_key.size() != sizeof config.hash_key)
        throw Error(Failure::kInvalidArgument, "The hash's key has the wrong length");
    std::memcpy(config.hash_key, hash_key.data(), sizeof config.hash_key);
    config.kind = kind;
    config.dtype = dtype;
    config.sum = sum;
    config.components = components;
    config.reduction = reduction;
    config.is_private = is_private;
    config.token = token;
    config.mode = mode;
    config.created_ns = wall_ns();
    config.declared_rank = kUnknownRank;
    if (declared) {
        if (declared->size() > kMaxRank)
            throw Error(Failure::kInvalidArgument, "A shape has at most 64 dimensions");
        config.declared_rank = static_cast<uint32_t>(declared->size());
        std::copy(declared->begin(), declared->end(), config.declared_dims);
    }
    if (name.size() > kMaxName) throw Error(Failure::kInvalidArgument, "The name is too long");
    config.name_length = static_cast<uint32_t>(name.size());
    std::copy(name.begin(), name.end(), config.name);
    std::optional<std::pair<std::string, std::string>> own_names;
    if (is_private || unlink_on_close) own_names.emplace(path, semaphore_path);
    const auto file = create_segment(path, semaphore_path, config);
    if (!file) return nb::none();
    try {
        if (!file->open_by_name(path)) {
            unlink(semaphore_path.c_str());
            return nb::none();
        }
        auto made = std::make_unique<Handle>(OpenSegment::on(file, config), std::move(own_names));
        Handle& handle = *made;
        nb::object object = give_to_python(std::move(made));  // before it is attached: else nobody takes it back
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

constexpr const char* kFoundNames[] = {"segment", "nothing", "unfinished", "held unfinished", "other version"};

// The kind of file at the path (kFoundNames), its layout version, and, for a segment, the result of `make`.
template <class Make>
nb::tuple open_found(const std::string& path, SegmentFile::Access access, const Owners& owners, Make make) {
    Opened opened = open_segment_file(path, access, owners);
    nb::object made = nb::none();
    if (opened.found == Found::kSegment) made = make(std::move(opened));
    return nb::make_tuple(kFoundNames[static_cast<int>(opened.found)], opened.config.version, made);
}

nb::tuple open_segment(const std::string& path, const Owners& owners) {
    return open_found(path, SegmentFile::Access::kWrite, owners, [](Opened opened) {
        return give_to_python(std::make_unique<Handle>(OpenSegment::on(std::move(opened.file), opened.config)));
    });
}

nb::tuple view_segment(const std::string& path) {
    return open_found(path, SegmentFile::Access::kRead, std::nullopt, [](Opened opened) {
        return give_to_python(std::make_unique<SegmentView>(std::move(opened.file), opened.config));
    });
}

template <size_t kCount>
nb::dict by_name(const Named (&table)[kCount]) {
    nb::dict numbers;
    for (const Named& entry : table) numbers[entry.name] = entry.number;
    return numbers;
}

// The part of the layout that Python knows; shmacc/_layout.py provides it.
void export_layout(nb::module_& m) {
    m.attr("VERSION") = kVersion;
    m.attr("MAX_RANK") = kMaxRank;
    m.attr("REGIONS") = by_name(kRegionNames);
    m.attr("KINDS") = by_name(kKindNames);
    m.attr("REDUCTIONS") = by_name(kReductionNames);
    m.attr("SUMS") = by_name(kSumNames);
    m.attr("ACTIVITIES") = by_name(kActivityNames);
    nb::dict sizes;
    for (const Named& sum : kSumNames) sizes[sum.name] = sum_bytes(sum.number);
    m.attr("SUM_BYTES") = sizes;
    m.attr("REGION_SPAN") = kRegionSpan;
    m.attr("PAGE_BYTES") = kPage;
    m.attr("HEADER_BYTES") = kHeaderBytes;
    m.attr("PARTICIPANT_BYTES") = sizeof(Participant);
    m.attr("WAITER_BYTES") = sizeof(Waiter);
    m.attr("BUCKET_BYTES") = sizeof(Bucket);
    m.attr("BUCKET_ENTRIES") = kBucketEntries;
    m.attr("SLOT_BYTES") = sizeof(Slot);
    m.attr("SEMAPHORE_BYTES") = sizeof(sem_t);
}

// In the order of Failure. Looked up once: the interpreter's end could interrupt a translator that runs
// Python code.
constexpr const char* kErrorNames[] = {
    "InvalidArgumentError",  "DeadlineExceededError",   "CancelledError",
    "NotFoundError",         "FailedPreconditionError", "ResourceExhaustedError",
    "PermissionDeniedError", "OutOfRangeError",         "DataLossError",
};
PyObject* error_classes[std::size(kErrorNames)];

void set_error(const Error& error) {
    PyObject* type = error_classes[static_cast<int>(error.failure())];
    nb::object made = nb::steal(PyObject_CallFunction(type, "s", error.what()));
    if (!made) return;
    for (const auto& [name, value] : error.fields()) {
        const nb::object number = nb::steal(PyLong_FromLongLong(value));
        if (!number || PyObject_SetAttrString(made.ptr(), name, number.ptr()) != 0) return;
    }
    PyErr_SetObject(type, made.ptr());
}

}  // namespace
}  // namespace shmacc

NB_MODULE(_core, m) {
    using namespace shmacc;
    nb::set_leak_warnings(false);  // handles may outlive the interpreter in daemon threads
    nb::module_ errors = nb::module_::import_("shmacc.errors");
    for (size_t i = 0; i < std::size(kErrorNames); ++i)
        error_classes[i] = nb::object(errors.attr(kErrorNames[i])).release().ptr();
    nb::register_exception_translator([](const std::exception_ptr& pointer, void*) {
        try {
            std::rethrow_exception(pointer);
        } catch (const Error& error) {
            set_error(error);
        } catch (const std::bad_alloc&) {
            set_error(Error(Failure::kResourceExhausted,
                            "This process has no memory left for the result or its sorting"));
        }
    });

    nb::class_<TakenRound>(m, "TakenRound")
        .def(nb::init<bool, bool>(), nb::arg("advance"), nb::arg("seal"))
        .def_prop_ro("count", &TakenRound::count)
        .def_prop_ro("step", &TakenRound::step)
        .def_prop_ro("serial", &TakenRound::serial)
        .def_prop_ro("indices", &TakenRound::indices)
        .def_prop_ro("values", &TakenRound::values)
        .def_prop_ro("shape", &TakenRound::shape)
        .def_prop_ro("row_counts", &TakenRound::row_counts);

    nb::class_<Handle>(m, "Handle")
        .def("close", &Handle::close)
        .def_prop_ro("closed", &Handle::closed)
        .def("apply_sparse", &Handle::apply_sparse, nb::arg("indices"), nb::arg("values"),
             nb::arg("contributions").none(), nb::arg("dims"), nb::arg("local_step"), nb::arg("gradients"),
             nb::arg("ascending"))
        .def("apply_dense", &Handle::apply_dense, nb::arg("values"), nb::arg("dims"), nb::arg("local_step"),
             nb::arg("gradients"))
        .def("drop_if_stale", &Handle::drop_if_stale, nb::arg("local_step"), nb::arg("gradients"))
        .def("take", &Handle::take, nb::arg("place"), nb::arg("num_required"), nb::arg("timeout").none(),
             nb::arg("divide"), nb::arg("lowest"), nb::arg("highest"))
        .def("keep", &Handle::keep, nb::arg("place"))
        .def("open_round", &Handle::open_round, nb::arg("place"), nb::arg("num_required"),
             nb::arg("timeout").none(), nb::arg("divide"), nb::arg("lowest"), nb::arg("highest"))
        .def("close_round", &Handle::close_round, nb::arg("serial"), nb::arg("consume"))
        .def("some_attached", &Handle::some_attached)
        .def("set_step", &Handle::set_step, nb::arg("step"))
        .def("advance_step", &Handle::advance_step, nb::arg("step"))
        .def("unseal", &Handle::unseal)
        .def("wait_step", &Handle::wait_step, nb::arg("after"), nb::arg("timeout").none())
        .def("cancel", &Handle::cancel)
        .def_prop_ro("step", &Handle::step)
        .def_prop_ro("count", &Handle::count)
        .def("enter", &Handle::enter, nb::arg("path"), nb::arg("semaphore_path"))
        .def("unlink", &Handle::unlink, nb::arg("path"), nb::arg("semaphore_path"))
        .def("unlink_own_names", &Handle::unlink_own_names)
        .def_prop_ro("unlinked", &Handle::unlinked)
        .def_prop_ro("mode", &Handle::mode)
        .def("config", &Handle::config)
        .def("state", &Handle::state);

    nb::class_<SegmentView>(m, "View")
        .def("close", &SegmentView::close)
        .def("config", &SegmentView::config)
        .def("state", &SegmentView::state)
        .def("participants", &SegmentView::participants)
        .def("last_used_ns", &SegmentView::last_used_ns)
        .def("waiters", &SegmentView::waiters)
        .def("lock_state", &SegmentView::lock_state)
        .def("name_lock_state", &SegmentView::name_lock_state)
        .def_static("semaphore_value", &SegmentView::semaphore_value, nb::arg("path"))
        .def("read", &SegmentView::read, nb::arg("region"), nb::arg("offset"), nb::arg("count"))
        .def("unlink", &SegmentView::unlink, nb::arg("path"), nb::arg("semaphore_path"), nb::arg("if_unused"))
        .def_prop_ro("unlinked", &SegmentView::unlinked)
        .def_prop_ro("used", &SegmentView::used)
        .def_prop_ro("links", &SegmentView::links)
        .def_prop_ro("allocated_bytes", &SegmentView::allocated_bytes);

    m.def("open", &open_segment, nb::arg("path"), nb::arg("owners").none());
    m.def("view", &view_segment, nb::arg("path"));
    m.def("create", &create, nb::arg("path"), nb::arg("semaphore_path"), nb::arg("name"), nb::arg("kind"),
          nb::arg("dtype"), nb::arg("sum"), nb::arg("components"), nb::arg("reduction"),
          nb::arg("declared").none(), nb::arg("is_private"), nb::arg("unlink_on_close"), nb::arg("token"),
          nb::arg("hash_key"), nb::arg("mode"));
    m.def("remove_unfinished", &remove_unfinished, nb::arg("path"));
    m.def("semaphore_is_being_made", &NamedSemaphore::is_being_made, nb::arg("path"));
    m.attr("CONVERTS_HALVES") = converts_halves();
    m.def("widen", &convert_halves<uint16_t, float, &widen>, nb::arg("halves"), nb::arg("floats"));
    m.def("narrow", &convert_halves<float, uint16_t, &narrow>, nb::arg("floats"), nb::arg("halves"));
    m.def("is_plain", &is_plain, nb::arg("value").none(), nb::arg("type_number"));
    m.def(
        "check_rows",
        [](nb::handle indices, int64_t limit) {
            View<int64_t> keys(indices, 1);
            RowCheck check = check_rows(keys.data(), keys.size(), limit);
            return nb::make_tuple(check.ascending, check.over, check.negative);
        },
        nb::arg("indices"), nb::arg("limit"));
    m.def(
        "repeated_row",
        [](nb::handle indices) {
            View<int64_t> keys(indices, 1);
            if (keys.size() > kMaxRows) throw Error(Failure::kInvalidArgument, "More rows than 2**32");
            return repeated_row(keys.data(), keys.size());
        },
        nb::arg("indices"));
    watch_forks();
    export_layout(m);
}
