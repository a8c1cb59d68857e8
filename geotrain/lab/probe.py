"""What a link really does, with plain sockets: round trip, rate, and datagrams lost.

    probe serve HOST                          prints its port, and answers until it is ended
    probe rtt HOST PORT COUNT
    probe rate HOST PORT SECONDS FLOWS MEASURED_SECONDS MOST_BYTES_PER_S
    probe loss HOST PORT COUNT PER_SECOND     (not through relays, which carry TCP only)

Each prints one JSON object. Runs in the sites of a lab, so it needs the standard library only.
"""

import contextlib
import json
import socket
import statistics
import sys
import threading
import time
from collections.abc import Sequence

from geotrain.lab.emulator.forward import run_timely

_ECHO, _SINK, _COUNT = b"e", b"s", b"c"
_BLOCK = bytes(64 << 10)
_SINK_BYTES = 1 << 20
_LIMIT_S = 60.0
_SO_MAX_PACING_RATE = 47
_LOW_WATER_BYTES = 128 << 10
_MSG_TRUNC = getattr(socket, "MSG_TRUNC", 0)


class _Server:
    """Echoes, swallows and counts, for one client at a time."""

    def __init__(self, host: str) -> None:
        self._tcp = socket.create_server((host, 0))
        self._udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._udp.bind(self._tcp.getsockname())
        self._udp.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4 << 20)
        self.port: int = self._tcp.getsockname()[1]
        self._arrivals: list[tuple[float, int]] = []
        self._first_end: float | None = None
        self._num_datagrams = 0

    def run(self) -> None:
        threading.Thread(target=self._count_datagrams, daemon=True).start()
        while True:
            connection, _ = self._tcp.accept()
            threading.Thread(target=self._talk, args=(connection,), daemon=True).start()

    def _talk(self, connection: socket.socket) -> None:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection, contextlib.suppress(OSError):
            kind = connection.recv(1)
            if kind == _ECHO:
                while data := connection.recv(1):
                    connection.sendall(data)
            elif kind == _SINK:
                measured_s = float(_read_line(connection))
                self._swallow(connection)
                connection.sendall(json.dumps(self._rate(measured_s)).encode() + b"\n")
            elif kind == _COUNT:
                connection.sendall(b"%d\n" % self._num_datagrams)
                self._num_datagrams = 0

    def _swallow(self, connection: socket.socket) -> None:
        buffer = bytearray(_SINK_BYTES)
        while num_bytes := connection.recv_into(buffer, len(buffer), _MSG_TRUNC):
            self._arrivals.append((time.monotonic(), num_bytes))
        if self._first_end is None:
            self._first_end = time.monotonic()

    def _rate(self, measured_s: float) -> float:
        """Bytes a second, of all flows, in the last seconds before the first of them ended."""
        assert self._first_end is not None
        since = self._first_end - measured_s
        window = sorted(arrival for arrival in self._arrivals if arrival[0] >= since)
        window = [arrival for arrival in window if arrival[0] <= self._first_end]
        if len(window) < 2:
            return 0.0
        # What the first arrival brings came in before the window that it opens.
        return sum(size for _, size in window[1:]) / (window[-1][0] - window[0][0])

    def _count_datagrams(self) -> None:
        while True:
            self._udp.recv(2048)
            self._num_datagrams += 1


def serve(host: str) -> None:
    server = _Server(host)
    print(server.port, flush=True)
    run_timely()
    server.run()


def measure_rtt(host: str, port: int, count: int) -> dict[str, float]:
    """Round trips of one byte over an open connection."""
    with _connect(host, port) as sock:
        sock.sendall(_ECHO)
        rtts = []
        for index in range(count + 1):
            started = time.monotonic()
            sock.sendall(b"p")
            sock.recv(1)
            if index:  # The first one may also wait for a relay to dial.
                rtts.append(time.monotonic() - started)
    middle, tail = statistics.median(rtts), sorted(rtts)[int(0.99 * len(rtts))]
    return {"min_s": min(rtts), "median_s": middle, "p99_s": tail, "count": count}


def measure_rate(
    host: str, port: int, duration_s: float, num_flows: int, measured_s: float, most: float
) -> dict[str, float]:
    """Payload of bulk TCP flows at once, over the last `measured_s` of `duration_s`.

    Args:
        most: What the flows send at most, bytes a second, or 0. A little above what the link is
            said to pass, it keeps the start from overrunning the queue; then there is nothing to
            recover from, and a link that passes more still shows.
    """
    flows = [_connect(host, port) for _ in range(num_flows)]
    if most and sys.platform == "linux":
        for flow in flows:
            flow.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, int(most / num_flows))
            # So that what is sent after the end is little, and the last seconds are the ones meant.
            flow.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, _LOW_WATER_BYTES)
    end = time.monotonic() + duration_s
    threads = [threading.Thread(target=_fill, args=(flow, end, measured_s)) for flow in flows]
    for thread in threads:
        thread.start()
    rates = []
    for thread, flow in zip(threads, flows, strict=True):
        thread.join()
        with flow:
            rates.append(json.loads(_read_line(flow)))
    return {"bytes_per_s": rates[0], "num_flows": num_flows}


def _fill(flow: socket.socket, end: float, measured_s: float) -> None:
    flow.sendall(_SINK + b"%f\n" % measured_s)
    with contextlib.suppress(TimeoutError):
        while (left_s := end - time.monotonic()) > 0:
            flow.settimeout(left_s)
            flow.send(_BLOCK)
    flow.settimeout(_LIMIT_S)
    flow.shutdown(socket.SHUT_WR)


def measure_loss(host: str, port: int, count: int, per_second: float) -> dict[str, float]:
    """Numbered datagrams one way; the far end says how many came."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        started = time.monotonic()
        for index in range(count):
            time.sleep(max(0.0, started + index / per_second - time.monotonic()))
            sock.sendto(bytes(64), (host, port))
    with _connect(host, port) as sock:  # TCP, so the answer comes behind the last datagram
        time.sleep(0.2)
        sock.sendall(_COUNT)
        received = int(_read_line(sock))
    return {"sent": count, "received": received, "loss": 1 - received / count}


def _connect(host: str, port: int) -> socket.socket:
    sock = socket.create_connection((host, port), timeout=_LIMIT_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return sock


def _read_line(sock: socket.socket) -> bytes:
    text = b""
    while not text.endswith(b"\n"):
        data = sock.recv(1)
        if not data:
            raise ConnectionError("the far end of the probe has gone")
        text += data
    return text


def main(argv: Sequence[str]) -> None:
    verb, host, *rest = argv
    if verb == "serve":
        serve(host)
        return
    port, *numbers = rest
    values = [float(number) for number in numbers]
    if verb == "rtt":
        run_timely()
        result = measure_rtt(host, int(port), int(values[0]))
    elif verb == "rate":
        result = measure_rate(host, int(port), values[0], int(values[1]), *values[2:])
    else:
        result = measure_loss(host, int(port), int(values[0]), values[1])
    print(json.dumps(result))


if __name__ == "__main__":
    main(sys.argv[1:])
