"""bench/speed/moe_server.py on the CPU: its figures and its error. NIBBLE_BIN names the binary; run
from the repository root."""

import json
import subprocess
import sys

from cli_tools import BINARY, ROOT, STORYTELLER

SIZES = ["--lengths", "5", "9", "--context", "20", "--tokens", "4", "--repeats", "2"]


def lines_of(*flags):
    run = subprocess.run([sys.executable, ROOT / "bench/speed/moe_server.py", "--nibble", BINARY,
                          STORYTELLER, "--device", "cpu", *SIZES, *flags],
                         capture_output=True, text=True, timeout=120, check=True)
    return [json.loads(line) for line in run.stdout.splitlines()]


def test_figures_of_every_kernel_and_errors():
    plain, refused = lines_of("--kernel", "default", "no_such_kernel", "--", "--threads", "1")
    assert plain["kernel"] == "default" and plain["flags"] == ["--threads", "1"]
    assert 0 < plain["ready_s"] < plain["first_token_s"]
    assert set(plain["ttft_ms"]) == {"5", "9"}
    for times in plain["ttft_ms"].values():
        assert set(times) == {"first", "last", "median"} and min(times.values()) > 0
    assert plain["tpot_ms"] > 0 and plain["tokens_per_s"] > 0
    assert plain["tpot_from"] in ("stream", "difference")
    assert set(plain["gpu_memory_mib"]) == {"used", "server"}
    assert "no such kernel" in refused["error"]
