"""Log probabilities of prompt tokens, as lm-eval asks for them.

The oracle: a prompt's token, generated behind the tokens before it because a bias wants it so, has
the same log probability, since that is one of the untouched logits.
"""

import json

import pytest
from test_openai import PROMPT, Server


@pytest.fixture(scope="module")
def server():
    running = Server("--max-num-batched-tokens", "16", "--max-num-seqs", "4")
    yield running
    running.stop()


def generated(server, tokens):
    """What the model makes of each token behind those before it."""
    values = []
    for end in range(1, len(tokens)):
        answer = server.complete(
            tokens[:end],
            max_tokens=1,
            temperature=0,
            logprobs=1,
            logit_bias={str(tokens[end]): 100},
            extra_body={"ignore_eos": True},
        )
        values.append(answer.choices[0].logprobs.token_logprobs[0])
    return values


def test_lm_evals_request(server):
    tokens = server.post("/tokenize", json.dumps({"prompt": PROMPT}))[1]["tokens"]
    long = tokens + list(range(60, 90))  # several steps
    prompts = [tokens, tokens[:3], long]
    answer = server.complete(
        prompts, max_tokens=1, temperature=0, logprobs=1, echo=True, seed=1234
    )
    for prompt, choice in zip(prompts, answer.choices, strict=True):
        given = choice.logprobs
        assert given.token_logprobs[0] is None and given.top_logprobs[0] is None
        assert len(given.tokens) == len(given.text_offset) == len(prompt) + 1
        assert given.token_logprobs[1:-1] == generated(server, prompt)
        for value, top in zip(given.token_logprobs[1:], given.top_logprobs[1:], strict=True):
            assert value <= max(top.values())
    only = server.complete(prompts, max_tokens=0, logprobs=1, echo=True)
    for scored, choice in zip(only.choices, answer.choices, strict=True):
        assert scored.logprobs.token_logprobs == choice.logprobs.token_logprobs[:-1]
        assert choice.text.startswith(scored.text)
    assert only.usage.completion_tokens == 0


def test_prompt_logprobs_of_a_chat(server):
    answer = server.chat(max_tokens=1, extra_body={"prompt_logprobs": 2})
    scored = answer.model_extra["prompt_logprobs"]
    assert scored[0] is None and len(scored) == answer.usage.prompt_tokens
    for tokens in scored[1:]:
        ranks = [token["rank"] for token in tokens.values()]
        assert {1, 2} <= set(ranks)
        assert all(token["logprob"] <= 0 for token in tokens.values())
