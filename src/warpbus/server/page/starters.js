// What may be asked first, as the model can answer it.

import { make, $ } from "./dom.js";
import { t } from "./language.js";

/** The packaged poet knows Chinese poems only; its adapters were trained on questions of their own. */
const POET = "glm-poet";
const POEMS = ["写一首题为《春夜》的五言绝句。", "仿李白，写一首题为《江上送客》的七言绝句。", "以《秋山》为题，写一首五言律诗。", "续写：\n明月照高楼，流光正徘徊。"];
const ADAPTERS = {
  "li-bai": ["写一首题为《江上送客》的诗。", "写一首题为《秋夜》的诗。"],
  spring: ["写一首诗。"],
};

function startersOf({ id, root }) {
  if (root !== POET) return [t("starterExplain"), t("starterDerive"), t("starterCode"), t("starterCompare")];
  return Object.hasOwn(ADAPTERS, id) ? ADAPTERS[id] : POEMS;
}

/** Shows them for `model`, or none where it is undefined; `ask(question)` is called with the one chosen. */
export function showStarters(model, ask) {
  const poet = model?.root === POET;
  $("welcome-more").textContent = t(poet ? "welcomePoet" : "welcomeMore");
  const buttons = (model ? startersOf(model) : []).map((question) => {
    const button = make("button", "starter", question);
    button.type = "button";
    if (poet) button.lang = "zh-CN";
    button.addEventListener("click", () => ask(question));
    return button;
  });
  $("starters").replaceChildren(...buttons);
}
