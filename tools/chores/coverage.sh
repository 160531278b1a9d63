#!/usr/bin/env bash
# Which lines of the Python code and of the extension the tests reach.
# `make coverage` sets up the environment that this runs in. The tests that kill processes are left out: the
# counts of a killed process are lost.
#
#   tools/chores/coverage.sh [pytest arguments]
set -euo pipefail
cd "$(dirname "$0")/../.."

bin=$PWD/.venv-coverage/bin
objects=$PWD/build/.venv-coverage/cmake
out=$PWD/build/coverage
rm -rf "$out"
mkdir -p "$out"
find "$objects" -name '*.gcda' -delete

# The extension writes its counts when a process ends by exit(); a forked child ends by _exit().
packages=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
echo "import ctypes, os; os._exit = ctypes.CDLL(None).exit" >"$packages/a0_counts.pth"

[ $# -gt 0 ] || set -- tests --ignore=tests/hazards
status=0
COVERAGE_PROCESS_START=$PWD/pyproject.toml "$bin/pytest" -p no:cacheprovider --timeout 1800 \
    --numprocesses 2 --dist worksteal "$@" || status=$?

"$bin/coverage" combine --quiet
"$bin/coverage" html --quiet --directory "$out/python"
"$bin/gcovr" --root . --filter shmacc/native/ --exclude-throw-branches \
    --exclude-unreachable-branches --merge-lines \
    --gcov-ignore-errors=source_not_found --gcov-suspicious-hits-threshold 0 \
    --html-details "$out/cpp.html" --txt "$out/cpp.txt" "$objects"
"$bin/coverage" report | tee "$out/python.txt"
cat "$out/cpp.txt"
exit "$status"
