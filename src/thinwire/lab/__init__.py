"""An emulated cluster on one machine: hosts are network namespaces, their links are shaped."""

from __future__ import annotations

from thinwire.lab.links import PRESETS, Cluster, Event, Link, cluster
from thinwire.lab.runner import missing, run

__all__ = ["PRESETS", "Cluster", "Event", "Link", "cluster", "missing", "run"]
