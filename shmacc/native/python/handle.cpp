// Binds the classes of accumulators and rounds for Python.
#include "python/plain_gradients.hpp"
#include "python/round_block.hpp"
#include "python/statements.hpp"

namespace shmacc {
namespace {

// For Python's garbage collector. Object: RoundBlock, GeneratorBlock or Guarded.
template <class Object>
int traverse(PyObject* self, visitproc visit, void* arg) {
    Py_VISIT(Py_TYPE(self));
    if (!nb::inst_ready(self)) return 0;
    return nb::inst_ptr<Object>(self)->visit([=](PyObject* held) { return visit(held, arg); });
}
template <class Object>
int clear(PyObject* self) {
    if (nb::inst_ready(self)) nb::inst_ptr<Object>(self)->clear();
    return 0;
}
template <class Object>
PyType_Slot collected[] = {{Py_tp_traverse, reinterpret_cast<void*>(&traverse<Object>)},
                           {Py_tp_clear, reinterpret_cast<void*>(&clear<Object>)},
                           {0, nullptr}};

// Gives this package's coroutines and parameters those functions of a block that are hidden from users: the block's own
// class has only the methods of a ``with`` statement.
class BlockAccess {
  public:
    explicit BlockAccess(nb::object block) : block_(std::move(block)) { nb::cast<RoundBlock&>(block_); }
    RoundBlock* operator->() const { return nb::inst_ptr<RoundBlock>(block_); }

  private:
    nb::object block_;
};

void bind_blocks(nb::module_& m) {
    const auto with_init = [](auto& bound) {
        bound.def(nb::init<nb::object, nb::object, int64_t, int64_t, std::optional<double>, bool>(),
                  nb::arg("handle"), nb::arg("make"), nb::arg("num_required"), nb::arg("at_least"),
                  nb::arg("timeout").none(), nb::arg("raise_departures"));
    };
    nb::class_<RoundBlock> block(m, "RoundBlock", nb::type_slots(collected<RoundBlock>),
                                 nb::is_weak_referenceable());
    with_init(block);
    nb::class_<BlockAccess>(m, "BlockAccess")
        .def(nb::init<nb::object>(), nb::arg("block"))
        .def_prop_ro("timeout", [](BlockAccess& block) { return block->timeout(); })
        .def_prop_ro("handle", [](BlockAccess& block) { return block->handle_object(); })
        .def_prop_ro("taken", [](BlockAccess& block) { return block->taken(); })
        .def_prop_ro("given",  // None: the block has ended, perhaps in another thread
                     [](BlockAccess& block) { return block->given().is_valid() ? block->given() : nb::none(); })
        .def_prop_ro("is_open", [](BlockAccess& block) { return block->is_open(); })
        .def(
            "open",
            [](BlockAccess& block, std::optional<double> timeout, const Caller* caller) {
                return block->open(timeout, caller);
            },
            nb::arg("timeout").none(), nb::arg("caller").none())
        .def("take_kept", [](BlockAccess& block) { return block->take_kept(); })
        .def("hold", [](BlockAccess& block) { return block->hold(); })
        .def(
            "is_of", [](BlockAccess& block, nb::handle handle) { return block->is_of(handle); },
            nb::arg("handle"))
        .def("consume", [](BlockAccess& block) { return block->consume(); })
        .def("give_back", [](BlockAccess& block) { block->give_back(); });

    nb::class_<Round, RoundBlock> round(m, "Round", nb::type_slots(collected<RoundBlock>), nb::is_generic());
    with_init(round);
    round
        .def("__enter__", &Round::enter,
             R"(Wait for the gradients and open the round.

Raises:
    DeadlineExceededError: The timeout passed.
    CancelledError: ``cancel()``, or the handle was closed.
    FailedPreconditionError: This thread has a round of this accumulator open already.
    FinishedError: The accumulator is finished.
    WorkerDiedError: A process that had applied died or failed, and ``on_death`` is "raise".
    OutOfRangeError: An integer result does not fit the dtype, or the step cannot move on.
)")
        .def(
            "__exit__", [](Round& self, nb::handle kind, nb::handle, nb::handle) { self.exit(kind); },
            nb::arg("kind").none(), nb::arg("error").none(), nb::arg("traceback").none(),
            R"(Consume the gradients and move the step on; after an exception, neither.

An exception of a signal handler comes before that, or after it, but not in between.

Raises:
    FailedPreconditionError: The round has ended before its block: by a new step (``advance_step``,
        ``set_global_step``, ``restore``), or since the handle was closed.
)");

    nb::class_<AsyncBlock, RoundBlock> async_block(m, "AsyncBlock", nb::type_slots(collected<RoundBlock>),
                                                   nb::is_generic());
    with_init(async_block);
    async_block.def(
        "__aexit__",
        [](AsyncBlock& self, nb::handle kind, nb::handle, nb::handle) {
            self.exit(kind);
            return nb::cast(Ended{});
        },
        nb::arg("kind").none(), nb::arg("error").none(), nb::arg("traceback").none(),
        R"(Consume the gradients and move the step on; after an exception, neither.

This does not wait: it takes the lock in the event loop's thread, as an apply does there.

Raises:
    FailedPreconditionError: As for ``Round.__exit__``.
)");

    nb::class_<GeneratorBlock>(m, "GeneratorBlock", nb::type_slots(collected<GeneratorBlock>), nb::is_generic())
        .def(nb::init<nb::object>(), nb::arg("generator"))
        .def("__enter__", &GeneratorBlock::enter)
        .def(
            "__exit__",
            [](GeneratorBlock& self, nb::handle, nb::handle error, nb::handle traceback) {
                self.exit(error, traceback);
            },
            nb::arg("kind").none(), nb::arg("error").none(), nb::arg("traceback").none());

    nb::class_<FollowedSteps>(m, "FollowedSteps")
        .def(nb::init<nb::object, std::optional<double>, bool>(), nb::arg("handle"),
             nb::arg("timeout").none(), nb::arg("raise_departures"))
        .def("__iter__", [](nb::handle self) { return nb::borrow(self); })
        .def("__next__", &FollowedSteps::next, R"(Wait until the step has changed, and return it.

Raises:
    StopIteration: The accumulator is finished.
    DeadlineExceededError: The timeout passed in this wait.
    ChiefDiedError: As for ``wait_step``.
    CancelledError: The handle was closed.
)");

    m.def("open_rounds", [] {
        std::vector<nb::object> all;  // first, since making a list may collect garbage, and so end rounds
        for (RoundBlock* const block : RoundBlock::all_open()) all.push_back(block->object().get());
        nb::list found = new_list();
        for (nb::object& block : all)
            if (block.is_valid()) found.append(BlockAccess(std::move(block)));
        return found;
    });

    const auto itself = [](nb::handle self) { return nb::borrow(self); };
    nb::class_<Guarded>(m, "Guarded", nb::type_slots(collected<Guarded>))
        .def(nb::init<nb::object, nb::object>(), nb::arg("coroutine"), nb::arg("block"))
        .def("__await__", itself)
        .def("__iter__", itself)
        .def("__next__", [](Guarded& self) { return self.send(nb::none()); })
        .def("send", &Guarded::send, nb::arg("value").none())
        .def("throw", &Guarded::raise)
        .def("close", &Guarded::close);
    nb::class_<Ended>(m, "Ended")
        .def("__await__", itself)
        .def("__iter__", itself)
        .def("__next__", [](Ended&) -> nb::object { throw nb::stop_iteration(); });
}

}  // namespace

void bind_handle(nb::module_& m) {
    m.attr("MemberGradient") = nb::handle(reinterpret_cast<PyObject*>(&PyCapsule_Type));
    m.def("sparse_gradient", &sparse_gradient, nb::arg("member"), nb::arg("sum"), nb::arg("reduction"),
          nb::arg("indices"), nb::arg("values"), nb::arg("counts").none(), nb::arg("ascending"),
          nb::arg("count"), nb::arg("weight"));
    m.def("dense_gradient", &dense_gradient, nb::arg("member"), nb::arg("sum"), nb::arg("reduction"),
          nb::arg("values"), nb::arg("count"), nb::arg("weight"));
    m.def("plain_rows", &plain_rows, nb::arg("member"), nb::arg("sum"), nb::arg("reduction"),
          nb::arg("indices").none(), nb::arg("values").none(), nb::arg("type_number"),
          nb::arg("declared").none());
    m.def("plain_dense", &plain_dense, nb::arg("member"), nb::arg("sum"), nb::arg("reduction"),
          nb::arg("value").none(), nb::arg("type_number"), nb::arg("declared").none());

    nb::class_<RoundResult>(m, "RoundResult")
        .def(nb::init<bool, bool, nb::handle>(), nb::arg("advance"), nb::arg("seal"),
             nb::arg("ends").none() = nb::none())
        .def_prop_ro("count", &RoundResult::count)
        .def_prop_ro("step", &RoundResult::step)
        .def_prop_ro("weight", &RoundResult::weight)
        .def_prop_ro("serial", &RoundResult::serial)
        .def_prop_ro("contributors", &RoundResult::contributors)
        .def("members", &RoundResult::members)
        .def("indices", &RoundResult::indices, nb::arg("i"))
        .def("values", &RoundResult::values, nb::arg("i"))
        .def("shape", &RoundResult::shape, nb::arg("i"))
        .def("row_counts", &RoundResult::row_counts, nb::arg("i"))
        .def("columns", &RoundResult::columns);

    nb::class_<Caller>(m, "Caller").def(nb::init<>());
    nb::class_<Answer>(m, "Answer")
        .def(nb::init<>())
        .def_rw("counts", &Answer::counts, nb::for_setter(nb::arg("counts").none()));

    bind_blocks(m);

    nb::class_<Handle>(m, "Handle", nb::is_weak_referenceable())
        .def("check_writes", &Handle::check_writes)
        .def("close", &Handle::close, nb::arg("error").none() = nb::none())
        .def("leave", &Handle::leave, nb::arg("error").none())
        .def("announce_end", &Handle::announce_end, nb::arg("error").none())
        .def_prop_ro("closed", &Handle::closed)
        .def("apply_plain_rows", &apply_plain_rows, nb::arg("indices").none(), nb::arg("values").none(),
             nb::arg("type_number"), nb::arg("declared").none(), nb::arg("local_step"), nb::arg("terms").none())
        .def("apply_plain_dense", &apply_plain_dense, nb::arg("value").none(), nb::arg("type_number"),
             nb::arg("declared").none(), nb::arg("local_step"), nb::arg("terms").none())
        .def("apply_sparse", &Handle::apply_sparse, nb::arg("indices"), nb::arg("values"),
             nb::arg("counts").none(), nb::arg("ascending"), nb::arg("local_step"), nb::arg("terms").none())
        .def("apply_dense", &Handle::apply_dense, nb::arg("values"), nb::arg("local_step"),
             nb::arg("terms").none())
        .def("apply_group", &Handle::apply_group, nb::arg("gradients"), nb::arg("local_step"),
             nb::arg("terms").none(), nb::arg("answer").none() = nb::none())
        .def("on_repeat", &Handle::on_repeat, nb::arg("call").none())
        .def("be_contributor", &Handle::be_contributor, nb::arg("contributor"))
        .def("drop_if_stale", &Handle::drop_if_stale, nb::arg("local_step"), nb::arg("gradients"),
             nb::arg("timeout").none())
        .def("take", &Handle::take, nb::arg("taken"), nb::arg("num_required"), nb::arg("at_least"),
             nb::arg("timeout").none(), nb::arg("raise_departures"))
        .def("look", &Handle::look, nb::arg("taken"), nb::arg("timeout").none())
        .def("reduce", &Handle::reduce, nb::arg("pieces"), nb::arg("count"), nb::arg("weight"))
        .def("check_departures", &Handle::check_departures)
        .def("keep", &Handle::keep, nb::arg("taken"))
        .def("open_round", &Handle::open_round, nb::arg("taken"), nb::arg("num_required"), nb::arg("at_least"),
             nb::arg("timeout").none(), nb::arg("raise_departures"), nb::arg("caller").none())
        .def("consume_round", &Handle::consume_round, nb::arg("serial"))
        .def("give_up_round", &Handle::give_up_round, nb::arg("serial"))
        .def("set_step", &Handle::set_step, nb::arg("step"), nb::arg("timeout").none() = nb::none())
        .def("advance_step", &Handle::advance_step, nb::arg("step"), nb::arg("timeout").none() = nb::none())
        .def("belong_to", &Handle::belong_to, nb::arg("parameters"))
        .def("unseal", &Handle::unseal, nb::arg("timeout").none() = nb::none())
        .def("wait_step", &Handle::wait_step, nb::arg("after"), nb::arg("timeout").none(),
             nb::arg("raise_departures"), nb::arg("caller").none())
        .def("next_step", &Handle::next_step, nb::arg("last").none(), nb::arg("timeout").none(),
             nb::arg("raise_departures"), nb::arg("caller").none())
        .def("finish", &Handle::finish)
        .def("keep_free", &Handle::keep_free, nb::arg("bytes"))
        .def_prop_ro("finished", &Handle::finished)
        .def_prop_ro("running", &Handle::running)
        .def("end_wait", &Handle::end_wait, nb::arg("caller"))
        .def("cancel", &Handle::cancel)
        .def_prop_ro("step", &Handle::step)
        .def("read_step", &Handle::read_step)
        .def("read_in_thread", &Handle::read_in_thread, nb::arg("at"))
        .def("last_read", &Handle::last_read)
        .def("known_steps", &Handle::known_steps)
        .def("inherit_steps", &Handle::inherit_steps, nb::arg("newest"), nb::arg("last").none())
        .def("behind", &Handle::behind, nb::arg("local_step"))
        .def_prop_ro("count", &Handle::count)
        .def("enter", &Handle::enter, nb::arg("path"), nb::arg("semaphore_path"))
        .def("keep_names", &Handle::keep_names, nb::arg("path"), nb::arg("semaphore_path"), nb::arg("inherits"))
        .def("unlink", &Handle::unlink, nb::arg("path"), nb::arg("semaphore_path"))
        .def_prop_ro("unlinked", &Handle::unlinked)
        .def_prop_ro("mode", &Handle::mode)
        .def_prop_ro("owner", &Handle::owner)
        .def("config", &Handle::config)
        .def("state", &Handle::state);
}

}  // namespace shmacc
