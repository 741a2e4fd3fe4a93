"""After some bodies of 15 MiB the server kept hundreds of megabytes, or more than a gigabyte."""

import concurrent.futures
import http.client
import json
import pathlib

import pytest

from cli_tools import BINARY
from test_openai import KEY, Server, eventually

MIB = 1 << 20
MOST_LEFT = 25 * MIB
AT_ONCE = 8
CASES = {
    # name: route, body, status
    "text that is too long": ("/v1/completions", {"prompt": "x" * (15 * MIB)}, 400),
    "text that is ignored": ("/v1/completions", {"prompt": "a", "max_tokens": 1,
                                                 "metadata": "x" * (15 * MIB)}, 200),
    "many small values": ("/v1/completions", {"prompt": "a", "max_tokens": 1,
                                              "metadata": [{"a": 1}] * (MIB // 2)}, 200),
    "large answers": ("/detokenize", {"tokens": [70] * (4 * MIB)}, 200),
}


def resident(server):
    status = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
    return int(next(line for line in status.splitlines() if "VmRSS" in line).split()[1]) * 1024


@pytest.fixture(scope="module")
def server():
    if b"__asan_init" in pathlib.Path(BINARY).read_bytes():
        pytest.skip("sanitizers keep freed memory to find its use")
    running = Server()
    running.complete()
    yield running
    assert running.stop() == 0


@pytest.mark.parametrize("name", CASES)
def test_memory_comes_back(server, name):
    path, value, expected = CASES[name]
    body = json.dumps(value, separators=(",", ":"))
    before = resident(server)

    def send(_):
        connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
        connection.request("POST", path, body, {"Authorization": f"Bearer {KEY}"})
        response = connection.getresponse()
        response.read()
        return response.status, connection

    with concurrent.futures.ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(send, range(AT_ONCE)))  # whose connections stay open
    assert [status for status, _ in answers] == [expected] * AT_ONCE
    assert eventually(lambda: resident(server) < before + MOST_LEFT, 10), \
        f"{before / MIB:.0f} MiB before, {resident(server) / MIB:.0f} MiB after"
