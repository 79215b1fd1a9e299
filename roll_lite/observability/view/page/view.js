"use strict";
// The views: curves, samples, domains, timeline, settings. The address after # holds what is chosen, so that it can be sent and bookmarked.

const main = document.getElementById("main");
const state = { runs: [], meanings: {}, off: new Set(), cards: null };
const VIEWS = { curves, samples, domains, timeline, settings };
const NAMES = { curves: "Curves", samples: "Samples", domains: "Why a domain moved", timeline: "Timeline", settings: "Settings" };

const chosen = () => new URLSearchParams(location.hash.replace(/^#\w*\??/, ""));
const view = () => location.hash.match(/^#(\w+)/)?.[1] in VIEWS ? location.hash.match(/^#(\w+)/)[1] : "curves";
function go(name, given, keep = false) {
  const all = keep ? Object.fromEntries(chosen()) : chosen().get("run") ? { run: chosen().get("run") } : {};
  const next = Object.fromEntries(Object.entries({ ...all, ...given }).filter(([, value]) => value !== "" && value !== null && value !== undefined));
  const hash = `#${name}?${new URLSearchParams(next)}`;
  if (hash === location.hash) draw(); else location.hash = hash;
}
const run = () => state.runs.find(one => one.name === chosen().get("run")) || state.runs.at(-1);
const shown = () => state.runs.filter(one => !state.off.has(one.name));
const brief = one => { const [kind] = one.name.split("/"); return state.runs.filter(other => other.name.startsWith(`${kind}/`)).length > 1 ? one.name.slice(kind.length + 1) : kind; };
const meaning = name => state.meanings[name.replace(/^domain\/.+?\/(?=[a-z_]+\/[^/]+$)/, "")] || state.meanings[name.replace(/\/[^/]+$/, "")] || { unit: "", description: "" };
const runChoice = name => state.runs.length > 1 && select("Run", state.runs.map(one => one.name), run().name, value => go(name, { run: value }, true));

// ---------------------------------------------------------------- frame

function frame() {
  document.getElementById("tabs").replaceChildren(...Object.keys(VIEWS).map((name, at) =>
    h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-selected": String(view() === name), "aria-controls": "main", tabindex: view() === name ? 0 : -1,
      title: `Key ${at + 1}`, onclick: () => go(name, {}), onkeydown: event => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key], all = Object.keys(VIEWS);
        if (step) { const next = all[(at + step + all.length) % all.length]; go(next, {}); setTimeout(() => document.getElementById(`tab-${next}`).focus()); }
      } }, NAMES[name])));
  document.getElementById("runs").replaceChildren(...state.runs.map((one, at) => {
    const summary = one.summary || {}, overall = summary.accuracy?.overall || {};
    const change = overall.before !== null && overall.before !== undefined ? ` · held-out ${number(overall.before, "share")}${overall.after === null ? "" : ` → ${number(overall.after, "share")}`}` : "";
    const box = state.runs.length > 1 && h("input", { type: "checkbox", checked: !state.off.has(one.name), "aria-label": `Show curves of ${one.name}`,
      onchange: event => { event.target.checked ? state.off.delete(one.name) : state.off.add(one.name); draw(); } });
    const exit = summary.exit || "unknown";
    return h("div", { class: "run", title: exit }, box, h("span", { class: "dot", style: `background:${color(at)}` }), h("b", {}, one.name),
      h("small", {}, one.evaluates ? "evaluation · " : `step ${summary.steps ?? one.steps.at(-1) ?? 0}${one.steps_planned ? ` of ${one.steps_planned}` : ""} · `,
        h("span", { class: /^(failed|unreadable)/.test(exit) ? "bad" : "" }, exit.slice(0, 60)), change, summary.warnings?.length ? h("span", { class: "bad", title: summary.warnings.map(w => w.message).join("\n") }, ` · ${summary.warnings.map(w => words(w.sign)).join(", ")}`) : ""));
  }));
  const waiting = state.runs.reduce((sum, one) => sum + (one.waiting || 0), 0), running = state.runs.some(one => one.summary?.exit === "running");
  const live = document.getElementById("live");
  live.textContent = CONTENT ? "report" : waiting ? `indexing: ${waiting} files of samples left` : running ? "live" : "";
  live.classList.toggle("on", !CONTENT && running);
}

let drawing = 0, whole = Promise.resolve();
// Draws the view. `live`: only what the run adds, after the whole view is drawn.
async function draw(live = false) {
  if (!live) return whole = drawNow(false);
  for (let last; last !== whole;) await (last = whole);
  return drawNow(true);
}

async function drawNow(live) {
  const ticket = ++drawing, name = view();
  frame();
  main.setAttribute("aria-labelledby", `tab-${name}`);
  try {
    await VIEWS[name](live, () => ticket === drawing);
  } catch (error) {
    if (ticket === drawing) main.replaceChildren(h("p", { class: "error", role: "alert" }, error.message));
  }
}

// ---------------------------------------------------------------- curves

const PANELS = [["validation/accuracy"], ["reward/accuracy"], ["reward/mean"], ["rollout/response_length"], ["rollout/truncated"], ["actor/entropy"],
  ["mismatch/mean"], ["actor/grad_norm"], ["actor/approx_kl"], ["rollout/staleness"], ["time/step"], ["rollout/tokens_per_second"]];

async function curves(live, current) {
  const there = new Set(shown().flatMap(one => one.metrics)), given = chosen();
  state.cards ||= PANELS.map(([name]) => name);
  const by = given.get("domain") ?? "*", smooth = Number(given.get("smooth") || 0);
  const domainsOf = one => by === "*" ? [...(one.domains.length > 1 ? [""] : []), ...one.domains] : [by === "-" ? "" : by];
  const nameOf = (metric, domain) => domain && there.has(`domain/${domain}/${metric}`) ? `domain/${domain}/${metric}` : domain && by === "*" ? null : metric;
  const cards = state.cards.filter(name => there.has(name) || [...there].some(one => one.endsWith(`/${name}`)));
  const answers = await Promise.all(shown().map(one => ask("series", { run: one.name, name: [...new Set(cards.flatMap(metric => domainsOf(one).map(domain => nameOf(metric, domain)).filter(Boolean)))] })));
  if (!current()) return;
  const scroll = scrollY, focused = document.activeElement?.id;
  const all = [...new Set(shown().flatMap(one => one.domains))];
  const bar = h("div", { class: "bar" },
    select("Domains", [["*", "each and all"], ["-", "all together"], ...all.map(one => [one, one])], by, value => go("curves", { domain: value === "*" ? "" : value }, true)),
    h("label", {}, "Smoothing", h("input", { type: "range", min: 0, max: 20, value: smooth, id: "smooth", onchange: event => go("curves", { smooth: event.target.value === "0" ? "" : event.target.value }, true) })),
    h("label", {}, "Add a metric", h("input", { list: "metrics", id: "add", placeholder: "reward/std", onchange: event => {
      if (event.target.value && !state.cards.includes(event.target.value)) { state.cards.unshift(event.target.value); draw(); } } })),
    h("datalist", { id: "metrics" }, [...new Set([...there].filter(one => !one.startsWith("domain/")))].map(one => h("option", { value: one }))));
  const grid = h("div", { class: "grid" });
  const old = live && main.querySelector(".grid");
  if (old) old.replaceWith(grid); else main.replaceChildren(bar, grid);
  if (!cards.length) grid.append(h("p", { class: "empty" }, "No metrics yet: they appear after the first step."));
  for (const metric of cards) {
    const lines = shown().flatMap((one, at) => domainsOf(one).map((domain, place) => {
      const name = nameOf(metric, domain), values = name && answers[at].values[name];
      if (!values) return null;
      const several = shown().length > 1, whole = several || !one.domains.length || !domain;
      return { label: [several && brief(one), domain || (several && by !== "*" ? "" : "all")].filter(Boolean).join(" · "), steps: answers[at].steps, values, width: whole && !domain ? 2.4 : 1.4,
        stroke: several ? color(state.runs.indexOf(one)) : domain ? color(place - (one.domains.length > 1 && by === "*" ? 1 : 0)) : "", dash: several && domain ? [2 + 3 * place, 3] : [] };
    })).filter(Boolean);
    if (!lines.some(line => line.values.some(value => value !== null))) continue;
    const { unit, description: text } = meaning(metric), place = h("div", {});
    grid.append(h("section", { class: "card", "aria-label": `Curve of ${metric}` }, h("div", { class: "top" }, h("h2", {}, metric, unit && h("span", { class: "soft" }, ` (${unit})`)),
      h("button", { type: "button", "aria-label": `Remove ${metric}`, title: "Remove", onclick: () => { state.cards = state.cards.filter(one => one !== metric); draw(); } }, "×")), h("p", {}, text), place));
    plot(place, lines, unit, smooth);
  }
  scrollTo(0, scroll);
  if (focused) document.getElementById(focused)?.focus();
}

function plot(place, lines, unit, smooth) {
  const steps = [...new Set(lines.flatMap(line => line.steps))].sort((a, b) => a - b), at = new Map(steps.map((step, index) => [step, index]));
  const data = lines.map(line => {
    const column = Array(steps.length).fill(null);
    line.steps.forEach((step, index) => { column[at.get(step)] = line.values[index]; });
    return smooth ? column.map((value, index) => value === null ? null : mean(column.slice(Math.max(0, index - smooth), index + smooth + 1))) : column;
  });
  const style = getComputedStyle(document.documentElement), ink = getComputedStyle(main).color, grid = { stroke: style.colorScheme && getComputedStyle(main.querySelector(".card")).borderTopColor, width: 1 };
  const axis = { stroke: ink, grid, ticks: grid, font: "11px system-ui", labelFont: "11px system-ui" };
  const width = Math.max(260, place.clientWidth);
  new uPlot({ width, height: 190, cursor: { sync: { key: "steps" }, drag: { x: true, y: false } }, scales: { x: { time: false }, y: unit === "share" ? { range: (_, low, high) => [Math.max(0, low - 0.03), Math.min(1, high + 0.03) || 1] } : {} },
    axes: [{ ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000] }, { ...axis, size: 54, values: (_, ticks) => ticks.map(value => number(value, unit)) }],
    series: [{ label: "step" }, ...lines.map((line, index) => ({ label: line.label || "value", stroke: line.stroke || ink, width: line.width, dash: line.dash, spanGaps: true, points: { show: data[index].filter(value => value !== null).length < 30, size: 5 }, value: (_, value) => number(value, unit) }))] },
  [steps, ...data], place);
  const ends = lines.map((line, index) => { const known = data[index].filter(value => value !== null); return `${line.label || "value"} from ${number(known[0], unit)} to ${number(known.at(-1), unit)}`; });
  place.setAttribute("role", "img");
  place.setAttribute("aria-label", ends.join("; "));
}

// ---------------------------------------------------------------- samples

const PAIRS = [["step", "Step"], ["score", "Score"], ["response_tokens", "Tokens"]];
const COUNT = 100;
// Counts over all samples of a run: they do not depend on the filter.
const facetsOf = name => Promise.all(["domain", "outcome", "finish_reason", "failure", "part"].map(by => ask("counts", { run: name, by })));

async function samples(live, current) {
  const given = chosen(), one = run();
  if (!one) return main.replaceChildren(h("p", { class: "empty" }, "No run."));
  const filter = Object.fromEntries([...given].filter(([name]) => !["run", "at", "colour", "more"].includes(name)));
  const count = COUNT * Number(given.get("more") || 1), question = { ...filter, run: one.name };
  const known = state.facets?.run === one.name, began = performance.now();
  let took = 0;
  const list = ask("samples", { ...question, count }).then(rows => { took = performance.now() - began; return rows; });
  const choices = h("span", { style: "display:contents" });
  const set = name => event => go("samples", { [name]: event.target.value, at: "", more: "" }, true);
  const pick = (label, name, options) => select(label, [["", "any"], ...options], given.get(name) || "", value => go("samples", { [name]: value, at: "", more: "" }, true));
  const options = facet => facet.filter(item => item.value !== "").map(item => [item.value, `${item.value.slice(0, 70)} (${number(item.count)})`]);
  const offer = facets => choices.replaceChildren(...[pick("Domain", "domain", options(facets[0])), facets[1].length > 1 && pick("Outcome", "outcome", options(facets[1])), pick("End", "finish_reason", options(facets[2])),
    options(facets[3]).length > 0 && pick("Failure", "failure", options(facets[3])), options(facets[4]).length > 0 && pick("Part", "part", options(facets[4]))].filter(Boolean));
  if (known) offer(state.facets.counts);
  // The list does not wait for these counts; on a small machine they would slow it.
  if (!known || live) list.then(() => facetsOf(one.name)).then(counts => { state.facets = { run: one.name, counts }; if (!known) offer(counts); }, () => {});
  const found = await list;
  if (!current()) return;
  const table = sampleTable(found, given, count);
  const told = h("p", { class: "soft", id: "found", role: "status" }, live ? document.getElementById("found")?.textContent : `the first ${found.length} of …`);
  const tell = () => ask("counts", { ...question, by: "kind" }).then(counts => { told.textContent = `${number(counts.reduce((sum, one) => sum + one.count, 0))} samples · ${took.toFixed(0)} ms${CONTENT ? " · a report holds some samples of some steps" : ""}`; }, () => {});
  if (live && document.getElementById("found")) {
    document.getElementById("found").replaceWith(told);
    const list = main.querySelector(".list"), top = list.scrollTop, focused = list.contains(document.activeElement);
    list.replaceWith(table); table.scrollTop = top;
    if (focused) table.querySelector("[aria-selected=true]")?.focus();
    return tell();
  }
  const bar = h("form", { class: "bar", role: "search", "aria-label": "Filter samples", onsubmit: event => event.preventDefault() }, runChoice("samples"),
    h("label", {}, "Text", h("input", { type: "search", id: "search", value: given.get("text") || "", placeholder: "in prompt, response, turns   /", onchange: set("text") })),
    choices, pick("Of", "kind", [["step", "training"], ["validation", "validation"]]), pick("Correct", "correct", [["true", "yes"], ["false", "no"]]),
    PAIRS.map(([name, label]) => h("div", { class: "field" }, label, h("span", { class: "pair" }, ["min", "max"].map(side => h("input", { type: "number", step: "any", "aria-label": `${label}, ${side === "min" ? "from" : "to"}`, placeholder: side === "min" ? "from" : "to", value: given.get(`${name}_${side}`) || "", onchange: set(`${name}_${side}`) }))))),
    select("Order", [["-step", "newest"], ["step", "oldest"], ["-score", "highest score"], ["score", "lowest score"], ["-response_tokens", "longest"], ["response_tokens", "shortest"], ["-advantage", "largest advantage"], ["advantage", "smallest advantage"], ["-turns", "most turns"]], given.get("sort") || "-step", value => go("samples", { sort: value }, true)),
    h("button", { type: "button", onclick: () => { location.hash = `#samples?${new URLSearchParams({ run: one.name })}`; } }, "Clear"));
  const detail = h("section", { id: "detail", "aria-label": "Group of samples" });
  const active = document.activeElement?.id;
  main.replaceChildren(bar, told, h("div", { class: "split" }, table, detail));
  if (active === "search") document.getElementById("search").focus();
  await new Promise(done => requestAnimationFrame(() => setTimeout(done)));  // the list is painted: to count takes all of a small machine
  if (!current()) return;
  tell();
  const at = given.get("at") || (found[0] && place(found[0]));
  if (at) await group(at, current); else detail.append(h("p", { class: "empty" }, "No sample matches. Clear the filter, or wait until samples are indexed."));
}

const place = row => `${row.kind} ${row.step} ${row.group} ${row.index}`;

function sampleTable(found, given, count) {
  const at = given.get("at") || (found[0] && place(found[0]));
  const body = h("tbody", {}, found.map(row => h("tr", { tabindex: place(row) === at ? 0 : -1, "aria-selected": String(place(row) === at), "data-at": place(row), onclick: event => choose(event.currentTarget),
    onkeydown: event => { const next = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key]; if (next) { event.preventDefault(); choose(event.currentTarget[next]); } if (event.key === "Enter") choose(event.currentTarget); } },
  h("td", { class: "n" }, row.kind === "validation" ? `v${row.step}` : row.step), h("td", {}, row.domain), h("td", { class: `n ${mark(row.correct)}` }, number(row.score)), h("td", { class: "n" }, number(row.response_tokens)),
  h("td", { class: "n" }, number(row.advantage)), h("td", { class: "cut" }, row.failure ? h("span", { class: "bad" }, row.failure) : row.response.slice(0, 160)))));
  const more = found.length === count && h("button", { type: "button", onclick: () => go("samples", { more: count / COUNT + 1 }, true) }, `Show ${COUNT} more`);
  return h("div", { class: "card list", role: "region", "aria-label": "Samples", tabindex: -1 }, h("table", { "aria-label": "Samples; arrow keys move, the group is shown beside" }, h("thead", {}, h("tr", {}, ["step", "domain", "score", "tokens", "adv.", "response"].map((name, index) => h("th", { scope: "col", class: [0, 2, 3, 4].includes(index) ? "n" : "" }, name)))), body), more);
}
const mark = correct => correct === "true" || correct === true ? "good" : correct === "false" || correct === false ? "bad" : "";

function choose(row) {
  if (!row?.dataset?.at) return;
  for (const other of row.parentElement.children) { other.setAttribute("aria-selected", String(other === row)); other.tabIndex = other === row ? 0 : -1; }
  row.focus(); row.scrollIntoView({ block: "nearest" });
  const given = chosen(); given.set("at", row.dataset.at);
  history.replaceState(null, "", `#samples?${given}`);
  group(row.dataset.at, () => chosen().get("at") === row.dataset.at);
}

async function group(at, current = () => true) {
  const [kind, step, number_, index] = at.split(" ");
  const [records, tokens] = await Promise.all([ask("group", { run: run().name, kind, step, group: number_ }), kind === "step" ? ask("tokens", { run: run().name, step, group: number_ }) : {}]);
  const detail = document.getElementById("detail");
  if (!current() || !detail) return;
  if (!records.length) return detail.replaceChildren(h("p", { class: "empty" }, "The file of this step is gone: the run went back to a checkpoint."));
  const modes = ["text", ...Object.keys(MODES).filter(mode => records.some(record => tokens[record.index]?.some(row => MODES[mode].there(row, record))))];
  const mode = modes.includes(chosen().get("colour")) ? chosen().get("colour") : "text";
  const scores = records.map(one => one.score);
  const columns = h("div", { class: "group", tabindex: 0, role: "group", "aria-label": "Samples of the group, side by side" }, records.map(record => card(record, tokens[record.index], mode, String(record.index) === index)));
  detail.replaceChildren(h("div", { class: "card", style: "margin-bottom:10px" }, h("div", { class: "top" }, h("h2", {}, `${records[0].domain} · step ${step} · group ${number_}`),
    select("Colour tokens by", modes.map(one => [one, one === "text" ? "nothing" : MODES[one].label]), mode, value => { const given = chosen(); given.set("colour", value); given.set("at", at); history.replaceState(null, "", `#samples?${given}`); group(at); })),
  h("div", { class: "soft" }, `mean score ${number(mean(scores))} · ${records.filter(one => one.correct).length} of ${records.length} correct · prompt ${records[0].prompt_uid}, epoch ${records[0].epoch} · reference answer `, h("span", { class: "mono" }, typeof records[0].answer === "string" ? records[0].answer : JSON.stringify(records[0].answer))),
  mode !== "text" && scale(mode, Object.values(tokens).flat(), records),
  h("h3", { style: "margin-top:8px" }, "Prompt"), h("div", { class: "text" }, records[0].prompt)), columns);
  const own = columns.querySelector("[aria-current=true]");  // the filters stay where they are
  if (own) columns.scrollLeft = own.offsetLeft - columns.offsetLeft - (columns.clientWidth - own.clientWidth) / 2;
}

function card(record, rows, mode, isChosen) {
  const pairs = Object.entries({ "end": record.finish_reason, "outcome": record.outcome, "failure": record.failure, "format": record.format_ok === null ? null : record.format_ok ? "right" : "wrong", "tokens": record.response_tokens,
    "attempts before": record.attempt || null, "shaped reward": record.credit?.reward, "advantage": record.credit?.advantage, "weight": record.credit?.train_weight, "versions": versions(record).join(", "),
    "generation, s": record.generated_at && record.asked_at ? record.generated_at - record.asked_at : null, "reward, s": record.scored_at && record.generated_at ? record.scored_at - record.generated_at : null });
  const shownOf = value => typeof value === "number" ? number(value) : typeof value === "string" ? value : JSON.stringify(value);
  const list = (title, entries) => entries.length > 0 && [title && h("h3", {}, title), h("dl", {}, entries.map(([name, value]) => [h("dt", {}, words(name)), h("dd", { class: name === "failure" ? "bad" : "" }, shownOf(value))]))];
  const body = mode !== "text" && rows ? rows.map(row => strip(row, mode, record, rows)) : record.episode?.messages?.length ? turns(record.episode) : h("div", { class: "text" }, record.response || h("span", { class: "soft" }, "(no response)"));
  return h("article", { class: "card sample", "aria-current": String(isChosen), "aria-label": `Sample ${record.index}, score ${number(record.score)}` },
    h("div", { class: "top" }, h("h3", {}, `#${record.index}${record.baseline ? " (greedy)" : ""}`), h("b", { class: mark(record.correct) }, `${number(record.score)}${record.correct === null ? "" : record.correct ? " ✓" : " ✗"}`)), body,
    list("Terms of the score", Object.entries(record.terms || {})), list("What the reward says", Object.entries(record.details || {})), list("", pairs_(pairs)), list("Metrics of the episode", Object.entries(record.episode?.metrics || {})), list("Data", Object.entries(record.columns || {})));
}
const pairs_ = entries => entries.filter(([, value]) => value !== null && value !== undefined && value !== "");
// Weight versions of a record's training rows; the first row has branch 0.
const spansOf = (record, branch) => branch ? record.branch_versions?.[branch - 1] : record.versions;
const versions = record => [...new Set([record.versions, ...(record.branch_versions || [])].flatMap(spans => (spans || []).map(([, version]) => version)))];

function turns(episode) {
  let turn = (episode.rewards?.length ?? 0) - episode.messages.filter(message => message.role === "assistant").length;  // the prompt may contain assistant messages
  const reward = () => { const own = episode.branches?.length ? undefined : episode.rewards?.[turn]; turn += 1; return own === undefined ? "" : ` · reward ${number(own)}`; };
  const all = [...(episode.branches || []), episode.messages];
  return all.map((messages, place) => [all.length > 1 && h("h3", {}, `Conversation ${place + 1} of ${all.length}${place + 1 === all.length ? ", with the last response" : ""}`), messages.map(message => h("div", { class: `turn ${["assistant", "tool"].includes(message.role) ? message.role : "other"}` },
    h("b", {}, message.role, message.role === "assistant" && reward()),
    message.content && h("div", { class: "text" }, typeof message.content === "string" ? message.content : JSON.stringify(message.content, null, 1)),
    (message.tool_calls || []).map(call => h("div", { class: "call text" }, `⚙ ${call.function?.name ?? call.name ?? "tool"} `, argument(call.function?.arguments ?? call.arguments ?? call)))))]);
}
const argument = value => typeof value === "string" ? value : JSON.stringify(value);

// Numbers of a row's tokens, and how they are coloured.
const from = (row, a, b) => row[a] && row[b] ? row[a].map((value, index) => value === null ? null : value - row[b][index]) : null;
const MODES = {
  logprob: { label: "log-prob of the engine", there: row => row.rollout_log_probs, of: row => row.rollout_log_probs, one: true },
  advantage: { label: "advantage", there: row => row.advantages, of: row => row.advantages },
  difference: { label: "engine − trainer", there: row => row.old_log_probs && row.rollout_log_probs, of: row => from(row, "rollout_log_probs", "old_log_probs") },
  reference: { label: "policy − reference", there: row => row.ref_log_probs && row.rollout_log_probs, of: row => from(row, "rollout_log_probs", "ref_log_probs") },
  value: { label: "value of the critic", there: row => row.values, of: row => row.values },
  version: { label: "weight version", there: (row, record) => spansOf(record, row.branch)?.length, of: (row, record) => {
    const spans = spansOf(record, row.branch) || [];
    return row.texts.map((_, index) => spans.findLast(([start]) => start <= index - row.prompt_length)?.[1] ?? null); }, kinds: true },
};
const numbersOf = (row, mode, record) => { const all = MODES[mode].of(row, record); return all && row.texts.map((_, index) => row.chosen[index] ? all[index] ?? null : null); };
function paint(value, mode, most) {
  if (value === null || !Number.isFinite(value)) return "";
  if (MODES[mode].kinds) return `background:${color(value)}55`;
  const share = Math.min(1, Math.abs(value) / (most || 1));
  return `background:color-mix(in srgb, ${MODES[mode].one || value < 0 ? "#e0503f" : "#2f9e5b"} ${Math.round(72 * share)}%, transparent)`;
}
const largest = (rows, mode, record) => rows.flatMap(row => numbersOf(row, mode, record) || []).reduce((most, value) => value === null ? most : Math.max(most, Math.abs(value)), 0);

function strip(row, mode, record, rows) {
  const numbers = numbersOf(row, mode, record) || [], most = state.most = largest(rows, mode, record);
  return [rows.length > 1 && h("h3", {}, `Training row ${row.branch + 1} of ${rows.length}`), !MODES[mode].there(row, record) && h("p", { class: "soft" }, `${MODES[mode].label}: not recorded for this row`),
    h("div", { class: "text tokens" }, row.texts.map((text, index) => h("span", { class: row.chosen[index] ? "" : "given", style: paint(numbers[index], mode, most),
    title: Object.entries(MODES).filter(([one]) => MODES[one].there(row, record)).map(([one, { label, of }]) => `${label}: ${row.chosen[index] ? number(of(row, record)[index]) : "–"}`).join("\n") }, text)))];
}

function scale(mode, rows, records) {
  if (MODES[mode].kinds) return h("div", { class: "scale" }, [...new Set(records.flatMap(versions))].sort((a, b) => a - b).map(version => [h("i", { style: `background:${color(version)}55;width:14px` }), `version ${version}`]));
  return h("div", { class: "scale" }, MODES[mode].one ? "0" : "low", h("i", { style: `background:linear-gradient(90deg, ${MODES[mode].one ? "transparent, #e0503f" : "#e0503f, transparent, #2f9e5b"})` }), MODES[mode].one ? "unlikely" : "high", " (of each sample's largest; a token's numbers are in its tooltip; faded tokens are not the policy's)");
}

// ---------------------------------------------------------------- why a domain moved

const SECTIONS = [
  ["Score", ["reward/accuracy", "reward/mean", "reward/std", "reward/shaped", "validation/accuracy"]],
  ["Components of the score", /reward\/term$/],
  ["Groups by their share of correct samples", /^solved\//],
  ["Mix: asked for and got", ["rollout/requested", "rollout/groups", "rollout/share_requested", "rollout/share_realised", "rollout/share_tokens", "rollout/epoch"]],
  ["Filter and masks", /^(rollout\/(filtered|stale)_|masks\/|reward\/flat_groups)/],
  ["Failures", /^rollout\/(failed|retries|lost_groups|timed_out_groups)$|workers_replaced$/],
  ["Length and truncation", /^rollout\/(response_length|truncated)/],
  ["Episodes", /^episode\//],
  ["Policy", /^(actor\/(entropy|approx_kl|ratio|kl_ref|clip)|mismatch\/(mean|max)|credit\/(advantage_std|kl))/],
];

async function domains(live, current) {
  const one = run(), given = chosen();
  if (!one?.steps.length) return main.replaceChildren(h("p", { class: "empty" }, "No step yet."));
  const domain = given.get("domain") || one.domains[0], steps = one.steps, span = Math.max(1, Math.round(steps.length / 10));
  const read = (name, fallback) => given.get(name) ? given.get(name).split("-").map(Number) : fallback;
  const [a1, a2 = a1] = read("a", [steps[0], steps[span - 1]]), [b1, b2 = b1] = read("b", [steps.at(-span), steps.at(-1)]);
  const prefix = `domain/${domain}/`, filters = [[a1, a2], [b1, b2]].map(([low, high]) => ({ run: one.name, domain, kind: "step", step_min: low, step_max: high }));
  const counted = by => Promise.all(filters.map(filter => ask("counts", { ...filter, by })));
  const [series, every, failures, ends, prompts] = await Promise.all([ask("series", { run: one.name, name: [prefix] }),
    ask("series", { run: one.name, name: one.domains.flatMap(name => [`domain/${name}/reward/mean`, `domain/${name}/rollout/samples`]) }), counted("failure"), counted("finish_reason"), counted("prompt_uid")]);
  if (!current()) return;
  const average = (from, name, low, high) => mean((from.values[name] || []).filter((_, index) => from.steps[index] >= low && from.steps[index] <= high).map(value => value ?? NaN));
  const pair = name => [average(series, name, a1, a2), average(series, name, b1, b2)];
  const names = Object.keys(series.values), used = new Set();
  const rows = SECTIONS.map(([title, wanted]) => [title, names.filter(name => { const short = name.slice(prefix.length); return !used.has(name) && (Array.isArray(wanted) ? wanted.includes(short) : wanted.test(short)) && used.add(name); })]);
  const bar = h("div", { class: "bar" }, runChoice("domains"), select("Domain", one.domains, domain, value => go("domains", { domain: value }, true)),
    [["a", "Before", [a1, a2]], ["b", "After", [b1, b2]]].map(([name, label, [low, high]]) => h("label", {}, `${label}: step or steps`, h("input", { size: 10, value: low === high ? low : `${low}-${high}`, pattern: "\\d+(-\\d+)?", onchange: event => go("domains", { [name]: event.target.value.replaceAll(" ", "") }, true) }))),
    filters.map((filter, at) => h("button", { type: "button", onclick: () => go("samples", { domain, kind: "step", step_min: filter.step_min, step_max: filter.step_max }) }, `Samples ${at ? "after" : "before"}`)));
  const notes = findings(domain, pair, prefix, names, prompts, one, every, average, [a1, a2, b1, b2]);
  const line = (label, [before, after], unit, text) => {
    const change = before !== null && after !== null ? after - before : null, size = change === null ? 0 : Math.min(1, Math.abs(change) / (Math.max(Math.abs(before), Math.abs(after)) || 1));
    return h("tr", {}, h("td", { title: text }, label), h("td", { class: "n" }, number(before, unit)), h("td", { class: "n" }, number(after, unit)), h("td", { class: "n" }, change === null ? "–" : `${change > 0 ? "+" : ""}${number(change, unit)}`),
      h("td", {}, h("span", { class: "meter", "aria-hidden": "true", style: `width:${Math.round(44 * size)}px;background:var(${change < 0 ? "--down" : "--up"})` })));
  };
  const table = (title, lines) => lines.length > 0 && h("section", { class: "card", "aria-label": title }, h("h2", {}, title), h("table", {}, h("thead", {}, h("tr", {}, ["", "before", "after", "change", ""].map((name, at) => h("th", { scope: "col", class: at && at < 4 ? "n" : "" }, name)))), h("tbody", {}, lines)));
  const ofCounts = counts => [...new Set(counts.flat().map(item => item.value))].filter(value => value !== "").map(value => { const of = counts.map(list => { const item = list.find(one => one.value === value); return item ? item.count / list.reduce((sum, one) => sum + one.count, 0) : 0; }); return line(value.slice(0, 160), of, "share"); });
  main.replaceChildren(bar, h("section", { class: "card", style: "margin-bottom:12px", "aria-label": "What stands out" }, h("h2", {}, `${domain}: what stands out`), h("ul", { class: "notes" }, notes.map(note => h("li", {}, note)))),
    h("div", { class: "grid" }, rows.map(([title, of]) => table(title, of.map(name => { const short = name.slice(prefix.length), { unit, description: text } = meaning(name); return line(short, pair(name), unit, text); }))),
      table("Causes of failure (share of samples)", ofCounts(failures)), table("Ends of responses (share of samples)", ofCounts(ends)), moved(prompts, domain, filters)));
}

function findings(domain, pair, prefix, names, prompts, one, every, average, [a1, a2, b1, b2]) {
  const notes = [], say = (text, value) => notes.push(h("span", {}, text, value && h("b", {}, value))), signed = value => `${value > 0 ? "+" : ""}${number(value)}`;
  const [score0, score1] = pair(`${prefix}reward/mean`);
  if (score0 !== null && score1 !== null) {
    say(`Mean score ${number(score0)} → ${number(score1)}: `, signed(score1 - score0));
    for (const name of names.filter(name => name.endsWith("/reward/term"))) { const [x, y] = pair(name); if (x !== null && y !== null && x !== y) say(`Term ${name.slice(prefix.length, -12)} contributes `, signed(y - x)); }
  }
  const by = prompts.map(list => new Map(list.filter(item => item.score !== null).map(item => [item.value, item])));
  const both = [...by[0].keys()].filter(key => by[1].has(key));
  if (both.length) say(`On the ${both.length} prompts that both have: `, signed(mean(both.map(key => by[1].get(key).score)) - mean(both.map(key => by[0].get(key).score))));
  else say("No prompt is in both: part of the change may be other, easier or harder prompts.");
  for (const [name, text] of [["rollout/truncated", "Share of responses cut at max_tokens"], ["reward/flat_groups", "Share of groups with equal rewards, without advantage"], ["masks/samples", "Share of samples that do not train"]]) {
    const [x, y] = pair(prefix + name); if (x !== null && y !== null && Math.abs(y - x) > 0.03) say(`${text}: `, `${number(x, "share")} → ${number(y, "share")}`); }
  const [f0, f1] = pair(`${prefix}rollout/failed`); if (f0 || f1) say("Failed samples per step: ", `${number(f0)} → ${number(f1)}`);
  const [l0, l1] = pair(`${prefix}rollout/response_length`); if (l0 && l1 && Math.abs(l1 / l0 - 1) > 0.15) say("Response length: ", `${number(l0)} → ${number(l1)} tokens`);
  const at = (name, low, high) => [average(every, `domain/${name}/reward/mean`, low, high), average(every, `domain/${name}/rollout/samples`, low, high) || 0];
  const before = one.domains.map(name => at(name, a1, a2)), after = one.domains.map(name => at(name, b1, b2)), total = list => list.reduce((sum, [, n]) => sum + n, 0);
  if (one.domains.length > 1 && total(before) && total(after)) {
    const mix = one.domains.reduce((sum, _, i) => sum + (after[i][1] / total(after) - before[i][1] / total(before)) * ((before[i][0] ?? after[i][0] ?? 0) + (after[i][0] ?? before[i][0] ?? 0)) / 2, 0);
    const inner = one.domains.reduce((sum, _, i) => sum + (after[i][1] / total(after) + before[i][1] / total(before)) / 2 * ((after[i][0] ?? before[i][0] ?? 0) - (before[i][0] ?? after[i][0] ?? 0)), 0);
    say("Mean score over all domains: ", `${signed(inner)} within domains, ${signed(mix)} by another mix`);
  }
  return notes;
}

function moved(prompts, domain, filters) {
  const [before, after] = prompts.map(list => new Map(list.map(item => [item.value, item])));
  const both = [...before.keys()].filter(key => after.has(key) && before.get(key).score !== null && after.get(key).score !== null).map(key => ({ key, x: before.get(key).score, y: after.get(key).score })).sort((a, b) => Math.abs(b.y - b.x) - Math.abs(a.y - a.x)).slice(0, 12);
  return both.length > 0 && h("section", { class: "card", "aria-label": "Prompts that moved most" }, h("h2", {}, "Prompts that moved most"), h("table", {}, h("thead", {}, h("tr", {}, ["prompt", "before", "after", "change"].map((name, at) => h("th", { scope: "col", class: at ? "n" : "" }, name)))),
    h("tbody", {}, both.map(({ key, x, y }) => h("tr", {}, h("td", {}, h("a", { href: `#samples?${new URLSearchParams({ run: run().name, domain, prompt_uid_min: key, prompt_uid_max: key, sort: "step" })}` }, `prompt ${key}`)), h("td", { class: "n" }, number(x)), h("td", { class: "n" }, number(y)), h("td", { class: `n ${y < x ? "bad" : y > x ? "good" : ""}` }, `${y > x ? "+" : ""}${number(y - x)}`))))));
}

// ---------------------------------------------------------------- timeline

async function timeline(live, current) {
  const one = run(), given = chosen();
  if (!one?.steps.length) return main.replaceChildren(h("p", { class: "empty" }, "No step yet."));
  const step = Number(given.get("step") || one.steps.at(-1));
  if (live && main.querySelector("canvas.time") && given.get("step") && state.spans) return;
  const found = await ask("timeline", { run: one.name, step });
  if (!current()) return;
  state.spans = found.spans.length;
  const lanes = lanesOf(found, one.domains), bars = lanes.flatMap(lane => lane.bars);
  const move = by => { const at = one.steps.indexOf(step) + by; if (one.steps[at] !== undefined) go("timeline", { step: one.steps[at] }, true); };
  const bar = h("div", { class: "bar" }, runChoice("timeline"), h("button", { type: "button", "aria-label": "Step before", onclick: () => move(-1) }, "←"),
    select("Step", one.steps, step, value => go("timeline", { step: value }, true)), h("button", { type: "button", "aria-label": "Step after", onclick: () => move(1) }, "→"),
    h("button", { type: "button", id: "fit", onclick: () => picture.fit() }, "Whole step"), h("button", { type: "button", id: "perfetto", onclick: () => download(`${one.name.replaceAll("/", "_")}_step_${step}.json`, JSON.stringify(trace(lanes))) }, "Save for Perfetto"),
    one.domains.map((name, at) => h("span", { class: "scale" }, h("i", { class: "dot", style: `background:${color(at)};width:10px` }), name)));
  const canvas = h("canvas", { class: "time", tabindex: 0, role: "img", "aria-label": `Step ${step}: ${found.phases.filter(([name]) => !name.includes("/")).map(([name, s]) => `${words(name)} ${number(s)} seconds`).join(", ")}; ${found.spans.length} samples` });
  const told = h("p", { class: "soft", role: "status" }, "Wheel or + and − zoom, drag or arrow keys move; the pointer shows what a bar is.");
  const table = h("details", { class: "card", style: "margin-top:12px" }, h("summary", {}, "As a table"), h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "phase"), h("th", { scope: "col", class: "n" }, "seconds"))), h("tbody", {}, found.phases.map(([name, s]) => h("tr", {}, h("td", {}, words(name)), h("td", { class: "n" }, number(s)))))));
  main.replaceChildren(bar, h("div", { class: "card" }, canvas, told), table);
  if (!bars.length) told.textContent = "Nothing was timed in this step.";
  const picture = new Picture(canvas, lanes, told);
}

const PHASES = ["#4c78a8", "#f2a65a", "#72b7a1", "#c66b6b", "#9d86b8", "#d9c36a", "#7f9fbf", "#b98b6b"];

// Lanes of bars {name, start, end, color}. Without spans of the driver (older runs, most steps of a report) its phases follow one another, so that generation ends with the last score.
function lanesOf(found, names) {
  const spans = found.spans.filter(one => one.asked_at && one.generated_at).map(one => ({ ...one, engine: found.engines[one.group]?.[one.index] ?? null }));
  const outer = found.phases.filter(([name]) => !name.includes("/") && name !== "step"), before = outer.slice(0, outer.findIndex(([name]) => name === "generate") + 1).reduce((sum, [, s]) => sum + s, 0);
  const scored = Math.max(...spans.map(one => one.scored_at ?? one.generated_at)), zero = found.work.length ? found.work[0][1] : spans.length ? scored - before : 0;
  const driver = [], inner = [], ranks = {}; let clock = 0;
  const order = outer.map(([name]) => name), shade = (name, more = "") => PHASES[Math.max(0, order.indexOf(name)) % PHASES.length] + more;
  for (const [name, start, s, role, rank] of found.work.slice(1)) {
    const bar = { start: start - zero, end: start - zero + s };
    if (role) (ranks[`${role} ${rank}`] ||= []).push({ ...bar, name: words(name.slice(name.indexOf(" ") + 1)), color: shade(name.slice(name.indexOf(" ") + 1), "cc") });
    else if (name.includes("/")) inner.push({ ...bar, name: words(name.slice(name.indexOf("/") + 1)), color: shade(name.split("/")[0], "aa") });
    else driver.push({ ...bar, name: words(name), color: shade(name) });
  }
  if (!found.work.length) for (const [name, s] of outer) {
    driver.push({ name: words(name), start: clock, end: clock + s, color: shade(name) }); let from = clock;
    for (const [path, part] of found.phases.filter(([path]) => path.startsWith(`${name}/`))) { inner.push({ name: words(path.slice(name.length + 1)), start: from, end: from + part, color: shade(name, "aa") }); from += part; }
    clock += s;
  }
  const where = (role, rank) => { const at = found.processes.find(one => one.role === role && one.rank === rank); return at ? ` · ${at.node} · process ${at.pid}` : ""; };
  const lanes = [{ title: "driver: phases", bars: driver }, { title: found.work.length ? "driver: parts of phases" : "parts of phases, one after the other", bars: inner }].filter(lane => lane.bars.length);
  for (const [name, bars] of Object.entries(ranks)) { const [role, rank] = name.split(" "); lanes.push({ title: `${role}[${rank}]${where(role, Number(rank))}`, bars }); }
  for (const engine of [...new Set(spans.map(one => one.engine))].sort()) {
    const own = spans.filter(one => one.engine === engine), title = engine === null ? "engines: samples" : `engine ${engine}: samples${where("actor_infer", engine)}`;
    lanes.push({ title, bars: own.map(one => ({ name: `${one.domain}, group ${one.group}, sample ${one.index}, ${one.response_tokens} tokens, score ${number(one.score)}`, start: one.asked_at - zero, end: one.generated_at - zero, color: color(names.indexOf(one.domain)), at: one })) });
  }
  const rewards = spans.filter(one => one.scored_at).map(one => ({ name: `reward of ${one.domain}, group ${one.group}, sample ${one.index}`, start: one.generated_at - zero, end: one.scored_at - zero, color: color(names.indexOf(one.domain)), at: one }));
  if (rewards.length) lanes.push({ title: "rewards", bars: rewards });
  for (const lane of lanes) {  // bars that overlap stand below one another
    const ends = [];
    for (const bar of lane.bars.sort((a, b) => a.start - b.start)) { let row = ends.findIndex(end => end <= bar.start + 1e-9); if (row < 0) row = ends.length; ends[row] = bar.end; bar.row = row; }
    lane.rows = Math.max(1, ends.length);
    lane.height = lane.rows === 1 ? 24 : Math.max(2, Math.min(9, 330 / lane.rows));
  }
  return lanes;
}

// Trace events as Perfetto and chrome://tracing read them, in microseconds.
function trace(lanes) {
  const earliest = Math.min(0, ...lanes.flatMap(lane => lane.bars.map(bar => bar.start))), events = [];
  lanes.forEach((lane, at) => {
    events.push({ name: "process_name", ph: "M", pid: at + 1, tid: 0, args: { name: lane.title } }, { name: "process_sort_index", ph: "M", pid: at + 1, tid: 0, args: { sort_index: at } });
    for (const bar of lane.bars) events.push({ name: bar.name, ph: "X", pid: at + 1, tid: bar.row + 1, ts: Math.round(1e6 * (bar.start - earliest)), dur: Math.max(1, Math.round(1e6 * (bar.end - bar.start))), args: bar.at ? { domain: bar.at.domain, group: bar.at.group, index: bar.at.index, tokens: bar.at.response_tokens, score: bar.at.score } : {} });
  });
  return { displayTimeUnit: "ms", traceEvents: events };
}

class Picture {
  constructor(canvas, lanes, told) {
    Object.assign(this, { canvas, lanes, told });
    const bars = lanes.flatMap(lane => lane.bars);
    this.first = Math.min(0, ...bars.map(bar => bar.start)); this.last = Math.max(1e-3, ...bars.map(bar => bar.end));
    this.height = 26 + lanes.reduce((sum, lane) => sum + 20 + lane.rows * lane.height + 8, 0);
    canvas.addEventListener("wheel", event => { event.preventDefault(); this.zoom(event.deltaY < 0 ? 0.8 : 1.25, this.time(event)); }, { passive: false });
    canvas.addEventListener("pointerdown", event => { this.drag = this.time(event); canvas.setPointerCapture(event.pointerId); });
    canvas.addEventListener("pointerup", () => { this.drag = null; });
    canvas.addEventListener("pointermove", event => { if (this.drag !== null && this.drag !== undefined) { const by = this.drag - this.time(event); this.show(this.from + by, this.to + by); } else this.tell(event); });
    canvas.addEventListener("dblclick", event => { const bar = this.hit(event); if (bar?.at) go("samples", { at: `step ${chosen().get("step") || run().steps.at(-1)} ${bar.at.group} ${bar.at.index}`, step_min: chosen().get("step"), step_max: chosen().get("step") }); });
    canvas.addEventListener("keydown", event => {
      const wide = this.to - this.from, move = { ArrowLeft: -0.15, ArrowRight: 0.15 }[event.key];
      if (move) { event.preventDefault(); this.show(this.from + move * wide, this.to + move * wide); }
      if (event.key === "+" || event.key === "=") this.zoom(0.7); if (event.key === "-") this.zoom(1.4); if (event.key === "0") this.fit();
    });
    new ResizeObserver(() => this.paint()).observe(canvas.parentElement);
    this.fit();
  }
  fit() { const edge = 0.01 * (this.last - this.first); this.show(this.first - edge, this.last + edge); }
  show(from, to) { this.from = from; this.to = to; this.canvas.dataset.span = (to - from).toFixed(4); this.paint(); }
  zoom(by, at = (this.from + this.to) / 2) { if ((this.to - this.from) * by > 1e-4 && (this.to - this.from) * by < 4 * (this.last - this.first)) this.show(at + (this.from - at) * by, at + (this.to - at) * by); }
  time(event) { return this.from + (event.offsetX / this.canvas.clientWidth) * (this.to - this.from); }
  hit(event) { const t = this.time(event), edge = 2 * (this.to - this.from) / this.canvas.clientWidth; return this.lanes.flatMap(lane => lane.bars).find(bar => bar.start - edge <= t && t <= bar.end + edge && event.offsetY >= bar.y && event.offsetY <= bar.y + bar.h); }
  tell(event) { const bar = this.hit(event); if (bar) this.told.textContent = `${bar.name}: ${number(bar.end - bar.start)} s, from ${number(bar.start)} s to ${number(bar.end)} s`; }
  paint() {
    const ratio = devicePixelRatio || 1, width = this.canvas.parentElement.clientWidth - 28, style = getComputedStyle(document.body);
    Object.assign(this.canvas, { width: width * ratio, height: this.height * ratio }); this.canvas.style.height = `${this.height}px`;
    const ink = this.canvas.getContext("2d"), x = t => (t - this.from) / (this.to - this.from) * width;
    ink.scale(ratio, ratio); ink.font = "11.5px system-ui, sans-serif"; ink.textBaseline = "middle";
    const raw = (this.to - this.from) / 8, unit = 10 ** Math.floor(Math.log10(raw)), tick = unit * [1, 2, 5, 10].find(one => one * unit >= raw);
    for (let t = Math.ceil(this.from / tick) * tick; t < this.to; t += tick) { ink.fillStyle = style.color; ink.globalAlpha = 0.12; ink.fillRect(x(t), 18, 1, this.height); ink.globalAlpha = 0.75; ink.fillText(`${number(Number(t.toPrecision(6)))} s`, x(t) + 3, 9); }
    let y = 26;
    for (const lane of this.lanes) {
      ink.globalAlpha = 0.8; ink.fillStyle = style.color; ink.fillText(lane.title, 4, y + 8); y += 20; ink.globalAlpha = 1;
      for (const bar of lane.bars) {
        bar.y = y + bar.row * lane.height; bar.h = lane.height - (lane.height > 4 ? 1 : 0);
        const left = Math.max(-2, x(bar.start)), wide = Math.max(1, Math.min(width + 2, x(bar.end)) - left);
        if (left > width || x(bar.end) < 0) continue;
        ink.fillStyle = bar.color; ink.fillRect(left, bar.y, wide, bar.h);
        if (lane.rows === 1 && wide > 42) { ink.fillStyle = "#fff"; ink.save(); ink.beginPath(); ink.rect(left, bar.y, wide, bar.h); ink.clip(); ink.fillText(`${bar.name} ${number(bar.end - bar.start)} s`, left + 5, bar.y + bar.h / 2); ink.restore(); }
      }
      y += lane.rows * lane.height + 8;
    }
  }
}

// ---------------------------------------------------------------- settings

// Paths and texts of all settings.
const leaves = (tree, path = "") => tree && typeof tree === "object" && !Array.isArray(tree) && Object.keys(tree).length
  ? Object.entries(tree).flatMap(([key, value]) => leaves(value, path ? `${path}.${key}` : key)) : [[path, typeof tree === "string" ? tree : JSON.stringify(tree)]];

async function settings(live, current) {
  if (live && !main.querySelector(".error") || !state.runs.length) return;
  const given = chosen(), one = run(), other = state.runs.find(item => item.name === given.get("with")) || state.runs.find(item => item !== one) || one, same = one === other;
  const [left, right] = (await Promise.all([one, other].map(item => ask("config", { run: item.name })))).map(tree => Object.fromEntries(leaves(tree)));
  if (!current()) return;
  const only = !same && given.get("all") !== "1", text = (given.get("find") || "").toLowerCase(), paths = [...new Set([...Object.keys(left), ...Object.keys(right)])];
  const differ = paths.filter(path => left[path] !== right[path]), rows = (only ? differ : paths).filter(path => `${path} ${left[path]} ${right[path]}`.toLowerCase().includes(text));
  main.replaceChildren(h("div", { class: "bar" }, runChoice("settings"), state.runs.length > 1 && select("Compare with", state.runs.map(item => item.name), other.name, value => go("settings", { with: value }, true)),
    h("label", {}, "Find", h("input", { type: "search", id: "search", value: given.get("find") || "", onchange: event => go("settings", { find: event.target.value }, true) })),
    !same && h("label", { class: "row" }, h("input", { type: "checkbox", checked: !only, onchange: event => go("settings", { all: event.target.checked ? "1" : "" }, true) }), "also equal ones")),
  h("p", { class: "soft", role: "status" }, same ? `${rows.length} settings` : `${differ.length} of ${paths.length} settings differ`),
  h("div", { class: "card wide" }, h("table", {}, h("thead", {}, h("tr", {}, h("th", { scope: "col" }, "setting"), h("th", { scope: "col" }, one.name), !same && h("th", { scope: "col" }, other.name))),
    h("tbody", {}, rows.map(path => h("tr", { class: !same && left[path] !== right[path] ? "changed" : "" }, h("td", { class: "mono" }, path), [left, ...(same ? [] : [right])].map(side => h("td", { class: "mono" }, side[path] ?? h("span", { class: "soft" }, "(not set)")))))))));
}

// ---------------------------------------------------------------- keys, theme, start

const KEYS = [["1 … 5", "views"], ["/", "search"], ["j  k", "next, previous sample"], ["↑ ↓", "in the list of samples"], ["+ − 0 ← →", "zoom and move in the timeline"], ["[  ]", "step before, after in the timeline"], ["?", "this help"]];
document.getElementById("keys").append(h("h2", {}, "Keys"), h("dl", {}, KEYS.map(([key, text]) => [h("dt", {}, h("kbd", {}, key)), h("dd", {}, text)])), h("p", { class: "soft" }, "Drag in a curve to zoom in; a double click zooms out. The address of the page holds what is chosen."), h("form", { method: "dialog" }, h("button", {}, "Close")));
const openHelp = () => document.getElementById("keys").showModal();
document.getElementById("help").addEventListener("click", openHelp);
document.getElementById("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  try { localStorage.setItem("theme", document.documentElement.dataset.theme); } catch { /* storage is off */ }
  draw();
});
addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName)) { if (event.key === "Escape") event.target.blur(); return; }
  const name = Object.keys(VIEWS)[Number(event.key) - 1], selected = main.querySelector(".list [aria-selected=true]");
  if (name) go(name, {});
  else if (event.key === "/") { event.preventDefault(); const box = document.getElementById("search"); box ? box.focus() : (go("samples", {}), setTimeout(() => document.getElementById("search")?.focus(), 300)); }
  else if (event.key === "j" || event.key === "k") choose(event.key === "j" ? selected?.nextElementSibling : selected?.previousElementSibling);
  else if (event.key === "[" || event.key === "]") main.querySelector(`[aria-label="Step ${event.key === "[" ? "before" : "after"}"]`)?.click();
  else if (event.key === "?") openHelp();
});

let lost = false;
async function poll() {
  try {
    const runs = document.hidden ? state.runs : await ask("runs");
    const changed = lost && !document.hidden || JSON.stringify(runs) !== JSON.stringify(state.runs);
    state.runs = runs;
    if (changed) { lost = false; await draw(true); }
  } catch {
    lost = true;
    const live = document.getElementById("live");
    live.textContent = "roll-lite view does not answer; start it again if it has ended"; live.classList.remove("on");
  }
  setTimeout(poll, 2000);
}

addEventListener("hashchange", () => draw());
let resized;
addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => view() === "curves" && draw(), 200); });
(async () => {
  try { const theme = localStorage.getItem("theme"); if (theme) document.documentElement.dataset.theme = theme; } catch { /* storage is off */ }
  [state.runs, state.meanings] = await Promise.all([ask("runs"), ask("metrics")]);
  await draw();
  document.body.dataset.ready = "1";
  if (!CONTENT) setTimeout(poll, 2000);
})();
