"use strict";
// Charts take the colours of the page, light or dark, and the timeline can be moved by buttons.
(() => {
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const models = () => Bokeh.documents.flatMap((document) => [...document.all_models]);
  const paint = () => {
    const style = getComputedStyle(document.documentElement);
    const [text, line] = ["--text", "--line"].map((name) => style.getPropertyValue(name).trim());
    for (const model of models()) {
      if (model.type.endsWith("Axis")) {
        model.setv({
          axis_label_text_color: text, major_label_text_color: text, axis_line_color: line, major_tick_line_color: line,
          axis_label_text_font_style: "normal",
        });
      } else if (model.type === "Grid") {
        if (model.dimension === 0 && model.grid_line_color !== null) model.setv({ grid_line_color: line });
      } else if (model.type === "Text") {
        model.setv({ text_color: { value: text } });
      }
    }
    document.documentElement.dataset.drawn = "yes";
  };
  const frameOf = (button) => {
    const chart = button.closest("figure").querySelector(".chart [data-root-id]");
    return Bokeh.documents.flatMap((d) => d.roots()).find((root) => root.id === chart.dataset.rootId).x_range;
  };
  const whole = new Map();
  const move = (button) => {
    const range = frameOf(button);
    if (!whole.has(range.id)) whole.set(range.id, [range.start, range.end]);
    const [first, last] = whole.get(range.id);
    const width = range.end - range.start;
    let [start, end] = [range.start, range.end];
    if (button.dataset.zoom) {
      const wanted = Math.min(width * Number(button.dataset.zoom), last - first);
      start = (range.start + range.end - wanted) / 2;
      end = start + wanted;
    } else if (button.dataset.move) {
      start += width * Number(button.dataset.move);
      end = start + width;
    } else {
      [start, end] = [first, last];
    }
    const shift = Math.max(first - start, 0) + Math.min(last - end, 0);
    range.setv({ start: start + shift, end: end + shift });
  };
  const ready = () => {
    const charts = document.querySelectorAll(".chart").length;
    const drawn = window.Bokeh ? Bokeh.documents.reduce((sum, d) => sum + d.roots().length, 0) : 0;
    if (drawn < charts) return void requestAnimationFrame(ready);
    for (const button of document.querySelectorAll(".zoom button")) button.addEventListener("click", () => move(button));
    if (window.matchMedia("(pointer: fine)").matches) {
      for (const model of models()) if (model.type === "BoxZoomTool") model.setv({ active: true });
    }
    paint();
    dark.addEventListener("change", paint);
  };
  window.addEventListener("load", ready);
})();
