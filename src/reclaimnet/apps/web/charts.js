// Plots with hover and zoom, by plotly's own script, which is fetched only when one is shown.

import { h } from "./dom.js";

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

/** A job's progress and its bytes over time, as one line across all the machines it was on. */
export function plots(campus, record, story) {
  if (!story) return null;
  const figures = [
    ["progress", "Progress", progress(campus, record, story.history)],
    ["bytes", "State and traffic", traffic(story.history)],
  ].filter(([, , figure]) => figure.data.some((line) => line.x.length > 1));
  if (!figures.length) return null;
  return h(
    "section",
    { class: "plots", "aria-labelledby": "plots" },
    h("h2", { id: "plots" }, "Plots"),
    h(
      "div",
      { class: "figures" },
      figures.map(([key, title, figure]) => {
        const id = `plot-${record.id}-${key}`;
        draw(id, figure);
        return h(
          "figure",
          { key },
          h("figcaption", null, title),
          h("div", { id, class: "plot", memo: [id] }),
        );
      }),
    ),
  );
}

const drawn = new Map();

function draw(id, figure) {
  const sum = figure.data.map((line) => line.x.length).join() + document.documentElement.dataset.theme;
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
  return {
    margin: { l: 54, r: 12, t: 8, b: 34 },
    height: 220,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { family: "system-ui, sans-serif", size: 12, color: ink },
    xaxis: { type: "date", gridcolor: grid, linecolor: grid, zeroline: false },
    yaxis: { title: { text: figure.unit }, gridcolor: grid, zeroline: false, rangemode: "tozero" },
    legend: { orientation: "h", y: 1.15 },
    shapes: figure.shapes || [],
    hovermode: "x unified",
    showlegend: figure.data.length > 1,
  };
}

function date(ns) {
  return new Date(ns / MS);
}

function progress(campus, record, history) {
  const points = [
    ...history.saves.map((save) => ({ at: save.at, step: save.step, node: save.node })),
    ...(campus.samples.get(record.id) || []),
  ].sort((a, b) => a.at - b.at);
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
  return history.attempts
    .filter((_, index) => index % 2 === 1)
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

function traffic(history) {
  const most = Math.max(...history.saves.map((each) => each.bytes), 1);
  const [unit, bytes] = most < 1 << 20 ? ["KiB", 1 << 10] : most < 1 << 30 ? ["MiB", 1 << 20] : ["GiB", 1 << 30];
  return {
    unit,
    data: [
      {
        x: history.saves.map((each) => date(each.at)),
        y: history.saves.map((each) => each.bytes / bytes),
        name: "state saved",
        mode: "lines",
        line: { color: colour("--accent"), shape: "hv", width: 2 },
        hovertemplate: `%{y:.1f} ${unit} saved<extra></extra>`,
      },
      {
        x: history.transfers.map((each) => date(each.at)),
        y: history.transfers.map((each) => each.moved_bytes / bytes),
        text: history.transfers.map((each) => (each.source ? `${each.source} → ` : "to ") + each.node),
        hovertemplate: `%{y:.1f} ${unit} moved, %{text}<extra></extra>`,
        name: "moved over the network",
        mode: "markers",
        marker: { color: colour("--leaving"), size: 9, symbol: "diamond" },
      },
    ],
    shapes: bands(history),
  };
}
