"""Valid things made wrong in one or a few places, by chance of a seed. Pure.

A parser's first check would stop plain noise; so structure is kept where it is not what is made
wrong, and a checksum or a length is usually made right again afterwards.
"""

from collections.abc import Sequence
from dataclasses import fields, replace
from random import Random
from typing import Any

from geotrain.transport.frame import HEADER_BYTES, FrameHeader, FrameType

_NUMBERS = (0, 1, -1, 63, 64, 2**16, 2**31, 2**32 - 1, 2**53, 2**53 + 1, 2**63 - 1, 2**64 - 1)
_PIECE = 16
"""What is repeated to make things long, so that the generator itself stays small."""
_FIELD_BITS = {"payload_length": 32, "coding": 8, "stream": 16, "raw_length": 32}


def mutate_value(value: Any, rng: Random) -> Any:
    """The same with one place of it changed: a leaf, a key, or the shape."""
    if isinstance(value, dict) and value and rng.random() < 0.8:
        changed = dict(value)
        key = rng.choice(list(changed))
        match rng.randrange(6):
            case 0:
                del changed[key]
            case 1:
                changed[_strange(rng)] = changed[key]
            case _:
                changed[key] = mutate_value(changed[key], rng)
        return changed
    if isinstance(value, list) and value and rng.random() < 0.8:
        items = list(value)
        place = rng.randrange(len(items))
        match rng.randrange(5):
            case 0:
                del items[place]
            case 1:
                items = items[:_PIECE] * rng.choice((2, 50, 300))
            case _:
                items[place] = mutate_value(items[place], rng)
        return items
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.7:
        return rng.choice((*_NUMBERS, value + 1, value - 1, value * 2))
    if isinstance(value, (str, bytes)) and rng.random() < 0.4:
        return value[:_PIECE] * rng.choice((0, 2, 100, 20_000))
    return rng.choice((_strange, _nested))(rng)


def _strange(rng: Random) -> Any:
    return rng.choice((None, True, 1.5, float("nan"), "", "x\n\x1b[2J", b"\xff", *_NUMBERS))


def _nested(rng: Random) -> Any:
    value: Any = _strange(rng)
    for _ in range(rng.choice((1, 5, 40, 400))):
        value = [value] if rng.random() < 0.5 else {"a": value}
    return value


def mutate_bytes(data: bytes, rng: Random) -> bytes:
    """A flipped bit, a piece gone, doubled or replaced, or a number put over it."""
    changed = bytearray(data)
    start = rng.randrange(len(changed) + 1)
    end = min(len(changed), start + rng.choice((1, 2, 8, 100)))
    match rng.randrange(6):
        case 0 if changed:
            changed[start % len(changed)] ^= 1 << rng.randrange(8)
        case 1:
            del changed[start:end]
        case 2:
            changed[start:start] = changed[start:end]
        case 3:
            changed[start:end] = rng.randbytes(end - start)
        case 4:
            changed[start:end] = b"\xff" * (end - start)
        case _:
            del changed[start:]
    return bytes(changed)


def split(data: bytes, rng: Random) -> list[bytes]:
    """Into a few pieces, or many, or single bytes."""
    if len(data) < 2_000 and rng.random() < 0.1:
        return [data[index : index + 1] for index in range(len(data))]
    cuts = sorted(rng.randrange(len(data) + 1) for _ in range(rng.choice((0, 1, 3, 20))))
    return [data[start:end] for start, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


Frame = tuple[FrameHeader, bytes]


def mutate_frames(frames: Sequence[Frame], rng: Random) -> list[Frame]:
    """One frame changed, lost, doubled, moved, or cut short at its payload."""
    changed = list(frames)
    place = rng.randrange(len(changed))
    match rng.randrange(8):
        case 0:
            del changed[place]
        case 1:
            changed.insert(rng.randrange(len(changed) + 1), changed[place])
        case 2:
            changed.insert(rng.randrange(len(changed)), changed.pop(place))
        case 3:
            header, payload = changed[place]
            changed[place] = with_payload(header, mutate_bytes(payload, rng), rng)
        case _:
            header, payload = changed[place]
            changed[place] = (mutate_header(header, rng), payload)
    return changed


def mutate_header(header: FrameHeader, rng: Random) -> FrameHeader:
    """One field changed, to something that its bits can say."""
    name = rng.choice([field.name for field in fields(header)])
    if name == "type":
        return replace(header, type=rng.choice(list(FrameType)))
    limit = 2 ** _FIELD_BITS.get(name, 64)
    value = getattr(header, name)
    wanted = rng.choice((*_NUMBERS, value + 1, value - 1, value ^ 1, rng.randrange(limit)))
    return replace(header, **{name: wanted % limit})


def with_payload(header: FrameHeader, payload: bytes, rng: Random) -> Frame:
    """The frame around another payload, usually with the length and checksum that it needs."""
    if rng.random() < 0.1:
        return header, payload
    header = replace(header, payload_length=len(payload))
    if header.coding == 0:
        header = replace(header, raw_length=len(payload), checksum=header.checksum_of(payload))
    return header, payload


def join(frames: Sequence[Frame]) -> bytes:
    return b"".join(header.pack() + payload for header, payload in frames)


def cut_frames(data: bytes, parse: Any) -> list[Frame]:
    """The frames of a valid stream, by the parser's own word."""
    found = []
    while data:
        header = parse(data[:HEADER_BYTES])
        end = HEADER_BYTES + header.payload_length
        found.append((header, data[HEADER_BYTES:end]))
        data = data[end:]
    return found
