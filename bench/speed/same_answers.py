"""Whether a server gives the same greedy answers to requests alone and beside each other, for
kimi_serving.py. Prompts are random token ids; no prompt is read from the prefix cache."""
import concurrent.futures
import json
import random
import urllib.request


def answer(url, prompt, output_len, salt):
    """Token ids, and how much likelier each was than the next best, in natural logarithms."""
    body = {"prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True, "logprobs": 2, "cache_salt": salt}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request) as response:
        choice = json.load(response)["choices"][0]
    # Tokens without a text have one place in a position's object: that of the last of them.
    margins = [of_token - min(best.values()) for of_token, best in
               zip(choice["logprobs"]["token_logprobs"], choice["logprobs"]["top_logprobs"])]
    return choice["token_ids"], margins


def compare(url, vocabulary, count, prompt_len, output_len):
    """How many of `count` answers are equal one by one and all at once; of each other one, where it
    first differs and the margin of the token there, alone."""
    source = random.Random(7)
    prompts = [[source.randrange(vocabulary) for _ in range(prompt_len)] for _ in range(count)]
    alone = [answer(url, prompt, output_len, "alone") for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(count) as pool:
        beside = list(pool.map(lambda prompt: answer(url, prompt, output_len, "beside"), prompts))
    differing = []
    for (tokens, margins), (others, _) in zip(alone, beside):
        at = next((i for i, pair in enumerate(zip(tokens, others)) if pair[0] != pair[1]), None)
        if at is not None:
            differing.append({"at": at, "margin": margins[at]})
    every = sorted(margin for _, margins in alone for margin in margins)
    return {"answers": count, "prompt_len": prompt_len, "output_len": output_len,
            "equal": count - len(differing), "differing": differing,
            "median_margin": every[len(every) // 2]}
