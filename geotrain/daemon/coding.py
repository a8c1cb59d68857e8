"""The lossless coding of the links, and the one pool of workers that does it off the loop."""

import os
from concurrent.futures import ThreadPoolExecutor

from geotrain.compression.host_zstd import ZstdCoder

_MAX_WORKERS = 8
"""Each codes about 0.7 GB/s, more than a link of 40 Gbit/s carries."""


def make_coder() -> ZstdCoder:
    """The coder that links get; safe to call from every worker at once."""
    return ZstdCoder()


def make_workers() -> ThreadPoolExecutor:
    """The pool for all blocking work: coding, decoding, checksums."""
    num_workers = max(1, min(_MAX_WORKERS, len(os.sched_getaffinity(0)) - 1))
    return ThreadPoolExecutor(max_workers=num_workers, thread_name_prefix="geotrain-coding")
