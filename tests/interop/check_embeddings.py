#!/usr/bin/env python3
"""Compares a server's embeddings with transformers' hidden states: the largest angle and the
largest difference of a number. Needs torch and transformers.

    nibble serve MODEL --port 8000 [--pooling mean] &
    python tests/interop/check_embeddings.py MODEL http://127.0.0.1:8000 [last|mean]
"""

import json
import pathlib
import sys
import urllib.request

import torch
import transformers

TEXT = pathlib.Path(__file__).parents[1] / "data/text/the_black_cat.txt"
MOST_ANGLE = 0.02  # radians: BF16 has 8 bits


def main():
    folder, url = sys.argv[1:3]
    pooling = sys.argv[3] if len(sys.argv) > 3 else "last"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    story = TEXT.read_text()
    texts = ["The capital of France is Paris.", "a", story[:400], story[400:4000]]
    body = json.dumps({"input": texts}).encode()
    request = urllib.request.Request(url + "/v1/embeddings", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=600) as answer:
        data = json.load(answer)["data"]
    worst = 0.0
    for text, entry in zip(texts, data):
        ids = tokenizer(text)["input_ids"]
        with torch.no_grad():
            states = model(torch.tensor([ids])).last_hidden_state[0].double()
        expected = states[-1] if pooling == "last" else states.mean(0)
        expected = expected / expected.norm()
        got = torch.tensor(entry["embedding"], dtype=torch.float64)
        angle = torch.atan2((got - expected).norm() / 2, (got + expected).norm() / 2).item() * 2
        difference = (got - expected).abs().max().item()
        print(f"{len(ids):5} tokens: angle {angle:.5f}, largest difference {difference:.5f}")
        worst = max(worst, angle)
    if worst > MOST_ANGLE:
        sys.exit(f"an angle of {worst:.5f} is above {MOST_ANGLE}")


if __name__ == "__main__":
    main()
