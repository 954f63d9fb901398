"use strict";
(() => {
  const facts = JSON.parse(document.getElementById("facts").textContent);
  const root = document.documentElement;
  const dark = window.matchMedia("(prefers-color-scheme: dark)");
  const pointer = window.matchMedia("(hover: hover)"); // a mouse, not a finger and not a printer
  const PRINT_WIDTH = 690; // CSS pixels between the margins of A4
  const ROWS = 500; // that a table of numbers shows; the CSV holds all
  const byId = (id) => document.getElementById(id);
  let figures = new Map(facts.figures.map((each) => [each.id, each]));

  function painted(value, theme) {
    if (Array.isArray(value)) return value.map((item) => painted(item, theme));
    if (value && typeof value === "object")
      return Object.fromEntries(Object.entries(value).map(([key, item]) => [key, painted(item, theme)]));
    return typeof value === "string" && value.startsWith("@") ? theme[value.slice(1)] : value;
  }

  function draw(figure) {
    const place = byId("plot-" + figure.id);
    if (!place) return Promise.resolve();
    if (!figure.data.length) {
      place.remove();
      return Promise.resolve();
    }
    const theme = facts.themes[root.dataset.theme];
    const narrow = place.clientWidth < 480;
    const layout = painted(figure.layout, theme);
    if (narrow) layout.font.size = 11;
    // What a reader has zoomed into stays, although new data come.
    layout.uirevision = figure.id;
    return Plotly.react(place, painted(figure.data, theme), layout, {
      responsive: true,
      displaylogo: false,
      displayModeBar: narrow || !pointer.matches ? false : "hover",
      scrollZoom: false,
      // These and no others: plotly.js has a button that uploads the figure to its maker's server.
      modeBarButtons: [["zoom2d", "pan2d", "zoomIn2d", "zoomOut2d", "resetScale2d"]],
      showSendToCloud: false,
      plotlyServerURL: "",
    }).then(() => {
      // A screen reader gets the description and the table instead of loose labels.
      for (const drawing of place.querySelectorAll(".main-svg")) drawing.setAttribute("aria-hidden", "true");
    });
  }

  const drawAll = () => Promise.all([...figures.values()].map(draw));

  function show(theme) {
    root.dataset.theme = theme;
    byId("theme").textContent = theme === "dark" ? "Light theme" : "Dark theme";
    return drawAll();
  }

  function save(name, content, type) {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([content], { type }));
    link.download = name;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  }

  function cell(value) {
    const text = value === null ? "" : String(value);
    const safe = /^[=+@\t\r-]/.test(text) && typeof value === "string" ? "'" + text : text; // no formula in a spreadsheet
    return /[",\n]/.test(safe) ? '"' + safe.replaceAll('"', '""') + '"' : safe;
  }

  const csv = (figure) => [figure.columns, ...figure.rows].map((row) => row.map(cell).join(",")).join("\n") + "\n";

  async function svg(figure) {
    const image = await Plotly.toImage(byId("plot-" + figure.id), { format: "svg" });
    save(figure.id + ".svg", decodeURIComponent(image.slice(image.indexOf(",") + 1)), "image/svg+xml");
  }

  function table(figure) {
    const made = document.createElement("table");
    const head = made.createTHead().insertRow();
    for (const column of figure.columns) {
      const th = document.createElement("th");
      th.scope = "col";
      th.textContent = column;
      head.append(th);
    }
    const body = made.createTBody();
    for (const row of figure.rows.slice(0, ROWS)) {
      const line = body.insertRow();
      for (const value of row) line.insertCell().textContent = value === null ? "–" : value;
    }
    if (figure.rows.length > ROWS) made.createCaption().textContent = `The first ${ROWS} of ${figure.rows.length} rows`;
    return made;
  }

  function fillTable(details) {
    const place = details.querySelector("[data-table]");
    if (place && details.open) place.replaceChildren(table(figures.get(place.dataset.table)));
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("button[data-save]");
    if (button) {
      const figure = figures.get(button.dataset.figure);
      if (button.dataset.save === "csv") save(figure.id + ".csv", csv(figure), "text/csv");
      else svg(figure);
    }
    if (event.target.id === "theme") show(root.dataset.theme === "dark" ? "light" : "dark");
  });
  document.addEventListener("toggle", (event) => fillTable(event.target), true);
  dark.addEventListener("change", () => show(dark.matches ? "dark" : "light"));

  let before = null; // what printing changes
  window.addEventListener("beforeprint", () => {
    before = { theme: root.dataset.theme, closed: [...document.querySelectorAll("details.config:not([open])")] };
    for (const each of before.closed) each.open = true;
    root.dataset.theme = "light";
    drawAll();
    for (const place of document.querySelectorAll(".plot.js-plotly-plot"))
      Plotly.relayout(place, { width: PRINT_WIDTH, autosize: false });
  });
  window.addEventListener("afterprint", () => {
    for (const each of before.closed) each.open = false;
    for (const place of document.querySelectorAll(".plot.js-plotly-plot"))
      Plotly.relayout(place, { width: null, autosize: true });
    show(before.theme);
  });

  // ---------------------------------------------------------------- live

  function renew(content) {
    const fresh = new DOMParser().parseFromString(`<main>${content}</main>`, "text/html").querySelector("main");
    const ids = (node) => [...node.querySelectorAll("figure, [data-part]")].map((each) => each.id || each.dataset.part).join();
    const main = byId("content");
    if (ids(fresh) !== ids(main)) {
      main.replaceChildren(...fresh.childNodes); // another set of figures
      return;
    }
    for (const part of fresh.querySelectorAll("[data-part]")) {
      const old = main.querySelector(`[data-part="${part.dataset.part}"]`);
      if (old.innerHTML !== part.innerHTML) old.innerHTML = part.innerHTML;
    }
    for (const plot of fresh.querySelectorAll(".plot")) byId(plot.id)?.setAttribute("aria-label", plot.getAttribute("aria-label"));
  }

  async function follow() {
    let told = "connected";
    let wait = facts.live_s;
    try {
      const answer = await fetch("update", { cache: "no-store" });
      if (!answer.ok) throw new Error(answer.statusText);
      const news = await answer.json();
      wait = news.wait_s;
      figures = new Map(news.figures.map((each) => [each.id, each]));
      renew(news.content);
      await drawAll();
      document.querySelectorAll("details.data[open]").forEach(fillTable);
      if (!news.running) told = "the run has ended; this page is complete";
    } catch {
      told = "no answer from the server; the page shows what it knew last";
    }
    if (byId("connection").textContent !== told) byId("connection").textContent = told;
    root.dataset.updates = String(Number(root.dataset.updates || 0) + 1);
    if (!told.startsWith("the run has ended")) setTimeout(follow, wait * 1000);
  }

  show(dark.matches ? "dark" : "light").then(() => {
    root.dataset.drawn = "all";
    root.dataset.height = String(root.scrollHeight); // for whoever takes a picture of the page
    if (facts.live) setTimeout(follow, facts.live_s * 1000);
  });
})();
