"""Fields of vLLM beside those of OpenAI, through the official client."""

import pytest
from test_openai import PROMPT, Server


@pytest.fixture(scope="module")
def server():
    running = Server()
    yield running
    assert running.stop() == 0


def extra(server, **fields):
    return server.complete(max_tokens=24, extra_body={"return_token_ids": True, **fields})


def test_bad_words_and_allowed_tokens(server):
    plain = extra(server)
    word = plain.choices[0].text.split()[1]
    assert word not in extra(server, bad_words=[word]).choices[0].text.split()
    ids = plain.choices[0].token_ids
    allowed = sorted(set(ids))[:3]
    assert set(extra(server, allowed_token_ids=allowed).choices[0].token_ids) <= set(allowed)
    assert len(ids) == plain.usage.completion_tokens
    assert len(plain.choices[0].prompt_token_ids) == plain.usage.prompt_tokens


def test_truncated_prompts(server):
    whole = extra(server).choices[0].prompt_token_ids
    cut = extra(server, truncate_prompt_tokens=3)
    assert cut.choices[0].prompt_token_ids == whole[-3:]
    assert cut.choices[0].text == extra(server, truncate_prompt_tokens=3).choices[0].text


def test_salts_isolate(server):
    long = PROMPT * 20

    def cached(salt):
        answer = server.complete(long, max_tokens=1, extra_body={"cache_salt": salt})
        return answer.usage.prompt_tokens_details.cached_tokens

    assert [cached(salt) > 0 for salt in ("a", "b", "a", "b")] == [False, False, True, True]


def test_a_message_is_continued(server):
    messages = [
        {"role": "user", "content": "Tell me a story."},
        {"role": "assistant", "content": "Once upon a time"},
    ]
    answer = server.chat(messages=messages, extra_body={"continue_final_message": True})
    again = server.chat(messages=messages, extra_body={"add_generation_prompt": False})
    assert answer.usage.prompt_tokens <= again.usage.prompt_tokens


def test_fields_without_effect_are_named(server):
    raw = server.client.completions.with_raw_response.create(
        model=server.name, prompt=PROMPT, max_tokens=1, user="me", extra_body={"wibble": 1}
    )
    assert raw.headers["x-nibble-warning"] == "ignored: user; 1 unknown field"
