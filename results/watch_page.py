"""The page of ``floret watch``: in a Python file, because Flower's app bundle carries no ``.html``.

It has no library and asks nobody but its own server. What it shows of a run comes from other machines, so every text
goes into the page as text (``textContent``), never as HTML.
"""

from results import report_template

STYLE = (
    report_template.STYLE
    + """
.visually-hidden {
  position: absolute; width: 1px; height: 1px; overflow: hidden; clip-path: inset(50%); white-space: nowrap;
}
main { max-width: 1240px; }
[hidden] { display: none !important; }
:focus-visible { outline: 2px solid var(--series-0); outline-offset: 2px; }
.s0 { --own: var(--series-0); } .s1 { --own: var(--series-1); } .s2 { --own: var(--series-2); }
.s3 { --own: var(--series-3); } .s4 { --own: var(--series-4); } .s5 { --own: var(--series-5); }
.s6 { --own: var(--series-6); }
button, input { font: inherit; color: inherit; }
button { cursor: pointer; }
#state {
  display: inline-block; padding: 1px 10px; border-radius: 4px; border: 1px solid var(--muted); font-weight: 600;
  margin-right: 8px;
}
#state.going { color: var(--series-0); border-color: var(--series-0); }
#state.stopped { color: var(--warn); background: var(--warn-page); border-color: var(--warn); }
#which { margin-bottom: 8px; overflow-wrap: anywhere; }
#doing { font-weight: 500; }
#bar { display: flex; align-items: center; gap: 14px; margin: 12px 0 8px; }
#bar progress { flex: 1; min-width: 60px; height: 12px; accent-color: var(--series-0); }
#bar span { white-space: nowrap; }
#waits, #problems { overflow-wrap: anywhere; }
.cards.now { grid-template-columns: repeat(6, 1fr); }
.cards.now .card { padding: 10px 14px 11px; }
.cards.now .value { font-size: 20px; white-space: nowrap; }
#curves { display: block; width: 100%; height: 320px; margin-top: 8px; touch-action: pan-y; }
#curves text { fill: var(--muted); font-size: 12px; }
#curves .grid { stroke: var(--line); }
#curves .line { fill: none; stroke: var(--own); stroke-width: 2; stroke-linejoin: round; }
#curves .before { stroke-dasharray: 6 4; stroke-width: 1.8; }
#curves .other { stroke-width: 1.3; }
#curves .worst { fill: var(--own); opacity: 0.14; stroke: none; }
#curves .part { fill: var(--own); opacity: 0.6; }
#curves .dot { fill: var(--own); }
#curves .cursor { stroke: var(--muted); }
#reading { display: block; min-height: 1.5em; font-size: 13px; color: var(--muted); }
.key svg { width: 30px; height: 10px; margin-right: 8px; vertical-align: middle; }
.key line { stroke: var(--own); stroke-width: 2.5; }
.key .before { stroke-dasharray: 6 4; }
.key rect { fill: var(--own); opacity: 0.2; }
details { margin-top: 10px; }
.tools { display: flex; flex-wrap: wrap; gap: 8px 22px; align-items: center; margin: 8px 0 2px; }
.tools input[type="search"] {
  border: 1px solid var(--muted); border-radius: 4px; padding: 3px 8px; background: var(--page); width: 16em;
  max-width: 100%;
}
.tools .note { margin-left: auto; }
.scroll { max-height: 640px; }
th button {
  border: 0; background: none; padding: 2px 0; font-size: 13px; color: inherit; font-weight: inherit;
  text-align: inherit;
}
th[data-key] button::after { content: "\\00a0\\2195"; opacity: 0.55; }
th[aria-sort="ascending"] button::after { content: "\\00a0\\2191"; opacity: 1; }
th[aria-sort="descending"] button::after { content: "\\00a0\\2193"; opacity: 1; }
#clients thead th { z-index: 1; white-space: normal; vertical-align: bottom; }
#clients th, #clients td { padding-left: 7px; padding-right: 7px; }
#clients th:first-child { position: sticky; left: 0; background: var(--surface); padding-left: 0; }
#clients thead th:first-child { z-index: 2; }
#clients th.course { text-align: left; }
#clients thead th:not([data-key]) { padding-bottom: 8px; }
#clients tbody th {
  text-align: left; font-weight: 500; min-width: 90px; max-width: 220px; white-space: normal; overflow-wrap: anywhere;
  vertical-align: middle;
}
#clients td.why {
  text-align: left; white-space: normal; overflow-wrap: anywhere; min-width: 200px; max-width: 420px; font-size: 13px;
}
#clients th:last-child { text-align: left; }
#clients tr.refused td.why { color: var(--warn); }
#clients svg { display: block; width: 90px; height: 22px; }
#clients svg polyline { fill: none; stroke: var(--series-0); stroke-width: 1.5; }
#clients svg circle { fill: var(--series-0); }
.tag {
  display: inline-block; margin-left: 8px; padding: 0 6px; border: 1px solid var(--muted); border-radius: 4px;
  font-size: 12px; color: var(--muted); font-weight: 400;
}
#runs tbody th { text-align: left; font-weight: 400; white-space: normal; min-width: 150px; }
#runs tbody button {
  border: 0; background: none; padding: 2px 0; text-align: left; text-decoration: underline; overflow-wrap: anywhere;
}
#runs tr[aria-current="true"] th button { font-weight: 700; text-decoration: none; }
#runs .swatch line { stroke: var(--own); }
#more {
  margin-top: 10px; border: 1px solid var(--muted); border-radius: 4px; background: var(--page); padding: 3px 12px;
}
@media (max-width: 1000px) { .cards.now { grid-template-columns: repeat(3, 1fr); } }
@media (max-width: 560px) {
  main { padding: 18px 10px 32px; }
  h1 { font-size: 22px; }
  section { padding: 14px 12px; }
  .cards.now { grid-template-columns: repeat(2, 1fr); gap: 8px; }
  .cards.now .value { font-size: 18px; }
  #curves { height: 250px; }
  .tools .note { margin-left: 0; }
  #bar { flex-wrap: wrap; gap: 4px 14px; }
  #bar progress { flex-basis: 100%; }
  #clients tbody th { max-width: 120px; }
}
"""
)

SCRIPT = r"""
"use strict";
const DASH = "\u2013", SPACE = "\u00a0", SERIES = 7, SHOWN = 250, SPARK = 60;
const SVG = "http://www.w3.org/2000/svg";
const runs = new Map();    // number of a run -> what is known of it
let selected = null, columns = {}, order = [], failures = 0, drawn = "", changes = 0;
let sorting = {key: "name", down: false}, limit = SHOWN, spoken = 0, heard = "";
const collator = new Intl.Collator("en", {numeric: true});
const $ = (id) => document.getElementById(id);

function make(tag, text, name) {
  const element = document.createElement(tag);
  if (text !== undefined) element.textContent = text;
  if (name) element.className = name;
  return element;
}

function shape(tag, attributes, text) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function say(id, text) {
  const element = $(id);
  if (element.textContent !== text) element.textContent = text;
}

// With one decimal, ties to even as in the report: of numbers with a tie, only those that end in .25 differ.
const tenths = (value) => (value % 1 === 0.25 ? value - 0.05 : value).toFixed(1);
const percent = (value) => value === null || value === undefined ? DASH : tenths(100 * value) + SPACE + "%";

function megabytes(count) {
  const amount = count / 1e6;
  if (amount === 0) return "0";
  return amount >= 100 ? Math.round(amount).toLocaleString("en") : amount.toPrecision(amount < 1e-4 ? 1 : 3);
}

function duration(seconds) {
  if (seconds === null || seconds === undefined) return DASH;
  if (seconds < 1) return +seconds.toPrecision(2) + SPACE + "s";
  if (seconds < 59.95) return tenths(seconds) + SPACE + "s";
  const whole = Math.round(seconds), two = (value) => String(value).padStart(2, "0");
  if (whole < 3600) return `${Math.floor(whole / 60)} min ${two(whole % 60)} s`;
  return `${Math.floor(whole / 3600)} h ${two(Math.floor(whole % 3600 / 60))} min`;
}

const age = (seconds) => seconds < 60 ? `${Math.floor(seconds)} s` : duration(seconds);
const many = (count, one) => `${count.toLocaleString("en")} ${one}${count === 1 ? "" : "s"}`;
const named = (names, row) => Object.fromEntries(names.map((name, place) => [name, row[place]]));

// What came from the server

function take(news) {
  columns = news.columns;
  order = news.runs.map((run) => run.id);
  for (const id of runs.keys()) if (!order.includes(id)) runs.delete(id);
  for (const run of news.runs) {
    const known = run.full || !runs.has(run.id)
      ? {rounds: [], clients: new Map(), rows: new Map()} : runs.get(run.id);
    if (run.about) known.about = run.about;
    for (const row of run.rounds) known.rounds.push(named(columns.round, row));
    for (const row of run.clients) {
      const client = named(columns.client, row), before = known.clients.get(client.name);
      client.points = [...(before ? before.points : []), ...client.points].slice(-SPARK);
      client.version = ++changes;
      known.clients.set(client.name, client);
    }
    if (run.full || run.rounds.length || run.state !== known.state) known.version = ++changes;
    const {rounds, clients, full, about, ...rest} = run;
    Object.assign(known, rest);
    runs.set(run.id, known);
  }
  if (!runs.has(selected)) {
    selected = order.find((id) => runs.get(id).state === "going") ?? lastOf(order);
  }
}

const complete = (run, when) =>
  run.rounds.filter((line) => line[when + "Count"] > 0 && line[when + "Count"] >= run.enough[when]);
const lastOf = (list) => list.length ? list[list.length - 1] : null;
const sum = (run, key) => run.rounds.reduce((total, line) => total + line[key], 0);

// What the run is doing

const STATES = {going: "Going", finished: "Finished", stopped: "Stopped"};

function doing(run) {
  const rounds = run.planned ? ` of ${run.planned}` : "";
  const resumed = lastOf(run.about.resumed);
  const again = resumed === null || resumed === undefined ? "" : `; resumed after round ${resumed}`;
  if (run.state === "finished") {
    return (run.ended === null ? `all ${many(run.last, "round")}`
      : `after ${run.last}${rounds} rounds: privacy.epsilon is spent`) + again;
  }
  if (run.state === "stopped") {
    const during = run.now && run.now.round > run.last ? `, in round ${run.now.round} while ${run.now.phase}` : "";
    return `after round ${run.last}${rounds}${during}${again}`;
  }
  if (!run.now) {
    return (run.planned && run.last >= run.planned ? "writing the personal models and the report"
      : `round ${run.last + 1}${rounds}`) + again;
  }
  return (run.now.round ? `round ${run.now.round}${rounds}: ` : "") + run.now.phase + again;
}

function waits(run) {
  const now = run.now;
  if (run.state === "stopped") {
    const last = now && now.waiting.length ? `When it ended it waited for client ${now.waiting[0]}. ` : "";
    return `${last}No process writes its directory. A run with resume="latest", or with its path, goes on from its `
      + "last checkpoint.";
  }
  if (run.state === "finished") return "The report is report.html in its directory.";
  if (!now) return "";
  if (now.clients && !now.asked && !now.round) {
    return `${now.answered} of ${many(now.clients, "client")} joined; waits for the others (${age(now.seconds)}).`;
  }
  const parts = [];
  if (now.clients) {
    parts.push(`${now.answered.toLocaleString("en")} of ${many(now.clients, "client")} answered`
      + (now.asked < now.clients ? `, ${now.asked.toLocaleString("en")} asked so far` : ""));
  } else if (now.asked) {
    parts.push(`${now.answered.toLocaleString("en")} of ${now.asked.toLocaleString("en")} answered`);
  }
  if (now.waiting.length) {
    const next = now.waiting.slice(1, 6), rest = now.asked - now.answered - 1 - next.length;
    parts.push(`waits for client ${now.waiting[0]} (${age(now.waitingSeconds)})`
      + (next.length ? `, then reads the answers of ${next.join(", ")}${rest > 0 ? ` and ${rest} more` : ""}` : ""));
  } else {
    parts.push(`${age(now.seconds)} in this phase`);
  }
  const text = parts.join("; ");
  return text.charAt(0).toUpperCase() + text.slice(1) + ".";
}

function announce(run) {
  const state = `${run.label}: ${STATES[run.state]}, `
    + (run.state === "going" ? `round ${run.last} of ${run.planned} is done` : doing(run));
  const urgent = !heard.startsWith(`${run.label}: ${STATES[run.state]}`);
  if (state !== heard && (urgent || Date.now() - spoken > 15000)) {
    heard = state;
    spoken = Date.now();
    say("live", state);
  }
}

function card(id, value, small, note) {
  say(id + "-value", value);
  say(id + "-small", small);
  say(id + "-note", note);
}

function showNow(run) {
  const about = run.about, clients = many(run.clients.size, "client");
  const several = order.length > 1, title = `${about.method} on ${about.dataset}`;
  say("title", several ? many(order.length, "run") : title);
  say("which", run.label);
  $("which").hidden = !several;
  say("words", [...(several ? [title] : []), ...about.words, clients, about.name].join(" \u00b7 "));
  const state = $("state");
  say("state", STATES[run.state]);
  state.className = run.state;
  say("doing", doing(run));
  const wanted = run.ended ?? run.planned, share = wanted ? Math.min(1, run.last / wanted) : 0;
  $("progress").value = share;
  say("rounds", `${run.last} of ${run.planned || "?"} rounds, ${Math.floor(100 * share)}${SPACE}%`);
  say("waits", run.more ? "The history is being read." : waits(run));
  const used = run.more || !run.rounds.length || [...run.clients.values()].some((client) => client.trained);
  const problems = [...run.problems, ...(used ? [] : ["no reply has been used up to now"])];
  say("problems", problems.join("; "));
  $("problems").hidden = !problems.length;
  const after = lastOf(complete(run, "after")), before = lastOf(complete(run, "before"));
  const over = (count) => count < run.clients.size ? ` over ${count.toLocaleString("en")} of ${clients}` : "";
  card("after", percent(after && after.after), after ? `\u00b1 ${tenths(100 * after.afterStd)}` : "",
    after ? `\u00b1 std${over(after.afterCount)}, round ${after.round}`
      : run.last ? "nothing measured" : "no round yet");
  card("before", percent(before && before.before), before ? `\u00b1 ${tenths(100 * before.beforeStd)}` : "",
    before ? `as received${over(before.beforeCount)}, round ${before.round}` : "");
  card("worst", percent(after && after.afterWorst), "",
    before ? `before: ${percent(before.beforeWorst)}${over(before.beforeCount)}` : "");
  const past = `${duration(run.spent)} ${run.state === "going" ? "so far" : "in its rounds"}`;
  card("left", run.state === "going" ? duration(run.left) : DASH, "", past);
  card("sent", `${megabytes(sum(run, "up"))} / ${megabytes(sum(run, "down"))}`, "MB", "all clients, all rounds");
  const refused = sum(run, "refused"), line = lastOf(run.rounds);
  card("refused", refused.toLocaleString("en"), "", line ? `${line.refused} in round ${line.round}` : "");
  const spent = line ? line.epsilon : null;
  $("epsilon-value").closest(".card").hidden = spent === null;
  const most = `${about.privacy}the client that spent most`;
  if (spent !== null) card("epsilon", `\u03b5 ${+spent.toPrecision(3)}`, "", most);
  document.title = `${run.state === "going" ? `${run.last}/${run.planned}` : STATES[run.state]} \u00b7 `
    + `${about.method} on ${about.dataset}`;
  announce(run);
}

// Several runs

function showRuns() {
  const several = order.length > 1, body = $("runs-body");
  $("runs").hidden = !several;
  if (!several) return;
  const focused = document.activeElement && document.activeElement.dataset.run;
  body.replaceChildren(...order.map((id, place) => {
    const run = runs.get(id), row = make("tr");
    const after = lastOf(complete(run, "after")), before = lastOf(complete(run, "before"));
    const head = make("th"), button = make("button", run.label);
    head.scope = "row";
    button.type = "button";
    button.dataset.run = id;
    button.addEventListener("click", () => { selected = id; limit = SHOWN; show(); });
    head.append(swatch(place), button);
    if (id === selected) row.setAttribute("aria-current", "true");
    row.append(head);
    // Of fewer clients than after: means over others are not compared.
    const same = before && after && before.beforeCount >= after.afterCount;
    const cells = [STATES[run.state], `${run.last} of ${run.planned || "?"}`, percent(after && after.after),
      percent(same ? before.before : null), percent(after && after.afterWorst), megabytes(sum(run, "up")),
      megabytes(sum(run, "down")), String(sum(run, "refused")), run.state === "going" ? duration(run.left) : DASH];
    row.append(...cells.map((text) => make("td", text)));
    return row;
  }));
  if (focused) body.querySelector(`[data-run="${Number(focused)}"]`)?.focus();
}

function swatch(place) {
  const svg = shape("svg", {class: `swatch s${place % SERIES}`, viewBox: "0 0 26 8", "aria-hidden": "true"});
  svg.append(shape("line", {x1: 1, y1: 4, x2: 25, y2: 4}));
  return svg;
}

// Curves

let plot = null;

function ticks(low, high, wanted) {
  const rough = (high - low) / wanted, power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((times) => times * power).find((size) => size >= rough) || power;
  const found = [];
  for (let value = Math.ceil(low / step - 1e-9) * step; value <= high + step * 1e-6; value += step) found.push(value);
  return found;
}

function showCurves() {
  const svg = $("curves"), width = Math.max(260, svg.clientWidth), height = svg.clientHeight || 320;
  const version = [selected, width, height, ...order.map((id) => `${id}.${runs.get(id).version}`)].join(" ");
  if (version === drawn) return;
  drawn = version;
  const alone = order.length === 1;
  const lines = [];
  order.forEach((id, place) => {
    const run = runs.get(id);
    for (const when of ["before", "after"]) {
      const whole = complete(run, when), hue = alone ? (when === "after" ? 0 : 1) : place % SERIES;
      const part = run.rounds.filter((line) => line[when + "Count"] > 0 && line[when + "Count"] < run.enough[when]);
      lines.push({id, when, whole, part, hue});
    }
  });
  const values = lines.flatMap(({when, whole, part, id}) => [
    ...whole.map((line) => line[when]), ...part.map((line) => line[when]),
    ...(when === "after" && (alone || id === selected) ? whole.map((line) => line.afterWorst) : [])]);
  $("curves-section").hidden = !values.length;
  const at = plot && plot.run === selected ? plot.at : null;
  plot = null;
  if (!values.length) return;
  const ends = order.map((id) => {
    const run = runs.get(id);
    const ahead = Math.max(10, Math.ceil(1.3 * run.last));
    return run.state === "going" ? Math.min(run.planned || run.last, ahead) : run.last;
  });
  const first = Math.min(...order.flatMap((id) => runs.get(id).rounds.slice(0, 1).map((line) => line.round)));
  const last = Math.max(first + 1, ...ends);
  // One by one: a function takes no more than some 100,000 arguments.
  const least = values.reduce((a, b) => Math.min(a, b)), most = values.reduce((a, b) => Math.max(a, b));
  const room = Math.max(0.02, 0.06 * (most - least));
  const low = Math.max(0, least - room), high = Math.min(1, Math.max(most + room, low + 0.05));
  const left = 46, right = width - 12, top = 10, bottom = height - 40;
  const x = (round) => left + (right - left) * (round - first) / (last - first);
  const y = (value) => bottom - (bottom - top) * (value - low) / (high - low);
  const children = [];
  for (const value of ticks(low, high, height / 55)) {
    children.push(shape("line", {class: "grid", x1: left, x2: right, y1: y(value), y2: y(value)}));
    children.push(shape("text", {x: left - 8, y: y(value) + 4, "text-anchor": "end"},
      `${+(100 * value).toFixed(1)} %`));
  }
  for (const value of ticks(first, last, Math.min(last - first, width / 80)).filter(Number.isInteger)) {
    children.push(shape("text", {x: x(value), y: bottom + 18, "text-anchor": "middle"}, value));
  }
  children.push(shape("text", {x: (left + right) / 2, y: height - 4, "text-anchor": "middle"}, "round"));
  const corners = (list, key) => list.map((line) => `${x(line.round).toFixed(1)},${y(line[key]).toFixed(1)}`);
  for (const {id, when, whole, part, hue} of lines) {
    const own = alone || id === selected;
    if (own && when === "after" && whole.length > 1) {
      const edge = [...corners(whole, "after"), ...corners(whole, "afterWorst").reverse()].join(" ");
      children.push(shape("polygon", {class: `worst s${hue}`, points: edge}));
    }
  }
  for (const {id, when, whole, part, hue} of lines) {
    const own = alone || id === selected;
    for (const line of own ? part : []) {
      children.push(shape("circle", {class: `part s${hue}`, cx: x(line.round), cy: y(line[when]), r: 2.8}));
    }
    if (whole.length > 1) {
      const kind = `line ${when} s${hue}${own ? "" : " other"}`;
      children.push(shape("polyline", {class: kind, points: corners(whole, when).join(" ")}));
    } else if (whole.length) {
      children.push(shape("circle", {class: `dot s${hue}`, cx: x(whole[0].round), cy: y(whole[0][when]), r: 3.5}));
    }
  }
  const cursor = shape("line", {class: "cursor", x1: 0, x2: 0, y1: top, y2: bottom, visibility: "hidden"});
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.replaceChildren(...children, cursor);
  const run = runs.get(selected), end = lastOf(complete(run, "after")), start = lastOf(complete(run, "before"));
  svg.setAttribute("aria-label", "Accuracy in each round, mean over clients. "
    + (end ? `Last, ${run.label}: after local training ${percent(end.after)}, worst decile ` : "")
    + (end ? `${percent(end.afterWorst)}` : "") + (start ? `, before ${percent(start.before)}` : "")
    + ". Arrow keys read single rounds.");
  plot = {x, cursor, first, left, right, last, run: selected, at: null};
  if (at === null) say("reading", "");
  else read(at);
  showKey(alone);
  showRounds();
}

function showKey(alone) {
  const entry = (kind, hue, text) => {
    const item = make("span"), svg = shape("svg", {class: `s${hue}`, viewBox: "0 0 30 10", "aria-hidden": "true"});
    svg.append(kind === "band" ? shape("rect", {x: 1, y: 0, width: 28, height: 10})
      : shape("line", {class: kind, x1: 1, y1: 5, x2: 29, y2: 5}));
    item.append(svg, text);
    return item;
  };
  const hue = alone ? 0 : order.indexOf(selected) % SERIES;
  $("key").replaceChildren(entry("after", hue, "after local training"),
    entry("before", alone ? 1 : hue, "before"), entry("band", hue, "after, down to the worst decile"));
}

function read(round) {
  if (!plot || selected === null) return;
  const run = runs.get(selected);
  let best = null;
  for (const line of run.rounds) {
    if (!best || Math.abs(line.round - round) < Math.abs(best.round - round)) best = line;
  }
  if (!best) return;
  plot.at = best.round;
  plot.cursor.setAttribute("x1", plot.x(best.round));
  plot.cursor.setAttribute("x2", plot.x(best.round));
  plot.cursor.setAttribute("visibility", "visible");
  say("reading", `Round ${best.round}: before ${percent(best.before)}, after ${percent(best.after)}, worst decile `
    + `${percent(best.afterWorst)}, ${many(best.afterCount, "client")}, ${duration(best.seconds)}`
    + (best.refused ? `, ${best.refused} refused` : ""));
}

function showRounds() {
  if (!$("table-of-rounds").open || selected === null) return;
  const lines = runs.get(selected).rounds.slice(-200).reverse();
  $("rounds-body").replaceChildren(...lines.map((line) => {
    const row = make("tr"), head = make("th", line.round);
    head.scope = "row";
    row.append(head, ...[percent(line.before), percent(line.after), percent(line.afterWorst), percent(line.validation),
      line.loss === null ? DASH : line.loss.toPrecision(3), megabytes(line.up), megabytes(line.down),
      duration(line.seconds), String(line.refused)].map((text) => make("td", text)));
    return row;
  }));
}

// Clients

const KEYS = ["name", "after", "before", "loss", "seen", "trained", "samples", "seconds", "up", "down", "refusals"];

function reason(client) {
  const said = (pair) => `round ${pair[0]}: ${pair[1]}`;
  return [client.refusal ? said(client.refusal) : "", client.note ? said(client.note) : ""].filter(Boolean).join("; ");
}

function spark(points) {
  const svg = shape("svg", {viewBox: "0 0 90 22", "aria-hidden": "true"});
  if (!points.length) return svg;
  const values = points.map((point) => point[1]), first = points[0][0], last = points[points.length - 1][0];
  const least = Math.min(...values), most = Math.max(...values), range = Math.max(20, most - least);
  const low = (least + most - range) / 2;
  const x = (round) => 2 + 84 * (last === first ? 1 : (round - first) / (last - first));
  const y = (value) => 19 - 16 * (value - low) / range;
  if (points.length > 1) {
    svg.append(shape("polyline", {points: points.map(([n, v]) => `${x(n).toFixed(1)},${y(v).toFixed(1)}`).join(" ")}));
  }
  const end = points[points.length - 1];
  svg.append(shape("circle", {cx: x(end[0]), cy: y(end[1]), r: 2}));
  return svg;
}

function fill(row, client) {
  const head = make("th", client.name), curve = make("td"), why = make("td", reason(client), "why");
  head.scope = "row";
  curve.append(spark(client.points));
  row.replaceChildren(head, curve, ...[percent(client.after), percent(client.before),
    client.loss === null ? DASH : client.loss.toPrecision(3), client.seen || DASH, client.trained,
    client.samples === null ? DASH : client.samples.toLocaleString("en"), duration(client.seconds),
    megabytes(client.up), megabytes(client.down), client.refusals || 0].map((text) => make("td", text)), why);
  row.className = client.refusal ? "refused" : "";
}

function showClients(run) {
  const wanted = $("filter").value.trim().toLowerCase(), only = $("only-refused").checked;
  const all = [...run.clients.values()];
  const found = all.filter((client) => (!only || client.refusals)
    && (!wanted || client.name.toLowerCase().includes(wanted) || reason(client).toLowerCase().includes(wanted)));
  const key = sorting.key, sign = sorting.down ? -1 : 1;
  found.sort((a, b) => {
    const missing = (a[key] === null) - (b[key] === null);
    const by = key === "name" ? collator.compare(a.name, b.name) : a[key] - b[key];
    return missing || sign * by || collator.compare(a.name, b.name);
  });
  const shown = found.slice(0, limit), awaited = run.state === "going" && run.now ? run.now.waiting[0] : undefined;
  const body = $("clients-body"), rows = shown.map((client) => {
    let row = run.rows.get(client.name);
    if (!row) run.rows.set(client.name, row = make("tr"));
    if (row.version !== client.version) {
      fill(row, client);
      row.version = client.version;
      row.awaited = false;
    }
    if (Boolean(row.awaited) !== (client.name === awaited)) {
      if (row.awaited) row.firstChild.lastChild.remove();
      else row.firstChild.append(make("span", "awaited", "tag"));
      row.awaited = !row.awaited;
    }
    return row;
  });
  if (rows.length !== body.children.length || rows.some((row, place) => body.children[place] !== row)) {
    body.replaceChildren(...rows);
  }
  say("count", found.length === all.length ? many(all.length, "client")
    : `${found.length.toLocaleString("en")} of ${many(all.length, "client")}`);
  $("more").hidden = shown.length === found.length;
  say("more", `Show all ${found.length.toLocaleString("en")}`);
  for (const head of document.querySelectorAll("#clients thead th[data-key]")) {
    if (head.dataset.key === key) head.setAttribute("aria-sort", sorting.down ? "descending" : "ascending");
    else head.removeAttribute("aria-sort");
  }
}

function show() {
  const run = runs.get(selected);
  $("empty").hidden = Boolean(run);
  $("all").hidden = !run;
  if (!run) return;
  showNow(run);
  showRuns();
  showCurves();
  showClients(run);
}

// The server

async function ask() {
  const seen = [...runs.values()].map((run) => `${run.id}.${run.generation}.${run.last}`).join(",");
  const token = new URLSearchParams(location.search).get("token") || "";
  let pause = 1000;
  try {
    const reply = await fetch(`data?${new URLSearchParams({token, seen})}`, {cache: "no-store"});
    if (!reply.ok) throw new Error(reply.status === 403 ? "refused" : "failed");
    take(await reply.json());
    failures = 0;
    const all = [...runs.values()];
    if (all.some((run) => run.more)) pause = 0;
    else if (!all.some((run) => run.state === "going")) pause = 2000;
  } catch (error) {
    failures += 1;
    pause = 3000;
    say("lost", error.message === "refused"
      ? "floret watch was started again: open the address that it prints now."
      : "floret watch does not answer: it has ended. What it said last is still shown.");
  }
  $("lost").hidden = !failures;
  setTimeout(next, pause);
  if (!failures) show();
}

function next() {
  if (document.hidden) setTimeout(next, 1000);
  else ask();
}

// What the reader does

for (const head of document.querySelectorAll("#clients thead th[data-key]")) {
  head.querySelector("button").addEventListener("click", () => {
    const key = head.dataset.key;
    sorting = {key, down: sorting.key === key ? !sorting.down : key !== "name" && key !== "after"};
    if (runs.has(selected)) showClients(runs.get(selected));
  });
}
for (const id of ["filter", "only-refused"]) {
  $(id).addEventListener("input", () => { if (runs.has(selected)) showClients(runs.get(selected)); });
}
$("more").addEventListener("click", () => { limit = Infinity; show(); });
$("table-of-rounds").addEventListener("toggle", showRounds);
$("curves").addEventListener("pointermove", (event) => {
  if (!plot) return;
  const place = event.clientX - $("curves").getBoundingClientRect().left;
  read(plot.first + (plot.last - plot.first) * (place - plot.left) / (plot.right - plot.left));
});
$("curves").addEventListener("keydown", (event) => {
  const step = {ArrowLeft: -1, ArrowRight: 1}[event.key];
  if (!step || !plot) return;
  event.preventDefault();
  read(plot.at === null ? runs.get(selected).last : plot.at + step);
});
new ResizeObserver(() => { if (runs.has(selected)) showCurves(); }).observe($("curves"));
next();
"""


def _column(key: str, text: str) -> str:
    return f'<th scope="col" data-key="{key}"><button type="button">{text}</button></th>'


_CLIENTS = "\n".join(
    (
        _column("name", "client"),
        '<th scope="col" class="course">course</th>',
        _column("after", "after"),
        _column("before", "before"),
        _column("loss", "loss"),
        _column("seen", "last round"),
        _column("trained", "rounds trained"),
        _column("samples", "samples"),
        _column("seconds", "time"),
        _column("up", "MB up"),
        _column("down", "MB down"),
        _column("refusals", "refused"),
        '<th scope="col">last refusal or report</th>',
    )
)


def _card(name: str, title: str) -> str:
    return (
        f'<div class="card"><h3>{title}</h3><div class="value"><span id="{name}-value"></span> '
        f'<small id="{name}-small"></small></div><p id="{name}-note"></p></div>'
    )


_CARDS = "\n".join(
    (
        _card("after", "After local training"),
        _card("before", "Before"),
        _card("worst", "Worst decile"),
        _card("left", "Time left"),
        _card("sent", "Sent up / down"),
        _card("refused", "Refused replies"),
        _card("epsilon", "Privacy spent"),
    )
)

PAGE = f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<link rel="icon" href="data:,">
<title>floret watch</title>
<style>{{style}}</style>
</head>
<body>
<main>
<p id="live" class="visually-hidden" aria-live="polite"></p>
<p id="lost" class="badge" role="alert" hidden></p>
<section id="empty"><h1>No run yet</h1><p>The page shows the next one as soon as it begins.</p></section>
<div id="all" hidden>
<header><h1 id="title"></h1><p class="muted" id="words"></p></header>
<section id="runs" hidden>
<h2 id="runs-title">Runs</h2>
<div class="whole" tabindex="0" role="region" aria-labelledby="runs-title">
<table>
<thead><tr><th scope="col">run</th><th scope="col">state</th><th scope="col">round</th><th scope="col">after</th>
<th scope="col">before</th><th scope="col">worst decile</th><th scope="col">MB up</th><th scope="col">MB down</th>
<th scope="col">refused</th><th scope="col">time left</th></tr></thead>
<tbody id="runs-body"></tbody>
</table>
</div>
</section>
<section aria-label="What the run is doing">
<h2 id="which" hidden></h2>
<p><span id="state"></span><span id="doing"></span></p>
<div id="bar"><progress id="progress" max="1" value="0" aria-label="Rounds done"></progress>
<span id="rounds"></span></div>
<p id="waits" class="muted"></p>
<p id="problems" class="badge" hidden></p>
</section>
<div class="cards now">
{_CARDS}
</div>
<section id="curves-section">
<figure>
<h2>Learning curves</h2>
<figcaption>Test accuracy, mean over clients. Small dots: rounds that measured only part of the clients.</figcaption>
<svg id="curves" role="img" tabindex="0"></svg>
<output id="reading" aria-live="polite"></output>
<div class="key" id="key"></div>
</figure>
<details id="table-of-rounds">
<summary>Rounds as a table</summary>
<div class="scroll" tabindex="0" role="region" aria-label="Rounds">
<table>
<thead><tr><th scope="col">round</th><th scope="col">before</th><th scope="col">after</th>
<th scope="col">worst decile, after</th><th scope="col">validation, after</th><th scope="col">loss</th>
<th scope="col">MB up</th><th scope="col">MB down</th><th scope="col">time</th><th scope="col">refused</th></tr></thead>
<tbody id="rounds-body"></tbody>
</table>
</div>
</details>
</section>
<section>
<h2 id="clients-title">Clients</h2>
<p class="note">The last accuracies that each client measured on its own test split; loss and time of its last training;
bytes over all rounds.</p>
<div class="tools">
<label>Filter by name or reason <input type="search" id="filter" autocomplete="off" spellcheck="false"></label>
<label><input type="checkbox" id="only-refused"> only refused</label>
<span class="note" id="count" role="status"></span>
</div>
<div class="scroll" tabindex="0" role="region" aria-labelledby="clients-title">
<table id="clients">
<caption class="visually-hidden">Clients; a button in a heading sorts by its column</caption>
<thead><tr>
{_CLIENTS}
</tr></thead>
<tbody id="clients-body"></tbody>
</table>
</div>
<button type="button" id="more" hidden></button>
</section>
<footer>1 MB is 10<sup>6</sup> bytes, counted from the arrays that travelled.</footer>
</div>
</main>
<script>{{script}}</script>
</body>
</html>
"""
