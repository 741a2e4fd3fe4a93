"""Writes vectors.jsonl: patterns, texts and whether fnmatch.fnmatchcase() of this Python says that they
match, one object a line: names of modules, and random ones over few characters, as many that match as
not.

    python3 tests/data/fnmatch/make_vectors.py > tests/data/fnmatch/vectors.jsonl
"""

import fnmatch
import json
import random

NAMES = ["model.layers.0.self_attn.q_proj", "model.layers.11.mlp.experts.3.down_proj", "lm_head",
         "model.layers.3.block_sparse_moe.gate", "a[0].b", "a*b", "été"]
PATTERNS = ["*", "lm_head", "*.q_proj", "model.layers.[0-3].*", "model.layers.[!0].*", "*.[qkv]_proj",
            "model.layers.1?.*", "*experts.[0-9]*", "a[[]0].b", "a[*]b", "*.[!a-p]*", "?t?", "lm_head[",
            "[]]", "[!]]", "[!!]", "[a-]", "[-a]", "[b-a]", "[!b-a]", "[]-a]", "[a-c-e]", "[^a]", "[\\]",
            "[a&&b]", "[b-a!x]", "[--a]", "[a--]", "", "**", "[", "[!", "[]", "é*"]


def main():
    choose = random.Random(7)
    pairs = [(pattern, name) for pattern in PATTERNS for name in NAMES + list("!]-^[\\&abcx") + [""]]
    while len(pairs) < 2500:
        pattern = "".join(choose.choice("abc[]!-^*?\\") for _ in range(choose.randrange(1, 9)))
        if choose.random() < 0.6:
            inside = "".join(choose.choice("abcd!-^[]&\\") for _ in range(choose.randrange(1, 7)))
            pattern = choose.choice(["", "*", "a"]) + f"[{inside}]" + choose.choice(["", "*", "b?"])
        text = "".join(choose.choice("abcd]!-^[&\\") for _ in range(choose.randrange(0, 4)))
        if fnmatch.fnmatchcase(text, pattern) or choose.random() < 0.1:
            pairs.append((pattern, text))
    for pattern, text in pairs:
        print(json.dumps({"pattern": pattern, "text": text,
                          "match": fnmatch.fnmatchcase(text, pattern)}, ensure_ascii=False))


if __name__ == "__main__":
    main()
