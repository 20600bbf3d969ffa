// Adds jobs to a BullMQ queue and finishes them. Reads a plan {port, count, callers, concurrency} as JSON from
// standard input; writes {seconds, cpu_seconds} as JSON. Runs in the folder where BullMQ is installed.
import { createRequire } from "node:module";
import { text } from "node:stream/consumers";

const { Queue, Worker } = createRequire(`${process.cwd()}/`)("bullmq");
const plan = JSON.parse(await text(process.stdin));
const connection = { host: "127.0.0.1", port: plan.port, maxRetriesPerRequest: null };
const queue = new Queue("bench", { connection });
await queue.waitUntilReady();

const cpuBefore = process.cpuUsage();
const began = performance.now();
let next = 0;
async function caller() {
  while (next < plan.count) {
    const number = next++;
    await queue.add("grab", { user: `u${number}` }, { jobId: `g${number}` });
  }
}
await Promise.all(Array.from({ length: plan.callers }, caller));

let finished = 0;
const all = {};
all.promise = new Promise((resolve, reject) => Object.assign(all, { resolve, reject }));
const worker = new Worker("bench", async () => 1, { connection, concurrency: plan.concurrency });
worker.on("completed", () => ++finished === plan.count && all.resolve());
worker.on("failed", (_, error) => all.reject(error));
worker.on("error", all.reject);
await all.promise;
const seconds = (performance.now() - began) / 1000;
const used = process.cpuUsage(cpuBefore);
const counts = await queue.getJobCounts("completed");
if (counts.completed !== plan.count) throw new Error(`${counts.completed} of ${plan.count} jobs completed`);
await worker.close();
await queue.close();
console.log(JSON.stringify({ seconds, cpu_seconds: (used.user + used.system) / 1e6 }));
