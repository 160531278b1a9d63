// Binds views of segments for Python.
#include "python/found.hpp"
#include "python/segment_view.hpp"

namespace shmacc {
namespace {

nb::tuple view_segment(const std::string& path) {
    return open_found(path, SegmentFile::Access::kRead, std::nullopt, [](Opened opened) {
        return give_to_python(
            std::make_unique<SegmentView>(std::move(opened.file), opened.config, std::move(opened.specs)));
    });
}

}  // namespace

void bind_inspection(nb::module_& m) {
    nb::class_<SegmentView>(m, "SegmentView")
        .def("close", &SegmentView::close)
        .def("table", &SegmentView::table, nb::arg("lane"), nb::arg("member"))
        .def("tables", &SegmentView::tables)
        .def("config", &SegmentView::config)
        .def("state", &SegmentView::state)
        .def("participants", &SegmentView::participants)
        .def("departures", &SegmentView::departures)
        .def("last_used_ns", &SegmentView::last_used_ns)
        .def("pace", &SegmentView::pace)
        .def("waiters", &SegmentView::waiters)
        .def("events", &SegmentView::events)
        .def("lock_state", &SegmentView::lock_state, nb::arg("lane"))
        .def("name_lock_state", &SegmentView::name_lock_state)
        .def("read", &SegmentView::read, nb::arg("region"), nb::arg("offset"), nb::arg("count"))
        .def("places", &SegmentView::places, nb::arg("undo_records"))
        .def("unchanged", &SegmentView::unchanged, nb::arg("undo_records"))
        .def("compare", &SegmentView::compare)
        .def("unlink", &SegmentView::unlink, nb::arg("path"), nb::arg("semaphore_path"), nb::arg("if_unused"))
        .def_prop_ro("unlinked", &SegmentView::unlinked)
        .def_prop_ro("used", &SegmentView::used)
        .def_prop_ro("links", &SegmentView::links)
        .def_prop_ro("allocated_bytes", &SegmentView::allocated_bytes);

    m.def("view", &view_segment, nb::arg("path"));
}

}  // namespace shmacc
