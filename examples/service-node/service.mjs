// A service that sends commands by Kafka and finds its own answers:
//
//   node service.mjs OFFER USER [ID]
//
// The rules of the results topic:
//
// - The key of an answer is the id of its command. Every instance of the service reads the whole topic, picks
//   the ids it waits for, and skips the rest. kafkajs needs a consumer group, so each instance has its own.
// - An answer may arrive twice. The second answer is skipped.
// - A missing answer says nothing about the decision. Send the same command with the same id again: it gets
//   its first answer.
// - A command whose id cannot be read gets no answer; it is in the topic of rejected records.

import { randomUUID } from 'node:crypto'
import { Kafka, Partitioners, logLevel } from 'kafkajs'

const ATTEMPTS = 3
const MS_PER_ATTEMPT = 10_000

const prefix = process.env.GRAB_PREFIX ?? 'grab'
const results = `${prefix}.results`
const kafka = new Kafka({
  clientId: 'grabstream-service',
  brokers: (process.env.GRAB_KAFKA ?? '127.0.0.1:19092').split(','),
  logLevel: logLevel.ERROR,
})

class Commands {
  #waiting = new Map()
  #groupId = `grabstream-service-${randomUUID()}`
  #admin = kafka.admin()
  #producer = kafka.producer({ createPartitioner: Partitioners.DefaultPartitioner })
  #consumer = kafka.consumer({ groupId: this.#groupId })

  async start() {
    await Promise.all([this.#admin.connect(), this.#producer.connect(), this.#consumer.connect()])
    // Fixes the offsets to read from before the first command is sent; otherwise its answer could be missed.
    const ends = await this.#admin.fetchTopicOffsets(results)
    await this.#consumer.subscribe({ topic: results })
    await this.#consumer.run({
      eachMessage: async ({ message }) =>
        this.#waiting.get(message.key.toString())?.(JSON.parse(message.value.toString())),
    })
    for (const { partition, high } of ends) this.#consumer.seek({ topic: results, partition, offset: high })
  }

  async stop() {
    await Promise.all([this.#producer.disconnect(), this.#consumer.disconnect()])
    await this.#admin.deleteGroups([this.#groupId])
    await this.#admin.disconnect()
  }

  // Sends a command and returns its answer; rejects when no answer arrives.
  async answerTo(command) {
    if (this.#waiting.has(command.id)) throw new Error(`command ${command.id} already waits for its answer`)
    const answered = new Promise((resolve) => this.#waiting.set(command.id, resolve))
    try {
      for (let attempt = 0; attempt < ATTEMPTS; attempt++) {
        // The offer is the key, which keeps the commands of an offer in order.
        await this.#producer.send({
          topic: `${prefix}.commands`,
          acks: -1,
          messages: [{ key: command.offer, value: JSON.stringify(command) }],
        })
        let timer
        const late = new Promise((resolve) => (timer = setTimeout(resolve, MS_PER_ATTEMPT)))
        const answer = await Promise.race([answered, late])
        clearTimeout(timer)
        if (answer) return answer
      }
    } finally {
      this.#waiting.delete(command.id)
    }
    throw new Error(`no answer to command ${command.id}`)
  }
}

// A web service uses the id of the request, so that a repeated request is a repeated command.
const [offer, user, id = randomUUID()] = process.argv.slice(2)
const commands = new Commands()
await commands.start()
try {
  // Amounts are at most 10^13, so that every number of an answer is exact in JavaScript.
  const answer = await commands.answerTo({ type: 'grab', id, offer, user })
  console.log(answer.id, answer.outcome, answer.amount)
} finally {
  await commands.stop()
}
