"""A link against bare asyncio, both over loopback between two processes, plain and with TLS.

    python tests/benchmarks/link_loopback.py [--message-mib 32] [--messages 48] [--rounds 3]
                                             [--only plain|tls]

Prints one JSON object: GB/s of all, medians over the rounds, the link's share of bare, and the CPU
seconds per GB of each end, which stay comparable where other work shares the cores. Bare is
`transport.write` of 1 MiB views on one side and a BufferedProtocol that receives into one buffer on
the other; with TLS by asyncio's own. The link carries messages of the same bytes with its
checksums, credits, acknowledgements and no coding. All take turns, because the machine's speed
drifts.
"""

import argparse
import asyncio
import json
import multiprocessing
import ssl
import statistics
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

from geotrain.lab.certificates import make_certificates
from geotrain.transport.carrier import Carrier
from geotrain.transport.hello import Hello
from geotrain.transport.http import LinkServer
from geotrain.transport.link import Link, LinkSettings
from geotrain.transport.messages import Message, Presence
from geotrain.transport.tls import Tls, TlsFiles, load_tls

VIEW = 1
STREAM = 0
VIEW_BYTES = 1 << 20
IN_FLIGHT = 3
ENDS = ("sender", "receiver")
DEADLINE_S = 120.0


class NoCoder:
    def encode(self, raw: memoryview) -> bytes | None:
        return None

    def decode_into(self, coded: memoryview, out: memoryview) -> None:
        raise ValueError("nothing was coded")


class BareReceiver(asyncio.BufferedProtocol):
    """Receives `total` bytes into one buffer over and over, then answers one byte."""

    def __init__(self, buffer: memoryview, total: int) -> None:
        self._buffer = buffer
        self._left = total
        self._filled = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer[self._filled : self._filled + VIEW_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled = (self._filled + nbytes) % self._buffer.nbytes
        self._left -= nbytes
        if self._left == 0:
            self._transport.write(b"!")


class BareSender(asyncio.Protocol):
    def __init__(self) -> None:
        self.writable = asyncio.Event()
        self.writable.set()
        self.answered = asyncio.Event()

    def pause_writing(self) -> None:
        self.writable.clear()

    def resume_writing(self) -> None:
        self.writable.set()

    def data_received(self, data: bytes) -> None:
        self.answered.set()


async def send_bare(port: int, payload: memoryview, num_messages: int, tls: Tls | None) -> float:
    loop = asyncio.get_running_loop()
    secured = {} if tls is None else {"ssl": tls.client, "server_hostname": "b"}
    transport, protocol = await loop.create_connection(BareSender, "127.0.0.1", port, **secured)
    transport.set_write_buffer_limits(high=1)
    began = time.perf_counter()
    for _ in range(num_messages):
        for offset in range(0, payload.nbytes, VIEW_BYTES):
            transport.write(payload[offset : offset + VIEW_BYTES])
            await protocol.writable.wait()
    async with asyncio.timeout(DEADLINE_S):
        await protocol.answered.wait()
    elapsed_s = time.perf_counter() - began
    transport.close()
    return elapsed_s


class Acceptor:
    def __init__(self, link: Link) -> None:
        self._link = link

    def accept(self, carrier: Carrier) -> None:
        self._link.accept(carrier)


class End:
    """One end of a link, with what the benchmark counts."""

    def __init__(
        self, *, region: str, index: int, to: str, url: str | None, tls: Tls | None
    ) -> None:
        self.changed = asyncio.Event()
        self.num_acked = 0
        self.link = Link(
            hello=Hello(
                version="0",
                run_id="bench",
                region=region,
                index=index,
                to=to,
                boot=time.time_ns(),
                run={},
            ),
            peer=to,
            url=url,
            tls=tls if url is not None else None,
            coder=NoCoder(),
            settings=LinkSettings(),
            board=list[Presence],
            on_board=lambda entries: None,
            on_delivered=self._on_delivered,
            on_acked=self._on_acked,
            on_state=self.changed.set,
        )

    def _on_delivered(self, message: Message) -> None:
        self.link.release(message.stream, message.view, [message.seq])

    def _on_acked(self, stream: int, view: int, seqs: list[int], wire_bytes: list[int]) -> None:
        self.num_acked += len(seqs)
        self.changed.set()

    async def wait_until(self, num_acked: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while self.num_acked < num_acked:
                self.changed.clear()
                await self.changed.wait()


async def send_link(port: int, payload: memoryview, num_messages: int, tls: Tls | None) -> float:
    url = f"{'http' if tls is None else 'https'}://127.0.0.1:{port}"
    end = End(region="a", index=0, to="b", url=url, tls=tls)
    running = asyncio.create_task(end.link.run())
    end.link.open_view(VIEW, {STREAM: payload.nbytes * (IN_FLIGHT + 1)}, {})
    end.link.offer(_message(0, 0), None)
    await end.wait_until(1)
    began = time.perf_counter()
    for index in range(1, num_messages + 1):
        await end.wait_until(index - IN_FLIGHT)
        end.link.offer(_message(index, payload.nbytes), payload)
    await end.wait_until(num_messages + 1)
    elapsed_s = time.perf_counter() - began
    await end.link.close("done")
    running.cancel()
    await asyncio.wait([running])
    return elapsed_s


def _message(seq: int, payload_bytes: int) -> Message:
    return Message(
        stream=STREAM,
        view=VIEW,
        seq=seq,
        kind="forward",
        step=0,
        microbatch=seq,
        payload_bytes=payload_bytes,
    )


def receive(pipe: Connection, message_bytes: int, num_messages: int, files: TlsFiles) -> None:
    """The other process: says its port for each kind of run asked of it."""
    tls = load_tls(files, region="b")
    while (kind := pipe.recv()) != "end":
        serve = serve_bare if kind.startswith("bare") else serve_link
        began_s = time.process_time()
        asyncio.run(serve(pipe, message_bytes, num_messages, tls if "tls" in kind else None))
        pipe.send(time.process_time() - began_s)


async def serve_bare(
    pipe: Connection, message_bytes: int, num_messages: int, tls: Tls | None
) -> None:
    buffer = memoryview(bytearray(message_bytes))
    server = await asyncio.get_running_loop().create_server(
        lambda: BareReceiver(buffer, message_bytes * num_messages),
        "127.0.0.1",
        0,
        ssl=None if tls is None else tls.server,
    )
    pipe.send(server.sockets[0].getsockname()[1])
    await asyncio.to_thread(pipe.recv)
    server.close()


async def serve_link(
    pipe: Connection, message_bytes: int, num_messages: int, tls: Tls | None
) -> None:
    end = End(region="b", index=1, to="a", url=None, tls=tls)
    server = LinkServer(tls=tls)
    await server.start("127.0.0.1", 0, {"a": Acceptor(end.link)}.get)
    ring = memoryview(bytearray(message_bytes * (IN_FLIGHT + 1)))
    end.link.open_view(VIEW, {}, {STREAM: ring})
    running = asyncio.create_task(end.link.run())
    pipe.send(server.port)
    await asyncio.to_thread(pipe.recv)
    await end.link.close("done")
    running.cancel()
    await asyncio.wait([running])
    await server.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--message-mib", type=int, default=32)
    parser.add_argument("--messages", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", choices=("plain", "tls"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        files = make_certificates(Path(folder), ["a", "b"])
        print(json.dumps(measure(args, files)))


def measure(args: argparse.Namespace, files: dict[str, TlsFiles]) -> dict[str, object]:
    payload = memoryview(bytearray(range(256)) * (args.message_mib << 12))
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(
        target=receive, args=(theirs, payload.nbytes, args.messages, files["b"])
    )
    child.start()
    tls = load_tls(files["a"], region="a")
    gigabytes = payload.nbytes * args.messages / 1e9
    plain, secured = ["bare", "link"], ["bare_tls", "link_tls"]
    kinds = {"plain": plain, "tls": secured}.get(args.only, plain + secured)
    rates: dict[str, list[float]] = {kind: [] for kind in kinds}
    cpu: dict[str, list[float]] = {f"{kind}_{end}": [] for kind in rates for end in ENDS}
    for _ in range(args.rounds):
        for kind in kinds:
            send = send_bare if kind.startswith("bare") else send_link
            ours.send(kind)
            began_s = time.process_time()
            port = ours.recv()
            used = tls if "tls" in kind else None
            elapsed_s = asyncio.run(send(port, payload, args.messages, used))
            cpu[f"{kind}_sender"].append((time.process_time() - began_s) / gigabytes)
            rates[kind].append(gigabytes / elapsed_s)
            ours.send("stop")
            cpu[f"{kind}_receiver"].append(ours.recv() / gigabytes)
    ours.send("end")
    child.join()
    medians = {kind: statistics.median(found) for kind, found in rates.items()}
    shares = {
        f"{kind}_share_of_bare": round(medians[kind] / medians[kind.replace("link", "bare")], 3)
        for kind in kinds
        if kind.startswith("link")
    }
    return {
        "message_bytes": payload.nbytes,
        **{f"{kind}_gb_per_s": round(rate, 3) for kind, rate in medians.items()},
        **shares,
        "openssl": ssl.OPENSSL_VERSION,
        "cpu_s_per_gb": {k: round(statistics.median(v), 3) for k, v in cpu.items()},
        "rounds_gb_per_s": {k: [round(r, 3) for r in v] for k, v in rates.items()},
    }


if __name__ == "__main__":
    main()
