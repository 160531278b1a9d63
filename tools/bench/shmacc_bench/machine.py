"""What the figures were measured on: the processor, the system, the load, the versions."""

from __future__ import annotations

import os
import platform
import re
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where POSIX shared memory stands on Linux
BLOCK_BYTES = 512  # the unit of st_blocks, whatever the file system's own


def describe() -> dict[str, Any]:
    """Return what a reader must know to compare these figures with others."""
    processor = re.search(r"^model name\s*:\s*(.*)$", _read("/proc/cpuinfo"), re.MULTILINE)
    memory = re.search(r"^MemTotal:\s*(\d+)", _read("/proc/meminfo"), re.MULTILINE)
    shm = os.statvfs(SHARED_MEMORY)
    return {
        "processor": processor.group(1) if processor else platform.processor(),
        "cores": len(os.sched_getaffinity(0)),
        "caches": _caches(),
        "memory_gib": round(int(memory.group(1)) / 2**20, 1) if memory else None,
        "dev_shm_gib": round(shm.f_frsize * shm.f_blocks / 2**30, 1),
        "huge_pages_shmem": _chosen("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "system": f"{platform.system()} {platform.release()}",
        "libc": "-".join(platform.libc_ver()),
        "python": sys.version.split()[0],
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def load() -> float:
    """Return the load average of the last minute: what else ran while this was measured."""
    return round(os.getloadavg()[0], 2)


def allocated_bytes(files: Iterable[Path]) -> int:
    """Return the memory that files in shared memory hold, holes left out."""
    return sum(file.stat().st_blocks * BLOCK_BYTES for file in files)


def resident_bytes() -> int:
    """Return the resident memory of this process, shared and private."""
    found = re.search(r"^VmRSS:\s*(\d+) kB", _read("/proc/self/status"), re.MULTILINE)
    return int(found.group(1)) * 1024 if found else 0


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _chosen(path: str) -> str:
    choice = re.search(r"\[(\w+)\]", _read(path))
    return choice.group(1) if choice else "unknown"


def _caches() -> dict[str, str]:
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = (_read(str(index / f)).strip() for f in ("level", "type", "size"))
        if kind != "Instruction":
            found[f"L{level}"] = size
    return found
