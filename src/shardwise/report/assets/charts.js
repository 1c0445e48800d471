// Draws charts from the data of shardwise.report.charts, by Chart.js. Everything that comes from a user is set as text.
"use strict";

const ShardwiseCharts = (() => {
  // -- figures for people, as shardwise.spec.units writes them -----------------------------------------------

  const THOUSANDS = ["", "k", "M", "G", "T", "P", "E", "Z", "Y"];
  const scale = (unit, prefixes, base) =>
    prefixes.map((prefix, power) => [base ** power, unit ? ` ${prefix}${unit}` : prefix]);
  const BYTES = scale("B", ["", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"], 1024);
  const RATES = scale("B/s", THOUSANDS.slice(0, 6), 1000);
  const FLOPS = scale("FLOP", THOUSANDS, 1000);
  const COUNTS = scale("", ["", "k", "M", "B", "T"], 1000);
  const YEAR = 86400 * 365.25;
  // Factor, unit, and the first number of seconds that is written in it.
  const TIMES = [[1e-9, " ns", 0], [1e-6, " µs", 1e-6], [1e-3, " ms", 1e-3], [1, " s", 1], [60, " min", 600],
                 [3600, " h", 3600], [86400, " days", 172800], [YEAR, " years", 2 * YEAR]];

  // Made once for each number of digits: making one takes longer than a hundred uses.
  const FORMATS = new Map();
  function grouped(value, digits) {
    const fixed = { minimumFractionDigits: digits, maximumFractionDigits: digits };
    if (!FORMATS.has(digits)) FORMATS.set(digits, new Intl.NumberFormat("en-US", fixed));
    return FORMATS.get(digits).format(value);
  }

  function threeDigits(magnitude) {
    for (const digits of [2, 1]) {
      const text = magnitude.toFixed(digits);
      if (Number(text) < 10 ** (3 - digits)) return text;
    }
    return grouped(magnitude, 0);
  }

  const valueOf = (text) => Number(text.replaceAll(",", ""));

  function scaled(units, number, whole) {
    const sign = number < 0 ? "-" : "", magnitude = Math.abs(number);
    for (let i = 0; i < units.length; i++) {
      const [factor, unit] = units[i], above = i + 1 < units.length ? units[i + 1][0] : Infinity;
      const text = whole && factor === 1 ? grouped(magnitude, 0) : threeDigits(magnitude / factor);
      if (valueOf(text) * factor < above) return valueOf(text) ? `${sign}${text}${unit}` : `0${units[0][1]}`;
    }
    return String(number);
  }

  function seconds(number) {
    const sign = number < 0 ? "-" : "", magnitude = Math.abs(number);
    for (let i = 0; i < TIMES.length; i++) {
      const [factor, unit] = TIMES[i], above = i + 1 < TIMES.length ? TIMES[i + 1][2] : Infinity;
      const text = threeDigits(magnitude / factor);
      if (valueOf(text) * factor < above * (1 - 1e-12)) return valueOf(text) ? `${sign}${text}${unit}` : "0 s";
    }
    return String(number);
  }

  const READABLE = {
    bytes: (value) => scaled(BYTES, value, true),
    seconds,
    share: (value) => `${(value * 100).toFixed(1)}%`,
    count: (value) => scaled(COUNTS, value, Number.isInteger(value)),
    "FLOP/s": (value) => `${scaled(FLOPS, value, true)}/s`,
    "B/s": (value) => scaled(RATES, value, true),
    "tokens/s": (value) => grouped(value, 0),
    number: (value) => grouped(value, 0),
    loss: (value) => value.toFixed(3),
    words: String,
  };

  function readable(value, unit) {
    if (value === null || value === undefined) return "–";
    return typeof value === "string" ? value : READABLE[unit](value);
  }

  const largest = (numbers) => numbers.reduce((most, one) => Math.max(most, one), 0);

  // -- axes -----------------------------------------------------------------------------------------------------

  // "20.0 GiB" on an axis is "20 GiB", and "1.50 s" is "1.5 s".
  const tickText = (value, unit) => readable(value, unit).replace(/(\.\d*?)0+(?=\D|$)/, "$1").replace(/\.(?=\D|$)/, "");

  /** A step of 1, 2 or 5 times a unit that people count in, so that about six ticks reach ``most``. */
  function niceStep(most, unit) {
    const bases = { bytes: BYTES.map((one) => one[0]), seconds: TIMES.map((one) => one[0]) }[unit] || [];
    const base = bases.filter((one) => most >= 2 * one).pop() || 1;
    const rough = most / base / 6, power = 10 ** Math.floor(Math.log10(rough));
    return base * power * [1, 2, 5, 10].find((factor) => power * factor >= 0.99 * rough);
  }

  /** Powers of ten; between the same one also their 2 and 5 times. */
  function logTicks(low, high) {
    const factors = high / low > 100 ? [1] : [1, 2, 5], ticks = [];
    for (let power = 10 ** Math.floor(Math.log10(low)); power <= high; power *= 10) {
      ticks.push(...factors.map((factor) => factor * power).filter((one) => low <= one && one <= high));
    }
    return ticks;
  }

  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const tone = (name) => css(`--tone-${name}`);

  function axis(described, most, values) {
    // Less than a factor of three has too few round numbers on a logarithmic scale.
    const isLog = described.is_log && largest(values) >= 3 * Math.min(...values);
    const made = {
      type: isLog ? "logarithmic" : "linear",
      title: { display: true, text: described.label, color: css("--soft") },
      grid: { color: css("--line") },
      border: { color: css("--line") },
      ticks: { color: css("--soft"), maxRotation: 0, autoSkipPadding: 12,
               callback: (value) => tickText(value, described.unit) },
    };
    if (isLog) {
      const distinct = [...new Set(values)].sort((a, b) => a - b), last = distinct[distinct.length - 1];
      const named = distinct.length <= 12 && described.unit === "number";
      made.min = named ? distinct[0] : distinct[0] / 1.2;
      made.max = named ? last : last * 1.2;
      made.afterBuildTicks = (own) => {
        own.ticks = (named ? distinct : logTicks(own.min, own.max)).map((value) => ({ value }));
      };
    } else if (most > 0 && ["bytes", "seconds"].includes(described.unit)) {
      made.ticks.stepSize = niceStep(most, described.unit);
    }
    return made;
  }

  /** Lines across the plot with their names; a limit far beyond what is drawn would flatten it, and is left out. */
  function shownLimits(limits, most) {
    return (limits || []).filter((one) => one.value <= 4 * most);
  }

  const limitLines = (limits, along) => ({
    id: "limits",
    afterDatasetsDraw(chart) {
      const { ctx, chartArea: area, scales } = chart;
      ctx.save();
      ctx.strokeStyle = ctx.fillStyle = css("--limit");
      ctx.font = "11px system-ui, sans-serif";
      ctx.setLineDash([5, 4]);
      limits.forEach((one, number) => {
        const at = scales[along].getPixelForValue(one.value), text = `${one.label}, ${readable(one.value, "bytes")}`;
        ctx.beginPath();
        if (along === "x") {
          ctx.moveTo(at, area.top); ctx.lineTo(at, area.bottom);
        } else {
          ctx.moveTo(area.left, at); ctx.lineTo(area.right, at);
        }
        ctx.stroke();
        const wide = ctx.measureText(text).width;
        const left = Math.max(along === "x" ? Math.min(at + 4, area.right - wide) : area.left + 6, area.left);
        const bottom = along === "x" ? area.top - 6 - 13 * number : at - 5;
        ctx.fillStyle = css("--paper"); // over what is drawn there
        ctx.fillRect(left - 3, bottom - 11, wide + 6, 15);
        ctx.fillStyle = css("--limit");
        ctx.fillText(text, left, bottom);
      });
      ctx.restore();
    },
  });

  // A box of the series' colour: the dashes of a line are not its border.
  const plainBoxes = (chart) =>
    Chart.defaults.plugins.legend.labels.generateLabels(chart).map((one) => ({ ...one, lineDash: [] }));

  function options(more) {
    return {
      animation: false, responsive: true, maintainAspectRatio: false,
      interaction: { mode: "nearest", intersect: true },
      ...more,
      plugins: {
        legend: { position: "bottom", labels: { color: css("--ink"), boxWidth: 12, boxHeight: 12, generateLabels: plainBoxes } },
        ...more.plugins,
      },
    };
  }

  /** Of names in rows as wide as the chart, each with its box. */
  function legendHeight(series, width) {
    const letters = 6.6, box = 36;
    let rows = 1, left = width;
    for (const one of series) {
      const needed = one.name.length * letters + box;
      if (needed > left && left < width) { rows += 1; left = width; }
      left -= needed;
    }
    return 12 + 18 * rows;
  }

  // -- kinds of charts: a height, and what Chart.js draws -------------------------------------------------------

  function bars(chart, width) {
    const totals = chart.categories.map((_, i) => {
      const own = chart.series.map((one) => one.values[i]);
      return chart.is_stacked ? own.reduce((sum, one) => sum + one, 0) : largest(own);
    });
    const limits = shownLimits(chart.limits, largest(totals));
    const most = largest([...totals, ...limits.map((one) => one.value)]);
    // Where every series has one bar alone, the names of the bars say it all.
    const single = chart.series.every((one) => one.values.filter((value) => value).length <= 1) &&
      chart.categories.length > 1;
    const folded = (name) => fold(name, width < 600 ? 18 : 34);
    const perBar = chart.is_stacked ? 1 : chart.series.length;
    const lines = largest(chart.categories.map((name) => folded(name).length));
    const scales = {
      x: { ...axis(chart.axis, most, []), stacked: chart.is_stacked, suggestedMax: most, beginAtZero: true },
      y: { stacked: chart.is_stacked, grid: { display: false }, border: { color: css("--line") },
           ticks: { color: css("--ink"), autoSkip: false, callback: (i) => folded(chart.categories[i]) } },
    };
    const tooltip = { callbacks: {
      label: (item) => `${item.dataset.label}: ${readable(item.raw, chart.axis.unit)}`,
      afterLabel: (item) => ((chart.series[item.datasetIndex].details || [])[item.dataIndex] || [])
        .flatMap((line) => fold(line, 60)),
    } };
    return {
      height: 74 + (single ? 0 : legendHeight(chart.series, width)) + 15 * limits.length + chart.categories.length * Math.max(26 * perBar, 15 * lines + 8),
      config: {
        type: "bar",
        data: { labels: chart.categories, datasets: chart.series.map((one) => ({
          label: one.name, data: one.values.map((value) => value || null), backgroundColor: tone(one.tone), maxBarThickness: 26,
          ...(single ? { minBarLength: 2 } : {}), // what is small is still there
        })) },
        options: options({ indexAxis: "y", scales, layout: { padding: { top: 15 * limits.length + 4, right: 12 } },
                           plugins: { tooltip, ...(single ? { legend: { display: false } } : {}) } }),
        plugins: [limitLines(limits, "x")],
      },
    };
  }

  function lines(chart) {
    const xs = chart.series.flatMap((one) => one.points.map((point) => point[0]));
    const sums = new Map();
    chart.series.forEach((one) => one.points.forEach(([x, y]) => sums.set(x, (sums.get(x) || 0) + y)));
    const highest = chart.is_stacked ? largest([...sums.values()]) :
      largest(chart.series.flatMap((one) => one.points.map((point) => point[1])));
    const limits = shownLimits(chart.limits, highest);
    const most = largest([highest, ...limits.map((one) => one.value)]);
    const ys = chart.series.flatMap((one) => one.points.map((point) => point[1]));
    const datasets = chart.series.map((one, i) => ({
      label: one.name,
      data: one.points.map(([x, y]) => ({ x, y })),
      borderColor: tone(one.tone), backgroundColor: tone(one.tone),
      showLine: one.style !== "points", borderDash: one.style === "dashed" ? [6, 5] : [],
      borderWidth: chart.is_stacked ? 0.5 : 2,
      pointRadius: one.style === "points" ? 5 : one.style !== "line" || one.points.length > 40 || chart.is_stacked ? 0 : 3,
      pointHitRadius: 8,
      ...(chart.is_stacked ? {} : { order: -i }), // what is named last lies on top
      stepped: chart.is_stacked,
      fill: chart.is_stacked ? (i ? "-1" : "origin") : false,
    }));
    const tooltip = { callbacks: {
      title: (items) => items.length ? `${chart.x.label}: ${readable(items[0].parsed.x, chart.x.unit)}` : "",
      label: (item) => {
        const own = chart.series[item.datasetIndex], label = (own.labels || [])[item.dataIndex];
        return [...fold(label || own.name, 60), `${chart.y.label}: ${readable(own.points[item.dataIndex][1], chart.y.unit)}`];
      },
    } };
    const x = axis(chart.x, largest(xs), xs), y = axis(chart.y, most, ys);
    const isShare = chart.y.unit === "share", fromZero = chart.is_stacked || isShare || chart.y.unit === "tokens/s";
    if (x.type === "linear" && (chart.is_stacked || chart.x.unit === "number")) x.max = largest(xs);
    return {
      height: 360,
      config: {
        type: "line",
        data: { datasets },
        options: options({
          scales: { x, y: { ...y, stacked: chart.is_stacked, ...(fromZero ? { min: 0 } : {}),
                            suggestedMax: isShare ? 1 : limits.length ? most * 1.04 : undefined,
                            grace: y.type === "logarithmic" || isShare ? 0 : "4%" } },
          layout: { padding: { right: 14 } },
          plugins: { tooltip },
        }),
        plugins: [limitLines(limits, "y")],
      },
    };
  }

  // The name of a pass inside its bar, where there is room for it.
  const passNames = (labels) => ({
    id: "passNames",
    afterDatasetsDraw(chart) {
      const { ctx } = chart;
      ctx.save();
      ctx.font = "10px system-ui, sans-serif";
      ctx.textAlign = "center";
      ctx.textBaseline = "middle";
      ctx.fillStyle = css("--paper");
      chart.data.datasets.forEach((_, kind) => chart.getDatasetMeta(kind).data.forEach((bar, i) => {
        const { x, base, y } = bar.getProps(["x", "base", "y"], true), text = labels[kind][i];
        if (text && Math.abs(x - base) > ctx.measureText(text).width + 3) ctx.fillText(text, (x + base) / 2, y);
      }));
      ctx.restore();
    },
  });

  function spans(chart, width) {
    // Between passes of a pixel or two, edges would be all that is seen.
    const edge = width / (chart.spans.length / chart.rows.length) > 4 ? 0.6 : 0;
    const own = chart.kinds.map((_, kind) => chart.spans.filter((one) => one[3] === kind));
    const datasets = chart.kinds.map((kind, i) => ({
      label: kind.name, backgroundColor: tone(kind.tone), borderColor: css("--paper"), borderWidth: edge, borderSkipped: false,
      grouped: false, barPercentage: 1, categoryPercentage: 0.84,
      data: own[i].map(([row, start, end]) => ({ x: [start, end], y: chart.rows[row] })),
    }));
    const tooltip = { callbacks: {
      title: (items) => items.length ? items[0].raw.y : "",
      label: (item) => {
        const [, start, end, kind, label] = own[item.datasetIndex][item.dataIndex];
        const name = chart.kinds[kind].name + (label ? `, ${label}` : "");
        return `${name}: ${readable(start, "seconds")} to ${readable(end, "seconds")}`;
      },
    } };
    return {
      height: 96 + chart.rows.length * (chart.rows.length > 16 ? 17 : 24),
      config: {
        type: "bar",
        data: { labels: chart.rows, datasets },
        options: options({
          indexAxis: "y",
          scales: { x: { ...axis(chart.axis, chart.end, []), min: 0, max: chart.end },
                    y: { grid: { display: false }, border: { color: css("--line") },
                         ticks: { color: css("--ink"), autoSkip: false } } },
          layout: { padding: { right: 14 } },
          plugins: { tooltip },
        }),
        plugins: [passNames(own.map((some) => some.map((one) => one[4])))],
      },
    };
  }

  /** A line of words as several of at most ``most`` characters. */
  function fold(text, most) {
    const lines = [""];
    for (const word of String(text).split(" ")) {
      const longer = lines[lines.length - 1] ? `${lines[lines.length - 1]} ${word}` : word;
      if (longer.length > most && lines[lines.length - 1]) lines.push(word);
      else lines[lines.length - 1] = longer;
    }
    return lines;
  }

  function element(name, className, text) {
    const made = document.createElement(name);
    if (className) made.className = className;
    if (text !== undefined) made.textContent = text;
    return made;
  }

  function mesh(place, chart) {
    const grid = element("div", "mesh");
    for (const box of chart.boxes) {
      const node = element("div", "mesh-box"), cells = element("div", "mesh-cells");
      node.append(element("div", "mesh-name", box.label), cells);
      for (const cell of box.cells) {
        const made = element("div", "mesh-cell", cell.label);
        made.title = cell.detail;
        made.style.setProperty("--tone", `var(--tone-${cell.tone})`);
        cells.append(made);
      }
      grid.append(node);
    }
    const legend = element("div", "mesh-legend");
    for (const one of chart.legend) {
      const made = element("span", "", one.name);
      made.style.setProperty("--tone", `var(--tone-${one.tone})`);
      legend.append(made);
    }
    place.replaceChildren(grid, legend);
  }

  /** The table of a chart, as its Python side has written the figures. */
  function table(chart) {
    const long = chart.table.texts.some((row) => row[0].length > 30);
    const made = element("table", long ? "chart-table long-words" : "chart-table"), head = element("tr"), body = element("tbody");
    for (const column of chart.table.columns) {
      const cell = element("th", column.unit === "words" ? "" : "number", column.name);
      cell.scope = "col";
      head.append(cell);
    }
    for (const row of chart.table.texts) {
      const line = element("tr");
      row.forEach((text, i) => {
        line.append(element("td", chart.table.columns[i].unit === "words" ? "" : "number", text));
      });
      body.append(line);
    }
    const top = element("thead");
    top.append(head);
    made.append(top, body);
    return made;
  }

  /** The error bar of a verdict, and how much of a device's memory it takes. */
  function verdict(place, told) {
    const gauge = (name, end, parts, text) => {
      const row = element("div", "verdict-row"), track = element("div", "verdict-track");
      for (const [className, from, to] of parts) {
        const part = element("div", className);
        part.style.left = `${100 * Math.max(0, from / end)}%`;
        part.style.width = `${100 * Math.min(1, (to - from) / end)}%`;
        track.append(part);
      }
      row.append(element("span", "verdict-name", name), track, element("span", "verdict-text", text));
      return row;
    };
    const { low_seconds: low, high_seconds: high, predicted_seconds: step, floor_seconds: floor } = told;
    const memory = told.memory_bytes, usable = told.usable_bytes, end = high * 1.08;
    place.replaceChildren(
      gauge("step", end, [["verdict-floor", 0, floor], ["verdict-interval", low, high],
                          ["verdict-mark", step, step + end * 0.004]],
            `${seconds(step)}, ${seconds(low)} to ${seconds(high)}; floor ${seconds(floor)}`),
      gauge("memory", Math.max(memory, usable),
            [[told.fit === "does not fit" ? "verdict-over" : "verdict-held", 0, memory]],
            `${READABLE.bytes(memory)} of ${READABLE.bytes(usable)}`));
    place.classList.add("verdict-bars");
  }

  Chart.defaults.font.family = "system-ui, -apple-system, 'Segoe UI', sans-serif";

  // -- drawing --------------------------------------------------------------------------------------------------

  const KINDS = { bars, lines, spans };
  const drawn = new Map(); // place -> { chart, canvas, onPick }

  /** Draws a chart in an element, in place of what was there; ``onPick(series, category)`` is told what was clicked. */
  function draw(place, chart, onPick) {
    erase(place);
    place.classList.add("plot");
    if (chart.kind === "mesh") {
      mesh(place, chart);
      return;
    }
    const { height, config } = KINDS[chart.kind](chart, place.clientWidth);
    const canvas = element("canvas");
    canvas.setAttribute("role", "img");
    canvas.setAttribute("aria-label", `${chart.title}. ${chart.caption} The table has the same figures.`);
    place.style.height = `${height}px`;
    place.replaceChildren(canvas);
    if (onPick) {
      config.options.onClick = (_, picked) => {
        if (picked.length) onPick(picked[0].datasetIndex, picked[0].index);
      };
    }
    drawn.set(place, { chart, onPick, width: place.clientWidth, canvas: new Chart(canvas, config) });
  }

  function erase(place) {
    const known = drawn.get(place);
    if (known) known.canvas.destroy();
    drawn.delete(place);
    place.style.height = "";
    place.replaceChildren();
  }

  function redraw() {
    for (const [place, { chart, onPick }] of [...drawn]) {
      if (place.isConnected) draw(place, chart, onPick);
      else erase(place);
    }
  }

  // Colours are those of the moment: a change of the scheme, and paper, need other ones.
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
  function forPaper(isPaper) {
    document.documentElement.toggleAttribute("data-print", isPaper);
    redraw();
  }
  addEventListener("beforeprint", () => forPaper(true));
  addEventListener("afterprint", () => forPaper(false));
  matchMedia("print").addEventListener("change", (event) => forPaper(event.matches));

  return { draw, erase, readable, redraw, table, verdict };
})();
