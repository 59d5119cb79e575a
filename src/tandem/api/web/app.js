// The page's frame: the key, the tabs, and which view is shown. Views know nothing of each other.

import { ApiError, get, keepKey, readKey } from "./api.js";
import { el, fill, icon } from "./dom.js";
import { matches } from "./words.js";
import { chatView } from "./chat.js";
import { iterationsView } from "./iterations.js";
import { learningView } from "./learning.js";
import { nowView } from "./now.js";
import { workView } from "./work.js";

const VIEWS = [
  { id: "chat", title: "Chat", make: chatView },
  { id: "learning", title: "Learning", make: learningView, needs: (session) => session.learning },
  { id: "now", title: "Now", make: nowView },
  { id: "iterations", title: "Iterations", make: iterationsView },
  { id: "work", title: "Batches & jobs", make: workView },
];
const main = document.getElementById("main");

// What this key may do, and what the server has: all that a view needs to leave out what is not allowed.
function sessionOf(key) {
  return {
    ...key,
    mayServe: (adapter) => matches(adapter || "base", key.serve),
    mayTrain: (adapter) => matches(adapter, key.train),
    mayTeach: key.learning && key.train.length > 0,
    modelOf: (adapter) => (adapter ? `${key.model}:${adapter}` : key.model),
  };
}

async function start() {
  if (document.documentElement.dataset.key === "required" && !readKey()) return askForKey("");
  try {
    open(sessionOf(await get("v1/key")));
  } catch (error) {
    if (error instanceof ApiError && error.status === 401) {
      keepKey("");
      askForKey(error.message);
    } else {
      fill(
        main,
        el(
          "div",
          { class: "empty" },
          el("h2", {}, "The server does not answer"),
          el("p", {}, error.message),
          el("button", { type: "button", class: "primary", onclick: start }, "Try again"),
        ),
      );
    }
  }
}

function askForKey(problem) {
  const input = el("input", {
    type: "password",
    autocomplete: "current-password",
    required: true,
    id: "key",
    "aria-describedby": "key-note",
  });
  const form = el(
    "form",
    {
      class: "card sign-in",
      onsubmit: (event) => {
        event.preventDefault();
        keepKey(input.value.trim());
        start();
      },
    },
    el("h1", {}, "Sign in"),
    el("label", { class: "field", for: "key" }, el("span", {}, "API key"), input),
    el(
      "p",
      { id: "key-note", class: "muted" },
      "The key stays in this tab and is gone when you close it.",
    ),
    problem ? el("p", { class: "bad", role: "alert" }, problem) : null,
    el("button", { type: "submit", class: "primary" }, "Continue"),
  );
  fill(document.getElementById("tabs"));
  fill(document.getElementById("account"));
  fill(main, el("div", { class: "centred" }, form));
  input.focus();
}

function open(session) {
  const views = VIEWS.filter((view) => !view.needs || view.needs(session)).map((view) => ({
    ...view,
    made: null,
  }));
  const links = views.map((view) => el("a", { href: `#${view.id}` }, view.title));
  fill(document.getElementById("tabs"), links);
  fill(
    document.getElementById("account"),
    session.name ? el("span", { class: "muted" }, session.name) : null,
    session.required
      ? el(
          "button",
          {
            type: "button",
            class: "quiet square",
            "aria-label": "Sign out",
            title: "Sign out",
            onclick: () => {
              keepKey("");
              location.reload();
            },
          },
          icon("out"),
        )
      : null,
  );
  let shown = null;

  function show() {
    const wanted = views.find((view) => location.hash === `#${view.id}`) ?? views[0];
    if (shown === wanted) return;
    shown?.made.hide?.();
    wanted.made ??= wanted.make(session);
    fill(main, wanted.made.element);
    document.title = `${wanted.title} · Tandem`;
    links.forEach((link, place) => {
      if (views[place] === wanted) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    });
    links[views.indexOf(wanted)].scrollIntoView({ block: "nearest", inline: "nearest" });
    shown = wanted;
    wanted.made.show?.();
  }
  window.addEventListener("hashchange", show);
  show();
}

start();
