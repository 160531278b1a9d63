#!/usr/bin/env bash
# The hazards and the core's own tests once more, with the extension built with AddressSanitizer and
# UBSan into an environment of its own. Whatever they find ends the process that it is found in, and
# so fails the test.
#
#   tools/chores/asan.sh [pytest arguments]     default: the tests of the core and of the hazards
#   SHMACC_FUZZ_EXAMPLES                 damages tried by each of the fuzzing tests (default 1000)
#   PYTEST_ADDOPTS                       more arguments, without giving up the default ones
set -euo pipefail
cd "$(dirname "$0")/../.."

venv=.venv-asan
pins=constraints/newest.txt
# The run-time library must be that of the compiler which built the extension.
export CXX=${CXX:-g++}
libasan=$("$CXX" -print-file-name=libasan.so)
libstdcxx=$("$CXX" -print-file-name=libstdc++.so)
if [ ! -e "$libasan" ]; then
    echo "asan.sh: $CXX has no libasan.so" >&2
    exit 1
fi

if [ ! -x "$venv/bin/python" ]; then
    "${PYTHON:-python3}" -m venv "$venv"
    "$venv/bin/python" -m pip install --quiet --upgrade --constraint "$pins" pip
fi
rm -rf build/asan-wheel
"$venv/bin/pip" wheel --quiet --no-deps --build-constraint "$pins" --wheel-dir build/asan-wheel \
    -C build-dir=build/asan -C cmake.define.SHMACC_SANITIZE=address,undefined -C install.strip=false .
"$venv/bin/pip" install --quiet --force-reinstall --no-deps build/asan-wheel/shmacc-*.whl
"$venv/bin/pip" install --quiet --constraint "$pins" build/asan-wheel/shmacc-*.whl
"$venv/bin/pip" install --quiet --constraint "$pins" --group test --group plot

if [ $# -eq 0 ]; then
    # The tools' own tests say nothing about the extension's memory; to stop at each instruction of a
    # sanitizer, to be killed there, takes hours; and it makes mappings of its own, which the test that
    # counts them would count.
    set -- tests --ignore-glob='*bench*' --ignore-glob='*demo*' --ignore-glob='*examples*' --ignore-glob='*inspect*' \
        --ignore-glob='*test_docs*' --ignore-glob='*test_first_steps*' --ignore-glob='*test_pins*' \
        --ignore-glob='*test_model*' --ignore-glob='*test_typing*' --ignore-glob='*test_comments*' \
        --ignore-glob='*killed*' --ignore-glob='*soak*' \
        --ignore-glob='*many_accumulators*'
fi

# detect_leaks: CPython and NumPy keep memory until the end on purpose; what leaks by the call is
#   looked for by the tests that count mappings and descriptors.
# allocator_may_return_null: a size that is a lie is to be refused by malloc, as without a sanitizer.
# log_path: pytest holds what a process says back, and loses it when that process is itself.
# libstdc++ comes second: AddressSanitizer must find its exceptions when it starts.
# PYTHONMALLOC: else memory that Python hands out would come from pools that nobody watches.
reports=$PWD/build/asan-reports
rm -rf "$reports"
mkdir -p "$reports"
asan="detect_leaks=0:abort_on_error=1:allocator_may_return_null=1:max_allocation_size_mb=4096"
ubsan="print_stacktrace=1:halt_on_error=1:abort_on_error=1"
status=0
env LD_PRELOAD="$libasan $libstdcxx" PYTHONMALLOC=malloc \
    ASAN_OPTIONS="$asan:log_path=$reports/report" UBSAN_OPTIONS="$ubsan:log_path=$reports/report" \
    SHMACC_FUZZ_EXAMPLES="${SHMACC_FUZZ_EXAMPLES:-1000}" \
    "$venv/bin/pytest" -p no:cacheprovider --timeout 1800 "$@" || status=$?

# An allocation that is too large, which fails as it would without a sanitizer, is a warning in the same files.
mapfile -t found < <(grep -lE 'ERROR: |runtime error: ' "$reports"/* 2>/dev/null)
if [ ${#found[@]} -gt 0 ]; then
    cat "${found[@]}" >&2
    echo "asan.sh: ${#found[@]} reports, see above" >&2
    exit 1
fi
exit "$status"
