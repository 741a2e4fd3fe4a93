"""The official Anthropic client against /v1/messages: an engine that says what it is told shows
blocks and events, the embedded model the rest.
"""

import anthropic
import pytest

from serving import FAKE, FakeServer, says
from test_openai import KEY, Server

TOOL = {
    "name": "get_weather",
    "description": "The weather of a place.",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
    },
}
WEATHER = ("get_weather", {"city": "Oslo"})


def client_of(url, **arguments):
    arguments.setdefault("api_key", KEY)
    return anthropic.Anthropic(base_url=url, max_retries=0, timeout=60, **arguments)


@pytest.fixture(scope="module")
def fake():
    if not FAKE.exists():
        pytest.skip(f"no {FAKE}: NIBBLE_BIN is not in a folder of a build")
    server = FakeServer()
    yield client_of(server.url)
    assert server.stop() == 0


@pytest.fixture(scope="module")
def server():
    running = Server()
    yield running
    assert running.stop() == 0


def ask(client, text, **arguments):
    arguments.setdefault("max_tokens", 400)
    arguments.setdefault("model", "fake")
    arguments.setdefault("messages", [{"role": "user", "content": text}])
    return client.messages.create(**arguments)


def blocks(message):
    return [
        block.model_dump(exclude_none=True, exclude={"signature", "parsed_output"})
        for block in message.content
    ]


def test_text_of_a_model(server):
    client = client_of(f"http://127.0.0.1:{server.port}")
    arguments = {"model": server.name, "max_tokens": 24, "extra_body": {"temperature": 0}}
    whole = ask(client, "Tell me a story.", **arguments)
    assert whole.type == "message" and whole.role == "assistant" and whole.id.startswith("msg_")
    assert whole.stop_reason in ("end_turn", "max_tokens")
    with client.messages.stream(
        messages=[{"role": "user", "content": "Tell me a story."}], **arguments
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert text == whole.content[0].text == final.content[0].text
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    counted = client.messages.count_tokens(
        model=server.name, messages=[{"role": "user", "content": "Tell me a story."}]
    )
    used = whole.usage
    assert counted.input_tokens == used.input_tokens + used.cache_read_input_tokens


def test_a_changing_billing_line_does_not_hurt_the_prefix_cache(server):
    client = client_of(f"http://127.0.0.1:{server.port}")
    rules = "You tell short stories about animals, and nothing else. " * 8
    used = []
    for number in range(2):
        answer = ask(
            client,
            "Begin.",
            model=server.name,
            max_tokens=4,
            system=[
                {"type": "text", "text": f"x-anthropic-billing-header: cch={number}{number:032};"},
                {"type": "text", "text": rules},
            ],
        )
        used.append(answer.usage)
    assert used[1].cache_read_input_tokens > 0.5 * used[0].input_tokens
    assert (
        used[1].input_tokens + used[1].cache_read_input_tokens
        == used[0].input_tokens + used[0].cache_read_input_tokens
    )


def test_thinking_text_and_calls_are_blocks(fake):
    said = says("I will look.", thought="Which city?", calls=[WEATHER, WEATHER])
    answer = ask(fake, said, tools=[TOOL], thinking={"type": "enabled", "budget_tokens": 1024})
    expected = [
        {"type": "thinking", "thinking": "Which city?"},
        {"type": "text", "text": "I will look."},
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Oslo"}},
        {"type": "tool_use", "name": "get_weather", "input": {"city": "Oslo"}},
    ]
    got = blocks(answer)
    ids = [block.pop("id") for block in got if block["type"] == "tool_use"]
    assert got == expected and len(set(ids)) == 2
    assert answer.stop_reason == "tool_use"
    one = {"type": "auto", "disable_parallel_tool_use": True}
    alone = ask(fake, said, tools=[TOOL], tool_choice=one)
    assert [block.type for block in alone.content] == ["thinking", "text", "tool_use"]


def test_a_stream_is_the_whole_answer(fake):
    said = says("I will look.", thought="Which city?", calls=[WEATHER])
    whole = ask(fake, said, tools=[TOOL])
    with fake.messages.stream(
        model="fake", max_tokens=400, tools=[TOOL], messages=[{"role": "user", "content": said}]
    ) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    got, wanted = blocks(final), blocks(whole)
    for block in got + wanted:
        block.pop("id", None)
    assert got == wanted
    assert final.stop_reason == "tool_use" == whole.stop_reason
    assert final.usage.model_dump() == whole.usage.model_dump()
    assert kinds[0] == "message_start" and kinds[-2:] == ["message_delta", "message_stop"]
    assert kinds.count("content_block_start") == 3 == kinds.count("content_block_stop")
    assert {"thinking", "text", "input_json"} <= set(kinds)


def test_a_conversation_with_a_tool(fake):
    turn = ask(fake, says(calls=[WEATHER]), tools=[TOOL])
    call = turn.content[-1]
    messages = [
        {"role": "user", "content": "What is the weather in Oslo? "},
        {"role": "assistant", "content": turn.content},
        {
            "role": "user",
            "content": [
                {
                    "type": "tool_result",
                    "tool_use_id": call.id,
                    "content": [{"type": "text", "text": "Rain"}],
                },
                {"type": "text", "text": ", so take an umbrella.$"},
            ],
        },
    ]
    answer = ask(fake, "", messages=messages)
    # The template of the fake puts one content after the other.
    assert answer.content[0].text == "What is the weather in Oslo? Rain, so take an umbrella."
    assert answer.stop_reason == "end_turn"


def test_ends(fake):
    stopped = ask(fake, "one two three$", stop_sequences=[" three"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", " three")
    assert stopped.content[0].text == "one two"
    assert ask(fake, "abc", max_tokens=5).stop_reason == "max_tokens"
    assert ask(fake, "abc$").stop_reason == "end_turn"


def test_errors_are_those_of_the_client(fake):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}}
    with pytest.raises(anthropic.BadRequestError, match='"image" are not supported') as caught:
        ask(fake, "", messages=[{"role": "user", "content": [image]}])
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.NotFoundError):
        ask(fake, "abc", model="nobody")
    bearer = client_of(str(fake.base_url), api_key=None, auth_token=KEY)
    assert ask(bearer, "abc$").content[0].text == "abc"
    with pytest.raises(anthropic.AuthenticationError):
        ask(client_of(str(fake.base_url), api_key="wrong"), "abc$")
