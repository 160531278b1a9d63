// A segment as one process has it open: the parts put together, and the way into the lock.
//
// There is one Core for each process and segment, shared by all handles and threads (`open` keeps the
// list): closing any descriptor of the file would drop the process's record locks, so there must be one only.
//
// How a name comes to a segment and leaves it is Python's (segment.py); what needs the descriptor is here.
#pragma once

#include <cctype>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <thread>

#include "buffer.hpp"
#include "line.hpp"
#include "rows.hpp"

namespace shmacc {

class Core {
  public:
    using FileId = std::pair<dev_t, ino_t>;
    enum class Found { kNothing, kUnfinished, kOtherVersion };

    // The segment at `path`, or nothing and why. Does not attach.
    static std::shared_ptr<Core> open(const std::string& path, Found* found) {
        for (;; std::this_thread::yield()) {
            std::lock_guard<std::mutex> guard(list_mutex());
            // A look that can be closed again: closing an O_PATH descriptor drops no record locks.
            Descriptor look(::open(path.c_str(), O_PATH | O_CLOEXEC | O_NOFOLLOW));
            if (look.fd < 0) {
                if (errno == ENOENT) return none(found, Found::kNothing);
                throw_open_failure(nullptr);
            }
            struct stat status {};
            fstat(look.fd, &status);
            if (!S_ISREG(status.st_mode)) data_loss("it is not a regular file");
            FileId id{status.st_dev, status.st_ino};
            if (auto at = list().find(id); at != list().end()) {
                if (auto core = at->second.lock()) return core;
                continue;  // about to be closed: its descriptor must be gone before there is another
            }
            std::string same_file = "/proc/self/fd/" + std::to_string(look.fd);
            int fd = ::open(same_file.c_str(), O_RDWR | O_CLOEXEC);
            if (fd < 0) throw_open_failure(&status);
            auto mapping = std::make_unique<Mapping>(fd);  // closes fd whatever happens
            Config config{};
            if (auto why = check_config(fd, static_cast<uint64_t>(status.st_size), config))
                return none(found, *why);
            auto core = std::make_shared<Core>(std::move(mapping), config, id);
            list()[id] = core;
            return core;
        }
    }

    Core(std::unique_ptr<Mapping> mapping, const Config& config, FileId id)
        : id_(id), config_(config), mapping_(std::move(mapping)),
          header_(reinterpret_cast<Header*>(mapping_->at_least(kHeaderRegion, kHeaderBytes))),
          committed_(header_, *mapping_, config_), presence_(*mapping_, header_),
          line_(*mapping_, header_, presence_) {}

    ~Core() {
        presence_.leave(mapping_->file_state().whole);
        if (queue_) sem_close(queue_);
        std::lock_guard<std::mutex> guard(list_mutex());
        mapping_.reset();
        list().erase(id_);
    }

    // Writes a new segment's first bytes into an anonymous file.
    static void initialise(int fd, Config config) {
        if (ftruncate(fd, static_cast<off_t>(kFileSize)) != 0)
            throw Error(Failure::kResourceExhausted,
                        std::string("Making a segment failed: ") + std::strerror(errno));
        reserve_in_file(fd, 0, kHeaderBytes);
        reserve_in_file(fd, region_offset(kParticipantsRegion), kPage);
        reserve_in_file(fd, region_offset(kWaitersRegion), kPage);
        std::memcpy(config.magic, kMagic, sizeof kMagic);
        config.version = kVersion;
        config.checksum = checksum_of(config);
        auto header = std::make_unique<Header>();
        std::memset(static_cast<void*>(header.get()), 0, sizeof(Header));
        header->config = config;
        header->state[0].checksum = checksum_of(header->state[0]);
        if (pwrite(fd, header.get(), sizeof(Header), 0) != static_cast<ssize_t>(sizeof(Header)))
            throw Error(Failure::kResourceExhausted,
                        std::string("Making a segment failed: ") + std::strerror(errno));
    }

    // The queue in front of the lock; made by Python once the segment has its name.
    void use_queue(const std::string& name) {
        if (queue_) return;
        sem_t* queue = sem_open(name.c_str(), 0);
        if (queue == SEM_FAILED)
            throw Error(errno == EACCES ? Failure::kPermissionDenied : Failure::kNotFound,
                        "Opening the semaphore " + name + " failed: " + std::strerror(errno));
        queue_ = queue;
        lock_ = std::make_unique<Lock>(*mapping_, queue_, header_->courtesy);
    }
    bool has_queue() const { return queue_ != nullptr; }

    void attach(uint64_t token, const ProcessIdentity& identity) {
        if (!presence_.claimed()) presence_.claim(token, identity);
        attached_ = true;
    }
    bool attached() const { return attached_; }

    // Around fork no other thread is amid the list, so that the child finds it whole.
    static void before_fork() { list_mutex().lock(); }
    static void after_fork_in_parent() { list_mutex().unlock(); }
    // A child of fork has the parent's memory but none of its record locks.
    static void after_fork_in_child(const ProcessIdentity& identity, uint64_t token) {
        new (&list_mutex()) std::mutex;
        for (auto& [id, weak] : list()) {
            auto core = weak.lock();
            if (!core) continue;
            if (core->lock_) core->lock_->after_fork_in_child();
            core->presence_.after_fork_in_child();
            if (!core->attached_) continue;
            try {
                core->presence_.claim(token, identity);
            } catch (const Error&) {
                // No room: the child's first operation tries again, and says so.
            }
        }
    }

    // The lock, held, with everything in order: what an operation works on.
    class Session {
      public:
        Session(Core& core, int64_t deadline, Interruption& interruption)
            : core_(core) {
            const auto how = core.lock_->acquire(deadline, interruption);
            held_ = how != Lock::Acquired::kNot;
            if (!held_) return;
            try {
                // Checked by the caller at the start; much may have happened while waiting.
                if (how == Lock::Acquired::kAfterWaiting) core_.check_file();
                state = core_.committed_.current();
                if (core_.committed_.cut_short(state)) core_.undo(state, 1);
                before = state;
            } catch (...) {
                core_.lock_->release(core_.mapping_->file_state().whole);
                throw;
            }
        }
        ~Session() { release(); }
        Session(const Session&) = delete;
        Session& operator=(const Session&) = delete;

        bool held() const { return held_; }
        void commit() {
            core_.committed_.commit(state);
            give_back(*core_.mapping_, before, state);
        }
        // Takes back what was changed in place by an operation that gives up.
        void roll_back() {
            State committed = core_.committed_.current();
            if (core_.committed_.cut_short(committed)) core_.undo(committed, 0);
            give_back(*core_.mapping_, state, committed);
        }
        void release() {
            if (held_) core_.lock_->release();
            held_ = false;
        }

        State state;   // to be changed, then committed
        State before;  // as committed when the lock was acquired

      private:
        Core& core_;
        bool held_ = false;
    };

    // For what is put in order on the way out: an error may be that the file was truncated.
    bool reachable() const { return std::uncaught_exceptions() == 0 || mapping_->file_state().whole; }
    // Before anything mapped is touched: a truncated file's pages are gone.
    void check_whole() const {
        if (!mapping_->file_state().whole) data_loss("its file was truncated");
    }
    // The same, and NotFoundError if the name was taken away from under its users.
    void check_file() const {
        auto file = mapping_->file_state();
        if (!file.whole) data_loss("its file was truncated");
        if (!file.named && !load(header_->unlinked))
            throw Error(Failure::kNotFound,
                        "The segment was removed under its users (systemd's RemoveIPC does that at "
                        "logout; so does `rm`); processes that attach from now on would not meet it");
    }

    uint64_t row_bytes(const State& state) const {
        return state.row_elements * sum_bytes(config_.sum);
    }

    Header& header() { return *header_; }
    // As it was when the segment was opened, and checked.
    const Config& config() const { return config_; }
    Mapping& mapping() { return *mapping_; }
    Committed& committed() { return committed_; }
    Presence& presence() { return presence_; }
    Line& line() { return line_; }
    Lock* lock() { return lock_.get(); }
    const FileId& id() const { return id_; }

  private:
    struct Descriptor {
        explicit Descriptor(int opened) : fd(opened) {}
        ~Descriptor() {
            if (fd >= 0) close(fd);
        }
        int fd;
    };
    static std::mutex& list_mutex() {
        static std::mutex mutex;
        return mutex;
    }
    static std::map<FileId, std::weak_ptr<Core>>& list() {
        // Never destroyed: threads that nobody waits for may still look at it when the process ends.
        static auto& cores = *new std::map<FileId, std::weak_ptr<Core>>;
        return cores;
    }
    static std::shared_ptr<Core> none(Found* found, Found why) {
        *found = why;
        return nullptr;
    }
    [[noreturn]] static void throw_open_failure(const struct stat* status) {
        std::string why = std::strerror(errno);
        if (status && (errno == EACCES || errno == EPERM)) {
            char mode[8];
            snprintf(mode, sizeof mode, "%04o", status->st_mode & 07777u);
            throw Error(Failure::kPermissionDenied, "It belongs to uid " + std::to_string(status->st_uid) +
                                                        ", mode " + mode + ": " + why);
        }
        throw Error(Failure::kResourceExhausted, "Opening it failed: " + why + " (`ulimit -n`?)");
    }

    // Nothing if it is a segment of this version; throws if it is something else altogether.
    static std::optional<Found> check_config(int fd, uint64_t size, Config& config) {
        if (size == 0) return Found::kUnfinished;
        unsigned char beginning[kPage] = {};
        ssize_t got = pread(fd, beginning, sizeof beginning, 0);
        if (std::all_of(beginning, beginning + sizeof beginning, [](unsigned char byte) { return byte == 0; }))
            return Found::kUnfinished;
        if (got < static_cast<ssize_t>(sizeof config)) data_loss("it is too short");
        std::memcpy(&config, beginning, sizeof config);
        if (std::memcmp(config.magic, kMagic, sizeof kMagic) != 0) data_loss("it is not one of shmacc's");
        if (config.version != kVersion) return Found::kOtherVersion;
        if (config.checksum != checksum_of(config)) data_loss("its configuration has a wrong checksum");
        if (size != kFileSize) data_loss("its file was truncated");
        bool rank = config.declared_rank == kUnknownRank || config.declared_rank <= kMaxRank;
        bool name = config.name_length >= 1 && config.name_length <= kMaxName;
        for (uint32_t i = 0; name && i < config.name_length; ++i)
            name = std::isalnum(static_cast<unsigned char>(config.name[i])) ||
                   std::strchr("._-", config.name[i]);
        if (!rank || !name || config.mode > 0777 || config.reduction < kMean ||
            config.reduction > kCmean || config.sum < kFloat32 || config.sum > kUint64 ||
            config.components < 1 || config.components > 2 ||
            (config.kind != kSparse && config.kind != kDense))
            data_loss("its configuration is out of range");
        return std::nullopt;
    }

    void undo(State& state, uint64_t deaths) {
        committed_.undo(state, config().kind == kSparse ? row_bytes(state) : 0, deaths);
    }

    FileId id_;
    Config config_;
    std::unique_ptr<Mapping> mapping_;
    Header* header_;
    Committed committed_;
    Presence presence_;
    Line line_;
    sem_t* queue_ = nullptr;
    bool attached_ = false;
    std::unique_ptr<Lock> lock_;
};

}  // namespace shmacc
