"""Connections that a middlebox forgets."""

from geotrain.lab.emulator import flows
from geotrain.lab.emulator.flows import FlowTable
from tests.lab.emulator.packets import ACK, SYN, packet


def passes(table: FlowTable, data: bytes, now: float) -> bool:
    return table.passes(data, idle_drop_s=60.0, now=now)


def test_a_connection_lives_as_long_as_it_speaks():
    table = FlowTable()
    assert all(passes(table, packet(10), now) for now in (0.0, 59.0, 118.0))


def test_after_the_silence_nothing_passes_and_no_retransmission_helps():
    table = FlowTable()
    assert passes(table, packet(10), 0.0)
    assert not passes(table, packet(10), 60.5)
    assert not passes(table, packet(10), 60.6)
    assert not passes(table, packet(10), 61.0)


def test_others_are_not_touched():
    table = FlowTable()
    passes(table, packet(10), 0.0)
    assert not passes(table, packet(10), 100.0)
    assert passes(table, packet(10, ports=(40_001, 9_000)), 100.0)


def test_opening_it_anew_makes_it_known_again():
    table = FlowTable()
    passes(table, packet(10), 0.0)
    assert passes(table, packet(0, flags=SYN), 100.0)
    assert passes(table, packet(10), 101.0)


def test_what_is_no_tcp_over_ipv4_passes():
    table = FlowTable()
    udp = bytearray(packet(10))
    udp[10 + 9] = 17
    for data in (bytes(udp), packet(10, version=6)):
        assert passes(table, data, 0.0) and passes(table, data, 1000.0)


def test_the_table_is_bounded_and_forgets_the_oldest(monkeypatch):
    monkeypatch.setattr(flows, "_MAX_FLOWS", 4)
    table = FlowTable()
    for port in range(6):
        assert passes(table, packet(10, ports=(port, 9), flags=ACK), float(port))
    assert not passes(table, packet(10, ports=(5, 9)), 66.0)
    assert passes(table, packet(10, ports=(0, 9)), 66.0)
