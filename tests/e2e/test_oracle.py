"""What `nibble quantize` writes, against an independent program for the file formats."""

import os
import pathlib
import subprocess
import sys

import pytest
from cli_tools import BINARY, ROOT, STORYTELLER

SHARED = pathlib.Path(os.environ.get("NIBBLE_SHARED", ROOT.parent / "shared"))
ORACLE = SHARED / "tools/format_oracle.py"


@pytest.mark.skipif(not ORACLE.exists(), reason="the format oracle is not there")
def test_every_layout_that_the_oracle_knows():
    result = subprocess.run(
        [sys.executable, ROOT / "tests/interop/check_oracle.py", BINARY, STORYTELLER, ORACLE],
        capture_output=True, text=True, timeout=600, check=False)
    lines = result.stdout.splitlines()
    assert result.returncode == 0, result.stdout + result.stderr
    assert len(lines) >= 20 and all(line.endswith("same") for line in lines), result.stdout
