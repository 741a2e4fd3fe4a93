"""An X-Request-Id with quotes came back as it was; of 8 KB nothing may ever come back."""

import http.client
import re

import pytest

from test_openai import KEY, Server

OWN = re.compile(r"[0-9a-f]{32}")
USABLE = ["a", "x" * 128, "01HXZ-req_7.b:c/d+e=f@host"]
UNUSABLE = ["x" * 129, "x" * 8192, 'a"b', "a'b", "a`b", "a\\b", "a b", "a\tb", "a\x01b", "a\x7fb",
            "\u00e9", ""]


@pytest.fixture(scope="module")
def server():
    running = Server()
    yield running
    assert running.stop() == 0


def returned_id(server, method, path, given):
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
    connection.putrequest(method, path)
    connection.putheader("Authorization", f"Bearer {KEY}")
    connection.putheader("X-Request-Id", given.encode("utf-8"))
    if method == "POST":
        connection.putheader("Content-Length", "2")
    connection.endheaders(b"{}" if method == "POST" else None)
    response = connection.getresponse()
    response.read()
    return response.getheader("X-Request-Id")


@pytest.mark.parametrize("method, path", [("GET", "/health"), ("GET", "/nowhere"),
                                          ("POST", "/nowhere"), ("POST", "/v1/completions")])
def test_only_plain_ids_of_bounded_length_come_back(server, method, path):
    for given in USABLE:
        assert returned_id(server, method, path, given) == given
    for given in UNUSABLE:
        assert OWN.fullmatch(returned_id(server, method, path, given)), given
