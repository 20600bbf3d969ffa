// Plays cases of commands of visitors (gateway/page/asking.js) against a server with scripted replies, and prints
// what was sent and how each click ended. The argument is a JSON file: {name: [action, …]}.
//
// An action is {user}: signs in; or {click: [reply, …]}: the visitor grabs, and the replies come in this order.
// A reply is {lost: true}; {status, body, ours}: `ours` adds the id of the command; {during: user}: that user
// signs in before the reply. With {then: user}, a user signs in while the page waits before it asks again.

import { readFileSync } from 'node:fs'
import { createServer } from 'node:http'

const PATH = '/v1/offers/dinner/grabs'
const stored = new Map()
globalThis.sessionStorage = {
  getItem: (name) => stored.get(name) ?? null,
  setItem: (name, value) => stored.set(name, String(value)),
  removeItem: (name) => stored.delete(name),
}
globalThis.document = Object.assign(new EventTarget(), { documentElement: { dataset: { authentication: 'required' } } })
globalThis.window = new EventTarget()
globalThis.location = { hash: '', pathname: '/o/dinner' }
globalThis.CustomEvent ??= class extends Event {}

let replies = []
let reply
let sent = []
const server = createServer(async (request, response) => {
  let text = ''
  for await (const piece of request) text += piece
  const token = request.headers.authorization.split('.')[1]
  const key = request.headers['idempotency-key']
  // After a lost answer, fetch of Node.js repeats the request automatically, without its body.
  if (text !== '') {
    sent.push({ user: JSON.parse(atob(token)).sub, of: JSON.parse(text).user, key })
    reply = replies.shift() ?? { status: 201, body: { outcome: 'more than was scripted' }, ours: true }
  }
  if (reply.during) signIn(reply.during)
  if (reply.lost) return request.socket.destroy()
  const body = typeof reply.body === 'string' ? reply.body : JSON.stringify(reply.ours ? { id: key, ...reply.body } : reply.body)
  response.writeHead(reply.status, { 'Content-Type': 'application/json' }).end(body)
})
await new Promise((resolve) => server.listen(0, '127.0.0.1', resolve))
const real = fetch
globalThis.fetch = (path, options) => real(`http://127.0.0.1:${server.address().port}${path}`, options)

const { command } = await import(process.argv[3])
const { visitor } = await import(process.argv[3].replace('asking', 'visitor'))
const signIn = (user) => visitor.enter(`e30.${btoa(JSON.stringify({ sub: user }))}.e30`)

async function click(script) {
  replies = [...script]
  const signingIn = script.map((reply) => reply.then).filter((then) => then)
  const user = visitor.user
  try {
    const answer = await command(user, PATH, { user }, (error, ms, again) => {
      const then = signingIn.shift()
      if (then) signIn(then)
      again()
    })
    return answer.outcome ?? 'odd'
  } catch (error) {
    return `${error.constructor.name} ${error.status ?? ''}`.trim()
  }
}

const printed = {}
for (const [name, actions] of Object.entries(JSON.parse(readFileSync(process.argv[2], 'utf8')))) {
  stored.clear()
  sent = []
  const ended = []
  for (const action of actions) {
    if (action.user) signIn(action.user)
    if (action.click) ended.push(await click(action.click))
  }
  const keys = [...new Set(sent.map((one) => one.key))]
  printed[name] = { ended, sent: sent.map((one) => `${one.user}:${one.of}:${keys.indexOf(one.key)}`) }
}
console.log(JSON.stringify(printed))
server.close()
server.closeAllConnections()
