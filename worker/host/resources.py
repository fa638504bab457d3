"""Cores and memory available to this process, subject to CPU affinity and control groups (v1 and v2).

Torch-free.
"""

from __future__ import annotations

import os
from pathlib import Path

from quire.configs import platforms


def memory(proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup")) -> tuple[int, int]:
    """Return (total, available) bytes of RAM for this process: the machine's, or less if a control group limits it.

    Page cache that the kernel can drop counts as available.
    """
    total, available = _machine_memory(proc)
    for limit, used in _cgroup_memory(proc, cgroup):
        total = min(total, limit)
        available = min(available, limit - used)
    return total, max(available, 0)


def num_cores(
    proc: Path = Path("/proc"), cgroup: Path = Path("/sys/fs/cgroup"), cpus: Path = Path("/sys/devices/system/cpu")
) -> int:
    """Return the number of physical cores available to this process: its affinity, with hyper-threads counted once,
    limited by the control group's CPU quota; at least 1.

    Matrix products saturate a core with one thread; a second thread on the core only competes for its vector units and
    cache.
    """
    cores = {_first_sibling(cpus, cpu) for cpu in platforms.usable_cpus()}
    count = len(cores)
    for quota in _cgroup_quotas(proc, cgroup):
        count = min(count, int(quota))
    return max(count, 1)


def _first_sibling(cpus: Path, cpu: int) -> int:
    text = _read(cpus / f"cpu{cpu}" / "topology" / "thread_siblings_list")  # "0,32" or "0-1"
    return int(text.replace("-", ",").split(",")[0]) if text else cpu


def _machine_memory(proc: Path) -> tuple[int, int]:
    text = _read(proc / "meminfo")
    if text is None:  # not Linux: all memory, because there is no portable measure of free memory
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return size, size
    fields = {
        name: int(rest.split()[0]) * 1024
        for name, _, rest in (line.partition(":") for line in text.splitlines())
        if rest.split()
    }
    return fields["MemTotal"], fields["MemAvailable"]


def _cgroup_memory(proc: Path, cgroup: Path) -> list[tuple[int, int]]:
    """Return (limit, bytes in use that cannot be dropped) of each limiting group, from this process's group up to the
    root.
    """
    limits = []
    for folder in _folders(proc, cgroup, "memory"):
        limit = _number(folder / "memory.max") or _number(folder / "memory.limit_in_bytes")
        used = _number(folder / "memory.current") or _number(folder / "memory.usage_in_bytes")
        if limit is not None and used is not None:
            limits.append((limit, max(used - _droppable(folder), 0)))
    return limits


def _droppable(folder: Path) -> int:
    stat = dict(line.split()[:2] for line in (_read(folder / "memory.stat") or "").splitlines())
    return int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))


def _cgroup_quotas(proc: Path, cgroup: Path) -> list[float]:
    quotas = []
    for folder in _folders(proc, cgroup, "cpu"):
        quota, period = (_read(folder / "cpu.max") or "max 1").split()  # v2: "200000 100000"
        if quota == "max":
            quota, period = _read(folder / "cpu.cfs_quota_us") or "-1", _read(folder / "cpu.cfs_period_us") or "100000"
        if int(quota) > 0:
            quotas.append(int(quota) / int(period))
    return quotas


def _folders(proc: Path, cgroup: Path, controller: str) -> list[Path]:
    """Return the group folders that apply to this process for `controller`, its own first.

    In a container the path may be outside the mounted tree: then only the root.
    """
    folders = []
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        root = cgroup / controller if controllers else cgroup
        folder = root / path.strip("/")
        while folder != root and root in folder.parents:
            folders.append(folder)
            folder = folder.parent
        folders.append(root)
    return folders


def _number(path: Path) -> int | None:
    text = _read(path)
    return int(text) if text and text.lstrip("-").isdigit() else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:  # absent: another cgroup version, another system, or no permission
        return None
