"""Null was not always the same as absent: /detokenize ignored `model`, and null members of messages
counted as given (content, tool_calls), which templates then saw."""

import json

import pytest

from test_openai import Server

COMPLETION = {"prompt": "Once", "max_tokens": 1}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
ROUTES = [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT),
          ("/tokenize", {"prompt": "Once"}), ("/tokenize", {"messages": CHAT["messages"]}),
          ("/detokenize", {"tokens": [70]})]
# Everything that OpenAI's clients may send as null, and the fields beside it that vLLM has.
NULLABLE = """model frequency_penalty logit_bias logprobs max_tokens max_completion_tokens n
    presence_penalty seed stop stream stream_options suffix temperature top_p user best_of echo
    response_format service_tier store metadata tools tool_choice parallel_tool_calls top_logprobs
    reasoning_effort modalities prediction min_tokens top_k min_p repetition_penalty stop_token_ids
    ignore_eos skip_special_tokens include_stop_str_in_output add_special_tokens
    chat_template_kwargs chat_template add_generation_prompt continue_final_message""".split()
TEMPLATE = ("{% for message in messages %}{{ message.role }}"
            "{% for name in ['tool_calls', 'name', 'refusal'] %}"
            "{% if name in message %}[{{ name }}]{% endif %}{% endfor %}"
            ":{{ message.content }}\n{% endfor %}")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    template = tmp_path_factory.mktemp("template") / "members.jinja"
    template.write_text(TEMPLATE)
    running = Server("--chat-template", str(template))
    yield running
    assert running.stop() == 0


def post(server, path, body):
    return server.post(path, json.dumps(body))


def text_of(server, messages):
    """What the template makes of messages."""
    status, answer = post(server, "/tokenize", {"messages": messages})
    assert status == 200, answer
    return post(server, "/detokenize", {"tokens": answer["tokens"]})[1]["prompt"]


@pytest.mark.parametrize("path, body", ROUTES)
def test_model(server, path, body):
    for model in (None, server.name):
        assert post(server, path, {**body, "model": model})[0] == 200
    status, answer = post(server, path, {**body, "model": "other"})
    assert (status, answer["error"]["code"]) == (404, "model_not_found")
    status, answer = post(server, path, {**body, "model": 5})
    assert (status, answer["error"]["param"]) == (400, "model")


@pytest.mark.parametrize("path, body", ROUTES)
def test_every_nullable_field(server, path, body):
    nulls = {name: None for name in NULLABLE}
    status, answer = post(server, path, {**nulls, **body})
    assert status == 200, answer
    if "choices" in answer:
        assert answer["model"] == server.name and len(answer["choices"]) == 1


def test_null_members_of_messages_are_absent(server):
    sparse = [{"role": "user", "content": "a", "name": None},
              {"role": "assistant", "content": "b", "tool_calls": None, "refusal": None}]
    full = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    assert text_of(server, sparse) == text_of(server, full) == "user:a\nassistant:b\n"


def test_an_answer_without_text_may_come_back(server):
    for empty in ({"content": None}, {"content": None, "tool_calls": None}, {}):
        assert text_of(server, [{"role": "assistant", **empty}]) == "assistant:\n"


@pytest.mark.parametrize("role", ["user", "system"])
def test_missing_content_is_missing_however_it_is_written(server, role):
    for empty in ({}, {"content": None}, {"content": None, "tool_calls": None}):
        status, answer = post(server, "/v1/chat/completions", {"messages": [{"role": role, **empty}]})
        assert (status, answer["error"]["param"]) == (400, "messages[0].content")
