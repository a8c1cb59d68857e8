"""How fast the codecs are on one core, and what they save: prints one JSON object.

    python tests/benchmarks/codec_throughput.py [--mib 16] [--dtype bfloat16] [--repeats 15]

The data is Gaussian with a scale of its own for each of 576 channels, which codes about as well as
hidden states do. Rates are GB/s of the whole tensor, the best of the repeats; `median` beside them
shows what else the machine was doing.
"""

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import zstandard

from geotrain.compression.codec import get_codec
from geotrain.compression.host_zstd import ZstdCoder

CHUNK_BYTES = 1 << 20
NUM_CHANNELS = 576


def make_tensor(nbytes: int, dtype: torch.dtype) -> torch.Tensor:
    """Flat (numel,); the same values at every call."""
    torch.manual_seed(0)
    numel = nbytes // dtype.itemsize
    rows = -(-numel // NUM_CHANNELS)
    x_RC = torch.randn(rows, NUM_CHANNELS) * torch.randn(NUM_CHANNELS).exp()
    return x_RC.flatten()[:numel].to(dtype)


def rate(action: Callable[[], object], nbytes: int, repeats: int) -> dict[str, float]:
    """GB/s of `nbytes` handled by one call."""
    action()
    times_s = []
    for _ in range(repeats):
        start_s = time.perf_counter()
        action()
        times_s.append(time.perf_counter() - start_s)
    best_s, median_s = min(times_s), statistics.median(times_s)
    return {
        "best_gb_per_s": round(nbytes / best_s / 1e9, 2),
        "median_gb_per_s": round(nbytes / median_s / 1e9, 2),
    }


def chunks_of(data: memoryview, hints: tuple[tuple[int, int], ...]) -> list[memoryview]:
    """What a link offers the host half: hinted ranges in chunks of up to 1 MiB."""
    return [
        data[at : min(at + CHUNK_BYTES, offset + length)]
        for offset, length in hints
        for at in range(offset, offset + length, CHUNK_BYTES)
    ]


def ratio_of(chunks: list[memoryview], encode: Callable[[memoryview], bytes | None]) -> float:
    """How many times smaller these chunks become; one that declines counts as it is."""
    coded_bytes = sum(len(encode(chunk) or chunk) for chunk in chunks)
    return round(sum(map(len, chunks)) / coded_bytes, 3)


def measure(nbytes: int, dtype: torch.dtype, repeats: int) -> dict[str, Any]:
    planes, coder = get_codec("planes"), ZstdCoder()
    flat = make_tensor(nbytes, dtype)
    slot, out = torch.empty(nbytes, dtype=torch.uint8), torch.empty_like(flat)
    encoded = planes.encode(flat, slot)
    chunks = chunks_of(memoryview(slot.numpy()), encoded.hints)
    coded = [coder.encode(chunk) for chunk in chunks]
    saved = sum(len(chunk) - len(c) for chunk, c in zip(chunks, coded, strict=True) if c)
    scratch = memoryview(bytearray(CHUNK_BYTES))

    def decode_all() -> None:
        for chunk, c in zip(chunks, coded, strict=True):
            if c is not None:
                coder.decode_into(memoryview(c), scratch[: len(chunk)])

    level_1 = zstandard.ZstdCompressor(level=1)
    plain = memoryview(flat.view(torch.uint8).numpy())
    interleaved = chunks_of(plain, ((0, nbytes),))
    noise = memoryview(torch.randint(0, 256, (nbytes,), dtype=torch.uint8).numpy())
    results = {
        "ratio": round(nbytes / (nbytes - saved), 3),
        "hinted_ratio": ratio_of(chunks, coder.encode),
        "hinted_ratio_level_1": ratio_of(chunks, level_1.compress),
        "interleaved_ratio_level_1": ratio_of(interleaved, level_1.compress),
        "copy": rate(lambda: slot.copy_(flat.view(torch.uint8)), nbytes, repeats),
        "planes_encode": rate(lambda: planes.encode(flat, slot), nbytes, repeats),
        "planes_decode": rate(
            lambda: planes.decode(slot, dtype, flat.numel(), out), nbytes, repeats
        ),
        "zstd_encode": rate(lambda: [coder.encode(c) for c in chunks], nbytes, repeats),
        "level_1_encode": rate(lambda: [level_1.compress(c) for c in chunks], nbytes, repeats),
        "zstd_decode": rate(decode_all, nbytes, repeats),
        "zstd_declines_noise": rate(
            lambda: [coder.encode(c) for c in chunks_of(noise, ((0, nbytes),))], nbytes, repeats
        ),
    }
    assert torch.equal(out.view(torch.uint8), flat.view(torch.uint8))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--mib", type=int, default=16)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = measure(
        arguments.mib << 20, getattr(torch, arguments.dtype), repeats=arguments.repeats
    )
    where = {"mib": arguments.mib, "dtype": arguments.dtype, "machine": platform.platform()}
    print(json.dumps({**where, "torch": torch.__version__, "threads": 1, **results}))


if __name__ == "__main__":
    main()
