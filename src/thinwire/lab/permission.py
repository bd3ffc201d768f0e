"""Why a lab is not permitted here, and what would allow it."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

SWITCHES = (
    ("user/max_user_namespaces", "0", "user.max_user_namespaces=10000"),
    ("kernel/unprivileged_userns_clone", "0", "kernel.unprivileged_userns_clone=1"),
    ("kernel/apparmor_restrict_unprivileged_userns", "1", "kernel.apparmor_restrict_unprivileged_userns=0"),
)
"""Files of /proc/sys, the value that forbids user namespaces, and the setting that allows them."""
ADMIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")


def tools(names: tuple[str, ...] = ("ip", "tc")) -> dict[str, str]:
    """Where iproute2's programs are; also where an ordinary user's PATH does not lead."""
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), *ADMIN])
    found = {name: shutil.which(name, path=path) for name in names}
    lacking = [name for name, where in found.items() if where is None]
    if lacking:
        raise ValueError(f"a lab needs {' and '.join(lacking)}: install the package iproute2")
    return {name: where for name, where in found.items() if where}


def explain(complaint: str, sysctl: Path = Path("/proc/sys")) -> str:
    """One line from what the lab could not do."""
    said = " ".join(complaint.split())
    if "qdisc kind" in said or "sch_" in said:
        return f"a lab cannot shape links here ({said}): as root, modprobe sch_tbf"
    for file, forbids, allows in SWITCHES:
        if (sysctl / file).is_file() and (sysctl / file).read_text().strip() == forbids:
            return f"a lab is not permitted here ({said}): as root, sysctl -w {allows}"
    return f"a lab is not permitted here ({said}): in a container, start that with --privileged"
