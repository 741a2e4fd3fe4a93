"""The binary was 205 MB, 197 of them debug information: every copy and image carried them."""

import pathlib
import subprocess

import pytest

from cli_tools import BINARY

MOST_BYTES = 20_000_000


def sections(binary):
    listed = subprocess.run(["readelf", "-SW", binary], capture_output=True, text=True, check=True)
    return listed.stdout


def test_the_binary_holds_no_debug_information():
    listed = sections(BINARY)
    if "asan_globals" in listed or b"__asan_init" in pathlib.Path(BINARY).read_bytes():
        pytest.skip("built with sanitizers, whose reports need debug information")
    assert ".debug_info" not in listed
    assert pathlib.Path(BINARY).stat().st_size < MOST_BYTES
