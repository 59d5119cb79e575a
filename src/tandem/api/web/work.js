// Batches and fine-tuning jobs of this key: progress, cancel, pause, results.

import { download, get, post, request } from "./api.js";
import { ask, attempt, badge, button, el, empty, every, fill } from "./dom.js";
import { prose } from "./prose.js";
import { number, plural, when } from "./words.js";

const POLL_MS = 3000;
const SHOWN = 30;
const KINDS = {
  completed: "good",
  succeeded: "good",
  failed: "danger",
  expired: "danger",
  cancelled: "muted",
  paused: "wait",
  in_progress: "run",
  running: "run",
  finalizing: "run",
};
const ENDED = ["completed", "failed", "expired", "cancelled", "succeeded"];

export function workView(session) {
  const batches = el("div", { class: "stack" });
  const jobs = el("div", { class: "stack" });
  const element = el(
    "section",
    { class: "page", "aria-label": "Batches and jobs" },
    el("h1", {}, "Batches & jobs"),
    el("h2", {}, "Batches"),
    batches,
    session.learning ? el("h2", {}, "Fine-tuning jobs") : null,
    session.learning ? jobs : null,
  );
  let stop = () => {};
  const seen = new Map();

  const look = () =>
    attempt(async () => {
      await list(
        `v1/batches?limit=${SHOWN}`,
        batches,
        batchCard,
        empty(
          "No batches",
          prose("`tandem batch run requests.jsonl -o answers.jsonl` starts one."),
        ),
      );
      if (session.learning) {
        await list(
          `v1/fine_tuning/jobs?limit=${SHOWN}`,
          jobs,
          jobCard,
          empty("No jobs", prose("`tandem finetune create examples.jsonl` starts one.")),
        );
      }
    });

  async function list(path, node, card, nothing) {
    const { data } = await get(path);
    const text = JSON.stringify(data);
    if (seen.get(path) === text) return;
    seen.set(path, text);
    fill(node, data.length ? data.map((each) => card(each, look)) : nothing);
  }

  return {
    element,
    show: () => {
      stop = every(POLL_MS, look);
    },
    hide: () => stop(),
  };
}

function batchCard(batch, look) {
  const { total, completed, failed } = batch.request_counts;
  const results = (file, label) => (file ? button(label, () => save(file), "small") : null);
  const errors = batch.errors?.data ?? [];
  return card(
    batch,
    `${batch.endpoint.slice(3)}${batch.model ? ` · ${batch.model}` : ""}`,
    total
      ? progress(
          completed + failed,
          total,
          `${number(completed + failed)} of ${plural(total, "line")}${failed ? `, ${number(failed)} failed` : ""}`,
        )
      : null,
    [
      ...errors
        .slice(0, 3)
        .map((error) =>
          el("p", { class: "bad" }, `${error.line ? `Line ${error.line}: ` : ""}${error.message}`),
        ),
    ],
    [
      results(batch.output_file_id, "Download results"),
      results(batch.error_file_id, "Download errors"),
      ENDED.includes(batch.status) || batch.status === "cancelling"
        ? null
        : cancelling(
            `v1/batches/${batch.id}`,
            "Cancel this batch?",
            "Lines that are answered are kept.",
            look,
          ),
    ],
  );
}

function jobCard(job, look) {
  const path = `v1/fine_tuning/jobs/${job.id}`;
  const act = (what, label) =>
    button(
      label,
      () =>
        attempt(async () => {
          await post(`${path}/${what}`);
          await look();
        }),
      "small",
    );
  return card(
    job,
    `${job.method.type.toUpperCase()} · ${job.fine_tuned_model ?? job.model}`,
    job.total_steps
      ? progress(
          job.step,
          job.total_steps,
          `step ${number(job.step)} of ${number(job.total_steps)}`,
        )
      : null,
    job.error ? [el("p", { class: "bad" }, job.error.message)] : [],
    [
      ["running", "queued"].includes(job.status) ? act("pause", "Pause") : null,
      job.status === "paused" ? act("resume", "Resume") : null,
      ENDED.includes(job.status)
        ? null
        : cancelling(path, "Cancel this job?", "What it has learned is given up.", look),
    ],
  );
}

function card(object, title, bar, told, actions) {
  return el(
    "article",
    { class: "card work", "aria-label": object.id },
    el(
      "div",
      { class: "row" },
      badge(object.status.replaceAll("_", " "), KINDS[object.status] ?? ""),
      el("b", {}, title),
      el("span", { class: "grow" }),
      el("time", { class: "muted" }, when(object.created_at)),
    ),
    bar,
    told,
    el(
      "div",
      { class: "row" },
      el("code", { class: "id" }, object.id),
      el("span", { class: "grow" }),
      actions,
    ),
  );
}

function progress(done, total, text) {
  return el(
    "div",
    { class: "progress" },
    el("progress", { max: String(total), value: String(done), "aria-label": text }),
    el("span", { class: "muted" }, text),
  );
}

const cancelling = (path, title, text, look) =>
  button(
    "Cancel",
    async () => {
      if (!(await ask({ title, text, action: "Cancel it", danger: true }))) return;
      await attempt(async () => {
        await post(`${path}/cancel`);
        await look();
      });
    },
    "small danger-quiet",
  );

const save = (file) =>
  attempt(async () => {
    const answer = await request(`v1/files/${file}/content`);
    download(`${file}.jsonl`, await answer.blob());
  });
