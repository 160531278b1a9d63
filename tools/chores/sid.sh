#!/usr/bin/env bash
# Runs a command in Debian's unstable release, which has the newest Pythons, compiler and C library as packages.
#
#   tools/chores/sid.sh COMMAND...     for instance: make smoke PYTHON=python3.15
#
# The command runs in a copy of this checkout, in a tree in build/sid. The tree, and the environments that earlier
# commands made in the copy, are kept; delete build/sid to start over. It needs root, Debian and mmdebstrap, which it
# installs. If it cannot make the tree, it says why, runs nothing, and returns 0.
set -euo pipefail
cd "$(dirname "$0")/../.."

skip() {
    echo "sid.sh: skipped: $1"
    exit 0
}

[ "$(id -u)" = 0 ] || skip "needs root, for chroot and its mounts"
[ -e /etc/debian_version ] || skip "needs Debian"
# All mounts are made in a namespace of their own and end with it: deleting build/sid never meets one.
unshare --mount true 2>/dev/null || skip "may not mount anything here"

folder=$PWD/build/sid
root=$folder/root
mkdir -p "$folder"

if [ ! -e "$root/.made" ]; then
    if ! command -v mmdebstrap >/dev/null; then
        { apt-get -qq update && DEBIAN_FRONTEND=noninteractive apt-get -qq install -y mmdebstrap; } \
            >"$folder/log" 2>&1 || skip "could not install mmdebstrap: $folder/log"
    fi
    rm -rf "$root"
    # python3-all-dev and -venv: every Python that Debian has now. The mirror may be some weeks behind.
    unshare --mount mmdebstrap --mode=root --variant=minbase --aptopt='Acquire::Check-Valid-Until "false"' \
        --include=ca-certificates,g++,git,iproute2,make,procps,python3-all-dev,python3-all-venv \
        sid "$root" http://deb.debian.org/debian >"$folder/log" 2>&1 || skip "could not make the tree: $folder/log"
    touch "$root/.made"
fi

# The command uses this machine's network and pip's settings here.
for file in etc/resolv.conf etc/ssl/certs/ca-certificates.crt etc/pip.conf etc/xdg/pip root/.config/pip; do
    if [ -e "/$file" ]; then
        rm -rf "${root:?}/$file"
        mkdir -p "$root/$(dirname "$file")"
        cp -rL "/$file" "$root/$file"
    fi
done

# Like CI's own checkout, the copy lies where no other user may enter.
mkdir -p "$root/checkout"
chmod 0700 "$root/checkout"
find "$root/checkout" -mindepth 1 -maxdepth 1 ! -name '.venv*' ! -name build -exec rm -rf {} +
tar --create --exclude=./.git --exclude='./.venv*' --exclude=./build --exclude=./dist . |
    tar --extract --no-same-owner --directory "$root/checkout"
# A wheel that Python 3.13 built here also serves the Pythons there, like a published one.
if [ -e build/abi3/wheel/.made ]; then
    mkdir -p "$root/checkout/build/abi3"
    cp -a build/abi3/wheel "$root/checkout/build/abi3"
fi

export root
exec unshare --mount bash -euo pipefail -c '
    mount --bind "$root" "$root"  # so that the command, whose / it is, can make mounts its own
    for folder in proc sys dev; do
        mount --rbind "/$folder" "$root/$folder"
    done
    exec env --unset=MAKEFLAGS --unset=MAKELEVEL --unset=TMPDIR --unset=root PATH=/usr/sbin:/usr/bin:/sbin:/bin \
        chroot "$root" /bin/sh -c "cd /checkout && exec \"\$@\"" sh "$@"
' bash "$@"
