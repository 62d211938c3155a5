/* Search from a page on disk. Browsers start no workers there, so the search runs in a frame that
 * behaves as one: what is posted to it arrives as a message, and the other way round. Served over
 * HTTP nothing of this happens. */
if (location.protocol === "file:") {
  window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super();
      const base = new URL(url, location.href);
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.appendChild(frame);
      const inside = frame.contentWindow;
      const load = (address) =>
        new Promise((done, failed) => {
          const script = frame.contentDocument.createElement("script");
          script.src = new URL(address, base).href;
          script.onload = done;
          script.onerror = failed;
          frame.contentDocument.body.appendChild(script);
        });
      inside.importScripts = async (...addresses) => {
        for (const address of addresses) await load(address);
      };
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      this.frame = frame;
      this.ready = load(base);
    }
    postMessage(data) {
      this.ready.then(() => {
        const inside = this.frame.contentWindow;
        const event = new inside.MessageEvent("message", { data });
        inside.dispatchEvent(event);
      });
    }
    terminate() {
      this.frame.remove();
    }
  };
  window.Worker = window.IFrameWorker;
}
