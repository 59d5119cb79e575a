// Iterations as a Chrome trace (the JSON that Perfetto and chrome://tracing read): a track a kind of work.

export const KINDS = [
  { id: "decode", label: "Decode", unit: "rows" },
  { id: "prefill", label: "Prefill", unit: "rows" },
  { id: "offline", label: "Offline", unit: "rows" },
  { id: "forward", label: "Learning, forward", unit: "rows" },
  { id: "backward", label: "Learning, backward", unit: "layers" },
  { id: "host", label: "Deciding and the rest", unit: "" },
];

// The pieces of an iteration, one after the other: a pass is divided by its rows.
export function pieces(iteration) {
  const { rows, forward_s: forward, backward_s: backward, seconds } = iteration;
  const total = Object.values(rows).reduce((sum, count) => sum + count, 0);
  const found = [];
  let at = iteration.started_at;
  const add = (kind, length, amount) => {
    if (length > 0) found.push({ kind, start: at, seconds: length, amount });
    at += Math.max(0, length);
  };
  for (const kind of ["decode", "prefill", "offline", "forward"])
    add(kind, total ? (forward * rows[kind]) / total : 0, rows[kind]);
  add("backward", backward, iteration.layers);
  add("host", seconds - forward - backward, 0);
  return found;
}

export function chromeTrace(iterations) {
  const names = KINDS.map((kind, place) => ({
    ph: "M",
    name: "thread_name",
    pid: 1,
    tid: place + 1,
    args: { name: kind.label },
  }));
  const whole = { ph: "M", name: "process_name", pid: 1, args: { name: "Tandem engine" } };
  const events = iterations.flatMap((iteration) =>
    pieces(iteration).map((piece) => ({
      ph: "X",
      cat: "iteration",
      name: piece.kind,
      pid: 1,
      tid: 1 + KINDS.findIndex((kind) => kind.id === piece.kind),
      ts: Math.round(piece.start * 1e6),
      dur: Math.max(1, Math.round(piece.seconds * 1e6)),
      args: { iteration: iteration.number, amount: piece.amount, updates: iteration.updates },
    })),
  );
  return JSON.stringify({ displayTimeUnit: "ms", traceEvents: [whole, ...names, ...events] });
}
