// The operator's view: who waits and why, the zones and who dispatches, memory, links, chains.

import { h } from "./dom.js";
import { ago, count, duration, percent, rate, size, SECOND } from "./format.js";
import { useOf } from "./store.js";

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

function table(caption, titles, rows) {
  return h(
    "div",
    { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" },
    h(
      "table",
      null,
      h("thead", null, h("tr", null, titles.map((title) => h("th", { key: title, scope: "col" }, title)))),
      h("tbody", null, rows),
    ),
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
      ? table("Zones", ["Zone", "Nodes", "Vacant", "Busy", "Leaving", "Who does what for it", "Oldest beat"], rows)
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
    h("figcaption", null, link.id, h("small", null, rate(link.rate))),
  );
}

function arc(radius, start, share) {
  const a = 2 * Math.PI * (start - 0.25);
  const b = a + 2 * Math.PI * Math.min(0.9999, share);
  const point = (angle) => `${(radius * Math.cos(angle)).toFixed(2)} ${(radius * Math.sin(angle)).toFixed(2)}`;
  return `M ${point(a)} A ${radius} ${radius} 0 ${share > 0.5 ? 1 : 0} 1 ${point(b)}`;
}

function chains(campus) {
  const known = campus.chains ? [...campus.chains.values()] : [];
  return section(
    "chains",
    "Slurm chains",
    null,
    known.length
      ? table(
          "Chains of batch allocations",
          ["Chain", "Links", "Gap", "Overlap"],
          known.map((each) =>
            h(
              "tr",
              { key: each.id },
              h("th", { scope: "row" }, each.id),
              h("td", { class: "number" }, each.links),
              h("td", { class: "number" }, duration(each.gap_s * SECOND)),
              h("td", { class: "number" }, duration(each.overlap_s * SECOND)),
            ),
          ),
        )
      : h("p", { class: "empty" }, "No chain runs on a batch cluster."),
  );
}
