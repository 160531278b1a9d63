// Assertions: what a function relies on or ensures where it writes shared memory.
//
// An assertion must hold even if other processes die at any instruction, or write anything into the segment at any
// time. So it speaks only of what this process has done and checked, which is in its own memory. What it finds wrong in
// the segment is an error instead (data_loss). If an assertion fails, this library has a fault, or other code has
// written over its memory.
//
// A failed assertion ends the operation where it is, as if its process had died there: it throws InternalError and
// undoes nothing, since the memory to undo by may be wrong (`Sound`). So the argument for a death holds at each
// instant, with two differences. Destructors release the locks, not the kernel; the next owner, which may be this
// process, then undoes what did not commit. And the process lives on: a round that it has open stays open until its
// block ends. Therefore nothing is asserted between a commit that opens a round and the code that notes this round
// (Take::hand_out). After the operation, the process remembers only what it has proved before (Mapping::proved,
// Compared, WaitQueue::Known); `Lane::current` begins anew. In a destructor, a failed assertion ends the process.
#pragma once

#include <cstring>

#include "base/errors.hpp"
#include "base/words.hpp"

namespace shmacc {

inline uint64_t failed_assertions = 0;  // in this process

[[noreturn, gnu::cold, gnu::noinline]] inline void assertion_failed(const char* assertion, const char* file,
                                                                    int line) {
    __atomic_add_fetch(&failed_assertions, 1, __ATOMIC_RELAXED);
    throw Error(Failure::kInternal,
                std::string("A fault of shmacc, or in this process's memory. Please report this: at ") +
                    std::strstr(file, "shmacc/native") + ":" + std::to_string(line) +
                    " this is not true: " + assertion +
                    ". The call has ended as if the process had died there: it has its whole effect or none, "
                    "and other processes go on");
}

// Lets an operation ask whether an assertion has failed in this process since the operation began.
class Sound {
  public:
    explicit operator bool() const { return load_relaxed(failed_assertions) == before_; }

  private:
    const uint64_t before_ = load_relaxed(failed_assertions);
};

}  // namespace shmacc

#define SHMACC_ASSERT(assertion)                               \
    (__builtin_expect(!!(assertion), 1) ? static_cast<void>(0) \
                                        : ::shmacc::assertion_failed(#assertion, __FILE__, __LINE__))
