#!/usr/bin/env python3
"""Where an INT4 cache loses: keys or values, which layers, which heads of a model.

    bench/quality/kv_error.py MODEL TEXT OUT.jsonl [--windows 16]     needs torch and transformers
    bench/quality/kv_error.py --chart OUT.jsonl OUT.svg               needs neither

In transformers and single precision, keys (after rotation) and values pass through the codes that
`--kv-cache-dtype int4` stores on CPUs, in chosen layers and heads alone; the rest of the cache stays
as it is. A row of OUT.jsonl has what was coded and by how much the mean negative log-likelihood of
the scored tokens rose, in nats. Rows that the file already has are kept.
"""
import argparse
import json
import math
import pathlib


def int4_lines(x):
    """Values of the last axis's rows as INT4 codes with a scale and an offset give them back."""
    import torch
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    best, least = None, None

    def codes_of(scale, offset):
        return torch.where(scale > 0, (x - offset) / scale.clamp_min(1e-30), 0 * x).round().clamp(0, 15)

    for share in (1.0, 0.92, 0.84):
        scale = (high - low) * share / 15
        offset = (high + low) / 2 - scale * 7.5
        codes = codes_of(scale, offset)
        for _ in range(3):
            mean_q, mean_x = codes.mean(-1, keepdim=True), x.mean(-1, keepdim=True)
            spread = ((codes - mean_q) ** 2).sum(-1, keepdim=True)
            scale = ((codes - mean_q) * (x - mean_x)).sum(-1, keepdim=True) / spread.clamp_min(1e-30)
            offset = mean_x - scale * mean_q
            codes = codes_of(scale, offset)
        value = codes * scale + offset
        error = ((value - x) ** 2).sum(-1, keepdim=True)
        best = value if best is None else torch.where(error < least, value, best)
        least = error if least is None else torch.minimum(error, least)
    return best


def coded(x, what):
    """x [1, heads, tokens, head_dim] with `what["heads"]` (all: None) coded."""
    x = x.float()
    shape = what.get("form", "plain")
    source = x
    if shape == "centred":      # minus each channel's mean over the window: what folding a bias does
        source = x - x.mean(2, keepdim=True)
    elif shape == "rotated":
        import torch
        from scipy.linalg import hadamard
        h = torch.tensor(hadamard(x.shape[-1]), dtype=x.dtype) / math.sqrt(x.shape[-1])
        source = x @ h
    value = int4_lines(source)
    if shape == "centred":
        value = value + x.mean(2, keepdim=True)
    elif shape == "rotated":
        value = value @ h.T
    if what.get("heads") is None:
        return value
    out = x.clone()
    out[:, what["heads"]] = value[:, what["heads"]]
    return out


def cache_that_codes(what):
    from transformers.cache_utils import DynamicCache

    class Coded(DynamicCache):
        def update(self, keys, values, layer, *args, **kwargs):
            if what["layers"] is None or layer in what["layers"]:
                if "k" in what["of"]:
                    keys = coded(keys, what)
                if "v" in what["of"]:
                    values = coded(values, what)
            return super().update(keys, values, layer, *args, **kwargs)

    return Coded()


def mean_nll(model, windows, what):
    import torch
    total, count = 0.0, 0
    with torch.inference_mode():
        for ids in windows:
            logits = model(ids[None], past_key_values=cache_that_codes(what), use_cache=True).logits[0, :-1]
            total += torch.nn.functional.cross_entropy(logits.float(), ids[1:], reduction="sum").item()
            count += len(ids) - 1
    return total / count


def cases(layers, heads):
    for form in ("plain", "centred", "rotated"):
        for of in ("kv", "k", "v"):
            yield {"of": of, "layers": None, "heads": None, "form": form}
    for of in "kv":
        for layer in range(layers):
            yield {"of": of, "layers": [layer], "heads": None, "form": "plain"}
    for layer in range(layers):
        for head in range(heads):
            yield {"of": "k", "layers": [layer], "heads": [head], "form": "plain"}


def measure(args):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    torch.set_num_threads(args.threads)
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    ids = tokenizer(pathlib.Path(args.text).read_text(), add_special_tokens=False, return_tensors="pt").input_ids[0]
    windows = [ids[i * 512:(i + 1) * 512] for i in range(args.windows)]
    path = pathlib.Path(args.out)
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    done = {json.dumps(r["coded"], sort_keys=True): r for r in rows}

    def value(what):
        key = json.dumps(what, sort_keys=True)
        if key not in done:
            done[key] = {"coded": what, "nll": mean_nll(model, windows, what), "tokens": 511 * len(windows)}
            with path.open("a") as file:
                file.write(json.dumps(done[key]) + "\n")
        return done[key]["nll"]

    base = value({"of": "", "layers": None, "heads": None})
    config = model.config
    for what in cases(config.num_hidden_layers, config.num_key_value_heads):
        print(json.dumps(what), f"{value(what) - base:+.5f} nats", flush=True)


def bars(rows, base, of, layers):
    """The rise of each layer by itself; for keys with its heads."""
    by_layer, by_head = [0.0] * layers, {}
    for row in rows:
        what = row["coded"]
        if what["of"] == of and what["layers"]:
            rise = row["nll"] - base
            if what["heads"] is None:
                by_layer[what["layers"][0]] = rise
            else:
                by_head[what["layers"][0], what["heads"][0]] = rise
    return by_layer, by_head


def chart(jsonl, svg):
    rows = [json.loads(line) for line in pathlib.Path(jsonl).read_text().splitlines()]
    base = next(r["nll"] for r in rows if r["coded"]["of"] == "")
    layers = 1 + max(r["coded"]["layers"][0] for r in rows if r["coded"]["layers"])
    keys, heads = bars(rows, base, "k", layers)
    values, _ = bars(rows, base, "v", layers)
    top = max([*keys, *values, *heads.values()])
    width, height, left, foot = 880, 300, 60, 40
    step = (width - left - 10) / layers
    colours = {"k": "#2b6cb0", "v": "#dd6b20", 0: "#90cdf4", 1: "#63b3ed", 2: "#4299e1"}

    def y(rise):
        return height - foot - max(rise, 0) / top * (height - foot - 40)

    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">',
           f'<rect width="{width}" height="{height}" fill="white"/>']
    for i in range(5):
        rise = top * i / 4
        out.append(f'<line x1="{left}" x2="{width - 10}" y1="{y(rise):.1f}" y2="{y(rise):.1f}" stroke="#ddd"/>'
                   f'<text x="{left - 6}" y="{y(rise) + 4:.1f}" text-anchor="end">{rise:.3f}</text>')

    def bar(x, w, rise, colour):
        out.append(f'<rect x="{x:.1f}" width="{w:.1f}" y="{y(rise):.1f}" height="{y(0) - y(rise):.1f}" fill="{colour}"/>')

    for layer in range(layers):
        x = left + layer * step
        bar(x + 1, step * 0.3, keys[layer], colours["k"])
        for head in sorted(h for at, h in heads if at == layer):
            bar(x + 1 + step * (0.32 + 0.1 * head), step * 0.1, heads[layer, head], colours[head % 3])
        bar(x + 1 + step * 0.65, step * 0.22, values[layer], colours["v"])
        out.append(f'<text x="{x + step / 2:.1f}" y="{height - foot + 14}" text-anchor="middle">{layer}</text>')
    out.append(f'<text x="{width / 2}" y="{height - 8}" text-anchor="middle">layer that alone has an INT4 cache</text>')
    out.append(f'<text x="{left}" y="16">rise of the negative log-likelihood, nats a token: '
               f'<tspan fill="{colours["k"]}">keys</tspan>, <tspan fill="{colours[1]}">keys of each head</tspan>, '
               f'<tspan fill="{colours["v"]}">values</tspan></text></svg>')
    pathlib.Path(svg).write_text("\n".join(out) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chart", nargs=2, metavar=("JSONL", "SVG"))
    parser.add_argument("model", nargs="?")
    parser.add_argument("text", nargs="?")
    parser.add_argument("out", nargs="?")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    if args.chart:
        chart(*args.chart)
    elif args.out:
        measure(args)
    else:
        parser.error("MODEL, TEXT and OUT.jsonl are needed")


if __name__ == "__main__":
    main()
