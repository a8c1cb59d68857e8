"""Saves four steps, keeping two, and is killed in the fourth: before an old one is touched, and in
the middle of its removal.

python killed_writer.py FOLDER
"""

import os
import shutil
import signal
import sys
from pathlib import Path

import torch

from geotrain.state import checkpoint


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def run(root: Path, kill: str) -> None:
    for step in range(1, 5):
        if step == 4 and kill == "before the first move":
            checkpoint._drop = die
        if step == 4 and kill == "between move and removal":
            shutil.rmtree = die
        checkpoint.save_state(
            root, region="virginia", step=step, tensors={"w": torch.ones(2)}, extra={"step": step}
        )
        checkpoint.prune(root, region="virginia", saved=range(1, step + 1), resumed=None, keep=2)


def main() -> None:
    for kill in ("before the first move", "between move and removal"):
        pid = os.fork()  # torch is loaded once, and has no threads yet
        if pid == 0:
            run(Path(sys.argv[1], kill), kill)
            os._exit(3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL


if __name__ == "__main__":
    main()
