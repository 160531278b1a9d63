// What one accumulator object of Python's holds: the process's Core of the segment, and whether this handle is
// closed. Arguments come checked (gradients.py); sizes are checked again here, since memory depends on them.
#pragma once

#include "python.hpp"

namespace shmacc {

class Handle {
  private:
    class NoInterruption : public Interruption {
      public:
        void check() override {}
    };
    class Waiting : public Interruption {
      public:
        Waiting(WithoutGil& released, const Handle& handle) : released_(released), handle_(handle) {}
        void check() override {
            released_.check_signals();
            if (handle_.closed_)
                throw Error(Failure::kCancelled,
                            "The operation was cancelled: its accumulator's handle was closed");
        }

      private:
        WithoutGil& released_;
        const Handle& handle_;
    };

    template <class Call>
    auto run(Call call) {
        auto core = attached();
        WithoutGil released;
        return run_in(*core, released, call);
    }
    template <class Call>
    auto run_in(Core& core, WithoutGil& released, Call call) {
        Waiting waiting(released, *this);
        Operations operations(core, waiting);
        return call(operations);
    }

  public:
    explicit Handle(std::shared_ptr<Core> core) : core_(std::move(core)) {}

    void close() {
        std::shared_ptr<Core> core;
        closed_ = true;
        core.swap(core_);
        WithoutGil released;
        if (!core || !core->mapping().file_state().whole) return;
        // Waits of this handle look at closed_ when woken.
        core->line().wake_all();
        core->line().turn();
    }
    bool closed() const { return closed_; }

    // Copies of the pointer keep the segment mapped for calls that run while another thread closes. The GIL
    // guards the pointer itself; a mutex here could be left locked in a forked child.
    std::shared_ptr<Core> core() const {
        if (!core_) throw Error(Failure::kFailedPrecondition, "The accumulator's handle is closed");
        return core_;
    }
    std::shared_ptr<Core> whole() const {
        auto core = this->core();
        core->check_whole();
        return core;
    }
    std::shared_ptr<Core> attached() const {
        auto core = this->core();
        core->check_file();
        if (core->attached() && !core->presence().claimed()) core->attach(this_token, this_process);
        if (!core->presence().claimed() || !core->lock())
            throw Error(Failure::kFailedPrecondition, "The handle is not attached to its segment");
        return core;
    }

    bool apply_sparse(nb::handle indices, nb::handle values, std::optional<nb::object> contributions,
                      const Dims& dims, int64_t local_step, int64_t gradients, bool ascending) {
        auto core = attached();
        require(*core, kSparse);
        switch (core->config().sum) {
            case kFloat32: return add_rows<float>(*core, indices, values, contributions, dims, local_step, gradients, ascending);
            case kFloat64: return add_rows<double>(*core, indices, values, contributions, dims, local_step, gradients, ascending);
            case kInt64: return add_rows<int64_t>(*core, indices, values, contributions, dims, local_step, gradients, ascending);
            default: return add_rows<uint64_t>(*core, indices, values, contributions, dims, local_step, gradients, ascending);
        }
    }

    bool apply_dense(nb::handle values, const Dims& dims, int64_t local_step, int64_t gradients) {
        auto core = attached();
        require(*core, kDense);
        switch (core->config().sum) {
            case kFloat32: return add_array<float>(*core, values, dims, local_step, gradients);
            case kFloat64: return add_array<double>(*core, values, dims, local_step, gradients);
            case kInt64: return add_array<int64_t>(*core, values, dims, local_step, gradients);
            default: return add_array<uint64_t>(*core, values, dims, local_step, gradients);
        }
    }

    bool drop_if_stale(int64_t local_step, int64_t gradients) {
        return run(
            [&](Operations& operations) { return operations.drop_if_stale(local_step, gradients); });
    }

    // (count, step, indices, values, shape, contributions); values in the sums' type; sparse: shape begins with
    // the declared first dimension or -1. No values and no shape if nothing was accumulated.
    nb::tuple take(int64_t num_required, std::optional<double> timeout, bool divide, bool advance,
                   bool seal, int64_t lowest, uint64_t highest) {
        auto core = attached();
        need_numpy();  // what may fail for want of memory had better do so before something is taken
        TakeRequest request{num_required, deadline_after(timeout), divide, advance, seal, lowest, highest};
        Taken taken = run([&](Operations& operations) { return operations.take(request); });
        nb::object values = nb::none(), shape = nb::none();
        if (taken.dims) {
            const Config& config = core->config();
            Dims dims = std::move(*taken.dims);
            if (config.kind == kSparse) {
                const bool declared = config.declared_rank != kUnknownRank && config.declared_rank > 0;
                dims.insert(dims.begin(), declared ? config.declared_dims[0] : -1);
                Output numbers(dims.size() * sizeof(int64_t));
                std::copy(dims.begin(), dims.end(), static_cast<int64_t*>(numbers.get()));
                shape = array_of<int64_t>(numbers, {static_cast<int64_t>(dims.size())});
                dims[0] = static_cast<int64_t>(taken.rows);
            }
            switch (config.sum) {
                case kFloat32: values = array_of<float>(taken.values, dims, config.components); break;
                case kFloat64: values = array_of<double>(taken.values, dims, config.components); break;
                case kInt64: values = array_of<int64_t>(taken.values, dims); break;
                default: values = array_of<uint64_t>(taken.values, dims); break;
            }
        }
        const Dims rows{static_cast<int64_t>(taken.rows)};
        return nb::make_tuple(taken.count, taken.step, array_of<int64_t>(taken.indices, rows), values, shape,
                              array_of<int64_t>(taken.contributions, rows));
    }

    int64_t set_step(int64_t step) {
        return run([&](Operations& operations) { return operations.set_step(step); });
    }
    int64_t advance_step(int64_t step) {
        return run([&](Operations& operations) { return operations.advance_step(step); });
    }
    void unseal() {
        run([&](Operations& operations) {
            operations.unseal();
            return true;
        });
    }
    int64_t wait_step(int64_t after, std::optional<double> timeout) {
        int64_t deadline = deadline_after(timeout);
        return run([&](Operations& operations) { return operations.wait_step(after, deadline); });
    }
    // Needs no lock: a stopped process must not keep the waiting ones from being let go.
    void cancel() {
        auto core = attached();
        core->line().cancel();
        core->line().turn();
    }

    int64_t step() const { return glimpse().step; }
    int64_t count() const { return glimpse().count; }

    // -- for segment.py -------------------------------------------------------------------------
    void use_queue(const std::string& name) { core()->use_queue(name); }
    void attach() {
        whole()->attach(this_token, this_process);
    }
    bool is_attached() const { return core()->presence().claimed(); }
    void sweep() {
        auto core = attached();
        WithoutGil released;
        NoInterruption never;
        Core::Session session(*core, monotonic_ns(), never);
        if (session.held()) core->line().sweep();
    }
    bool unlinked() const { return load(whole()->header().unlinked) != 0; }
    void mark_unlinked() {
        store(whole()->header().unlinked, uint64_t{1});
        store_barrier();  // then the name is removed: who finds none finds the mark (Core::check_file)
    }
    bool others_attached() const { return Presence::anybody_else(core()->mapping().fd()); }
    // The right to decide what the name leads to; False: another process has it.
    bool lock_name() { return set_record_lock(core()->mapping().fd(), kNameByte, F_WRLCK); }
    void unlock_name() { set_record_lock(core()->mapping().fd(), kNameByte, F_UNLCK); }
    uint64_t inode() const { return core()->id().second; }

    // -- for inspection.py: everything is read without the lock ---------------------------------
    nb::dict config() const {
        auto core = this->core();
        const Config& config = core->config();
        nb::dict out;
        out["name"] = std::string(config.name, config.name_length);
        out["kind"] = config.kind;
        out["dtype"] = config.dtype;
        out["sum"] = config.sum;
        out["components"] = config.components;
        out["reduction"] = config.reduction;
        out["is_private"] = config.is_private != 0;
        out["token"] = config.token;
        out["created_ns"] = config.created_ns;
        out["mode"] = config.mode;
        if (config.declared_rank == kUnknownRank)
            out["declared"] = nb::none();
        else
            out["declared"] = nb::cast(Dims(config.declared_dims, config.declared_dims + config.declared_rank));
        return out;
    }
    nb::dict state() const {
        auto core = whole();
        State state = core->committed().glimpse();
        nb::dict out;
        out["generation"] = state.generation;
        out["step"] = state.step;
        out["count"] = state.count;
        out["sealed"] = state.sealed != 0;
        out["rows"] = state.rows;
        out["row_elements"] = state.row_elements;
        out["buffer"] = state.buffer;
        out["index"] = state.index;
        out["index_buckets"] = state.index_buckets;
        out["index_stamp"] = state.index_stamp;
        out["index_filled"] = state.index_filled;
        out["reserved"] = nb::cast(std::vector<uint64_t>(state.reserved, state.reserved + kRegions));
        out["applied"] = state.applied;
        out["dropped"] = state.dropped;
        out["discarded"] = state.discarded;
        out["taken"] = state.taken;
        out["takes"] = state.takes;
        out["recoveries"] = state.recoveries;
        out["applied_bytes"] = state.applied_bytes;
        // An operation runs, or died: rows may differ from the committed ones.
        out["in_operation"] = core->committed().cut_short(state);
        out["waiting"] = core->line().waiting();
        out["attached"] = attached_processes(*core);
        return out;
    }
    nb::list participants() const {
        auto core = whole();
        Presence& presence = core->presence();
        nb::list out;
        for (uint32_t i = 0, top = presence.table().size(); i < top; ++i) {
            const Participant entry = load_words(presence.table()[i]);
            if (entry.token == 0) continue;
            nb::dict item;
            item["entry"] = i;
            item["alive"] = presence.alive(i, entry.token);
            item["pid"] = entry.pid;
            item["pid_namespace"] = entry.pid_namespace;
            item["start_ticks"] = entry.start_ticks;
            item["attached_ns"] = entry.attached_ns;
            item["seen_ns"] = entry.seen_ns;
            item["applied_ns"] = entry.applied_ns;
            item["applied_step"] = entry.applied_step;
            item["activity"] = entry.activity;
            item["applied"] = entry.applied;
            item["dropped"] = entry.dropped;
            item["taken"] = entry.taken;
            out.append(item);
        }
        return out;
    }
    nb::list waiters() const {
        auto core = whole();
        Line& line = core->line();
        nb::list out;
        for (uint32_t i = 0, top = line.table().size(); i < top; ++i) {
            const Waiter entry = load_words(line[i]);
            if (entry.ticket == 0 || line.cancelled(i)) continue;
            nb::dict item;
            item["ticket"] = entry.ticket;
            item["participant"] = entry.participant;
            item["num_required"] = entry.num_required;
            item["since_ns"] = entry.since_ns;
            item["overdue"] = entry.overdue != 0;
            item["alive"] = line.alive(i);
            out.append(item);
        }
        return out;
    }
    // (held by another process, its pid or 0, the semaphore's value or None)
    nb::tuple lock_state() const {
        auto core = this->core();
        int pid = 0;
        bool held = others_hold(core->mapping().fd(), kLockByte, 1, &pid);
        nb::object value = nb::none();
        if (core->lock()) value = nb::cast(core->lock()->queue_value());
        return nb::make_tuple(held, pid, value);
    }
    std::optional<Dims> round_shape() const {
        auto core = whole();
        State state = core->committed().glimpse();
        if (state.count == 0) return std::nullopt;
        return round_dims(core->header(), core->config(), state);
    }
    // Bytes of a region as they stand now; reads through the descriptor, so that holes stay holes.
    nb::bytes read(uint32_t region, uint64_t offset, uint64_t count) const {
        auto core = this->core();
        if (region >= kRegions || offset > kRegionSpan || count > kRegionSpan - offset)
            throw Error(Failure::kInvalidArgument, "No such bytes in a segment");
        nb::bytes out(nullptr, count);
        auto* to = const_cast<char*>(out.c_str());
        uint64_t done = 0;
        while (done < count) {
            ssize_t got = pread(core->mapping().fd(), to + done, count - done,
                                static_cast<off_t>(region_offset(region) + offset + done));
            if (got <= 0) data_loss("its file was truncated");
            done += static_cast<uint64_t>(got);
        }
        load_barrier();  // whether an operation ran meanwhile is asked after this (commit.hpp)
        return out;
    }
    uint64_t allocated_bytes() const {
        struct stat found {};
        fstat(core()->mapping().fd(), &found);
        return static_cast<uint64_t>(found.st_blocks) * 512;
    }

  private:
    template <class T>
    bool add_rows(Core& core, nb::handle indices, nb::handle values,
                  std::optional<nb::object>& contributions, const Dims& dims, int64_t local_step,
                  int64_t gradients, bool ascending) {
        View<int64_t> keys(indices, 1);
        View<T> numbers(values, core.config().components);
        std::optional<View<int64_t>> counts;
        if (contributions) counts.emplace(*contributions, 1);
        uint64_t width = product(dims) * core.config().components;
        if (keys.size() > kMaxRows || numbers.size() != keys.size() * width ||
            (counts && counts->size() != keys.size()))
            throw Error(Failure::kInvalidArgument, "Sizes of indices, values and contributions disagree");
        WithoutGil released;
        Gradient<T> gradient(keys.data(), numbers.data(), counts ? counts->data() : nullptr,
                             static_cast<uint32_t>(keys.size()), width, ascending);
        return run_in(core, released, [&](Operations& operations) {
            return operations.apply(dims, local_step, gradients, numbers.size() * sizeof(T), [&](State& state) {
                Rows<T>(state, core.mapping(), core.committed()).add_gradient(gradient);
            });
        });
    }

    template <class T>
    bool add_array(Core& core, nb::handle values, const Dims& dims, int64_t local_step, int64_t gradients) {
        View<T> numbers(values, core.config().components);
        if (numbers.size() != product(dims) * core.config().components)
            throw Error(Failure::kInvalidArgument, "Sizes of values and shape disagree");
        WithoutGil released;
        return run_in(core, released, [&](Operations& operations) {
            return operations.apply(dims, local_step, gradients, numbers.size() * sizeof(T), [&](State& state) {
                Buffer<T>(state, core.mapping(), core.committed())
                    .add_gradient(numbers.data(), state.count == gradients);
            });
        });
    }

    static void require(const Core& core, Kind kind) {
        if (core.config().kind != kind)
            throw Error(Failure::kInvalidArgument, "The segment is of the other kind");
    }
    State glimpse() const {
        auto core = this->core();
        core->check_file();
        return core->committed().glimpse();
    }
    static uint32_t attached_processes(Core& core) {
        Presence& presence = core.presence();
        uint32_t alive = 0;
        for (uint32_t i = 0, top = presence.table().size(); i < top; ++i) {
            uint64_t token = load(presence.table()[i].token);
            alive += token != 0 && presence.alive(i, token);
        }
        return alive;
    }

    std::shared_ptr<Core> core_;
    std::atomic<bool> closed_{false};
};

}  // namespace shmacc
