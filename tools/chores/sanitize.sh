#!/usr/bin/env bash
# Runs tests with an extension that a sanitizer checks. Any report of the sanitizer fails the run.
# `make asan` and `make tsan` set up the environment that this runs in.
#
#   tools/chores/sanitize.sh address|thread [pytest arguments]     default: the core's tests
#   PYTEST_ADDOPTS            more arguments, without giving up the default ones
#   SHMACC_FUZZ_EXAMPLES      for the tests that damage a segment (1000)
#
# ThreadSanitizer sees only the threads of one process; for several processes that use a segment there is
# tools/model/litmus. But threads share a segment's words just as processes do (all handles use one mapping), so
# its findings hold for processes too, except where only a mutex of the process keeps threads apart.
set -euo pipefail
cd "$(dirname "$0")/../.."

kind=$1
shift
reports=$PWD/build/$kind-reports
rm -rf "$reports"
mkdir -p "$reports"

library() {  # the run-time library must be that of the compiler which built the extension
    "${CXX:-g++}" -print-file-name="$1"
}
libstdcxx=$(library libstdc++.so)

if [ "$kind" = address ]; then
    bin=.venv-asan/bin
    marked="not beyond_asan"
    libasan=$(library libasan.so)
    # detect_leaks: CPython and NumPy keep memory until the end on purpose; tests that count
    #   mappings and descriptors look for leaks.
    # allocator_may_return_null: malloc must refuse a far too large size, as without a sanitizer.
    # handle_segv: the library has a handler of its own for writes to read-only arrays, and tests hold how a process
    #   ends by others; pytest shows the Python code at which its own process crashes.
    # libstdc++ is preloaded, too: AddressSanitizer looks for its exception functions at the start.
    # PYTHONMALLOC: else Python's memory would come from pools that the sanitizer does not watch.
    asan="detect_leaks=0:handle_segv=0:abort_on_error=1:allocator_may_return_null=1:max_allocation_size_mb=4096"
    ubsan="print_stacktrace=1:halt_on_error=1:abort_on_error=1"
    under=(env "LD_PRELOAD=$libasan $libstdcxx" PYTHONMALLOC=malloc
        "ASAN_OPTIONS=$asan:log_path=$reports/report" "UBSAN_OPTIONS=$ubsan:log_path=$reports/report"
        "SHMACC_FUZZ_EXAMPLES=${SHMACC_FUZZ_EXAMPLES:-1000}")
    # The files also have warnings: of allocations that are too large and fail, as without a sanitizer.
    report='ERROR: |runtime error: '
else
    bin=.venv-tsan/bin
    marked="threads and not beyond_tsan"
    libtsan=$(library libtsan.so)
    # std::timed_mutex calls pthread_mutex_clocklock, which GCC's run-time library does not know before version 15: it
    # would believe that nobody has locked the mutex. It does know pthread_mutex_timedlock.
    clocklock=$PWD/build/tsan-clocklock.so
    "${CC:-gcc}" -shared -fPIC -O1 -o "$clocklock" -x c - <<'EOF'
#define _GNU_SOURCE
#include <pthread.h>
#include <time.h>
int pthread_mutex_clocklock(pthread_mutex_t *mutex, clockid_t clock, const struct timespec *until) {
    struct timespec now, real;
    clock_gettime(clock, &now);
    clock_gettime(CLOCK_REALTIME, &real);
    real.tv_sec += until->tv_sec - now.tv_sec;
    real.tv_nsec += until->tv_nsec - now.tv_nsec;
    while (real.tv_nsec < 0) real.tv_nsec += 1000000000, --real.tv_sec;
    while (real.tv_nsec >= 1000000000) real.tv_nsec -= 1000000000, ++real.tv_sec;
    return pthread_mutex_timedlock(mutex, &real);
}
EOF
    # die_after_fork: in some tests a process with threads forks a child that starts threads.
    # setarch -R: with random addresses, other mappings could lie where TSan needs its shadow memory.
    tsan="die_after_fork=0:halt_on_error=0:second_deadlock_stack=1:history_size=4"
    under=(env "LD_PRELOAD=$libtsan $clocklock $libstdcxx"
        "TSAN_OPTIONS=$tsan:suppressions=$PWD/tools/chores/tsan.supp:log_path=$reports/report"
        setarch "$(uname -m)" -R)
    report=''
fi

# The tests of tools and pages say nothing about the extension.
if [ $# -eq 0 ]; then
    set -- tests/{values,segment,accumulators,parameters,multihost,hazards} tests/package/test_interpreter_modes.py \
        -m "$marked and not installs"
fi

# Why log_path above: pytest holds a process's output back, and loses it if the process dies in a test.
status=0
"${under[@]}" "$bin/pytest" -p no:cacheprovider --timeout 1800 -o faulthandler_timeout=0 "$@" || status=$?

mapfile -t found < <(grep -lE "$report" -r "$reports")
if [ ${#found[@]} -gt 0 ]; then
    cat "${found[@]}" >&2
    echo "sanitize.sh: ${#found[@]} reports, see above" >&2
    exit 1
fi
exit "$status"
