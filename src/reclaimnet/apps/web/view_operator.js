// The operator's view: who waits and why, the zones and who dispatches, memory, links, chains.

import { h } from "./dom.js";
import { ago, bits, count, duration, percent, size, SECOND } from "./format.js";
import { compare, useOf } from "./store.js";
import { table } from "./table.js";

const NUMBERS = new Set(["#", "GPUs", "Priority", "Waits", "Nodes", "Vacant", "Busy", "Leaving", "Stall", "Jobs", "Gap", "Overlap"]);

export function operatorView(campus) {
  return h(
    "div",
    { class: "operator" },
    h("h1", null, "Operator"),
    queue(campus),
    zones(campus),
    airlock(campus),
    circles(campus),
    chains(campus),
    campus.recording
      ? null
      : h("p", { class: "hint" }, h("a", { href: "api/v1/metrics" }, "Prometheus metrics"), " · ", h("a", { href: "schema" }, "OpenAPI")),
  );
}

function section(id, title, note, ...content) {
  return h(
    "section",
    { key: id, "aria-labelledby": id },
    h("h2", { id }, title, note ? h("small", null, note) : null),
    content,
  );
}

function queue(campus) {
  const waiting = [...campus.records.values()]
    .filter((record) => record.state === "PENDING")
    .sort((a, b) => b.spec.priority - a.spec.priority || a.submitted_at - b.submitted_at);
  const now = campus.now();
  return section(
    "queue",
    "Queue",
    count(waiting.length, "job"),
    waiting.length
      ? table(
          "Jobs that wait",
          ["#", "Job", "User", "GPUs", "Priority", "Waits", "Why, and when it can expect to start"],
          NUMBERS,
          waiting.map((record, index) =>
            h(
              "tr",
              { key: record.id },
              h("td", { class: "number" }, index + 1),
              h("th", { scope: "row" }, h("a", { href: `#/job/${record.id}` }, record.spec.name)),
              h("td", null, record.spec.user),
              h("td", { class: "number" }, record.spec.gpus),
              h("td", { class: "number" }, record.spec.priority),
              h("td", { class: "number" }, duration(Math.max(0, now - record.submitted_at))),
              h("td", { class: "reason" }, record.reason),
            ),
          ),
        )
      : h("p", { class: "empty" }, "Nobody waits."),
  );
}

function zones(campus) {
  const rows = campus.zones().map(([name, nodes]) => {
    const tally = { vacant: 0, busy: 0, leaving: 0, unreachable: 0 };
    for (const seen of nodes) for (const gpu of seen.card.gpus) tally[useOf(seen, gpu)]++;
    const roles = nodes.filter((seen) => (seen.card.roles || []).length);
    const oldest = Math.max(...nodes.map((seen) => campus.now() - seen.heard));
    return h(
      "tr",
      { key: name },
      h("th", { scope: "row" }, name),
      h("td", { class: "number" }, nodes.length),
      h("td", { class: "number" }, tally.vacant),
      h("td", { class: "number" }, tally.busy),
      h("td", { class: "number" }, tally.leaving),
      h("td", null, roles.map((seen) => `${seen.card.node}: ${seen.card.roles.join(", ")}`).join("; ") || "–"),
      h("td", null, ago(Math.max(0, oldest))),
    );
  });
  return section(
    "zones",
    "Zones",
    null,
    rows.length
      ? table("Zones", ["Zone", "Nodes", "Vacant", "Busy", "Leaving", "Who does what for it", "Oldest beat"], NUMBERS, rows)
      : h("p", { class: "empty" }, "No node has joined."),
  );
}

function airlock(campus) {
  const nodes = campus.nodesByName().filter((seen) => seen.card.memory);
  const held = nodes.flatMap((seen) => seen.card.memory.held.map((each) => ({ seen, each })));
  return section(
    "airlock",
    "Airlock",
    held.length ? `${count(held.length, "job")} held` : "no job is held",
    nodes.length
      ? table(
          "Memory of nodes",
          ["Node", "Memory", "Stall", "Held", "Newcomers"],
          NUMBERS,
          nodes.map((seen) => {
            const memory = seen.card.memory;
            const share = memory.limit ? memory.used / memory.limit : 0;
            return h(
              "tr",
              { key: seen.card.node },
              h("th", { scope: "row" }, seen.card.node),
              h(
                "td",
                null,
                h("span", { class: "meter", role: "img", "aria-label": percent(share) }, h("i", { style: `width:${100 * share}%` })),
                ` ${size(memory.used)} of ${size(memory.limit)}`,
              ),
              h("td", { class: "number" }, percent(memory.stall)),
              h(
                "td",
                null,
                memory.held.map((each) => `${each.job} ${each.rung}, ${duration(Math.max(0, each.until - seen.card.beat))} at most: ${each.why}`).join("; ") || "–",
              ),
              h("td", null, seen.card.short_of_memory ? "high priority only" : "welcome"),
            );
          }),
        )
      : h("p", { class: "empty" }, "No node tells its memory."),
  );
}

/** A round as a circle, and each job's burst as an arc of it. */
function circles(campus) {
  const turning = [...campus.links.values()].filter((link) => link.circle);
  return section(
    "circles",
    "Conductor",
    turning.length ? count(turning.length, "link") : null,
    turning.length
      ? h("div", { class: "circles" }, turning.map((link) => circle(link)))
      : h("p", { class: "empty" }, "No link needs its bursts arranged."),
  );
}

function circle(link) {
  const { period, arcs } = link.circle;
  return h(
    "figure",
    { key: link.id, class: "circle" },
    h(
      "svg",
      { viewBox: "-60 -60 120 120", role: "img", "aria-label": `${count(arcs.length, "job")} share a round of ${duration(period)}` },
      h("circle", { class: "ring", r: 44 }),
      arcs.map((each, index) =>
        h(
          "path",
          { key: each.job, class: `arc arc-${index % 6}`, d: arc(44 - (index % 3) * 9, each.start / period, each.length / period) },
          h("title", null, `${each.job}: ${duration(each.length)} of ${duration(period)}`),
        ),
      ),
      h("text", { "text-anchor": "middle", y: 4 }, duration(period)),
    ),
    h("figcaption", null, link.id, h("small", null, bits(link.rate))),
  );
}

function arc(radius, start, share) {
  const a = 2 * Math.PI * (start - 0.25);
  const b = a + 2 * Math.PI * Math.min(0.9999, share);
  const point = (angle) => `${(radius * Math.cos(angle)).toFixed(2)} ${(radius * Math.sin(angle)).toFixed(2)}`;
  return `M ${point(a)} A ${radius} ${radius} 0 ${share > 0.5 ? 1 : 0} 1 ${point(b)}`;
}

/** Services on a batch cluster, one job after the other: what their seams cost, and what is to come. */
function chains(campus) {
  const known = [...campus.chains.values()].sort((a, b) => compare(a.id, b.id));
  const up = known.filter((each) => each.told.up).length;
  return section(
    "chains",
    "Slurm chains",
    known.length ? `${up} of ${known.length} serving` : null,
    known.length
      ? table(
          "Chains of batch allocations",
          ["Chain", "State", "Jobs", "Gap", "Overlap", "Its newest jobs", "Next start"],
          NUMBERS,
          known.map((each) => chain(campus, each)),
        )
      : h("p", { class: "empty" }, "No chain runs on a batch cluster. ", h("code", null, "rn chain run -- ./serve.sh"), " keeps a service on Slurm."),
  );
}

const ACTIVE = new Set(["active", "ending"]);
const CHAIN_SILENT = 60 * SECOND;

function chain(campus, { id, user, told, told_at }) {
  const silent = campus.now() - told_at > CHAIN_SILENT && ACTIVE.has(told.phase);
  const [words, look] = silent
    ? ["not heard of", ""]
    : !ACTIVE.has(told.phase)
      ? [told.phase, ""]
      : told.up
        ? ["serving", "completed"]
        : told.links.some((each) => each.started)
          ? ["in a gap", "failed"]
          : ["to begin", "configuring"];
  return h(
    "tr",
    { key: id },
    h("th", { scope: "row" }, id.slice(user.length + 1), h("small", null, user)),
    h("td", null, h("span", { class: `state-chip ${look}`, title: told.words }, words)),
    h("td", { class: "number" }, told.jobs),
    h("td", { class: told.gap_s ? "number lacks" : "number" }, duration(told.gap_s * SECOND)),
    h("td", { class: "number" }, duration(told.overlap_s * SECOND)),
    h("td", null, lane(campus, told)),
    h("td", null, start(campus, told)),
  );
}

function start(campus, told) {
  if (!told.next_start) return told.waits || "–";
  const ahead = (at) => duration(Math.max(0, at - campus.now()));
  return [
    `in ${ahead(told.next_start)}`,
    told.next_high ? h("small", null, ` ${ahead(told.next_low)} to ${ahead(told.next_high)}`) : null,
  ];
}

/** The jobs on one line: white between two is a gap, where two lie over each other both are paid for. */
function lane(campus, told) {
  const now = campus.now();
  const begun = told.links.filter((each) => each.started).slice(-6);
  if (!begun.length) return h("small", null, "none has started");
  const begin = Math.min(...begun.map((each) => each.started));
  const end = Math.max(now, ...begun.map((each) => each.ends || now));
  const x = (at) => (200 * (at - begin)) / Math.max(1, end - begin);
  return h(
    "svg",
    {
      class: "chain",
      viewBox: "0 0 200 22",
      preserveAspectRatio: "none",
      role: "img",
      "aria-label": `${count(begun.length, "job")}, gap ${duration(told.gap_s * SECOND)}, overlap ${duration(told.overlap_s * SECOND)} so far`,
    },
    begun.map((each, index) =>
      h(
        "rect",
        {
          key: each.id,
          class: `link ${each.ends && each.ends <= now ? "past" : ""}`,
          x: x(each.started),
          y: index % 2 ? 12 : 2,
          width: Math.max(1, x(each.ends || now) - x(each.started)),
          height: 8,
          rx: 1,
        },
        h("title", null, `job ${each.id}: ${each.state}, ${duration((each.ends || now) - each.started)}`),
      ),
    ),
    h("line", { class: "now", x1: x(now), x2: x(now), y1: 0, y2: 22 }),
  );
}
