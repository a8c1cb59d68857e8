"""The daemon imports the host half, which must not bring torch along."""

import subprocess
import sys


def test_the_host_half_and_the_policy_import_no_torch():
    script = (
        "import sys, geotrain.compression.host_zstd, geotrain.compression.policy;"
        "print(sorted({'torch', 'numpy', 'aiohttp'} & set(sys.modules)))"
    )
    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    assert found.stdout.strip() == "[]"
