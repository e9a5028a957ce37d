// A recorded campus: the same events as live ones, played at any speed, at any moment.

import { h } from "./dom.js";
import { duration, moment } from "./format.js";
import { ask } from "./store.js";

const SPEEDS = [1, 10, 60, 600, 3600];
const AIM_S = 60; // at first, the whole recording takes about this long

export class Recording {
  static async load(campus) {
    return new Recording(campus, await ask("GET", "/recording"));
  }

  constructor(campus, told) {
    this.campus = campus;
    this.told = told;
    this.next = 0;
    this.playing = false;
    const wanted = (told.ends - told.begins) / 1e9 / AIM_S;
    this.speed = SPEEDS.reduce((best, each) =>
      Math.abs(Math.log(each / wanted)) < Math.abs(Math.log(best / wanted)) ? each : best,
    );
    campus.at = told.begins;
    this.seek(told.begins);
    campus.isCurrent = true;
  }

  seek(at) {
    const campus = this.campus;
    const wanted = Math.min(Math.max(at, this.told.begins), this.told.ends);
    if (wanted < campus.at || this.next === 0) {
      campus.forgetAll();
      this.next = 0;
    }
    // What lies in the past of a recording is not worth a word to those who listen.
    const wasCurrent = campus.isCurrent;
    if (wanted - campus.at > 5e9 * this.speed) campus.isCurrent = false;
    const frames = this.told.frames;
    while (this.next < frames.length && frames[this.next].at <= wanted) {
      const frame = frames[this.next++];
      campus.at = frame.at;
      campus.apply(frame.event, structuredClone(frame.data));
    }
    campus.at = wanted;
    campus.isCurrent = wasCurrent || this.next > 0;
    campus.changed();
  }

  play() {
    this.playing = true;
    let last = performance.now();
    const step = (now) => {
      if (!this.playing) return;
      this.seek(this.campus.at + (now - last) * 1e6 * this.speed);
      last = now;
      if (this.campus.at >= this.told.ends) this.pause();
      else requestAnimationFrame(step);
    };
    requestAnimationFrame(step);
    this.campus.changed();
  }

  pause() {
    this.playing = false;
    this.campus.changed();
  }

  toggle() {
    if (this.playing) return this.pause();
    if (this.campus.at >= this.told.ends) this.seek(this.told.begins);
    this.play();
  }

  bar() {
    const { begins, ends, name, cut } = this.told;
    const at = this.campus.at - begins;
    return h(
      "div",
      { class: "player", role: "group", "aria-label": `Recording ${name}` },
      h("button", { onclick: () => this.toggle(), "aria-pressed": String(this.playing) }, this.playing ? "Pause" : "Play"),
      h("input", {
        type: "range",
        min: 0,
        max: 1000,
        step: 1,
        value: Math.round((1000 * at) / Math.max(1, ends - begins)),
        "aria-label": "Time",
        "aria-valuetext": `${duration(at)} of ${duration(ends - begins)}`,
        oninput: (event) => {
          this.pause();
          this.seek(begins + (event.target.value / 1000) * (ends - begins));
        },
        onchange: (event) => event.target.blur(),
      }),
      h("output", null, moment(this.campus.at)),
      h(
        "label",
        null,
        h("span", { class: "unseen" }, "Speed"),
        h(
          "select",
          { value: String(this.speed), onchange: (event) => (this.speed = Number(event.target.value)) },
          SPEEDS.map((each) => h("option", { key: each, value: String(each), selected: each === this.speed }, `${each} ×`)),
        ),
      ),
      cut ? h("small", null, "its beginning is left out") : null,
    );
  }
}
