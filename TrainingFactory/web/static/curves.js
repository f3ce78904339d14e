// Sections of charts from a run's metrics. Metrics that no section names are shown at the end.

const DEVIATION = "±"; // ends the name of a deviation over the runs of a group

const DIRECT = [
  [
    "Outcome",
    [
      { title: "Reward", of: ["reward"], spread: "reward_std" },
      {
        title: "Held-out success",
        of: ["eval/success"],
        interval: ["eval/success_low", "eval/success_high"],
        share: true,
        sparse: true,
      },
      { title: "Accuracy", of: ["accuracy"], share: true },
      { title: "Loss", of: ["loss"] },
      { title: "Reward by part", under: "reward/" },
      { title: "Held-out reward", of: ["eval/reward"], sparse: true },
    ],
  ],
  [
    "Policy",
    [
      { title: "KL to the reference", of: ["kl"] },
      { title: "Entropy", of: ["entropy"] },
      { title: "Clip fraction", of: ["clip_fraction"] },
      { title: "Gradient norm", of: ["grad_norm"] },
      { title: "Sampler vs learner, mean log-prob difference", of: ["logprob_diff"] },
      { title: "Learning rate", of: ["learning_rate"] },
    ],
  ],
  [
    "Episodes",
    [
      { title: "Length in tokens", of: ["length", "length_max"], names: ["mean", "longest"] },
      { title: "Turns", of: ["turns"] },
      { title: "Folds and rows per episode", of: ["fold/folds", "fold/rows"], names: ["folds", "rows"] },
      { title: "Summary tokens", of: ["fold/summary_tokens"] },
      {
        title: "Episode status",
        of: ["done", "max_turns", "truncated", "tool_failure", "error", "unscored"].map(
          (how) => "episodes/" + how,
        ),
        over: "episodes",
        share: true,
        nonzero: true,
      },
      { title: "Truncated", of: ["episodes/truncated"], over: "episodes", share: true },
      { title: "Flagged by filters", under: "filters/", share: true },
    ],
  ],
  [
    "Tools",
    [
      { title: "Tool success", each: "success", share: true },
      { title: "Latency p50 (s)", each: "p50" },
      { title: "Latency p95 (s)", each: "p95" },
      { title: "Calls", each: "calls" },
      { title: "Cache hits", each: "cache_hits", nonzero: true },
      {
        title: "Failed calls",
        of: ["malformed", "unknown", "schema_errors", "timeouts", "unavailable"].map((how) => "tools/" + how),
        nonzero: true,
      },
    ],
  ],
  [
    "Time",
    [
      { title: "Seconds by phase", under: "seconds/" },
      { title: "Tokens per second", of: ["tokens_per_second"] },
      { title: "Computed over row tokens", of: ["computed_tokens"], over: "row_tokens", share: true },
      { title: "Steps per second", of: ["steps_per_second"] },
    ],
  ],
  [
    "System",
    [
      { title: "CPU use", of: ["system/cpu"], share: true },
      { title: "CPUs of the process", of: ["system/process_cpu"] },
      { title: "Memory (GB)", of: ["system/memory", "system/process_memory"], names: ["machine", "process"] },
      { title: "GPU use", under: "system/gpu/", share: true, prefix: "GPU " },
      { title: "GPU memory (GB)", under: "system/gpu_memory/", prefix: "GPU " },
    ],
  ],
];

/** Appends new rows of metrics, {steps, times, series}, to `data`. */
export function extend(data, more) {
  const before = data.steps.length;
  data.steps.push(...more.steps);
  data.times.push(...more.times);
  for (const [name, values] of Object.entries(more.series)) {
    data.series[name] ??= new Array(before).fill(null);
    data.series[name].push(...values);
  }
  for (const values of Object.values(data.series))
    while (values.length < data.steps.length) values.push(null);
}

/** Returns the sections of charts of runs [{name, data}]; `time`: the x axis is the time since the first step. */
export function sections(runs, { time = false, find = "" } = {}) {
  const all = [...new Set(runs.flatMap(({ data }) => Object.keys(data.series)))].sort();
  const names = all.filter((name) => !name.endsWith(DEVIATION));
  const used = new Set(["epoch"]);
  const made = DIRECT.map(([title, specs]) => ({
    title,
    charts: specs.map((spec) => chartOf(spec, runs, names, used, time)).filter(Boolean),
  }));
  const rest = names.filter((name) => !used.has(name));
  const others = rest
    .map((name) =>
      chartOf({ title: name, of: [name], sparse: name.startsWith("eval/") }, runs, names, used, time),
    )
    .filter(Boolean);
  made.push({ title: "All other metrics", charts: others, folded: !find });
  const asked = find.toLowerCase();
  const fits = (chart) =>
    !asked || chart.title.toLowerCase().includes(asked) || chart.metrics.some((name) => name.includes(asked));
  return made
    .map((section) => ({ ...section, charts: section.charts.filter(fits) }))
    .filter(({ charts }) => charts.length);
}

/** Returns the chart of a spec, or null if no run has its metrics. */
function chartOf(spec, runs, names, used, time) {
  const metrics = wanted(spec, names).filter((name) => names.includes(name));
  for (const name of [...metrics, spec.spread, ...(spec.interval ?? [])]) used.add(name);
  const lines = [];
  metrics.forEach((metric, place) => {
    const short = spec.names?.[place] ?? shorten(metric, spec);
    runs.forEach(({ name, data }, at) => {
      const line = lineOf(data, metric, spec, time);
      if (!line || (spec.nonzero && line.y.every((value) => value === 0))) return;
      const several = runs.length > 1;
      line.label = !several ? short : metrics.length > 1 ? name + " " + short : name;
      line.at = several ? at : metrics.length > 1 ? place : 0;
      line.dash = several ? place : 0;
      lines.push(line);
    });
  });
  return lines.length ? { key: spec.title, title: spec.title, lines, share: spec.share, metrics } : null;
}

function wanted(spec, names) {
  if (spec.under) return names.filter((name) => name.startsWith(spec.under));
  if (!spec.each) return spec.of;
  const byTool = names.filter(
    (name) => name.startsWith("tools/") && name.endsWith("/" + spec.each) && name.split("/").length === 3,
  );
  return byTool.length ? byTool : ["tools/" + spec.each];
}

function shorten(metric, spec) {
  return spec.each
    ? metric.split("/").slice(1, -1).join("/") || "all tools"
    : (spec.prefix ?? "") + metric.split("/").at(-1).replaceAll("_", " ");
}

/** Returns the line of one metric of one run without gaps, with a band if the spec has one. */
function lineOf(data, metric, spec, time) {
  const values = data.series[metric];
  if (!values) return null;
  const at = values
    .map((value, place) => (value === null || value === undefined ? -1 : place))
    .filter((place) => place >= 0);
  if (!at.length) return null;
  const parts = spec.over ? data.series[spec.over] : null;
  const y = at.map((place) => (parts ? values[place] / (parts[place] || 1) : values[place]));
  const line = {
    x: at.map((place) => (time ? data.times[place] - data.times[0] : data.steps[place])),
    y,
    sparse: spec.sparse && at.length < 60,
  };
  const overRuns = data.series[metric + DEVIATION];
  const spreads = overRuns ?? (spec.spread && data.series[spec.spread]);
  if (spreads) {
    line.low = at.map((place, n) => y[n] - (spreads[place] ?? 0));
    line.high = at.map((place, n) => y[n] + (spreads[place] ?? 0));
  }
  const [low, high] = overRuns ? [] : (spec.interval ?? []).map((name) => data.series[name]);
  if (low && high) {
    line.low = at.map((place, n) => low[place] ?? y[n]);
    line.high = at.map((place, n) => high[place] ?? y[n]);
  }
  return line;
}
