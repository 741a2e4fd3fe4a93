"""Constrained answers through the official clients: random weights cannot break the form."""

import json
import re

import anthropic
import openai
import pydantic
import pytest

import random_schemas
from serving import FAKE, FakeServer, says
from test_openai import KEY, Server


@pytest.fixture(scope="module")
def server():
    running = Server("--tool-call-parser", "hermes")
    yield running
    running.process.kill()
    running.process.wait()


def ask(server, **fields):
    return server.client.chat.completions.create(
        model=server.name, messages=[{"role": "user", "content": "Tell me."}], temperature=2, seed=3,
        **{"max_tokens": 300, **fields})


def test_answers_keep_to_random_schemas(server):
    outcomes = random_schemas.check_many(server.client, server.name, range(5000, 5060), 300)
    wrong = [each for each in outcomes if each[0].startswith("invalid")]
    assert not wrong, wrong
    kinds = [each[0] for each in outcomes]
    assert kinds.count("valid") >= 20 and kinds.count("refused") >= 1, kinds


def test_streamed_answers_are_the_same(server):
    schema = {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 2, "maxItems": 4}
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}
    whole = ask(server, response_format=form).choices[0].message.content
    parts = ask(server, response_format=form, stream=True)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in parts) == whole
    assert 2 <= len(json.loads(whole)) <= 4


class Person(pydantic.BaseModel):
    name: str = pydantic.Field(max_length=12)
    age: int = pydantic.Field(ge=0, le=120)
    friend: str | None = pydantic.Field(max_length=5)


def test_the_client_parses_models_of_pydantic(server):
    answer = server.client.chat.completions.parse(
        model=server.name, messages=[{"role": "user", "content": "Who?"}], temperature=2, seed=1,
        max_tokens=400, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person)


def test_responses_are_parsed_into_models_of_pydantic(server):
    answer = server.client.responses.parse(
        model=server.name, input="Who?", temperature=2, max_output_tokens=400, text_format=Person)
    assert answer.status == "completed"
    assert isinstance(answer.output_parsed, Person)
    with server.client.responses.stream(
            model=server.name, input="Who?", temperature=2, max_output_tokens=400,
            text_format=Person) as stream:
        events = list(stream)
        final = stream.get_final_response()
    assert isinstance(final.output_parsed, Person)
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert Person.model_validate_json(text) == final.output_parsed


class Pay(pydantic.BaseModel):
    """Pays somebody."""

    cents: int = pydantic.Field(ge=1, le=999)
    to: str = pydantic.Field(max_length=8)


def test_calls_are_parsed_into_models_of_pydantic(server):
    answer = server.client.chat.completions.parse(
        model=server.name, messages=[{"role": "user", "content": "Pay."}], temperature=2, seed=1,
        max_tokens=400, tools=[openai.pydantic_function_tool(Pay)], tool_choice="required",
        parallel_tool_calls=False)
    (call,) = answer.choices[0].message.tool_calls
    assert isinstance(call.function.parsed_arguments, Pay)
    answer = server.client.responses.parse(
        model=server.name, input="Pay.", temperature=2, max_output_tokens=400,
        tools=[openai.pydantic_function_tool(Pay)["function"] | {"type": "function"}],
        tool_choice="required", parallel_tool_calls=False)
    (call,) = [item for item in answer.output if item.type == "function_call"]
    assert 1 <= json.loads(call.arguments)["cents"] <= 999


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "pay"}])
def test_anthropic_clients_get_the_calls_that_they_require(server, choice):
    client = anthropic.Anthropic(base_url=f"http://127.0.0.1:{server.port}", api_key=KEY,
                                 max_retries=0, timeout=60)
    tools = [{"name": name, "input_schema": TOOL["function"]["parameters"]}
             for name in ("pay", "lend")]
    arguments = dict(model=server.name, max_tokens=400, tools=tools,
                     extra_body={"temperature": 2},
                     tool_choice={**choice, "disable_parallel_tool_use": True},
                     messages=[{"role": "user", "content": "Pay."}])
    with client.messages.stream(**arguments) as stream:
        streamed = stream.get_final_message()
    for answer in (client.messages.create(**arguments), streamed):
        (block,) = answer.content
        assert answer.stop_reason == "tool_use" and block.type == "tool_use"
        assert block.name in (("pay",) if choice["type"] == "tool" else ("pay", "lend"))
        assert 1 <= block.input["cents"] <= 999 and block.input["to"] in ("Ann", "Bob")


def test_expressions_choices_and_grammars(server):
    def text(**extra):
        return ask(server, extra_body=extra).choices[0].message.content

    assert re.fullmatch(r"[a-f]{3}-\d+!", text(regex=r"[a-f]{3}-\d{1,5}!"))
    assert text(structured_outputs={"choice": ["maybe", "never"]}) in ("maybe", "never")
    assert re.fullmatch(r"\d(\+\d){0,3}", text(ebnf='root ::= [0-9] ("+" [0-9]){0,3}'))
    assert text(guided_regex="zz") == "zz"
    many = ask(server, n=4, extra_body={"regex": "[xy]{5}"}).choices
    assert all(re.fullmatch("[xy]{5}", choice.message.content) for choice in many)


TOOL = {"type": "function", "function": {
    "name": "pay", "strict": True, "parameters": {
        "type": "object", "additionalProperties": False, "required": ["cents", "to"],
        "properties": {"cents": {"type": "integer", "minimum": 1, "maximum": 999},
                       "to": {"enum": ["Ann", "Bob"]}}}}}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "pay"}}])
def test_required_calls_are_calls(server, choice):
    answer = ask(server, tools=[TOOL], tool_choice=choice, parallel_tool_calls=False).choices[0]
    assert answer.finish_reason == "tool_calls" and answer.message.content is None
    (call,) = answer.message.tool_calls
    arguments = json.loads(call.function.arguments)
    assert call.function.name == "pay" and 1 <= arguments["cents"] <= 999
    assert arguments["to"] in ("Ann", "Bob")


@pytest.fixture(scope="module")
def fake():
    if not FAKE.exists():
        pytest.skip(f"no {FAKE}: NIBBLE_BIN is not in a folder of a build")
    server = FakeServer()
    yield server
    assert server.stop() == 0


# The fake says what it is told as far as its grammar lets it.
WRONG = says("I will pay.", thought="How much?", calls=[("pay", {"cents": 0, "to": "Eve"})])


def test_calls_of_strict_tools_obey_their_schema(fake):
    client = openai.OpenAI(base_url=fake.url + "/v1", api_key=fake.key, max_retries=0, timeout=60)
    arguments = dict(model="fake", messages=[{"role": "user", "content": WRONG}])
    loose = json.loads(json.dumps(TOOL).replace("true", "false"))
    said = client.chat.completions.create(tools=[loose], **arguments).choices[0].message
    assert json.loads(said.tool_calls[0].function.arguments) == {"cents": 0, "to": "Eve"}
    for choice in ("auto", None):
        extra = {"tool_choice": choice} if choice else {}
        said = client.chat.completions.create(tools=[TOOL], **extra, **arguments).choices[0].message
        paid = json.loads(said.tool_calls[0].function.arguments)
        assert 1 <= paid["cents"] <= 999 and paid["to"] in ("Ann", "Bob")
        assert said.content == "I will pay."
    answer = client.responses.create(model="fake", input=WRONG,
                                     tools=[TOOL["function"] | {"type": "function"}])
    paid = json.loads(answer.output[-1].arguments)
    assert 1 <= paid["cents"] <= 999 and paid["to"] in ("Ann", "Bob")
    other = anthropic.Anthropic(base_url=fake.url, api_key=fake.key, max_retries=0, timeout=60)
    tool = {"name": "pay", "strict": True, "input_schema": TOOL["function"]["parameters"]}
    answer = other.messages.create(model="fake", max_tokens=400, tools=[tool],
                                   messages=[{"role": "user", "content": WRONG}])
    assert 1 <= answer.content[-1].input["cents"] <= 999


def test_log_probabilities_are_those_of_the_model(server):
    free = ask(server, logprobs=True, top_logprobs=3, max_tokens=1).choices[0].logprobs.content[0]
    held = ask(server, logprobs=True, top_logprobs=3, max_tokens=1,
               extra_body={"regex": "[0-9]+"}).choices[0].logprobs.content[0]
    assert [each.token for each in held.top_logprobs] == [each.token for each in free.top_logprobs]
    assert held.token.isdigit()
