"""zstd chunk by chunk: pays or declines, and never trusts what it decodes."""

import random
import resource
import struct
import threading

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from geotrain.compression.host_zstd import MIN_RAW_BYTES, ZstdCoder

MIB = 1 << 20


def skewed(nbytes: int, seed: int = 0) -> bytes:
    """Like a plane of exponents: noise over few values."""
    return bytes(random.Random(seed).choices(range(120, 130), range(1, 11), k=nbytes))


def noise(nbytes: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(nbytes)


def decoded(coder: ZstdCoder, coded: bytes, nbytes: int) -> bytes:
    out = bytearray(nbytes)
    coder.decode_into(memoryview(coded), memoryview(out))
    return bytes(out)


@settings(max_examples=50, deadline=None)
@given(raw=st.binary(max_size=3000), repeats=st.integers(1, 4))
def test_what_is_coded_comes_back_and_is_smaller(raw, repeats):
    coder = ZstdCoder()
    raw *= repeats
    coded = coder.encode(memoryview(raw))
    if coded is not None:
        assert len(coded) < len(raw)
        assert decoded(coder, coded, len(raw)) == raw


@pytest.mark.parametrize("nbytes", (MIN_RAW_BYTES, 16 * 1024 + 1, MIB))
def test_skewed_noise_pays(nbytes):
    coder = ZstdCoder()
    raw = skewed(nbytes)
    coded = coder.encode(memoryview(raw))
    assert coded is not None and len(coded) < nbytes // 2 + 200
    assert decoded(coder, coded, nbytes) == raw


@pytest.mark.parametrize("nbytes", (0, 1, MIN_RAW_BYTES, 16 * 1024 + 1, MIB))
def test_noise_does_not_pay(nbytes):
    assert ZstdCoder().encode(memoryview(noise(nbytes))) is None


def test_short_ranges_go_as_they_are():
    assert ZstdCoder().encode(memoryview(bytes(MIN_RAW_BYTES - 1))) is None


def test_a_chunk_that_only_its_sample_flatters_goes_as_it_is():
    raw = bytearray(noise(MIB))
    stride = (MIB - 4096) // 3
    for start in (0, stride, 2 * stride, 3 * stride):  # where the sample is taken
        raw[start : start + 4096] = bytes(4096)
    assert ZstdCoder().encode(memoryview(raw)) is None


def test_repetitive_bytes_get_the_match_finder():
    raw = noise(1000) * 1000
    coded = ZstdCoder().encode(memoryview(raw))
    assert coded is not None and len(coded) < len(raw) // 100


def test_typed_views_are_taken_as_bytes():
    values = memoryview(bytearray(8 * 1024)).cast("d")
    coded = ZstdCoder().encode(values)
    assert coded is not None
    out = memoryview(bytearray(b"\1" * 8 * 1024)).cast("d")
    ZstdCoder().decode_into(memoryview(coded), out)
    assert out.tobytes() == bytes(8 * 1024)


def valid_frame(raw: bytes) -> bytes:
    coded = ZstdCoder().encode(memoryview(raw))
    assert coded is not None
    return coded


@pytest.mark.parametrize(
    "spoil",
    [
        lambda frame: b"",
        lambda frame: frame[:3],
        lambda frame: frame[:-1],
        lambda frame: frame[:-4],
        lambda frame: frame + b"\0",
        lambda frame: frame + frame,
        lambda frame: frame + struct.pack("<II", 0x184D2A50, 0),  # an empty skippable frame
        lambda frame: struct.pack("<II", 0x184D2A50, 5000) + bytes(5000),
        lambda frame: b"\xff" * len(frame),
    ],
)
def test_broken_or_surplus_bytes_are_a_value_error(spoil):
    with pytest.raises(ValueError):
        decoded(ZstdCoder(), spoil(valid_frame(skewed(5000))), 5000)


@pytest.mark.parametrize("nbytes", (0, 4999, 5001))
def test_another_length_than_agreed_is_a_value_error(nbytes):
    with pytest.raises(ValueError, match=f"states 5000 bytes, expected {nbytes}"):
        decoded(ZstdCoder(), valid_frame(skewed(5000)), nbytes)


def test_a_frame_without_its_length_is_a_value_error():
    frame = zstandard.ZstdCompressor(level=1, write_content_size=False).compress(skewed(5000))
    with pytest.raises(ValueError):
        decoded(ZstdCoder(), frame, 5000)


def test_a_bomb_that_lies_about_its_length_is_bounded():
    compressor = zstandard.ZstdCompressor(level=1, write_content_size=False).compressobj()
    bomb = compressor.compress(bytes(64 * MIB)) + compressor.flush()
    header_bytes = zstandard.frame_header_size(bomb)
    lying = (
        bomb[:4]
        + bytes([0x80 | (bomb[4] & 0x3F)])  # a content size of four bytes follows
        + bomb[5:header_bytes]
        + struct.pack("<I", MIB)
        + bomb[header_bytes:]
    )
    assert zstandard.get_frame_parameters(lying).content_size == MIB
    coder, out = ZstdCoder(), bytearray(MIB)
    before_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError):
        coder.decode_into(memoryview(lying), memoryview(out))
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before_kib < 8 * 1024


def test_a_window_above_the_limit_is_refused():
    parameters = zstandard.ZstdCompressionParameters(
        window_log=24, write_content_size=True, strategy=zstandard.STRATEGY_FAST
    )
    raw = noise(MIB) * 20
    frame = zstandard.ZstdCompressor(compression_params=parameters).compress(raw)
    assert zstandard.get_frame_parameters(frame).window_size > MIB
    with pytest.raises(ValueError):
        decoded(ZstdCoder(), frame, len(raw))


@settings(max_examples=300, deadline=None)
@given(data=st.data())
def test_flipped_bytes_raise_only_value_errors(data):
    frame = bytearray(valid_frame(skewed(3000)))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame) - 1) | st.integers(0, 30))
        frame[at] = data.draw(st.integers(0, 255))
    try:
        decoded(ZstdCoder(), bytes(frame), 3000)
    except ValueError:
        pass


@settings(max_examples=300, deadline=None)
@given(frame=st.binary(max_size=300), nbytes=st.integers(0, 5000))
def test_arbitrary_bytes_raise_only_value_errors(frame, nbytes):
    for head in (b"", zstandard.FRAME_HEADER):
        try:
            decoded(ZstdCoder(), head + frame, nbytes)
        except ValueError:
            pass


def test_the_coder_works_after_bad_bytes():
    coder, raw = ZstdCoder(), skewed(5000)
    frame = valid_frame(raw)
    for _ in range(3):
        with pytest.raises(ValueError):
            decoded(coder, frame[:-1], 5000)
        assert decoded(coder, frame, 5000) == raw


def test_threads_share_one_coder():
    coder = ZstdCoder()
    wrong: list[int] = []

    def work(seed: int) -> None:
        for turn in range(10):
            raw = skewed(20_000, seed * 100 + turn)
            coded = coder.encode(memoryview(raw))
            if coded is None or decoded(coder, coded, len(raw)) != raw:
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
        assert not thread.is_alive()
    assert wrong == []
