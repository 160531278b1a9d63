// What one accumulator object of Python's holds: a use of the process's Core of the segment, and whether this
// handle is closed. Arguments come checked (gradients.py); sizes are checked again here, since memory depends
// on them.
#pragma once

#include "description.hpp"
#include "opening.hpp"
#include "python.hpp"

namespace shmacc {

constexpr int64_t kNamePatience = 2000 * kMillisecond;  // the name lock is held for a few system calls

// Does something with the name lock held. Meanwhile the GIL is kept: see opening.hpp.
template <class Act>
auto with_name_lock(SegmentFile& file, bool with_signals, Act act) {
    struct Unlock {
        const int fd;
        ~Unlock() { set_record_lock(fd, kNameByte, F_UNLCK); }
    };
    const int64_t deadline = monotonic_ns() + kNamePatience;
    file.check_open();  // others may have closed it: no lock would guard anything then, and what follows may write
    while (!set_record_lock(file.fd(), kNameByte, F_WRLCK)) {
        if (monotonic_ns() > deadline)
            throw Error(Failure::kDeadlineExceeded,
                        "Another process has been opening or removing it for 2 s (is it stopped?)");
        WithoutGil released;
        const timespec moment{0, kMillisecond};
        nanosleep(&moment, nullptr);
        if (with_signals) released.check_signals();
        file.check_open();
    }
    Unlock unlock{file.fd()};
    return act();
}

// Removes a segment's names, unless it is to be unused and is not; whether it did, and here.
inline bool unlink_names(SegmentFile& file, const std::string& path, const std::string& semaphore_path,
                         bool if_unused, bool with_signals) {
    return with_name_lock(file, with_signals, [&] {
        if (if_unused && (in_use(file) || !file.is_at(path))) return false;
        if (!if_unused) mark_given_up(file);
        remove_names(file, path, semaphore_path);
        return true;
    });
}

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
            const uint64_t generation = fork_generation;
            released_.check_signals();
            if (generation != fork_generation)
                throw Error(Failure::kCancelled,
                            "The operation was cancelled: a signal handler forked, and it is the parent's");
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
        const Core::Use core = attached();
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
    // private_names: segment and semaphore, which go with this handle.
    explicit Handle(std::shared_ptr<Core> core, std::optional<std::pair<std::string, std::string>> private_names = {})
        : core_(Core::for_handle(std::move(core))), private_names_(std::move(private_names)), maker_(getpid()) {}
    ~Handle() {
        try {
            close();
        } catch (...) {  // the name stays, for the cleaner
        }
    }

    // In C++ from one end to the other: no signal handler can cut it short.
    void close() {
        if (!core_) return;
        unlink_private();
        if (!core_) return;  // another thread was faster
        closed_ = true;
        Core::Use core = std::move(*core_);
        core_.reset();
        if (!core->file().state().whole) return;
        // Waits of this handle look at closed_ when woken.
        core->line().wake_all();
        core->line().turn();
    }
    // The names of a private segment go with its maker, not when a forked child of it ends.
    void unlink_private() {
        if (!private_names_ || !core_ || maker_ != getpid()) return;
        const auto names = *std::exchange(private_names_, std::nullopt);
        const Core::Use core = Core::for_operation(core_->shared());
        std::shared_ptr<SegmentFile> again;  // if others have closed the descriptor
        if (!core->file().state().open)
            again = SegmentFile::open(names.first, SegmentFile::Access::kWrite, std::nullopt);
        unlink_names(again ? *again : core->file(), names.first, names.second, false, false);
    }
    bool closed() const { return closed_; }

    // The segment as this handle has it. The GIL guards the pointer.
    Core& core() const {
        if (!core_) throw Error(Failure::kFailedPrecondition, "The accumulator's handle is closed");
        (*core_)->after_fork();
        return **core_;
    }
    Core& whole() const {
        core().check_whole();
        return core();
    }
    // For an operation: keeps the segment open while another thread closes the handle.
    Core::Use attached() {
        core().check_file();
        Core::Use use = Core::for_operation(core_->shared());
        if (!use->attached()) attach_child(*use);
        return use;
    }

    bool apply_sparse(nb::handle indices, nb::handle values, std::optional<nb::object> contributions,
                      const Dims& dims, int64_t local_step, int64_t gradients, bool ascending) {
        const Core::Use core = attached();
        require(*core, kSparse);
        switch (core->config().sum) {
            case kFloat32: return add_rows<float>(*core, indices, values, contributions, dims, local_step, gradients, ascending);
            case kFloat64: return add_rows<double>(*core, indices, values, contributions, dims, local_step, gradients, ascending);
            case kInt64: return add_rows<int64_t>(*core, indices, values, contributions, dims, local_step, gradients, ascending);
            default: return add_rows<uint64_t>(*core, indices, values, contributions, dims, local_step, gradients, ascending);
        }
    }

    bool apply_dense(nb::handle values, const Dims& dims, int64_t local_step, int64_t gradients) {
        const Core::Use core = attached();
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
        const Core::Use core = attached();
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
        const Core::Use core = attached();
        core->line().cancel();
        core->line().turn();
    }

    int64_t step() const { return glimpse().step; }
    int64_t count() const { return glimpse().count; }

    // -- for segment.py -------------------------------------------------------------------------
    // Attaches. False: the segment has been given up, or the name leads elsewhere by now; start over.
    bool enter(const std::string& path, const std::string& semaphore_path) {
        whole();
        const Core::Use use = Core::for_operation(core_->shared());
        Core& core = *use;
        try {
            core.open_semaphore(semaphore_path);
            claim(core);
            const Entered entered = with_name_lock(
                core.file(), true, [&] { return look_again(core, path, semaphore_path); });
            if (entered != Entered::kYes) return false;
        } catch (...) {
            // It may have made the semaphore of a segment that is gone, whose remover was here before.
            const SegmentFile::State file = core.file().state();
            if (file.open && !file.named) ::unlink(semaphore_path.c_str());
            throw;
        }
        sweep(core, 0);
        return true;
    }
    bool unlink(const std::string& path, const std::string& semaphore_path) {
        core();
        const Core::Use use = Core::for_operation(core_->shared());
        private_names_.reset();
        return unlink_names(use->file(), path, semaphore_path, false, true);
    }
    bool unlinked() const { return load(whole().header().unlinked) != 0; }

    // While Python's objects are made garbage may be collected, and a finalizer may close this very handle: hence
    // a use here, and in `state`.
    nb::dict config() const {
        core();
        const Core::Use core = Core::for_operation(core_->shared());
        return describe(core->config());
    }
    uint32_t mode() const { return core().file().status().st_mode & 07777u; }
    uint32_t owner() const { return core().file().status().st_uid; }

    // Without the lock.
    nb::dict state() const {
        whole();
        const Core::Use core = Core::for_operation(core_->shared());
        const State state = core->committed().glimpse();
        nb::dict out = describe(state);
        // An operation runs, or died: rows may differ from the committed ones.
        out["in_operation"] = core->committed().cut_short(state);
        out["waiting"] = core->line().waiting();
        out["attached"] = attached_processes(*core);
        return out;
    }
    // Pids of the living, as they know them themselves.
    std::vector<uint32_t> attached_pids() const {
        Core& core = whole();
        Presence& presence = core.presence();
        std::vector<uint32_t> pids;
        for (uint32_t i = 0, top = presence.table().size(); i < top; ++i) {
            const Participant entry = presence.table()[i];
            if (entry.token != 0 && presence.alive(i, entry.token)) pids.push_back(entry.pid);
        }
        return pids;
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
        Core& core = this->core();
        core.check_file();
        return core.committed().glimpse();
    }
    // A forked child's first operation: see opening.hpp.
    static void attach_child(Core& core) {
        claim(core);
        with_name_lock(core.file(), true, [&] {
            core.check_file();
            core.now_attached();
        });
    }
    static void claim(Core& core) {
        auto claimed = core.claim();
        if (claimed == Presence::Claim::kDone) return;
        const bool full = claimed == Presence::Claim::kFull;
        sweep(core, full ? kLockPatience : 0);
        if (full) claimed = core.claim();
        if (claimed == Presence::Claim::kFull)
            throw Error(Failure::kResourceExhausted,
                        std::to_string(kMaxParticipants) + " processes are attached to the segment already");
    }
    // Frees what the dead hold, unless somebody keeps the lock for longer than that.
    static void sweep(Core& core, int64_t patience) {
        WithoutGil released;
        NoInterruption never;
        Core::Session session(core, monotonic_ns() + patience, never);
        if (session.held()) core.line().sweep();
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

    std::optional<Core::Use> core_;
    std::atomic<bool> closed_{false};
    std::optional<std::pair<std::string, std::string>> private_names_;
    const pid_t maker_;
};

}  // namespace shmacc
