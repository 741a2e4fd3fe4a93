"""Scripts of bench/quality left their temporary folders (models of gigabytes) where they were killed, and
`nibble` running."""

import os
import signal
import subprocess
import sys

import pytest
from cli_tools import ROOT, STORYTELLER
from test_openai import eventually

TEXT = ROOT / "tests/data/text/the_black_cat.txt"
# Evaluates at once; whatever makes something never ends.
NIBBLE = '#!/bin/sh\n[ "$1" = eval ] && exit 0\necho $$ >> "$PIDS"\nexec sleep 600\n'
COMMANDS = {
    "comet": ["measure", "OUT", f"m={STORYTELLER},{TEXT},{TEXT}", "--rows", "w4a8/gptq", "w4a8/rtn"],
    "kv_forms": ["OUT", f"m={STORYTELLER},{TEXT},{TEXT}"],
    "methods": [STORYTELLER, TEXT, TEXT, "OUT", "w4a8=rtn,gptq"],
}


def is_alive(pid):
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return False
    return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("name", COMMANDS)
def test_nothing_stays(tmp_path, name, number):
    nibble, folders, pids = tmp_path / "nibble", tmp_path / "temporary", tmp_path / "pids"
    nibble.write_text(NIBBLE)
    nibble.chmod(0o755)
    folders.mkdir()
    arguments = [str(tmp_path / "out.json") if word == "OUT" else str(word) for word in COMMANDS[name]]
    process = subprocess.Popen(
        [sys.executable, ROOT / f"bench/quality/{name}.py", *arguments, "--nibble", nibble], cwd=ROOT,
        env={**os.environ, "TMPDIR": str(folders), "PIDS": str(pids)}, stderr=subprocess.DEVNULL)
    try:
        assert eventually(lambda: pids.exists() and pids.read_text().endswith("\n"))
        assert os.listdir(folders)
        process.send_signal(number)
        assert process.wait(timeout=30) == 128 + number
    finally:
        process.kill()
        left = [pid for pid in pids.read_text().split() if is_alive(pid)] if pids.exists() else []
        for pid in left:
            os.kill(int(pid), signal.SIGKILL)
    assert not left
    assert not os.listdir(folders)
    assert len(pids.read_text().split()) == 1  # no other row was begun
