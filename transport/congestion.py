"""Which congestion control a connection runs under: what was asked for, and what the kernel says.

Under loss it decides everything: at 0.1 % BBR carries a hundred times what cubic does.
"""

import socket
from dataclasses import dataclass

AUTO = "auto"
"""BBR where the kernel lets us have it, else what it gives; never worth a word."""
BBR = "bbr"
FOR_CONTROL = "cubic"
"""For a connection that carries control records alone. Every ten seconds BBR lets no more than four
packets be under way for 200 ms, to see the path without a queue: what is sent then waits for a
round trip. That few and small records come soon needs no estimate of the path's rate."""
_NAME_BYTES = 16
"""The kernel's own limit (TCP_CA_NAME_MAX)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InForce:
    """What a connection has."""

    name: str
    """As the kernel calls it; "" where it cannot be told or chosen."""
    refused: str
    """What was asked for by name and not given, and why, in one sentence; "" where it was."""


def choose_congestion(connection: socket.socket, wanted: str) -> InForce:
    """Ask the kernel for a congestion control and see what is in force then.

    A refusal is no error: the link works under any, and going on slower beats not going on.

    Args:
        connection: A TCP socket over IPv4 or IPv6, connected or not.
        wanted: AUTO, or the kernel's name of one.
    """
    option = getattr(socket, "TCP_CONGESTION", None)
    if option is None:
        why = "this system lets no program choose"
        return InForce(name="", refused="" if wanted == AUTO else _refused(wanted, why))
    try:
        name = BBR if wanted == AUTO else wanted
        connection.setsockopt(socket.IPPROTO_TCP, option, name.encode("ascii"))
        why = ""
    except FileNotFoundError:
        why = "its kernel has none of that name"
    except PermissionError:
        why = "it takes root, or the name in net.ipv4.tcp_allowed_congestion_control"
    except OSError as exc:
        why = str(exc.strerror)
    found = connection.getsockopt(socket.IPPROTO_TCP, option, _NAME_BYTES)
    name = found.rstrip(b"\0").decode("ascii", errors="replace")
    return InForce(name=name, refused=_refused(wanted, why) if why and wanted != AUTO else "")


def probe(wanted: str) -> InForce:
    """What a link of this process would have, by a socket that connects to nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as connection:
        return choose_congestion(connection, wanted)


def _refused(wanted: str, why: str) -> str:
    return f"congestion control {wanted} cannot be had here ({why})"
