"use strict";
// Sliders to figures. All text of the page's data is put in as text, never as markup.
const explorer = (() => {
  const DATA = JSON.parse(document.getElementById("data").textContent);
  const CONTROLS = DATA.controls;
  const STEPS = 1000;
  const POINTS = 121;
  const COLOURS = ["#08306b", "#c44e00", "#2a7d4f", "#8a3d8f", "#4d4d4d", "#8a6508"];
  const DASHES = ["solid", "dash", "dashdot", "dot", "longdash", "longdashdot"];
  const SYMBOLS = ["circle", "square", "triangle-up", "diamond", "cross", "x"];
  const START = Object.fromEntries(CONTROLS.map((each) => [each.name, each.value]));
  const state = {...START, figure: "year", scenario: "", run: "", program: ""};
  const figures = {};
  const drawn = {};
  let charts = null;

  // Elements
  const byId = (id) => document.getElementById(id);

  function element(tag, attributes = {}, ...children) {
    const made = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    made.append(...children.filter((each) => each !== null).map((each) => (each instanceof Node ? each : String(each))));
    return made;
  }

  // Chart labels know a little markup; foreign text must not.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");

  function table(caption, head, rows) {
    const look = (cell) => (typeof cell === "number" || /^[-~=\d]/.test(cell) ? {class: "number"} : /^\S{1,28}$/.test(cell) ? {class: "name"} : {});
    const body = rows.map((row) => element("tr", {}, ...row.map((cell, place) => (place === 0
      ? element("th", {scope: "row", ...look(cell)}, cell) : element("td", look(cell), cell)))));
    return element("table", {}, element("caption", {}, caption),
      element("thead", {}, element("tr", {}, ...head.map((each) => element("th", {scope: "col"}, each)))),
      element("tbody", {}, ...body));
  }

  // Put tables into a box that may be cut, and keep a sign below it for as long as it is.
  function put(box, ...tables) {
    box.replaceChildren(...tables);
    for (const each of [box, ...tables]) watcher.observe(each);
  }

  function boxed(caption, head, rows) {
    const box = element("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": caption});
    put(box, table(caption, head, rows));
    return [box];
  }

  const watcher = new ResizeObserver((all) => new Set(all.map(({target}) => target.closest(".scroll"))).forEach((box) => {
    if (!box) return;
    const rows = `${count(box.querySelectorAll("tbody tr").length)} rows in all: scroll down`;
    const cut = [[rows, box.scrollHeight > box.clientHeight + 1], ["More columns: scroll to the right", box.scrollWidth > box.clientWidth + 1]]
      .filter(([, there]) => there).map(([text]) => `${text} in the table.`);
    let sign = box.nextElementSibling;
    if (!sign || !sign.matches(".cut")) box.after(sign = element("p", {class: "cut"}));
    sign.hidden = !cut.length;
    sign.textContent = cut.join(" ");
  }));

  // A command whose words stay whole at a line's end.
  const words = (text) => text.split(/(\s+)/).map((each) => (each.trim() ? element("span", {}, each) : each));

  // Numbers
  const NONE = "–";
  const short = (value) => Number(value.toPrecision(4)).toString().replace("e+", "e");
  const count = (value) => Math.round(value).toLocaleString("en-GB");
  const chance = (value) => (value === null ? NONE : `${Number((100 * value).toPrecision(4))} %`);
  const percent = (value) => (value > 0.5 && value < 1 ? `${(100 - Number((100 - 100 * value).toPrecision(2)))
    .toFixed(Math.min(6, Math.max(0, 1 - Math.floor(Math.log10(100 - 100 * value)))))} %` : chance(value));

  function position(control, value) {
    const {low, high, log} = control;
    if (!log) return STEPS * (value - low) / (high - low);
    if (low > 0) return STEPS * Math.log(value / low) / Math.log(high / low);
    return value < 1 ? 0 : 1 + (STEPS - 1) * Math.log(value) / Math.log(high);
  }

  function valueAt(control, place) {
    const {low, high, log, whole} = control;
    const part = place / STEPS;
    let value;
    if (!log) value = low + part * (high - low);
    else if (low > 0) value = low * (high / low) ** part;
    else value = place < 1 ? 0 : high ** ((place - 1) / (STEPS - 1));
    return whole ? Math.round(value) : Number(value.toPrecision(3));
  }

  const inside = (control, value) => Number.isFinite(value) && value >= control.low && value <= control.high
    && (!control.whole || Number.isInteger(value));

  // Commands that make the same
  const shown = (value) => (value >= 1e15 ? value.toExponential() : String(value)).replace("e+", "e");

  function commands(at, found) {
    const run = `--flop ${shown(at.flop)} --chips ${shown(at.chips)} --days ${shown(at.days)} --period ${
      shown(at.period)} --rate ${shown(at.rate)} --confidence ${shown(at.confidence)} --flop-per-day ${
      shown(at.flop_per_day)} --utilisation ${shown(at.utilisation)}`;
    if (at.chips < found.chips_needed) {
      return "The run does not fit the registered chips, so `samples` refuses it.";
    }
    const hide = found.hidden > 0 ? `hide=${shown(found.hidden)}` : "";
    const evasions = [hide || "declared", hide ? `${hide},refuse` : "refuse"];
    const whole = found.working < at.smuggled ? ` --flop ${shown(at.flop)}` : "";
    const site = found.hidden > 0 ? [`chipwitness evidence site --per-year ${shown(at.finds)} --chips ${shown(at.smuggled)} --days ${
      shown(at.days)} --age ${shown(at.age)} --flop-per-day ${shown(at.flop_per_day)} --utilisation ${
      shown(at.utilisation)}${whole}`] : [];
    return [
      `chipwitness samples ${run}`,
      `chipwitness alarms ${run} --samples ${found.draws} --refusals ${shown(at.refusals)} --prior ${
        shown(at.prior)} ${evasions.map((each) => `--evasion ${each}`).join(" ")}`,
      ...site,
    ].join("\n");
  }

  // Figures of closed forms: each returns title, note, axes and lines.
  function spread(low, high) {
    return Array.from({length: POINTS}, (_, place) => low * (high / low) ** (place / (POINTS - 1)));
  }

  const setting = (at) => `H = ${short(at.flop)} FLOP, C = ${count(at.chips)} chips, ${count(at.smuggled)} smuggled, T = ${
    at.days} d, utilisation ${at.utilisation}, T_m = ${at.period} d, f = ${short(at.rate)} a day, p = ${at.confidence}`;

  figures.year = {
    name: "Chips to inspect a year, by compute",
    draw(at) {
      const least = Math.max(1e20, at.flop / 1e4);
      const most = Math.min(at.chips * at.days * at.flop_per_day * at.utilisation, at.flop * 1e4);
      const work = spread(Math.min(least, most / 2), most);
      const lines = [0.5, 0.9, 0.99].filter((each) => each !== at.confidence).concat(at.confidence).sort((one, other) => one - other);
      return {
        title: "Chips to inspect a year so that a run without smuggled chips is caught (Eq. 1)",
        x: "compute of the run, FLOP", y: "chips a year", log: ["x", "y"], mark: at.flop,
        lines: lines.map((wanted) => ({
          name: `${chance(wanted)} detection`,
          x: work,
          y: work.map((flop) => {
            const with_ = {...at, flop, confidence: wanted, smuggled: 0};
            return closedForms.perYear(closedForms.layout(with_).perPeriod, at.period);
          }),
        })),
      };
    },
  };

  figures.days = {
    name: "When the run is caught",
    draw(at) {
      const {share, draws} = closedForms.layout(at);
      const days = [0, ...closedForms.visitDays(at)];
      const every = Math.ceil(days.length / 400);
      const seen = days.filter((_, place) => place % every === 0 || place === days.length - 1);
      const bare = closedForms.layout({...at, smuggled: 0}).share;
      const line = (name, part) => ({name, step: true, x: seen,
        y: seen.map((day) => closedForms.detection(closedForms.logMissByDay(day, part, draws, at)))});
      const lines = [line(at.smuggled > 0 ? "with the smuggled chips" : "on registered chips", share)];
      if (at.smuggled > 0) lines.push(line("without smuggled chips", bare));
      return {title: "Probability of having been caught", x: "days since the run began", y: "probability", mark: at.days,
        markText: "run ends", lines, range: [0, 1.02]};
    },
  };

  figures.smuggled = {
    name: "What smuggled chips hide",
    draw(at) {
      const {needed, draws} = closedForms.layout(at);
      const most = Math.max(needed * 1.1, 10);
      const stock = Array.from({length: POINTS}, (_, place) => most * place / (POINTS - 1));
      const of = (smuggled) => closedForms.detectionTolerating(
        Math.min(1, needed * (1 - Math.min(1, smuggled / needed)) / at.chips), draws,
        closedForms.fewestTolerated(draws, at), at);
      return {title: `Detection with ${count(draws)} chips drawn at a visit`, x: "smuggled chips", y: "probability",
        mark: at.smuggled, lines: [{name: "detection", x: stock, y: stock.map(of)}], range: [0, 1.02]};
    },
  };

  figures.found = {
    name: "What finds smuggled chips",
    draw(at) {
      const {needed, draws} = closedForms.layout(at);
      const most = Math.max(needed, at.smuggled, 10);
      const stock = Array.from({length: POINTS}, (_, place) => most * place / (POINTS - 1));
      const drawn = stock.map((smuggled) => closedForms.detectionTolerating(
        Math.min(1, Math.max(0, needed - smuggled) / at.chips), draws, closedForms.fewestTolerated(draws, at), at));
      const seen = stock.map((smuggled) => closedForms.hiddenSite(Math.round(smuggled), at).found);
      return {title: `Caught by draws of ${count(draws)} chips, or by finding the hidden site`, x: "smuggled chips held",
        y: "probability", mark: at.smuggled, range: [0, 1.02], lines: [
          {name: "by draws", x: stock, y: drawn},
          {name: "hidden site found", x: stock, y: seen},
          {name: "by either, taken as independent", x: stock, y: drawn.map((chance, place) => 1 - (1 - chance) * (1 - seen[place]))},
        ]};
    },
  };

  figures.alarms = {
    name: "Detection and false alarms, by chips not shown",
    draw(at) {
      const {share, draws} = closedForms.layout(at);
      const chosen = closedForms.fewestTolerated(draws, at);
      const last = Math.min(draws, Math.max(8, 2 * chosen));
      const every = Math.max(1, Math.floor(last / 100));
      const allowed = Array.from({length: Math.floor(last / every) + 1}, (_, place) => place * every);
      return {title: "What it costs to tolerate chips that could not be shown", x: "tolerated at a visit", y: "probability",
        mark: chosen, markText: "fewest within the cap", range: [0, 1.02], lines: [
          {name: "run caught", x: allowed,
            y: allowed.map((each) => closedForms.detectionTolerating(share, draws, each, at))},
          {name: "honest lab accused", x: allowed, y: allowed.map((each) => closedForms.falseAlarm(draws, each, at))},
        ]};
    },
  };

  figures.stretch = {
    name: "Fewer chips for longer",
    draw(at) {
      const factors = spread(1, 100);
      return {title: "A run on 1/k of the chips for k times as long (App. C.1)", x: "k", y: "probability", log: ["x"],
        range: [0, 1.02], lines: [{name: "detection", x: factors,
          y: factors.map((k) => closedForms.stretchDetection(k, at))}]};
    },
  };

  // Charts
  const ruler = document.createElement("canvas").getContext("2d");
  ruler.font = "12px system-ui, sans-serif";
  const textWidth = (text) => ruler.measureText(text).width;

  // Pixels that labels take on the left.
  function leftOf(figure, width) {
    const names = (figure.yaxis || {}).type === "category" ? figure.lines.flatMap((line) => line.y).concat(figure.yaxis.categoryarray || []) : [];
    // Not by the library, which then lays labels over each other.
    return names.length ? Math.min(0.6 * width, 16 + Math.max(...Array.from(new Set(names), textWidth))) : 70;
  }

  // Pixels that a legend takes below a figure: one row, or columns as wide as its longest name.
  function legendHeight(figure, width) {
    const room = width - leftOf(figure, width) - 24;
    const wide = figure.lines.map((line) => 50 + textWidth(line.name));
    const fit = wide.reduce((one, other) => one + other, 0) <= room ? wide.length : Math.max(1, Math.floor(room / Math.max(...wide)));
    return 20 * Math.ceil(wide.length / fit);
  }

  function layoutOf(figure, width, height) {
    const axis = (name, title) => ({...(name === "y" ? {title: {text: plain(title)}} : {}), type: (figure.log || []).includes(name) ? "log" : "linear",
      gridcolor: "#dddddd", zeroline: false, exponentformat: "power"});
    const ticks = {tickangle: 0, nticks: width < 600 ? 5 : 8, ticks: "outside", ticklen: 8, tickcolor: "#dddddd"};
    const shapes = figure.mark === undefined ? [] : [{type: "line", x0: figure.mark, x1: figure.mark, yref: "paper", y0: 0,
      y1: 1, line: {color: "#666666", width: 1, dash: "dot"}}];
    // Not the axis' own title, which the library lays over some ticks.
    const title = {text: plain(figure.x), xref: "paper", x: 0.5, yref: "paper", y: 0, yanchor: "top", yshift: -36, showarrow: false, font: {size: 14}};
    const annotations = figure.markText ? [title, {x: figure.mark, y: 0.03, yref: "paper", text: plain(figure.markText),
      showarrow: false, xanchor: "right", font: {size: 11, color: "#555555"}}] : [title];
    return {width, height, margin: {t: 20, r: 24, b: 80 + legendHeight(figure, width), l: leftOf(figure, width)},
      xaxis: {...axis("x", figure.x), ...ticks, ...(figure.xaxis || {})},
      yaxis: {...axis("y", figure.y), ...(figure.range ? {range: figure.range} : {}), ...(figure.yaxis || {})},
      shapes, annotations, legend: {orientation: "h", yref: "container", y: 0, yanchor: "bottom"}, paper_bgcolor: "#ffffff", plot_bgcolor: "#ffffff",
      font: {family: "system-ui, sans-serif", color: "#1b1f24"}, hovermode: "closest", showlegend: true};
  }

  function tracesOf(figure) {
    return figure.lines.map((line, place) => ({x: line.x, y: line.y, name: plain(line.name), mode: line.mode || "lines",
      line: {color: COLOURS[place % 6], dash: DASHES[place % 6], width: 2, shape: line.step ? "hv" : "linear"},
      marker: {color: COLOURS[place % 6], symbol: SYMBOLS[place % 6], size: line.size || 9}, ...(line.more || {})}));
  }

  function draw(id, figure) {
    drawn[id] = figure;
    byId(`${id}-caption`).textContent = `${figure.title}. ${figure.note || ""}`;
    const holder = byId(id);
    holder.style.height = `${(figure.height || 300) + 100 + legendHeight(figure, holder.clientWidth)}px`;
    if (!charts) {
      sketch.into(holder, figure);
      return Promise.resolve();
    }
    if (holder.querySelector(".sketch")) holder.replaceChildren();
    return charts.react(holder, tracesOf(figure), layoutOf(figure, holder.clientWidth, holder.clientHeight),
      {displayModeBar: false, displaylogo: false});
  }

  function save(name, type, content) {
    const link = element("a", {download: name, href: URL.createObjectURL(new Blob([content], {type}))});
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  const quoted = (text) => (/[",\n]/.test(text) ? `"${String(text).replace(/"/g, '""')}"` : String(text));

  function csvOf(figure) {
    const rows = figure.lines.flatMap((line) => Array.from(line.x, (x, place) => [line.name, x, line.y[place]]));
    return [["line", figure.x, figure.y || "value"], ...rows].map((row) => row.map(quoted).join(",")).join("\n") + "\n";
  }

  async function saveFigure(id, format) {
    if (!charts) {
      save(`chipwitness-${id}.svg`, "image/svg+xml", new XMLSerializer().serializeToString(byId(id).firstChild));
      return;
    }
    const size = {width: 960, height: 600};
    const layout = layoutOf(drawn[id], size.width, size.height);
    const title = {text: plain(drawn[id].title), x: 0.02, font: {size: 15}};
    const picture = {data: tracesOf(drawn[id]), layout: {...layout, title, margin: {...layout.margin, t: 50}}};
    const url = await charts.toImage(picture, {format, ...size, scale: format === "png" ? 2 : 1});
    const [head, body] = [url.slice(0, url.indexOf(",")), url.slice(url.indexOf(",") + 1)];
    const bytes = head.includes("base64") ? Uint8Array.from(atob(body), (each) => each.charCodeAt(0))
      : decodeURIComponent(body);
    save(`chipwitness-${id}.${format}`, format === "png" ? "image/png" : "image/svg+xml", bytes);
  }

  function actions(id) {
    const made = [
      ["Data (CSV)", () => save(`chipwitness-${id}.csv`, "text/csv", csvOf(drawn[id]))],
      ["Figure (SVG)", () => saveFigure(id, "svg")],
      ["Figure (PNG)", () => saveFigure(id, "png")],
    ].map(([text, act]) => {
      const button = element("button", {type: "button"}, text);
      button.addEventListener("click", act);
      return button;
    });
    byId(`${id}-actions`).append(...made);
  }

  // Closed forms
  const NAMES = {
    chips_needed: ["chips that the run needs", count], hidden: ["of it on smuggled chips", chance],
    working: ["smuggled chips at work", count], megawatts: ["megawatts of the hidden site", short],
    chip_hours: ["chip-hours there", count], found: ["hidden site found by the end of the run", percent],
    share: ["share of the registered chips that it uses", chance], hit: ["a drawn chip incriminates it", chance],
    per_period: ["chips a visit by Eq. 1", short], draws: ["chips drawn at a visit", count],
    per_year: ["chips a year", count], inspectors: ["inspectors, at 1,000 chips a year", count],
    caught: ["caught, where every drawn chip is shown", percent], caught_half: ["caught by half of the run", percent],
    median_day: ["day by which half are caught", (value) => (value === null ? "never" : count(value))],
    tolerated: ["chips tolerated at a visit that could not be shown", count], detection: ["caught, worst evasion", percent],
    false_alarm: ["honest lab accused", chance], excess: ["excess", chance],
    ratio: ["odds of a violation after an accusation, times", (value) => (value === null ? "without bound" : short(value))],
    posterior: ["chance of a violation after an accusation", percent],
    pass_posterior: ["chance of a violation after a pass", percent],
    stretch: ["detection if run four times as long", percent],
  };

  function summary(at, found) {
    const lines = [];
    if (!found.fits) {
      return [`This run cannot be done: it needs ${count(found.chips_needed)} chips for ${at.days} days, and there are ${
        count(at.chips + at.smuggled)}. So no probability of being caught is stated, and the figure is for a run that fills them.`];
    }
    lines.push(`Drawing ${count(found.draws)} of ${count(at.chips)} chips every ${at.period} days (${
      count(found.per_year)} a year, ${found.inspectors === 1 ? "1 inspector" : `${count(found.inspectors)} inspectors`
      }) catches the run with ${percent(found.detection)}; an honest lab is accused with ${chance(found.false_alarm)}.`);
    if (found.hidden > 0) lines.push(`${chance(found.hidden)} of the run hides on smuggled chips, which no draw reaches: ${
      count(at.smuggled)} are held, ${count(found.working)} at work, after ${at.age} days of standing. Their site of ${
      short(found.megawatts)} MW is found with ${percent(found.found)}, by construction without false alarms.`);
    if (at.period >= at.days) {
      lines.push(`Warning: a visit every ${at.period} days meets a run of ${at.days} days: it is over before it is ` +
        "noticed.");
    } else if (found.median_day !== null && found.median_day > at.days / 2) {
      lines.push("Warning: half of such runs are noticed in their second half or later.");
    }
    return lines;
  }

  const settings = () => Object.fromEntries(CONTROLS.map((each) => [each.name, state[each.name]]));

  function updateClosed() {
    const at = settings();
    const found = closedForms.answers(at);
    byId("summary").replaceChildren(...summary(at, found).map((line) => element("p", {}, line)));
    put(byId("answers"), table("Closed forms at this setting", ["answer", "value"],
      Object.entries(NAMES).map(([key, [name, format]]) => [name, found.fits || found[key] !== null ? format(found[key]) : NONE])));
    byId("answers").dataset.exact = JSON.stringify(found);
    byId("commands").replaceChildren(...words(commands(at, found)));
    const figure = {note: `${found.fits ? "" : "For a run that fills all chips, since this one cannot be done: "}${setting(at)}`,
      ...figures[state.figure].draw(at)};
    const head = ["line", figure.x, figure.y];
    const rows = () => figure.lines.flatMap((line) => Array.from(line.x, (x, place) => [line.name, short(x),
      short(line.y[place])]));
    const details = byId("plot-data").parentElement;
    const fill = () => put(byId("plot-data"), table(figure.title, head, rows()));
    details.ontoggle = () => details.open && fill();
    if (details.open) fill();
    return draw("plot", figure);
  }

  function makeControls() {
    for (const control of CONTROLS) {
      const slider = element("input", {type: "range", min: 0, max: STEPS, step: 1, id: `slider-${control.name}`,
        "aria-label": `${control.label}, slider`});
      const number = element("input", {type: "number", step: "any", min: control.low, max: control.high,
        id: `number-${control.name}`, "aria-describedby": `wrong-${control.name}`});
      slider.addEventListener("input", () => change(control, valueAt(control, Number(slider.value))));
      number.addEventListener("input", () => {
        const value = Number(number.value);
        const fits = number.value !== "" && inside(control, value);
        refuse(control, fits ? "" : number.value || "What is written");
        if (fits) change(control, value, number);
      });
      byId("controls").append(element("div", {class: "control"},
        element("label", {for: number.id}, control.label, element("span", {class: "unit"}, control.unit ? ` (${control.unit})` : "")),
        element("div", {class: "both"}, slider, number),
        element("p", {class: "wrong", id: `wrong-${control.name}`, role: "alert", hidden: ""})));
    }
    byId("controls").addEventListener("submit", (event) => event.preventDefault());
  }

  // Say at a slider which value was not used, and why; nothing where all is well.
  function refuse(control, text) {
    const {low, high, whole, unit} = control;
    const line = byId(`wrong-${control.name}`);
    const ends = `${whole ? "a whole number" : "a number"} from ${shown(low)} to ${shown(high)}${unit ? ` ${unit}` : ""}`;
    byId(`number-${control.name}`).setAttribute("aria-invalid", String(text !== ""));
    line.hidden = text === "";
    line.textContent = text === "" ? "" : `${text.slice(0, 40)} is not used: write ${ends}. Answers are for ${shown(state[control.name])}.`;
  }

  function showControls(except) {
    for (const control of CONTROLS) {
      const value = state[control.name];
      const slider = byId(`slider-${control.name}`);
      slider.value = position(control, value);
      slider.setAttribute("aria-valuetext", `${short(value)} ${control.unit}`);
      const number = byId(`number-${control.name}`);
      if (number !== except) {
        number.value = shown(value);
        refuse(control, "");
      }
    }
  }

  function change(control, value, except) {
    state[control.name] = value;
    showControls(except);
    updateLink();
    return updateClosed();
  }

  // Links
  function hashOf() {
    const words = Object.entries(state).filter(([name, value]) => value !== "" && value !== START[name]);
    return `#${new URLSearchParams([["view", "1"], ...words.map(([name, value]) => [name, shown(value)])])}`;
  }

  const updateLink = () => byId("view-link").setAttribute("href", hashOf());

  function restore() {
    const words = new URLSearchParams(location.hash.slice(1));
    if (!words.has("view")) return false;
    Object.assign(state, START);
    for (const control of CONTROLS) {
      const value = Number(words.get(control.name));
      if (words.get(control.name) && inside(control, value)) state[control.name] = value;
    }
    for (const name of ["figure", "scenario", "run", "program"]) {
      const programs = () => DATA.runs.runs.flatMap((run) => run.graphs.programs.map((each) => each.program));
      const known = !byId(name) ? [] : name === "program" ? programs() : Array.from(byId(name).options, (each) => each.value);
      if (known.includes(words.get(name))) state[name] = words.get(name);
      if (byId(name)) byId(name).value = state[name];
    }
    const unused = Array.from(words).filter(([name, text]) => name !== "view" && (CONTROLS.some((each) => each.name === name)
      ? text === "" || state[name] !== Number(text) : state[name] !== text)).map((each) => each.join("=").slice(0, 40));
    byId("unused").hidden = !unused.length;
    byId("unused").textContent = `The link holds what this page cannot use, so it is left out: ${unused.join(", ")}.`;
    return true;
  }

  // Campaigns
  function updateCampaign() {
    const {trials, seed} = DATA.campaigns;
    const scenario = DATA.campaigns.scenarios.find((each) => each.name === state.scenario);
    byId("campaign-about").textContent = `Precomputed: ${count(trials)} trials a cell, seed ${seed}. A detection is a closed ` +
      "form where there is one, else simulated (~); = is no more than honest labs are accused, so no evidence. A day is the " +
      "median of the trials that were caught. Detection rates and costs are the scenario's assumptions.";
    const mark = (each, regime) => !each.exact ? "~" : each.detection <= regime.false_alarm * (1 + 1e-9) + 1e-15 ? "=" : "";
    const cell = (each, regime) => `${mark(each, regime)}${each.detection.toFixed(3)}${each.delay === null ? "" : `, day ${each.delay}`}`;
    const rows = scenario.strategies.map((name, place) => [name, ...scenario.regimes.map((each) => cell(each.cells[place], each))]);
    rows.push(["worst case", ...scenario.regimes.map((each) => each.worst)],
      ["honest labs accused", ...scenario.regimes.map((each) => each.false_alarm.toFixed(4))],
      ["chips inspected a year", ...scenario.regimes.map((each) => count(each.samples_per_year))],
      ["cost a year", ...scenario.regimes.map((each) => count(each.cost_per_year))]);
    put(byId("campaign-table"), table(`${scenario.title}: detection, and the median day (precomputed)`,
      ["strategy", ...scenario.regimes.map((each) => each.name)], rows));
    byId("campaign-command").replaceChildren(...words(scenario.command));
    byId("campaign-hidden").replaceChildren(...scenario.hidden.map((line) => element("p", {}, line)));
    return draw("campaign-plot", {
      title: `${scenario.title} (precomputed)`, x: "probability of being caught", y: "", height: 24 * scenario.strategies.length,
      note: `Runs above ${scenario.thresholds.map(short).join(" or ")} FLOP, ${count(scenario.registered_chips)} registered chips, ${
        scenario.days} days; ${count(trials)} trials a cell, seed ${seed}.`,
      xaxis: {range: [-0.03, 1.03]}, yaxis: {autorange: "reversed", type: "category", dtick: 1},
      lines: scenario.regimes.map((regime) => ({name: regime.name, mode: "markers", x: regime.cells.map((each) => each.detection),
        y: scenario.strategies.map(plain), more: {error_x: {type: "data", symmetric: false, thickness: 1,
          array: regime.cells.map((each) => each.high - each.detection),
          arrayminus: regime.cells.map((each) => each.detection - each.low)}}})),
    });
  }

  // Runs
  const KINDS = {COMMIT: "step committed", SNAPSHOT: "snapshot", BEACON: "beacon", QUOTE: "quote", BOOT: "boot"};

  function timeline(run) {
    const unexplained = run.verdict ? run.verdict.unexplained : {};
    const drawnChips = run.verdict ? run.verdict.drawn : [];
    const lines = Object.entries(KINDS).map(([kind, name]) => {
      const points = run.chips.flatMap((chip) => chip.events.filter((each) => each[1] === kind)
        .map((each) => [each[0], chip.name, `boot ${each[2]}, tick ${each[3]}${each[4] === null ? "" : `, step ${each[4]}`}`]));
      return {name, mode: "markers", size: kind === "COMMIT" ? 6 : 11, x: points.map((each) => each[0]),
        y: points.map((each) => plain(each[1])), more: {text: points.map((each) => each[2]), hoverinfo: "text+name"}};
    }).filter((line) => line.x.length);
    const wrong = run.chips.flatMap((chip) => (unexplained[chip.name] || []).map((place) => chip.events[Number(place)])
      .filter((each) => each !== undefined).map((each) => [each[0], chip.name]));
    if (wrong.length) {
      lines.push({name: "unexplained snapshot", mode: "markers", size: 17, x: wrong.map((each) => each[0]),
        y: wrong.map((each) => plain(each[1])), more: {marker: {symbol: "circle-open", size: 17, color: "#a3271c",
          line: {width: 3}}}});
    }
    return {title: `Time line of ${run.name}`, x: "tick, over all boots", y: "", lines, height: Math.max(100, 26 * run.chips.length),
      note: `${drawnChips.length ? `Drawn by the inspector: ${drawnChips.join(", ")}. ` : ""}${
        run.chips_left_out ? `${run.chips_left_out} more chips are not shown. ` : ""}${
        run.chips.some((each) => each.left_out) ? "Of long logs the first records are shown." : ""}`,
      yaxis: {type: "category", dtick: 1, categoryorder: "array", categoryarray: run.chips.map((each) => plain(each.name)).reverse()}};
  }

  function verdictOf(run) {
    const verdict = run.verdict;
    if (!verdict) return [element("p", {}, "No verdict was given: `inspect --json` makes one, `explore --verdict` shows it.")];
    const known = ["ACCEPT", "REJECT"].includes(verdict.outcome) ? ` ${verdict.outcome}` : "";
    const parts = [element("p", {}, "Verdict: ", element("span", {class: `badge${known}`}, verdict.outcome)),
      element("ul", {}, ...verdict.reasons.map(([guard, text, ...alike]) => element("li", {}, `[${guard}] ${text}`,
        alike.length ? element("details", {}, element("summary", {}, `${count(alike.length)} more alike`),
          element("ul", {}, ...alike.map((each) => element("li", {}, each)))) : null)))];
    if (verdict.reasons_left_out) parts.push(element("p", {}, `${verdict.reasons_left_out} more reasons are left out.`));
    if (verdict.replays.length) {
      parts.push(...boxed("Replays on other devices", ["device", "segments replayed", "of", "steps", "equal, bit for bit"],
        verdict.replays.map((each) => [each.device, each.segments, each.segments_in_run, each.steps, each.equal])));
    }
    if (verdict.chances.length) {
      parts.push(element("details", {}, element("summary", {}, "How likely each lie was to be caught"),
        ...boxed("Closed forms of the inspection", ["lie", "probability"], verdict.chances)));
    }
    return parts;
  }

  function updateRun() {
    const run = DATA.runs.runs.find((each) => each.name === state.run);
    byId("verdict").replaceChildren(...verdictOf(run));
    const rows = run.chips.flatMap((chip) => (chip.problem ? [[chip.name, "problem", "", "", chip.problem]] : [])
      .concat(chip.events.slice(0, 500).map((each) => [chip.name, each[1], each[2], each[3], each[4] === null ? "" : each[4]])));
    put(byId("run-data"), table("Records, at most 500 of each chip", ["chip", "kind", "boot", "tick", "step"], rows));
    const known = run.graphs.programs.map((each) => each.program);
    if (!known.includes(state.program)) state.program = known[0] || "";
    byId("program").replaceChildren(...run.graphs.programs.map((each, place) => element("option", {value: each.program},
      `${place + 1}: ${each.program.slice(0, 16)}…, ${each.calls} calls`)));
    byId("program").value = state.program;
    updateProgram();
    return draw("run-plot", timeline(run));
  }

  // What a program's calls read of each other; those with the same way to go stand in one column.
  function graphOf(graph) {
    const column = {};
    const spots = graph.nodes.map(([, , , depth]) => [depth, column[depth] = (column[depth] || 0) + 1]);
    const height = spots.map(([depth, row]) => row - (column[depth] + 1) / 2);
    const kinds = [["call", "call"], ["state", "state before the step"], ["batch", "batch"], ["constant", "constant"]];
    const lines = [{name: "reads", mode: "lines", x: graph.edges.flatMap(([from, to]) => [spots[from][0], spots[to][0], null]),
      y: graph.edges.flatMap(([from, to]) => [height[from], height[to], null]),
      more: {line: {color: "#b8c0c8", width: 0.7}, hoverinfo: "skip"}}];
    for (const [kind, name] of kinds) {
      const places = graph.nodes.map((each, place) => place).filter((place) => graph.nodes[place][0] === kind);
      if (places.length) {
        lines.push({name, mode: "markers", size: 6, x: places.map((place) => spots[place][0]), y: places.map((place) => height[place]),
          more: {text: places.map((place) => plain(`${graph.nodes[place][2] === null ? "" : `call ${graph.nodes[place][2]}: `}${
            graph.nodes[place][1]}`)), hoverinfo: "text"}});
      }
    }
    return {title: `Program ${graph.program.slice(0, 16)}…`, x: "calls that must come before", y: "", lines,
      note: `${count(graph.calls)} calls; ${count(graph.views)} of them are views, which are left out: who reads one reads what it is a view of.${
        graph.left_out ? ` ${count(graph.left_out)} more calls are not shown.` : ""}`, yaxis: {showticklabels: false}};
  }

  function updateProgram() {
    const {graphs} = DATA.runs.runs.find((each) => each.name === state.run);
    const graph = graphs.programs.find((each) => each.program === state.program);
    for (const id of ["program-plot", "program-plot-actions"]) byId(id).hidden = !graph;
    if (!graph) {
      byId("program-plot-caption").textContent = graphs.problem || "The run holds no program.";
      put(byId("program-data"));
      return Promise.resolve();
    }
    const sources = {};
    graph.edges.forEach(([from, to]) => { (sources[to] = sources[to] || []).push(from); });
    const named = (place) => (graph.nodes[place][2] === null ? graph.nodes[place][1] : `call ${graph.nodes[place][2]}`);
    const rows = graph.nodes.map((each, place) => [each, place]).filter(([each]) => each[0] === "call").slice(0, 500)
      .map(([each, place]) => [each[2], each[1], (sources[place] || []).map(named).join(", ")]);
    put(byId("program-data"), table("Calls but for views, at most 500", ["call", "operator", "reads"], rows));
    return draw("program-plot", graphOf(graph));
  }

  function showDispute() {
    const dispute = DATA.runs.dispute;
    if (!dispute) return;
    byId("dispute").hidden = false;
    byId("dispute-text").textContent = dispute.text;
    put(byId("dispute-data"), table(`Outcome: ${dispute.outcome}`, ["found", "value"], dispute.found),
      table("Where the referee asked", ["question", "compared", "of", "the labs"], dispute.search.map(([phase, place, of, agree], number) =>
        [number + 1, `${phase} ${place}`, of, agree ? "agree" : "differ"])));
    showSearch(dispute);
  }

  function showSearch(dispute) {
    const kinds = [["step", true], ["step", false], ["operator", true], ["operator", false]];
    const asked = dispute.search.map((each, number) => [number + 1, ...each]);
    const lines = kinds.map(([kind, agree]) => {
      const places = asked.filter((each) => each[1] === kind && each[4] === agree);
      return {name: `${kind}s: the labs ${agree ? "agree" : "differ"}`, mode: "markers", x: places.map((each) => each[0]),
        y: places.map((each) => each[2] / each[3]), more: {text: places.map((each) => plain(`${each[1]} ${each[2]} of ${each[3]}`)), hoverinfo: "text"}};
    }).filter((line) => line.x.length);
    for (const id of ["dispute-plot", "dispute-plot-actions"]) byId(id).hidden = !lines.length;
    if (!lines.length) return Promise.resolve();
    return draw("dispute-plot", {title: "The referee's search", x: "question", y: "place, as a share of all", lines, range: [-0.05, 1.05],
      note: "First it halves the run until one step is left where the labs part, then that step until one operator is left."});
  }

  // The page
  function choose(id, options, update) {
    byId(id).append(...options.map(([value, name]) => element("option", {value}, name)));
    state[id] = options.length ? options[0][0] : "";
    START[id] = state[id];
    byId(id).addEventListener("change", () => {
      state[id] = byId(id).value;
      updateLink();
      update();
    });
  }

  const painted = () => new Promise((done) => requestAnimationFrame(() => setTimeout(done)));

  async function updateAll() {
    showControls();
    updateLink();
    await updateClosed();
    await painted();
    performance.mark(charts ? "charts" : "picture");
    if (DATA.campaigns.scenarios.length) await updateCampaign();
    if (DATA.runs && DATA.runs.runs.length) await updateRun();
    if (charts && DATA.runs) showDispute();
  }

  async function unpacked() {
    const text = atob(byId("library").textContent);
    const bytes = new Uint8Array(text.length);
    for (let place = 0; place < text.length; place++) bytes[place] = text.charCodeAt(place);
    const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
    document.head.append(element("script", {}, await new Response(stream).text()));
    return window.Plotly;
  }

  async function start() {
    makeControls();
    document.querySelectorAll(".scroll, .scroll > table").forEach((each) => watcher.observe(each));
    choose("figure", Object.entries(figures).map(([key, each]) => [key, each.name]), updateClosed);
    choose("scenario", DATA.campaigns.scenarios.map((each) => [each.name, each.title]), updateCampaign);
    if (DATA.runs) {
      choose("run", DATA.runs.runs.map((each) => [each.name, each.name]), updateRun);
      choose("program", [], updateProgram);
    }
    actions("plot");
    actions("campaign-plot");
    if (DATA.runs) {
      for (const id of ["run-plot", "program-plot", "dispute-plot"]) actions(id);
      showDispute();
    }
    byId("reset").addEventListener("click", () => {
      CONTROLS.forEach((each) => { state[each.name] = START[each.name]; });
      updateAll();
    });
    let waiting = null;
    window.addEventListener("resize", () => {
      clearTimeout(waiting);
      waiting = setTimeout(() => Object.entries(drawn).forEach(([id, figure]) => byId(id).clientWidth && draw(id, figure)), 100);
    });
    window.addEventListener("hashchange", () => restore() && updateAll());
    restore();
    await updateAll();
    try {
      charts = await unpacked();
      await updateAll();
    } catch (error) {
      console.warn(`the charting library could not be unpacked, so that figures stay plain: ${error}`);
    }
    document.documentElement.dataset.ready = "yes";
  }

  return {ready: start(), change, controls: CONTROLS};
})();
