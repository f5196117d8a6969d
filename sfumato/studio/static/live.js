// One stream of news for this tab. A hidden tab has none: browsers allow a host six connections, all tabs together.

import {query} from "./api.js";

export class Live {
  constructor() {
    this.run = null;
    this.cursor = "";
    this.state = "";
    this.onState = () => {};
    this.onChange = () => {};
    this.source = null;
    this.isBusy = false;
    this.isWaiting = false;
    document.addEventListener("visibilitychange", () => (document.hidden ? this.close() : this.open()));
    window.addEventListener("pagehide", () => this.close());
    window.addEventListener("pageshow", () => this.open());
  }

  /** Calls `onChange` with a cursor whenever there is something new of a run, or of the list where `run` is empty. */
  watch(run, onChange) {
    this.onChange = onChange;
    if (run === this.run && this.source) return;
    this.close();
    this.run = run;
    this.cursor = "";
    this.open();
  }

  open() {
    if (this.source || this.run === null || document.hidden) return;
    this.source = new EventSource(`/events?${query({run: this.run, cursor: this.cursor})}`);
    this.source.onopen = () => this.setState("on");
    this.source.onerror = () => {
      this.setState("off");
      // a browser gives up after a refusal; a studio that was started anew refuses until it knows this browser
      if (this.source?.readyState === EventSource.CLOSED) {
        this.close();
        setTimeout(() => this.open(), 5000);
      }
    };
    this.source.addEventListener("change", (event) => {
      const isFirst = this.cursor === "";
      this.cursor = event.data;
      // the page has just been read: the first cursor says where that was, but a second may have passed meanwhile
      if (!isFirst || event.data === "gone") this.tell(event.data);
    });
  }

  /** Tells of a change when the one before has been shown; of several meanwhile the last counts. */
  async tell(cursor) {
    if (this.isBusy) {
      this.isWaiting = true;
      return;
    }
    this.isBusy = true;
    try {
      do {
        this.isWaiting = false;
        await this.onChange(cursor === "gone" ? cursor : this.cursor);
      } while (this.isWaiting);
    } finally {
      this.isBusy = false;
    }
  }

  close() {
    this.source?.close();
    this.source = null;
    this.setState("");
  }

  setState(state) {
    this.state = state;
    this.onState(state);
  }
}
