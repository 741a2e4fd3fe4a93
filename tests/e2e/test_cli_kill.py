"""`nibble quantize` killed at random moments: a whole checkpoint or none, and a rerun succeeds."""

import os
import random
import subprocess
import time

from cli_tools import BINARY, ROOT, STORYTELLER, json_of, succeeds

SCHEME = ["--scheme", "w4a16_g32"]
ROUNDS = 24


def names(folder):
    return sorted(os.listdir(folder))


def test_killed_at_random_moments(tmp_path):
    whole = tmp_path / "whole"
    begin = time.monotonic()
    succeeds("quantize", STORYTELLER, whole, *SCHEME)
    seconds = time.monotonic() - begin
    expected = {path.name: path.read_bytes() for path in whole.iterdir()}
    output = tmp_path / "output"
    choose = random.Random(11)
    outcomes = {"whole": 0, "none": 0}
    for round_number in range(ROUNDS):
        with subprocess.Popen([BINARY, "quantize", str(STORYTELLER), str(output), *SCHEME],
                              cwd=ROOT, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL) as process:
            # The last rounds aim at the end, where files are flushed and renamed.
            earliest = 0.8 if round_number >= ROUNDS // 2 else 0.0
            time.sleep(seconds * choose.uniform(earliest, 1.1))
            process.kill()
        leftovers = [name for name in names(tmp_path) if name not in ("whole", "output")]
        assert leftovers in ([], ["output.partial"])
        if not output.exists():
            outcomes["none"] += 1
            continue
        outcomes["whole"] += 1
        assert {path.name: path.read_bytes() for path in output.iterdir()} == expected
        for path in output.iterdir():
            path.unlink()
        output.rmdir()
    assert outcomes["none"] > 0, outcomes
    json_of("quantize", STORYTELLER, output, *SCHEME)
    assert names(tmp_path) == ["output", "whole"]  # what the killed runs left was used
    assert {path.name: path.read_bytes() for path in output.iterdir()} == expected


def test_a_killed_replacement_leaves_the_old_or_the_new(tmp_path):
    old, new = tmp_path / "old", tmp_path / "new"
    succeeds("quantize", STORYTELLER, old, "--scheme", "w8a8_int8")
    begin = time.monotonic()
    succeeds("quantize", STORYTELLER, new, *SCHEME)
    seconds = time.monotonic() - begin
    contents = [{path.name: path.read_bytes() for path in folder.iterdir()}
                for folder in (old, new)]
    choose = random.Random(12)
    for _ in range(8):
        with subprocess.Popen([BINARY, "quantize", str(STORYTELLER), str(old), *SCHEME, "--force"],
                              cwd=ROOT, stdout=subprocess.DEVNULL,
                              stderr=subprocess.DEVNULL) as process:
            time.sleep(seconds * choose.uniform(0.5, 1.1))
            process.kill()
        assert {path.name: path.read_bytes() for path in old.iterdir()} in contents
    succeeds("quantize", STORYTELLER, old, *SCHEME, "--force")
    assert names(tmp_path) == ["new", "old"]
