// Asks the router for what is new, once a second while the page is seen. Owns the key and the answers' numbers.

const PERIOD_MS = 1000;
const LONGEST_WAIT_MS = 10000;
const KEY = "pdserve-key";

export class Source {
  // on: {data(answer), refused(message), lost(message)}
  constructor(on) {
    this.on = on;
    this.failures = 0;
    this.timer = null;
    this.isAsking = false;
    this.since = { requests: 0, samples: 0 };
    document.addEventListener("visibilitychange", () => this.start());
  }

  useKey(key) {
    sessionStorage.setItem(KEY, key);
    this.start();
  }

  start() {
    clearTimeout(this.timer);
    if (!document.hidden && !this.isAsking) this.ask();
  }

  async ask() {
    this.isAsking = true;
    let wait = PERIOD_MS;
    try {
      wait = await this.askOnce();
      this.failures = 0;
    } catch (error) {
      this.failures += 1;
      wait = Math.min(LONGEST_WAIT_MS, PERIOD_MS * 2 ** this.failures);
      this.on.lost(`No answer from the router (${error.message}); trying again.`);
    } finally {
      this.isAsking = false;
    }
    if (wait !== null && !document.hidden) this.timer = setTimeout(() => this.ask(), wait);
  }

  // The time until the next question; null: a key is needed first.
  async askOnce() {
    const { requests, samples } = this.since;
    const key = sessionStorage.getItem(KEY);
    const answer = await fetch(`admin/live?requests_since=${requests}&samples_since=${samples}`, {
      headers: key ? { authorization: `Bearer ${key}` } : {},
      cache: "no-store",
      signal: AbortSignal.timeout(LONGEST_WAIT_MS),
    });
    if (answer.status === 401 || answer.status === 403) {
      sessionStorage.removeItem(KEY);
      this.on.refused(key ? (await answer.json()).error.message : null);
      return null;
    }
    if (!answer.ok) throw new Error(`status ${answer.status}`);
    const data = await answer.json();
    const isNew = data.last_request < requests || data.last_sample < samples; // another start of the router
    this.since = { requests: data.last_request, samples: data.last_sample };
    this.on.data(data, isNew);
    return PERIOD_MS;
  }
}
