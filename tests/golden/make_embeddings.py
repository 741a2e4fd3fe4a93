#!/usr/bin/env python3
"""Makes storyteller_embeddings.json: the final hidden states of models/storyteller in F32, as
transformers computes them, of the last token and as a mean, of length one. Needs torch and
transformers.

    python tests/golden/make_embeddings.py
"""

import json
import pathlib

import torch
import transformers

HERE = pathlib.Path(__file__).parent
MODEL = HERE.parents[1] / "models/storyteller"
STORY = (HERE.parents[1] / "tests/data/text/the_black_cat.txt").read_text()
TEXTS = ["Once upon a time there was a king.", "a", STORY[:3000]]


def main():
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    model = transformers.AutoModel.from_pretrained(MODEL, dtype=torch.float32).eval()
    entries = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        with torch.no_grad():
            states = model(torch.tensor([ids])).last_hidden_state[0].double()
        entry = {"text": text, "tokens": ids}
        for name, vector in (("last", states[-1]), ("mean", states.mean(0))):
            entry[name] = [round(x, 7) for x in (vector / vector.norm()).tolist()]
        entries.append(entry)
    versions = {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}
    text = json.dumps({"versions": versions, "entries": entries}, indent=0)
    (HERE / "storyteller_embeddings.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
