"""A compressed request body was read as if it were plain, and answered as malformed JSON."""

import gzip
import json
import socket

import pytest

from test_openai import KEY, Server

BODY = json.dumps({"prompt": "Once", "max_tokens": 1}).encode()
POSTS = ["/v1/chat/completions", "/v1/completions", "/tokenize", "/v1/tokenize", "/detokenize",
         "/v1/detokenize"]


@pytest.fixture(scope="module")
def server():
    running = Server()
    yield running
    assert running.stop() == 0


def exchange(server, *fields, body=b"", path="/v1/completions", method="POST"):
    """Everything that the server says until it closes the connection."""
    head = [f"{method} {path} HTTP/1.1", "Host: x", f"Authorization: Bearer {KEY}", *fields]
    with socket.create_connection(("127.0.0.1", server.port), timeout=20) as connection:
        connection.sendall("\r\n".join([*head, "", ""]).encode() + body)
        said = b""
        while piece := connection.recv(65536):
            said += piece
    return said.decode()


def refusal(said):
    head, body = said.split("\r\n\r\n", 1)
    assert "\r\nConnection: close\r\n" in head
    return head.split("\r\n")[0], json.loads(body)["error"]


@pytest.mark.parametrize("path", POSTS)
def test_every_route_names_the_coding_and_the_remedy(server, path):
    packed = gzip.compress(BODY)
    status, error = refusal(exchange(server, "Content-Encoding: gzip", path=path, body=packed,
                                     *[f"Content-Length: {len(packed)}"]))
    assert status == "HTTP/1.1 415 Unsupported Media Type"
    assert error["type"] == "invalid_request_error"
    assert '"gzip"' in error["message"] and "uncompressed" in error["message"]


@pytest.mark.parametrize("fields", [
    ["Content-Encoding: br"], ["content-encoding: Identity, DEFLATE"], ["Content-Encoding: x\"y"],
    ["Content-Encoding: identity", "Content-Encoding: zstd"],
])
def test_any_coding_in_any_form(server, fields):
    said = exchange(server, *fields, f"Content-Length: {len(BODY)}", body=BODY)
    assert refusal(said)[0].startswith("HTTP/1.1 415 ")


def test_a_client_that_waits_is_not_asked_for_the_body(server):
    said = exchange(server, "Content-Encoding: gzip", "Expect: 100-continue",
                    "Content-Length: 1000000")
    assert said.startswith("HTTP/1.1 415 ") and "100 Continue" not in said


@pytest.mark.parametrize("length", ["Content-Length: {}", "Transfer-Encoding: chunked"])
def test_what_follows_on_the_connection_is_no_request(server, length):
    """The body was not read: its bytes must not be taken for the next request."""
    inner = (f"GET /version HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n\r\n" * 2).encode()
    said = exchange(server, "Content-Encoding: gzip", length.format(len(inner)), body=inner)
    assert said.count("HTTP/1.1 ") == 1 and said.startswith("HTTP/1.1 415 ")


@pytest.mark.parametrize("coding", ["identity", "IDENTITY", "", " , identity,"])
def test_identity_is_plain(server, coding):
    said = exchange(server, f"Content-Encoding: {coding}", "Connection: close",
                    f"Content-Length: {len(BODY)}", body=BODY)
    assert said.startswith("HTTP/1.1 200 ")


@pytest.mark.parametrize("fields", [
    ["Transfer-Encoding: gzip, chunked"], ["Transfer-Encoding: gzip"],
    ["Transfer-Encoding: gzip", "Transfer-Encoding: chunked"],
])
def test_transfer_codings_but_chunked(server, fields):
    chunks = f"{len(BODY):x}\r\n".encode() + BODY + b"\r\n0\r\n\r\n"
    status, error = refusal(exchange(server, *fields, body=chunks))
    assert status == "HTTP/1.1 400 Bad Request"
    assert "gzip" in error["message"]


def test_a_request_without_a_body_has_no_coding(server):
    said = exchange(server, "Content-Encoding: gzip", "Connection: close", method="GET",
                    path="/v1/models")
    assert said.startswith("HTTP/1.1 200 ")
