// Plots with hover and zoom, by plotly's own script, which is fetched only when one is shown.

import { h } from "./dom.js";
import { size } from "./format.js";

const MS = 1e6;
let plotly = null;

function load() {
  if (!plotly) {
    plotly = new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = "web/plotly.min.js";
      script.onload = () => resolve(window.Plotly);
      script.onerror = reject;
      document.head.append(script);
    });
  }
  return plotly;
}

/** A job's steps, memory and traffic over time, as one line across all the machines it was on. */
export function plots(campus, record, story) {
  if (!story) return null;
  const samples = sampled(campus, record, story);
  const figures = [
    ["progress", "Progress", progress(samples, story.history)],
    ["memory", "Memory", memory(record, samples, story.history)],
    ["network", "Network", network(samples, story.history)],
  ].filter(([, , figure]) => figure.data.some((line) => line.x.length > 1));
  if (!figures.length) return null;
  const ends = figures.flatMap(([, , figure]) => figure.data.flatMap((line) => [line.x[0], line.x[line.x.length - 1]]));
  // All of them show the same stretch of time, so that one can be read beside the other.
  const range = [Math.min(...ends), Math.max(...ends)].map((at) => new Date(at));
  for (const [, , figure] of figures) figure.range = range;
  return h(
    "section",
    { class: "plots", "aria-labelledby": "plots" },
    h("h2", { id: "plots" }, "Plots", h("small", null, "a band behind every second attempt")),
    h(
      "div",
      { class: "figures" },
      figures.map(([key, title, figure]) => {
        const id = `plot-${record.id}-${key}`;
        draw(id, figure);
        return h(
          "figure",
          { key },
          h("figcaption", null, title, figure.note ? h("small", null, figure.note) : null),
          h("div", { id, class: "plot", memo: [id], role: "img", "aria-label": `${title}: ${figure.note || ""}` }),
        );
      }),
    ),
  );
}

/** What the gateway has heard, and since then what was heard here. */
function sampled(campus, record, story) {
  const told = story.samples || [];
  const last = told.length ? told[told.length - 1].at : 0;
  return [...told, ...(campus.samples.get(record.id) || []).filter((each) => each.at > last + 1e9)];
}

const drawn = new Map();

function draw(id, figure) {
  const looks = document.documentElement.dataset.theme || matchMedia("(prefers-color-scheme: dark)").matches;
  const ends = figure.data.map((line) => [line.x.length, +line.x[line.x.length - 1], line.y[line.y.length - 1]]);
  const sum = `${ends} ${figure.range.map(Number)} ${looks}`;
  load().then((Plotly) => {
    requestAnimationFrame(() => {
      const place = document.getElementById(id);
      if (!place || (drawn.get(id) === sum && place.data)) return;
      drawn.set(id, sum);
      Plotly.react(place, figure.data, layout(figure), {
        displayModeBar: false,
        responsive: true,
      });
    });
  });
}

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function layout(figure) {
  const ink = colour("--muted");
  const grid = colour("--line");
  const named = figure.data.length > 1;
  return {
    margin: { l: 50, r: 10, t: named ? 30 : 8, b: 34 },
    height: 220,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: ink },
    // What a person has zoomed into stays while the line grows.
    uirevision: "kept",
    xaxis: { type: "date", range: figure.range, gridcolor: grid, linecolor: grid, zeroline: false, nticks: 5, tickangle: 0 },
    yaxis: { title: { text: figure.unit }, gridcolor: grid, zeroline: false, rangemode: "tozero", nticks: 5 },
    legend: { orientation: "h", x: 0, y: 1.02, yanchor: "bottom" },
    hoverlabel: { bgcolor: colour("--surface"), bordercolor: grid, font: { color: colour("--ink") } },
    shapes: figure.shapes || [],
    hovermode: figure.hover || "x unified",
    showlegend: named,
  };
}

function date(ns) {
  return new Date(ns / MS);
}

function progress(samples, history) {
  const points = [...history.saves, ...samples].sort((a, b) => a.at - b.at);
  return {
    unit: "step",
    data: [
      {
        x: points.map((each) => date(each.at)),
        y: points.map((each) => each.step),
        text: points.map((each) => each.node),
        hovertemplate: "step %{y} on %{text}<extra></extra>",
        mode: "lines",
        line: { color: colour("--busy"), width: 2, shape: "linear" },
        name: "step",
      },
    ],
    shapes: bands(history),
  };
}

/** A band behind each second attempt, so that moves can be seen. */
function bands(history) {
  const epochs = [...new Set(history.attempts.map((each) => each.epoch))];
  return history.attempts
    .filter((each) => epochs.indexOf(each.epoch) % 2 === 1)
    .map((each) => ({
      type: "rect",
      xref: "x",
      yref: "paper",
      x0: date(each.began),
      x1: date(each.ended || Date.now() * MS),
      y0: 0,
      y1: 1,
      fillcolor: colour("--band"),
      line: { width: 0 },
      layer: "below",
    }));
}

function scale(most) {
  if (most < 1 << 20) return ["KiB", 1 << 10];
  return most < 1 << 30 ? ["MiB", 1 << 20] : ["GiB", 1 << 30];
}

const LINES = ["--busy", "--leaving", "--accent", "--danger", "--muted", "--ink"];

/** What its processes hold, and what is in use on its GPUs; a line for each node it is on at once. */
function memory(record, samples, history) {
  const known = samples.filter((each) => each.memory || each.vram);
  const [unit, bytes] = scale(Math.max(1, ...known.map((each) => Math.max(each.memory, each.vram))));
  const nodes = (record.spec.nodes || 1) > 1 ? [...new Set(known.map((each) => each.node))].sort() : [null];
  const data = nodes.flatMap((node, index) => {
    const own = known.filter((each) => node === null || each.node === node);
    const line = (key, name, dash) => ({
      x: own.map((each) => date(each.at)),
      y: own.map((each) => each[key] / bytes),
      text: own.map((each) => each.node),
      hovertemplate: `%{y:.1f} ${unit} on %{text}<extra></extra>`,
      mode: "lines",
      line: { color: colour(LINES[index % LINES.length]), width: 2, dash },
      name,
    });
    const has = (key) => own.some((each) => each[key]);
    return [
      has("memory") ? line("memory", node || "processes", "solid") : null,
      has("vram") ? line("vram", `${node ? `${node}, ` : ""}GPU`, "dot") : null,
    ].filter(Boolean);
  });
  return { unit, data, shapes: bands(history), note: "held by its processes" };
}

/** Its state on the wire, as often and as fast as it moved, and what it is known to talk in training. */
function network(samples, history) {
  const moves = history.transfers.filter((each) => each.moved_bytes && each.bytes_per_s);
  const talks = samples.filter((each) => each.training);
  const most = Math.max(1, ...moves.map((each) => each.bytes_per_s), ...talks.map((each) => each.training));
  const [unit, bytes] = scale(most);
  const x = [];
  const y = [];
  const text = [];
  for (const each of moves) {
    const began = each.at - (each.moved_bytes / each.bytes_per_s) * 1e9;
    const way = `${each.source ? `${each.source} → ` : "to "}${each.node}, ${size(each.moved_bytes)}`;
    x.push(date(began), date(began), date(each.at), date(each.at));
    y.push(0, each.bytes_per_s / bytes, each.bytes_per_s / bytes, 0);
    text.push(way, way, way, way);
  }
  const data = [];
  if (moves.length) {
    data.push({
      x,
      y,
      text,
      name: "its state moves",
      mode: "lines",
      fill: "tozeroy",
      line: { color: colour("--leaving"), width: 1.5 },
      hovertemplate: `%{text} at %{y:.1f} ${unit}/s<extra></extra>`,
    });
  }
  if (talks.length) {
    data.push({
      x: talks.map((each) => date(each.at)),
      y: talks.map((each) => each.training / bytes),
      name: "training",
      mode: "lines",
      line: { color: colour("--busy"), width: 2 },
      hovertemplate: `%{y:.1f} ${unit}/s in training<extra></extra>`,
    });
  }
  const all = moves.reduce((sum, each) => sum + each.moved_bytes, 0);
  return {
    unit: `${unit}/s`,
    data,
    shapes: bands(history),
    hover: "closest",
    note: all ? `${size(all)} of state moved in all` : "",
  };
}
