// The Claims page: the ledger with its verdicts; each check can be run again with other numbers.
import { get } from "./api.js";
import { element } from "./dom.js";
import { run } from "./claims/run_check.js";
import { list } from "./claims/list.js";
import { page } from "./claims/claim_detail.js";
import { typeset } from "./claims/safe_mathml.js";
import { verdict, VERDICTS } from "./claims/words.js";

const PREFIX = "p."; // of those fields of the address that are parameters of a claim

export async function open(root, state) {
  let ledger = null;
  const loading = element("p", { className: "loading", text: "opening the ledger …" });
  root.append(loading);
  try {
    ledger = await get("/api/claims/ledger");
  } catch (error) {
    loading.replaceWith(element("p", { className: "error", text: error.message }));
    return undefined;
  }
  if (!loading.isConnected) return undefined; // another page was opened meanwhile
  loading.remove();

  let running = null;
  let runName = "run all";
  const runButton = element("button", { type: "button", text: "run all", on: { click: runAll } });
  const progress = element("progress", { max: 1, value: 0, hidden: true, "aria-label": "how many claims were run" });
  const status = element("span", { className: "quiet", role: "status" });
  const claims = list(ledger, state, (name) => {
    state.push(addressFields(name, {}));
    show();
  }, nameButton);
  const bar = element("div", { className: "bar" }, element("h2", { text: "Claims" }), runButton, progress, status);
  const side = element("aside", { "aria-label": "the ledger" }, bar, claims.box);
  const main = element("div", { className: "place" });
  let shownPage = null;

  function nameButton(shown, all) {
    runName = shown === all ? "run all" : `run these ${shown}`;
    runButton.disabled = shown === 0 && !running;
    if (!running) runButton.textContent = runName;
  }

  // The fields of the address for a claim. Parameters of another claim are removed.
  function addressFields(name, parameters) {
    const fields = { claim: name };
    for (const key of new URLSearchParams(location.search).keys()) {
      if (key.startsWith(PREFIX)) fields[key] = null;
    }
    for (const [key, value] of Object.entries(parameters)) fields[PREFIX + key] = value;
    return fields;
  }

  function show() {
    const claim = ledger.claims.find((one) => one.id === state.get("claim"));
    shownPage?.leave();
    shownPage = null;
    claims.mark(claim?.id);
    root.classList.toggle("opened", Boolean(claim));
    if (!claim) {
      main.replaceChildren(introduction());
      return;
    }

    const parameters = {};
    for (const { name, value } of claim.parameters) {
      const fromAddress = state.number(PREFIX + name, value);
      if (fromAddress !== value) parameters[name] = fromAddress;
    }
    shownPage = page(claim, parameters, {
      back: () => {
        state.push(addressFields(null, {}));
        show();
      },
      changed: (values) => state.set(addressFields(claim.id, values)),
      ran: (result) => claims.showResult(claim.id, result),
    });
    main.replaceChildren(shownPage.box);
    claims.scrollTo(claim.id);
    if (matchMedia("(max-width: 900px)").matches) scrollTo(0, 0);
  }

  function introduction() {
    const counts = [];
    for (const name of Object.keys(VERDICTS)) {
      const count = ledger.claims.filter((claim) => claim.verdict === name).length;
      if (count) counts.push(element("li", {}, verdict(name), ` ${count}: ${VERDICTS[name][2]}`));
    }
    const documents = [];
    for (const { label, title, kind, about } of ledger.documents) {
      documents.push(element("dt", { text: label }),
        element("dd", {}, element("cite", { text: title }), ` (${kind}). `, ...typeset(about)));
    }
    return element("div", { className: "panel intro" },
      element("h2", { text: `${ledger.claims.length} claims of the theory, executed` }),
      element("p", {
        text: "Each claim is a check that runs here. It tests the statement as written, the statement with its condition or correction, and a control that must fail. The verdict follows from the results.",
      }),
      element("ul", { className: "counts" }, ...counts),
      element("p", { text: "A title in quotation marks is a claim that does not hold as it stands; the line below it says what holds." }),
      element("p", { className: "quiet", text: "Select a claim to see its evidence, and change its parameters." }),
      // On a phone the list of claims follows, so the documents are folded there.
      element("details", { open: matchMedia("(min-width: 901px)").matches },
        element("summary", { text: "The documents" }),
        element("p", { className: "quiet", text: "The claims are statements of five course documents, which name no author, and of one article." }),
        element("dl", { className: "documents" }, ...documents)));
  }

  // The button starts a run of all visible claims; while they run, it cancels them.
  async function runAll() {
    if (running) {
      running.abort();
      return;
    }
    running = new AbortController();
    const { signal } = running;
    const names = claims.visible();
    let asRecorded = 0;
    let done = 0;
    runButton.textContent = "cancel";
    progress.hidden = false;
    progress.max = Math.max(1, names.length);
    progress.value = 0;
    for (const name of names) {
      status.textContent = `${done} of ${names.length}`;
      claims.showResult(name, null);
      try {
        const result = await run(name, {}, () => {}, signal);
        claims.showResult(name, result);
        if (result.as_recorded) asRecorded += 1;
      } catch (error) {
        if (signal.aborted) {
          claims.clearResult(name);
          break;
        }
        claims.showResult(name, { error: error.message });
      }
      done += 1;
      progress.value = done;
    }
    status.textContent = `${asRecorded} of ${done} as recorded${signal.aborted ? ", then cancelled" : ""}`;
    running = null;
    runButton.textContent = runName;
    progress.hidden = true;
  }

  root.append(side, main);
  show();
  const stopListening = state.onChange(show);
  return () => {
    stopListening();
    running?.abort();
    shownPage?.leave();
    root.classList.remove("opened");
  };
}
