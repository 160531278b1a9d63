"""A node of Ray in a /dev/shm of 420 MB, and a worker that never waits.

Run by test_clusters_of_their_own.py.
"""

import os
import subprocess
import sys
import time
import uuid

os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
os.environ["RAY_raylet_start_wait_time_s"] = "300"  # noqa: SIM112  busy machines
os.environ["SHMACC_NAMESPACE"] = f"room{uuid.uuid4().hex[:6]}"

import numpy as np
import ray
from helpers.own_shm import MIB, enter_own_shm

import shmacc
import shmacc.ray

_WORKER = """
import numpy as np
import shmacc
group = shmacc.attach("room", timeout=60)
row = 0
while group.running:
    rows = np.arange(row, row + 2000)
    if group.apply({"m": (rows, np.ones((2000, 32), np.float32))}, shmacc.NEVER_STALE):
        row += 2000
"""


def main() -> None:
    """Fill memory, put objects, take rounds; then check that parameters and a run lack room."""
    enter_own_shm(420 * MIB)
    ray.init(
        address="local",  # and not a cluster that another job has on this machine
        num_cpus=1,
        object_store_memory=200 * MIB,
        log_to_driver=False,
        include_dashboard=False,
    )
    members: dict[str, shmacc.TensorSpec] = {"m": shmacc.IndexedSlicesSpec((None, 32), "float32")}
    with shmacc.ray.AccumulatorGroup(members, "room", unlink_on_close=True) as group:
        worker = subprocess.Popen([sys.executable, "-P", "-c", _WORKER])
        with shmacc.attach("room", timeout=60) as segment:
            _until_it_waits(worker)
            pending = segment.num_accumulated()
            objects = [ray.put(np.ones(2 * MIB)) for _ in range(10)]  # 160 of the store's 200 MB
            assert sum(float(ray.get(each).sum()) for each in objects) == 20 * MIB
            assert worker.poll() is None
            del objects
            assert group.take(1, timeout=60).count >= pending
            _until_it_waits(worker)
            assert segment.num_accumulated()
        group.finish()
        assert worker.wait(60) == 0
    big = {"big": np.zeros(150 * MIB // 4, np.float32)}
    with shmacc.ray.Parameters(
        big, "big", optimizer=shmacc.optim.SGD(1.0), unlink_on_close=True
    ) as params:  # Ray's store has room for a second copy, but not for a third
        try:
            shmacc.ray.AccumulatorGroup(params.member_specs(), "big.group")
        except shmacc.errors.ResourceExhaustedError as error:
            assert "cannot make the change" in str(error)  # noqa: PT017
        else:
            raise AssertionError("there was room")
    with open("/dev/shm/rest", "wb") as rest:  # noqa: PTH123, S108
        room = os.statvfs(rest.fileno())
        os.posix_fallocate(rest.fileno(), 0, room.f_bavail * room.f_frsize)
        try:
            shmacc.ray.run(os.getpid, name="full")
        except shmacc.errors.ResourceExhaustedError as error:
            assert str(error).startswith("Node ")  # noqa: PT017
        else:
            raise AssertionError("there was room")
        rest.truncate(0)
        assert shmacc.ray.run(os.getpid, name="full")
    ray.shutdown()


def _until_it_waits(worker: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 120
    while worker.poll() is None and time.monotonic() < end:
        for process in shmacc.inspection.describe("room").processes:
            if (process.pid, process.activity) == (worker.pid, "waits for room"):
                return
        time.sleep(0.05)
    raise AssertionError(f"The worker does not wait for room: {worker.poll()}")


if __name__ == "__main__":
    main()
