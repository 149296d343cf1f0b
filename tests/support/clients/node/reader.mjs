// Reads a number of records of a topic's partition 0 with KafkaJS, and prints each as a line of JSON.
//
// Usage: node reader.mjs BOOTSTRAP TOPIC ISOLATION COUNT GROUP
//
// It goes on where the group committed, and commits what it has read before it leaves.
import KafkaJS from "kafkajs";

const [bootstrap, topic, isolation, wanted, groupId] = process.argv.slice(2);
const count = Number(wanted);
const client = new KafkaJS.Kafka({ brokers: [bootstrap], logLevel: KafkaJS.logLevel.ERROR });
const consumer = client.consumer({ groupId, readUncommitted: isolation === "read_uncommitted" });

function printable({ offset, timestamp, key, value, headers }) {
  const named = Object.entries(headers).flatMap(([name, values]) =>
    [values].flat().map((each) => ({ name, value: each?.toString("base64") ?? null })),
  );
  return {
    offset: Number(offset),
    timestamp_ms: Number(timestamp),
    key: key?.toString("base64") ?? null,
    value: value?.toString("base64") ?? null,
    headers: named,
  };
}

await consumer.connect();
await consumer.subscribe({ topic, fromBeginning: true });
let read = 0;
await new Promise((resolve, reject) => {
  consumer.on(consumer.events.CRASH, ({ payload }) => reject(payload.error));
  setTimeout(() => reject(new Error(`${read} records came in 90 s`)), 90_000).unref();
  consumer
    .run({
      autoCommit: false,
      eachMessage: async ({ partition, message }) => {
        if (read === count) return;
        process.stdout.write(`${JSON.stringify(printable(message))}\n`);
        read += 1;
        if (read === count) {
          const offset = String(Number(message.offset) + 1);
          await consumer.commitOffsets([{ topic, partition, offset }]);
          resolve();
        }
      },
    })
    .catch(reject);
});
await consumer.disconnect();
