"""The files of [site.tls], and what each end is told when a handshake comes to nothing."""

import asyncio
import dataclasses
import os
import shutil
import ssl
from contextlib import asynccontextmanager
from datetime import UTC, datetime, timedelta

import pytest

from geotrain.lab.certificates import Authority
from geotrain.transport import http, tls_arrivals
from geotrain.transport.carrier import DialError
from geotrain.transport.http import LinkServer, dial
from geotrain.transport.http_carrier import HttpCarrier
from geotrain.transport.tls import Tls, TlsFilesError, load_tls

DEADLINE_S = 10.0
DAY = timedelta(days=1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("tls")


@pytest.fixture(scope="module")
def authority(folder):
    return Authority(folder)


@pytest.fixture(scope="module")
def other(folder):
    return Authority(folder, name="other")


@pytest.fixture(scope="module")
def good(authority):
    return authority.issue("a")


def problem(files, region="a"):
    with pytest.raises(TlsFilesError) as caught:
        load_tls(files, region=region)
    return caught.value.key, str(caught.value)


@pytest.mark.parametrize("name", ["a", "new-york_2", "7", "x" * 63, "A-"])
def test_every_name_of_a_region_can_stand_in_a_certificate(authority, name):
    tls = load_tls(authority.issue(name), region=name)
    assert tls.ends.endswith("UTC")


def test_a_certificate_that_names_another_region_is_refused(good):
    found = "must name region A as a DNS name (subjectAltName); it names a"
    assert problem(good, "A") == ("certificate", found)


@pytest.mark.parametrize("key", ["certificate", "key", "authority"])
def test_files_that_cannot_be_read_are_named(folder, good, key):
    nowhere = dataclasses.replace(good, **{key: folder / "nowhere.pem"})
    assert problem(nowhere) == (key, "cannot be read: No such file or directory")
    folders = dataclasses.replace(good, **{key: folder})
    assert problem(folders) == (key, "cannot be read: Is a directory")
    (folder / "empty.pem").write_text("")
    empty = dataclasses.replace(good, **{key: folder / "empty.pem"})
    wanted = "PRIVATE KEY" if key == "key" else "CERTIFICATE"
    assert problem(empty) == (key, f"must be a PEM file with a {wanted} in it")


@pytest.mark.parametrize("key", ["certificate", "key", "authority"])
def test_nothing_waits_for_what_is_no_file(folder, good, key):
    pipe = folder / f"{key}.pipe"
    os.mkfifo(pipe)
    found = problem(dataclasses.replace(good, **{key: pipe}))
    assert found == (key, "must be a file; a pipe or a device cannot be read twice")
    found = problem(dataclasses.replace(good, **{key: folder / "zero\0.pem"}))
    assert found == (key, "must not hold a zero byte")


def test_files_that_do_not_fit_together_are_named(folder, authority, other, good):
    second = authority.issue("b")
    key, allowed = problem(dataclasses.replace(good, key=second.key))
    assert key == "key" and f"does not belong to {good.certificate}" in allowed
    theirs = dataclasses.replace(good, authority=folder / "other.pem")
    key, allowed = problem(theirs)
    assert key == "certificate" and f"is not signed by {theirs.authority}" in allowed
    for which in ("certificate", "authority"):
        damaged = folder / "damaged.pem"
        damaged.write_text("-----BEGIN CERTIFICATE-----\nno\n-----END CERTIFICATE-----\n")
        assert problem(dataclasses.replace(good, **{which: damaged}))[0] == which


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(folder, good):
    locked = folder / "locked.key"
    locked.write_text(good.key.read_text().replace("PRIVATE KEY", "ENCRYPTED PRIVATE KEY"))
    key, allowed = problem(dataclasses.replace(good, key=locked))
    assert key == "key" and "passphrase" in allowed


def test_times_are_told(folder, authority):
    now = datetime.now(UTC)
    old = authority.issue("a", file_name="old", begins=now - 3 * DAY, ends=now - DAY)
    key, allowed = problem(old)
    assert key == "certificate" and allowed.startswith("expired on ")
    early = authority.issue("a", file_name="early", begins=now + DAY, ends=now + 3 * DAY)
    key, allowed = problem(early)
    assert key == "certificate" and allowed.startswith("is valid from ")
    ended = Authority(folder, name="ended", life=-timedelta(minutes=1))
    key, allowed = problem(ended.issue("a", file_name="of_ended"))
    assert key == "authority" and allowed.startswith("has expired")


# What ends are told ------------------------------------------------------------------------------


class Ear:
    """The upper end of a carrier."""

    def __init__(self):
        self.received, self.reason = bytearray(), None
        self._changed, self._buffer = asyncio.Event(), bytearray(4096)

    def accept(self, carrier):
        carrier.start(self)

    def get_buffer(self, sizehint):
        return memoryview(self._buffer)

    def buffer_updated(self, nbytes):
        self.received += self._buffer[:nbytes]
        self._changed.set()

    def connection_lost(self, reason):
        self.reason = reason
        self._changed.set()

    async def until(self, condition):
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self._changed.clear()
                await self._changed.wait()


class Host:
    """Takes whoever is let in."""

    def accept(self, carrier):
        pass


@asynccontextmanager
async def listening(tls: Tls | None):
    server = LinkServer(tls=tls)
    await server.start("127.0.0.1", 0, lambda region: Host())
    yield server.port
    await server.close()


async def refusal(url: str, tls: Tls | None, *, to: str = "b") -> str:
    with pytest.raises(DialError) as caught:
        async with (
            asyncio.timeout(DEADLINE_S),
            dial(url, region="a", to=to, timeout_s=5.0, tls=tls),
        ):
            pass
    return str(caught.value)


@pytest.fixture
def ends(folder, authority):
    """Contexts of a and b as they should be."""
    return tuple(load_tls(authority.issue(name), region=name) for name in ("a", "b"))


async def test_dialling_another_region_is_told(authority, ends):
    a, b = ends
    async with listening(b) as port:
        url = f"https://127.0.0.1:{port}"
        told = await refusal(url, a, to="c")
        assert told.startswith(
            f"the daemon at {url} has no certificate of region c; the url may be"
        )
        # OpenSSL compares without regard to case, and two regions may differ in nothing else.
        told = await refusal(url, a, to="B")
        assert told.startswith(f"the certificate of the daemon at {url} names b, not B; ")


async def test_a_region_may_act_only_as_the_one_that_its_certificate_names(authority, ends):
    _, b = ends
    c = load_tls(authority.issue("c"), region="c")
    async with listening(b) as port:
        told = await refusal(f"https://127.0.0.1:{port}", c)
        assert told == "answered 403 the certificate names c, not 'a'"


async def test_another_authority_is_told_on_the_side_that_dials(folder, other, ends):
    _, b = ends
    stranger = load_tls(other.issue("a", file_name="stranger"), region="a")
    async with listening(b) as port:
        told = await refusal(f"https://127.0.0.1:{port}", stranger)
        assert f"is not signed by {folder / 'other.pem'}" in told
        assert "site.tls.authority" in told


async def test_a_client_that_is_refused_learns_where_to_look(folder, other, ends, caplog):
    """It trusts the daemon's authority, and has a certificate of another one."""
    a, b = ends
    stranger = load_tls(other.issue("a", file_name="stranger"), region="a")
    both = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    both.load_verify_locations(cafile=a.files.authority)
    both.load_cert_chain(stranger.files.certificate, stranger.files.key)
    async with listening(b) as port:
        told = await refusal(
            f"https://127.0.0.1:{port}", dataclasses.replace(stranger, client=both)
        )
        assert f"refuses {stranger.files.certificate}" in told
        assert "the log of region b's daemon says why" in told
        for _ in range(3):
            await refusal(f"https://127.0.0.1:{port}", dataclasses.replace(stranger, client=both))
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == 1, "a reason is told once a minute"
    assert "was turned away: its certificate was refused: " in lines[0]
    none = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    none.load_verify_locations(cafile=a.files.authority)
    async with listening(b) as port:
        await refusal(f"https://127.0.0.1:{port}", dataclasses.replace(a, client=none))
    assert "it showed no certificate" in caplog.records[-1].getMessage()


async def test_times_of_either_end_are_told_where_it_dials(authority, ends):
    a, b = ends
    now = datetime.now(UTC)
    old = authority.issue("b", file_name="old_b", begins=now - 3 * DAY, ends=now - DAY)
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(old.certificate, old.key)
    async with listening(dataclasses.replace(b, server=server)) as port:
        told = await refusal(f"https://127.0.0.1:{port}", a)
        assert "has expired; renew it there" in told
        over = dataclasses.replace(a, not_after_s=0.0)
        told = await refusal(f"https://127.0.0.1:{port}", over)
        assert told.startswith(f"{a.files.certificate} expired on 1970-01-01 00:00 UTC; renew it")


async def test_plain_and_tls_that_meet_are_told_apart(ends, caplog):
    a, b = ends
    async with listening(None) as port:
        told = await refusal(f"https://127.0.0.1:{port}", a)
        assert "does not speak TLS 1.3 (or no TLS at all)" in told
    async with listening(b) as port:
        told = await refusal(f"http://127.0.0.1:{port}", None)
        assert told.endswith(
            "if it speaks TLS, this site needs [site.tls] and an https:// url, too"
        )
    assert "it speaks no TLS" in caplog.text


async def test_older_tls_is_turned_away(ends, caplog):
    a, b = ends
    older = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    older.maximum_version = ssl.TLSVersion.TLSv1_2
    older.load_verify_locations(cafile=a.files.authority)
    older.load_cert_chain(a.files.certificate, a.files.key)
    async with listening(b) as port:
        await refusal(f"https://127.0.0.1:{port}", dataclasses.replace(a, client=older))
    assert "was turned away: its TLS failed (unsupported protocol)" in caplog.text


async def test_silence_and_crowds_before_the_handshake_are_turned_away(ends, monkeypatch, caplog):
    _, b = ends
    monkeypatch.setattr(http, "FIRST_REQUEST_S", 0.3)
    monkeypatch.setattr(tls_arrivals, "MAX_HANDSHAKES", 2)
    async with listening(b) as port:
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(4)]
        async with asyncio.timeout(DEADLINE_S):
            for reader, _ in silent:
                try:
                    assert await reader.read() == b""
                except ConnectionResetError:
                    pass
        for _, writer in silent:
            writer.close()
    assert caplog.records == []


async def test_a_crowd_at_the_peers_port_is_told_in_words(ends, monkeypatch):
    a, b = ends
    monkeypatch.setattr(tls_arrivals, "MAX_HANDSHAKES", 0)
    async with listening(b) as port:
        url = f"https://127.0.0.1:{port}"
        for _ in range(5):  # whether the end comes before or after the first word is chance
            told = await refusal(url, a)
            assert told.startswith(f"{url} reset the connection as it began, as a daemon does")


async def test_a_server_that_closes_leaves_no_handshake_behind(ends):
    _, b = ends
    async with listening(b) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.sleep(0)
    async with asyncio.timeout(DEADLINE_S):
        try:
            assert await reader.read() == b""
        except ConnectionResetError:
            pass
    writer.close()


def test_the_key_is_for_its_owner_alone(folder, authority):
    files = authority.issue("a", file_name="own")
    assert files.key.stat().st_mode & 0o777 == 0o600
    assert shutil.which("openssl") is None or b"PRIVATE KEY" in files.key.read_bytes()


async def test_a_byte_that_is_changed_on_the_way_ends_the_connection(ends):
    """The first byte that a lane says is the last of what passes; neither end takes it."""
    a, b = ends
    far, near = Ear(), Ear()
    server = LinkServer(tls=b)
    await server.start("127.0.0.1", 0, lambda region: far)
    tampering = asyncio.Event()

    async def forward(reader, writer):
        async def copy(source, sink, *, tampers: bool):
            while data := await source.read(65_536):
                if tampers and tampering.is_set():
                    data = data[:-1] + bytes([data[-1] ^ 1])
                sink.write(data)
            sink.close()

        there_reader, there = await asyncio.open_connection("127.0.0.1", server.port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(copy(reader, there, tampers=True))
                group.create_task(copy(there_reader, writer, tampers=False))
        except* ConnectionError:
            pass
        finally:
            there.close()
            writer.close()

    middle = await asyncio.start_server(forward, "127.0.0.1", 0)
    url = f"https://127.0.0.1:{middle.sockets[0].getsockname()[1]}"
    try:
        async with dial(url, region="a", to="b", timeout_s=5.0, tls=a) as carrier:
            carrier.start(near)
            carrier.write(b"good")
            await far.until(lambda: bytes(far.received) == b"good")
            tampering.set()
            carrier.write(b"changed on the way")
            await far.until(lambda: far.reason is not None)
            await near.until(lambda: near.reason is not None)
        assert bytes(far.received) == b"good"
        assert "DECRYPTION_FAILED_OR_BAD_RECORD_MAC" in far.reason
    finally:
        middle.close()
        await middle.wait_closed()
        await server.close()


async def lose(transport: asyncio.Transport) -> None:
    """End the TCP connection below; asyncio's TLS tells of it in a later turn than this one."""
    tls = transport._ssl_protocol
    tls._transport.abort()
    async with asyncio.timeout(DEADLINE_S):
        while tls._transport is not None:
            await asyncio.sleep(0)


async def test_a_connection_that_goes_as_it_is_handed_over_is_no_lane(ends):
    a, b = ends
    async with listening(b) as port:
        transport, protocol = await asyncio.get_running_loop().create_connection(
            asyncio.Protocol, "127.0.0.1", port, ssl=a.client, server_hostname="b"
        )
        await lose(transport)
        with pytest.raises(ConnectionResetError):
            HttpCarrier(transport, protocol, congestion="auto")


async def test_a_lane_whose_connection_has_just_gone_is_tuned_without_an_error(ends):
    """The estimators ask all lanes in one turn: one that raised would end that for the others."""
    a, b = ends
    async with listening(b) as port:
        ear = Ear()
        async with dial(
            f"https://127.0.0.1:{port}", region="a", to="b", timeout_s=5.0, tls=a
        ) as carrier:
            carrier.start(ear)
            await lose(carrier._transport)
            assert ear.reason is None, "the lane has not heard of it yet"
            carrier.expect_rate(1e6)
            carrier.pace(1e6)
            assert carrier.counts() is None
            await ear.until(lambda: ear.reason is not None)
