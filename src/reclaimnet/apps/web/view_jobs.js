// All jobs, the newest first, in a table that also reads well on a phone.

import { h } from "./dom.js";
import { duration } from "./format.js";
import { placesOf } from "./reclaims.js";
import { TERMINAL } from "./store.js";
import { table } from "./table.js";

const MAX_SHOWN = 200;
const NUMBERS = new Set(["GPUs", "Step", "Moves", "Lost", "Age"]);
let showEnded = true;

export function jobsView(campus) {
  const jobs = campus.jobsNewestFirst().filter((each) => showEnded || !TERMINAL.has(each.state));
  const now = campus.now();
  return h(
    "div",
    { class: "jobs" },
    h("h1", null, "Jobs"),
    h(
      "label",
      { class: "switch" },
      h("input", {
        type: "checkbox",
        checked: showEnded,
        onchange: (event) => {
          showEnded = event.target.checked;
          campus.changed();
        },
      }),
      " also those that are over",
    ),
    jobs.length
      ? table(
          "Jobs",
          ["Job", "User", "State", "Where", "GPUs", "Step", "Moves", "Lost", "Age", "Reason"],
          NUMBERS,
          jobs.slice(0, MAX_SHOWN).map((record) => row(campus, record, now)),
        )
      : h("p", { class: "empty" }, "No jobs. ", h("code", null, "rn run -- python train.py"), " starts one."),
    jobs.length > MAX_SHOWN ? h("p", { class: "hint" }, `${jobs.length - MAX_SHOWN} older ones are not shown; \`rn ps -a\` lists all.`) : null,
  );
}

function row(campus, record, now) {
  const age = (record.ended_at || now) - record.submitted_at;
  return h(
    "tr",
    { key: record.id },
    h("th", { scope: "row" }, h("a", { href: `#/job/${record.id}` }, record.spec.name), h("small", null, record.id)),
    h("td", null, record.spec.user),
    h("td", null, state(record)),
    h("td", null, placesOf(record).join(", ") || "–"),
    h("td", { class: "number" }, record.spec.gpus * (record.spec.nodes || 1)),
    h("td", { class: "number" }, campus.stepOf(record)),
    h("td", { class: "number" }, record.moves),
    h("td", { class: "number" }, record.lost),
    h("td", { class: "number" }, duration(Math.max(0, Math.floor(age / 1e9) * 1e9)).replace(".0", "")),
    h("td", { class: "reason" }, record.reason || (record.exit_code ? `exit ${record.exit_code}` : "")),
  );
}

export function state(record) {
  return h("span", { class: `state-chip ${record.state.toLowerCase()}` }, record.state.toLowerCase());
}
