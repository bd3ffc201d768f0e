"""Compare methods on a thin wire: in a lab where one is permitted, over loopback otherwise.

python -m benchmarks.demo
"""

from __future__ import annotations

import shlex
import subprocess
import sys
from pathlib import Path

from thinwire import lab

METHODS = ["ddp", "local", "torch-powersgd:rank=4", "acp:rank=4", "dist-ef-block", "apm:warmup_steps=10"]
REPORT = Path("benchmark-results/demo.html")


def main() -> int:
    REPORT.parent.mkdir(exist_ok=True)
    arguments = ["compare", *METHODS, "--workload", "lm:layers=4,width=192", "--hosts", "4", "--steps", "10"]
    arguments += ["--report", str(REPORT)]
    reason = lab.missing()
    if reason is None:
        arguments += ["--rate", "100mbit"]
    else:
        print(f"No lab here, so over loopback, where compression can only cost: {reason}")
    print(f"$ thinwire {shlex.join(arguments)}", flush=True)
    return subprocess.run([sys.executable, "-m", "thinwire", *arguments]).returncode


if __name__ == "__main__":
    sys.exit(main())
