#!/usr/bin/env bash
# Measures which lines of the Python code and of the extension tests reach; writes a summary into docs/testing.md.
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

# The extension writes its counts when a process ends by exit(), so a forked child must not end by _exit().
packages=$("$bin/python" -c 'import sysconfig; print(sysconfig.get_path("platlib"))')
echo "import ctypes, os; os._exit = ctypes.CDLL(None).exit" >"$packages/a0_counts.pth"

if [ $# -eq 0 ]; then
    # Left out: a test of timing, one of the command's imports, one with sub-interpreters (they import coverage), the
    # typing test (no mypy), and word_count, whose forked children may wait for a lock of coverage's.
    set -- tests --ignore=tests/hazards --ignore=tests/package/test_typing.py \
        -k 'not passed_over and not starts_without and not sub_interpreter and not word_count'
fi

status=0
COVERAGE_PROCESS_START=$PWD/pyproject.toml "$bin/pytest" -p no:cacheprovider --timeout 1800 \
    --numprocesses 2 --dist worksteal "$@" || status=$?

"$bin/coverage" combine --quiet
"$bin/coverage" html --quiet --directory "$out/python"
"$bin/coverage" report >"$out/python.txt"
"$bin/coverage" json --quiet -o "$out/python.json"
"$bin/gcovr" --root . --filter shmacc/native/ --exclude-throw-branches \
    --exclude-unreachable-branches --merge-lines \
    --gcov-ignore-errors=source_not_found --gcov-suspicious-hits-threshold 0 \
    --html-details "$out/cpp.html" --txt "$out/cpp.txt" --json-summary "$out/cpp.json" "$objects"
"$bin/python" - "$out" docs/testing.md <<'EOF'
import json
import pathlib
import re
import sys

out, page = map(pathlib.Path, sys.argv[1:])
files = json.loads((out / "python.json").read_text())["files"]
cpp = json.loads((out / "cpp.json").read_text())
reached = {"shmacc/native": (cpp["line_total"], cpp["line_covered"])}
for package in "shmacc", "shmacc-inspect":
    found = [file["summary"] for name, file in files.items() if package.replace("-", "_") in name.split("/")]
    reached[package] = [sum(each[key] for each in found) for key in ("num_statements", "covered_lines")]
text = page.read_text()
for part, (lines, covered) in reached.items():
    row = rf"\1 {lines:,} | {100 * covered / max(1, lines):.0f} % |"
    text = re.sub(rf"(\| .* \(`{part}`\) \|).*", row, text)
page.write_text(text)
EOF
exit "$status"
