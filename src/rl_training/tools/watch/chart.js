// Line charts as SVG. All text is set as text, never as markup.
"use strict";
const SVG = "http://www.w3.org/2000/svg";
const HEIGHT = 240, LEFT = 58, RIGHT = 14, TOP = 10, BOTTOM = 40;
const DASHES = ["", "5 2", "1.5 1.5", "5 1.5 1.5 1.5"];
const COLOURS = 6, FEW = 12, MOST_NAMED = 12;

export function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key in made && key !== "list") made[key] = value; else made.setAttribute(key, value);
  }
  made.append(...children);
  return made;
}

function shape(name, attributes, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function stroke(order) {
  return { stroke: `var(--series-${order % COLOURS + 1})`,
    "stroke-dasharray": DASHES[Math.floor(order / COLOURS) % DASHES.length] };
}

export function key(order) {
  const line = shape("line", { x1: 1, y1: 5, x2: 25, y2: 5, "stroke-width": 2.5, ...stroke(order) });
  return shape("svg", { class: "key", viewBox: "0 0 26 10", "aria-hidden": "true" }, line);
}

function trimmed(value, digits) {
  return String(Number(value.toPrecision(digits))).replace("-", "\u2212");
}

export function compact(value) {
  for (const [limit, suffix] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= limit) return trimmed(value / limit, 3) + suffix;
  }
  return trimmed(value, 3);
}

export function number(value) {
  if (value === null || value === undefined) return "\u2013";
  const size = Math.abs(value);
  if (size !== 0 && (size >= 1e15 || size < 1e-3)) return trimmed(value, 3);
  const places = size >= 1000 ? 0 : size >= 100 ? 1 : size >= 0.1 || size === 0 ? 2 : 4;
  return value.toLocaleString("en", { minimumFractionDigits: Math.min(places, 2),
    maximumFractionDigits: places }).replace("-", "\u2212");
}

export function duration(seconds) {
  if (seconds < 60) return `${seconds.toFixed(1)} s`;
  const minutes = Math.round(seconds / 60);
  if (minutes < 60) return `${minutes} min`;
  return `${Math.floor(minutes / 60)} h ${String(minutes % 60).padStart(2, "0")} min`;
}

// Round positions that cover a range, about `count` of them.
function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((n) => n * power).find((each) => each >= rough);
  const found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(i * step);
  return found;
}

// An exponential moving average, corrected for its start.
export function smoothed(values, weight) {
  let sum = 0, norm = 0;
  return values.map((value) => {
    sum = weight * sum + (1 - weight) * value;
    norm = weight * norm + (1 - weight);
    return sum / norm;
  });
}

function timeUnit(seconds) {
  if (seconds < 120) return ["s", 1];
  return seconds < 7200 ? ["min", 60] : ["h", 3600];
}

function range(lines, column) {
  let low = Infinity, high = -Infinity;
  for (const line of lines) {
    for (const value of line[column]) {
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  return [low, high];
}

function nearest(values, wanted) {
  let low = 0, high = values.length - 1;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (values[middle] < wanted) low = middle + 1; else high = middle;
  }
  return low > 0 && wanted - values[low - 1] < values[low] - wanted ? low - 1 : low;
}

// One metric of several runs; `draw` replaces its lines ({name, order, x, y}).
export class Chart {
  constructor(title, metric) {
    const name = title ? [title, " "] : [];
    this.metric = metric;
    this.tip = element("div", { className: "tip", hidden: true });
    this.svg = shape("svg", { role: "img" });
    this.figure = element("figure", { className: "chart" },
      element("figcaption", {}, ...name, element("code", {}, metric)), this.svg, this.tip);
    this.lines = [];
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.leave());
    new ResizeObserver(() => this.paint()).observe(this.figure);
  }

  draw(lines, axis, weight) {
    this.axis = axis;
    this.lines = lines.map((line) => ({ ...line, raw: line.y,
      y: weight && line.y.length > 2 ? smoothed(line.y, weight) : line.y }));
    this.weight = weight;
    this.paint();
  }

  paint() {
    const width = this.figure.clientWidth;
    if (!width || !this.lines.length) return;
    let [low, high] = range(this.lines, "y");
    if (this.weight) {
      const [least, most] = range(this.lines, "raw");
      [low, high] = [Math.min(low, least), Math.max(high, most)];
    }
    const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
    [low, high] = [low - margin, high + margin];
    const end = range(this.lines, "x")[1] || 1;
    const [unit, scale] = this.axis === "seconds" ? timeUnit(end) : ["", 1];
    this.toX = (x) => LEFT + x / end * (width - LEFT - RIGHT);
    this.toY = (y) => HEIGHT - BOTTOM - (y - low) / (high - low) * (HEIGHT - TOP - BOTTOM);
    this.end = end;
    this.width = width;
    const parts = [];
    for (const y of ticks(low, high, 5)) {
      const at = this.toY(y);
      parts.push(shape("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: at, y2: at }),
        shape("text", { x: LEFT - 8, y: at + 4, "text-anchor": "end" }, compact(y)));
    }
    for (const x of ticks(0, end / scale, Math.max(2, Math.min(6, width / 90)))) {
      const at = this.toX(x * scale);
      parts.push(shape("text", { x: at, y: HEIGHT - BOTTOM + 17, "text-anchor": "middle" }, compact(x)));
    }
    const label = unit ? `training time (${unit})` : this.axis;
    parts.push(shape("text", { x: (LEFT + width - RIGHT) / 2, y: HEIGHT - 5, "text-anchor": "middle" }, label));
    for (const line of this.lines) {
      if (this.weight && line.raw !== line.y) parts.push(this.path(line, line.raw, "raw"));
      parts.push(this.path(line, line.y, "line"));
      if (line.x.length <= FEW) parts.push(...this.dots(line));
    }
    this.cursor = shape("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM, visibility: "hidden" });
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...parts, this.cursor);
    const ends = this.lines.slice(0, MOST_NAMED).map((l) => `${l.name} is at ${number(l.y.at(-1))}`);
    const more = this.lines.length - ends.length;
    this.svg.setAttribute("aria-label", `${this.metric} against ${label}: ${ends.join("; ")}`
      + (more > 0 ? `; and ${more} more runs.` : "."));
  }

  path(line, values, name) {
    const points = values.map((y, i) => `${this.toX(line.x[i]).toFixed(1)} ${this.toY(y).toFixed(1)}`);
    return shape("path", { class: name, d: `M${points.join("L")}`, fill: "none",
      "stroke-width": 1.8, "stroke-linejoin": "round", ...stroke(line.order) });
  }

  dots(line) {
    return line.y.map((y, i) => shape("circle", { cx: this.toX(line.x[i]), cy: this.toY(y), r: 2.4,
      fill: stroke(line.order).stroke }));
  }

  point(event) {
    if (!this.toX) return;
    const box = this.svg.getBoundingClientRect();
    const at = (event.clientX - box.left) / box.width * this.width;
    const x = Math.max(0, Math.min(this.end, (at - LEFT) / (this.width - LEFT - RIGHT) * this.end));
    const rows = this.lines.map((line) => ({ line, i: nearest(line.x, x) }))
      .filter(({ line, i }) => Math.abs(line.x[i] - x) < this.end / 20)
      .sort((a, b) => b.line.y[b.i] - a.line.y[a.i]);
    if (!rows.length) { this.leave(); return; }
    this.cursor.setAttribute("x1", this.toX(x));
    this.cursor.setAttribute("x2", this.toX(x));
    this.cursor.setAttribute("visibility", "visible");
    const place = this.axis === "seconds" ? duration(x) : `${Math.round(x).toLocaleString("en")} ${this.axis}`;
    this.tip.replaceChildren(element("p", {}, `near ${place}`),
      ...rows.slice(0, MOST_NAMED).map(({ line, i }) => element("p", {}, key(line.order),
        element("span", {}, line.name), element("strong", {}, number(line.y[i])))));
    this.tip.hidden = false;
    const left = Math.min(this.toX(x) + 12, this.width - this.tip.offsetWidth - 4);
    this.tip.style.left = `${Math.max(0, left)}px`;
  }

  leave() {
    this.tip.hidden = true;
    if (this.cursor) this.cursor.setAttribute("visibility", "hidden");
  }
}
