// Binds shared arrays and updates of parameters for Python.
#include "parameters/default_floats.hpp"
#include "python/changes.hpp"
#include "python/shared_arrays.hpp"
#include "python/tables.hpp"

namespace shmacc {
namespace {

// Applies an optimizer's constraint to an array's first contents, in place. row: how many numbers a row has.
void constrain_contents(const nb::tuple& optimizer, nb::handle contents, uint64_t row, bool is_double) {
    const OptimizerSpec by = optimizer_spec(optimizer);
    const ArrayBuffer<unsigned char> bytes(contents, 1, kWritable);
    const uint64_t numbers = bytes.size() / (is_double ? 8 : 4);
    if (row == 0 || numbers % row) throw Error(Failure::kInvalidArgument, "An array has whole rows");
    const WithoutGil released;
    const DefaultFloats floats;
    with_number(is_double, [&](auto zero) {
        constrain(by, reinterpret_cast<decltype(zero)*>(bytes.writable()), numbers, row);
    });
}

}  // namespace

void bind_parameters(nb::module_& m) {
    nb::class_<MappedArrays>(m, "MappedArrays")
        .def(nb::init<nb::object, const nb::list&, bool>(), nb::arg("handle"), nb::arg("dtypes"),
             nb::arg("writable"))
        .def("array", &MappedArrays::array, nb::arg("number"), nb::arg("keeper"), nb::arg("slot") = 0)
        .def("release", &MappedArrays::release, nb::arg("at_once"))
        .def("forget", &MappedArrays::forget);

    nb::class_<TableAccess>(m, "TableAccess")
        .def(nb::init<nb::object, uint32_t>(), nb::arg("handle"), nb::arg("number"))
        .def("rows", &TableAccess::rows, nb::arg("ids"), nb::arg("slot"), nb::arg("to"))
        .def("contains", &TableAccess::contains, nb::arg("ids"), nb::arg("to"))
        .def("last_steps", &TableAccess::last_steps, nb::arg("ids"), nb::arg("to"))
        .def("ids", &TableAccess::ids, nb::arg("before").none())
        .def("state", &TableAccess::state);

    m.def("merged_rows", &merged_rows, nb::arg("indices"), nb::arg("values"), nb::arg("is_double"));
    m.def("update", &update_parameters, nb::arg("handle"), nb::arg("rounds"), nb::arg("serial"),
          nb::arg("step"), nb::arg("changes"), nb::arg("timeout").none());
    m.def("change_copy", &change_copy, nb::arg("handle"), nb::arg("lineage"), nb::arg("parent").none(),
          nb::arg("step"), nb::arg("begun"), nb::arg("changes"), nb::arg("updates"),
          nb::arg("timeout").none(), nb::arg("only_check") = false);
    m.def("load", &load_segments, nb::arg("parameters"), nb::arg("accumulators"),
          nb::arg("timeout").none() = nb::none());
    m.def("read_parameters", &read_parameters, nb::arg("handle"), nb::arg("copies"), nb::arg("tables"),
          nb::arg("whole"), nb::arg("timeout").none());
    m.def("initial_rows", &initial_rows, nb::arg("initial"), nb::arg("ids"), nb::arg("width"),
          nb::arg("is_double"), nb::arg("to"));
    m.def("constrain", &constrain_contents, nb::arg("optimizer"), nb::arg("contents"), nb::arg("row"),
          nb::arg("is_double"));
}

}  // namespace shmacc
