"""The payloads of a lane's own frames, read without believing them. Pure.

Every reader raises ProtocolError, and nothing else, for what it cannot accept.
"""

from typing import Any

from geotrain.transport.frame import MAX_CONTROL_BYTES, FrameType, ProtocolError, control_frame
from geotrain.transport.hello import Differing, Hello, Join, read_refusal
from geotrain.transport.maps import get_list, get_str, pack, unpack
from geotrain.transport.messages import Presence

MAX_BOARD_BYTES = 128 * 1024
"""Packed entries of one BOARD frame; a bigger board goes in several."""
MAX_REASON_CHARS = 1_024


def read_hello(kind: FrameType, payload: memoryview) -> Hello:
    try:
        return Hello.from_map(unpack(payload, MAX_CONTROL_BYTES))
    except ValueError as exc:
        raise ProtocolError(f"{kind.name}: {exc}") from exc


def read_join(payload: memoryview) -> Join:
    try:
        return Join.from_map(unpack(payload, MAX_CONTROL_BYTES))
    except ValueError as exc:
        raise ProtocolError(f"JOIN: {exc}") from exc


def read_refuse(payload: memoryview) -> tuple[str, Differing]:
    try:
        return read_refusal(unpack(payload, MAX_CONTROL_BYTES))
    except ValueError as exc:
        raise ProtocolError(f"REFUSE: {exc}") from exc


def read_close(payload: memoryview) -> str:
    try:
        return get_str(unpack(payload, MAX_CONTROL_BYTES), "reason")[:MAX_REASON_CHARS]
    except ValueError as exc:
        raise ProtocolError(f"CLOSE: {exc}") from exc


def read_board(payload: memoryview) -> tuple[Presence, ...]:
    try:
        items = get_list(unpack(payload, MAX_CONTROL_BYTES), "entries")
        if not all(isinstance(item, dict) for item in items):
            raise ValueError("entries must be maps")
        return tuple(Presence.from_map(item) for item in items)
    except ValueError as exc:
        raise ProtocolError(f"BOARD: {exc}") from exc


def close_frame(reason: str) -> bytes:
    return control_frame(FrameType.CLOSE, {"reason": reason[:MAX_REASON_CHARS]})


def board_frame(waiting: dict[str, Presence]) -> bytes:
    """As many of the waiting entries as one frame takes, which are taken out of it."""
    entries: list[dict[str, Any]] = []
    room = MAX_BOARD_BYTES
    while waiting and room > 0:
        region = next(iter(waiting))
        entries.append(waiting.pop(region).to_map())
        room -= len(pack(entries[-1]))
    return control_frame(FrameType.BOARD, {"entries": entries})
