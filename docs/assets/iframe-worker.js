/* Search without a server. Browsers start no worker from a page on disk, so there the search's worker runs in a hidden
   frame of the page, which inherits the page's origin. Material's own remedy would be fetched from a server. */
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.document.createElement("script")
      script.src = url
      this.loaded = new Promise(done => script.addEventListener("load", done))
      this.inside = inside
      inside.document.body.append(script)
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}
