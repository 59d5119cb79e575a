// How answers are drawn: a question with three fields.

import { ask, el } from "./dom.js";

export async function chatSettings(now) {
  const given = await ask({
    title: "Settings of answers",
    fields: [
      { name: "system", label: "System prompt", node: el("textarea", { rows: "3" }, now.system) },
      {
        name: "temperature",
        label: "Temperature",
        type: "number",
        min: "0",
        max: "2",
        step: "0.1",
        required: true,
        value: String(now.temperature),
        hint: "0 always takes the likeliest token.",
      },
      {
        name: "tokens",
        label: "Longest answer, in tokens",
        type: "number",
        min: "1",
        max: "8192",
        required: true,
        value: String(now.tokens),
      },
    ],
    action: "Save",
  });
  if (!given) return null;
  return {
    system: given.system.trim(),
    temperature: Number(given.temperature),
    tokens: Number(given.tokens),
  };
}
