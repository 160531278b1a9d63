// The view of a segment, as Python has it.
#include "python/segment_view.hpp"

namespace shmacc {

void bind_view(nb::module_& m) {
    nb::class_<SegmentView>(m, "SegmentView")
        .def("close", &SegmentView::close)
        .def("table", &SegmentView::table, nb::arg("lane"), nb::arg("member"))
        .def("tables", &SegmentView::tables)
        .def("config", &SegmentView::config)
        .def("state", &SegmentView::state)
        .def("participants", &SegmentView::participants)
        .def("departures", &SegmentView::departures)
        .def("last_used_ns", &SegmentView::last_used_ns)
        .def("waiters", &SegmentView::waiters)
        .def("events", &SegmentView::events)
        .def("lock_state", &SegmentView::lock_state, nb::arg("lane"))
        .def("name_lock_state", &SegmentView::name_lock_state)
        .def_static("semaphore_value", &SegmentView::semaphore_value, nb::arg("path"))
        .def("read", &SegmentView::read, nb::arg("region"), nb::arg("offset"), nb::arg("count"))
        .def("unlink", &SegmentView::unlink, nb::arg("path"), nb::arg("semaphore_path"), nb::arg("if_unused"))
        .def_prop_ro("unlinked", &SegmentView::unlinked)
        .def_prop_ro("used", &SegmentView::used)
        .def_prop_ro("links", &SegmentView::links)
        .def_prop_ro("allocated_bytes", &SegmentView::allocated_bytes);
}

}  // namespace shmacc
