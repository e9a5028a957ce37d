// Elements described as values, and a keyed patch that changes only what differs on the page.

const SVG = "http://www.w3.org/2000/svg";
const AS_PROPERTY = new Set(["value", "checked", "disabled", "hidden", "selected", "open"]);

/** An element: `key` says which one it was before; `memo` (a list) skips it while it stays equal. */
export function h(tag, props, ...children) {
  const flat = [];
  collect(children, flat);
  return { tag, props: props || {}, key: props && props.key, children: flat, node: null };
}

function collect(children, into) {
  for (const child of children) {
    if (child === null || child === undefined || child === false || child === true) continue;
    if (Array.isArray(child)) collect(child, into);
    else into.push(typeof child === "object" ? child : { text: String(child), node: null });
  }
}

/** Make `parent` hold exactly these children. */
export function patch(parent, ...children) {
  const next = [];
  collect(children, next);
  reconcile(parent, parent.shown || takeOver(parent), next, parent.namespaceURI === SVG);
  parent.shown = next;
}

function takeOver(parent) {
  parent.textContent = "";
  return [];
}

function reconcile(parent, before, next, isSvg) {
  const keyed = new Map();
  const loose = [];
  for (const old of before) {
    if (old.key !== undefined && old.key !== null) keyed.set(old.key, old);
    else loose.push(old);
  }
  let spare = 0;
  let place = parent.firstChild;
  for (let index = 0; index < next.length; index++) {
    const vnode = next[index];
    let old;
    if (vnode.key !== undefined && vnode.key !== null) {
      old = keyed.get(vnode.key);
      if (old && old.tag === vnode.tag) keyed.delete(vnode.key);
      else old = undefined;
    } else {
      while (spare < loose.length && loose[spare].taken) spare++;
      const candidate = loose[spare];
      if (candidate && candidate.tag === vnode.tag) {
        old = candidate;
        candidate.taken = true;
        spare++;
      }
    }
    if (old) update(old, vnode, isSvg);
    else create(vnode, isSvg);
    if (vnode.node === place) place = place.nextSibling;
    else parent.insertBefore(vnode.node, place);
  }
  for (const old of keyed.values()) old.node.remove();
  for (const old of loose) if (!old.taken) old.node.remove();
}

function create(vnode, isSvg) {
  if (vnode.tag === undefined) {
    vnode.node = document.createTextNode(vnode.text);
    return;
  }
  const svg = isSvg || vnode.tag === "svg";
  const node = svg ? document.createElementNS(SVG, vnode.tag) : document.createElement(vnode.tag);
  vnode.node = node;
  for (const name in vnode.props) set(node, name, vnode.props[name], undefined);
  for (const child of vnode.children) {
    create(child, svg);
    node.appendChild(child.node);
  }
  if (vnode.props.value !== undefined) node.value = vnode.props.value;
}

function update(old, vnode, isSvg) {
  const node = (vnode.node = old.node);
  if (vnode.tag === undefined) {
    if (old.text !== vnode.text) node.data = vnode.text;
    return;
  }
  if (vnode.props.memo && same(vnode.props.memo, old.props.memo)) {
    vnode.children = old.children;
    for (const name in vnode.props) if (name.startsWith("on")) set(node, name, vnode.props[name]);
    return;
  }
  for (const name in old.props) if (!(name in vnode.props)) set(node, name, undefined);
  for (const name in vnode.props) {
    const value = vnode.props[name];
    if (value !== old.props[name] || name === "value" || name === "checked") set(node, name, value);
  }
  for (const child of old.children) child.taken = false;
  reconcile(node, old.children, vnode.children, isSvg || vnode.tag === "svg");
}

function same(a, b) {
  return Array.isArray(b) && a.length === b.length && a.every((each, i) => Object.is(each, b[i]));
}

function set(node, name, value) {
  if (name === "key" || name === "memo") return;
  if (name.startsWith("on")) {
    const type = name.slice(2);
    if (!node.heard) node.heard = {};
    if (!(type in node.heard)) node.addEventListener(type, hear);
    node.heard[type] = value;
  } else if (name === "style") {
    node.style.cssText = value || "";
  } else if (AS_PROPERTY.has(name)) {
    // A person's half-typed word must not be taken away by the next event.
    if (name === "value" && document.activeElement === node) return;
    const wanted = value === undefined ? (name === "value" ? "" : false) : value;
    if (node[name] !== wanted) node[name] = wanted;
  } else if (value === undefined || value === null || value === false) {
    node.removeAttribute(name);
  } else {
    node.setAttribute(name, value === true ? "" : value);
  }
}

function hear(event) {
  const listener = event.currentTarget.heard[event.type];
  if (listener) listener(event);
}

export function announce(sentence) {
  const place = document.getElementById("announcer");
  // The same words twice in a row are read only if the element changes.
  place.textContent = place.textContent === sentence ? sentence + "\u00a0" : sentence;
}
