"use strict";

/* Elements without markup: texts become text nodes, styles go through the object model. */
function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  return fill(node, attributes, children);
}

function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  return fill(node, attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("--")) node.style.setProperty(name, value);
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function short(value) {
  if (value === null || value === undefined) return "\u2013";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 0.001 || size >= 1e6) return value.toExponential(1);
  return String(Number(value.toPrecision(3)));
}

/* Round values between low and high, about `count` of them. */
function ticks(low, high, count, whole) {
  const span = high - low || 1;
  let step = 10 ** Math.floor(Math.log10(span / count));
  const factors = whole ? [1, 2, 5, 10] : [1, 2, 2.5, 5, 10];
  const least = factors.find((factor) => span / (step * factor) <= count) || 10;
  step *= least;
  if (whole) step = Math.max(1, Math.round(step));
  const found = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++)
    found.push(Number((i * step).toPrecision(12)));
  return found;
}

/* A chart over steps. `lines`: {name, color, points: [[step, value]], dots, dash, band}; `stacked`
   lines become bars on top of each other. `marked` is a step to point at, `pick` is called with the
   step that was clicked. Returns a function that draws again, with another mark. */
function chart(card, options) {
  const { height = 190, lines, range, log, stacked, pick } = options;
  const readout = el("span", { class: "readout" });
  const keys = lines.length > 1 || options.keys
    ? lines.map((line) => el("span", { class: "key", "--key": line.color }, line.name)) : [];
  const head = el("div", { class: "chart-head" }, el("h2", {}, options.title), ...keys, readout);
  const canvas = svg("svg", { height, role: "img", "aria-label": options.title });
  card.replaceChildren(...(options.above ? [options.above] : []), head, canvas);
  let marked = options.marked;

  function draw() {
    const width = Math.max(160, canvas.clientWidth || card.clientWidth - 24);
    const box = { left: 46, right: width - 10, top: 8, bottom: height - 24 };
    canvas.setAttribute("viewBox", `0 0 ${width} ${height}`);
    const usable = (value) => value !== null && (!log || value > 0);
    const shown = lines.map((line) => line.points.filter(([, value]) => usable(value)));
    const steps = [...new Set(shown.flat().map(([step]) => step))].sort((a, b) => a - b);
    if (!steps.length) {
      canvas.replaceChildren(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" },
        "no data"));
      return;
    }
    const bars = stacked ? steps.map((step) => stackOf(lines, step)) : [];
    let [low, high] = range || extent(stacked ? bars.map((bar) => bar.total).concat(0)
      : shown.flat().map(([, value]) => value), log);
    if (low === high) [low, high] = [low - Math.abs(low || 1) / 2, high + Math.abs(high || 1) / 2];
    const scale = log ? Math.log10 : (value) => value;
    const ends = [steps[0], steps[steps.length - 1]];
    const spread = (ends[1] - ends[0]) || 1;
    const pad = stacked ? (box.right - box.left) / (steps.length + 1) / 2 : 0;
    const x = (step) => ends[0] === ends[1] ? (box.left + box.right) / 2
      : box.left + pad + (step - ends[0]) / spread * (box.right - box.left - 2 * pad);
    const y = (value) => box.bottom - (scale(value) - scale(low)) / (scale(high) - scale(low))
      * (box.bottom - box.top);
    const parts = [];
    const levels = log ? decades(low, high) : ticks(low, high, 5, false);
    for (const value of levels) {
      parts.push(svg("line", { x1: box.left, x2: box.right, y1: y(value), y2: y(value),
        stroke: "var(--line)" }));
      parts.push(svg("text", { x: box.left - 6, y: y(value) + 4, "text-anchor": "end" },
        log ? value.toExponential(0) : options.percent ? `${Math.round(value * 100)}%`
          : short(value)));
    }
    for (const step of ticks(ends[0], ends[1], Math.max(2, width / 90), true))
      parts.push(svg("text", { x: x(step), y: height - 8, "text-anchor": "middle" }, String(step)));
    if (marked !== undefined && marked >= ends[0] && marked <= ends[1])
      parts.push(svg("line", { x1: x(marked), x2: x(marked), y1: box.top, y2: box.bottom,
        stroke: "var(--muted)", "stroke-dasharray": "2 3" }));
    if (stacked) {
      const wide = Math.max(1, Math.min(28, (box.right - box.left) / (steps.length + 1) * 0.7));
      for (const bar of bars)
        for (const part of bar.parts)
          parts.push(svg("rect", { x: x(bar.step) - wide / 2, y: y(part.to), width: wide,
            height: Math.max(0, y(part.from) - y(part.to)), fill: part.color }));
    } else {
      lines.forEach((line, number) => parts.push(...lineParts(line, shown[number], x, y, log)));
    }
    const cursor = svg("line", { y1: box.top, y2: box.bottom, stroke: "var(--ink)",
      "stroke-opacity": 0.4, visibility: "hidden" });
    const nearest = (event) => {
      const place = (event.clientX - canvas.getBoundingClientRect().left)
        * width / canvas.getBoundingClientRect().width;
      return steps.reduce((a, b) => Math.abs(x(b) - place) < Math.abs(x(a) - place) ? b : a);
    };
    const catcher = svg("rect", {
      x: 0, y: 0, width, height, fill: "transparent",
      onpointermove: (event) => {
        const step = nearest(event);
        cursor.setAttribute("x1", x(step));
        cursor.setAttribute("x2", x(step));
        cursor.setAttribute("visibility", "visible");
        readout.textContent = `step ${step}  ` + lines.map((line) => {
          const point = line.points.find(([at]) => at === step);
          if (!point || point[1] === null) return null;
          const between = line.band && line.band.get(step);
          return (lines.length > 1 ? `${line.name} ` : "") + short(point[1])
            + (between ? ` [${short(between[0])}, ${short(between[1])}]` : "");
        }).filter((text) => text !== null).join("  ");
      },
      onpointerleave: () => {
        cursor.setAttribute("visibility", "hidden");
        readout.textContent = "";
      },
      onclick: (event) => pick && pick(nearest(event)),
    });
    if (pick) catcher.style.cursor = "pointer";
    canvas.replaceChildren(...parts, cursor, catcher);
  }

  draw();
  return (step) => {
    marked = step === undefined ? marked : step;
    draw();
  };
}

function lineParts(line, points, x, y, log) {
  const parts = [];
  const path = (list) => list.map(([step, value], i) =>
    `${i ? "L" : "M"}${x(step).toFixed(1)} ${y(value).toFixed(1)}`).join("");
  if (line.band) {
    const inside = points.filter(([step]) => line.band.has(step));
    const above = inside.map(([step]) => [step, line.band.get(step)[1]]);
    const below = inside.map(([step]) => [step, line.band.get(step)[0]]).reverse();
    if (inside.length > 1)
      parts.push(svg("path", { d: `${path([...above, ...below])}Z`, fill: line.color,
        "fill-opacity": 0.13 }));
    for (const [step] of inside) {
      const [from, to] = line.band.get(step);
      parts.push(svg("line", { x1: x(step), x2: x(step), y1: y(from), y2: y(to),
        stroke: line.color, "stroke-opacity": 0.45, "stroke-width": 1.5 }));
    }
  }
  if (points.length > 1)
    parts.push(svg("path", { d: path(points), fill: "none", stroke: line.color,
      "stroke-width": line.dots ? 2.2 : 1.5, "stroke-dasharray": line.dash ? "5 4" : null,
      "stroke-linejoin": "round" }));
  if (line.dots || points.length < 3)
    for (const [step, value] of points)
      parts.push(svg("circle", { cx: x(step), cy: y(value), r: line.dots ? 4 : 2.5,
        fill: line.color }));
  return parts;
}

function stackOf(lines, step) {
  let total = 0;
  const parts = [];
  for (const line of lines) {
    const point = line.points.find(([at]) => at === step);
    if (!point || !point[1]) continue;
    parts.push({ from: total, to: total + point[1], color: line.color });
    total += point[1];
  }
  return { step, parts, total };
}

function extent(values, log) {
  const [low, high] = values.reduce(([a, b], v) => [Math.min(a, v), Math.max(b, v)],
    [Infinity, -Infinity]);
  if (log) return [10 ** Math.floor(Math.log10(low)), 10 ** Math.floor(Math.log10(high) + 1)];
  const spare = (high - low) * 0.06;
  return [low >= 0 && low - spare < 0 ? 0 : low - spare, high + spare];
}

function decades(low, high) {
  const found = [];
  const count = Math.round(Math.log10(high / low));
  const stride = Math.ceil(count / 5);
  for (let i = 0; i <= count; i += stride) found.push(low * 10 ** i);
  return found;
}
