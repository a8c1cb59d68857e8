"""A program that owns a lab with a process in each site, for tests that kill it.

python owner.py KIND      prints "open" and the pids of keeper and forwarders, then waits
"""

import json
import signal
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from geotrain.lab.settings import LinkSettings
from geotrain.lab.wan import open_wan

# Forks away from its parent, as a careless program does; the name is what `remains` looks for.
STRAY = "import os, sys, time\nif os.fork() == 0:\n    os.setsid()\ntime.sleep(600)"


def main() -> None:
    kind = sys.argv[1]
    wan = open_wan(kind, sites=("a", "b", "c"), link=LinkSettings(delay_s=0.01), congestion="cubic")
    for site in wan.sites if wan.kind == "netns" else ():
        wan.popen(site, [sys.executable, "-c", STRAY, "geotrain-remains"], stdin=subprocess.DEVNULL)
    status = wan.status()
    forwarders = [link["counters"].get("pid") for link in status["links"]]
    print(json.dumps({"keeper": wan.keeper_pid, "forwarders": forwarders}), flush=True)
    signal.pause()


if __name__ == "__main__":
    main()
