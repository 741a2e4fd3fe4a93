"""The official OpenAI client against /v1/responses: an engine that says what it is told shows items
and events, the embedded model the rest.
"""

import json

import openai
import pytest

from serving import FAKE, FakeServer, says
from test_openai import Server

TOOL = {
    "type": "function",
    "name": "get_weather",
    "description": "The weather of a place.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": False,
}
WEATHER = ("get_weather", {"city": "Oslo"})
ORDER = """response.created response.in_progress
    response.output_item.added response.content_part.added response.reasoning_text.delta
    response.reasoning_text.done response.content_part.done response.output_item.done
    response.output_item.added response.content_part.added response.output_text.delta
    response.output_text.done response.content_part.done response.output_item.done
    response.output_item.added response.function_call_arguments.delta
    response.function_call_arguments.done response.output_item.done response.completed""".split()


@pytest.fixture(scope="module")
def fake():
    if not FAKE.exists():
        pytest.skip(f"no {FAKE}: NIBBLE_BIN is not in a folder of a build")
    server = FakeServer()
    yield openai.OpenAI(base_url=server.url + "/v1", api_key=server.key, max_retries=0, timeout=60)
    assert server.stop() == 0


@pytest.fixture(scope="module")
def server():
    running = Server()
    yield running
    assert running.stop() == 0


def test_text_of_a_model(server):
    arguments = {"model": server.name, "input": "Tell me a story.", "temperature": 0}
    whole = server.client.responses.create(max_output_tokens=24, **arguments)
    assert whole.object == "response" and whole.id.startswith("resp_")
    assert whole.status in ("completed", "incomplete") and whole.error is None
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    chat = server.chat(max_tokens=24)
    assert whole.output_text == chat.choices[0].message.content
    events = list(server.client.responses.create(max_output_tokens=24, stream=True, **arguments))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text == events[-1].response.output_text
    assert events[-1].type == f"response.{whole.status}"
    kept = server.client.responses.retrieve(whole.id)
    assert kept.output_text == whole.output_text
    server.client.responses.delete(whole.id)
    with pytest.raises(openai.NotFoundError):
        server.client.responses.retrieve(whole.id)


def test_items_of_an_answer(fake):
    said = says("I will look.", thought="Which city?", calls=[WEATHER])
    answer = fake.responses.create(model="fake", input=said, tools=[TOOL, {"type": "web_search"}])
    thought, text, call = answer.output
    assert thought.type == "reasoning" and thought.content[0].text == "Which city?"
    assert answer.output_text == "I will look." == text.content[0].text
    assert call.name == "get_weather" and json.loads(call.arguments) == {"city": "Oslo"}
    assert answer.status == "completed"


def test_a_stream_is_the_whole_answer(fake):
    said = says("I will look.", thought="Which city?", calls=[WEATHER])
    whole = fake.responses.create(model="fake", input=said, tools=[TOOL])
    with fake.responses.stream(model="fake", input=said, tools=[TOOL]) as stream:
        events = list(stream)
        final = stream.get_final_response()
    kinds = [event.type for event in events]
    assert list(dict.fromkeys(kinds)) == list(dict.fromkeys(ORDER))
    joined = [k for i, k in enumerate(kinds) if i == 0 or k != kinds[i - 1]]
    assert joined == ORDER
    assert [event.sequence_number for event in events] == list(range(len(events)))

    def plain(response):
        return [item.model_dump(exclude={"id", "call_id", "parsed_arguments"})
                for item in response.output]

    final_items = plain(final)
    for item in final_items:
        for part in item.get("content") or []:
            part.pop("parsed", None)
    assert final_items == plain(whole)


def test_replayed_items_and_outputs_of_calls(fake):
    first = fake.responses.create(model="fake", input=says(calls=[WEATHER]), tools=[TOOL])
    call = first.output[-1]
    replayed = {key: getattr(call, key) for key in ("type", "call_id", "name", "arguments")}
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain"}
    answer = fake.responses.create(
        model="fake",
        instructions="In Oslo: ",
        input=[replayed, output, {"role": "user", "content": ", so take an umbrella.$"}],
    )
    # The template of the fake puts one content after the other.
    assert answer.output_text == "In Oslo: Rain, so take an umbrella."
    again = fake.responses.create(
        model="fake",
        input=[{"role": "user", "content": "Once "}, *first.output, output, {"role": "user", "content": "!$"}],
    )
    assert again.output_text == "Once Rain!"


def test_a_response_is_continued(fake):
    first = fake.responses.create(model="fake", input="one$")
    second = fake.responses.create(model="fake", input="two$", previous_response_id=first.id)
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens == len("one$" + "one" + "two$")
    with pytest.raises(openai.BadRequestError, match="not found"):
        fake.responses.create(model="fake", input="x", previous_response_id="resp_unknown")


def test_ends_and_errors(fake):
    cut = fake.responses.create(model="fake", input="abc", max_output_tokens=5)
    assert cut.status == "incomplete" and cut.incomplete_details.reason == "max_output_tokens"
    with pytest.raises(openai.BadRequestError) as caught:
        fake.responses.create(model="fake", input=[{"type": "item_reference", "id": "x"}])
    assert caught.value.param == "input[0]"
    with pytest.raises(openai.NotFoundError):
        fake.responses.create(model="nobody", input="x")


def test_cancel(fake):
    stream = fake.responses.create(model="fake", input="abc", max_output_tokens=990, stream=True)
    begun = next(iter(stream))
    assert fake.responses.cancel(begun.response.id).status == "cancelled"
    last = list(stream)[-1]
    assert last.response.status == "cancelled"
    with pytest.raises(openai.BadRequestError):
        fake.responses.cancel(begun.response.id)
