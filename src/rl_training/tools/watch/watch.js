// The page of `rl-training watch`: asks for the runs every few seconds and shows what changed.
"use strict";
import { Chart, compact, duration, element, key, number } from "/chart.js";

const EVALUATION = "eval/return_mean", TRAINING = "rollout/return_mean";
const TITLES = { [EVALUATION]: "Evaluation return", [TRAINING]: "Training return" };
const EVERY = 2000, HIDDEN = 15000, READING = 250;
const COLUMNS = ["Run", "Status", "Progress", "Per second", "Evaluation", "Training", "Time", "Left", "Remarks"];
const NUMERIC = new Set(["Per second", "Evaluation", "Training", "Time", "Left"]);
const NONE = "\u2013";

const find = (selector) => document.querySelector(selector);
const form = find("#controls");
const orders = new Map();      // run -> its colour, for as long as the page is open
const shownCurves = new Map(); // run -> {revision, wanted, curves}
const rows = new Map(), charts = new Map(), players = new Map();
const hidden = new Set();
let answer = { runs: [], metrics: [], damaged: [] };
let chosen = new Set([EVALUATION, TRAINING]);
let timer = 0, asking = Promise.resolve();

// -- what is asked for ---------------------------------------------------------------------------

async function get(path) {
  const response = await fetch(path);
  if (!response.ok) throw new Error(`${response.status}`);
  return response.json();
}

async function update() {
  clearTimeout(timer);
  let wait = document.hidden ? HIDDEN : EVERY;
  try {
    answer = await get("/api/runs");
    answer.runs.sort((a, b) => (a.created < b.created ? 1 : a.created > b.created ? -1 : a.name < b.name ? -1 : 1));
    for (const run of answer.runs) if (!orders.has(run.id)) orders.set(run.id, orders.size);
    await loadCurves();
    render();
    connected(true);
    if (answer.runs.some((run) => run.reading)) wait = READING;
  } catch (error) {
    if (error instanceof TypeError || /^\d+$/.test(error.message)) connected(false);
    else throw error;
  } finally {
    timer = setTimeout(ask, wait);
  }
}

// One update at a time; a change of the controls that comes during one asks again after it.
function ask() {
  asking = asking.then(update).catch((error) => console.error(error));
}

async function loadCurves() {
  const wanted = [...chosen].sort();
  const label = wanted.join("\n");
  const outdated = visible().filter((run) => {
    const have = shownCurves.get(run.id);
    return !have || have.revision !== run.revision || have.wanted !== label;
  });
  await Promise.all(outdated.map(async (run) => {
    const query = new URLSearchParams([["run", run.id], ...wanted.map((name) => ["metric", name])]);
    const { revision, curves } = wanted.length ? await get(`/api/curves?${query}`) : run;
    shownCurves.set(run.id, { revision, wanted: label, curves: curves ?? {} });
  }));
}

function connected(is) {
  const line = find("#connection");
  const text = is ? "" : "No answer from rl-training watch: is it still running? The page shows what was read last.";
  if (line.textContent !== text) line.textContent = text;
  line.classList.toggle("lost", !is);
}

// -- what is shown -------------------------------------------------------------------------------

function matching() {
  const words = form.filter.value.toLowerCase().split(/\s+/).filter(Boolean);
  return answer.runs.filter((run) => {
    if (form.status.value && run.status !== form.status.value) return false;
    const settings = Object.entries(run.settings).map(([name, value]) => `${name}=${value}`);
    const text = [run.name, run.env, run.algo, `seed=${run.seed}`, ...settings].join(" ").toLowerCase();
    return words.every((word) => text.includes(word));
  });
}

function visible() {
  return matching().filter((run) => !hidden.has(run.id));
}

function render() {
  remember();
  const runs = matching();
  renderLead();
  renderStatuses();
  renderMetrics();
  renderTable(runs);
  renderCharts(visible());
  renderVideos(visible());
  renderSettings(runs);
  renderDamaged();
}

function renderLead() {
  const counts = new Map();
  for (const run of answer.runs) counts.set(run.status, (counts.get(run.status) ?? 0) + 1);
  const parts = [...counts].map(([status, count]) => `${count} ${status}`);
  if (answer.damaged.length) parts.push(`${answer.damaged.length} damaged`);
  const reading = answer.runs.some((run) => run.reading);
  setText(find("#lead"), (parts.join(", ") || "No runs yet: they appear here when they start")
    + (reading ? " (still reading)" : ""));
  const total = answer.runs.length;
  setText(find("#title"), total === 1 ? "1 run" : `${total || "No"} runs`);
  const running = counts.get("running") ?? 0;
  document.title = `${running ? `${running} running \u00b7 ` : ""}rl_training watch`;
}

function renderStatuses() {
  const statuses = ["", ...new Set(answer.runs.map((run) => run.status))].sort();
  const select = form.status;
  if (select.value && !statuses.includes(select.value)) statuses.push(select.value);
  const label = statuses.join("\n");
  if (select.dataset.label === label) return;
  const before = select.dataset.wanted ?? select.value;
  select.replaceChildren(...statuses.map((each) => element("option", { value: each }, each || "all")));
  select.value = before;
  select.dataset.label = label;
  delete select.dataset.wanted;
}

function renderMetrics() {
  const box = find("#metrics");
  const names = [...new Set([...answer.metrics, ...chosen])].sort();
  setText(box.querySelector("summary"), `Metrics (${chosen.size} of ${names.length})`);
  const label = names.join("\n");
  if (box.dataset.label === label) return;
  box.dataset.label = label;
  box.querySelector(".choices").replaceChildren(...names.map((name) => {
    const check = element("input", { type: "checkbox", checked: chosen.has(name) });
    check.addEventListener("change", () => {
      if (check.checked) chosen.add(name); else chosen.delete(name);
      ask();
    });
    return element("label", {}, check, element("span", {}, name));
  }));
}

function renderTable(runs) {
  const table = find("#table");
  const head = table.querySelector("thead tr");
  if (!head.children.length) {
    head.append(...COLUMNS.map((title) => element("th", { scope: "col", className: NUMERIC.has(title) ? "number" : "" }, title)));
  }
  setText(table.caption, runs.length === answer.runs.length ? "Clear a checkbox to hide the curves of a run"
    : `${runs.length} of ${answer.runs.length} runs match the filter`);
  const wanted = runs.map((run) => tableRow(run));
  const body = table.tBodies[0];
  if (wanted.length !== body.children.length || wanted.some((row, i) => body.children[i] !== row)) body.replaceChildren(...wanted);
}

function tableRow(run) {
  let row = rows.get(run.id);
  if (!row) {
    row = newRow(run);
    rows.set(run.id, row);
  }
  const [name, status, progress, ...others] = row.children;
  setText(name.querySelector(".about"), `${run.algo} on ${run.env}, seed ${run.seed}`);
  row.classList.toggle("off", hidden.has(run.id));
  const kinds = { finished: "finished", failed: "failed", running: "running" };
  setText(status.firstChild, run.status);
  status.firstChild.className = `status ${kinds[run.status] ?? "open"}`;
  const [count, bar] = progress.children;
  setText(count, run.total ? `${compact(run.step)} of ${compact(run.total)} ${run.unit}` : `${compact(run.step)} ${run.unit}`);
  bar.value = run.total ? run.step / run.total : 0;
  bar.hidden = run.status === "finished";
  const left = run.status === "running" && run.speed ? Math.max(0, run.total - run.step) / run.speed : null;
  const texts = [run.speed ? number(Math.round(run.speed)) : NONE, number(run.evaluation?.[0]), number(run.training?.[0]),
    duration(run.seconds), left === null ? NONE : duration(left)];
  texts.forEach((text, i) => setText(others[i], text));
  setText(others.at(-1).firstChild, run.reason || NONE);
  return row;
}

function newRow(run) {
  const check = element("input", { type: "checkbox", checked: !hidden.has(run.id), ariaLabel: `Show ${run.name}` });
  check.addEventListener("change", () => {
    if (check.checked) hidden.delete(run.id); else hidden.add(run.id);
    ask();
  });
  const label = element("label", { className: "run" }, check, key(orders.get(run.id)),
    element("code", {}, run.name), element("span", { className: "about" }));
  const row = element("tr", {}, element("th", { scope: "row" }, label),
    element("td", {}, element("span")),
    element("td", {}, element("span"), element("progress", { max: 1, ariaLabel: `Progress of ${run.name}` })));
  for (let i = 0; i < 5; i++) row.append(element("td", { className: "number" }));
  row.append(element("td", {}, element("span", { className: "remark" })));
  return row;
}

function renderCharts(runs) {
  const place = find("#charts");
  const axis = form.axis.value, weight = Number(form.smoothing.value);
  const sections = [], used = new Set();
  const groups = new Map();
  for (const run of runs) {
    const name = axis === "count" ? `${run.env}\n${run.unit}` : run.env;
    groups.set(name, [...(groups.get(name) ?? []), run]);
  }
  for (const [name, members] of [...groups].sort(([a], [b]) => (a < b ? -1 : 1))) {
    const figures = [];
    for (const metric of [...chosen].sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1))) {
      const lines = members.flatMap((run) => line(run, metric, axis));
      if (!lines.length) continue;
      const id = `${name}\n${metric}`;
      used.add(id);
      figures.push(drawn(id, metric, lines, axis === "count" ? members[0].unit : axis, weight));
    }
    if (figures.length) sections.push([name, members[0].env, figures]);
  }
  for (const id of charts.keys()) if (!used.has(id)) charts.delete(id);
  place_sections(place, sections);
}

function rank(metric) {
  return metric === EVALUATION ? 0 : metric === TRAINING ? 1 : 2;
}

function line(run, metric, axis) {
  const found = shownCurves.get(run.id)?.curves[metric];
  if (!found) return [];
  const [steps, seconds, values] = found;
  return [{ name: run.name, order: orders.get(run.id), x: axis === "seconds" ? seconds : steps, y: values,
    mark: `${run.id} ${shownCurves.get(run.id).revision}` }];
}

function drawn(id, metric, lines, axis, weight) {
  const chart = charts.get(id) ?? new Chart(TITLES[metric], metric);
  charts.set(id, chart);
  const mark = JSON.stringify([lines.map((each) => each.mark), axis, weight]);
  if (chart.mark !== mark) {
    chart.mark = mark;
    chart.draw(lines, axis, weight);
  }
  return chart.figure;
}

function place_sections(place, sections) {
  const label = JSON.stringify(sections.map(([name, , figures]) => [name, figures.length]));
  const figures = sections.flatMap(([, , each]) => each);
  const present = [...place.querySelectorAll("figure")];
  if (place.dataset.label === label && figures.every((figure, i) => figure === present[i])) return;
  place.dataset.label = label;
  place.replaceChildren(...sections.flatMap(([, env, each]) =>
    [element("h3", {}, env), element("div", { className: "figures" }, ...each)]));
  if (!sections.length) {
    place.append(element("p", {}, answer.runs.length ? "No values of the chosen metrics yet, or all runs are hidden."
      : "Curves appear here with the first rows of a run."));
  }
}

function renderVideos(runs) {
  const section = find("#videos").parentElement, place = section.querySelector("div");
  const wanted = runs.filter((run) => run.videos.length).map(videoOf);
  section.hidden = !wanted.length;
  if (wanted.length !== place.children.length || wanted.some((each, i) => place.children[i] !== each)) place.replaceChildren(...wanted);
}

function videoOf(run) {
  let player = players.get(run.id);
  if (!player) {
    const select = element("select", { ariaLabel: `Video of ${run.name}` });
    const video = element("video", { controls: true, preload: "metadata", loop: true, muted: true, playsInline: true });
    const figure = element("figure", {}, element("figcaption", {}, element("code", {}, run.name), select), video);
    player = { figure, select, video, label: "" };
    select.addEventListener("change", () => showVideo(player, run.id));
    players.set(run.id, player);
  }
  const label = run.videos.join("\n");
  if (player.label !== label) {
    const followsNewest = player.select.selectedIndex <= 0;
    const before = player.select.value;
    const names = [...run.videos].reverse();
    player.select.replaceChildren(...names.map((name) => element("option", { value: name }, videoTitle(name))));
    player.select.value = !followsNewest && names.includes(before) ? before : names[0];
    player.label = label;
    if (player.video.paused || !player.video.src) showVideo(player, run.id);
  }
  return player.figure;
}

function showVideo(player, id) {
  const address = `/videos/${id}/${player.select.value}`;
  if (player.video.getAttribute("src") !== address) player.video.src = address;
}

function videoTitle(name) {
  const step = /^step_0*(\d+)\.mp4$/.exec(name);
  return step ? `step ${Number(step[1]).toLocaleString("en")}` : name;
}

function renderSettings(runs) {
  const section = find("#settings").parentElement;
  const names = [...new Set(runs.flatMap((run) => Object.keys(run.settings)))]
    .filter((name) => new Set(runs.flatMap((run) => run.settings[name] ?? [])).size > 1);
  section.hidden = !names.length;
  const label = JSON.stringify([names, runs.map((run) => [run.name, run.settings])]);
  if (section.dataset.label === label) return;
  section.dataset.label = label;
  const code = (text) => (text === undefined ? NONE : element("code", {}, text));
  section.querySelector("thead tr").replaceChildren(element("th", { scope: "col" }, "Run"),
    ...names.map((name) => element("th", { scope: "col" }, name.replace(/^algo_kwargs\./, ""))));
  section.querySelector("tbody").replaceChildren(...runs.map((run) => element("tr", {},
    element("th", { scope: "row" }, code(run.name)),
    ...names.map((name) => element("td", {}, code(run.settings[name]))))));
}

function renderDamaged() {
  const section = find("#damaged").parentElement;
  section.hidden = !answer.damaged.length;
  section.querySelector("tbody").replaceChildren(...answer.damaged.map((run) => element("tr", {},
    element("th", { scope: "row" }, element("code", {}, run.name)),
    element("td", {}, element("span", { className: "remark" }, run.reason)))));
}

function setText(place, text) {
  if (place.textContent !== text) place.textContent = text;
}

// -- the controls, kept in the address ----------------------------------------------------------

function remember() {
  const state = new URLSearchParams();
  for (const name of ["filter", "status", "axis", "smoothing"]) state.set(name, form[name].value);
  for (const name of chosen) state.append("metric", name);
  const address = `#${state}`;
  if (location.hash !== address) history.replaceState(null, "", address);
}

function restore() {
  const state = new URLSearchParams(location.hash.slice(1));
  for (const name of ["filter", "axis", "smoothing"]) if (state.has(name)) form[name].value = state.get(name);
  if (state.get("status")) form.status.dataset.wanted = state.get("status");
  if (state.has("metric")) chosen = new Set(state.getAll("metric"));
}

form.addEventListener("submit", (event) => event.preventDefault());
form.addEventListener("input", ask);
document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
restore();
ask();
