"""The folder of one run on this machine: logs, configs and sockets, gone when it is over."""

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from geotrain.configuration.rules import SOCKET_PATH_LIMIT_BYTES
from geotrain.errors import ConfigError


@contextmanager
def temporary_folder(prefix: str, names: Sequence[str]) -> Iterator[Path]:
    """A new folder with room for a socket of each region.

    Args:
        prefix: Of the folder's own name.
        names: The regions, of whose names each socket has one.

    Raises:
        ConfigError: The path of temporary folders is too long for a socket's.
    """
    folder = Path(tempfile.mkdtemp(prefix=prefix))
    try:
        longest = max(len(bytes(folder / f"{name}.sock")) for name in names)
        if longest > SOCKET_PATH_LIMIT_BYTES:
            raise ConfigError(
                f"{folder.parent} is too long for the sockets in it: with their names {longest} "
                f"bytes, {SOCKET_PATH_LIMIT_BYTES} are allowed; set TMPDIR to a shorter one"
            )
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
