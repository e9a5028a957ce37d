// A table that can be scrolled by itself, by hand or by keyboard, where the screen is narrow.

import { h } from "./dom.js";

/** `numbers` are the titles of columns that are read from the right. */
export function table(caption, titles, numbers, rows) {
  return h(
    "div",
    { class: "scroll", role: "region", "aria-label": caption, tabindex: "0" },
    h(
      "table",
      null,
      h(
        "thead",
        null,
        h("tr", null, titles.map((title) => h("th", { key: title, scope: "col", class: numbers.has(title) ? "number" : "" }, title))),
      ),
      h("tbody", null, rows),
    ),
  );
}
