// The view of the playground: handles to drag, controls, and everything that follows from them. The arithmetic is in dynamics.js.

import * as dynamics from "./dynamics.js";

const FORCES = {
  spring: "spring: −q",
  none: "none: 0",
  pendulum: "pendulum: −sin q",
  bent: "bent: tanh(2q), swapped",
  swirl: "swirl: (−q₂, q₁)",
  network: "network of chapter 02",
  landscape: "landscape: −Wᵀ silu(Wq + b)",
};
const RULES = {
  euler: "Euler",
  symplectic_euler: "symplectic Euler",
  leapfrog: "leapfrog, kick-drift-kick",
  leapfrog_dkd: "leapfrog, drift-kick-drift",
  rk4: "Runge-Kutta (rk4)",
};
const NO_ENERGY = { landscape: "there is one, without a short formula" }; // all others that dynamics.js lacks are no slopes
const START = { dt: 0.3, n: 1, step: "euler", force: "spring", causal: false };
const REACH = 2.5; // the plane shows -2.5 to 2.5
const MAPS = {
  plain: "plain attention",
  now: "after coupling",
  "query-key": "query-key: q·k",
  "key-key": "+ key-key: n dt k·k",
  "query-force": "+ query-force: n dt q·f",
  "key-force": "+ key-force: (n dt)² k·f",
  rest: "+ the rest",
  sum: "= the new q·k",
};

const options = names => Object.entries(names).map(([value, text]) => `<option value="${value}">${text}</option>`).join("");
const places = names => names.map(name => `<figure data-map="${name}"><figcaption>${MAPS[name]}</figcaption></figure>`).join("");
const PAGE = `
<div class="column">
  <div class="plane">
    <svg viewBox="${-REACH} ${-REACH} ${2 * REACH} ${2 * REACH}" role="group" aria-label="Queries and keys of four tokens in the plane"></svg>
    <p class="legend"><span class="q">● query</span> <span class="k">◆ key</span> ○ ◇ ends; dotted: true path</p>
  </div>
  <form class="controls">
    <label>step size dt <output></output><input type="range" name="dt" min="0" max="2.2" step="0.05"></label>
    <label>steps n <output></output><input type="range" name="n" min="1" max="12"></label>
    <label>integrator <select name="step">${options(RULES)}</select></label>
    <label>force f <select name="force">${options(FORCES)}</select></label>
    <label class="check"><input type="checkbox" name="causal"> causal mask: only itself and the past</label>
    <button type="button">Reset</button>
  </form>
  <dl class="measures"></dl>
</div>
<div class="column">
  <div class="attention">
    <p class="title">How query i (row) attends to key j (column)</p>
    <div class="maps">${places(["plain", "now"])}</div>
    <p role="status"></p>
  </div>
  <div class="terms">
    <p class="title">What makes the new scores</p>
    <div class="maps">${places(["query-key", "key-key", "query-force", "key-force", "rest", "sum"])}</div>
    <p class="note"></p>
  </div>
</div>`;

// An SVG element inside `parent`.
function draw(parent, tag, attributes = {}, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return parent.appendChild(element);
}

const fixed = x => (x.toFixed(2) === "-0.00" ? "0.00" : x.toFixed(2)).replace("-", "−");
const short = x => { // fits a cell
  const size = Math.abs(x);
  return size < 9.995 ? fixed(x) : size < 9999.5 ? x.toFixed(size < 99.95 ? 1 : 0).replace("-", "−") : x.toExponential(0).replace("-", "−").replace("+", "");
};
const shape = (kind, r) => // a circle for a query, a diamond for a key: colour is not the only sign
  kind === "q" ? `M${-r} 0a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0` : `M0 ${-1.25 * r}L${1.25 * r} 0L0 ${1.25 * r}L${-1.25 * r} 0Z`;
const most = matrix => Math.max(...matrix.flat().map(Math.abs));
const minus = (a, b) => a.map((row, i) => row.map((x, j) => x - b[i][j]));

// A matrix as coloured numbers; returns the function that shows another one.
function heatmap(figure) {
  const svg = draw(figure, "svg", { viewBox: "0.5 0 43.5 43.7", role: "img" });
  const cells = [0, 1, 2, 3].map(i => [0, 1, 2, 3].map(j => [
    draw(svg, "rect", { x: 4 + 10 * j, y: 4 + 10 * i, width: 9.7, height: 9.7 }),
    draw(svg, "text", { x: 8.85 + 10 * j, y: 10 + 10 * i, class: "number" }),
  ]));
  for (let i = 0; i < 4; i++) {
    draw(svg, "text", { x: 1.8, y: 10 + 10 * i }, i);
    draw(svg, "text", { x: 8.85 + 10 * i, y: 3 }, i);
  }
  return (matrix, limit, isWeight) => {
    matrix.forEach((row, i) => row.forEach((value, j) => {
      const [rect, number] = cells[i][j];
      rect.setAttribute("class", isWeight ? "weight" : value < 0 ? "minus" : "plus");
      rect.style.setProperty("--share", Math.abs(value) / limit);
      number.textContent = short(value);
    }));
    const rows = matrix.map((row, i) => `row ${i}: ${row.map(short).join(", ")}`).join("; ");
    svg.setAttribute("aria-label", `${figure.querySelector("figcaption").textContent}. ${rows}`);
  };
}

// The whole playground inside `box`, with the tokens and weights of toy.json.
export function play(box, toy) {
  box.innerHTML = PAGE;
  box.classList.add("play");
  const find = what => box.querySelector(what);
  const plane = find(".plane svg"), form = find("form"), status = find("[role=status]");
  const forces = dynamics.makeForces(toy);
  const maps = Object.fromEntries(Object.keys(MAPS).map(name => [name, heatmap(find(`[data-map="${name}"]`))]));
  let tokens; // { q, k }: what the reader has dragged them to

  for (let i = -2; i <= 2; i++) { // the grid
    draw(plane, "path", { d: `M${i} ${-REACH}V${REACH}M${-REACH} ${i}H${REACH}`, class: i ? "grid" : "axis" });
    if (i) draw(plane, "text", { x: i, y: 0.17, class: "tick" }, fixed(i).slice(0, -3));
    if (i) draw(plane, "text", { x: -0.12, y: -i + 0.05, class: "tick" }, fixed(i).slice(0, -3));
  }
  const trails = draw(plane, "g");
  const handles = ["q", "k"].flatMap(kind => toy[kind].map((_, i) => {
    const handle = draw(plane, "g", {
      class: `handle ${kind}`, tabindex: 0, role: "slider", "aria-roledescription": "movable point",
      "aria-valuemin": -REACH, "aria-valuemax": REACH,
    });
    draw(handle, "circle", { r: 0.36, class: "hit" }); // what a finger can meet
    draw(handle, "path", { d: shape(kind, 0.13), class: "shape" });
    draw(handle, "text", { y: 0.06 }, i);
    return Object.assign(handle, { kind, token: i });
  }));

  function move(handle, [x, y]) {
    const inside = v => Math.round(100 * Math.min(Math.max(v, -2.4), 2.4)) / 100;
    tokens[handle.kind][handle.token] = [inside(x), inside(y)];
    render();
  }

  function drawTrails(path, truth) {
    trails.textContent = "";
    const line = (points, attributes) => draw(trails, "path", { d: `M${points.map(([x, y]) => `${x} ${-y}`).join("L")}`, ...attributes });
    ["q", "k"].forEach((kind, part) => path.forEach((states, token) => {
      line(truth[token].map(state => state[part]), { class: "truth" });
      const points = states.map(state => state[part]);
      line(points, { class: `trail ${kind}` });
      points.slice(1, -1).forEach(([x, y]) => draw(trails, "circle", { cx: x, cy: -y, r: 0.035, class: `dot ${kind}` }));
      const [x, y] = points.at(-1);
      draw(trails, "path", { d: shape(kind, 0.09), transform: `translate(${x} ${-y})`, class: `end ${kind}` });
    }));
  }

  function render() {
    const dt = +form.dt.value, n = +form.n.value, time = dt * n;
    const step = dynamics.integrators[form.step.value], f = forces[form.force.value], causal = form.causal.checked;
    const { q, k } = tokens;
    const path = q.map((_, i) => dynamics.trail(step, q[i], k[i], f, dt, n));
    const fine = Math.ceil(time / 0.05) || 1; // Runge-Kutta with tiny steps stands for the true path
    const truth = q.map((_, i) => dynamics.trail(dynamics.integrators.rk4, q[i], k[i], f, time / fine, fine));
    const end = dynamics.evolve(step, q, k, f, dt, n);

    form.querySelectorAll("output").forEach((output, i) => (output.textContent = i ? n : dt.toFixed(2)));
    handles.forEach(handle => {
      const [x, y] = tokens[handle.kind][handle.token];
      const name = `${handle.kind === "q" ? "query" : "key"} of token ${handle.token}`;
      handle.setAttribute("transform", `translate(${x} ${-y})`);
      handle.setAttribute("aria-label", `${name} at ${fixed(x)}, ${fixed(y)}`);
      handle.setAttribute("aria-valuenow", x);
      handle.setAttribute("aria-valuetext", `${fixed(x)}, ${fixed(y)}`);
    });
    drawTrails(path, truth);

    const plain = dynamics.attentionWeights(q, k, causal), now = dynamics.attentionWeights(end.q, end.k, causal);
    maps.plain(plain, 1, true);
    maps.now(now, 1, true);
    // The terms belong to one Euler step over the same time. What another rule, or more steps, do beyond it is shown, not hidden.
    const terms = dynamics.scoreTerms(q, k, f, time), sum = dynamics.products(end.q, end.k);
    const shown = { ...terms, rest: Object.values(terms).reduce(minus, sum), sum };
    const limit = Math.max(...Object.values(shown).map(most)) || 1;
    for (const [name, matrix] of Object.entries(shown)) maps[name](matrix, limit);
    find(".note").textContent = form.step.value === "euler" && n === 1
      ? "One Euler step: the four terms are all there is, exactly, and the rest is zero."
      : `The four terms are those of one Euler step over the same time, n dt = ${fixed(time)}. The rest is what your rule does beyond that step.`;
    find(".measures").innerHTML = measures(form.force.value, step, f, dt, n, end);
    say(plain, now);
  }

  function measures(name, step, f, dt, n, end) {
    const { q, k } = tokens, energy = dynamics.energies[name];
    const total = (q, k) => fixed(q.reduce((sum, _, i) => sum + energy(q[i], k[i]), 0));
    const volumes = q.map((_, i) => dynamics.volume(step, q[i], k[i], f, dt, n));
    const [low, high] = [Math.min(...volumes), Math.max(...volumes)].map(v => (v < 1e4 ? v.toFixed(3) : short(v)));
    const back = dynamics.evolve(step, end.q, end.k, f, -dt, n);
    const percent = (a, b) => `${short(100 * dynamics.displacement(a, b))} % of their length`;
    return Object.entries({
      "queries moved": percent(q, end.q),
      "keys moved": percent(k, end.k),
      "volume (det J)": `× ${low === high ? low : `${low} to ${high}`}`,
      "energy, before → now": energy ? `${total(q, k)} → ${total(end.q, end.k)}` : (NO_ENERGY[name] ?? "this force has none"),
      "way back, with −dt": `misses the start by ${short(Math.max(most(minus(back.q, q)), most(minus(back.k, k))))}`,
    }).map(([what, value]) => `<div><dt>${what}</dt><dd>${value}</dd></div>`).join("");
  }

  // The same in a sentence, for those who hear the page: not during a drag, but when it rests.
  let rest;
  function say(plain, now) {
    const change = minus(now, plain), largest = most(change);
    const i = change.findIndex(row => most([row]) === largest), j = change[i].findIndex(x => Math.abs(x) === largest);
    clearTimeout(rest);
    rest = setTimeout(() => {
      status.textContent = largest < 0.005
        ? "The two maps are the same."
        : `Largest change: token ${i} gives token ${j} the weight ${fixed(now[i][j])}; plain attention gives it ${fixed(plain[i][j])}.`;
    }, 200);
  }

  function set(values = {}) { // what is not named goes back to its start
    const { q, k, ...controls } = { q: toy.q, k: toy.k, ...START, ...values };
    tokens = structuredClone({ q, k });
    for (const [name, value] of Object.entries(controls)) form[name][name === "causal" ? "checked" : "value"] = value;
    render();
  }

  // Mouse, pen and finger are all pointers. A finger on a handle must not scroll the page as well: `touch-action` in the style sheet
  // says so, but inside an SVG not every browser heeds it. Beside the handles a finger scrolls as ever.
  plane.addEventListener("touchstart", event => event.target.closest(".handle") && event.preventDefault(), { passive: false });
  const held = new Map(); // pointer -> handle, and where it was gripped
  const at = event => {
    const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(plane.getScreenCTM().inverse());
    return [x, -y];
  };
  plane.addEventListener("pointerdown", event => {
    if (event.button || !event.target.closest(".handle")) return;
    const [x, y] = at(event);
    const away = handle => Math.hypot(...minus([tokens[handle.kind][handle.token]], [[x, y]])[0]);
    const handle = handles.reduce((a, b) => (away(b) <= away(a) ? b : a)); // finger-sized handles overlap: take the nearest
    const [hx, hy] = tokens[handle.kind][handle.token];
    held.set(event.pointerId, { handle, grip: [hx - x, hy - y] });
    plane.setPointerCapture(event.pointerId);
    handle.focus({ preventScroll: true });
    event.preventDefault();
  });
  plane.addEventListener("pointermove", event => {
    const drag = held.get(event.pointerId);
    if (drag) move(drag.handle, at(event).map((v, i) => v + drag.grip[i]));
  });
  for (const over of ["pointerup", "pointercancel"]) plane.addEventListener(over, event => held.delete(event.pointerId));

  const ARROWS = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, 1], ArrowDown: [0, -1] };
  plane.addEventListener("keydown", event => {
    const handle = event.target.closest(".handle"), arrow = ARROWS[event.key];
    if (!handle || !arrow || event.altKey || event.ctrlKey || event.metaKey) return;
    const far = event.shiftKey ? 0.25 : 0.05;
    move(handle, tokens[handle.kind][handle.token].map((v, i) => v + far * arrow[i]));
    event.preventDefault(); // the page stays where it is
  });
  form.addEventListener("input", render);
  form.addEventListener("submit", event => event.preventDefault());
  form.querySelector("button").addEventListener("click", () => set());
  document.querySelectorAll("a[data-set]").forEach(a => a.addEventListener("click", () => set(JSON.parse(a.dataset.set))));
  set();
}

const box = document.getElementById("playground");
if (box) {
  const toy = await (await fetch(new URL("toy.json", import.meta.url))).json();
  play(box, toy);
  document.querySelector("#playground ~ .cell")?.remove(); // the saved picture stands for the page where scripts do not run
}
