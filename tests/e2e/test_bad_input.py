"""What clients do wrong, by accident or by intent: nothing hangs or leaks, and each gets one error
object in the shape of its route with a reason. docs/serving.md has the table of it."""

import http.client
import json
import os
import pathlib
import socket
import struct
import threading
import time

import pytest

from test_openai import KEY, Server, eventually

MIB = 1 << 20
CHAT = "/v1/chat/completions"
BOUND = 10  # seconds, for anything that is refused, on a busy machine


@pytest.fixture(scope="module")
def server():
    running = Server("--tool-call-parser", "hermes", "--shutdown-timeout", "2")
    log = threading.Thread(target=running.process.stderr.read, daemon=True)
    log.start()  # a full pipe would stop the server
    yield running
    assert running.stop() == 0


def head(path, length, more=""):
    return (f"POST {path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {KEY}\r\n"
            f"Content-Type: application/json\r\nContent-Length: {length}\r\n{more}\r\n").encode()


def connect(server, receive_buffer=None):
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(120)
    client.connect(("127.0.0.1", server.port))
    return client


def read_all(client):
    data = b""
    while piece := client.recv(1 << 16):
        data += piece
    return data


def request(server, path, body, seconds=BOUND):
    """Status and answer, within so many seconds."""
    begin = time.monotonic()
    client = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    body = body if isinstance(body, (bytes, str)) else json.dumps(body)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {KEY}"}
    client.request("POST", path, body, headers)
    answer = client.getresponse()
    data = answer.read()
    client.close()
    assert time.monotonic() - begin < seconds, f"{path} took {time.monotonic() - begin:.1f} s"
    return answer.status, json.loads(data), data


def refused(server, path, body, seconds=BOUND):
    """The error of a request that is refused; checks its shape."""
    status, answer, data = request(server, path, body, seconds)
    assert status == 400, (path, answer)
    assert len(data) < 2500, "an error repeats what the client sent"
    error = answer["error"]
    if path.startswith("/v1/messages"):
        assert answer["type"] == "error" and set(error) == {"type", "message"}
    else:
        assert set(answer) == {"error"} and set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["message"]
    return error


def chat(**fields):
    return {"messages": [{"role": "user", "content": "Hi."}], "max_tokens": 4, **fields}


def resident(server):
    status = pathlib.Path(f"/proc/{server.process.pid}/status").read_text()
    return int(status.split("VmRSS:")[1].split()[0]) * 1024


def descriptors(server):
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


def idle(server):
    return (server.metric("vllm:num_requests_running") == 0
            and server.metric("vllm:num_requests_waiting") == 0
            and server.metric("nibble:kv_cache_pages_used") == 0)


def reset(client):
    """Closes a connection as one that broke: with a reset."""
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


# Clients

LONG = json.dumps(chat(max_tokens=900, stream=True, ignore_eos=True)).encode()


def test_clients_that_vanish_leave_nothing(server):
    assert eventually(lambda: idle(server), 30)
    before = descriptors(server)
    for end in (reset, socket.socket.close):
        for sent in (b"", b"POST /v1", head(CHAT, len(LONG)), head(CHAT, len(LONG)) + LONG[:9],
                     head(CHAT, len(LONG)) + LONG):
            for _ in range(4):
                client = connect(server)
                client.sendall(sent)
                end(client)
        client = connect(server)
        client.sendall(head(CHAT, len(LONG)) + LONG)
        client.recv(200)  # amid the answer
        end(client)
    assert eventually(lambda: idle(server), 30)
    assert eventually(lambda: descriptors(server) <= before + 2, 30)


def test_a_client_that_closes_its_sending_half_ends_its_request(server):
    client = connect(server)
    client.sendall(head(CHAT, len(LONG)) + LONG)
    client.recv(200)
    client.shutdown(socket.SHUT_WR)
    assert eventually(lambda: idle(server), 5)
    client.close()


def test_requests_that_never_arrive_end_in_an_error(server):
    """A head, a body, and one that comes a byte at a time; others are answered meanwhile."""
    sent = (b"POST /v1/chat", head(CHAT, 100) + b"{", head("/v1/messages", 100))
    clients = [connect(server) for _ in sent]
    for client, data in zip(clients, sent):
        client.sendall(data)
    begin = time.monotonic()
    answers = [None] * len(sent)

    def wait(index):
        answers[index] = read_all(clients[index])

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(len(sent))]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads) and time.monotonic() - begin < 60:
        time.sleep(1)
        try:
            clients[2].sendall(b" ")
        except OSError:
            pass
        assert server.healthy()
    for thread in threads:
        thread.join(1)
    assert 25 < time.monotonic() - begin < 45
    for answer in answers:
        assert answer.startswith(b"HTTP/1.1 408 "), answer
        assert b"did not arrive whole within 30 s" in answer
    assert json.loads(answers[1].split(b"\r\n\r\n")[1])["error"]["type"] == "invalid_request_error"
    assert json.loads(answers[2].split(b"\r\n\r\n")[1])["type"] == "error"


def test_a_reader_that_takes_nothing_is_cut(server):
    """Every event of /generate has all log probabilities so far: far more than may lie unread."""
    before = resident(server)
    body = json.dumps({
        "text": "Once", "stream": True, "return_logprob": True, "top_logprobs_num": 20,
        "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True},
    }).encode()
    client = connect(server, receive_buffer=4096)
    client.sendall(head("/generate", len(body)) + body)
    assert eventually(lambda: not idle(server), 10)
    assert eventually(lambda: idle(server), 90)
    assert resident(server) < before + 400 * MIB
    assert server.metric("vllm:request_success_total") >= 0
    with pytest.raises(OSError):  # the connection was reset amid the answer
        while client.recv(1 << 20):
            pass
        raise ConnectionError("ended without its last chunk")
    client.close()


# Bodies

def test_bodies_of_16_mib(server):
    space = 16 * MIB
    texts = {
        CHAT: '{"messages": [{"role": "user", "content": "%s"}]}',
        "/v1/completions": '{"prompt": "%s"}',
        "/v1/embeddings": '{"input": "%s"}',
        "/v1/responses": '{"input": "%s"}',
        "/v1/messages": '{"max_tokens": 4, "messages": [{"role": "user", "content": "%s"}]}',
        "/generate": '{"text": "%s"}',
        "/tokenize": '{"prompt": "%s"}',
    }
    for path, frame in texts.items():
        body = frame % ("x" * (space - len(frame) + 2))
        assert len(body) == space
        assert "maximum context length" in refused(server, path, body)["message"]
        status, answer, _ = request(server, path, body + " ")
        assert status == 413 and "16777216 bytes" in answer["error"]["message"]
    ids = ",".join(["7"] * (space // 2 - 20))
    assert "maximum context" in refused(server, "/v1/completions", '{"prompt":[%s]}' % ids)["message"]
    many = ",".join(['"a"'] * (space // 4 - 20))
    assert "at once" in refused(server, "/v1/completions", '{"prompt":[%s]}' % many)["message"]
    assert "at once" in refused(server, "/v1/embeddings", '{"input":[%s]}' % many)["message"]
    turns = ",".join(['{"role":"user","content":"a"}'] * (space // 30 - 20))
    refused(server, CHAT, '{"messages":[%s]}' % turns, 30)
    unknown = ",".join(f'"k{i}":0' for i in range(space // 13 - 100))
    assert request(server, CHAT, json.dumps(chat())[:-1] + "," + unknown + "}", 30)[0] == 200


@pytest.mark.parametrize("bomb", [
    "[" * MIB,
    '{"messages":' * 100_000,
    '{"messages":' + "[" * 300 + "]" * 300 + "}",
    '{"a":' + "9" * MIB + "}",
    '{"a":1e999999}',
    '{"a":1,"a":2}',
    '{"messages":"\\ud800"}',
    b'{"messages":"\xff\xfe"}',
    "",
    "nul",
    "\0" * MIB,
], ids=lambda bomb: str(len(bomb)))
def test_json_bombs(server, bomb):
    for path in (CHAT, "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages",
                 "/v1/messages/count_tokens", "/generate", "/tokenize", "/detokenize"):
        refused(server, path, bomb)


def form(schema):
    return {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}


def nested(depth, inner):
    for _ in range(depth):
        inner = {"type": "object", "properties": {"a": inner}}
    return inner


WIDE = {f"property_{i}": {"type": "string"} for i in range(5000)}


def pattern(number):
    return {"type": "string", "pattern": f"^{number}(" + "|".join(["[a-z0-9]{1,10}"] * 20) + ")$"}


HOSTILE_SCHEMAS = {
    "itself": {"$ref": "#"},
    "each other": {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"},
                                                  "b": {"anyOf": [{"$ref": "#/$defs/a"}]}}},
    "wide": {"type": "object", "properties": WIDE},
    "a long name again and again": {"type": "object", "properties": {"n" * MIB: {
        "type": "object", "properties": {f"p{i}": {"minLength": 1} for i in range(4000)}}}},
    "many patterns": {"type": "object", "properties": {f"p{i}": pattern(i) for i in range(250)}},
    "many lengths": {"type": "object", "properties": {
        f"p{i}": {"type": "string", "minLength": 32, "maxLength": 40 + i} for i in range(250)}},
    "a long enum": {"enum": [f"value {i} " + "x" * 90 for i in range(9000)]},
    "a long constant": {"const": "x" * (900 << 10)},
    "chains of references": {
        "anyOf": [{"oneOf": [{"$ref": "#/$defs/c0"}] * 60} for _ in range(500)],
        "$defs": {f"c{i}": {"$ref": f"#/$defs/c{i + 1}"} for i in range(3000)}
        | {"c3000": {"type": "null"}}},
    "multiples": {"type": "integer", "multipleOf": 2, "minimum": 0, "maximum": 10**15},
    "a free name beside many": {"type": "object", "properties": WIDE, "additionalProperties": True},
}


@pytest.mark.parametrize("name", HOSTILE_SCHEMAS)
def test_hostile_schemas(server, name):
    schema = HOSTILE_SCHEMAS[name]
    error = refused(server, CHAT, chat(response_format=form(schema)))
    assert error["param"] == "response_format.json_schema.schema"
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    for choice in ("required", "auto"):
        error = refused(server, CHAT, chat(tools=[tool], tool_choice=choice))
        assert error["param"].startswith(("tools", "tool_choice"))
    claude = {"name": "f", "strict": True, "input_schema": schema}
    refused(server, "/v1/messages", chat(tools=[claude], tool_choice={"type": "any"}))
    text = {"format": {"type": "json_schema", "name": "n", "schema": schema}}
    assert refused(server, "/v1/responses", {"input": "Hi.", "text": text})["param"] == "text.format"


def test_many_tools_share_one_budget(server):
    tools = [{"type": "function", "function": {"name": f"f{i}", "strict": True, "parameters": {
        "type": "object", "properties": {"p": pattern(i)}}}} for i in range(128)]
    for choice in ("required", "auto"):
        assert refused(server, CHAT, chat(tools=tools, tool_choice=choice))["message"]


def test_recursive_schemas_that_end_are_enforced(server):
    tree = {"$ref": "#/$defs/node", "$defs": {"node": {
        "type": "object", "required": ["next"],
        "properties": {"next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}}}}}
    many = {"type": "array", "minItems": 60000, "items": {"type": "string"}}
    for schema, begin in ((tree, "{"), (many, "[")):
        status, answer, _ = request(server, CHAT, chat(response_format=form(schema)))
        assert status == 200 and answer["choices"][0]["message"]["content"].startswith(begin)
    deep = chat(response_format=form(nested(40, {"type": "null"})))
    assert request(server, CHAT, deep)[0] == 200
    refused(server, CHAT, chat(response_format=form(nested(200, {"type": "null"}))))


@pytest.mark.parametrize("pattern", [
    "(a{100}){100}", "((((a{9}){9}){9}){9}){9}", "(a|b|c|d){1,9999}", "[a-z]{4000}",
    "(.*)*" * 300 + "{2,128}", "(" * 2000 + ")" * 2000, "(a|aa)*" * 1000, ".{1,1000}" * 20,
    "a?" * 400, ".?" * 40, "[a-z]?" * 100, "(a?){120}", "(?=a)b", "(a)\\1", "[", "a" * 20000, "((a|b){1,128}c){1,128}",
], ids=lambda pattern: pattern[:24])
def test_hostile_expressions(server, pattern):
    for fields, param in (({"regex": pattern}, "regex"),
                          ({"structured_outputs": {"regex": pattern}}, "structured_outputs.regex"),
                          ({"guided_regex": pattern}, "guided_regex")):
        assert refused(server, CHAT, chat(**fields))["param"] == param
    schema = {"type": "string", "pattern": pattern}
    assert "#/pattern" in refused(server, CHAT, chat(response_format=form(schema)))["message"]


@pytest.mark.parametrize("grammar", [
    "root ::= root", "root ::= a\na ::= b\nb ::= a", "root ::= " + "(" * 5000,
    'root ::= "a"{1000}{1000}', 'root ::= ("a"{40}){60}', "root ::= [", 'x ::= "a"',
    'root ::= "' + "a" * 70000 + '"', "root ::= " + "[a-z]? " * 100, 'root ::= "a" x\nx ::= x',
    "root ::= " + "x " * 200 + '\nx ::= "a"?', "root ::= " + "[a-z] " * 10000, "\0",
], ids=lambda grammar: grammar[:24])
def test_hostile_grammars(server, grammar):
    error = refused(server, CHAT, chat(ebnf=grammar))
    if "x ::= x" not in grammar:  # which is found out behind the first token
        assert error["param"] == "ebnf"


def test_choices_without_end(server):
    choices = ["x" * 400 + str(i) for i in range(4000)]
    assert refused(server, CHAT, chat(guided_choice=choices))["param"] == "guided_choice"


def test_tools_with_bad_names(server):
    def tool(name):
        return {"type": "function", "function": {"name": name, "parameters": {}}}

    def responses(name):
        return {"type": "function", "name": name, "parameters": {}}

    for tools, place in (([tool("f"), tool("f")], 1), ([tool("")], 0), ([tool(None)], 0),
                         ([tool(7)], 0), ([{}], 0), ([7], 0)):
        error = refused(server, CHAT, chat(tools=tools))
        assert error["param"].startswith(f"tools[{place}]"), error
    for tools in ([responses("f"), responses("f")], [responses("")]):
        refused(server, "/v1/responses", {"input": "Hi.", "tools": tools})
    for names in (["f", "f"], [""]):
        tools = [{"name": name, "input_schema": {"type": "object"}} for name in names]
        assert "name" in refused(server, "/v1/messages", chat(tools=tools))["message"]


def test_arguments_of_a_mebibyte(server):
    for arguments in ("x" * MIB, json.dumps({"a": "x" * MIB}), "[" * MIB, json.dumps([0] * 300_000)):
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        turns = [{"role": "user", "content": "Hi."},
                 {"role": "assistant", "content": "", "tool_calls": [call]},
                 {"role": "tool", "tool_call_id": "c", "content": "y" * MIB}]
        refused(server, CHAT, chat(messages=turns))
        items = [{"role": "user", "content": "Hi."},
                 {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
                 {"type": "function_call_output", "call_id": "c", "output": "y" * MIB}]
        refused(server, "/v1/responses", {"input": items})
    blocks = [{"type": "tool_use", "id": "c", "name": "f", "input": {"a": "x" * MIB}}]
    result = [{"type": "tool_result", "tool_use_id": "c", "content": "y" * MIB}]
    refused(server, "/v1/messages", chat(messages=[{"role": "user", "content": "Hi."},
                                                  {"role": "assistant", "content": blocks},
                                                  {"role": "user", "content": result}]))


def test_texts_of_clients_are_not_repeated(server):
    big = "Z" * MIB
    for path, body in ((CHAT, chat(model=big)), (CHAT, chat(**{big: 1, "n": 0})),
                       (CHAT, chat(tool_choice=big)), (CHAT, chat(reasoning_effort=big)),
                       (CHAT, chat(messages=[{"role": big, "content": ""}])),
                       (CHAT, chat(response_format=form({"properties": {big: {"not": {}}}}))),
                       (CHAT, chat(response_format=form({"$ref": "#/" + big}))),
                       ("/v1/embeddings", {"input": "a", "encoding_format": big}),
                       ("/v1/responses", {"input": [{"type": big}]}),
                       ("/v1/responses", {"input": "a", "previous_response_id": big}),
                       ("/v1/messages", chat(messages=[{"role": "user", "content": [{"type": big}]}])),
                       ("/generate", {"text": "a", "sampling_params": {big: 1, "n": 0}})):
        status, _, data = request(server, path, body)
        assert status in (400, 404) and data.count(b"Z") < 1100, path


def test_memory_comes_back(server):
    """Behind all of the above."""
    request(server, CHAT, chat())
    assert eventually(lambda: idle(server), 30)
    assert eventually(lambda: resident(server) < 900 * MIB, 30), f"{resident(server) / MIB:.0f} MiB"
    assert server.healthy()


def test_sigterm_under_load():
    running = Server("--shutdown-timeout", "1")
    streams = []
    for i in range(48):
        body = json.dumps({"prompt": f"Story {i}", "max_tokens": 900, "stream": i % 2 == 0,
                           "ignore_eos": True}).encode()
        client = connect(running)
        client.sendall(head("/v1/completions", len(body), "Connection: close\r\n") + body)
        streams.append(client)
    half = connect(running)
    half.sendall(head(CHAT, 1000) + b"{")
    assert eventually(lambda: running.metric("vllm:num_requests_running") > 8, 30)
    begin = time.monotonic()
    running.process.terminate()
    answers = [read_all(client) for client in streams]
    assert running.process.wait(timeout=30) == 0
    half.close()
    assert time.monotonic() - begin < 20
    ends = []
    for i, answer in enumerate(answers):
        body = answer.split(b"\r\n\r\n", 1)[1]
        over = b'"finish_reason":"length"' in body
        told = b"the server is shutting down" in body
        assert over or told, answer[-300:]
        if i % 2 == 0:
            assert body.count(b"data: [DONE]") == 1
        ends.append(told)
    assert any(ends)
    log = running.process.stderr.read()
    assert "internal error" not in log
