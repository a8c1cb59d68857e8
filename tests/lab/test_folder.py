"""The folder of one run."""

import socket
import tempfile

import pytest

from geotrain.configuration.rules import SOCKET_PATH_LIMIT_BYTES
from geotrain.errors import ConfigError
from geotrain.lab.folder import temporary_folder


def test_it_goes_with_all_that_is_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with pytest.raises(KeyError), temporary_folder("run-", ["a"]) as folder:
        assert folder.parent == tmp_path
        (folder / "log").write_text("x")
        raise KeyError
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("too_long", [0, 1])
def test_a_path_that_no_socket_fits_is_refused_with_the_remedy(tmp_path, monkeypatch, too_long):
    names = ["a", "virginia"]
    ends = len("/run-xxxxxxxx/virginia.sock")
    base = tmp_path / ("x" * (SOCKET_PATH_LIMIT_BYTES + too_long - ends - len(bytes(tmp_path)) - 1))
    base.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(base))
    if too_long:
        with pytest.raises(ConfigError, match="set TMPDIR to a shorter one"):
            temporary_folder("run-", names).__enter__()
    else:
        with temporary_folder("run-", names) as folder, socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(folder / "virginia.sock"))
    assert list(base.iterdir()) == []
