import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geotrain.transport.messages import (
    BACKWARD,
    FORWARD,
    MAX_DETAIL_BYTES,
    Message,
    Presence,
    boundary_of,
    differing_keys,
    direction_of,
    pack,
    stream_id,
    unpack,
    view_id,
)

MESSAGE = {"stream": 0, "view": 9, "seq": 0, "kind": "forward", "step": 3, "microbatch": 1}


def test_stream_names_boundary_and_direction():
    assert [stream_id(0, FORWARD), stream_id(0, BACKWARD), stream_id(2, FORWARD)] == [0, 1, 4]
    assert (boundary_of(5), direction_of(5)) == (2, BACKWARD)


def test_view_id_depends_on_every_incarnation_and_its_place():
    ids = {view_id([1, 2]), view_id([2, 1]), view_id([1, 3]), view_id([1, 2, 0])}
    assert len(ids) == 4 and 0 not in ids


def test_message_survives_its_map_and_start_stays_local():
    message = Message(
        **MESSAGE, part=1, num_parts=2, header=b"h", payload_bytes=100, start=64, hints=((0, 9),)
    )
    again = Message.from_map(unpack(pack(message.to_map(with_start=True)), 1000), with_start=True)
    assert again == message
    assert Message.from_map(message.to_map()).start == 0


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"stream": -1}, "stream"),
        ({"stream": 2**16}, "stream"),
        ({"view": 0}, "view"),
        ({"seq": True}, "seq"),
        ({"kind": ""}, "kind"),
        ({"kind": "x" * 33}, "kind"),
        ({"step": -2}, "step"),
        ({"part": 1}, "part"),
        ({"header": bytes(48 * 1024 + 1)}, "header"),
        ({"inline": bytes(4097)}, "inline"),
        ({"inline": b"x", "payload_bytes": 5}, "not both"),
        ({"payload_bytes": -5}, "payload_bytes"),
        ({"payload_bytes": 2**60}, "payload_bytes"),
        ({"payload_bytes": 9, "hints": [[0, 10]]}, "hints"),
        ({"payload_bytes": 9, "hints": [[4, 2], [5, 1]]}, "hints"),
        ({"payload_bytes": 9, "hints": [[4]]}, "hints"),
        ({"hints": "ab"}, "hints"),
    ],
)
def test_message_out_of_its_limits_names_the_key(change, key):
    with pytest.raises(ValueError, match=key):
        Message.from_map({**MESSAGE, **change})


def test_message_lacking_a_key_names_it_and_unknown_keys_are_ignored():
    with pytest.raises(ValueError, match="kind: missing"):
        Message.from_map({k: v for k, v in MESSAGE.items() if k != "kind"})
    assert Message.from_map({**MESSAGE, "later": 1}).step == 3


def test_presence_survives_its_map():
    entry = Presence(
        region="a",
        incarnation=5,
        revision=2,
        state="failed",
        identity={"fingerprint": "x"},
        rings={0: 4096},
        error={"kind": "lost"},
        note="gone",
    )
    assert Presence.from_map(unpack(pack(entry.to_map()), 1000)) == entry
    assert entry.rank == (5, 2)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"region": ""}, "region"),
        ({"state": "fine"}, "state"),
        ({"rings": {"a": 1}}, "rings"),
        ({"rings": {1: -1}}, "rings"),
        ({"note": "x" * 1025}, "note"),
        ({"identity": {"x": bytes(MAX_DETAIL_BYTES)}}, "identity"),
        ({"error": []}, "error"),
    ],
)
def test_presence_out_of_its_limits_names_the_key(change, key):
    with pytest.raises(ValueError, match=key):
        Presence.from_map({"region": "a", **change})


@given(st.binary(max_size=200))
def test_unpack_raises_nothing_but_value_error(data):
    try:
        unpack(data, 1000)
    except ValueError:
        pass


@pytest.mark.parametrize(
    "data",
    [
        pack({"a": bytes(100)}),  # longer than the limit
        msgpack.packb([1]),
        msgpack.packb({"a": msgpack.ExtType(5, b"")}),
        msgpack.packb({"a": msgpack.Timestamp(1)}),
        msgpack.packb({1.5: 1}),
        b"\x81\xa1a" + b"\x91" * 20 + b"\xc0",  # 20 levels deep
        b"\x81\xa1a\xdd\xff\xff\xff\xff",  # an array of 4 Gi elements
        b"\x81\x80\x01",  # a map as a key
        b"\x81\xa1a",  # cut off
        b"\x80\x80",  # something after it
    ],
)
def test_unpack_refuses(data):
    with pytest.raises(ValueError):
        unpack(data, 64)


def test_differing_keys_are_dotted_and_carry_both_values():
    mine = {"a": 1, "plan": {"m": 8, "w": "classic"}, "regions": [{"n": "x"}, {"n": "y"}]}
    theirs = {"a": 1.0, "plan": {"m": 4, "w": "classic"}, "regions": [{"n": "x"}, {"n": "z"}]}
    assert differing_keys(mine, theirs) == [
        ("a", 1, 1.0),
        ("plan.m", 8, 4),
        ("regions[1].n", "y", "z"),
    ]
    assert differing_keys({"a": 1}, {}) == [("a", 1, None)]
    assert differing_keys({"w": [1, 2]}, {"w": [1]}) == [("w", [1, 2], [1])]
