#!/usr/bin/env bash
# The tests in which threads meet, with the extension built with ThreadSanitizer into an environment of its own.
# Any report fails the run, whatever the test said.
#
#   tools/chores/tsan.sh [pytest arguments]     default: the tests of the core that have threads
#   PYTEST_ADDOPTS                       more arguments, without giving up the default ones
#
# ThreadSanitizer sees the threads of one process. What processes do to each other through a segment it cannot
# see: that is what tools/model/litmus is for. But threads of one process share the segment's words in the very
# same way (one mapping, all handles on it), so what it finds among them holds for processes too, wherever it is
# not the threads' mutex that keeps them apart.
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=.venv-tsan
# The run-time library must be that of the compiler which built the extension.
export CXX=${CXX:-g++}
libtsan=$("$CXX" -print-file-name=libtsan.so)
libstdcxx=$("$CXX" -print-file-name=libstdc++.so)
if [ ! -e "$libtsan" ]; then
    echo "tsan.sh: $CXX has no libtsan.so" >&2
    exit 1
fi

# GCC's run-time library knows pthread_mutex_timedlock, but before version 15 not pthread_mutex_clocklock, which is
# what std::timed_mutex calls: it would take an owned mutex for one that nobody locked.
mkdir -p build
"${CC:-gcc}" -shared -fPIC -O1 -o build/tsan-clocklock.so -x c - <<'EOF'
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

if [ ! -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/pip" install --quiet --upgrade pip
fi
rm -rf build/tsan-wheel
"$venv/bin/pip" wheel --quiet --no-deps --wheel-dir build/tsan-wheel \
    -C build-dir=build/tsan -C cmake.define.SHMACC_SANITIZE=thread -C install.strip=false .
"$venv/bin/pip" install --quiet --force-reinstall --no-deps build/tsan-wheel/shmacc-*.whl
"$venv/bin/pip" install --quiet build/tsan-wheel/shmacc-*.whl
"$venv/bin/pip" install --quiet --group test

if [ $# -eq 0 ]; then
    mapfile -t with_threads < <(grep -lE 'threading|Thread\(|Signal|signal\.' -r tests --include 'test_*.py' |
        grep -vE 'tests/(home|on_ray)/|bench|demo|examples|inspect/test_terminal|soak|interrupted_openings|attach_timeout|handlers_that_open|idle_waiters')
    # Left out: descriptors that are closed under a waiting thread's hands, which is a race by its nature
    # (test_daemonized). And ThreadSanitizer holds signals back for seconds while a thread polls in short sleeps, as a
    # wait for the name lock does, so nothing can be said of how soon they are seen there, or where they interrupt:
    # those of the files above, and the deselected tests.
    set -- "${with_threads[@]}" --deselect tests/hazards/test_daemonized.py \
        --deselect tests/hazards/test_signals_in_waits.py::test_for_the_name \
        --deselect tests/hazards/test_interrupted_takes.py::test_others_apply_meanwhile \
        --deselect 'tests/hazards/test_fork_at_any_moment.py::test_a_handler_forks_in_a_wait_for_a_lock'
fi

# die_after_fork: children of processes with threads start threads of their own, which is what some tests are about.
# log_path: pytest holds what a process says back, and loses it when that process is killed.
# setarch -R: its shadow memory is where the kernel would put other things by chance.
reports=$PWD/build/tsan-reports
rm -rf "$reports"
mkdir -p "$reports"
status=0
env LD_PRELOAD="$libtsan $PWD/build/tsan-clocklock.so $libstdcxx" \
    TSAN_OPTIONS="die_after_fork=0:halt_on_error=0:second_deadlock_stack=1:history_size=4:suppressions=$PWD/tools/chores/tsan.supp:log_path=$reports/report" \
    setarch "$(uname -m)" -R \
    "$venv/bin/pytest" -p no:cacheprovider --timeout 1800 "$@" || status=$?

found=("$reports"/*)
if [ -e "${found[0]}" ]; then
    cat "${found[@]}" >&2
    echo "tsan.sh: ${#found[@]} processes reported, see above" >&2
    exit 1
fi
exit "$status"
