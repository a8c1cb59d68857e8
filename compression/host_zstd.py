"""The host half of the lossless codec: zstd on byte ranges, chunk by chunk.

All that a daemon imports of this folder: no torch, no numpy, no network.
"""

import threading

import zstandard

MIN_RAW_BYTES = 512
"""Below this a frame's header and tables eat what coding saves."""

_SAMPLE_SPANS = 4
_SAMPLE_SPAN_BYTES = 4096
_KEEP_NUM, _KEEP_DEN = 15, 16
"""Coding pays if it saves at least a sixteenth; less is not worth the peer's decoding."""

_MAX_WINDOW_BYTES = 1 << 20
"""What a frame may make the decoder remember; level 1 asks for half of it."""


def _entropy_parameters() -> zstandard.ZstdCompressionParameters:
    """Level 1 with hardly any match finder left.

    The high byte plane of floats is noise of a skewed distribution: its matches are accidents that
    cost time and ratio. Huffman coding alone is faster and comes out smaller (README has figures).
    """
    return zstandard.ZstdCompressionParameters.from_level(
        1,
        strategy=zstandard.STRATEGY_FAST,
        hash_log=6,
        min_match=7,
        write_content_size=True,
        write_checksum=False,
    )


class _Contexts(threading.local):
    """One set per thread: a zstd context must never serve two threads at once."""

    def __init__(self) -> None:
        self.entropy = zstandard.ZstdCompressor(compression_params=_entropy_parameters())
        # No checksum inside: the link's own covers the raw bytes end to end.
        self.match = zstandard.ZstdCompressor(
            level=1, write_checksum=False, write_content_size=True
        )
        self.decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW_BYTES)


def _sample(raw: memoryview) -> bytes:
    """Up to 16 KiB in spans spread evenly over `raw`, first and last bytes included."""
    if len(raw) <= _SAMPLE_SPANS * _SAMPLE_SPAN_BYTES:
        return bytes(raw)
    stride = (len(raw) - _SAMPLE_SPAN_BYTES) // (_SAMPLE_SPANS - 1)
    starts = (span * stride for span in range(_SAMPLE_SPANS))
    return b"".join(raw[start : start + _SAMPLE_SPAN_BYTES] for start in starts)


def _pays(coded_bytes: int, raw_bytes: int) -> bool:
    return coded_bytes * _KEEP_DEN <= raw_bytes * _KEEP_NUM


class ZstdCoder:
    """Codes byte ranges with zstd level 1, each one frame of its own.

    Thread-safe: contexts are kept per thread. Stateless between calls, so any chunk can be
    decoded alone and in any order.
    """

    def __init__(self) -> None:
        self._contexts = _Contexts()

    def encode(self, raw: memoryview) -> bytes | None:
        """Code one chunk, or return None where it does not pay and the bytes should go as they are.

        A sample decides first, so that noise costs a few per cent of what coding it would.

        Args:
            raw: Contiguous bytes; neither kept nor changed.
        """
        raw = raw.cast("B")
        if len(raw) < MIN_RAW_BYTES:
            return None
        contexts = self._contexts
        sample = _sample(raw)
        by_entropy = len(contexts.entropy.compress(sample))
        by_match = len(contexts.match.compress(sample))
        if not _pays(min(by_entropy, by_match), len(sample)):
            return None
        # Text, ids and padding repeat themselves: there the match finder earns its time.
        worth_matching = by_match * 10 < by_entropy * 9
        compressor = contexts.match if worth_matching else contexts.entropy
        coded = compressor.compress(raw)
        return coded if _pays(len(coded), len(raw)) else None

    def decode_into(self, coded: memoryview, out: memoryview) -> None:
        """Decode one chunk into exactly `out`.

        Whatever the bytes, no more than `len(out)` bytes and one window are allocated.

        Args:
            coded: What `encode` returned, whole.
            out: Writable, contiguous, as long as the raw chunk was; undefined after an error.

        Raises:
            ValueError: The frame is broken, longer or shorter than `out`, or is followed by
                anything. Nothing else is raised, whatever the bytes.
        """
        out = out.cast("B")
        try:
            frame = zstandard.get_frame_parameters(coded)
            # The size that the frame states becomes the decoder's buffer, so it is compared first.
            if frame.content_size != len(out):
                raise ValueError(
                    f"coded chunk states {frame.content_size} bytes, expected {len(out)}"
                )
            if frame.window_size > _MAX_WINDOW_BYTES:
                raise ValueError(f"coded chunk wants a window of {frame.window_size} bytes")
            raw = self._contexts.decompressor.decompress(coded, allow_extra_data=False)
        except zstandard.ZstdError as exc:
            raise ValueError(f"coded chunk of {len(coded)} bytes is broken: {exc}") from exc
        if len(raw) != len(out):
            raise ValueError(f"coded chunk holds {len(raw)} bytes, expected {len(out)}")
        out[:] = raw
