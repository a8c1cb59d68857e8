"""How a rank reaches its daemon: wait for the socket, pass the arena, be accepted or refused."""

import logging
import socket
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from geotrain.errors import AttachError
from geotrain.transport.maps import get_str
from geotrain.transport.records import (
    AttachRequest,
    RecordReader,
    encode_record,
    get_count,
)

logger = logging.getLogger(__name__)

RETRY_S = 0.05
_SAY_AFTER_S = 2.0


class RefusedError(AttachError):
    """The daemon said no; asking again would change nothing."""


class WentAwayError(AttachError):
    """The daemon ended before it answered; the next one may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """The daemon's yes, with whatever it had already sent after it."""

    incarnation: int
    region_index: int
    num_regions: int
    """Of whom as many board entries follow."""
    reader: RecordReader
    records: list[dict[str, Any]]


def dial(path: Path, *, region: str, deadline: float) -> socket.socket:
    """Connect, again and again while no daemon listens at `path`.

    Raises:
        AttachError: Not ours to open, or nobody came up before `deadline` (monotonic seconds).
    """
    started = time.monotonic()
    said = False
    while True:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(str(path))
            return sock
        except (FileNotFoundError, ConnectionRefusedError, TimeoutError) as exc:
            sock.close()
            if time.monotonic() + RETRY_S >= deadline:
                raise AttachError(
                    f"no daemon of region {region} at {path}; "
                    "start it with `geotrain daemon --config FILE` of this region"
                ) from exc
        except OSError as exc:
            sock.close()
            raise AttachError(
                f"the socket of region {region}'s daemon cannot be opened: {path}: {exc.strerror}"
            ) from exc
        if not said and time.monotonic() - started >= _SAY_AFTER_S:
            said = True
            logger.info("= waiting for the daemon of region %s at %s", region, path)
        time.sleep(RETRY_S)


def attach(sock: socket.socket, request: AttachRequest, fd: int, *, deadline: float) -> Answer:
    """Announce this rank, pass the arena's descriptor, and read the daemon's answer.

    Raises:
        RefusedError: With the daemon's reason.
        WentAwayError: It ended first.
        AttachError: No answer before `deadline`, or not one that can be read.
    """
    reader = RecordReader()
    records: list[dict[str, Any]] = []
    try:
        sock.settimeout(max(0.001, deadline - time.monotonic()))
        socket.send_fds(sock, [encode_record(request.to_record())], [fd])
        while not records:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            data = sock.recv(64 * 1024)
            if not data:
                raise WentAwayError(
                    f"the daemon of region {request.region} closed the attachment; see its log"
                )
            records = reader.feed(data)
        answer = records[0]
        if answer["type"] == "refused":
            raise RefusedError(get_str(answer, "reason"))
        if answer["type"] != "attached":
            raise ValueError(f"{answer['type']!r} instead of an answer")
        return Answer(
            incarnation=get_count(answer, "incarnation"),
            region_index=get_count(answer, "region_index"),
            num_regions=get_count(answer, "num_regions"),
            reader=reader,
            records=records[1:],
        )
    except ValueError as exc:
        raise AttachError(
            f"the daemon of region {request.region} sent a bad record: {exc}"
        ) from exc
    except TimeoutError as exc:
        raise AttachError(f"the daemon of region {request.region} did not answer in time") from exc
    except OSError as exc:
        raise WentAwayError(
            f"the daemon of region {request.region} went away while attaching ({exc.strerror}); "
            "start it again, then this process"
        ) from exc
