// What the page knows of the campus: kept up to date by the gateway's events, or by a recording.

import { SECOND } from "./format.js";
import { announce } from "./dom.js";
import { Reclaims } from "./reclaims.js";

export const TERMINAL = new Set(["COMPLETED", "FAILED", "CANCELLED"]);
const RENDER_EVERY_MS = 100;
const MAX_SAMPLES = 600;

export class Campus {
  constructor() {
    this.records = new Map();
    this.nodes = new Map();
    this.links = new Map();
    this.chains = new Map();
    this.samples = new Map();
    this.reclaims = new Reclaims(this);
    this.session = null;
    this.line = "opening"; // then "open" or "broken"
    this.isCurrent = false;
    this.ahead = 0; // the gateway's clock minus ours, ns
    this.at = null; // the moment a recording is looked at; null: now
    this.listeners = new Set();
    this.pending = false;
    this.lastRender = 0;
  }

  now() {
    return this.at !== null ? this.at : Date.now() * 1e6 + this.ahead;
  }

  get mayAct() {
    return this.at === null && this.session !== null && this.session.access === "act";
  }

  get isOperator() {
    return this.session === null || this.session.role !== "user";
  }

  /** The gateway refuses the rest anyway; here it only saves people the refusal. */
  mayRead(record) {
    return this.isOperator || record.spec.user === this.session.name;
  }

  mayLend(node) {
    return this.mayAct && (this.isOperator || this.session.owns.includes(node));
  }

  onChange(listener) {
    this.listeners.add(listener);
  }

  /** Many events, one picture: at the next frame, and not more often than the eye needs. */
  changed() {
    if (this.pending) return;
    this.pending = true;
    const wait = Math.max(0, RENDER_EVERY_MS - (performance.now() - this.lastRender));
    setTimeout(() => requestAnimationFrame(() => this.render()), wait);
  }

  render() {
    this.pending = false;
    this.lastRender = performance.now();
    for (const listener of this.listeners) listener();
  }

  forgetAll() {
    this.records.clear();
    this.nodes.clear();
    this.links.clear();
    this.chains.clear();
    this.samples.clear();
    this.reclaims.clear();
  }

  /** One event, live or recorded. */
  apply(event, data) {
    switch (event) {
      case "campus":
        if (this.at === null) this.ahead = data.now - Date.now() * 1e6;
        if (data.reset) this.forgetAll();
        break;
      case "record":
        this.records.set(data.id, data);
        this.reclaims.sawRecord(data);
        break;
      case "node":
        data.heard = this.now() - data.age_s * SECOND;
        this.sawNode(data);
        break;
      case "chain":
        this.chains.set(data.id, data);
        break;
      case "gone":
        this.mapOf(data.kind).delete(data.id);
        break;
      case "current":
        this.isCurrent = true;
        break;
    }
  }

  sawNode(seen) {
    const before = this.nodes.get(seen.card.node);
    this.nodes.set(seen.card.node, seen);
    this.sample(seen);
    this.sawLinks(seen.card);
    this.reclaims.sawNode(seen, before);
  }

  /** Who conducts a stretch of the network tells what moves on it. */
  sawLinks(card) {
    for (const [id, link] of this.links) if (link.conductor === card.node) this.links.delete(id);
    for (const told of card.links || []) {
      const rate = told.carries || told.rate;
      this.links.set(told.link, {
        id: told.link,
        conductor: card.node,
        rate,
        assumed: told.assumed,
        migration: told.reached,
        training: told.use * rate,
        circle: told.round
          ? {
              period: told.round,
              met: told.met_before,
              meets: told.meets_now,
              arcs: told.voices.flatMap((voice) =>
                voice.talks.map(([start, length]) => ({
                  job: voice.job,
                  start,
                  length,
                  demand: voice.demand || 0,
                })),
              ),
            }
          : null,
      });
    }
  }

  mapOf(kind) {
    return { record: this.records, node: this.nodes, chain: this.chains }[kind] || new Map();
  }

  /** What a node's own link carries and whose traffic it is, in bytes a second; null if unknown.
   * All that its interface counts and that is neither of ours is somebody else's. */
  uplink(seen) {
    const { node, traffic, sending, uplink_bps } = seen.card;
    const link = this.links.get(`${node} up`);
    if (!link && !traffic) return null;
    const migration = link ? link.migration : (sending || []).reduce((sum, each) => sum + each.rate, 0);
    const training = link ? link.training : 0;
    return {
      id: `${node} up`,
      rate: link ? link.rate : uplink_bps || 0,
      assumed: link ? link.assumed : true,
      migration,
      training,
      background: traffic ? Math.max(0, traffic.sent - migration - training) : null,
    };
  }

  /** Links that more than one node uses. Nobody counts what else is on them, but it cannot be more
   * than what all machines there send or take in. */
  sharedLinks() {
    if (!this.links.size) return [];
    const known = new Map(this.zones());
    const own = new Set();
    for (const node of this.nodes.keys()) own.add(`${node} up`).add(`${node} down`);
    return [...this.links.values()]
      .filter((link) => !own.has(link.id))
      .map((link) => {
        const [, zone, way] = /^(.*) (up|down)$/.exec(link.id) || [];
        const there = known.get(zone) || known.get(`building ${zone}`);
        if (!there) return { ...link, background: null };
        const counted = there.filter((seen) => seen.card.traffic);
        const all = counted.reduce((sum, { card }) => sum + card.traffic[way === "up" ? "sent" : "received"], 0);
        const rest = Math.max(0, Math.min(all, link.rate) - link.migration - link.training);
        return { ...link, background: counted.length ? rest : null, atMost: true };
      })
      .sort((a, b) => compare(a.id, b.id));
  }

  /** How jobs are doing while the page is open; what was before that, the gateway tells. */
  sample(seen) {
    const { node, jobs, memory, sending } = seen.card;
    const vram = new Map(((memory && memory.vram) || []).map((each) => [each.gpu, each.used]));
    for (const progress of jobs) {
      let line = this.samples.get(progress.job);
      if (!line) this.samples.set(progress.job, (line = []));
      line.push({
        at: seen.heard || this.now(),
        node,
        step: progress.step,
        memory: progress.memory || 0,
        vram: (progress.gpus || []).reduce((sum, gpu) => sum + (vram.get(gpu) || 0), 0),
        training: this.talkOf(progress.job),
        moving: (sending || []).reduce((sum, each) => sum + (each.job === progress.job ? each.rate : 0), 0),
      });
      if (line.length > MAX_SAMPLES) line.splice(0, line.length - MAX_SAMPLES);
    }
  }

  /** What a job is known to exchange as it trains, on average over a round. */
  talkOf(job) {
    for (const { circle } of this.links.values()) {
      const arcs = circle ? circle.arcs.filter((each) => each.job === job) : [];
      if (arcs.length) {
        return arcs.reduce((sum, each) => sum + (each.demand * each.length) / circle.period, 0);
      }
    }
    return 0;
  }

  /** Ranked anew only when one came or went: hundreds beat all the time. */
  nodesByName() {
    if (!this.order || this.order.length !== this.nodes.size || !this.order.every((name) => this.nodes.has(name))) {
      this.order = [...this.nodes.keys()].sort(compare);
    }
    return this.order.map((name) => this.nodes.get(name));
  }

  zones() {
    const zones = new Map();
    for (const seen of this.nodesByName()) {
      const name = seen.card.zone || "campus";
      if (!zones.has(name)) zones.set(name, []);
      zones.get(name).push(seen);
    }
    return [...zones].sort((a, b) => compare(a[0], b[0]));
  }

  jobsNewestFirst() {
    return [...this.records.values()].sort((a, b) => b.submitted_at - a.submitted_at);
  }

  /** Steps travel with beats; a record learns of them only now and then. */
  stepOf(record) {
    const seen = record.holder && this.nodes.get(record.holder);
    const progress = seen && seen.card.jobs.find((each) => each.job === record.id);
    return progress ? Math.max(progress.step, record.step) : record.step;
  }

  guestsOf(seen) {
    return seen.card.jobs
      .map((progress) => ({ progress, record: this.records.get(progress.job) }))
      .filter((each) => each.record);
  }
}

const collator = new Intl.Collator(undefined, { numeric: true });

export function compare(a, b) {
  return collator.compare(a, b);
}

/** What a GPU does now, in one word. */
export function useOf(seen, gpu) {
  if (seen.state === "UNREACHABLE") return "unreachable";
  if (seen.card.leaving.includes(gpu.id)) return "leaving";
  return seen.card.vacant.includes(gpu.id) ? "vacant" : "busy";
}

// --- the gateway ---------------------------------------------------------------------------------

export class Refusal extends Error {}

export async function ask(method, path, body) {
  const options = { method, headers: { Accept: "application/json" } };
  if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let answer;
  try {
    answer = await fetch("api/v1" + path, options);
  } catch {
    throw new Refusal("The gateway does not answer.");
  }
  if (answer.ok) return answer.json();
  const problem = await answer.json().catch(() => ({}));
  const refusal = new Refusal(problem.detail || `The gateway answered ${answer.status}.`);
  refusal.status = answer.status;
  throw refusal;
}

/** The token travels behind `#`, which browsers send to nobody; it is exchanged for a cookie. */
export async function begin(token) {
  const answer = await fetch("api/v1/session", {
    method: "POST",
    headers: { Authorization: `Bearer ${token}` },
  });
  if (!answer.ok) throw new Refusal("This token is not the campus's; `rn page` prints a new link.");
  return answer.json();
}

const KINDS = ["campus", "record", "node", "chain", "gone", "current"];

const RECALL_AGAIN_MS = 4000;
const RECALLS = 15;

/** Reclaims that were over before the page was opened are in the journal: those of a moment ago a
 *  moment later, so it is asked twice, and again while somebody is not yet heard to have arrived. */
async function recallReclaims(campus, asked = 1) {
  let more = true;
  try {
    const { reclaims } = await ask("GET", "/reclaims");
    more = campus.reclaims.recall(reclaims);
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
  }
  campus.reclaims.isRecalled = true;
  campus.changed();
  if (asked === 1 || (more && asked < RECALLS)) {
    setTimeout(() => recallReclaims(campus, asked + 1), RECALL_AGAIN_MS);
  }
}

/** Follow the events for ever; the browser comes back by itself, with the id it heard last. */
export function follow(campus) {
  const source = new EventSource("api/v1/events");
  for (const kind of KINDS) {
    source.addEventListener(kind, (event) => {
      campus.apply(kind, JSON.parse(event.data));
      if (kind === "current") recallReclaims(campus);
      campus.changed();
    });
  }
  source.onopen = () => {
    if (campus.line === "broken") announce("The campus answers again.");
    campus.line = "open";
    campus.changed();
  };
  source.onerror = () => {
    if (campus.line === "open") announce("The line to the campus is cut; trying again.");
    campus.line = "broken";
    campus.changed();
    if (source.readyState === EventSource.CLOSED) {
      setTimeout(() => follow(campus), 2000);
    }
  };
}
