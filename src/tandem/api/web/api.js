// The server's routes, with this tab's key. Every failure is an ApiError with the server's words.

const KEY = "tandem.key";
const USAGE = { include_usage: true };
const UNREACHABLE = "The server cannot be reached. Is it still running?";

export class ApiError extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

export const readKey = () => sessionStorage.getItem(KEY) ?? "";

export function keepKey(key) {
  if (key) sessionStorage.setItem(KEY, key);
  else sessionStorage.removeItem(KEY);
}

export async function request(path, { method = "GET", body, signal } = {}) {
  const headers = {};
  if (readKey()) headers.authorization = `Bearer ${readKey()}`;
  if (body !== undefined) headers["content-type"] = "application/json";
  let answer;
  try {
    const text = body === undefined ? undefined : JSON.stringify(body);
    answer = await fetch(path, { method, headers, body: text, signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, UNREACHABLE);
  }
  if (!answer.ok) throw await failure(answer);
  return answer;
}

export const get = async (path) => (await request(path)).json();
export const text = async (path) => (await request(path)).text();
export const post = async (path, body) => (await request(path, { method: "POST", body })).json();
export const remove = async (path) => (await request(path, { method: "DELETE" })).json();

async function failure(answer) {
  try {
    return new ApiError(answer.status, (await answer.json()).error.message);
  } catch {
    return new ApiError(answer.status, `The server answered ${answer.status}.`);
  }
}

// An answer as it is written: `label` is who writes it (null if not yet known), `chunks` OpenAI's.
async function stream(path, body, signal) {
  const answer = await request(path, {
    method: "POST",
    body: { ...body, stream: true, stream_options: USAGE },
    signal,
  });
  return { label: answer.headers.get("x-tandem-adapter"), chunks: chunksOf(answer.body) };
}

async function* chunksOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) throw new ApiError(0, "The answer broke off.");
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        if (!event.startsWith("data: ")) continue;
        const data = event.slice(6);
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        if (chunk.error) throw new ApiError(0, chunk.error.message);
        yield chunk;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}

// Ask and hand out what comes: `onText(choice, text)`. Returns who wrote it and the answer's id.
export async function writeAnswer(asked, signal, onText) {
  const { label, chunks } = await stream("v1/chat/completions", asked, signal);
  let id = "";
  let usage = null;
  const reasons = {};
  for await (const chunk of chunks) {
    id = chunk.id;
    usage = chunk.usage ?? usage;
    for (const choice of chunk.choices) {
      const thought = choice.delta.reasoning ?? "";
      const content = choice.delta.content ?? "";
      if (thought || content) onText(choice.index, content, thought);
      if (choice.finish_reason) reasons[choice.index] = choice.finish_reason;
    }
  }
  return {
    id,
    reasons,
    usage,
    label: label ?? (await get(`v1/models/${asked.model}`)).adapter ?? "base",
  };
}

// Give a file to the user. `content` is text or a Blob.
export function download(name, content, type = "application/json") {
  const blob = content instanceof Blob ? content : new Blob([content], { type });
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
