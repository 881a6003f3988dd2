
const DATA = JSON.parse(document.getElementById("data").textContent);
const at = (id) => document.getElementById(id);
const text = (index) => index === null || index === undefined ? null : DATA.strings[index];
const SOLVED = "solved";
const TURN_MS = 450;

const state = {
  kind: null, // of the evaluations that the slider goes through
  place: 0, // of the evaluation among those of its kind
  failuresFirst: true,
  only: null, // an outcome: the other mazes are faded and passed over
  episode: null,
  turn: 0, // the number of turns: the end
  timer: null,
};
let redrawCharts = [];

/* Evaluations */

const evaluations = (kind) => DATA.evaluations.filter((e) => e.kind === kind);
const current = () => evaluations(state.kind)[state.place];
const outcome = (name) => DATA.outcomes[name] || { label: name, color: "#7b8494" };
const tint = (color) => `color-mix(in srgb, ${color} 38%, white)`;
const failed = (episode) => episode.outcome !== SOLVED;

function choice(box, options, isChosen, choose) {
  box.replaceChildren(...options.map(([value, label]) => el("button", {
    "aria-pressed": String(isChosen(value)), onclick: (event) => {
      letGo(event);
      choose(value);
    },
  }, label)));
}

/* The mazes of an evaluation: [[episode of each member]]. */
function mazes() {
  const byTask = new Map();
  for (const episode of current().episodes) {
    const key = `${episode.env} ${episode.seed} ${episode.index}`;
    if (!byTask.has(key)) byTask.set(key, []);
    byTask.get(key).push(episode);
  }
  const list = [...byTask.values()];
  const worst = (episodes) => episodes.filter((e) => !failed(e)).length / episodes.length;
  const names = Object.keys(DATA.outcomes);
  const kind = (episodes) => names.indexOf((episodes.find(failed) || episodes[0]).outcome);
  list.sort((a, b) => (state.failuresFirst ? worst(a) - worst(b) || kind(a) - kind(b) : 0)
    || a[0].index - b[0].index);
  return list;
}

/* Episodes in the order in which the arrow keys go through them. */
function ordered() {
  const all = mazes().flatMap((episodes) => state.failuresFirst
    ? [...episodes].sort((a, b) => failed(b) - failed(a)) : episodes);
  return all.filter((episode) => state.only === null || episode.outcome === state.only);
}

const same = (a, b) => a.env === b.env && a.seed === b.seed && a.member === b.member;

/* Show an evaluation; the maze that is looked at stays, if the evaluation has it. */
function showEvaluation(place) {
  state.place = place;
  const kinds = [...new Set(DATA.evaluations.map((e) => e.kind))];
  choice(at("kinds"), kinds.map((kind) => [kind, kind]), (kind) => kind === state.kind, (kind) => {
    state.kind = kind;
    state.only = null;
    state.episode = null;
    showEvaluation(evaluations(kind).length - 1);
  });
  const list = evaluations(state.kind);
  const slider = at("slider");
  slider.max = list.length - 1;
  slider.value = place;
  slider.disabled = list.length < 2;
  const { episodes, step } = current();
  const solved = episodes.filter((e) => !failed(e)).length;
  const share = episodes.length ? (100 * solved / episodes.length).toFixed(1) : "0";
  at("score").textContent = `step ${step}: ${solved}/${episodes.length} solved (${share}%)`;
  redrawCharts.forEach((draw) => draw(step));
  if (!episodes.some((e) => e.outcome === state.only)) state.only = null;
  const before = state.episode;
  const kept = before && episodes.find((episode) => same(episode, before));
  showLegend();
  showEpisode(kept || ordered()[0] || null);
}

function showLegend() {
  const counts = {};
  for (const { outcome: name } of current().episodes) counts[name] = (counts[name] || 0) + 1;
  const names = [...new Set([...Object.keys(DATA.outcomes), ...Object.keys(counts)])];
  at("legend").replaceChildren(...names.filter((name) => counts[name]).map((name) => el("button", {
    "--outcome": outcome(name).color, "aria-pressed": String(state.only === name),
    title: "show only these",
    onclick: (event) => {
      letGo(event);
      state.only = state.only === name ? null : name;
      showLegend();
      const list = ordered();
      showEpisode(list.includes(state.episode) ? state.episode : list[0]);
    },
  }, `${outcome(name).label} ${counts[name]}`)));
  choice(at("order"), [[true, "failures first"], [false, "by maze"]],
    (value) => value === state.failuresFirst, (value) => {
      state.failuresFirst = value;
      showLegend();
      showGrid();
    });
}

function showGrid() {
  const list = mazes();
  const grid = at("grid");
  const columns = Math.max(4, Math.min(16, Math.ceil(Math.sqrt(list.length))));
  grid.style.setProperty("--columns", columns);
  grid.replaceChildren(...list.map((episodes) => {
    const shown = episodes.includes(state.episode) ? state.episode
      : episodes.find(failed) || episodes[0];
    const colors = episodes.map((e) => outcome(e.outcome).color);
    const stripes = [...colors].sort().map((color, i) =>
      `${tint(color)} ${100 * i / colors.length}% ${100 * (i + 1) / colors.length}%`);
    const solved = episodes.filter((e) => !failed(e)).length;
    const label = episodes.length > 1 ? `${solved}/${episodes.length}`
      : String(episodes[0].num_turns);
    const faded = state.only !== null && !episodes.some((e) => e.outcome === state.only);
    const source = shown.replay && DATA.frames[shown.replay.final];
    const told = episodes.length > 1 ? `${solved} of ${episodes.length} solved`
      : `${outcome(shown.outcome).label}, ${shown.num_turns} turns`;
    return el("button", {
      class: faded ? "maze faded" : "maze", title: `seed ${shown.seed}: ${told}`,
      "--outcome": outcome(shown.outcome).color,
      "--tint": colors.length > 1 ? `linear-gradient(to right, ${stripes.join(", ")})`
        : tint(colors[0]),
      "aria-current": String(episodes.includes(state.episode)),
      onclick: (event) => {
        letGo(event);
        showEpisode(shown);
      },
    }, source ? el("img", { src: source, alt: "" }) : null, columns > 12 ? null
      : el("span", {}, label));
  }));
}
