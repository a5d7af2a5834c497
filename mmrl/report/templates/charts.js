"use strict";
// The values of a diagram at the step under the pointer, of several in one drawing of the nearest. Names go in by
// textContent.
(() => {
  const tip = document.createElement("div");
  tip.className = "tip";
  tip.hidden = true;
  document.body.append(tip);
  for (const svg of document.querySelectorAll("svg[data-hover]")) {
    const charts = JSON.parse(svg.dataset.hover);
    const mark = document.createElementNS(svg.namespaceURI, "path");
    mark.setAttribute("stroke", "#5b6675");
    svg.append(mark);
    const hide = () => {
      tip.hidden = true;
      mark.removeAttribute("d");
    };
    svg.addEventListener("pointerleave", hide);
    svg.addEventListener("pointermove", (event) => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const outside = (low, value, high) => Math.max(low - value, 0, value - high);
      const away = ({ axis, rows }) => Math.hypot(outside(axis[0], at.x, axis[1]), outside(rows[0], at.y, rows[1]));
      const chart = charts.reduce((near, one) => (away(one) < away(near) ? one : near));
      const { axis: [left, right, first, last], rows: [top, bottom], lines } = chart;
      const steps = [...new Set(lines.flatMap((line) => line[1]))];
      const wanted = first + ((at.x - left) / (right - left)) * (last - first);
      const step = steps.reduce((near, one) => (Math.abs(one - wanted) < Math.abs(near - wanted) ? one : near));
      const texts = [`step ${step}`];
      for (const [name, at, values, means] of lines) {
        const place = at.indexOf(step);
        if (place >= 0) texts.push(`${name} ${values[place]}${means ? ` (mean ${means[place]})` : ""}`);
      }
      tip.replaceChildren(...texts.map((text) => Object.assign(document.createElement("div"), { textContent: text })));
      const x = left + ((step - first) / (last - first)) * (right - left);
      mark.setAttribute("d", `M${x} ${top}V${bottom}`);
      tip.hidden = false;
      // Beside the pointer, and inside the window.
      tip.style.left = `${Math.max(Math.min(event.clientX + 12, innerWidth - tip.offsetWidth - 4), 0)}px`;
      tip.style.top = `${Math.max(event.clientY - tip.offsetHeight - 12, 0)}px`;
    });
  }
})();
