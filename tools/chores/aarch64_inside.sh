#!/usr/bin/env bash
# The part of aarch64.sh that runs inside: installs what was fetched, builds the wheel, runs the tests.
set -euo pipefail
cd /mnt
export HOME=/root LC_ALL=C.UTF-8 PYTHONDONTWRITEBYTECODE=1
export PIP_CONFIG_FILE=/dev/null PIP_NO_INDEX=1 PIP_FIND_LINKS=/mnt/build/aarch64/wheels
export PIP_ROOT_USER_ACTION=ignore PATH=/opt/venv/bin:$PATH

if [ ! -e /opt/installed ]; then
    python3 -m venv --without-pip /opt/venv
    pip=(build/aarch64/wheels/pip-*.whl)
    python "${pip[0]}/pip" install --quiet pip
    pip install --quiet cmake ninja 'scikit-build-core>=0.10' 'nanobind>=2.11' 'numpy>=2' --group test
    touch /opt/installed
fi
rm -rf build/aarch64/wheel
CXX=aarch64-linux-gnu-g++ pip wheel --quiet --no-deps --no-build-isolation \
    --wheel-dir build/aarch64/wheel -C build-dir=build/aarch64/cmake \
    -C cmake.define.SHMACC_WARNINGS_ARE_ERRORS=ON .
pip install --quiet --force-reinstall --no-deps build/aarch64/wheel/shmacc-*.whl
pip install --quiet build/aarch64/wheel/shmacc-*.whl
exec pytest -p no:cacheprovider --timeout 1800 "$@"
