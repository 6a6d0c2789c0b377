// A page that is opened from disk may start no worker, and the site's search runs in one. This is a worker that is a frame: its
// script runs in an empty page of its own, and messages go both ways. Elsewhere the browser's own worker stays.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.documentElement.append(frame);
      const inside = frame.contentWindow, waiting = [], place = new URL(url, document.baseURI);
      this.tell = (message) => waiting.push(message);
      inside.postMessage = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        if (this.onmessage) this.onmessage(event);
      };
      const load = (address) => new Promise((done, failed) => {
        const script = inside.document.createElement("script");
        Object.assign(script, { src: new URL(address, place).href, onload: done, onerror: failed });
        inside.document.head.append(script);
      });
      inside.importScripts = (...all) => all.reduce((before, one) => before.then(() => load(one)), Promise.resolve());
      this.terminate = () => frame.remove();
      load(place.href).then(() => {
        this.tell = (data) => inside.dispatchEvent(new inside.MessageEvent("message", { data }));
        waiting.splice(0).forEach((data) => this.tell(data));
      }, () => this.dispatchEvent(new Event("error")));
    }
    postMessage(data) { this.tell(data); }
  };
}
