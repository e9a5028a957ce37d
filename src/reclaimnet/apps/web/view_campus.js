// The campus: every zone, its nodes and GPUs, who lends and who runs, and the links between them.

import { h } from "./dom.js";
import { bits, count, duration, percent, size } from "./format.js";
import { TERMINAL, useOf } from "./store.js";

const FOLD_FROM = 4; // GPUs; above, vacant ones share a line
const COMPACT_FROM = 60; // nodes; above, names of guests give way to an overview

export function campusView(campus) {
  const zones = campus.zones();
  const total = campus.nodes.size;
  return h(
    "div",
    { class: "campus" },
    h("h1", null, "Campus"),
    totals(campus),
    total === 0
      ? h(
          "p",
          { class: "empty" },
          "No machine lends yet. On one with GPUs: ",
          h("code", null, "rn agent --lend --detach"),
        )
      : h("div", { class: "zones" }, zones.map(([name, nodes]) => zone(campus, name, nodes, total))),
    links(campus),
    total ? legend(campus) : null,
  );
}

function totals(campus) {
  const gpus = { vacant: 0, busy: 0, leaving: 0, unreachable: 0 };
  for (const seen of campus.nodes.values()) {
    for (const gpu of seen.card.gpus) gpus[useOf(seen, gpu)]++;
  }
  let running = 0;
  let waiting = 0;
  let moves = 0;
  let lost = 0;
  let anew = 0;
  for (const record of campus.records.values()) {
    moves += record.moves;
    lost += record.steps_lost;
    if (record.lost === "all") anew++;
    if (record.state === "PENDING") waiting++;
    else if (!TERMINAL.has(record.state)) running++;
  }
  const lent = gpus.vacant + gpus.busy + gpus.leaving;
  return h(
    "dl",
    { class: "totals" },
    total("GPUs lent", lent, `${gpus.busy} busy, ${gpus.vacant} vacant`),
    total("Under notice", gpus.leaving, gpus.leaving ? "being taken back" : "nobody wants one back"),
    total("Jobs running", running, waiting ? `${waiting} waiting` : "none waiting"),
    total("Moves", moves, losses(lost, anew)),
  );
}

function losses(lost, anew) {
  const parts = [];
  if (lost) parts.push(`${count(lost, "step")} lost in all`);
  if (anew) parts.push(`${count(anew, "job")} lost all, never saved`);
  return parts.join(", ") || "no step lost";
}

function total(name, value, note) {
  return h(
    "div",
    { key: name },
    h("dt", null, name),
    h("dd", null, h("b", null, value), h("small", null, note)),
  );
}

function zone(campus, name, nodes, total) {
  const lent = nodes.reduce((sum, seen) => sum + seen.card.gpus.length, 0);
  const compact = total > COMPACT_FROM;
  const id = `zone-${name}`;
  return h(
    "section",
    { key: name, class: compact ? "zone compact" : "zone", "aria-labelledby": id },
    h(
      "h2",
      { id },
      name,
      h("small", null, `${count(nodes.length, "node")}, ${count(lent, "GPU")} lent`),
    ),
    h(
      "ul",
      { class: "nodes" },
      nodes.map((seen) => (compact ? pip(seen) : tile(campus, seen))),
    ),
  );
}

function tile(campus, seen) {
  const card = seen.card;
  const guests = campus.guestsOf(seen);
  const leaving = card.leaving.length && card.deadline;
  const left = leaving ? Math.max(0, card.deadline - campus.now()) : 0;
  return h(
    "li",
    { key: card.node, class: `node ${seen.state.toLowerCase()}` },
    h(
      "div",
      { class: "head" },
      h("a", { href: `#/owner/${encodeURIComponent(card.provider)}` }, card.node),
      h("span", { class: "state" }, words(seen)),
    ),
    gpus(seen, guests),
    h(
      "p",
      { class: "note" },
      leaving
        ? h("a", { href: "#/reclaims", class: "urgent" }, `back in ${duration(left)}`)
        : card.gpus.length
          ? `${card.provider || "owner"} · ${duration(card.terms.notice)} notice`
          : `${card.provider || "its owner"} uses it now`,
    ),
    uplink(campus.uplink(seen)),
  );
}

function uplink(link) {
  if (!link) return null;
  const used = (link.background || 0) + link.training + link.migration;
  return h(
    "div",
    { class: "uplink", title: tellLoad(link) },
    load(link),
    h("span", { class: "of" }, used ? `${bits(used)} out` : "network idle"),
  );
}

/** On a large campus a node is one mark for each GPU. */
function pip(seen) {
  const card = seen.card;
  const look = card.gpus.map((gpu) => useOf(seen, gpu)).join();
  return h(
    "li",
    {
      key: card.node,
      memo: [look, seen.state],
      class: `node ${seen.state.toLowerCase()}`,
      title: `${card.node}: ${words(seen)}`,
    },
    h("span", { class: "name" }, card.node),
    h(
      "span",
      { class: "gpus", role: "img", "aria-label": describe(seen) },
      card.gpus.map((gpu) => h("i", { key: gpu.id, class: `gpu ${useOf(seen, gpu)}` })),
    ),
  );
}

function gpus(seen, guests) {
  if (!seen.card.gpus.length) return h("p", { class: "none" }, "lends nothing now");
  const ranked = [...seen.card.gpus].sort((a, b) => a.index - b.index);
  const folded = ranked.length > FOLD_FROM ? ranked.filter((gpu) => useOf(seen, gpu) === "vacant") : [];
  return h(
    "ul",
    { class: "gpus" },
    ranked.filter((gpu) => !folded.includes(gpu)).map((gpu) => one(seen, gpu, guests)),
    folded.length
      ? h(
          "li",
          { key: "vacant", class: "folded" },
          folded.map((gpu) => h("i", { key: gpu.id, class: "gpu vacant", "aria-hidden": "true" })),
          h("span", { class: "use" }, `${folded.length} vacant`),
        )
      : null,
  );
}

function one(seen, gpu, guests) {
  const use = useOf(seen, gpu);
  const guest = guests.find((each) => (each.progress.gpus || []).includes(gpu.id));
  return h(
    "li",
    { key: gpu.id, title: `${gpu.model} ${gpu.memory_bytes ? size(gpu.memory_bytes) : ""}` },
    h("i", { class: `gpu ${use}`, "aria-hidden": "true" }),
    h("span", { class: "index" }, gpu.index),
    guest
      ? h(
          "a",
          { href: `#/job/${guest.record.id}`, class: "guest" },
          guest.record.spec.name,
          h("small", null, guest.record.spec.user),
        )
      : h("span", { class: "use" }, use),
  );
}

function describe(seen) {
  const tally = {};
  for (const gpu of seen.card.gpus) tally[useOf(seen, gpu)] = (tally[useOf(seen, gpu)] || 0) + 1;
  const parts = Object.entries(tally).map(([use, n]) => `${n} ${use}`);
  return `${seen.card.node}: ${parts.join(", ") || "lends nothing"}`;
}

export function words(seen) {
  return {
    IDLE: "vacant",
    MIXED: "some vacant",
    ALLOCATED: "all busy",
    DRAINING: "leaving",
    RECLAIMED: "with its owner",
    UNLENT: "not lent",
    UNREACHABLE: "not heard of",
  }[seen.state];
}

function legend(campus) {
  const marks = ["vacant", "busy", "leaving", "unreachable"].map((use) =>
    h("li", { key: use }, h("i", { class: `gpu ${use}`, "aria-hidden": "true" }), use),
  );
  const wires = campus.links.size || [...campus.nodes.values()].some((seen) => seen.card.traffic);
  const kinds = KINDS.map(([kind, name]) =>
    h("li", { key: kind }, h("i", { class: `swatch ${kind}`, "aria-hidden": "true" }), name),
  );
  return h(
    "div",
    { class: "legends" },
    h("ul", { class: "legend", "aria-label": "GPUs" }, h("li", { key: "of", class: "of" }, "GPUs"), marks),
    wires ? h("ul", { class: "legend", "aria-label": "Network" }, h("li", { key: "of", class: "of" }, "Network"), kinds) : null,
  );
}

const KINDS = [
  ["migration", "moving state"],
  ["training", "training"],
  ["background", "everybody else"],
];

/** Links that machines share, split by whose traffic it is. */
function links(campus) {
  const shared = campus.sharedLinks();
  if (!shared.length) return null;
  return h(
    "section",
    { class: "links", "aria-labelledby": "links" },
    h("h2", { id: "links" }, "Shared links"),
    h(
      "ul",
      null,
      shared.map((link) =>
        h(
          "li",
          { key: link.id, title: tellLoad(link) },
          h("span", { class: "name" }, link.id),
          load(link),
          h("span", { class: "of" }, `${bits(link.rate)}${link.assumed ? ", a guess" : ""}`),
        ),
      ),
    ),
  );
}

function load(link) {
  const share = (bytes) => (link.rate ? Math.min(1, (bytes || 0) / link.rate) : 0);
  return h(
    "span",
    { class: "load", role: "img", "aria-label": tellLoad(link) },
    KINDS.map(([kind]) => h("i", { key: kind, class: kind, style: `width:${100 * share(link[kind])}%` })),
  );
}

function tellLoad(link) {
  const share = (bytes) => (link.rate ? ` (${percent(bytes / link.rate)})` : "");
  const parts = KINDS.map(([kind, name]) =>
    link[kind] === null || link[kind] === undefined
      ? `${name} unknown`
      : `${name} ${link.atMost && kind === "background" ? "at most " : ""}${bits(link[kind])}${share(link[kind])}`,
  );
  const of = link.rate ? ` of ${bits(link.rate)}${link.assumed ? ", a guess" : ""}` : "";
  return `${link.id}${of}: ${parts.join(", ")}`;
}
