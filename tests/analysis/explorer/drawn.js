// What is wrong with what a page shows, as lines of text; no line: nothing is.
() => {
  const found = [];
  const seen = (each) => each.checkVisibility() && each.getBoundingClientRect().width > 0;
  const name = (each) => `${each.tagName.toLowerCase()}${each.id ? `#${each.id}` : ""} "${(each.textContent || "").trim().slice(0, 40)}"`;
  // A box, as far as boxes around it that scroll or clip leave it visible.
  const clips = new Map();
  const clipsOf = (each) => {
    if (!each || each === document.documentElement) return [];
    if (!clips.has(each)) clips.set(each, (getComputedStyle(each).overflow === "visible" ? [] : [each.getBoundingClientRect()]).concat(clipsOf(each.parentElement)));
    return clips.get(each);
  };
  const boxOf = (each, {left, right, top, bottom}) => {
    for (const clip of clipsOf(each.parentElement)) {
      [left, right, top, bottom] = [Math.max(left, clip.left), Math.min(right, clip.right), Math.max(top, clip.top), Math.min(bottom, clip.bottom)];
    }
    return {left, right, top, bottom};
  };
  const overlaps = (kind, all) => {
    const boxes = all.filter(seen).flatMap((each) => Array.from(each.getClientRects(), (rect) => [each, boxOf(each, rect)]))
      .filter(([, box]) => box.right > box.left && box.bottom > box.top);
    boxes.forEach(([one, a], place) => boxes.slice(place + 1).forEach(([other, b]) => {
      const [wide, high] = [Math.min(a.right, b.right) - Math.max(a.left, b.left), Math.min(a.bottom, b.bottom) - Math.max(a.top, b.top)];
      if (wide > 1 && high > 1 && !one.contains(other) && !other.contains(one)) found.push(`${kind}: ${name(one)} over ${name(other)}`);
    }));
  };
  overlaps("boxes", Array.from(document.querySelectorAll("h1, h2, h3, p, li, dt, dd, label, input, select, button, a, pre, summary, table, figure, .plot, .main-svg:first-child, .sketch, .scroll, .fact")));
  for (const svg of document.querySelectorAll(".plot, figure svg")) {
    const texts = Array.from(svg.querySelectorAll("text")).filter((each) => each.textContent.trim());
    overlaps("labels", texts);
    const around = svg.getBoundingClientRect();
    for (const each of texts.filter(seen)) {
      const box = each.getBoundingClientRect();
      if (box.left < around.left - 1 || box.right > around.right + 1 || box.top < around.top - 1 || box.bottom > around.bottom + 1) found.push(`clipped: ${name(each)}`);
      if (box.height < 7) found.push(`tiny: ${name(each)}, ${box.height.toFixed(1)} px`);
    }
  }
  for (const each of document.querySelectorAll("body *")) {
    const cut = each.scrollWidth > each.clientWidth + 1 || each.scrollHeight > each.clientHeight + 1;
    if (!seen(each) || !/auto|scroll|hidden|clip/.test(getComputedStyle(each).overflow) || each.closest("svg, select, input")) continue;
    const sign = each.nextElementSibling;
    const signed = Boolean(sign && sign.matches(".cut") && seen(sign));
    if (cut !== signed) found.push(`${cut ? "cut without a sign" : "a sign without a cut"}: ${name(each)}`);
  }
  // A word that could stay in one piece is not broken: not in a cell, not in a command.
  const walker = document.createTreeWalker(document.querySelector("body"), NodeFilter.SHOW_TEXT);
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (node.parentElement.closest("script, style, svg, option, noscript") || !seen(node.parentElement)) continue;
    const linesOf = (range) => new Set(Array.from(range.getClientRects()).filter((each) => each.width > 0).map((each) => Math.round(each.top))).size;
    const range = document.createRange();
    range.selectNodeContents(node);
    if (linesOf(range) < 2) continue;
    for (const word of node.data.matchAll(/\S+/g)) {
      if (word[0].length > 28 || (word[0].includes("-") && !node.parentElement.closest(/\d/.test(word[0]) ? "code, pre, th, td" : "code, pre"))) continue;
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      if (linesOf(range) > 1) found.push(`broken: ${word[0]} in ${name(node.parentElement)}`);
    }
  }
  const python = document.body.innerText.match(/\b(False|True|None|nan|NaN|undefined)\b|\[\d+(, \d+)*\]|\{'/g);
  if (python) found.push(`printed as code: ${python}`);
  const wide = document.documentElement.scrollWidth - document.documentElement.clientWidth;
  if (wide > 0) found.push(`wider than the screen by ${wide} px`);
  return found;
}
