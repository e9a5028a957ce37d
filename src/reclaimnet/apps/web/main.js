// The page: opens the campus, shows the view that the address names, and keeps it current.

import { announce, h, patch } from "./dom.js";
import { Campus, Refusal, ask, begin, follow } from "./store.js";
import { campusView } from "./view_campus.js";
import { reclaimsView } from "./view_reclaims.js";
import { jobsView } from "./view_jobs.js";
import { jobView, leaveJob } from "./view_job.js";
import { ownerView } from "./view_owner.js";
import { operatorView } from "./view_operator.js";

const VIEWS = [
  { path: "", title: "Campus", show: campusView },
  { path: "reclaims", title: "Reclaims", show: reclaimsView, tickMs: 200 },
  { path: "jobs", title: "Jobs", show: jobsView },
  { path: "owner", title: "My machines", show: ownerView },
  { path: "operator", title: "Operator", show: operatorView },
];
const TICK_MS = 1000;
const THEMES = ["auto", "light", "dark"];

export const campus = new Campus();
const main = document.getElementById("main");
let lastPath = null;

function route() {
  const [path, ...rest] = location.hash.replace(/^#\/?/, "").split("/");
  if (path === "job" && rest[0]) {
    return { path, title: "Job", show: jobView, id: decodeURIComponent(rest[0]) };
  }
  return { id: rest[0] && decodeURIComponent(rest[0]), ...(VIEWS.find((v) => v.path === path) || VIEWS[0]) };
}

function render() {
  const now = route();
  patch(document.getElementById("nav"), navigation(now));
  patch(document.getElementById("tools"), tools());
  if (campus.recording) patch(document.getElementById("time"), campus.recording.bar());
  if (!campus.isCurrent) return;
  patch(main, now.show(campus, now));
  const address = location.hash;
  if (address !== lastPath) {
    const heading = main.querySelector("h1");
    document.title = `${heading ? heading.textContent : now.title} · ReclaimNet`;
    // After a click the keyboard should be where the eyes are; not when the page opens.
    if (lastPath !== null) main.focus({ preventScroll: true });
    if (lastPath !== null) scrollTo(0, 0);
    lastPath = address;
  }
}

function navigation(now) {
  const open = campus.reclaims.open().length;
  return h(
    "ul",
    null,
    VIEWS.map((view) =>
      h(
        "li",
        { key: view.path },
        h(
          "a",
          {
            href: "#/" + view.path,
            "aria-current":
              view.path === now.path || (now.path === "job" && view.path === "jobs") ? "page" : false,
          },
          view.title,
          view.path === "reclaims" && open
            ? h("span", { class: "badge", "aria-label": `${open} under way` }, open)
            : null,
        ),
      ),
    ),
  );
}

function tools() {
  const theme = localStorage.getItem("theme") || "auto";
  const line = campus.at !== null ? "recording" : campus.line;
  const words = { open: "Live", opening: "Opening", broken: "Line cut", recording: "Recording" };
  return [
    campus.session && campus.session.access === "look" && campus.at === null
      ? h("span", { class: "chip" }, "Read-only")
      : null,
    h(
      "span",
      { class: `line ${line}`, title: campus.session ? `version ${campus.session.version}` : "" },
      words[line],
    ),
    h(
      "button",
      {
        class: "quiet",
        "aria-label": `Colours: ${theme}`,
        title: `Colours: ${theme}`,
        onclick: () => {
          const next = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
          localStorage.setItem("theme", next);
          dress();
          announce(`Colours: ${next}`);
          render();
        },
      },
      { auto: "◐", light: "☀", dark: "☾" }[theme],
    ),
  ];
}

function dress() {
  const theme = localStorage.getItem("theme") || "auto";
  if (theme === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
}

// --- opening -------------------------------------------------------------------------------------

function askForToken(sentence) {
  let token = "";
  patch(
    main,
    h(
      "section",
      { class: "door" },
      h("h1", null, "Open the campus"),
      h("p", null, sentence),
      h(
        "form",
        {
          onsubmit: (event) => {
            event.preventDefault();
            open(token);
          },
        },
        h("label", { for: "token" }, "Token"),
        h("input", {
          id: "token",
          type: "password",
          autocomplete: "current-password",
          oninput: (event) => (token = event.target.value.trim()),
        }),
        h("button", { class: "primary", type: "submit" }, "Open"),
      ),
      h("p", { class: "hint" }, "`rn page` prints a link that opens it at once."),
    ),
  );
}

async function open(given) {
  try {
    campus.session = given ? await begin(given) : await ask("GET", "/session");
  } catch (error) {
    if (!(error instanceof Refusal)) throw error;
    askForToken(given ? error.message : "This browser is not known here yet.");
    return;
  }
  campus.ahead = campus.session.now - Date.now() * 1e6;
  if (campus.session.recording) {
    const { Recording } = await import("./recording.js");
    campus.recording = await Recording.load(campus);
    document.getElementById("time").hidden = false;
    campus.changed();
  } else {
    follow(campus);
  }
}

dress();
const carried = new URLSearchParams(location.hash.replace(/^#\/?/, "")).get("token");
if (carried) history.replaceState(null, "", location.pathname + "#/");
campus.onChange(render);
addEventListener("hashchange", () => {
  if (route().path !== "job") leaveJob();
  render();
});
// Countdowns and "3 s ago" move on even when nothing happens.
let ticked = 0;
setInterval(() => {
  const every = (route().tickMs && campus.reclaims.open().length && route().tickMs) || TICK_MS;
  if (document.hidden || performance.now() - ticked < every - 20) return;
  ticked = performance.now();
  campus.changed();
}, 200);
render();
open(carried);
