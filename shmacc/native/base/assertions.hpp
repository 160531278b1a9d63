// Assertions of what a function relies on, or ensures, where it writes shared memory.
//
// `make editable` compiles them; a wheel has no code of them. They are true even if other processes die at any
// instruction, or write anything into the segment at any time: so they speak of what this process has done and
// checked, which is in its own memory. What it finds wrong in the segment is an error (data_loss).
#pragma once

#ifdef SHMACC_ASSERTIONS
#include <cstdio>
#include <cstdlib>

namespace shmacc {

[[noreturn]] inline void assertion_failed(const char* assertion, const char* file, int line) {
    std::fprintf(stderr, "%s:%d: this is not true: %s\n", file, line, assertion);
    std::abort();
}

}  // namespace shmacc

#define SHMACC_ASSERT(assertion) \
    ((assertion) ? static_cast<void>(0) : ::shmacc::assertion_failed(#assertion, __FILE__, __LINE__))
// What only assertions need.
#define SHMACC_ASSERTED(code) code
#else
#define SHMACC_ASSERT(assertion) static_cast<void>(0)
#define SHMACC_ASSERTED(code)
#endif
