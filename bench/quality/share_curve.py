"""Draws what the share of 8-bit blocks is worth: KL divergence over it, a line for each model. A part
of comet.py.
"""
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 640, 360, 60, 150, 20, 50
COLOURS = ["#1f6fb4", "#c8501e", "#3c8c3c", "#8a56ac"]


def lines_of(rows, method, block):
    """{model: [(share, divergence)]} of rows with these blocks, folded, and a BF16 cache, where three
    shares or more are known."""
    lines = {}
    for row in rows:
        if (row.get("block"), row["method"], row.get("permute"), row["kv"]) == \
                (block, method, "fold", "bf16") and row["scheme"].endswith("ax"):
            lines.setdefault(row["model"], []).append((1 - row["a4_share"], row["kld"]))
    return {model: sorted(points) for model, points in sorted(lines.items()) if len(points) > 2}


def draw(lines):
    most = max(kld for points in lines.values() for _, kld in points)

    def place(share, kld):
        return (LEFT + share * (WIDTH - LEFT - RIGHT),
                HEIGHT - BOTTOM - kld / most * (HEIGHT - TOP - BOTTOM))

    def text(x, y, words, anchor="middle"):
        return f'<text x="{x:.0f}" y="{y:.0f}" text-anchor="{anchor}">{words}</text>'

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
             f'font-family="sans-serif" font-size="12">',
             f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>']
    for tick in range(5):
        x, _ = place(tick / 4, 0)
        _, y = place(0, most * tick / 4)
        parts.append(f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}M{LEFT} {y:.1f}H{WIDTH - RIGHT}" '
                     'stroke="#ddd"/>')
        parts.append(text(x, HEIGHT - BOTTOM + 16, f"{25 * tick} %"))
        parts.append(text(LEFT - 6, y + 4, f"{most * tick / 4:.2f}", "end"))
    parts.append(text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 10,
                      "multiply-adds with 8-bit activations"))
    parts.append(text(LEFT - 6, TOP - 8, "KL divergence, nats", "start"))
    for colour, (model, points) in zip(COLOURS, lines.items()):
        path = "L".join("{:.1f} {:.1f}".format(*place(*point)) for point in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += ['<circle cx="{:.1f}" cy="{:.1f}" r="3" fill="{}"/>'.format(*place(*point), colour)
                  for point in points]
        x, y = place(*points[-1])
        parts.append(f'<g fill="{colour}">{text(x + 8, y + 4, model, "start")}</g>')
    return "\n".join(parts + ["</svg>"]) + "\n"

