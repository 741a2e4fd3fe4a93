"""Arguments of earlier calls, which clients send as JSON text, reached chat templates as text: those
of Llama 3, Qwen2.5, Mistral and others wrote them as a string in a string."""

import json

import pytest

from test_openai import Server

AS_JSON = "{{ call.function.arguments | tojson }}"
AS_TEXT = "{{ 'args: ' + call.function.arguments }}"
TEMPLATE = (
    "{% for message in messages %}{% for call in message.tool_calls or [] %}<ARGUMENTS>"
    "{% endfor %}{% endfor %}"
)
MESSAGES = [
    {"role": "user", "content": "add"},
    {
        "role": "assistant",
        "tool_calls": [
            {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}},
            {"id": "2", "type": "function", "function": {"name": "add", "arguments": "none"}},
        ],
    },
]


@pytest.mark.parametrize(
    "arguments, expected",
    [(AS_JSON, '{"a": 1}"none"'), (AS_TEXT, 'args: {"a": 1}args: none')],
)
def test_templates_get_what_they_write(tmp_path, arguments, expected):
    template = tmp_path / "calls.jinja"
    template.write_text(TEMPLATE.replace("<ARGUMENTS>", arguments))
    server = Server("--chat-template", str(template))
    try:
        _, answer = server.post("/tokenize", json.dumps({"messages": MESSAGES}))
        _, text = server.post("/detokenize", json.dumps({"tokens": answer["tokens"]}))
        assert text["prompt"] == expected
    finally:
        assert server.stop() == 0
