// Elements, icons, questions, notices. Text is always text: nothing here reads HTML.

const SVG = "http://www.w3.org/2000/svg";
const PATHS = {
  up: "M7 10v11H4a1 1 0 0 1-1-1v-9a1 1 0 0 1 1-1h3Zm0 0 4-7c1.5 0 2.5 1 2.5 2.500V9H19a2 2 0 0 1 2 2.300l-1.2 8A2 2 0 0 1 17.8 21H7",
  down: "M17 14V3h3a1 1 0 0 1 1 1v9a1 1 0 0 1-1 1h-3Zm0 0-4 7c-1.5 0-2.5-1-2.5-2.500V15H5a2 2 0 0 1-2-2.300l1.2-8A2 2 0 0 1 6.2 3H17",
  edit: "M4 20h4L19 9l-4-4L4 16v4ZM13 7l4 4",
  again: "M20 11a8 8 0 1 0-2.3 6.300M20 4v7h-7",
  send: "M12 20V5M5 12l7-7 7 7",
  stop: "M7 7h10v10H7z",
  plus: "M12 5v14M5 12h14",
  columns: "M4 5h16v14H4zM12 5v14",
  settings: "M4 7h10M18 7h2M4 17h2M10 17h10M16 5v4M8 15v4",
  copy: "M9 9h11v11H9zM5 15H4V4h11v1",
  out: "M14 4h5v16h-5M4 12h10M10 8l4 4-4 4",
};

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false || value === null || value === undefined) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (name === "class") node.className = value;
    else if (name in node && typeof value !== "string") node[name] = value;
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}

export function icon(name) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", "0 0 24 24");
  svg.setAttribute("aria-hidden", "true");
  svg.classList.add("icon");
  const path = document.createElementNS(SVG, "path");
  path.setAttribute("d", PATHS[name]);
  svg.append(path);
  return svg;
}

export const iconButton = (name, label, onclick, more = {}) =>
  el(
    "button",
    { type: "button", class: "quiet square", "aria-label": label, title: label, onclick, ...more },
    icon(name),
  );

export const button = (label, onclick, kind = "") =>
  el("button", { type: "button", class: kind, onclick }, label);

// Replace the children of a node.
export function fill(node, ...children) {
  const wanted = children.flat().filter((child) => child !== null && child !== undefined);
  node.replaceChildren(...wanted);
  return node;
}

export function notice(text, kind = "") {
  const node = el("div", { class: `notice ${kind}` }, text);
  document.getElementById("notices").append(node);
  setTimeout(() => node.remove(), kind === "bad" ? 9000 : 5000);
}

// Do something that may fail; what went wrong is said in the server's words.
export async function attempt(action) {
  try {
    return await action();
  } catch (error) {
    if (error.name !== "AbortError") notice(error.message, "bad");
    return undefined;
  }
}

// Ask before something is done. Resolves to the form's values, or null.
export function ask({ title, text, fields = [], action, danger = false }) {
  const { promise, resolve } = Promise.withResolvers ? Promise.withResolvers() : deferred();
  const inputs = fields.map(({ name, label, hint, node, ...attributes }) => {
    const input = node ?? el("input", { name, autocomplete: "off", ...attributes });
    input.name = name;
    return el(
      "label",
      { class: "field" },
      el("span", {}, label),
      input,
      hint ? el("small", {}, hint) : null,
    );
  });
  const form = el(
    "form",
    {
      method: "dialog",
      onsubmit: (event) => {
        event.preventDefault();
        const values = Object.fromEntries(new FormData(form));
        dialog.close();
        resolve(values);
      },
    },
    el("h2", {}, title),
    text ? el("p", {}, text) : null,
    inputs,
    el(
      "div",
      { class: "row end" },
      button("Cancel", () => dialog.close()),
      el("button", { type: "submit", class: danger ? "danger" : "primary" }, action),
    ),
  );
  const dialog = el(
    "dialog",
    {
      "aria-label": title,
      onclose: () => {
        dialog.remove();
        resolve(null);
      },
    },
    form,
  );
  document.body.append(dialog);
  dialog.showModal();
  return promise;
}

function deferred() {
  const made = {};
  made.promise = new Promise((resolve) => {
    made.resolve = resolve;
  });
  return made;
}

// Call `action` now and every so often while the tab is seen, until the returned function is called.
export function every(milliseconds, action) {
  let timer = 0;
  let ended = false;
  async function turn() {
    if (ended) return;
    if (!document.hidden) await action();
    if (!ended) timer = setTimeout(turn, milliseconds);
  }
  turn();
  return () => {
    ended = true;
    clearTimeout(timer);
  };
}

export const badge = (text, kind = "") => el("span", { class: `badge ${kind}` }, text);

export function empty(title, text) {
  return el("div", { class: "empty" }, el("h2", {}, title), el("p", {}, text));
}

// A table that becomes a list of cards on a phone: `columns` are headings, a row has as many cells.
export function table(caption, columns, rows, kind = "") {
  return el(
    "div",
    { class: `scroll ${kind}` },
    el(
      "table",
      {},
      el("caption", { class: "hidden" }, caption),
      el(
        "thead",
        {},
        el(
          "tr",
          {},
          columns.map((name) => el("th", { scope: "col" }, name)),
        ),
      ),
      el(
        "tbody",
        {},
        rows.map((cells) =>
          el(
            "tr",
            {},
            cells.map((cell, place) => el("td", { "data-label": columns[place] }, cell)),
          ),
        ),
      ),
    ),
  );
}
