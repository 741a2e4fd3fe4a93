"""The peak of memory in reports was that of the program that had started nibble, where that was
larger: Linux keeps a process's maximum over exec."""

import json
import subprocess
import sys

from cli_tools import BINARY, Model

PARENT_BYTES = 400 << 20
LARGE_PARENT = """
import os, sys
ballast = bytearray(os.urandom(1 << 20)) * {mib}
os.execv(sys.argv[1], sys.argv[1:])
"""


def test_the_peak_is_not_that_of_the_parent(tmp_path):
    model = Model(tmp_path / "model")
    command = [BINARY, "quantize", str(model), str(tmp_path / "out"), "--scheme", "w8a8_int8",
               "--json"]
    made = subprocess.run(
        [sys.executable, "-c", LARGE_PARENT.format(mib=PARENT_BYTES >> 20), *command],
        capture_output=True, text=True, check=True)
    assert 0 < json.loads(made.stdout)["peak_rss_bytes"] < PARENT_BYTES // 2
