// The tile viewer. Every number comes from the page's data, which the replays of tilestream.io wrote; nothing is
// computed here but widths of bars.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("viewer-data").textContent);
  const find = (id) => document.getElementById(id);
  const SVG = "http://www.w3.org/2000/svg";
  const LETTERS = { EMPTY: "", PARTIAL: "P", FULL: "F", "NOT KEPT": "" };
  const MARGIN = 6;
  let current = null;  // the walk that is shown
  let place = 0;
  let timer = null;

  const bytes = (number) => `${number.toLocaleString("en-US")} B`;
  const named = (step) => ({
    pass: current.passes[step[0]], rows: step[1] < 0 ? null : [step[1], step[2]],
    keys: step[3] < 0 ? null : [step[3], step[4]], kind: step[5] < 0 ? null : current.kinds[step[5]],
    onChip: current.on_chip[step[6]], ours: [step[7], step[8]], standard: [step[9], step[10]],
    row: step[11], rowMax: step[12], rowSum: step[13],
  });

  function choose() {
    const parts = ["direction", "mask", "block-m", "block-n"].map((name) => find(name).value);
    current = data.walks[parts.join("/")];
    find("command").textContent = current.command;
    find("blocks").textContent = current.blocks ? `blocks.json: ${JSON.stringify(current.blocks)}` : "";
    find("slider").max = current.steps.length;
    drawGrid();
    show(0);
  }

  function make(name, attributes, text) {
    const element = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
    if (text) element.textContent = text;
    return element;
  }

  function drawGrid() {
    const grid = find("grid"), blockM = Number(find("block-m").value), blockN = Number(find("block-n").value);
    grid.replaceChildren();
    grid.setAttribute("viewBox", `0 0 ${data.tokens + MARGIN + 1} ${data.tokens + MARGIN + 1}`);
    grid.append(make("text", { x: MARGIN + data.tokens / 2, y: 2.6, class: "axis" }, "keys"));
    const y = MARGIN + data.tokens / 2;
    grid.append(make("text", { x: 2.6, y, class: "axis", transform: `rotate(-90 2.6 ${y})` }, "queries"));
    current.tile_kinds.forEach((row, m) => row.forEach((kind, n) => {
      const x = MARGIN + n * blockN, top = MARGIN + m * blockM;
      const style = `tile ${kind.replace(" ", "_")}`;
      grid.append(make("rect", { x, y: top, width: blockN, height: blockM, class: style, "data-m": m, "data-n": n }));
      if (LETTERS[kind]) grid.append(make("text", { x: x + blockN / 2, y: top + blockM / 2 }, LETTERS[kind]));
    }));
    grid.append(make("rect", { class: "edge", id: "edge", width: 0, height: 0, x: 0, y: 0 }));
  }

  function markVisited(count) {
    const blockM = Number(find("block-m").value), blockN = Number(find("block-n").value), seen = new Set();
    const pass = count ? current.steps[count - 1][0] : -1;
    for (const step of current.steps.slice(0, count)) {
      if (step[0] === pass && step[1] >= 0 && step[3] >= 0) {
        seen.add(`${Math.floor(step[1] / blockM)},${Math.floor(step[3] / blockN)}`);
      }
    }
    for (const tile of find("grid").querySelectorAll(".PARTIAL, .FULL")) {
      tile.classList.toggle("ahead", !seen.has(`${tile.dataset.m},${tile.dataset.n}`));
    }
  }

  function span(pair) { return pair[1] - pair[0] === 1 ? `${pair[0]}` : `${pair[0]} to ${pair[1] - 1}`; }

  function where(step) {
    if (step.rows && step.keys) return `queries ${span(step.rows)}, keys ${span(step.keys)}: ${step.kind}`;
    return step.rows ? `queries ${span(step.rows)}: stored` : `keys ${span(step.keys)}: stored`;
  }

  function setMoved(name, moved, most) {
    const total = moved[0] + moved[1];
    [["read", moved[0]], ["written", moved[1]], ["total", total]].forEach(([side, number]) => {
      const shown = find(`${name}-${side}`);
      shown.textContent = bytes(number);
      shown.dataset.bytes = number;
    });
    find(`${name}-bar`).style.width = `${100 * total / most}%`;
    return total;
  }

  function show(wanted) {
    place = Math.min(Math.max(wanted, 0), current.steps.length);
    const step = place ? named(current.steps[place - 1]) : null;
    const most = Math.max(...[current.ours, current.standard].map((moved) => moved[0] + moved[1]), 1);
    const ours = setMoved("ours", step ? step.ours : [0, 0], most);
    const standard = setMoved("standard", step ? step.standard : [0, 0], most);
    markVisited(place);
    const edge = find("edge"), rows = step && (step.rows || [0, data.tokens]), keys = step && (step.keys || [0, data.tokens]);
    edge.setAttribute("x", step ? MARGIN + keys[0] : 0);
    edge.setAttribute("y", step ? MARGIN + rows[0] : 0);
    edge.setAttribute("width", step ? keys[1] - keys[0] : 0);
    edge.setAttribute("height", step ? rows[1] - rows[0] : 0);
    const held = step ? step.onChip : [], used = held.reduce((sum, one) => sum + one[2], 0);
    find("fast").replaceChildren(...held.map(([name, shape, size]) => {
      const row = document.createElement("tr");
      row.append(...[name, shape.join(" x "), bytes(size)].map((text) => {
        const cell = document.createElement("td");
        cell.textContent = text;
        return cell;
      }));
      return row;
    }));
    find("fast-used").textContent = `${bytes(used)} of ${bytes(current.fast_memory_bytes)}`;
    find("fast-bar").style.width = `${100 * used / current.fast_memory_bytes}%`;
    const runs = step && step.rowMax !== null;
    find("row").textContent = runs ? `query ${step.row}, the last of the tile` : "none runs in this step";
    find("row-max").textContent = runs ? step.rowMax : "-";
    find("row-sum").textContent = runs ? step.rowSum : "-";
    find("slider").value = place;
    const at = `Step ${place} of ${current.steps.length}`;
    find("slider").setAttribute("aria-valuetext", at);
    const state = runs ? ` Row ${step.row}: row_max ${step.rowMax}, row_sum ${step.rowSum}.` : "";
    const chip = held.length ? ` On chip: ${held.map((one) => one[0]).join(", ")}; ${bytes(used)}.` : "";
    find("status").textContent = step
      ? `${at}, pass ${step.pass}, ${where(step)}.${chip}${state} Moved by tilestream ${bytes(ours)}, by standard attention ${bytes(standard)}.`
      : `${at}: nothing is loaded yet.`;
    const isDone = place === current.steps.length;
    find("first").disabled = find("back").disabled = place === 0;
    find("next").disabled = find("last").disabled = isDone;
    if (isDone) stop();
  }

  function stop() {
    clearInterval(timer);
    timer = null;
    find("play").textContent = "Play";
  }

  function play() {
    if (timer) return stop();
    if (place === current.steps.length) show(0);
    find("play").textContent = "Pause";
    timer = setInterval(() => show(place + 1), 450);
  }

  const MOVES = {
    ArrowRight: () => show(place + 1), ArrowLeft: () => show(place - 1),
    Home: () => show(0), End: () => show(current.steps.length),
  };
  find("first").addEventListener("click", MOVES.Home);
  find("back").addEventListener("click", MOVES.ArrowLeft);
  find("next").addEventListener("click", MOVES.ArrowRight);
  find("last").addEventListener("click", MOVES.End);
  find("play").addEventListener("click", play);
  find("slider").addEventListener("input", (event) => show(Number(event.target.value)));
  find("viewer").addEventListener("keydown", (event) => {
    // Lists and the slider have these keys for themselves.
    if (event.target.matches("select, input") || event.altKey || event.ctrlKey || event.metaKey) return;
    const move = event.key === "p" ? play : MOVES[event.key];
    if (move) { event.preventDefault(); move(); }
  });
  for (const name of ["direction", "mask", "block-m", "block-n"]) {
    find(name).addEventListener("change", () => { stop(); choose(); });
  }
  choose();
})();
