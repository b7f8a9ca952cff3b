// Search runs in a worker. A page that is opened from disk may not start one, so that a frame takes its place there.
if (location.protocol === "file:") {
  window.Worker = class {
    constructor(url) {
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.append(this.frame);
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => setTimeout(() => this.onmessage?.({ data }));
      const script = inside.document.createElement("script");
      this.loaded = new Promise((resolve) => { script.onload = resolve; });
      script.onerror = (event) => this.onerror?.(event);
      script.src = new URL(url, location).href;
      inside.document.head.append(script);
    }
    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow?.onmessage({ data }));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
