// A client of the gateway for Node.js 20, Deno, Bun and browsers: one file, no dependencies.
//
//   import { Client } from './grabstream.mjs'
//   const client = new Client('http://127.0.0.1:18080')
//   const answer = await client.grab('dinner', 'bob')
//
// A refusal is an answer, not an error. A request that got no answer is sent again, under the same id, until
// `timeoutMs` is over. Amounts are at most 10^13, and exact; an integer that a number would round (from 2^53 on),
// as a sum of many amounts may be, is a BigInt.

const PAUSE_MS_FIRST = 100
const PAUSE_MS_MAX = 5_000
const RETRY_AFTER_MS_MAX = 99_999_000
// Statuses below 500 of requests that may succeed when they are repeated. Of the second set, the problem of a
// gateway says that nothing was decided; a proxy may send them for a request that the gateway has decided.
const PASSING = new Set([408, 425, 429])
const UNDECIDED = new Set([408, 425, 429, 503])
// A stream of events says every 15 s that it lives.
const SILENT_MS_MAX = 45_000
// A message of a stream: an event has at most 256 KiB.
const MESSAGE_BYTES_MAX = 1024 * 1024

// The gateway refused a request, or did not serve it in time; no command was decided.
export class RequestProblem extends Error {
  name = 'RequestProblem'

  constructor(status, type, detail, field) {
    super(`${type}: ${detail}`)
    this.status = status
    this.type = type
    this.detail = detail
    this.field = field
  }
}

// The time ran out after a command was sent: it may be decided or not. Send it again with the same id.
export class OutcomeUnknown extends Error {
  name = 'OutcomeUnknown'

  constructor(id, words) {
    super(`${words}. It is unknown whether the command was decided: send it again with the id ${id}`)
    this.id = id
  }
}

export class Client {
  #url
  #key
  #timeoutMs

  constructor(url, { key, timeoutMs = 30_000 } = {}) {
    this.#url = String(url).replace(/\/+$/, '')
    this.#key = key
    this.#timeoutMs = timeoutMs
  }

  open(terms, offer, { id = newId(), ...more } = {}) {
    return this.#decide('POST', '/v1/offers', id, { offer: offer ?? id, terms, ...more }, { offer: offer ?? id })
  }

  amend(offer, changes, { id = newId(), ...more } = {}) {
    return this.#decide('PATCH', path('offers', offer), id, { changes, ...more }, { offer })
  }

  pause(offer, options) {
    return this.#onOffer('pause', offer, options)
  }

  resume(offer, options) {
    return this.#onOffer('resume', offer, options)
  }

  close(offer, options) {
    return this.#onOffer('close', offer, options)
  }

  grab(offer, user, { id = newId(), ...more } = {}) {
    return this.#decide('POST', path('offers', offer, 'grabs'), id, { user, ...more }, { offer, user })
  }

  // Grabs of offers of one campaign, of which all or none succeed; resolves to their answers.
  async takeBasket(grabs, { id = newId() } = {}) {
    const { body, problem } = await this.#send('POST', '/v1/baskets', { id, body: { grabs } })
    if (Array.isArray(body?.answers)) return body.answers
    throw problem
  }

  confirm(offer, grab, user, more) {
    return this.#onGrab('confirm', offer, grab, user, more)
  }

  release(offer, grab, user, more) {
    return this.#onGrab('release', offer, grab, user, more)
  }

  extend(offer, grab, user, more) {
    return this.#onGrab('extend', offer, grab, user, more)
  }

  return(offer, grab, user, more) {
    return this.#onGrab('return', offer, grab, user, more)
  }

  redeem(offer, grab, user, order, more) {
    return this.#onGrab('redeem', offer, grab, user, { order, ...more })
  }

  unredeem(offer, grab, user, order, more) {
    return this.#onGrab('unredeem', offer, grab, user, { order, ...more })
  }

  offers(asked) {
    return this.#ask('/v1/offers', asked)
  }

  offer(offer, asked) {
    return this.#ask(path('offers', offer), asked)
  }

  offerGrabs(offer, asked) {
    return this.#ask(path('offers', offer, 'grabs'), asked)
  }

  userBalances(user, asked) {
    return this.#ask(path('users', user, 'balances'), asked)
  }

  userGrabs(user, asked) {
    return this.#ask(path('users', user, 'grabs'), asked)
  }

  userTransfers(user, asked) {
    return this.#ask(path('users', user, 'transfers'), asked)
  }

  // All pages of a question: for await (const page of client.pages((asked) => client.offers(asked))) …
  async *pages(ask, asked = {}) {
    for (let cursor; ; ) {
      const page = await ask(cursor === undefined ? asked : { ...asked, cursor })
      yield page
      if (page.next === undefined) return
      cursor = page.next
    }
  }

  // The events of an offer as they come: for await (const { id, type, event } of client.offerEvents('dinner')) …
  // `after` is the `id` of one, or 0. Reconnects automatically, and resumes, until the loop ends or `signal`
  // is aborted. The type `reset` says that it could not resume: read the state again.
  offerEvents(offer, options) {
    return this.#events(path('offers', offer, 'events'), options)
  }

  // The events that name a user, of all offers. `onPosition` is called with { offer, grab, position } when a grab
  // stands elsewhere on its waiting list.
  userEvents(user, options) {
    return this.#events(path('users', user, 'events'), options)
  }

  async *#events(where, { after, signal, onPosition } = {}) {
    let place = after
    let isOfCaller = false
    for (let attempt = 0; ; attempt++) {
      let askedMs = 0
      const control = new AbortController()
      const abort = () => control.abort(signal?.reason)
      let silent = setTimeout(abort, SILENT_MS_MAX)
      signal?.addEventListener('abort', abort)
      try {
        signal?.throwIfAborted()
        const headers = this.#key === undefined ? {} : { Authorization: `Bearer ${this.#key}` }
        if (place !== undefined) headers['Last-Event-ID'] = String(place)
        const reply = await fetch(this.#url + where, { headers, redirect: 'manual', signal: control.signal })
        if (reply.ok && reply.body !== null) {
          for await (const { id, event, data } of messagesOf(reply.body, where)) {
            clearTimeout(silent)
            silent = setTimeout(abort, SILENT_MS_MAX)
            attempt = 0
            if (id === undefined) {
              if (onPosition) {
                const position = parsedExactly(data)
                // What the caller throws is not a failure of the connection.
                isOfCaller = true
                onPosition(position)
                isOfCaller = false
              }
              continue
            }
            place = id
            if (event !== undefined) yield { id, type: event, event: parsedExactly(data) }
          }
        } else {
          const text = await reply.text()
          if (!PASSING.has(reply.status) && reply.status < 500) {
            throw problemOf(reply.status, 'GET', where, parsed(text), text)
          }
          askedMs = retryAfterMs(reply)
        }
      } catch (error) {
        if (isOfCaller || error instanceof RequestProblem || signal?.aborted) throw error
      } finally {
        clearTimeout(silent)
        signal?.removeEventListener('abort', abort)
      }
      await pause(askedMs, attempt)
    }
  }

  #onOffer(type, offer, { id = newId(), ...more } = {}) {
    return this.#decide('POST', `${path('offers', offer)}/${type}`, id, more, { offer })
  }

  #onGrab(type, offer, grab, user, { id = newId(), ...more } = {}) {
    const where = `${path('offers', offer, 'grabs', grab)}/${type}`
    return this.#decide('POST', where, id, { user, ...more }, { offer, user })
  }

  async #decide(method, where, id, fields, known) {
    const { body, problem } = await this.#send(method, where, { id, body: fields })
    if (problem === undefined) return body
    if (body.outcome === undefined || body.code === undefined) throw problem
    const { type, title, status, detail, field, ...members } = body
    return { id, ...known, ...members, message: detail }
  }

  async #ask(where, asked = {}) {
    const query = new URLSearchParams()
    for (const [name, value] of Object.entries(asked)) {
      if (value === undefined || value === null) continue
      // An answer stands for its event.
      query.set(name, name === 'after' && typeof value === 'object' ? `${value.shard}-${value.seq}` : value)
    }
    const words = query.toString()
    const { body, problem } = await this.#send('GET', words ? `${where}?${words}` : where, {})
    if (problem !== undefined) throw problem
    return body
  }

  // Resolves to the body of the reply, and its problem if it is one; rejects when there is none in time.
  async #send(method, where, { id, body }) {
    if (id !== undefined && !isId(id)) {
      throw new TypeError(`id: ${JSON.stringify(id)} is not an id: it must match [A-Za-z0-9._:-]{1,64}`)
    }
    const until = performance.now() + this.#timeoutMs
    const headers = {}
    if (this.#key !== undefined) headers.Authorization = `Bearer ${this.#key}`
    if (id !== undefined) {
      headers['Idempotency-Key'] = id
      headers['Content-Type'] = 'application/json'
    }
    let isUnknown = false
    for (let attempt = 0; ; attempt++) {
      let last
      let askedMs = 0
      try {
        const reply = await fetch(this.#url + where, {
          method,
          headers,
          body: body === undefined ? undefined : JSON.stringify(body),
          redirect: 'manual',
          signal: AbortSignal.timeout(Math.max(50, Math.ceil(until - performance.now()))),
        })
        const text = await reply.text()
        const document = parsed(text)
        const isAnswer = isAnswerTo(id, document)
        if (reply.ok && document !== undefined && (id === undefined || isAnswer)) return { body: document }
        last = problemOf(reply.status, method, where, document, text)
        const isOdd = last.type === 'unexpected_reply'
        if (!PASSING.has(reply.status) && reply.status < 500) {
          // A reply that no gateway sent, refusal or success, says nothing about the command: a proxy may
          // also refuse a response on its way back.
          isUnknown ||= id !== undefined && (isOdd || isOfOther(id, document))
          const isDecided = isAnswer && !isOdd && !(isUnknown && document.outcome === 'invalid')
          if (isUnknown && !isDecided) throw new OutcomeUnknown(id, last.message)
          return { body: document ?? {}, problem: last }
        }
        isUnknown ||= id !== undefined && (isOdd || !UNDECIDED.has(reply.status))
        askedMs = retryAfterMs(reply)
      } catch (error) {
        if (error instanceof OutcomeUnknown) throw error
        // A connection that was refused carried nothing.
        isUnknown ||= id !== undefined && error.cause?.code !== 'ECONNREFUSED'
        const cause = error.cause?.message ? `: ${error.cause.message}` : ''
        last = new RequestProblem(0, 'no_reply', `${error.message}${cause}`)
      }
      const pauseMs = askedMs + Math.random() * Math.min(PAUSE_MS_MAX, PAUSE_MS_FIRST * 2 ** Math.min(attempt, 16))
      if (performance.now() + pauseMs + 50 > until) {
        const words = `no answer within ${this.#timeoutMs} ms, after ${attempt + 1} attempts; the last one: ${last.message}`
        if (isUnknown) throw new OutcomeUnknown(id, words)
        throw new RequestProblem(last.status, last.type, words, last.field)
      }
      await new Promise((resolve) => setTimeout(resolve, pauseMs))
    }
  }
}

// Waits before the next attempt: what the gateway asks for, and a random time that grows.
function pause(askedMs, attempt) {
  const ms = askedMs + Math.random() * Math.min(PAUSE_MS_MAX, PAUSE_MS_FIRST * 2 ** Math.min(attempt, 16))
  return new Promise((resolve) => setTimeout(resolve, ms))
}

// The messages of a stream of Server-Sent Events that have an id, or are positions, as a gateway writes them.
// Throws RequestProblem when one does not end.
async function* messagesOf(body, where) {
  const reader = body.getReader()
  const decoder = new TextDecoder()
  let text = ''
  let bytes = 0
  try {
    for (;;) {
      const { done, value } = await reader.read()
      if (done) return
      const parts = (text + decoder.decode(value, { stream: true })).split('\n\n')
      text = parts.pop()
      bytes = parts.length ? new TextEncoder().encode(text).length : bytes + value.length
      if (bytes > MESSAGE_BYTES_MAX) {
        throw problemOf(200, 'GET', where, undefined, `a message has over ${MESSAGE_BYTES_MAX} bytes`)
      }
      for (const part of parts) {
        const fields = Object.fromEntries(part.split('\n').map((line) => line.split(/: (.*)/s, 2)))
        if (fields.id !== undefined || fields.event === 'position') yield fields
      }
    }
  } finally {
    // The loop may have ended before the stream.
    await reader.cancel().catch(() => {})
  }
}

function newId() {
  return crypto.randomUUID()
}

function isId(value) {
  return typeof value === 'string' && /^[A-Za-z0-9._:-]{1,64}$/.test(value)
}

// Whether a document has the answer to a command, or the answers to the grabs of a basket.
function isAnswerTo(id, document) {
  if (isOfOther(id, document)) return false
  return typeof document?.outcome === 'string' || Array.isArray(document?.answers)
}

// Whether a document names another command than the one that was sent.
function isOfOther(id, document) {
  const answers = document?.answers
  if (Array.isArray(answers)) return answers.some((one) => String(one?.id).replace(/\.[^.]*$/, '') !== id)
  // For an end user, the gateway makes the id of a command about a grab.
  return document?.id !== undefined && document.id !== id && !/^user:[0-9a-f]{40}$/.test(document.id)
}

// What a server asks for, in seconds or as a date (RFC 9110, 10.2.3); 0 if that cannot be read.
function retryAfterMs(reply) {
  const asked = reply.headers.get('retry-after') ?? ''
  if (/^[0-9]+$/.test(asked)) return Math.min(Number(asked) * 1_000, RETRY_AFTER_MS_MAX)
  const ms = /^[A-Z]/.test(asked) ? Date.parse(asked) - Date.now() : 0
  return Math.min(Math.max(ms || 0, 0), RETRY_AFTER_MS_MAX)
}

function path(...parts) {
  for (const part of parts) {
    if (!isId(part) || part === '.' || part === '..') {
      throw new TypeError(`${JSON.stringify(part)} is not an id that a path can name`)
    }
  }
  return `/v1/${parts.join('/')}`
}

// As JSON.parse, but an integer that a number would round becomes a BigInt.
function parsedExactly(text) {
  if (!/[0-9]{16}/.test(text)) return JSON.parse(text)
  // Strings stay as they are, whatever they contain: the mark is new each time.
  const mark = `${newId()}:`
  const marked = text.replace(/"[^"\\]*(?:\\.[^"\\]*)*"|-?[0-9]+(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?/g, (part) => {
    const isExact = !/^-?[0-9]{16,}$/.test(part) || Number.isSafeInteger(Number(part))
    return isExact ? part : `"${mark}${part}"`
  })
  return JSON.parse(marked, (_, value) =>
    typeof value === 'string' && value.startsWith(mark) ? BigInt(value.slice(mark.length)) : value,
  )
}

function parsed(text) {
  try {
    const value = parsedExactly(text)
    return typeof value === 'object' && value !== null ? value : undefined
  } catch {
    return undefined
  }
}

function problemOf(status, method, where, document, text) {
  // How the types of all problems of a gateway begin. Other servers send problem details, too.
  if (typeof document?.type !== 'string' || !document.type.startsWith('/problems/')) {
    const words = `${method} ${where} got ${status}, not from a gateway: ${text.slice(0, 200)}`
    return new RequestProblem(status, 'unexpected_reply', words)
  }
  const name = document.type.slice(document.type.lastIndexOf('/') + 1)
  return new RequestProblem(status, name, document.detail ?? '', document.field)
}
