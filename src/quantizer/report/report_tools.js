// What all reports draw with.
const COLORS = ["#4269d0", "#efb118", "#ff725c", "#6cc5b0", "#3ca951", "#ff8ab7", "#a463f2",
                "#97bbf5", "#9c6b4e", "#9498a0"];
function short(v) { return v === 0 ? "0" : v.toPrecision(3); }
function bytes(v) {
  for (const [size, unit] of [[1e12, "TB"], [1e9, "GB"], [1e6, "MB"], [1e3, "kB"]]) {
    if (v >= size) return (v / size).toFixed(2) + " " + unit;
  }
  return v + " B";
}
function kind(t) {
  const parts = t.name.split(".");
  const last = parts[parts.length - 1];
  return parts.includes("experts") ? "experts." + last
       : parts.includes("shared_experts") ? "shared." + last : last;
}
function layer(t) {
  const found = /(?:layers|blocks?|h)\.(\d+)\./.exec(t.name);
  return found ? Number(found[1]) : -1;
}
function element(name, attributes, text) {
  const svg = ["svg", "g", "line", "path", "rect", "circle", "text", "title"].includes(name);
  const made = svg ? document.createElementNS("http://www.w3.org/2000/svg", name)
                   : document.createElement(name);
  for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}
function range(values) {
  let low = Math.min(...values), high = Math.max(...values);
  if (!(high - low > 1e-3)) { low -= 1; high += 1; }
  const margin = (high - low) * 0.06;
  return [low - margin, high + margin];
}
function ticks(low, high) {
  const rough = (high - low) / 5, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(f => f * power).find(s => s >= rough);
  const found = [];
  for (let v = Math.ceil(low / step) * step; v <= high; v += step) found.push(v);
  return [found, step < 1 ? 1 : 0];
}
function figure(place, title) {
  const made = element("figure"), svg = element("svg", { viewBox: "0 0 560 300", role: "img",
                                                         "aria-label": title });
  made.append(element("figcaption", {}, title), svg);
  place.append(made);
  return svg;
}
function number_text(v) {
  return v >= .001 && v < 10000 ? String(+v.toPrecision(3)) : v.toExponential(0).replace("+", "");
}
// Axes with logarithms on the left and texts below: the function that places values.
function log_axes(svg, low, high, x_labels) {
  const from = Math.log10(low) - .1, to = Math.log10(high) + .1;
  const y = v => 270 - 255 * (Math.log10(v) - from) / (to - from);
  const steps = to - from > 3 ? [1] : to - from > 1.2 ? [1, 3] : [1, 1.5, 2, 3, 5, 7];
  for (let power = Math.floor(from); power <= to; power += to - from > 8 ? 2 : 1) {
    for (const v of steps.map(s => s * 10 ** power)) {
      if (Math.log10(v) >= from && Math.log10(v) <= to) {
        svg.append(element("path", { class: "axis", d: `M52 ${y(v)}H550` }),
                   element("text", { x: 46, y: y(v) + 4, "text-anchor": "end" }, number_text(v)));
      }
    }
  }
  for (const [at, text] of x_labels) {
    svg.append(element("text", { x: at, y: 290, "text-anchor": at > 500 ? "end" : "middle" }, text));
  }
  return y;
}
// The error of the outputs of calibrated tensors by layer, one chart for each kind: of the nearest
// codes (dashed) and of those that were kept. Experts of a layer are one point, their mean.
function draw_errors(place, tensors) {
  const seen = tensors.filter(t => t.output_error > 0 && t.output_error_rtn > 0 && layer(t) >= 0);
  const last = Math.max(1, ...seen.map(layer));
  const x = v => 64 + 474 * v / last;
  [...new Set(seen.map(kind))].forEach((name, i) => {
    const layers = new Map();
    for (const t of seen.filter(t => kind(t) === name)) {
      const at = layers.get(layer(t)) || { layer: layer(t), count: 0, before: 0, after: 0 };
      at.count += 1;
      at.before += t.output_error_rtn;
      at.after += t.output_error;
      layers.set(at.layer, at);
    }
    const points = [...layers.values()].sort((a, b) => a.layer - b.layer)
        .map(p => ({ layer: p.layer, before: p.before / p.count, after: p.after / p.count }));
    const all = points.flatMap(p => [p.before, p.after]);
    const svg = figure(place, `${name}: error of outputs, nearest codes (dashed) and kept`);
    const y = log_axes(svg, Math.min(...all), Math.max(...all),
                       [...new Set([0, Math.round(last / 2), last])].map(v => [x(v), "layer " + v]));
    const color = COLORS[i % COLORS.length];
    for (const [key, style] of [["before", { "stroke-dasharray": "4 3", "stroke-opacity": .7 }],
                                ["after", {}]]) {
      const path = points.map((p, j) => `${j ? "L" : "M"}${x(p.layer)} ${y(p[key])}`).join("");
      svg.append(element("path", { d: path, fill: "none", stroke: color, "stroke-width": 1.5,
                                   ...style }));
      for (const p of points) {
        const dot = element("circle", { cx: x(p.layer), cy: y(p[key]), r: 3, stroke: color,
                                        fill: key === "after" ? color : "var(--page)" });
        dot.append(element("title", {}, `layer ${p.layer} ${name}: ${short(p.before)} \u2192 ` +
                                        short(p.after)));
        svg.append(dot);
      }
    }
  });
  return seen.length;
}
