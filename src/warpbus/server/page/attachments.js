// Text files that go into the next question: chosen, dropped or pasted; shown above the box until they are sent.

import { $, icon, iconButton, make, toast } from "./dom.js";
import { number, t } from "./language.js";

const MOST_FILES = 10;
const MOST_BYTES = 200_000; // of one file

export class Attachments {
  /** `changed()`: a file came or went. */
  constructor(changed) {
    this.changed = changed;
    this.files = []; // {name, text}
    $("attach").addEventListener("click", () => $("attach-file").click());
    $("attach-file").addEventListener("change", () => {
      const chosen = [...$("attach-file").files];
      $("attach-file").value = "";
      this.add(chosen);
    });
    const stage = $("stage");
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files");
    stage.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      stage.classList.add("dropping");
    });
    stage.addEventListener("dragleave", (event) => {
      if (!stage.contains(event.relatedTarget)) stage.classList.remove("dropping");
    });
    stage.addEventListener("drop", (event) => {
      stage.classList.remove("dropping");
      if (!hasFiles(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
    $("question").addEventListener("paste", (event) => {
      const pasted = [...(event.clipboardData?.files ?? [])];
      if (!pasted.length) return;
      event.preventDefault();
      this.add(pasted);
    });
  }

  set(files) {
    this.files = files;
    this.show();
  }

  async add(chosen) {
    for (const file of chosen) {
      const problem = this.files.length >= MOST_FILES ? t("fileMany", { n: MOST_FILES }) : await this.read(file);
      if (problem) {
        toast(problem);
        break;
      }
    }
    this.show();
    this.changed();
    $("question").focus();
  }

  /** Takes a file, or says why not. */
  async read(file) {
    if (file.size > MOST_BYTES) return t("fileLarge", { name: file.name, n: number(MOST_BYTES / 1000) });
    try {
      const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
      if (text.includes("\0")) return t("fileBinary", { name: file.name });
      this.files.push({ name: file.name, text });
      return "";
    } catch {
      return t("fileBinary", { name: file.name });
    }
  }

  show() {
    const chips = this.files.map((file) => {
      const chip = make("li", "chip");
      const remove = iconButton("close", t("removeFile", { name: file.name }), () => {
        this.files.splice(this.files.indexOf(file), 1);
        this.show();
        this.changed();
        $("question").focus();
      });
      chip.append(icon("file"), make("span", "name", file.name), make("span", "size", t("fileSize", { n: number(file.text.length) })), remove);
      return chip;
    });
    $("files").replaceChildren(...chips);
    $("files").hidden = !chips.length;
    $("files-note").hidden = !chips.length;
  }
}
