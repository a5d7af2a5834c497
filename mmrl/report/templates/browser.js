"use strict";
// The rollout browser of report.html. All text goes in by textContent, so nothing that a model wrote becomes markup.
(() => {
  const byId = (id) => document.getElementById(id);
  const make = (tag, className = "", text = "") => {
    const made = document.createElement(tag);
    if (className) made.className = className;
    if (text) made.textContent = text;
    return made;
  };
  const blocks = new Map([...document.querySelectorAll("script[data-block]")].map((one) => [one.dataset.block, one]));
  const known = new Map([...blocks].map(([key, one]) => [key, JSON.parse(one.dataset.examples)]));
  const loaded = new Map();
  const MEMBERS = 40;  // lines of a group
  const [step, beside, module, search] = ["b-step", "b-beside", "b-module", "b-search"].map(byId);
  const [low, high, failed, change, list] = ["b-low", "b-high", "b-failed", "b-change", "b-list"].map(byId);
  const columns = [byId("b-left"), byId("b-right")];

  // A step is decompressed when it is looked at, once.
  const load = (key) => {
    if (!loaded.has(key)) {
      const bytes = Uint8Array.from(atob(blocks.get(key).textContent.trim()), (letter) => letter.charCodeAt(0));
      const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
      loaded.set(key, new Response(stream).json());
    }
    return loaded.get(key);
  };

  // Item -> what its score has gained: this evaluation against the one before training, that one against the last.
  const changes = async () => {
    const [before, ...after] = [...known.keys()].filter((key) => kind(key) === kind(step.value));
    if (kind(step.value) === "train" || !after.length) return null;
    const later = before === step.value ? after.at(-1) : step.value;
    const scores = async (key) => new Map((await load(key)).examples.map((one) => [one.id, one.rewards[0]]));
    const [old, now] = [await scores(before), await scores(later)];
    return new Map([...now].map(([id, score]) => [id, old.has(id) ? score - old.get(id) : 0]));
  };

  const passes = (example, changed) => {
    if (changed && change.value && !(changed.get(example.id) * Number(change.value) > 0)) return false;
    const from = low.value === "" ? -Infinity : Number(low.value);
    const to = high.value === "" ? Infinity : Number(high.value);
    const rewards = example.rewards.filter((reward) => reward !== null);
    if ((low.value !== "" || high.value !== "") && !rewards.some((one) => one >= from && one <= to)) return false;
    if (failed.checked && !example.failed && example.calls.every((call) => !call.state)) return false;
    if (module.value && !example.calls.some((call) => call.module === module.value)) return false;
    const wanted = search.value.trim().toLowerCase();
    const replies = example.calls.map((call) => call.pieces.map(([text]) => text).join(""));
    return [example.id, ...example.asked, ...replies, ...example.lost].some((text) => text.toLowerCase().includes(wanted));
  };

  const rounded = (value) => String(Math.round(value * 1000) / 1000);
  const summary = (example) => {
    const rewards = example.rewards.filter((reward) => reward !== null);
    const ends = [Math.min(...rewards), Math.max(...rewards)].map(rounded);
    const range = !rewards.length ? `no ${example.scored}` : `${example.scored} ` + (ends[0] === ends[1] ? ends[0] : ends.join(" to "));
    const errors = example.failed ? `, ${example.failed} failed` : "";
    const rollouts = example.rewards.length === 1 ? "1 rollout" : `${example.rewards.length} rollouts`;
    const count = example.calls.length ? `${rollouts}, ` : "";
    return `${example.id} · ${count}${range}${errors}`;
  };

  const drawCall = (call, prompts, groups) => {
    const item = make("div", "call");
    item.style.marginLeft = `${call.depth * 0.9}rem`;
    item.dataset.groups = JSON.stringify(call.groups);
    item.append(make("b", "", call.name), make("span", "small soft", call.facts));
    if (call.state) item.append(make("span", "bad", ` ${call.state}`));
    if (prompts[call.prompt]) {
      const folded = make("details", "small");
      folded.append(make("summary", "soft", "prompt"), make("pre", "", prompts[call.prompt]));
      item.append(folded);
    }
    const completion = make("div", "completion");
    for (const [text, level] of call.pieces) {
      completion.append(make("span", level ? (level > 0 ? "up" : "down") + Math.abs(level) : "", text || "(nothing)"));
    }
    item.append(completion);
    for (const line of call.credit) item.append(make("div", "small soft", line));
    for (const line of call.outcomes) item.append(make("div", "outcome small", line));
    // What it was compared with: as text, and on hover as an outline.
    const lines = call.groups.flatMap((group) => [`group ${group}:`, ...groups.get(group).slice(0, MEMBERS)]);
    if (lines.length) {
      const folded = make("details", "small");
      folded.append(make("summary", "soft", "compared with"), make("pre", "", lines.join("\n")));
      item.append(folded);
    }
    const mark = (on) => item.parentElement.querySelectorAll(".call").forEach((one) =>
      one.classList.toggle("member", on && JSON.parse(one.dataset.groups).some((group) => call.groups.includes(group))));
    item.addEventListener("mouseenter", () => mark(true));
    item.addEventListener("mouseleave", () => mark(false));
    return item;
  };

  const draw = async (column, key, id) => {
    const { prompts, examples } = await load(key);
    if (id !== list.value || ![step.value, beside.value].includes(key)) return;  // another one was chosen meanwhile
    const groups = new Map();
    for (const { id: name, calls } of examples) {
      for (const call of calls) {
        const line = `${call.name} of ${name}: reward ${call.reward === null ? "-" : rounded(call.reward)}`;
        for (const group of call.groups) {
          if (!groups.has(group)) groups.set(group, []);
          groups.get(group).push(line);
        }
      }
    }
    const example = examples.find((one) => one.id === id);
    const heading = make("h3", "", blocks.get(key).dataset.label.split(":")[0]);
    if (!example) return column.replaceChildren(heading, make("p", "soft", "This step does not have the example."));
    const calls = example.calls.map((call) => drawCall(call, prompts, groups));
    const lost = example.lost.map((line) => make("div", "outcome small", line));
    // What was asked is the same in both columns, so it stands above them.
    byId("b-asked").replaceChildren(...example.asked.map((line) => make("div", "asked", line)));
    column.replaceChildren(heading, make("p", "small soft", summary(example)), ...calls, ...lost);
  };

  const option = (value, text) => {
    const made = make("option", "", text);
    made.value = value;
    return made;
  };

  const chooseExample = async () => {
    const id = list.value;
    [...columns, byId("b-asked")].forEach((part) => part.replaceChildren());
    if (!id) return beside.replaceChildren(option("", "nothing"));
    const before = beside.value;
    const others = [...known].filter(([key, ids]) => key !== step.value && ids.includes(id)).map(([key]) => key);
    const count = others.length ? `nothing (${others.length} other steps have it)` : "nothing: no other step has it";
    beside.replaceChildren(option("", count));
    for (const key of others) beside.append(option(key, blocks.get(key).dataset.label.split(":")[0]));
    // An evaluation's item beside itself before training, or of that one after it.
    const alike = others.filter((key) => kind(key) === kind(step.value));
    const other = kind(step.value) === "train" ? "" : first(step.value) ? alike.at(-1) : alike[0];
    beside.value = others.includes(before) ? before : other ?? "";
    await drawBoth();
  };
  const kind = (key) => key.replace(/-\d+$/, "");
  const first = (key) => [...known.keys()].find((one) => kind(one) === kind(key)) === key;

  // What an address names after its # is shown, and scrolled to: step, example, beside, change.
  const start = async () => {
    const place = new URLSearchParams(location.hash.slice(1));
    const named = blocks.has(place.get("step"));
    if (named) step.value = place.get("step");
    if (["1", "-1"].includes(place.get("change"))) change.value = place.get("change");
    await chooseStep();
    if (named) byId("browser").scrollIntoView();
    else if (place.get("step")) byId("b-count").textContent += `; ${place.get("step")} is not in this page`;
    if (![...list.options].some((one) => one.value === place.get("example"))) return;
    list.value = place.get("example");
    await chooseExample();
    if (![...beside.options].some((one) => one.value === place.get("beside"))) return;
    beside.value = place.get("beside");
    await drawBoth();
  };

  let chosen = false;  // by a reader: until then the address stays as it is
  const drawBoth = async () => {
    const place = { step: step.value, example: list.value, beside: beside.value, change: change.value };
    // The earlier one on the left.
    const keys = [...known.keys()].filter((key) => key === place.step || key === place.beside);
    columns[1].hidden = keys.length < 2;
    for (const [at, key] of keys.entries()) await draw(columns[at], key, place.example);
    if (!chosen) return;
    try {
      history.replaceState(null, "", `#${new URLSearchParams(place)}`);
    } catch {
      // Some browsers allow so many a second, or none in a frame; the address then stays.
    }
  };

  const filter = async () => {
    const key = step.value;
    const { examples } = await load(key);
    const changed = await changes();
    if (key !== step.value) return;  // another one was chosen meanwhile
    byId("b-since").hidden = !changed;
    const before = list.value;
    const passing = examples.filter((example) => passes(example, changed));
    const size = (example) => Math.abs(changed.get(example.id));
    if (changed && change.value) passing.sort((one, other) => size(other) - size(one));
    byId("b-count").textContent = `${passing.length} of ${examples.length} examples`;
    list.replaceChildren(...passing.map((example) => option(example.id, summary(example))));
    // Where rollouts of one question differ, there is something to learn from.
    const telling = passing.find((example) => new Set(example.rewards).size > 1) ?? passing[0];
    if (telling) list.value = passing.some((example) => example.id === before) ? before : telling.id;
    await chooseExample();
    if (!passing.length) columns[0].replaceChildren(make("p", "soft", "No example of this step passes the filters."));
  };

  const chooseStep = async () => {
    const key = step.value;
    const { examples } = await load(key);
    if (key !== step.value) return;  // another one was chosen while this one was decompressed
    const before = module.value;
    const modules = [...new Set(examples.flatMap((example) => example.calls.map((call) => call.module)))].sort();
    module.replaceChildren(option("", "any module"), ...modules.map((name) => option(name, name)));
    module.value = modules.includes(before) ? before : "";
    await filter();
  };

  const move = (select, by) => {
    const at = Math.min(Math.max(select.selectedIndex + by, 0), select.options.length - 1);
    if (at === select.selectedIndex) return;
    select.selectedIndex = at;
    select.dispatchEvent(new Event("change"));
  };

  if (!blocks.size || typeof DecompressionStream === "undefined") return;
  step.append(...[...blocks].map(([key, one]) => option(key, one.dataset.label)));
  step.value = [...blocks.keys()].findLast((key) => kind(key) === "train") ?? [...blocks.keys()].at(-1);
  for (const one of [step, list, beside, change]) one.addEventListener("change", () => { chosen = true; });
  addEventListener("hashchange", start);
  step.addEventListener("change", chooseStep);
  list.addEventListener("change", chooseExample);
  beside.addEventListener("change", drawBoth);
  for (const one of [module, failed, change]) one.addEventListener("change", filter);
  for (const one of [search, low, high]) one.addEventListener("input", filter);
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || /INPUT|SELECT|TEXTAREA/.test(event.target.tagName)) return;
    const keys = { j: [list, 1], k: [list, -1], n: [step, 1], p: [step, -1] };
    if (keys[event.key]) move(...keys[event.key]);
  });
  byId("browser").hidden = false;
  start();
})();
