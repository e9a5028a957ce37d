// Reclaims racing their deadlines: each job, where it goes, what is left to move, and when it is there.

import { h } from "./dom.js";
import { ago, clock, count, duration, rate, size } from "./format.js";
import { STAGES, cost, expected, isPast } from "./reclaims.js";

export function reclaimsView(campus) {
  const open = campus.reclaims.open();
  const past = campus.reclaims.all.filter((each) => each.over);
  return h(
    "div",
    { class: "reclaims" },
    h("h1", null, "Reclaims"),
    open.length
      ? open.map((reclaim) => race(campus, reclaim))
      : h(
          "p",
          { class: "empty" },
          "No machine is being taken back. When an owner does, its jobs race their deadline here.",
        ),
    past.length
      ? h(
          "section",
          { class: "past", "aria-labelledby": "past" },
          h("h2", { id: "past" }, "Done"),
          past.map((reclaim) => race(campus, reclaim)),
        )
      : null,
  );
}

function race(campus, reclaim) {
  const now = campus.now();
  const left = reclaim.deadline - now;
  const id = `reclaim-${reclaim.id}`;
  const what = reclaim.gpus.length >= reclaim.offered ? "all GPUs" : count(reclaim.gpus.length, "GPU");
  return h(
    "article",
    {
      key: reclaim.id,
      class: reclaim.over ? `race over ${reclaim.over}` : left < 0 ? "race late" : "race",
      "aria-labelledby": id,
    },
    h(
      "header",
      null,
      h("h3", { id }, h("b", null, reclaim.node), ` takes ${what} back`),
      h("p", { class: "verdict" }, verdict(reclaim, now)),
    ),
    reclaim.jobs.length
      ? h(
          "ol",
          { class: "departures" },
          reclaim.jobs.map((departure) => row(campus, reclaim, departure, now)),
        )
      : h("p", { class: "none" }, "No job was on it."),
  );
}

function verdict(reclaim, now) {
  if (reclaim.atOnce && !reclaim.over) return "at once";
  if (reclaim.over === "withdrawn") return "taken back: the loan goes on";
  if (reclaim.over) {
    const early = reclaim.deadline - reclaim.freedAt;
    if (reclaim.atOnce) return [h("b", { class: "done" }, "done"), ` free at once · ${clock(reclaim.freedAt)}`];
    const saved = early >= 0 ? `${duration(early)} before the deadline` : "at the deadline";
    return [h("b", { class: "done" }, "done"), ` free ${saved} · ${clock(reclaim.freedAt)}`];
  }
  const left = Math.max(0, reclaim.deadline - now);
  return [
    h("b", { class: "countdown" }, duration(left)),
    ` to the deadline at ${clock(reclaim.deadline)}`,
  ];
}

function row(campus, reclaim, departure, now) {
  const record = campus.records.get(departure.job);
  const name = record ? record.spec.name : departure.job;
  const at = STAGES.indexOf(departure.stage);
  return h(
    "li",
    { key: departure.job, class: `departure ${departure.stage}` },
    h(
      "div",
      { class: "route" },
      h("a", { href: `#/job/${departure.job}` }, name),
      h("span", { class: "way" }, ` ${reclaim.node} → `, h("b", null, departure.to || "…")),
    ),
    h(
      "ol",
      { class: "stages", "aria-label": `Stage: ${departure.stage}` },
      STAGES.map((stage, index) =>
        h(
          "li",
          {
            key: stage,
            class: index === at ? "now" : isPast(departure, stage) ? "past" : "",
            "aria-current": index === at ? "step" : false,
          },
          stage,
        ),
      ),
    ),
    reclaim.atOnce ? null : track(reclaim, departure, now),
    h("p", { class: "bytes" }, bytes(record, departure, now)),
  );
}

/** From the notice to the deadline; what is left of the bytes below it, the expected end on it. */
function track(reclaim, departure, now) {
  const span = Math.max(1, reclaim.deadline - reclaim.began);
  const place = (at) => Math.min(100, Math.max(0, (100 * (at - reclaim.began)) / span));
  const end = departure.doneAt || Math.min(now, reclaim.deadline);
  const eta = departure.doneAt ? null : expected(departure, now);
  const transfer = departure.transfer;
  const moved = transfer && transfer.bytes ? 1 - transfer.bytes_left / transfer.bytes : null;
  return h(
    "div",
    { class: "track", "aria-hidden": "true" },
    h("i", { class: "elapsed", style: `transform:scaleX(${place(end) / 100})` }),
    moved !== null && !departure.doneAt
      ? h("i", { class: "moved", style: `transform:scaleX(${moved})` })
      : null,
    eta ? h("i", { class: "eta", style: `left:${place(eta)}%` }) : null,
    departure.doneAt ? h("i", { class: "finish", style: `left:${place(departure.doneAt)}%` }) : null,
    h("i", { class: "deadline" }),
  );
}

function bytes(record, departure, now) {
  const reclaim = departure.reclaim;
  if (departure.stage === "ended") return `${record ? record.state.toLowerCase() : "over"} before it had to move`;
  if (departure.stage === "stays") return "stays where it is";
  if (departure.stage === "waiting") {
    const newest = record && record.checkpoints[0];
    const from = newest ? `safe at step ${newest.step}` : "not saved, so it begins again";
    return `${from}; waits for a place: ${record ? record.reason : ""}`;
  }
  if (departure.doneAt) {
    const early = reclaim.deadline - departure.doneAt;
    const when = reclaim.atOnce
      ? `${duration(departure.doneAt - reclaim.began)} later`
      : early >= 0 ? `${duration(early)} to spare` : "after the deadline";
    return `running at ${departure.to}, ${when}, ${cost(departure)}`;
  }
  const transfer = departure.transfer;
  if (transfer && transfer.bytes_left === 0) return `all of ${size(transfer.bytes)} is there`;
  if (transfer) {
    const eta = expected(departure, now);
    const margin = eta ? reclaim.deadline - eta : null;
    return [
      `${size(transfer.bytes_left)} left`,
      transfer.bytes ? ` of ${size(transfer.bytes)}` : "",
      transfer.rate ? ` at ${rate(transfer.rate)}` : "",
      eta ? `, there in ${duration(Math.max(0, eta - now))}` : "",
      transfer.shed ? ", given up so that others arrive; it goes on from its last copy" : "",
      margin === null || transfer.shed ? "" : margin >= 0 ? `, ${duration(margin)} to spare` : ", too late by now",
    ];
  }
  const newest = record && record.checkpoints[0];
  if (!newest) return "not saved yet";
  const copy = newest.holders.filter((each) => each !== reclaim.node);
  return (
    `${size(newest.size)} of state, saved ${ago(Math.max(0, now - newest.taken_at))} at step ${newest.step}` +
    (copy.length ? `, a copy is at ${copy.join(", ")}` : "")
  );
}
