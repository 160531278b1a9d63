// Binds the classes of accumulators and rounds for Python.
#include "python/blocks.hpp"
#include "python/plain.hpp"

namespace shmacc {

void bind_handle(nb::module_& m) {
    nb::class_<TakenRound>(m, "TakenRound")
        .def(
            "__init__",
            [](TakenRound* self, bool advance, bool seal, nb::handle ends) {
                new (self) TakenRound(advance, seal, division_of(ends));
            },
            nb::arg("advance"), nb::arg("seal"), nb::arg("ends").none() = nb::none())
        .def_prop_ro("count", &TakenRound::count)
        .def_prop_ro("step", &TakenRound::step)
        .def_prop_ro("weight", &TakenRound::weight)
        .def_prop_ro("serial", &TakenRound::serial)
        .def_prop_ro("contributors", &TakenRound::contributors)
        .def("members", &TakenRound::members)
        .def("indices", &TakenRound::indices, nb::arg("i"))
        .def("values", &TakenRound::values, nb::arg("i"))
        .def("shape", &TakenRound::shape, nb::arg("i"))
        .def("row_counts", &TakenRound::row_counts, nb::arg("i"))
        .def("columns", &TakenRound::columns);

    nb::class_<Caller>(m, "Caller").def(nb::init<>());

    bind_blocks(m);

    nb::class_<Handle>(m, "Handle", nb::is_weak_referenceable())
        .def("close", &Handle::close, nb::arg("error").none() = nb::none())
        .def("leave", &Handle::leave, nb::arg("error").none())
        .def("end", &Handle::end, nb::arg("error").none())
        .def_prop_ro("closed", &Handle::closed)
        .def("apply_sparse", &Handle::apply_sparse, nb::arg("indices"), nb::arg("values"),
             nb::arg("counts").none(), nb::arg("ascending"), nb::arg("local_step"), nb::arg("terms").none())
        .def("apply_dense", &Handle::apply_dense, nb::arg("values"), nb::arg("local_step"),
             nb::arg("terms").none())
        .def("apply_plain_rows", &apply_plain_rows, nb::arg("indices").none(), nb::arg("values").none(),
             nb::arg("type_number"), nb::arg("declared").none(), nb::arg("local_step"), nb::arg("terms").none())
        .def("apply_plain_dense", &apply_plain_dense, nb::arg("value").none(), nb::arg("type_number"),
             nb::arg("declared").none(), nb::arg("local_step"), nb::arg("terms").none())
        .def("apply_group", &Handle::apply_group, nb::arg("members"), nb::arg("local_step"),
             nb::arg("terms").none())
        .def("drop_if_stale", &Handle::drop_if_stale, nb::arg("local_step"), nb::arg("gradients"),
             nb::arg("timeout").none())
        .def("take",
             nb::overload_cast<TakenRound&, int64_t, int64_t, std::optional<double>, bool>(&Handle::take),
             nb::arg("taken"), nb::arg("num_required"), nb::arg("at_least"), nb::arg("timeout").none(),
             nb::arg("raise_departures"))
        .def("look", &Handle::look, nb::arg("taken"), nb::arg("timeout").none())
        .def("reduce", &Handle::reduce, nb::arg("pieces"), nb::arg("count"), nb::arg("weight"))
        .def("check_departures", &Handle::check_departures)
        .def("keep", &Handle::keep, nb::arg("taken"))
        .def("open_round", &Handle::open_round, nb::arg("taken"), nb::arg("num_required"), nb::arg("at_least"),
             nb::arg("timeout").none(), nb::arg("raise_departures"), nb::arg("caller").none())
        .def("hold_round", &Handle::hold_round, nb::arg("serial"))
        .def("consume_round", &Handle::consume_round, nb::arg("serial"))
        .def("give_up_round", &Handle::give_up_round, nb::arg("serial"))
        .def("set_step", &Handle::set_step, nb::arg("step"))
        .def("advance_step", &Handle::advance_step, nb::arg("step"))
        .def("belong_to", &Handle::belong_to, nb::arg("parameters"))
        .def("unseal", &Handle::unseal)
        .def("wait_step", &Handle::wait_step, nb::arg("after"), nb::arg("timeout").none(),
             nb::arg("raise_departures"), nb::arg("caller").none())
        .def("next_step", &Handle::next_step, nb::arg("last").none(), nb::arg("timeout").none(),
             nb::arg("raise_departures"), nb::arg("caller").none())
        .def("finish", &Handle::finish)
        .def("keep_free", &Handle::keep_free, nb::arg("bytes"))
        .def_prop_ro("finished", &Handle::finished)
        .def("end_wait", &Handle::end_wait, nb::arg("caller"))
        .def("cancel", &Handle::cancel)
        .def_prop_ro("step", &Handle::step)
        .def_prop_ro("count", &Handle::count)
        .def("enter", &Handle::enter, nb::arg("path"), nb::arg("semaphore_path"))
        .def("unlink", &Handle::unlink, nb::arg("path"), nb::arg("semaphore_path"))
        .def_prop_ro("unlinked", &Handle::unlinked)
        .def_prop_ro("mode", &Handle::mode)
        .def_prop_ro("owner", &Handle::owner)
        .def("config", &Handle::config)
        .def("state", &Handle::state);
}

}  // namespace shmacc
