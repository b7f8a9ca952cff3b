"use strict";
// A figure as plain SVG, at once: the first picture, until the charting library is unpacked, and all that an old browser gets.
const sketch = (() => {
  const SPACE = "http://www.w3.org/2000/svg";
  const COLOURS = ["#08306b", "#c44e00", "#2a7d4f", "#8a3d8f", "#4d4d4d", "#8a6508"];
  const DASHES = ["", "9 5", "9 4 2 4", "2 4", "14 6", "14 4 2 4"];

  function node(tag, attributes, text) {
    const made = document.createElementNS(SPACE, tag);
    for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
    if (text !== undefined) made.textContent = text;
    return made;
  }

  const shown = (value) => (value !== 0 && (Math.abs(value) >= 1e5 || Math.abs(value) < 1e-3)
    ? value.toExponential(0).replace("e+", "e") : String(Number(value.toPrecision(4))));

  // A scale from data to pixels, with its ticks as [place, text].
  function linear(low, high, from, to) {
    const width = high > low ? high - low : 1;
    const size = 10 ** Math.floor(Math.log10(width / 4));
    const step = [1, 2, 5, 10].map((each) => each * size).find((each) => width / each <= 6);
    const at = (value) => from + (to - from) * (value - low) / width;
    const first = Math.ceil(low / step - 1e-9);
    const ticks = Array.from({length: Math.floor(high / step + 1e-9) - first + 1}, (_, place) => (first + place) * step);
    return {at, ticks: ticks.map((value) => [at(value), shown(value)])};
  }

  function decades(low, high, from, to) {
    const [one, other] = [Math.log10(low), Math.log10(high > low ? high : low * 10)];
    const at = (value) => from + (to - from) * (Math.log10(value) - one) / (other - one);
    const every = Math.max(1, Math.ceil((other - one) / 6));
    const ticks = [];
    for (let power = Math.ceil(one - 1e-9); power <= other + 1e-9; power += every) ticks.push(power);
    return {at, ticks: ticks.map((power) => [at(10 ** power), `1e${power}`])};
  }

  function named(names, from, to) {
    const at = (value) => from + (to - from) * (names.indexOf(value) + 0.5) / names.length;
    return {at, ticks: names.map((name) => [at(name), name])};
  }

  function scale(figure, axis, values, range, from, to) {
    const there = values.filter((value) => typeof value === "number" && Number.isFinite(value));
    const log = (figure.log || []).includes(axis);
    const kept = log ? there.filter((value) => value > 0) : there;
    const [low, high] = range || [Math.min(...kept), Math.max(...kept)];
    return (log ? decades : linear)(low, high, from, to);
  }

  function path(line, x, y) {
    let text = "";
    let last = null;
    line.x.forEach((value, place) => {
      const [left, top] = [x.at(value), y.at(line.y[place])];
      if (line.x[place] === null || !Number.isFinite(left) || !Number.isFinite(top)) {
        last = null;
        return;
      }
      if (last === null) text += `M${left.toFixed(1)} ${top.toFixed(1)}`;
      else text += line.step ? `H${left.toFixed(1)}V${top.toFixed(1)}` : `L${left.toFixed(1)} ${top.toFixed(1)}`;
      last = top;
    });
    return text;
  }

  // Put the figure into an element, in place of what it holds.
  function into(holder, figure) {
    const [width, height] = [Math.max(holder.clientWidth, 300), Math.max(holder.clientHeight, 240)];
    const category = (figure.yaxis || {}).type === "category";
    const xs = figure.lines.flatMap((line) => Array.from(line.x));
    const ys = figure.lines.flatMap((line) => Array.from(line.y));
    const names = category ? ((figure.yaxis.categoryarray || []).slice().reverse().concat(ys)
      .filter((each, place, all) => all.indexOf(each) === place)) : [];
    const left = category ? Math.min(width * 0.45, 20 + 7.2 * Math.max(0, ...names.map((each) => each.length))) : 70;
    const bottom = height - 67 - 18 * figure.lines.length;
    const made = node("svg", {class: "sketch", width: "100%", height: "100%", viewBox: `0 0 ${width} ${height}`,
      "font-size": 12, "font-family": "system-ui, sans-serif", fill: "#1b1f24"});
    const x = scale(figure, "x", xs, (figure.xaxis || {}).range, left, width - 20);
    const y = category ? named(names, 16, bottom) : scale(figure, "y", ys, figure.range, bottom, 16);
    for (const [place, text] of x.ticks) {
      made.append(node("path", {d: `M${place} 16V${bottom}`, stroke: "#dddddd"}),
        node("text", {x: place, y: bottom + 22, "text-anchor": "middle"}, text));
    }
    for (const [place, text] of y.ticks) {
      made.append(node("path", {d: `M${left} ${place}H${width - 20}`, stroke: "#dddddd"}),
        node("text", {x: left - 6, y: place + 4, "text-anchor": "end"}, text));
    }
    made.append(node("text", {x: (left + width - 20) / 2, y: bottom + 40, "text-anchor": "middle"}, figure.x));
    if (!category) {
      made.append(node("text", {x: 14, y: (16 + bottom) / 2, "text-anchor": "middle",
        transform: `rotate(-90 14 ${(16 + bottom) / 2})`}, figure.y));
    }
    if (figure.mark !== undefined) {
      const place = x.at(figure.mark);
      if (place >= left && place <= width - 20) {
        made.append(node("path", {d: `M${place} 16V${bottom}`, stroke: "#666666", "stroke-dasharray": "2 3"}));
      }
    }
    figure.lines.forEach((line, place) => {
      const look = (line.more || {}).line || {};
      const [colour, thick] = [look.color || COLOURS[place % 6], look.width || 2];
      const top = bottom + 59 + 18 * place;
      if (line.mode === "markers") {
        line.x.forEach((value, index) => made.append(node("circle", {cx: x.at(value), cy: y.at(line.y[index]), r: 4,
          fill: colour})));
      } else {
        made.append(node("path", {class: "js-line", d: path(line, x, y), fill: "none", stroke: colour, "stroke-width": thick,
          "stroke-dasharray": DASHES[place % 6]}));
      }
      made.append(node("path", {d: `M${left} ${top - 4}h28`, stroke: colour, "stroke-width": 2,
        "stroke-dasharray": line.mode === "markers" ? "" : DASHES[place % 6]}),
      node("text", {x: left + 34, y: top}, line.name));
    });
    holder.replaceChildren(made);
  }

  return {into};
})();
