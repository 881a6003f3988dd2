
/* One episode */

function showEpisode(episode) {
  stop();
  state.episode = episode;
  state.turn = 0;
  showGrid();
  at("replay").hidden = !episode;
  if (!episode) return;
  const { label, color } = outcome(episode.outcome);
  at("episode").replaceChildren(
    el("span", { class: "badge", "--outcome": color }, label),
    el("b", {}, `seed ${episode.seed}`),
    el("span", {}, `${episode.num_turns} turns`),
    el("span", {}, `reward ${short(episode.reward)}`),
    el("span", { class: "muted" },
      `${episode.env}, policy version ${episode.version}, engine ${episode.engine}`),
  );
  showHistory(episode);
  const prompt = episode.replay ? text(episode.replay.prompt) : null;
  at("prompt").hidden = prompt === null;
  at("prompt").querySelector("pre").textContent = prompt || "";
  showTurn(0);
}

/* The same maze in the other evaluations of the kind, and its other members in this one. */
function showHistory(episode) {
  const parts = [];
  const list = evaluations(state.kind);
  const dot = (e, title, isCurrent, go) => el("button", {
    class: "dot", "--outcome": outcome(e.outcome).color, title,
    "aria-current": String(isCurrent), onclick: (event) => {
      letGo(event);
      go();
    },
  });
  if (list.length > 1) {
    parts.push("this maze by evaluation");
    list.forEach((evaluation, place) => {
      const found = evaluation.episodes.find((e) => same(e, episode));
      if (found) parts.push(dot(found,
        `step ${evaluation.step}: ${outcome(found.outcome).label}, ${found.num_turns} turns`,
        place === state.place, () => showEvaluation(place)));
    });
  }
  const members = current().episodes.filter((e) => e.env === episode.env
    && e.seed === episode.seed && e.index === episode.index);
  if (members.length > 1) {
    if (parts.length) parts.push(el("span", { class: "gap" }));
    parts.push("its episodes");
    parts.push(...members.map((e) => dot(e, `${outcome(e.outcome).label}, ${e.num_turns} turns`,
      e === episode, () => showEpisode(e))));
  }
  at("history").replaceChildren(...parts);
}

function showTurn(turn) {
  const { episode } = state;
  const turns = episode.replay ? episode.replay.turns : [];
  state.turn = Math.max(0, Math.min(turns.length, turn));
  const isEnd = state.turn === turns.length;
  const now = turns[state.turn];
  showFrame(episode, isEnd ? episode.replay && episode.replay.final : lastOf(now[1]));
  const { label, color } = outcome(episode.outcome);
  const buttons = turns.map(([reply, , , executed], i) => el("button", {
    class: executed ? "" : "bad", title: `turn ${i + 1}`,
    "aria-current": String(i === state.turn), onclick: jump(i),
  }, text(DATA.replies[reply][2])));
  buttons.push(el("button", { class: "end", "--outcome": color, title: "end",
    "aria-current": String(isEnd), onclick: jump(turns.length) }, label));
  at("track").replaceChildren(...buttons);
  at("reply").replaceChildren(...(isEnd ? endParts(episode, turns) : turnParts(now, turns)));
}

const lastOf = (list) => list.length ? list[list.length - 1] : null;

function jump(turn) {
  return (event) => {
    letGo(event);
    stop();
    showTurn(turn);
  };
}

function showFrame(episode, index) {
  const source = index === null || index === undefined ? null : DATA.frames[index];
  const frame = at("frame");
  frame.hidden = !source;
  if (source) frame.src = source;
  frame.alt = `frame of seed ${episode.seed}`;
  at("noframe").hidden = Boolean(source);
  at("noframe").textContent = episode.replay ? "This frame is not stored."
    : `This episode is not part of the page, which would be too large. It is stored in ${
      current().file}.`;
}

function turnParts([reply, frames, feedback, executed, cut, start, logprobs], turns) {
  const [words, tokens, symbol, action, problem] = DATA.replies[reply];
  const seen = state.turn - start;
  const note = [`turn ${state.turn + 1} of ${turns.length}`];
  if (state.turn) note.push(seen ? `${seen + 1} frames in sight` : "one frame in sight");
  if (frames.length > 1) note.push(`${frames.length} images, the last one shown`);
  const answer = text(feedback);
  const bad = executed ? "" : "bad";
  return [
    part(note.join(", "), el("div", { class: `big ${bad}` }, text(symbol)),
      el("div", { class: bad }, action === null ? `no action: ${text(problem) || ""}`
        : text(action))),
    part("answer of the environment", el("div", { class: bad }, answer === null ? "\u2013"
      : answer)),
    part(`what the model wrote${cut ? ", cut at the token limit" : ""}`,
      el("pre", {}, text(words))),
    part(`sampled tokens and their log-probs, sum ${sum(logprobs)}`,
      el("div", { class: "tokens" }, ...tokens.map((token, i) => tokenPart(token, logprobs[i])))),
  ];
}

function part(title, ...children) {
  return el("div", {}, el("h2", {}, title), ...children);
}

const logprobOf = (units) => units === null || units === undefined ? null
  : units * DATA.logprob_unit;

function tokenPart(token, units) {
  const value = logprobOf(units);
  const sure = value === null ? 0 : Math.exp(value);
  const shown = text(token).replaceAll("\n", "\u21b5").replaceAll("\t", "\u21e5");
  return el("span", {
    class: "token", title: value === null ? "not finite" : `probability ${sure.toFixed(4)}`,
    "--sure": `color-mix(in srgb, var(--green) ${Math.round(100 * sure)}%, var(--red))`,
  }, el("b", {}, shown.trim() === shown ? shown : shown.replaceAll(" ", "\u00b7")),
  el("i", {}, value === null ? "nan" : decimals(value)));
}

const decimals = (value) => value.toFixed(3).replace("-0.000", "0.000");

function sum(units) {
  return units.some((u) => u === null) ? "not finite"
    : decimals(units.reduce((a, b) => a + b, 0) * DATA.logprob_unit);
}

function endParts(episode, turns) {
  const { label } = outcome(episode.outcome);
  const error = episode.replay ? text(episode.replay.error) : null;
  const idle = turns.filter(([, , , executed]) => !executed).length;
  return [
    part(`after ${episode.num_turns} turns`, el("div", { class: "big" }, label)),
    part("reward", el("div", {}, short(episode.reward))),
    turns.length ? part("turns that changed nothing", el("div", {}, String(idle))) : null,
    error === null ? null : part("error", el("pre", {}, error)),
  ].filter((child) => child !== null);
}

/* Controls */

function stop() {
  clearInterval(state.timer);
  state.timer = null;
  at("play").textContent = "\u25b6 play";
}

function playOrPause() {
  if (state.timer) {
    stop();
    return;
  }
  const end = state.episode && state.episode.replay ? state.episode.replay.turns.length : 0;
  if (!end) return;
  if (state.turn === end) showTurn(0);
  at("play").textContent = "\u25a0 pause";
  state.timer = setInterval(() => {
    showTurn(state.turn + 1);
    if (state.turn === end) stop();
  }, TURN_MS);
}

function otherEpisode(by) {
  const list = ordered();
  const place = list.indexOf(state.episode) + by;
  if (place < 0 || place >= list.length) return;
  showEpisode(list[place]);
  const chosen = document.querySelector('.maze[aria-current="true"]');
  if (chosen) chosen.scrollIntoView({ block: "nearest" });
}

function otherEvaluation(by) {
  const place = state.place + by;
  if (place >= 0 && place < evaluations(state.kind).length) showEvaluation(place);
}

function step(by) {
  stop();
  showTurn(state.turn + by);
}

/* After a click with the mouse the keys shall mean the replay again, not the button. */
function letGo(event) {
  if (event.detail) event.currentTarget.blur();
}

const KEYS = {
  ArrowRight: () => step(1),
  ArrowLeft: () => step(-1),
  ArrowDown: () => otherEpisode(1),
  ArrowUp: () => otherEpisode(-1),
  Home: () => step(-Infinity),
  End: () => step(Infinity),
  "[": () => otherEvaluation(-1),
  "]": () => otherEvaluation(1),
  " ": playOrPause,
};

function onKey(event) {
  if (event.ctrlKey || event.altKey || event.metaKey || !state.episode) return;
  const own = event.key === " " ? "button, summary, select" : "input, select";
  const act = KEYS[event.key];
  if (!act || event.target.closest(own)) return;
  event.preventDefault();
  act();
}
