// Draws the charts of a page in the page's own colours, and again when these change.
// plotly is loaded from the folder of this script, and only on pages that have charts.
(() => {
  const library = new URL("plotly.min.js", document.currentScript.src).href;
  let loading = null;

  function plotly() {
    loading ??= new Promise((resolve, reject) => {
      const script = document.createElement("script");
      script.src = library;
      script.onload = () => resolve(window.Plotly);
      script.onerror = () => reject(new Error(`cannot load ${library}`));
      document.head.append(script);
    });
    return loading;
  }

  // A colour of the theme as rgb, which plotly understands however the theme has written it.
  function colour(name, otherwise) {
    const probe = document.createElement("span");
    probe.style.color = `var(${name}, ${otherwise})`;
    document.body.append(probe);
    const found = getComputedStyle(probe).color;
    probe.remove();
    return found;
  }

  // The layout with colours of the page's scheme, light or dark.
  function inColours(layout) {
    const style = getComputedStyle(document.body);
    const text = colour("--md-default-fg-color", "inherit");
    const lines = colour("--md-default-fg-color--lightest", "#8f98a340");
    const dark = document.body.getAttribute("data-md-color-scheme") === "slate";
    const result = {
      ...layout,
      paper_bgcolor: "rgba(0,0,0,0)",
      plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: style.fontFamily, size: 12, color: text },
      hoverlabel: { bgcolor: dark ? "#2e303e" : "#ffffff", font: { color: dark ? "#ffffff" : "#202124" } },
    };
    for (const name of Object.keys(layout).filter((key) => /^[xy]axis\d*$/.test(key))) {
      result[name] = { ...layout[name], gridcolor: lines, zerolinecolor: lines, linecolor: lines };
    }
    return result;
  }

  // Lines of intervals, too, must be seen on the page and on bars.
  function withIntervals(data) {
    const color = colour("--md-default-fg-color", "inherit");
    return data.map((trace) =>
      trace.error_x ? { ...trace, error_x: { ...trace.error_x, color } } : trace,
    );
  }

  async function draw() {
    const figures = document.querySelectorAll("figure.chart");
    if (figures.length === 0) return;
    const Plotly = await plotly();
    for (const figure of figures) {
      const { data, layout } = JSON.parse(figure.querySelector("script").textContent);
      const options = { responsive: true, displayModeBar: false };
      const place = figure.querySelector("div");
      await Plotly.react(place, withIntervals(data), inColours(layout), options);
    }
  }

  // The theme tells of pages that come without a reload; other themes load each page anew.
  if (window.document$) window.document$.subscribe(draw);
  else document.addEventListener("DOMContentLoaded", draw);
  new MutationObserver(draw).observe(document.body, {
    attributes: true,
    attributeFilter: ["data-md-color-scheme"],
  });
})();
