// What one accumulator object of Python's holds: a use of the process's Core of the segment, and whether this
// handle is closed. Arguments come checked (_gradients.py); sizes are checked again here, since memory depends
// on them.
#pragma once

#include "description.hpp"
#include "opening.hpp"
#include "taken.hpp"

namespace shmacc {

constexpr int64_t kNamePatience = 2000 * kMillisecond;  // the name lock is held for a few system calls
constexpr int64_t kSweepPatience = 2000 * kMillisecond;  // the other one may be held for a large round

// Does something with the name lock held. Meanwhile the GIL is kept: see opening.hpp.
template <class Act>
auto with_name_lock(SegmentFile& file, bool with_signals, Act act) {
    struct Unlock {
        const int fd;
        ~Unlock() { set_record_lock(fd, kNameByte, F_UNLCK); }
    };
    const int64_t deadline = monotonic_ns() + kNamePatience;
    for (file.check_open(); !set_record_lock(file.fd(), kNameByte, F_WRLCK); file.check_open()) {
        if (monotonic_ns() > deadline)
            throw Error(Failure::kDeadlineExceeded,
                        "Another process has been opening or removing it for 2 s (is it stopped?)");
        WithoutGil released;
        const timespec moment{0, kMillisecond};
        nanosleep(&moment, nullptr);
        if (with_signals) released.check_signals();
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
    class Waiting : public Interruption {
      public:
        Waiting(WithoutGil& released, const Handle& handle) : released_(released), handle_(handle) {}
        void check() override {
            released_.check_signals();
            if (handle_.closed_)
                throw Error(Failure::kCancelled,
                            "The operation was cancelled: its accumulator's handle was closed");
        }
        bool ends_sleep() const override { return released_.signals_come_here(); }  // a close wakes

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
        : core_(Core::for_handle(std::move(core))), private_names_(std::move(private_names)) {}
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
        const auto kept = std::exchange(kept_, {});  // dropped last: that may run Python
        Core::Use core = std::move(*core_);
        core_.reset();
        if (!core->file().state().whole) return;
        // Waits of this handle look at closed_ when woken.
        core->line().wake_all();
        core->line().turn();
    }
    // The names of a private segment go with its maker, not when a forked child of it ends.
    void unlink_private() {
        if (!private_names_ || !core_ || !maker_.is_here()) return;
        const auto [path, semaphore_path] = *private_names_;
        const Core::Use core = Core::for_operation(core_->shared());
        if (core->file().state().open) {
            unlink_names(core->file(), path, semaphore_path, false, false);
        } else if (core->file().is_at(path)) {  // others have closed its descriptor
            const auto anew = SegmentFile::open(path, SegmentFile::Access::kWrite, std::nullopt);
            if (anew && anew->id() == core->file().id())
                unlink_names(*anew, path, semaphore_path, false, false);
        }
        private_names_.reset();  // not before: who fails may try again
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

    // What was taken (TakenRound::content); it stays in `place`, too. For what a function returns is lost if a
    // signal handler raises right after the call: handlers run between bytecodes. Whoever made the place gives it
    // to `keep` if its content does not get to the caller.
    nb::object take(TakenRound& place, int64_t num_required, std::optional<double> timeout, bool divide,
                    int64_t lowest, uint64_t highest) {
        const Core::Use core = attached();
        need_numpy();  // what may fail for want of memory had better do so before something is taken
        if (!kept_.pass_on(place)) {
            TakeRequest request{num_required, deadline_after(timeout), divide, place.advances(), place.seals(),
                                lowest, highest};
            run([&](Operations& operations) { operations.take(request, place.place()); });
        }
        return place.content(core->config());
    }
    // What was taken but did not get to its caller is for this handle's next take of the same sort. Whether
    // anything was.
    bool keep(nb::object place) { return !closed_ && kept_.keep(std::move(place)); }

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

    // (the pids of some living processes that are attached, how many more there are at most): asks the kernel
    // about kAsked of them, since a question costs the more the more there are.
    nb::tuple some_attached() const {
        Presence& presence = whole().presence();
        std::vector<uint32_t> pids;
        if (presence.claimed()) pids.push_back(presence.own().pid);
        uint32_t more = 0;
        for (uint32_t i = 0, asked = 0, top = presence.table().size(); i < top; ++i) {
            const uint64_t token = load(presence.table()[i].token);
            if (token == 0 || i == presence.index()) continue;
            if (asked == kAsked) {
                ++more;
                continue;
            }
            ++asked;
            if (presence.alive(i, token)) pids.push_back(load_relaxed(presence.table()[i].pid));
        }
        return nb::make_tuple(pids, more);
    }

    int64_t step() const { return glimpse().step; }
    int64_t count() const { return glimpse().count; }

    // -- for _segment.py ------------------------------------------------------------------------
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
            // Perhaps it made the semaphore of a segment that was removed meanwhile: the remover was here before.
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
        const bool unlinked = unlink_names(use->file(), path, semaphore_path, false, true);
        private_names_.reset();
        return unlinked;
    }
    bool unlinked() const { return load(whole().header().unlinked) != 0; }

    // Here and in `state` all is read before the first object of Python's is made: that may collect garbage, run
    // whatever finalizers there are, and let another thread close this handle.
    nb::dict config() const {
        const Config config = core().config();
        return describe(config);
    }
    uint32_t mode() const { return core().file().status().st_mode & 07777u; }

    // Without the lock.
    nb::dict state() const {
        Core& core = whole();
        const State state = core.committed().glimpse();
        // An operation runs, or died: rows may differ from the committed ones.
        const bool in_operation = core.committed().cut_short(state);
        const std::vector<bool> alive = living(core);
        const uint32_t waiting = core.line().waiting([&](uint32_t i, uint64_t token) {
            return i < alive.size() && alive[i] && load(core.presence().table()[i].token) == token;
        });
        nb::dict out = describe(state);
        out["in_operation"] = in_operation;
        out["waiting"] = waiting;
        out["attached"] = std::count(alive.begin(), alive.end(), true);
        return out;
    }
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
    // A forked child's first operation; see opening.hpp.
    void attach_child(Core& core) {
        claim(core);
        with_name_lock(core.file(), true, [&] {
            core.check_file();
            core.now_attached();
        });
    }
    void claim(Core& core) {
        const auto claimed = core.claim();
        if (claimed == Presence::Claim::kDoneBesideDead) sweep(core, 0);
        if (claimed != Presence::Claim::kFull) return;
        const bool swept = sweep(core, kSweepPatience);
        if (core.claim() == Presence::Claim::kFull)
            throw Error(Failure::kResourceExhausted,
                        "All " + std::to_string(kMaxParticipants) + " places for processes are taken" +
                            (swept ? "" : ", and a process that keeps the lock does not let those of the dead be freed"));
    }
    // Frees what the dead hold, unless somebody keeps the lock for so long (nanoseconds); whether it did.
    bool sweep(Core& core, int64_t patience) {
        WithoutGil released;
        Waiting waiting(released, *this);
        Core::Session session(core, monotonic_ns() + patience, waiting);
        if (session.held()) core.line().sweep();
        return session.held();
    }
    // Which entries of participants belong to living processes; asks the kernel about each, once.
    static std::vector<bool> living(Core& core) {
        Presence& presence = core.presence();
        std::vector<bool> living(presence.table().size());
        for (uint32_t i = 0; i < living.size(); ++i) {
            uint64_t token = load(presence.table()[i].token);
            living[i] = token != 0 && presence.alive(i, token);
        }
        return living;
    }
    static constexpr uint32_t kAsked = 16;

    KeptRounds kept_;
    std::optional<Core::Use> core_;
    std::atomic<bool> closed_{false};
    std::optional<std::pair<std::string, std::string>> private_names_;
    const Origin maker_;
};

}  // namespace shmacc
