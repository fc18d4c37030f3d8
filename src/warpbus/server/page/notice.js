// What stands below the messages when an answer did not come: why, and what to do. Waits where waiting helps.

import { isHealthy } from "./api.js";
import { $, make, textButton } from "./dom.js";
import { t } from "./language.js";

const HEALTH_EVERY = 2500; // ms

export class Notice {
  /** `actions`: retry(), settings(), fresh() - a new chat, back() - the server is. `key()` gives the API key. */
  constructor(key, actions) {
    this.key = key;
    this.actions = actions;
    this.timer = 0;
  }

  clear() {
    clearTimeout(this.timer);
    this.timer = 0;
    $("notice").replaceChildren();
  }

  /** `again`: the question has no answer, so that trying again makes sense. */
  show(error, again) {
    this.clear();
    const { retry, settings, fresh } = this.actions;
    const retryButton = () => (again ? [textButton(t("retry"), retry)] : []);
    switch (error.kind) {
      case "unauthorized":
        this.say(t(this.key() ? "unauthorizedKey" : "unauthorized"), [textButton(t("openSettings"), settings)]);
        break;
      case "busy":
        if (again && error.retryAfter !== null) this.countDown(error.retryAfter);
        else this.say(t("busyNow"), retryButton());
        break;
      case "restarting":
      case "away":
        this.say(error.midway && error.kind !== "away" ? t("brokeOff", { message: error.message }) : t(error.kind), retryButton(), true);
        this.watch(again);
        break;
      case "tooLong":
        this.say(t("tooLong"), [textButton(t("newChat"), fresh)]);
        break;
      case "unanswered":
        this.say(t("unanswered"), retryButton());
        break;
      case "noModels":
        this.say(t("noModels"), retryButton());
        break;
      default:
        this.say(t(error.midway ? "brokeOff" : "failed", { message: error.message }), retryButton());
    }
  }

  say(sentence, buttons, waiting = false) {
    const node = make("div", waiting ? "notice waiting" : "notice");
    const text = make("p", "", sentence);
    node.append(text, ...buttons);
    $("notice").replaceChildren(node);
    return text;
  }

  countDown(seconds) {
    const text = this.say(t("busy", { n: seconds }), [textButton(t("retryNow"), this.actions.retry)], true);
    text.setAttribute("aria-hidden", "true"); // the count would be read out every second
    text.before(make("span", "hidden", t("busy", { n: seconds })));
    const tick = (left) => {
      if (left <= 0) {
        this.actions.retry();
        return;
      }
      text.textContent = t("busy", { n: left });
      this.timer = setTimeout(() => tick(left - 1), 1000);
    };
    tick(seconds);
  }

  /** Looks whether the server is back, and then asks again. */
  watch(again) {
    this.timer = setTimeout(async () => {
      const timer = this.timer;
      const healthy = await isHealthy(this.key());
      if (this.timer !== timer) return; // something else is shown meanwhile
      if (!healthy) this.watch(again);
      else if (again) this.actions.retry();
      else this.actions.back();
    }, HEALTH_EVERY);
  }
}
