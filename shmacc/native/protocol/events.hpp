// The last kEvents events of a segment, for people who ask later what happened. What ends a wait is recorded elsewhere
// (departures.hpp, Header::finished).
//
// A writer takes the next serial number, which determines the entry. It first stores 0 as the entry's serial, and
// last the number: so a reader recognises an entry that is being written, or that a dead writer left half
// written. If kEvents other events are written meanwhile, the entry may be a mixture.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <string>
#include <string_view>
#include <vector>

#include "base/segment_file.hpp"
#include "protocol/commit.hpp"

namespace shmacc {

// Writes why something failed, through the descriptor. If there is no memory for it, the reason stays unknown.
inline void write_reason(const SegmentFile& file, uint32_t number, uint64_t of, std::string_view text) {
    Reason reason{};
    reason.of = of;
    reason.length = text.copy(reason.text, sizeof reason.text);
    const ssize_t done = pwrite(file.fd(), &reason, sizeof reason, static_cast<off_t>(reason_offset(number)));
    static_cast<void>(done);
}
// The reason that was written for `of`; "" if it is not known.
inline std::string read_reason(const SegmentFile& file, uint32_t number, uint64_t of) {
    Reason reason{};
    const auto at = static_cast<off_t>(reason_offset(number));
    if (pread(file.fd(), &reason, sizeof reason, at) != static_cast<ssize_t>(sizeof reason) || reason.of != of)
        return "";
    return std::string(reason.text, std::min<uint64_t>(reason.length, sizeof reason.text));
}

class Events {
  public:
    Events(const SegmentFile& file, Header& header) : file_(file), header_(header) {}

    // Returns the event's serial.
    uint64_t add(EventKind kind, const Participant& process, int64_t step) {
        SHMACC_ASSERT(kind > kNoEvent && kind < kEventKinds);
        const uint64_t serial = __atomic_add_fetch(&header_.next_event, 1, __ATOMIC_ACQ_REL);
        Event& event = header_.events[serial % kEvents];
        store(event.serial, uint64_t{0});
        store_barrier();
        event.token = load(process.token);
        event.at_ns = timestamp_ns();
        event.step = step;
        event.contributor = process.contributor;
        event.kind = kind;
        event.pid = load_relaxed(process.pid);
        event.pid_namespace = process.pid_namespace;
        event.roles = load_relaxed(process.roles);
        store(event.serial, serial);
        return serial;
    }
    void add_failure(const Participant& process, int64_t step, std::string_view reason) {
        const uint64_t serial = add(kFailure, process, step);
        write_reason(file_, reason_of_event(serial), serial, reason);
    }

    struct Gone {
        uint32_t pid;
        std::string reason;
    };
    // Processes that have died or failed at this step or later, if their events are still kept.
    std::vector<Gone> gone_since(int64_t step) const {
        std::vector<Gone> found;
        const uint64_t last = load(header_.next_event);
        for (uint64_t back = std::min<uint64_t>(last, kEvents); back-- > 0;) {
            const uint64_t serial = last - back;
            const Event event = load_words(header_.events[serial % kEvents]);
            if (event.serial != serial || event.step < step) continue;
            if (event.kind == kDeath) found.push_back({event.pid, "killed"});
            if (event.kind != kFailure) continue;
            const std::string reason = read_reason(file_, reason_of_event(serial), serial);
            found.push_back({event.pid, reason.empty() ? "failed" : reason});
        }
        return found;
    }

  private:
    const SegmentFile& file_;
    Header& header_;
};

}  // namespace shmacc
