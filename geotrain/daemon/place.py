"""The daemon's place on this machine: its lock, its Unix socket, and the note of its addresses.

The lock decides which daemon serves a region; the socket file of one that was killed is replaced.
All three files go when the daemon ends.
"""

import fcntl
import json
import os
import socket
import stat
from pathlib import Path
from typing import Any

from geotrain.errors import GeotrainError
from geotrain.whole_file import write_whole

_BACKLOG = 64


class Place:
    """Held from `claim` to `release`."""

    def __init__(self, path: Path, lock_fd: int, listener: socket.socket) -> None:
        self.listener = listener
        self._path = path
        self._lock_fd = lock_fd

    @classmethod
    def claim(cls, path: Path) -> "Place":
        """Take the lock and listen at `path`, reachable by this user only.

        Raises:
            GeotrainError: Another daemon serves this region, or the folder cannot be used.
        """
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            _check_folder(path.parent)
            lock_fd = _lock(path)
        except OSError as exc:
            raise GeotrainError(
                f"cannot use the folder of the socket {path}: {exc.strerror}; set site.socket"
            ) from exc
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            path.unlink(missing_ok=True)
            # In this order nobody can connect before the mode is right.
            listener.bind(str(path))
            path.chmod(0o600)
            listener.listen(_BACKLOG)
            listener.setblocking(False)
        except OSError as exc:
            listener.close()
            os.close(lock_fd)
            raise GeotrainError(
                f"cannot listen at {path}: {exc.strerror}; set site.socket"
            ) from exc
        return cls(path, lock_fd, listener)

    def publish(self, addresses: dict[str, Any]) -> None:
        """Write the real addresses next to the socket, for `geotrain status`."""
        note = _beside(self._path, ".json")
        write_whole(note, json.dumps(addresses))

    def release(self) -> None:
        self.listener.close()
        for path in (self._path, _beside(self._path, ".json"), _beside(self._path, ".lock")):
            path.unlink(missing_ok=True)
        os.close(self._lock_fd)


def _beside(path: Path, suffix: str) -> Path:
    return path.with_name(path.name + suffix)


def _check_folder(folder: Path) -> None:
    """Refuse a folder where another user could replace the socket."""
    status = folder.stat()
    shared = status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX
    if status.st_uid not in (os.getuid(), 0) or shared:
        raise GeotrainError(
            f"other users can write to {folder}, where the daemon's socket would be; "
            f"chmod 700 it, or set site.socket"
        )


def _lock(path: Path) -> int:
    lock_path = _beside(path, ".lock")
    while True:
        fd = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as exc:
            pid = os.pread(fd, 32, 0).decode("ascii", "replace").strip() or "unknown"
            os.close(fd)
            raise GeotrainError(
                f"another daemon already serves this region (pid {pid}, {path}); stop it first"
            ) from exc
        if _same_file(fd, lock_path):
            os.ftruncate(fd, 0)
            os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
            return fd
        # Its last owner removed the file while we waited at the door: take the new one.
        os.close(fd)


def _same_file(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), path.stat())
    except FileNotFoundError:
        return False
