// What happened in a segment that somebody may ask about later: the last kEvents of it.
//
// A writer takes the next serial number and writes the entry that it leads to; the serial is stored last, and 0
// before that, so a reader knows an entry that is being written, or was left half written by a death. If kEvents
// others write meanwhile, the entry may be a mixture: it is for people to read, but for `concerns`, which is
// read and written by the owner of all lanes' locks.
#pragma once

#include "protocol/commit.hpp"

namespace shmacc {

class Events {
  public:
    Events(Header& header, const Committed<RoundState>& round) : header_(header), round_(round) {}

    void add(EventKind kind, const Participant& process, int64_t step) {
        write(kind, process, step, 0, false);
    }

    // A process was found dead. If it had applied, the takes that want to know end with it once.
    void died(const Participant& process) {
        const uint64_t token = load(process.token);
        for (const Event& event : header_.events)  // a sweep that died itself may have recorded it
            if (load(event.serial) != 0 && event.kind == kDied && event.token == token) return;
        const RoundState round = round_.snapshot();
        write(kDied, process, round.step, round.takes, load_relaxed(process.applied_ns) != 0);
    }

    // With all lanes' locks: the deaths since the last take that no take has ended with; not again after this.
    std::vector<Event> take_deaths(const RoundState& round) {
        std::vector<Event> deaths;
        for (Event& event : header_.events)
            if (load(event.serial) != 0 && concerns(event, round)) {
                deaths.push_back(event);
                event.concerns = 0;
            }
        return deaths;
    }

    // Without a lock: whether `take_deaths` would give any.
    bool has_deaths(const RoundState& round) const {
        for (const Event& event : header_.events)
            if (load(event.serial) != 0 && concerns(event, round)) return true;
        return false;
    }

  private:
    static bool concerns(const Event& event, const RoundState& round) {
        return load_relaxed(event.kind) == kDied && load_relaxed(event.concerns) &&
               load_relaxed(event.takes) == round.takes;
    }
    void write(EventKind kind, const Participant& process, int64_t step, uint64_t takes, bool concerns) {
        const uint64_t serial = __atomic_add_fetch(&header_.next_event, 1, __ATOMIC_ACQ_REL);
        Event& event = header_.events[serial % kEvents];
        store(event.serial, uint64_t{0});
        store_barrier();
        event.token = load(process.token);
        event.at_ns = wall_ns();
        event.step = step;
        event.contributor = process.contributor;
        event.takes = takes;
        event.kind = kind;
        event.pid = load_relaxed(process.pid);
        event.pid_namespace = static_cast<uint32_t>(process.pid_namespace);
        event.concerns = concerns;
        store(event.serial, serial);
    }

    Header& header_;
    const Committed<RoundState>& round_;
};

}  // namespace shmacc
