// How a segment gets its name, and how it loses it.
//
// **Making.** A segment is built completely in a file without a name, and its semaphore with it; then linkat
// gives it the name, which fails if the name is taken. So no name ever leads to a half-made segment, and no other
// process can make its semaphore first. A creator that dies before the link leaves at most a semaphore, which no
// process opens, and which the cleaner finds by its token. After the link the creator opens the file by its name, since
// /proc never shows the name of a file that was opened without one, and attaches like any other.
//
// **Attaching.** A process opens the file, checks it, opens the semaphore, claims a participant's entry
// (presence.hpp), and checks again, with the name lock: the segment must not be marked as unlinked, and the name
// must still lead to it. If not, the process releases everything and starts over. A forked child has its
// parent's segment open, but no entry: its first operation claims an entry and makes the second check, too. The
// operation fails if the segment was removed as unused meanwhile.
//
// **Removing** happens under the name lock only. `unlink` marks the segment, removes the name if it leads to this
// very segment, and then removes the semaphore; processes that have the segment open go on using it. The
// cleaner, a constructor that replaces, and a creator that could not attach remove the names in the same way,
// but only if no process has an entry, and without the mark: no process may go on using the segment. So either
// they see the entry of a process that attaches, or that process sees that the name no longer leads to the
// segment. A mark is never taken back, and a name that leads to another file is never removed. A process that
// finds the mark, when it attaches or makes a segment under the name, finishes the removal that a dead process
// began.
//
// The name lock is the kernel's record lock on a byte of the segment's own file, held for a few system calls;
// it is not the lock that applies take, which a stopped process may hold for long. While a thread holds the name
// lock, it runs no Python code and keeps the GIL. So the process's other threads, its finalizers and its signal
// handlers cannot come in between, although record locks do not exclude them.
//
// Each instant of death:
//   before the first linkat         there is nothing.
//   between the two linkats         there is a semaphore without a segment.
//   after the second linkat         there is a complete segment that no process has attached.
//   between mark and unlink         the next process that attaches finishes the removal.
//   between the two unlinks         a semaphore is left, as above.
//   before the second check         a semaphore is left, if the process has made a missing one for a segment
//                                   that was then removed.
//
// Rejected: shm_open(O_CREAT) with the magic written last (others must wait for, and judge, a half-made
// segment: pmodels/mpich#7435, tenstorrent/tt-metal#49304); unlinking by name alone (the name may lead to a new
// segment by now: official-stockfish/Stockfish#6979); multiprocessing.shared_memory (its resource tracker unlinks
// what others use: python/cpython#82300); sem_open (semaphore.hpp).
#pragma once

#include <array>

#include "segment/open_segment.hpp"

namespace shmacc {

// What is found under a name.
enum class Found { kSegment, kNothing, kUnfinished, kHeldUnfinished, kOtherVersion };

struct Opened {
    Found found;
    std::shared_ptr<SegmentFile> file;
    Config config;
    MemberSpecs specs;
};

// Throws DataLossError unless the file is a segment, of this or another version, or is still empty.
inline Found check_config(int fd, uint64_t size, Config& config) {
    if (size == 0) return Found::kUnfinished;
    unsigned char beginning[kPage] = {};
    const ssize_t got = pread(fd, beginning, sizeof beginning, 0);
    if (got < 0) system_failure("Reading it", errno);
    if (std::all_of(beginning, beginning + sizeof beginning, [](unsigned char byte) { return byte == 0; }))
        return Found::kUnfinished;
    if (got < static_cast<ssize_t>(sizeof config)) data_loss("it is too short");
    std::memcpy(&config, beginning, sizeof config);
    if (std::memcmp(config.magic, kMagic, sizeof kMagic) != 0) data_loss("it is not one of shmacc's");
    if (config.version != kVersion) return Found::kOtherVersion;
    if (config.checksum != checksum_of(config)) data_loss("its configuration has a wrong checksum");
    if (config.members > kMaxMembers || config.lanes < 1 || config.lanes > kMaxLanes ||
        !is_named(kKindNames, config.kind) || config.kind == kTable || config.mode > 0777 ||
        !is_named(kReductionNames, config.reduction) || config.capacity < 1 ||
        config.directory_bytes > kMaxDirectory || config.directory_bytes % 8 != 0)
        data_loss("its configuration is out of range");
    if (size != file_size(config)) data_loss("its file was truncated");
    bool name = config.name_length >= 1 && config.name_length <= kMaxName;
    for (uint32_t i = 0; name && i < config.name_length; ++i)
        name = std::isalnum(static_cast<unsigned char>(config.name[i])) ||
               (config.name[i] && std::strchr("._-%", config.name[i]));
    if (!name) data_loss("its configuration is out of range");
    return Found::kSegment;
}

// Reads the segment's members. Call check_config first.
inline MemberSpecs read_directory(const SegmentFile& file, const Config& config) {
    file.check_occupied(config.directory_bytes);
    std::vector<uint64_t> words(config.directory_bytes / 8);
    const auto size = static_cast<ssize_t>(config.directory_bytes);
    const ssize_t got = pread(file.fd(), words.data(), config.directory_bytes, region_offset(kDirectoryRegion));
    if (got < 0) system_failure("Reading it", errno);
    if (got != size || mix_words(words.data(), config.directory_bytes) != config.directory_checksum)
        data_loss("its directory of members has a wrong checksum");
    MemberSpecs specs = unpack_directory(words, config.members);
    for (const MemberSpec& spec : specs)
        if (spec.kind == kTable && config.kind != kParameters)
            data_loss("a table is no member of an accumulator");
    return specs;
}

// Opens the file at `path`, without attaching to it. With the GIL, like everything below.
inline Opened open_segment_file(const std::string& path, SegmentFile::Access access, const Owners& owners) {
    this_process();
    Opened opened{Found::kNothing, SegmentFile::open(path, access, owners), {}, {}};
    if (!opened.file) return opened;
    const struct stat status = opened.file->attributes();
    opened.found = check_config(opened.file->fd(), static_cast<uint64_t>(status.st_size), opened.config);
    // The name lock does not count: a remover may hold it.
    const auto is_held = [](int fd) {
        return others_hold(fd, 0, kNameByte) || others_hold(fd, kNameByte + 1, 0);
    };
    if (opened.found == Found::kUnfinished && is_held(opened.file->fd()))
        opened.found = Found::kHeldUnfinished;
    if (opened.found == Found::kSegment) {
        opened.file->set_size(file_size(opened.config));
        opened.specs = read_directory(*opened.file, opened.config);
    }
    return opened;
}

// The bytes of an array in each of kArrayRegions.
using ArrayBytes = std::array<uint64_t, std::size(kArrayRegions)>;

// Makes a segment under these names, and returns it open; null if the segment's name is taken. kept: made with
// unlink_on_close. arrays: for each member, the bytes that the segment records as reserved. fill(file, config) reserves
// and fills these bytes before the file has a name.
template <class Fill>
std::shared_ptr<SegmentFile> create_segment(const std::string& path, const std::string& semaphore_path,
                                            Config config, const MemberSpecs& members, bool kept,
                                            const std::vector<ArrayBytes>& arrays, Fill fill) {
    const std::vector<uint64_t> directory = pack_directory(members);
    config.members = static_cast<uint32_t>(members.size());
    config.directory_bytes = directory.size() * 8;
    config.directory_checksum = mix_words(directory.data(), config.directory_bytes);
    std::memcpy(config.magic, kMagic, sizeof kMagic);
    config.version = kVersion;
    config.checksum = checksum_of(config);
    struct alignas(64) Line {  // the alignment of the states
        unsigned char bytes[64];
    };
    std::vector<Header> header(1);  // all zero, like the states below
    std::vector<Line> states((bytes_of_states(config) + sizeof(Line) - 1) / sizeof(Line));
    Header* head = header.data();
    head->config = config;
    head->keeper = kept ? kToBeKept : kNotKept;
    head->state[0].round = 1;  // the zeroed lanes and members belong to round 0, and so are empty
    head->state[0].checksum = checksum_of(head->state[0]);
    for (uint32_t i = 0; i < config.lanes; ++i) {
        auto* lane = reinterpret_cast<LaneHeader*>(states.data()->bytes + i * bytes_of_lane(config));
        lane->state[0].checksum = checksum_of(lane->state[0]);
        auto* tables = reinterpret_cast<MemberStates*>(lane + 1);
        for (uint32_t j = 0; j < tables_of(config); ++j) {
            for (uint32_t k = 0; j < arrays.size() && k < arrays[j].size(); ++k)
                tables[j].copies[0].reserved[kArrayRegions[k]] = arrays[j][k];
            tables[j].copies[0].checksum = checksum_of(tables[j].copies[0]);
        }
    }

    auto file = SegmentFile::create();
    const int fd = file->fd();
    if (ftruncate(fd, static_cast<off_t>(file_size(config))) != 0) system_failure("Making a segment", errno);
    file->set_size(file_size(config));
    const auto write = [fd](uint32_t region, const void* data, uint64_t bytes) {
        reserve_in_file(fd, region_offset(region), page_up(std::max<uint64_t>(bytes, 1)));
        const ssize_t written = pwrite(fd, data, bytes, static_cast<off_t>(region_offset(region)));
        if (written != static_cast<ssize_t>(bytes))
            system_failure("Making a segment", written < 0 ? errno : ENOSPC);
    };
    write(kHeaderRegion, head, sizeof(Header));
    write(kDirectoryRegion, directory.data(), config.directory_bytes);
    write(kStatesRegion, states.data(), bytes_of_states(config));
    reserve_in_file(fd, region_offset(kParticipantsRegion), kPage);
    reserve_in_file(fd, region_offset(kWaitersRegion), kPage);
    reserve_in_file(fd, region_offset(kDepartedRegion), kPage);
    // Set the mode here, whatever the umask is (celery/billiard#288).
    if (fchmod(fd, config.mode) != 0) system_failure("Making a segment", errno);
    fill(*file, config);

    const Descriptor being_made = NamedSemaphore::make(semaphore_path, config.lanes, config.mode,
                                                       file->attributes().st_uid);
    if (!being_made) system_failure("Making a semaphore", EEXIST);  // cannot happen: its name is random
    bool named = false;
    try {
        named = NamedSemaphore::link_to(fd, path);
    } catch (...) {
        unlink(semaphore_path.c_str());
        throw;
    }
    if (!named) unlink(semaphore_path.c_str());
    return named ? file : nullptr;
}

// The second check of a process that attaches; needs the name lock. Returns false if the name leads elsewhere, or if
// the segment is marked as unlinked; then this call has finished the removal that another process began.
inline bool look_again(OpenSegment& segment, const std::string& path, const std::string& semaphore_path) {
    SegmentFile& file = segment.file();
    if (load(segment.header().unlinked)) {
        if (file.is_at(path) && unlink(path.c_str()) != 0 && errno != ENOENT) {
            if (errno != EPERM && errno != EACCES) system_failure("Removing it", errno);
            belongs_to_another(file.attributes(),
                               std::string("; it was given up, and this user cannot remove its name: ") +
                                   std::strerror(errno));
        }
        unlink(semaphore_path.c_str());
        return false;
    }
    if (file.is_at(path)) {
        segment.now_attached();
        return true;
    }
    unlink(semaphore_path.c_str());  // made by this process for a segment that was removed meanwhile
    return false;
}

// Needs the name lock. The mark is a word of the header, written through the descriptor, since the
// remover need not have the segment mapped.
inline void mark_given_up(SegmentFile& file) {
    const uint64_t mark = 1;
    const ssize_t written = pwrite(file.fd(), &mark, sizeof mark, offsetof(Header, unlinked));
    if (written != sizeof mark) system_failure("Removing it", written < 0 ? errno : ENOSPC);
    store_barrier();  // before the unlink: who finds no name sees the mark (OpenSegment::check_file)
}
// Returns the names that it removed. The semaphore's may be missing: once the segment has no name, a cleaner may
// remove the semaphore first.
inline std::vector<std::string> remove_names(SegmentFile& file, const std::string& path,
                                             const std::string& semaphore_path) {
    std::vector<std::string> removed;
    if (file.is_at(path)) {
        if (unlink(path.c_str()) == 0)
            removed.push_back(path);
        else if (errno != ENOENT)
            system_failure("Removing it", errno);
    }
    // A semaphore of another user stays behind, for root to clean.
    if (unlink(semaphore_path.c_str()) == 0)
        removed.push_back(semaphore_path);
    else if (errno == ENOMEM)
        system_failure("Removing its semaphore", errno);
    return removed;
}

// Needs the name lock; called by a creator that could not attach. Another process, or another thread of this
// one, may have attached by now: then the segment stays.
inline void take_back_new(SegmentFile& file, const std::string& path, const std::string& semaphore_path) {
    const auto segment = OpenSegment::of(file);
    const bool used = Presence::anybody_else(file.fd()) || (segment && segment->attached());
    if (!used && file.is_at(path)) remove_names(file, path, semaphore_path);
}

// Whether a living process is attached, this one included.
inline bool in_use(SegmentFile& file) {
    const auto segment = OpenSegment::of(file);
    return Presence::anybody_else(file.fd()) || (segment && segment->presence().claimed());
}

}  // namespace shmacc
