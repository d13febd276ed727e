// Runs at the end of a copy of the report, inside a frame, and tells the page around it what is to be seen.

function box(element) {
  const { left, top, right, bottom } = element.getBoundingClientRect();
  return [left, top, right, bottom];
}

function halfway(p, q) {
  return { x: (p.x + q.x) / 2, y: (p.y + q.y) / 2 };
}

// Points of the page where a mark has colour, if it is drawn: [x, y].
function insides(mark) {
  const points = [...(mark.points ?? [])];
  let found;
  if (mark.tagName === "polygon") {
    // An area goes there and back: halfway between the two edges, and between two steps.
    const last = points.length - 1;
    const middles = points.map((p, i) => halfway(p, points[last - i]));
    found = middles.slice(1).map((p, i) => halfway(p, middles[i]));
  } else if (mark.tagName === "polyline") {
    found = points;
  } else {
    const { x, y, width, height } = mark.getBBox();
    found = [{ x: x + width / 2, y: y + height / 2 }];
  }
  const matrix = mark.getScreenCTM();
  return found.map(({ x, y }) => [matrix.a * x + matrix.e, matrix.d * y + matrix.f]);
}

function chart(svg) {
  const marks = [...svg.querySelectorAll("polyline, polygon, circle, rect, .mark")];
  return {
    title: svg.closest(".card")?.querySelector("h2")?.textContent ?? svg.getAttribute("aria-label"),
    box: box(svg),
    marks: marks.map((mark) => ({
      tag: mark.tagName,
      name: mark.textContent,
      box: box(mark),
      drawn: insides(mark).some(([x, y]) => document.elementsFromPoint(x, y).includes(mark)),
    })),
    texts: [...svg.querySelectorAll("text")].map((text) => ({
      text: text.textContent,
      box: box(text),
      pixels: parseFloat(getComputedStyle(text).fontSize) * text.getScreenCTM().a,
    })),
  };
}

function ownText(element) {
  return [...element.childNodes].filter((n) => n.nodeType === Node.TEXT_NODE).map((n) => n.data.trim()).join("");
}

const seen = {
  width: innerWidth,
  needs: document.documentElement.scrollWidth,
  charts: [...document.querySelectorAll("svg")].map(chart),
  texts: [...document.querySelectorAll("body *:not(svg *, script, details > pre)")]
    .filter((element) => ownText(element))
    .map((element) => ({
      tag: element.tagName.toLowerCase(),
      text: ownText(element),
      box: box(element),
      pixels: parseFloat(getComputedStyle(element).fontSize),
      visible: element.checkVisibility({ opacityProperty: true, visibilityProperty: true }),
    })),
  // Tables that a reader has to push sideways.
  pushed: [...document.querySelectorAll(".scroll")]
    .filter((element) => element.scrollWidth > element.clientWidth)
    .map((element) => element.closest(".card").querySelector("h2").textContent),
};
parent.postMessage(JSON.stringify(seen), "*");
