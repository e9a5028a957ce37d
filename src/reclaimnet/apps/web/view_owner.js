// An owner's machines: take them back, lend them again, see when they are lent and what they did.

import { announce, h, patch } from "./dom.js";
import { count, duration, moment, HOUR, MINUTE, SECOND } from "./format.js";
import { ask, compare, useOf } from "./store.js";
import { words } from "./view_campus.js";

const NOTICES = [
  { label: "Now", grace: 0, note: "guests end at once; they go on elsewhere from their last checkpoint" },
  { label: "30 seconds", grace: 30 * SECOND },
  { label: "2 minutes", grace: 2 * MINUTE },
  { label: "10 minutes", grace: 10 * MINUTE },
];
const DAYS = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"];
const deeds = new Map(); // node -> what it has done, or null while it is asked
const DEEDS_EVERY_MS = 10_000;

export function ownerView(campus, { id }) {
  const owners = [...new Set(campus.nodesByName().map((seen) => seen.card.provider))].sort(compare);
  const chosen = id ?? localStorage.getItem("owner") ?? owners[0];
  const me = owners.includes(chosen) ? chosen : owners[0];
  const mine = campus.nodesByName().filter((seen) => seen.card.provider === me);
  return h(
    "div",
    { class: "owner" },
    h("h1", null, "My machines"),
    owners.length > 1
      ? h(
          "label",
          { class: "choose" },
          "I am ",
          h(
            "select",
            {
              value: me,
              onchange: (event) => {
                localStorage.setItem("owner", event.target.value);
                location.hash = `#/owner/${encodeURIComponent(event.target.value)}`;
              },
            },
            owners.map((name) =>
              h("option", { key: name, value: name, selected: name === me }, name || "nobody named"),
            ),
          ),
        )
      : null,
    mine.length
      ? mine.map((seen) => machine(campus, seen))
      : h("p", { class: "empty" }, "No machine of yours is on the campus. ", h("code", null, "rn agent --lend --detach"), " lends one."),
  );
}

function machine(campus, seen) {
  const card = seen.card;
  const guests = campus.guestsOf(seen);
  const id = `machine-${card.node}`;
  const leaving = card.leaving.length > 0;
  const staying = card.gpus.filter((gpu) => !card.leaving.includes(gpu.id));
  return h(
    "article",
    { key: card.node, class: "machine", "aria-labelledby": id },
    h(
      "header",
      null,
      h("h2", { id }, card.node, h("small", null, words(seen))),
      h(
        "div",
        { class: "actions" },
        leaving
          ? h(
              "button",
              { disabled: !campus.mayLend(card.node), onclick: () => act(campus, card.node, "withdraw") },
              "Keep lending",
            )
          : null,
        staying.length || card.opens_at
          ? h(
              "button",
              {
                class: "take",
                disabled: !campus.mayLend(card.node),
                onclick: () => takeBack(campus, card.node, null),
              },
              "Take it back",
            )
          : null,
        !card.gpus.length && !card.opens_at
          ? h(
              "button",
              {
                class: "primary",
                disabled: !campus.mayLend(card.node),
                // Nothing is said but that: the same GPUs, on the same terms.
                onclick: () => act(campus, card.node, "lend", {}),
              },
              "Lend it again",
            )
          : null,
      ),
    ),
    leaving && card.deadline
      ? h(
          "p",
          { class: "urgent" },
          h("a", { href: "#/reclaims" }, `Yours again in ${duration(Math.max(0, card.deadline - campus.now()))} at the latest`),
        )
      : null,
    card.opens_at
      ? h("p", null, `Lends nothing now, and again by itself in ${duration(Math.max(0, card.opens_at - campus.now()))}.`)
      : null,
    card.gpus.length
      ? h(
          "ul",
          { class: "own-gpus" },
          [...card.gpus]
            .sort((a, b) => a.index - b.index)
            .map((gpu) => {
              const use = useOf(seen, gpu);
              const guest = guests.find((each) => (each.progress.gpus || []).includes(gpu.id));
              return h(
                "li",
                { key: gpu.id },
                h("i", { class: `gpu ${use}`, "aria-hidden": "true" }),
                h("b", null, `GPU ${gpu.index}`),
                h(
                  "span",
                  { class: "use" },
                  guest
                    ? [h("a", { href: `#/job/${guest.record.id}` }, guest.record.spec.name), ` of ${guest.record.spec.user}`]
                    : use,
                ),
                h(
                  "button",
                  {
                    disabled: !campus.mayLend(card.node) || use === "leaving",
                    "aria-label": `Take GPU ${gpu.index} of ${card.node} back`,
                    onclick: () => takeBack(campus, card.node, gpu),
                  },
                  use === "leaving" ? "Leaving" : "Take back",
                ),
              );
            }),
        )
      : null,
    h(
      "details",
      null,
      h("summary", null, "When it is lent"),
      card.gpus.length || card.opens_at
        ? calendar(card.terms)
        : h("p", null, "It is not lent. Lent again, it is on the terms of before."),
    ),
    h(
      "details",
      { ontoggle: (event) => event.target.open && loadDeeds(campus, card.node) },
      h("summary", null, "What it has done for others"),
      did(campus, card.node),
    ),
  );
}

// --- taking back ---------------------------------------------------------------------------------

function takeBack(campus, node, gpu) {
  const seen = campus.nodes.get(node);
  const promised = seen.card.terms.notice;
  const choices = [
    { label: `As promised: ${duration(promised)}`, grace: null },
    ...NOTICES.filter((each) => each.grace !== promised),
  ];
  const guests = campus
    .guestsOf(seen)
    .filter((each) => !gpu || (each.progress.gpus || []).includes(gpu.id));
  const dialog = document.getElementById("dialog");
  let grace = null;
  let reason = "";
  const submit = async (event) => {
    event.preventDefault();
    dialog.close();
    await act(campus, node, "reclaim", { gpus: gpu ? [gpu.id] : [], grace, reason });
  };
  dialog.shown = undefined;
  patch(
    dialog,
    h(
      "form",
      { onsubmit: submit },
      h("h2", { id: "dialog-title" }, gpu ? `Take GPU ${gpu.index} of ${node} back` : `Take ${node} back`),
      h(
        "p",
        null,
        guests.length
          ? `${guests.map((each) => each.record.spec.name).join(", ")} will move away and lose no finished step if there is time.`
          : "No job is on it.",
      ),
      h(
        "fieldset",
        null,
        h("legend", null, "How much notice do you give?"),
        choices.map((choice, index) =>
          h(
            "label",
            { key: choice.label },
            h("input", {
              type: "radio",
              name: "grace",
              checked: index === 0,
              onchange: () => (grace = choice.grace),
            }),
            h("span", null, choice.label, choice.note ? h("small", null, choice.note) : null),
          ),
        ),
      ),
      h("label", { class: "field" }, "Reason, for those who have to move (optional)", h("input", {
        type: "text",
        maxlength: "200",
        oninput: (event) => (reason = event.target.value),
      })),
      h(
        "div",
        { class: "actions" },
        h("button", { type: "button", onclick: () => dialog.close() }, "Not now"),
        h("button", { class: "take", type: "submit" }, "Take it back"),
      ),
    ),
  );
  dialog.showModal();
}

async function act(campus, node, verb, body) {
  try {
    const reply = await ask("POST", `/nodes/${encodeURIComponent(node)}/${verb}`, body);
    announce(reply.text);
    if (verb === "reclaim") location.hash = "#/reclaims";
  } catch (error) {
    announce(error.message);
    alert(error.message);
  }
}

// --- terms and deeds -----------------------------------------------------------------------------

/** A week by the hour; the terms' hours are nanoseconds since midnight, local to the owner. */
function calendar(terms) {
  const windows = terms.maintenance || [];
  return h(
    "div",
    { class: "calendar" },
    h(
      "p",
      null,
      terms.hours.length ? "Lent at the marked hours" : "Lent at all hours",
      `, with ${duration(terms.notice)} notice, to ${terms.users.length ? terms.users.join(", ") : "everyone"}.`,
    ),
    h(
      "table",
      { class: "week" },
      h("caption", { class: "unseen" }, "Hours of the week at which it is lent"),
      h(
        "tbody",
        null,
        DAYS.map((day, index) =>
          h(
            "tr",
            { key: day },
            h("th", { scope: "row" }, day),
            Array.from({ length: 24 }, (_, hour) => {
              const lent =
                !terms.hours.length ||
                terms.hours.some(
                  (each) =>
                    each.days.includes(index) && each.opens <= hour * HOUR && hour * HOUR < each.closes,
                );
              return h("td", { key: hour, class: lent ? "lent" : "", title: `${day} ${hour}:00 ${lent ? "lent" : "not lent"}` });
            }),
          ),
        ),
        h(
          "tr",
          { "aria-hidden": "true" },
          h("th"),
          Array.from({ length: 24 }, (_, hour) => h("td", { key: hour, class: "hour" }, hour % 6 ? "" : hour)),
        ),
      ),
    ),
    windows.map((each) =>
      h("p", { key: each.begins }, `Not lent from ${moment(each.begins)} to ${moment(each.ends)}.`),
    ),
  );
}

async function loadDeeds(campus, node) {
  const known = deeds.get(node);
  if (campus.recording || (known && performance.now() - known.at < DEEDS_EVERY_MS)) return;
  deeds.set(node, { at: performance.now(), told: known && known.told });
  try {
    deeds.set(node, { at: performance.now(), told: await ask("GET", `/nodes/${encodeURIComponent(node)}/deeds`) });
  } catch (error) {
    deeds.set(node, { at: performance.now(), told: null, refused: error.message });
  }
  campus.changed();
}

function did(campus, node) {
  const known = deeds.get(node);
  const told = known && known.told;
  if (!told) return h("p", { class: "empty" }, (known && known.refused) || "Reading the journal…");
  const name = (guest) => {
    const record = campus.records.get(guest.job);
    return record ? `${record.spec.name} of ${record.spec.user}` : guest.job;
  };
  return h(
    "div",
    null,
    h(
      "p",
      null,
      `${(told.gpu_s / 3600).toFixed(1)} GPU hours for ${count(new Set(told.guests.map((g) => g.job)).size, "job")}, `,
      `${count(told.copies, "checkpoint")} taken in, taken back ${count(told.reclaims, "time")}.`,
    ),
    h(
      "ul",
      { class: "guests" },
      told.guests.slice(0, 12).map((guest) =>
        h(
          "li",
          { key: `${guest.job}${guest.epoch}` },
          h("a", { href: `#/job/${guest.job}` }, name(guest)),
          ` ${guest.ended ? duration(guest.ended - guest.began) : "still here"}, ${guest.outcome || "running"}`,
        ),
      ),
    ),
  );
}
