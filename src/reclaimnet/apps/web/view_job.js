// One job: where it is and why, its life on a timeline, its plots across moves, its log.

import { h } from "./dom.js";
import { ago, clock, count, duration, lost, moment, size } from "./format.js";
import { placesOf } from "./reclaims.js";
import { TERMINAL, ask } from "./store.js";
import { state } from "./view_jobs.js";
import { plots } from "./charts.js";
import { table } from "./table.js";

const MAX_LOG = 200_000; // characters
const STORY_EVERY_MS = 1500;

let shown = null; // what is loaded for the job that is looked at

export function leaveJob() {
  if (shown) shown.stop.abort();
  shown = null;
}

export function jobView(campus, { id }) {
  const record = campus.records.get(id);
  if (!record) {
    return h("div", null, h("h1", null, "Job"), h("p", { class: "empty" }, `There is no job ${id}.`));
  }
  if (!campus.mayRead(record)) {
    return h(
      "div",
      { class: "job", key: id },
      h("h1", null, record.spec.name),
      h("p", { class: "lead" }, state(record), " ", where(record)),
      facts(campus, record),
      h("p", { class: "empty" }, `What it runs, did and wrote is for ${record.spec.user} and operators.`),
    );
  }
  if (!shown || shown.id !== id) enter(campus, id);
  if (shown.revision !== record.revision) loadStory(campus, record);
  const story = upTo(shown.story, campus);
  return h(
    "div",
    { class: "job", key: id },
    h(
      "header",
      { class: "title" },
      h("h1", null, record.spec.name),
      campus.mayAct && !TERMINAL.has(record.state) ? actions(campus, record) : null,
    ),
    h("p", { class: "lead" }, state(record), " ", where(record)),
    facts(campus, record),
    seats(campus, record),
    story && story.history.attempts.length ? timeline(campus, record, story.history) : null,
    plots(campus, record, story),
    why(campus, story),
    log(campus, record),
  );
}

/** A recording is told only as far as it has been played. */
function upTo(story, campus) {
  if (!story || campus.at === null) return story;
  const now = campus.now();
  const past = (list) => list.filter((each) => each.at <= now);
  const { attempts, saves, transfers, notices } = story.history;
  return {
    passages: past(story.passages),
    samples: [],
    history: {
      attempts: attempts
        .filter((each) => each.began <= now)
        .map((each) => (each.ended > now ? { ...each, ended: null, outcome: "" } : each)),
      saves: past(saves),
      transfers: past(transfers),
      notices: past(notices),
    },
  };
}

function where(record) {
  const reason = record.reason ? `: ${record.reason}` : "";
  if (record.holder && !TERMINAL.has(record.state)) {
    const to = record.handover_to ? `, going to ${record.handover_to}` : "";
    return `on ${placesOf(record).join(", ")}${to}${reason}`;
  }
  return reason.replace(/^: /, "");
}

function facts(campus, record) {
  const newest = record.checkpoints[0];
  const now = campus.now();
  return h(
    "dl",
    { class: "totals" },
    fact("Step", campus.stepOf(record), `${gpusOf(record.spec)}, for ${record.spec.user}`),
    fact("Moves", record.moves, lost(record)),
    fact("Stood still", duration(record.downtime), "in all, by moves"),
    fact(
      "Last checkpoint",
      newest ? size(newest.size) : "none",
      newest
        ? `step ${newest.step}, at ${newest.holders.join(", ")}, ${ago(Math.max(0, now - newest.taken_at))}`
        : record.spec.saving === "none"
          ? "it cannot be saved"
          : "not yet",
    ),
  );
}

function gpusOf(spec) {
  return spec.nodes > 1 ? `${spec.nodes} × ${count(spec.gpus, "GPU")}` : count(spec.gpus, "GPU");
}

/** Who runs which rank of a job over several nodes, and how far each is. */
function seats(campus, record) {
  if (!record.spec.nodes || record.spec.nodes < 2 || !record.seats || !record.seats.length) return null;
  const newest = record.checkpoints[0];
  return h(
    "section",
    { "aria-labelledby": "seats" },
    h("h2", { id: "seats" }, "Seats", h("small", null, "they start, are saved and move together")),
    table(
      "Seats",
      ["Rank", "Node", "GPUs", "Step", "Memory", "Its part of the last checkpoint"],
      new Set(["Rank", "Step", "Memory"]),
      record.seats.map((node, rank) => {
        const seen = campus.nodes.get(node);
        const progress = seen && seen.card.jobs.find((each) => each.job === record.id);
        const indices = progress
          ? seen.card.gpus.filter((gpu) => (progress.gpus || []).includes(gpu.id)).map((gpu) => gpu.index)
          : [];
        const shard = newest && newest.shards && newest.shards[rank];
        return h(
          "tr",
          { key: `${rank}` },
          h("td", { class: "number" }, rank),
          h("th", { scope: "row" }, node, node === record.holder ? h("small", null, "leads") : null),
          h("td", null, indices.join(", ") || "–"),
          h("td", { class: "number" }, progress ? progress.step : "–"),
          h("td", { class: "number" }, progress && progress.memory ? size(progress.memory) : "–"),
          h("td", null, shard ? `${size(shard.size)} at ${shard.holders.join(", ")}` : "–"),
        );
      }),
    ),
  );
}

function fact(name, value, note) {
  return h("div", { key: name }, h("dt", null, name), h("dd", null, h("b", null, value), h("small", null, note)));
}

function actions(campus, record) {
  return h(
    "p",
    { class: "actions" },
    h(
      "button",
      {
        onclick: async () => {
          if (!confirm(`Cancel ${record.spec.name}? What it has saved is dropped.`)) return;
          try {
            await ask("POST", `/jobs/${record.id}/cancel`);
          } catch (error) {
            alert(error.message);
          }
        },
      },
      "Cancel the job",
    ),
  );
}

// --- its life ------------------------------------------------------------------------------------

function timeline(campus, record, history) {
  const nodes = [...new Set(history.attempts.map((each) => each.node))];
  const begin = Math.min(record.submitted_at, ...history.attempts.map((each) => each.began));
  const end = Math.max(record.ended_at || campus.now(), begin + 1e9);
  const x = (at) => (1000 * (Math.min(Math.max(at, begin), end) - begin)) / (end - begin);
  const row = (node) => nodes.indexOf(node) * 28 + 6;
  const height = nodes.length * 28 + 24;
  return h(
    "section",
    { class: "timeline", "aria-labelledby": "life" },
    h("h2", { id: "life" }, "Life"),
    h(
      "div",
      { class: "lanes" },
      h("ul", { class: "names" }, nodes.map((node) => h("li", { key: node }, node))),
      h(
        "svg",
        {
          viewBox: `0 0 1000 ${height}`,
          preserveAspectRatio: "none",
          style: `height:${height}px`,
          role: "img",
          "aria-label": `${count(history.attempts.length, "attempt")} on ${nodes.join(", ")}`,
        },
        nodes.map((node, i) =>
          h("line", { key: "l" + node, class: "lane", x1: 0, x2: 1000, y1: i * 28 + 16, y2: i * 28 + 16 }),
        ),
        history.notices.map((notice) =>
          h(
            "rect",
            {
              key: `n${notice.node}${notice.at}`,
              class: "notice",
              x: x(notice.at),
              y: row(notice.node) - 4,
              width: Math.max(2, x(notice.deadline) - x(notice.at)),
              height: 28,
            },
            h("title", null, `notice: ${notice.reason || notice.cause}`),
          ),
        ),
        history.attempts.map((each) =>
          h(
            "rect",
            {
              key: `a${each.node}${each.epoch}`,
              class: "attempt",
              x: x(each.began),
              y: row(each.node),
              width: Math.max(2, x(each.ended || end) - x(each.began)),
              height: 20,
              rx: 2,
            },
            h("title", null, `attempt ${each.epoch} on ${each.node}: ${each.outcome || "running"}`),
          ),
        ),
        history.saves.map((save) =>
          h(
            "line",
            {
              key: `s${save.at}`,
              class: save.final ? "save final" : "save",
              x1: x(save.at),
              x2: x(save.at),
              y1: row(save.node) + 3,
              y2: row(save.node) + 17,
            },
            h("title", null, `saved step ${save.step}, ${size(save.bytes)}`),
          ),
        ),
      ),
    ),
    h(
      "p",
      { class: "axis" },
      h("span", null, clock(begin)),
      h("span", null, `${duration(end - begin)} · ${count(history.saves.length, "checkpoint")} · ${count(history.notices.length, "notice")}`),
      h("span", null, record.ended_at ? clock(end) : "now"),
    ),
  );
}

let showRoutine = false;

function why(campus, story) {
  const told = story ? story.passages.filter((each) => showRoutine || !each.routine) : [];
  const skipped = story ? story.passages.length - told.length : 0;
  return h(
    "section",
    { class: "why", "aria-labelledby": "why" },
    h(
      "header",
      { class: "title" },
      h("h2", { id: "why" }, "Why"),
      skipped || showRoutine
        ? h(
            "label",
            { class: "switch" },
            h("input", {
              type: "checkbox",
              checked: showRoutine,
              onchange: (event) => {
                showRoutine = event.target.checked;
                campus.changed();
              },
            }),
            skipped ? ` also ${skipped} routine saves and copies` : " also routine saves and copies",
          )
        : null,
    ),
    !story
      ? h("p", { class: "empty" }, "Reading the journal…")
      : told.length === 0
        ? h("p", { class: "empty" }, "The journal has nothing about it yet.")
        : h("ol", { class: "story" }, [...told].reverse().map(passage)),
  );
}

function passage(told) {
  return h(
    "li",
    { key: `${told.at}${told.node}${told.text}`, memo: [told.at, told.times] },
    h("time", { datetime: new Date(told.at / 1e6).toISOString(), title: moment(told.at) }, clock(told.at)),
    h("span", { class: "at" }, told.node),
    h(
      "div",
      null,
      h("p", null, told.text, told.times > 1 ? ` (${told.times} times, last at ${clock(told.until)})` : ""),
      told.reasons.length ? h("ul", { class: "because" }, told.reasons.map((text) => h("li", { key: text }, text))) : null,
      told.refused.length ? h("ul", { class: "refused" }, told.refused.map((text) => h("li", { key: text }, text))) : null,
    ),
  );
}

// --- what is loaded for it -----------------------------------------------------------------------

function enter(campus, id) {
  leaveJob();
  shown = { id, revision: -1, story: null, storyAt: 0, loading: false, log: "", logEnd: "", atEnd: true, stop: new AbortController() };
  if (!campus.recording) followLog(campus, shown);
}

async function loadStory(campus, record) {
  const mine = shown;
  if (mine.loading || performance.now() - mine.storyAt < STORY_EVERY_MS) return;
  mine.loading = true;
  mine.revision = record.revision;
  try {
    mine.story = await ask("GET", `/jobs/${record.id}/story`);
  } catch (error) {
    mine.revision = -1;
    if (!error.message) throw error;
  }
  mine.loading = false;
  mine.storyAt = performance.now();
  campus.changed();
}

async function followLog(campus, mine) {
  const decoder = new TextDecoder();
  try {
    const answer = await fetch(`api/v1/jobs/${mine.id}/logs?follow=true`, { signal: mine.stop.signal });
    if (!answer.ok || !answer.body) throw new Error();
    const reader = answer.body.getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      mine.log += decoder.decode(value, { stream: true });
      if (mine.log.length > MAX_LOG) mine.log = mine.log.slice(-MAX_LOG);
      campus.changed();
    }
    mine.logEnd = "The log ends here.";
  } catch {
    if (!mine.stop.signal.aborted) mine.logEnd = "The log cannot be read now.";
  }
  campus.changed();
}

function log(campus, record) {
  if (campus.recording) return null;
  // Whoever reads further up is left there.
  if (shown.atEnd) {
    requestAnimationFrame(() => {
      const place = document.getElementById("output");
      if (place) place.scrollTop = place.scrollHeight;
    });
  }
  return h(
    "section",
    { class: "log", "aria-labelledby": "log" },
    h("h2", { id: "log" }, "Log"),
    h(
      "pre",
      {
        id: "output",
        tabindex: "0",
        role: "log",
        "aria-live": "off",
        "aria-label": `Output of ${record.spec.name}`,
        onscroll: ({ currentTarget: place }) => {
          if (shown) shown.atEnd = place.scrollHeight - place.scrollTop - place.clientHeight < 24;
        },
      },
      shown.log || "Nothing has been written yet.",
    ),
    shown.logEnd ? h("p", { class: "hint" }, shown.logEnd) : null,
  );
}
