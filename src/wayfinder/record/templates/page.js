
/* Head */

function showHead() {
  at("title").textContent = DATA.title;
  at("subtitle").textContent = DATA.subtitle;
  at("facts").append(...DATA.facts.map(([label, value]) =>
    el("div", {}, el("dt", {}, label), el("dd", {}, value))));
  if (!DATA.notes.length) return;
  const notes = at("notes");
  notes.hidden = false;
  notes.open = DATA.notes.length < 4;
  notes.querySelector("summary").textContent =
    `${DATA.notes.length} ${DATA.notes.length === 1 ? "thing is" : "things are"} missing here`;
  notes.querySelector("ul").append(...DATA.notes.map((note) => el("li", {}, note)));
}

/* Curves */

function series(name) {
  const values = DATA.metrics.series[name] || [];
  return DATA.metrics.steps.map((step, i) => [step, values[i] ?? null])
    .filter(([, value]) => value !== null);
}

function showCurves() {
  const box = at("curves");
  const card = (wide) => box.appendChild(el("div", { class: wide ? "chart wide" : "chart" }));
  const low = new Map(series("eval/solve_rate_low"));
  const high = new Map(series("eval/solve_rate_high"));
  const band = new Map([...low].filter(([step]) => high.has(step))
    .map(([step, value]) => [step, [value, high.get(step)]]));
  const rates = [
    { name: "training", color: "var(--muted)", points: series("train/solve_rate") },
    { name: "evaluation, 95% interval", color: "var(--blue)", dots: true, band,
      points: series("eval/solve_rate") },
    { name: "greedy", color: "var(--violet)", dots: true, points: series("greedy/solve_rate") },
    { name: "unseen", color: "var(--orange)", dots: true, points: series("unseen/solve_rate") },
    { name: "ceiling", color: "var(--green)", dash: true, points: series("eval/ceiling") },
  ].filter((line) => line.points.length);
  const draws = [chart(card(true), {
    title: "solve rate", height: 250, range: [0, 1.04], percent: true, lines: rates, keys: true,
    pick: pickStep,
  })];
  const mismatch = ["max", "mean"].map((kind, i) => ({
    name: kind, color: i ? "var(--orange)" : "var(--blue)",
    points: series(`mismatch/abs_logprob_diff_${kind}`),
  }));
  draws.push(chart(card(), {
    title: "log-prob mismatch", log: true, lines: mismatch,
  }));
  draws.push(chart(card(), {
    title: "entropy", lines: [{ name: "", color: "var(--blue)", points: series("train/entropy") }],
  }));
  const phases = Object.entries({
    start: "muted", rollout: "blue", update: "orange", sync: "green", eval: "violet",
    greedy: "pink", unseen: "teal", save: "red",
  }).map(([phase, color]) => ({
    name: phase, color: `var(--${color})`, points: series(`time/${phase}_s`),
  })).filter((line) => line.points.length);
  draws.push(chart(card(), { title: "seconds", stacked: true, lines: phases, keys: true }));
  draws.push(anyMetric(card()));
  redrawCharts = draws;
}

/* One card for every metric that has no card of its own. */
function anyMetric(card) {
  const names = Object.keys(DATA.metrics.series);
  let draw = () => {};
  let marked;
  const show = (name) => {
    draw = chart(card, {
      above: select, title: "", marked,
      lines: [{ name: "", color: "var(--blue)", points: series(name) }],
    });
  };
  const select = el("select", { "aria-label": "metric", onchange: () => show(select.value) },
    ...names.map((name) => el("option", { value: name }, name)));
  const first = ["train/grad_norm", "train/loss"].find((name) => names.includes(name)) || names[0];
  if (first) select.value = first;
  show(first);
  return (step) => {
    marked = step === undefined ? marked : step;
    draw(step);
  };
}

function pickStep(step) {
  const list = evaluations("eval");
  if (!list.length) return;
  state.kind = "eval";
  const distance = (i) => Math.abs(list[i].step - step);
  showEvaluation(list.reduce((best, _, i) => distance(i) < distance(best) ? i : best, 0));
}

function start() {
  showHead();
  showCurves();
  let redraw = null;
  addEventListener("resize", () => {
    clearTimeout(redraw);
    redraw = setTimeout(() => redrawCharts.forEach((draw) => draw()), 100);
  });
  if (!DATA.evaluations.length) return;
  at("evaluations").hidden = false;
  const slider = at("slider");
  slider.addEventListener("input", () => showEvaluation(Number(slider.value)));
  slider.addEventListener("pointerup", () => slider.blur());
  const actions = { first: () => step(-Infinity), back: () => step(-1), play: playOrPause,
    next: () => step(1), last: () => step(Infinity) };
  for (const [id, act] of Object.entries(actions))
    at(id).addEventListener("click", (event) => {
      letGo(event);
      act();
    });
  addEventListener("keydown", onKey);
  state.kind = DATA.evaluations[0].kind;
  showEvaluation(evaluations(state.kind).length - 1);
}

start();
