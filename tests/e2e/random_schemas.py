"""Random JSON schemas, and whether a server's answers keep to them (jsonschema is the oracle).

Usage: random_schemas.py --url http://127.0.0.1:8000/v1 [--count 1000] [--seed 1] [--max-tokens 300]
Asks for one answer for each schema at temperature 2 and prints what came of them as JSON. The exit
status is 1 when a finished answer is not valid.
"""

import argparse
import collections
import concurrent.futures
import datetime
import ipaddress
import json
import random
import re
import sys
import urllib.parse
import uuid

import jsonschema
import openai

PATTERNS = [r"^[a-z]{2,5}$", r"\d{3}-\d{4}", r"^(yes|no)+$", r"[A-Z][a-z]*( [A-Z][a-z]*)?",
            r"^[^@\s]+@[a-z]+\.(com|org)$", r"[\w.-]{1,8}", r"^#[0-9a-f]{6}$", r"^$|^x.y$"]
FORMATS = ["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri"]
NAMES = ["a", "ab", "name", "value", "x y", "é", "q\"uote", "id", "tags"]

CHECKER = jsonschema.FormatChecker(formats=())
ORACLES = {"date": datetime.date.fromisoformat, "time": datetime.time.fromisoformat,
           "date-time": datetime.datetime.fromisoformat, "ipv4": ipaddress.IPv4Address,
           "ipv6": ipaddress.IPv6Address, "uuid": uuid.UUID,
           "email": lambda text: re.fullmatch(r"[^@\s]+@[^@\s]+\.[^@\s]+", text),
           "hostname": lambda text: text.encode("idna"),
           "duration": lambda text: re.fullmatch(r"P(?=.)(\d+[YMWD])*(T(\d+[HMS])+)?", text),
           "uri": lambda text: urllib.parse.urlsplit(text).netloc and urllib.parse.urlsplit(text)}
for _name, _oracle in ORACLES.items():
    CHECKER.checks(_name, raises=ValueError)(
        lambda value, oracle=_oracle: not isinstance(value, str) or bool(oracle(value)))


class Schemas:
    def __init__(self, rng):
        self.rng = rng
        self.refs = 0

    def chance(self, part):
        return self.rng.random() < part

    def string(self):
        out = {"type": "string"}
        kind = self.rng.randrange(6)
        if kind == 0:
            out["maxLength"] = self.rng.randrange(0, 30)
        elif kind == 1:
            out["minLength"] = self.rng.randrange(1, 4)
            out["maxLength"] = out["minLength"] + self.rng.randrange(0, 12)
        elif kind == 2:
            out["pattern"] = self.rng.choice(PATTERNS)
        elif kind == 3:
            out["format"] = self.rng.choice(FORMATS)
        elif kind == 4:
            out["minLength"] = 1
        if self.chance(0.03):
            out["maxLength"] = 5  # beside a pattern or a format: refused
        return out

    def number(self):
        out = {"type": self.rng.choice(["integer", "number"])}
        low = self.rng.choice([-1000, -7, -1.5, 0, 0.25, 3, 99.999999, 12345])
        width = self.rng.choice([0.5, 1, 2, 10, 333, 10.75, 1e6])
        if out["type"] == "integer":
            low, width = int(low), int(width) + 1
        if self.chance(0.5):
            out[self.rng.choice(["minimum", "exclusiveMinimum"])] = low
        if self.chance(0.5):
            out[self.rng.choice(["maximum", "exclusiveMaximum"])] = low + width
        if out["type"] == "integer" and self.chance(0.1):
            out = {"type": "integer", "minimum": low, "maximum": low + 40, "multipleOf": 7}
        return out

    def literal(self):
        values = ["a", "é\"\\", "", 0, -3, 2.5, True, None, [1, "x"], {"k": [None]}, "\n", 1e-7]
        if self.chance(0.4):
            return {"const": self.rng.choice(values)}
        return {"enum": self.rng.sample(values, self.rng.randrange(1, 5))}

    def array(self, depth):
        out = {"type": "array"}
        if self.chance(0.3):
            out["prefixItems"] = [self.schema(depth - 1) for _ in range(self.rng.randrange(1, 3))]
            if self.chance(0.5):
                out["items"] = False
        else:
            out["items"] = self.schema(depth - 1)
            if self.chance(0.4):
                out["minItems"] = self.rng.randrange(0, 3)
            out["maxItems"] = out.get("minItems", 0) + self.rng.randrange(0, 4)
        return out

    def object(self, depth):
        out = {"type": "object"}
        kind = self.rng.randrange(8)
        if kind == 0:
            out["additionalProperties"] = self.schema(depth - 1)
            if self.chance(0.5):
                out["minProperties"] = 1
            if self.chance(0.5):
                out["maxProperties"] = 2
            return out
        if kind == 1:
            out["patternProperties"] = {r"^x-[a-z]{1,3}$": self.schema(depth - 1)}
            return out
        names = self.rng.sample(NAMES, self.rng.randrange(1, 5))
        out["properties"] = {name: self.schema(depth - 1) for name in names}
        out["required"] = self.rng.sample(names, self.rng.randrange(0, len(names) + 1))
        if kind == 2:
            out["additionalProperties"] = self.schema(depth - 1)
        elif kind < 5:
            out["additionalProperties"] = False
        return out

    def union(self, depth):
        kind = self.rng.randrange(3)
        if kind == 0:
            return {"anyOf": [self.schema(depth - 1) for _ in range(self.rng.randrange(1, 4))]}
        if kind == 1:
            return {"oneOf": [self.string(), self.array(depth), {"type": "null"}]}
        tags = self.rng.sample(["cat", "dog", "cow"], 2)
        return {"oneOf": [{"type": "object", "required": ["kind"],
                           "properties": {"kind": {"const": tag}, "v": self.schema(depth - 1)}}
                          for tag in tags]}

    def refused(self, depth):
        inner = self.schema(depth - 1)
        return self.rng.choice([
            {"allOf": [inner, {"type": "object"}]}, {"not": inner}, {"if": {}, "then": inner},
            {"type": "array", "items": inner, "uniqueItems": True},
            {"type": "array", "contains": inner}, {"type": "number", "multipleOf": 0.01},
            {"oneOf": [{"type": "integer"}, {"minimum": 3}]}, {"minLength": 2, "minimum": 1}])

    def schema(self, depth):
        if self.chance(0.02):
            return self.refused(max(depth, 1))
        if depth <= 0 or self.chance(0.35):
            return self.rng.choice([self.string, self.number, self.literal,
                                    lambda: {"type": "boolean"}, lambda: {"type": ["null", "integer"]}])()
        if self.chance(0.08):
            self.refs += 1
            return {"$ref": "#/$defs/node"}
        return self.rng.choice([self.array, self.object, self.object, self.union])(depth)

    def whole(self):
        out = self.object(3) if self.chance(0.7) else self.schema(3)
        if self.refs:
            out = {**out, "$defs": {"node": {
                "type": "object", "required": ["n"], "additionalProperties": False,
                "properties": {"n": self.number(), "next": {"anyOf": [{"type": "null"},
                                                                     {"$ref": "#/$defs/node"}]}}}}}
        return out


def random_schema(seed):
    return Schemas(random.Random(seed)).whole()


def check_answer(client, model, seed, max_tokens):
    """("valid" | "length" | "refused" | "invalid: ...", schema, text)."""
    schema = random_schema(seed)
    try:
        answer = client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": "Go on."}], temperature=2, seed=seed,
            max_tokens=max_tokens,
            response_format={"type": "json_schema", "json_schema": {"name": "s", "schema": schema}})
    except openai.BadRequestError as error:
        named = "schema: #" in str(error)
        return ("refused" if named else f"invalid: refused without a place: {error}"), schema, ""
    choice = answer.choices[0]
    text = choice.message.content
    if choice.finish_reason != "stop":
        return choice.finish_reason, schema, text
    try:
        jsonschema.Draft202012Validator(
            schema, format_checker=CHECKER).validate(json.loads(text))
    except (jsonschema.ValidationError, ValueError) as error:
        return f"invalid: {str(error)[:300]}", schema, text
    return "valid", schema, text


def check_many(client, model, seeds, max_tokens):
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        return list(pool.map(lambda seed: check_answer(client, model, seed, max_tokens), seeds))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--url", required=True)
    parser.add_argument("--key", default="none")
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-tokens", type=int, default=300)
    asked = parser.parse_args()
    client = openai.OpenAI(base_url=asked.url, api_key=asked.key, max_retries=0, timeout=600)
    model = client.models.list().data[0].id
    seeds = range(asked.seed, asked.seed + asked.count)
    results = check_many(client, model, seeds, asked.max_tokens)
    counts = collections.Counter(outcome.split(":")[0] for outcome, _, _ in results)
    for seed, (outcome, schema, text) in zip(seeds, results):
        if outcome.startswith("invalid"):
            print(f"seed {seed}: {outcome}\n  {json.dumps(schema)}\n  {text!r}", file=sys.stderr)
    print(json.dumps({"schemas": asked.count, **counts}))
    return 1 if counts["invalid"] else 0


if __name__ == "__main__":
    sys.exit(main())
