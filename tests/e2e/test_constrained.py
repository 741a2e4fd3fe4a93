"""Constrained answers through the official client: random weights cannot break the form."""

import json
import re

import pydantic
import pytest

import random_schemas
from test_openai import Server


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


def test_log_probabilities_are_those_of_the_model(server):
    free = ask(server, logprobs=True, top_logprobs=3, max_tokens=1).choices[0].logprobs.content[0]
    held = ask(server, logprobs=True, top_logprobs=3, max_tokens=1,
               extra_body={"regex": "[0-9]+"}).choices[0].logprobs.content[0]
    assert [each.token for each in held.top_logprobs] == [each.token for each in free.top_logprobs]
    assert held.token.isdigit()
