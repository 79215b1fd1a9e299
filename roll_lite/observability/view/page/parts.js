"use strict";
// Helpers of the page: elements, numbers, colours, and answers, from the server or, in a report, from the file itself.

const CONTENT = (() => { const at = document.getElementById("content"); return at ? JSON.parse(at.textContent) : null; })();
const COLORS = ["#3b6fb6", "#e07b39", "#3f9b62", "#b5497f", "#8a6bbf", "#a08a3a", "#3a9aa6", "#c0504d", "#7b8794", "#9bb13c"];
const color = number => COLORS[number % COLORS.length];

// Makes an element. Texts become text nodes, never HTML: samples are written by a model.
function h(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (name === "style" || name === "value" || name === "checked") name === "style" ? element.style.cssText = value : element[name] = value;
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(3).filter(child => child !== null && child !== undefined && child !== false));
  return element;
}

function number(value, unit = "") {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (unit === "share") return `${(100 * value).toFixed(1)}%`;
  if (Number.isInteger(value) && Math.abs(value) < 1e9) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(2) : value.toLocaleString("en", { maximumSignificantDigits: 4 });
}

const mean = values => { const known = values.filter(value => Number.isFinite(value)); return known.length ? known.reduce((a, b) => a + b, 0) / known.length : null; };
const words = name => name.replaceAll("_", " ");

function select(label, options, value, change) {
  return h("label", {}, label, Object.assign(h("select", { onchange: event => change(event.target.value) },
    options.map(one => { const [key, text] = Array.isArray(one) ? one : [one, one]; return h("option", { value: key, selected: String(key) === String(value) }, text); })), {}));
}

function download(name, text) {
  const link = h("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// Asks the server: the answer as JSON; an Error with the server's words otherwise.
async function ask(what, given = {}) {
  if (CONTENT) return inside(what, given);
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(given)) for (const one of [value].flat()) if (one !== "" && one !== null && one !== undefined) query.append(name, one);
  const response = await fetch(`api/${what}?${query}`);
  const answer = await response.json();
  if (!response.ok) throw new Error(answer.error);
  return answer;
}

// The same questions, answered from a report's own content.
function inside(what, given) {
  if (what === "runs" || what === "metrics" || what === "config") return CONTENT[what];
  if (what === "series") {
    const chosen = Object.entries(CONTENT.series.values).filter(([name]) => [given.name].flat().some(one => name === one || (one.endsWith("/") && name.startsWith(one))));
    return { steps: CONTENT.series.steps, values: Object.fromEntries(chosen) };
  }
  if (what === "tokens") return CONTENT.tokens[`${given.step} ${given.group}`] || {};
  const of = (record, name) => name === "turns" ? record.episode?.metrics?.turns ?? null : name === "reward" || name === "advantage" ? record.credit?.[name] ?? null
    : name === "correct" ? record.correct === null ? "" : String(record.correct) : record[name] ?? (name === "failure" || name === "finish_reason" ? "" : null);
  const matches = record => Object.entries(given).every(([name, wanted]) => {
    if (name === "part" && wanted) return (record.parts || []).includes(wanted);
    if (wanted === "" || wanted === undefined || ["run", "sort", "start", "count", "by"].includes(name)) return true;
    if (name === "text") return [record.prompt, record.response, JSON.stringify([record.episode?.messages ?? "", record.episode?.branches ?? ""])].join("\n").toLowerCase().includes(wanted.toLowerCase());
    const side = name.slice(-4), value = of(record, name.slice(0, -4));
    if (side === "_min") return value !== null && value >= Number(wanted);
    if (side === "_max") return value !== null && value <= Number(wanted);
    return [wanted].flat().map(String).includes(String(of(record, name)));
  });
  const found = CONTENT.samples.filter(matches);
  if (what === "group") return found;
  if (what === "timeline") {
    const spans = CONTENT.samples.filter(one => one.kind === "step" && one.step === Number(given.step));
    return { phases: CONTENT.phases[given.step] || [], work: [], engines: {}, ...CONTENT.lanes[given.step], spans, processes: CONTENT.processes };
  }
  if (what === "counts") {
    const sums = new Map();
    for (const [record, key] of found.flatMap(record => (given.by === "part" ? record.parts || [] : [of(record, given.by)]).map(key => [record, key]))) {
      const sum = sums.get(key) || { value: key, scores: [], right: [] };
      sums.set(key, sum); sum.scores.push(record.score ?? NaN); sum.right.push(record.correct === null ? NaN : Number(record.correct)); }
    return [...sums.values()].map(one => ({ value: one.value, count: one.scores.length, score: mean(one.scores), correct: mean(one.right) })).sort((a, b) => b.count - a.count);
  }
  const sort = given.sort || "-step", column = sort.replace("-", ""), sign = sort.startsWith("-") ? -1 : 1;
  found.sort((a, b) => sign * ((of(a, column) ?? sign * Infinity) - (of(b, column) ?? sign * Infinity)) || b.step - a.step || a.group - b.group || a.index - b.index);
  const rows = found.slice(Number(given.start || 0)).slice(0, Number(given.count || 50));
  return rows.map(one => ({ ...one, turns: of(one, "turns"), correct: of(one, "correct"), reward: of(one, "reward"), advantage: of(one, "advantage") }));
}
