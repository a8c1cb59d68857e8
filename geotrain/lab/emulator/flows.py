"""Which connections a middlebox still knows: one that was silent too long passes nothing more."""

from geotrain.lab.emulator.segments import VNET_BYTES

_TCP, _SYN = 6, 0x02
_MAX_FLOWS = 4096


class FlowTable:
    """Decides for each packet whether its connection has been forgotten.

    A connection is kept by its own direction's packets; each direction has a table of its own, and
    TCP answers whatever it gets, so both see the same silence. A SYN makes it known again.
    """

    def __init__(self) -> None:
        self._seen_at: dict[bytes, float] = {}

    def passes(self, packet: bytes, *, idle_drop_s: float, now: float) -> bool:
        flow = _flow_of(packet)
        if flow is None:
            return True
        key, opens = flow
        seen_at = self._seen_at.get(key, now)
        if not opens and now - seen_at > idle_drop_s:
            return False  # and the time stays, so that no retransmission brings it back
        if key not in self._seen_at and len(self._seen_at) >= _MAX_FLOWS:
            self._forget_oldest()
        self._seen_at[key] = now
        return True

    def _forget_oldest(self) -> None:
        by_age = sorted(self._seen_at, key=self._seen_at.__getitem__)
        for key in by_age[: _MAX_FLOWS // 2]:
            del self._seen_at[key]


def _flow_of(packet: bytes) -> tuple[bytes, bool] | None:
    """The connection's key and whether this packet opens one; None for all but TCP over IPv4."""
    if packet[VNET_BYTES] >> 4 != 4 or packet[VNET_BYTES + 9] != _TCP:
        return None
    tcp = VNET_BYTES + (packet[VNET_BYTES] & 15) * 4
    key = packet[VNET_BYTES + 12 : VNET_BYTES + 20] + packet[tcp : tcp + 4]
    return key, bool(packet[tcp + 13] & _SYN)
