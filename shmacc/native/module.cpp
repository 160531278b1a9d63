// The extension module: shmacc._core.
#include "handle.hpp"

namespace shmacc {
namespace {

void initialise(int fd, const std::string& name, uint32_t kind, uint32_t dtype, uint32_t sum,
                uint32_t components, uint32_t reduction, std::optional<Dims> declared, bool is_private,
                uint64_t token, uint32_t mode) {
    Config config{};
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
    Core::initialise(fd, config);
}

// A Handle, or why there is none: "nothing", "unfinished", "other version".
nb::object open_segment(const std::string& path) {
    std::shared_ptr<Core> core;
    Core::Found found = Core::Found::kNothing;
    {
        WithoutGil released;
        core = Core::open(path, &found);
    }
    if (core) return nb::cast(new Handle(std::move(core)), nb::rv_policy::take_ownership);
    switch (found) {
        case Core::Found::kUnfinished: return nb::str("unfinished");
        case Core::Found::kOtherVersion: return nb::str("other version");
        default: return nb::str("nothing");
    }
}

// In the order of Failure. Looked up once: a translator that runs Python code could be cut off in the middle by
// the interpreter's end.
constexpr const char* kErrorNames[] = {
    "InvalidArgumentError", "DeadlineExceededError",  "CancelledError",
    "NotFoundError",        "FailedPreconditionError", "ResourceExhaustedError",
    "PermissionDeniedError", "OutOfRangeError",        "DataLossError",
};
PyObject* error_classes[std::size(kErrorNames)];

void set_error(Failure failure, const char* message) {
    PyErr_SetString(error_classes[static_cast<int>(failure)], message);
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
            set_error(error.failure(), error.what());
        } catch (const std::bad_alloc&) {
            set_error(Failure::kResourceExhausted,
                      "This process has no memory left for the result or its sorting");
        }
    });

    nb::class_<Handle>(m, "Handle")
        .def("close", &Handle::close)
        .def_prop_ro("closed", &Handle::closed)
        .def("apply_sparse", &Handle::apply_sparse, nb::arg("indices"), nb::arg("values"),
             nb::arg("contributions").none(), nb::arg("dims"), nb::arg("local_step"), nb::arg("gradients"),
             nb::arg("ascending"))
        .def("apply_dense", &Handle::apply_dense, nb::arg("values"), nb::arg("dims"),
             nb::arg("local_step"), nb::arg("gradients"))
        .def("drop_if_stale", &Handle::drop_if_stale, nb::arg("local_step"), nb::arg("gradients"))
        .def("take", &Handle::take, nb::arg("place"), nb::arg("num_required"), nb::arg("timeout").none(),
             nb::arg("divide"), nb::arg("advance"), nb::arg("seal"), nb::arg("lowest"), nb::arg("highest"))
        .def("keep", &Handle::keep, nb::arg("round"), nb::arg("advance"), nb::arg("seal"))
        .def("some_attached", &Handle::some_attached)
        .def("set_step", &Handle::set_step, nb::arg("step"))
        .def("advance_step", &Handle::advance_step, nb::arg("step"))
        .def("unseal", &Handle::unseal)
        .def("wait_step", &Handle::wait_step, nb::arg("after"), nb::arg("timeout").none())
        .def("cancel", &Handle::cancel)
        .def_prop_ro("step", &Handle::step)
        .def_prop_ro("count", &Handle::count)
        .def("use_queue", &Handle::use_queue, nb::arg("name"))
        .def("attach", &Handle::attach)
        .def_prop_ro("is_attached", &Handle::is_attached)
        .def("sweep", &Handle::sweep)
        .def_prop_ro("unlinked", &Handle::unlinked)
        .def("mark_unlinked", &Handle::mark_unlinked)
        .def_prop_ro("others_attached", &Handle::others_attached)
        .def("lock_name", &Handle::lock_name)
        .def("unlock_name", &Handle::unlock_name)
        .def_prop_ro("inode", &Handle::inode)
        .def("config", &Handle::config)
        .def("state", &Handle::state)
        .def("participants", &Handle::participants)
        .def("waiters", &Handle::waiters)
        .def("lock_state", &Handle::lock_state)
        .def("round_shape", &Handle::round_shape)
        .def("read", &Handle::read, nb::arg("region"), nb::arg("offset"), nb::arg("count"))
        .def_prop_ro("allocated_bytes", &Handle::allocated_bytes);

    m.def("open", &open_segment, nb::arg("path"));
    m.def("initialise", &initialise, nb::arg("fd"), nb::arg("name"), nb::arg("kind"), nb::arg("dtype"),
          nb::arg("sum"), nb::arg("components"), nb::arg("reduction"), nb::arg("declared").none(),
          nb::arg("is_private"), nb::arg("token"), nb::arg("mode"));
    m.attr("CONVERTS_HALVES") = converts_halves();
    m.def("widen", &convert_halves<uint16_t, float, &widen>, nb::arg("halves"), nb::arg("floats"));
    m.def("narrow", &convert_halves<float, uint16_t, &narrow>, nb::arg("floats"), nb::arg("halves"));
    m.def("is_plain", &is_plain, nb::arg("value").none(), nb::arg("type_number"));
    m.def("check_rows",
          [](nb::handle indices, int64_t limit) {
              View<int64_t> keys(indices, 1);
              RowCheck check = check_rows(keys.data(), keys.size(), limit);
              return nb::make_tuple(check.ascending, check.over, check.negative);
          },
          nb::arg("indices"), nb::arg("limit"));
    m.def("repeated_row",
          [](nb::handle indices) {
              View<int64_t> keys(indices, 1);
              if (keys.size() > kMaxRows) throw Error(Failure::kInvalidArgument, "More rows than 2**32");
              return repeated_row(keys.data(), keys.size());
          },
          nb::arg("indices"));
    m.def("set_identity",
          [](uint64_t pid_namespace, uint64_t start_ticks, uint64_t token) {
              this_process = {pid_namespace, start_ticks};
              this_token = token;
          },
          nb::arg("pid_namespace"), nb::arg("start_ticks"), nb::arg("token"));
    m.def("before_fork", [] {
        WithoutGil released;
        Core::before_fork();
    });
    m.def("after_fork_in_parent", &Core::after_fork_in_parent);
    m.def("after_fork_in_child", [] { Core::after_fork_in_child(this_process, this_token); });
    m.attr("VERSION") = kVersion;
    m.attr("BUCKET_BYTES") = sizeof(Bucket);
    m.attr("SLOT_BYTES") = sizeof(Slot);
}
