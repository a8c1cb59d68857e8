"""Which congestion control a connection gets; every Linux kernel has reno, allowed to everyone."""

import socket
import sys

import pytest

from geotrain.transport.congestion import AUTO, choose_congestion, probe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux lets programs choose")


class Refusing:
    """A connection of a kernel that refuses every choice, and runs cubic."""

    def __init__(self, error: OSError) -> None:
        self.error = error

    def setsockopt(self, *args):
        raise self.error

    def getsockopt(self, *args):
        return b"cubic" + bytes(11)


def test_what_is_asked_for_is_in_force():
    with socket.socket() as connection:
        in_force = choose_congestion(connection, "reno")
        assert (in_force.name, in_force.refused) == ("reno", "")
        raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
        assert raw.rstrip(b"\0") == b"reno"


def test_a_name_that_the_kernel_does_not_know_leaves_what_it_has():
    in_force = probe("nosuch")
    assert in_force.name != "nosuch"
    assert in_force.refused == (
        "congestion control nosuch cannot be had here (its kernel has none of that name)"
    )


def test_auto_takes_what_it_gets_without_a_word():
    in_force = choose_congestion(Refusing(FileNotFoundError(2, "")), AUTO)
    assert (in_force.name, in_force.refused) == ("cubic", "")
    assert probe(AUTO).refused == "" != probe(AUTO).name


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (PermissionError(1, "no"), "it takes root, or the name in net.ipv4.tcp_allowed"),
        (OSError(92, "Protocol not available"), "Protocol not available"),
    ],
)
def test_a_refusal_names_what_was_asked_and_why(error, why):
    in_force = choose_congestion(Refusing(error), "bbr")
    assert in_force.name == "cubic"
    assert in_force.refused.startswith(f"congestion control bbr cannot be had here ({why}")


def test_a_system_without_the_option_says_so_only_to_who_asked(monkeypatch):
    monkeypatch.delattr(socket, "TCP_CONGESTION")
    assert probe(AUTO).refused == ""
    assert "this system lets no program choose" in probe("cubic").refused
