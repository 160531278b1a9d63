#!/usr/bin/env bash
# Builds the wheel for aarch64 and runs its unit tests on an emulated processor: a Debian of that architecture in
# build/aarch64/root, run by qemu's user mode. Slow: the build takes minutes, the tests about ten times as long as
# natively.
#
#   tools/chores/aarch64.sh [pytest arguments]     default: the tests of the core, less what emulation cannot do
#
# Needs root (chroot, mounts in a namespace of its own, one entry in binfmt_misc) and Debian or a system with its
# packages; it installs qemu-user-static and mmdebstrap if they are missing. What it downloads stays in
# build/aarch64; delete that folder to start over.
#
# What this shows: that the code compiles for aarch64 and computes the same, and that system calls, structures and
# page reservations are right there. It does not show errors of weak memory order: qemu makes the
# guest's loads and stores the host's, which x86-64 keeps in order; tools/model/litmus checks memory orders.
set -euo pipefail
cd "$(dirname "$0")/../.."

if [ "$(uname -m)" = aarch64 ]; then
    echo "aarch64.sh: this is an aarch64 machine: make test" >&2
    exit 1
fi
if [ "$(id -u)" != 0 ]; then
    echo "aarch64.sh: needs root, for chroot and its mounts" >&2
    exit 1
fi

folder=$PWD/build/aarch64
root=$folder/root
wheels=$folder/wheels
mkdir -p "$wheels"

need=()
command -v qemu-aarch64-static >/dev/null || need+=(qemu-user-static)
command -v mmdebstrap >/dev/null || need+=(mmdebstrap)
if [ ${#need[@]} -gt 0 ]; then
    apt-get -qq update
    DEBIAN_FRONTEND=noninteractive apt-get -qq install -y "${need[@]}" >/dev/null
fi

# Have the kernel run aarch64 programs by qemu until this script ends.
binfmt=/proc/sys/fs/binfmt_misc
mountpoint -q $binfmt || mount -t binfmt_misc binfmt_misc $binfmt
if [ ! -e $binfmt/qemu-aarch64 ]; then
    cat /usr/lib/binfmt.d/qemu-aarch64.conf >$binfmt/register
    trap 'echo -1 >$binfmt/qemu-aarch64' EXIT
fi

if [ ! -e "$root/.made" ]; then
    rm -rf "$root"
    # The compiler runs natively and compiles for aarch64: an emulated one would be far slower.
    mmdebstrap --quiet --arch=amd64,arm64 --variant=minbase \
        --include=python3:arm64,python3-dev:arm64,libstdc++6:arm64,g++-aarch64-linux-gnu,procps \
        "$(. /etc/os-release && echo "$VERSION_CODENAME")" "$root"
    touch "$root/.made"
fi

# Packages are fetched outside, where pip is configured to find them, and installed inside.
version=$(chroot "$root" python3 -c 'import sys; print("%d.%d" % sys.version_info[:2])')
if [ ! -e "$wheels/.$version" ]; then
    "${PYTHON:-python3}" -m venv "$folder/pip"
    "$folder/pip/bin/pip" install --quiet --upgrade pip
    platforms=()
    for minor in 17 26 27 28 31 34 35 36; do
        platforms+=(--platform "manylinux_2_${minor}_aarch64")
    done
    "$folder/pip/bin/pip" download --quiet --dest "$wheels" --only-binary=:all: \
        --python-version "$version" --implementation cp \
        --abi "cp${version/./}" --abi abi3 --abi none --platform manylinux2014_aarch64 "${platforms[@]}" \
        pip cmake ninja 'scikit-build-core>=0.10' 'nanobind>=2.11' 'numpy>=2' posix_ipc ml_dtypes \
        --group test
    touch "$wheels/.$version"
fi

if [ $# -eq 0 ]; then
    # Left out: the inspector's tests, since the emulator's /proc/self/stat lacks the start by which a process is known;
    # tests that limit or lock memory, which the emulator itself needs; tests that look whether SIGSEGV has a handler, as
    # it has the emulator's; SIGUSR1 while a child starts; and what needs make or mypy. Tests that need ptrace, which
    # qemu lacks, or a namespace of their own skip themselves.
    hazards=tests/hazards
    set -- tests --ignore=tests/tools --ignore=tests/inspection --ignore=$hazards/test_soak.py \
        --ignore=tests/accumulators/test_kept_memory.py --ignore=tests/package/test_typing.py \
        --deselect $hazards/test_writes_to_read_only_arrays.py::test_a_write_that_cannot_be_undone_prints_a_sentence \
        --deselect $hazards/test_writes_to_read_only_arrays.py::test_a_program_without_read_only_arrays_has_no_handler \
        --deselect $hazards/test_writes_to_read_only_arrays.py::test_shmacc_guard_0_leaves_signals_alone \
        --deselect $hazards/test_writes_that_are_hard_to_undo.py::test_a_write_is_undone_in_locked_memory_which_stays_locked \
        --deselect $hazards/test_full_limits.py::test_a_take_without_memory_for_its_result_consumes_nothing \
        --deselect $hazards/test_memory_errors.py::test_no_failed_allocation_of_the_extension \
        --deselect $hazards/test_memory_errors.py::test_handles_can_be_dropped_while_the_extension_has_no_memory \
        --deselect $hazards/test_memory_errors.py::test_getting_a_first_array_without_memory_raises_and_ends_no_process \
        --deselect tests/run/test_guest_signals.py::test_sigusr --deselect tests/run/test_guest_launchers.py \
        --deselect tests/run/test_guest_machines.py::test_a_child_of_a_program_without_output_prints_into_nothing \
        --deselect tests/run/test_guest_wants.py::test_a_first_start_without_descriptors_or_processes_raises_and_leaves_nothing
fi

# The mounts and all processes end with this command.
export root
unshare --mount --pid --fork --kill-child bash -euo pipefail -c '
    mount --bind "$PWD" "$root/mnt"
    mount -t proc proc "$root/proc"
    mount -t tmpfs tmpfs "$root/tmp"
    mount --rbind /dev "$root/dev"
    mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
    exec chroot "$root" /bin/bash /mnt/tools/chores/aarch64_inside.sh "$@"
' bash "$@"
