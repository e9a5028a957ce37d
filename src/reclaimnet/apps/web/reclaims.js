// Reclaims as they happen: who takes what back, which jobs have to leave, and how far each is.

import { announce } from "./dom.js";
import { count, duration, SECOND } from "./format.js";

const MAX_KEPT = 50;
const SAME = 1.5 * SECOND; // two clocks may tell the same moment so differently
const ENDED = new Set(["COMPLETED", "FAILED", "CANCELLED"]);

/** The steps of a departure, in their order; the last is the goal. */
export const STAGES = ["notice", "saving", "moving", "restoring", "running"];

export class Reclaims {
  constructor(campus) {
    this.campus = campus;
    this.all = []; // newest first
    this.departures = new Map(); // job -> the open departure
    this.isRecalled = false; // whether the journal was asked for what is over
  }

  clear() {
    this.all = [];
    this.departures.clear();
    this.isRecalled = false;
  }

  /** What the journal knows of reclaims that are over. Those that were seen here are known better.
   *  Whether it may soon know more: what has just happened takes a moment to get there. */
  recall(told) {
    this.all = this.all.filter((each) => !each.isRecalled);
    for (const each of told) {
      const known = this.all.find(
        (other) =>
          other.node === each.node &&
          (Math.abs(other.deadline - each.deadline) < SAME || (each.at >= other.began - SAME && each.at <= other.deadline)),
      );
      // Who opens the page in the middle of a race learns when it began.
      if (known) known.began = Math.min(known.began, each.at);
      else this.all.push(this.recalled(each));
    }
    this.all.sort((a, b) => b.began - a.began);
    if (this.all.length > MAX_KEPT) this.all.length = MAX_KEPT;
    return this.all.some((each) => each.isRecalled && each.jobs.some((job) => job.stage === "waiting"));
  }

  recalled(told) {
    const left = told.departures.map((each) => each.left || each.done).filter(Boolean);
    const freedAt = left.length ? Math.max(told.at, ...left) : told.at;
    const reclaim = {
      id: `${told.node}@${told.deadline}`,
      isRecalled: true,
      node: told.node,
      provider: "",
      gpus: told.gpus,
      offered: told.whole ? told.gpus.length : Infinity,
      began: told.at,
      deadline: told.deadline,
      jobs: [],
      over: told.withdrawn ? "withdrawn" : "back",
      freedAt,
      endedAt: freedAt,
      atOnce: told.deadline - told.at < SAME,
    };
    reclaim.jobs = told.departures.map((each) => ({
      job: each.job,
      reclaim,
      epoch: 0,
      began: told.at,
      stage: told.withdrawn ? "stays" : each.done ? "running" : this.stageOf(each.job),
      to: each.to || null,
      doneAt: each.done,
      lost: 0,
      stepsLost: each.steps_lost,
      saved: each.saved,
      restored: each.restored,
      transfer: null,
    }));
    return reclaim;
  }

  stageOf(job) {
    const record = this.campus.records.get(job);
    return record && !ENDED.has(record.state) ? "waiting" : "ended";
  }

  open() {
    return this.all.filter((each) => !each.over);
  }

  sawNode(seen, before) {
    const card = seen.card;
    this.sawVanish(seen, before);
    let current = this.all.find((each) => each.node === card.node && !each.over);
    if (card.leaving.length && card.deadline) {
      const known = this.all.find((each) => each.node === card.node);
      if (known && known.over === "back" && known.deadline === card.deadline) return;
      if (!current || !card.leaving.some((gpu) => current.gpus.includes(gpu))) {
        if (current) this.close(current, "back");
        current = this.begin(seen);
      }
      current.deadline = card.deadline;
      for (const gpu of card.leaving) if (!current.gpus.includes(gpu)) current.gpus.push(gpu);
    }
    if (!current) return;
    for (const progress of card.jobs) {
      if (this.mustLeave(current, card, progress)) this.depart(current, progress.job);
    }
    for (const record of this.campus.records.values()) {
      if (placesOf(record).includes(card.node) && record.state === "MIGRATING") {
        this.depart(current, record.id);
      }
    }
    this.sawSending(current, card);
    const stays = (gpu) => card.gpus.some((g) => g.id === gpu) && !card.leaving.includes(gpu);
    if (!card.leaving.length) {
      this.close(current, current.gpus.every(stays) ? "withdrawn" : "back");
    } else {
      this.look(current);
    }
  }

  /** Taken back at once, between two beats: there was no notice to be seen. */
  sawVanish(seen, before) {
    const was = before ? before.card : { gpus: [], leaving: [], jobs: [] };
    const offered = new Set(seen.card.gpus.map((gpu) => gpu.id));
    const gone = was.gpus.map((gpu) => gpu.id).filter((gpu) => !offered.has(gpu));
    const known = this.all.filter((each) => each.node === seen.card.node).slice(0, 2);
    const fresh = gone.filter(
      (gpu) => !was.leaving.includes(gpu) && !known.some((each) => !each.over && each.gpus.includes(gpu)),
    );
    if (!fresh.length) return;
    const now = this.campus.now();
    const card = { ...seen.card, gpus: was.gpus, leaving: fresh, deadline: now };
    const reclaim = this.begin({ ...seen, card }, true);
    for (const progress of was.jobs) {
      if (this.mustLeave(reclaim, card, progress)) this.depart(reclaim, progress.job);
    }
    this.look(reclaim);
  }

  mustLeave(reclaim, card, progress) {
    const gpus = progress.gpus || [];
    if (gpus.length) return gpus.some((gpu) => reclaim.gpus.includes(gpu));
    return card.leaving.length === card.gpus.length;
  }

  begin(seen, atOnce = false) {
    const now = this.campus.now();
    const card = seen.card;
    const reclaim = {
      id: `${card.node}@${card.deadline}`,
      node: card.node,
      provider: card.provider,
      gpus: [...card.leaving],
      offered: card.gpus.length,
      began: now,
      deadline: card.deadline,
      jobs: [],
      over: null,
      freedAt: null,
      atOnce,
    };
    this.all.unshift(reclaim);
    if (this.all.length > MAX_KEPT) this.all.length = MAX_KEPT;
    if (this.campus.isCurrent && !atOnce) {
      const left = duration(card.deadline - now);
      announce(`${card.node} is taken back: ${count(reclaim.gpus.length, "GPU")} within ${left}.`);
    }
    return reclaim;
  }

  depart(reclaim, job) {
    if (reclaim.jobs.some((each) => each.job === job)) return;
    const record = this.campus.records.get(job);
    const departure = {
      job,
      reclaim,
      epoch: record ? record.epoch : 0,
      from: record ? placesOf(record) : [],
      began: this.campus.now(),
      stage: "notice",
      to: null,
      doneAt: null,
      lost: record ? record.steps_lost : 0,
      transfer: null,
    };
    reclaim.jobs.push(departure);
    this.departures.set(job, departure);
    if (record) this.sawRecord(record);
  }

  sawRecord(record) {
    const departure = this.departures.get(record.id);
    if (!departure || departure.doneAt !== null) return;
    const source = departure.reclaim.node;
    const before = departure.stage;
    const places = placesOf(record);
    const news = places.filter((node) => !departure.from.includes(node));
    departure.to = record.handover_to || news.join(", ") || departure.to;
    if (ENDED.has(record.state)) {
      departure.stage = "ended";
    } else if (places.includes(source)) {
      // Its last save is on the way to the place that was found; before, it is looked for.
      if (record.handover_to) departure.stage = "moving";
      else if (record.state !== "RUNNING") departure.stage = "saving";
    } else if (record.holder) {
      departure.stage = record.state === "RUNNING" ? "running" : "restoring";
    } else {
      departure.stage = "waiting";
    }
    const isDone = ["running", "ended", "waiting"].includes(departure.stage);
    if (isDone && record.state !== "PENDING") {
      departure.doneAt = this.campus.now();
      departure.stepsLost = record.steps_lost - departure.lost;
      // By what is kept of it from before this start: it may have begun again with nothing.
      const kept = record.checkpoints.filter((each) => each.epoch < record.epoch);
      departure.saved = kept.some((each) => each.taken_at >= departure.reclaim.began - SAME);
      departure.restored = kept.length > 0;
      this.departures.delete(record.id);
      if (departure.stage === "running" && before !== "running" && this.campus.isCurrent) {
        announce(`${record.spec.name} goes on at ${departure.to || record.holder}.`);
      }
    }
    this.look(departure.reclaim);
  }

  /** What is on its way from the node: the bytes of those who leave it. */
  sawSending(reclaim, card) {
    for (const departure of reclaim.jobs) {
      const sent = (card.sending || []).some((each) => each.job === departure.job);
      // What was on its way and is no more has arrived.
      if (departure.transfer && !sent) {
        departure.transfer = { ...departure.transfer, bytes_left: 0, rate: 0, eta: null };
      }
    }
    for (const sent of card.sending || []) {
      const departure = this.departures.get(sent.job);
      if (!departure || departure.reclaim !== reclaim || departure.doneAt !== null) continue;
      departure.transfer = {
        bytes: sent.size,
        bytes_left: sent.bytes_left,
        rate: sent.rate || sent.pace || 0,
        eta: sent.eta,
        shed: sent.shed,
      };
      departure.to = departure.to || sent.to;
    }
  }

  /** The GPUs are free when no guest holds them any more, whatever the deadline says. */
  look(reclaim) {
    if (reclaim.over) return;
    const seen = this.campus.nodes.get(reclaim.node);
    if (!seen) return;
    const guests = seen.card.jobs.filter((each) => this.mustLeave(reclaim, seen.card, each));
    const gone = reclaim.jobs.every((each) => {
      const record = this.campus.records.get(each.job);
      return !record || ENDED.has(record.state) || !placesOf(record).includes(reclaim.node);
    });
    if (guests.length === 0 && gone) {
      if (reclaim.freedAt === null) reclaim.freedAt = this.campus.now();
      if (reclaim.jobs.every((each) => each.doneAt !== null || each.stage === "waiting")) {
        this.close(reclaim, "back");
      }
    } else {
      reclaim.freedAt = null;
    }
  }

  close(reclaim, how) {
    reclaim.over = how;
    reclaim.endedAt = this.campus.now();
    if (reclaim.freedAt === null) reclaim.freedAt = reclaim.endedAt;
    for (const departure of reclaim.jobs) {
      // A job that waits for a place goes on being shown where it stands.
      if (departure.stage !== "waiting" && how === "withdrawn") departure.stage = "stays";
    }
    if (!this.campus.isCurrent) return;
    const early = reclaim.deadline - reclaim.freedAt;
    announce(
      how === "withdrawn"
        ? `${reclaim.node} stays lent: the notice was taken back.`
        : reclaim.atOnce
          ? `${reclaim.node} is its owner's again, at once.`
          : `${reclaim.node} is its owner's again, ${duration(Math.max(0, early))} before the deadline.`,
    );
  }
}

/** Whether a job on its way out has been through a stage, or passed it by. */
export function isPast(departure, stage) {
  if (stage === "notice") return departure.stage !== stage;
  if (departure.stage === "running") return stage === "saving" ? departure.saved : departure.restored;
  return STAGES.indexOf(stage) < STAGES.indexOf(departure.stage);
}

/** What leaving has cost it, in words. */
export function cost(departure) {
  if (departure.stepsLost) return `${count(departure.stepsLost, "step")} lost`;
  return departure.restored ? "no step lost" : "all it had done is lost, since it was never saved";
}

/** Where a job is: of one over several nodes, where each of its ranks is. */
export function placesOf(record) {
  if (record.seats && record.seats.length) return record.seats;
  return record.holder ? [record.holder] : [];
}

/** When a departure will be done, by what is known of its bytes; null if nothing is. */
export function expected(departure, now) {
  const transfer = departure.transfer;
  if (!transfer) return null;
  if (transfer.eta) return transfer.eta;
  if (!transfer.rate) return null;
  return now + (transfer.bytes_left / transfer.rate) * SECOND;
}
