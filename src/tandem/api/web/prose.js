// A model's text as elements: paragraphs as they are, fenced code, `code` and **bold**. Never HTML.

import { el } from "./dom.js";

const FENCE = /```[^\n]*\n([\s\S]*?)(?:```|$)/g;
const INLINE = /`([^`\n]+)`|\*\*([^*\n]+)\*\*/g;

export function prose(text) {
  const parts = [];
  let at = 0;
  for (const match of text.matchAll(FENCE)) {
    parts.push(
      plain(text.slice(at, match.index)),
      el("pre", { tabindex: "0" }, el("code", {}, match[1])),
    );
    at = match.index + match[0].length;
  }
  parts.push(plain(text.slice(at)));
  return parts.filter(Boolean);
}

function plain(text) {
  const trimmed = text.replace(/^\n+|\n+$/g, "");
  if (!trimmed) return null;
  const parts = [];
  let at = 0;
  for (const match of trimmed.matchAll(INLINE)) {
    parts.push(
      trimmed.slice(at, match.index),
      match[1] ? el("code", {}, match[1]) : el("strong", {}, match[2]),
    );
    at = match.index + match[0].length;
  }
  parts.push(trimmed.slice(at));
  return el("span", { class: "plain" }, parts);
}
