#!/usr/bin/env python3
"""What each form of an INT4 KV cache loses: KL divergence to a BF16 cache, in all and by position.

    bench/quality/kv_forms.py --nibble NIBBLE OUT.json NAME=MODEL,TEXT,CALIBRATION ...

Writes rows "kv" of OUT.json: model, form, options, window, tokens, kld, kld_error, same_top,
ppl_ratio, bits (of a number, parameters included, on a CPU), by_position. Rows that the file has of
other models stay. Models are read through links in a temporary folder, where their sidecars are made.
`bench/quality/comet.py` makes table and chart of them.
"""

import argparse
import json
import math
import pathlib
import tempfile

import methods

SIDECAR = "nibble_kv.json"
WINDOWS = (512, 1024)


def links_to(model, folder):
    for file in pathlib.Path(model).iterdir():
        if file.name != SIDECAR:
            (folder / file.name).symlink_to(file.resolve())


def with_forms(sidecar, **forms):
    """The sidecar with the given form of keys, values and page keys in all layers."""
    changed = json.loads(json.dumps(sidecar))
    for layer in changed["layers"]:
        for half in ("keys", "values"):
            layer[half]["form"] = forms.get(half, layer[half]["form"])
        if "page" in forms:
            layer["keys"]["page_form"] = forms["page"]
    return changed


def cases(sidecar):
    """Forms, options, and the sidecar that they need or none."""
    plain = with_forms(sidecar, keys="plain", values="plain", page="plain")
    yield "int4", "plain", plain
    yield "int4", "turned", None
    yield "int4", "best of each layer", sidecar
    yield "int4_page", "plain", plain
    yield "int4_page", "values turned", with_forms(plain, values="turned")
    yield "int4_page", "turned", None
    yield "int4_page", "best of each layer", sidecar
    yield "int4_static", "best of each layer", sidecar


def bits(form, dim):
    return {"int4": 4 + 64 / dim, "int4_page": 4 + 0.5 * (32 / 64 + 32 / dim), "int4_static": 4}[form]


def measure(flags, name, model, text, calibration):
    config = json.loads((pathlib.Path(model) / "config.json").read_text())
    dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = pathlib.Path(temporary)
        links_to(model, folder)
        methods.run(flags.nibble, "calibrate-kv", folder, "--calibrate", calibration,
                    "--calibration-windows", flags.windows)
        path = folder / SIDECAR
        sidecar = json.loads(path.read_text())
        for form, options, wanted in cases(sidecar):
            path.unlink(missing_ok=True)
            if wanted is not None:
                path.write_text(json.dumps(wanted))
            for window in WINDOWS:
                found = json.loads(methods.run(
                    flags.nibble, "eval", "kld", folder, folder, "--text", text, "--window", window,
                    "--kv-cache-dtype", form, "--base-kv-cache-dtype", "bf16", "--json"))
                row = {"model": name, "form": form, "options": options, "window": window,
                       "tokens": found["tokens"], "kld": found["kld"], "kld_error": found["kld_error"],
                       "same_top": found["same_top"], "ppl_ratio": math.exp(found["ln_ppl_ratio"]),
                       "bits": bits(form, dim),
                       "by_position": [[b["from"], b["to"], b["kld"]] for b in found["by_context"]]}
                print(json.dumps(row), flush=True)
                yield row


def chart(rows, svg):
    """KL divergence by form and options, a bar for each, models side by side."""
    rows = [row for row in rows if row.get("window") == WINDOWS[0]]
    models = list(dict.fromkeys(row["model"] for row in rows))
    labels = list(dict.fromkeys((row["form"], row["options"]) for row in rows))
    left, bar, gap, height = 210, 130, 30, 22 * len(labels) + 40
    width = left + len(models) * (bar + gap)
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
           f'font-family="sans-serif" font-size="11">',
           f'<rect width="{width}" height="{height}" fill="white"/>']
    for y, (form, options) in enumerate(labels):
        out.append(f'<text x="4" y="{42 + 22 * y}">{form}, {options}</text>')
    for column, model in enumerate(models):
        x = left + column * (bar + gap)
        own = {(row["form"], row["options"]): row["kld"] for row in rows if row["model"] == model}
        most = max(own.values())
        out.append(f'<text x="{x}" y="18" font-weight="bold">{model}</text>')
        for y, label in enumerate(labels):
            if label in own:
                length = 0.7 * bar * own[label] / most
                colour = {"int4": "#9aa5b1", "int4_page": "#2a7f62", "int4_static": "#c97b2d"}[label[0]]
                out.append(f'<rect x="{x}" y="{31 + 22 * y}" width="{length:.1f}" height="14" '
                           f'fill="{colour}"/>')
                out.append(f'<text x="{x + length + 4:.1f}" y="{42 + 22 * y}">{own[label]:.4f}</text>')
    out.append("</svg>")
    pathlib.Path(svg).write_text("\n".join(out) + "\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nibble", default="build/cpu/tools/nibble")
    parser.add_argument("--windows", type=int, default=32, help="of the calibration")
    parser.add_argument("json", type=pathlib.Path)
    parser.add_argument("models", nargs="+", metavar="NAME=MODEL,TEXT,CALIBRATION")
    flags = parser.parse_args()
    methods.stop_on_signals()
    results = json.loads(flags.json.read_text()) if flags.json.exists() else {}
    rows = results.get("kv", [])
    for text in flags.models:
        name, files = text.split("=", 1)
        rows = [row for row in rows if row.get("model") != name]
        rows += measure(flags, name, *files.split(","))
        results["kv"] = rows
        methods.save(results, flags.json)


if __name__ == "__main__":
    main()
