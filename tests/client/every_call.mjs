// Uses every method of the JavaScript client, and prints what it got: node every_call.mjs URL OFFER KEY, with the
// key of the payment side
import assert from 'node:assert/strict'
import { createHmac } from 'node:crypto'
import { Client, OutcomeUnknown, RequestProblem } from '../../grabstream/client/javascript/grabstream.mjs'

const [url, offer, key] = process.argv.slice(2)
const client = new Client(`${url}/`)
const terms = { kind: 'coupon', issuer: 'shop', total: 9 }
const [sale, tea, cake] = ['sale', 'tea', 'cake'].map((name) => `${offer}:${name}`)
const outcomes = []
const got = (answer) => (outcomes.push(answer.outcome), answer)

/** A receipt of the payment side: a compact JWS. */
function receipt(claims) {
  const parts = [{ alg: 'HS256', typ: 'grab-receipt+jwt', kid: 'new' }, { status: 'paid', at: Date.now(), ...claims }]
  const signed = parts.map((part) => Buffer.from(JSON.stringify(part)).toString('base64url')).join('.')
  return `${signed}.${createHmac('sha256', Buffer.from(key, 'base64url')).update(signed).digest('base64url')}`
}

const opened = got(
  await client.open(
    { kind: 'stock', issuer: 'shop', total: 9, price: 100, currency: 'CNY', hold_ms: 600_000, extensions: 1 },
    sale,
    { id: 'open-1', operator: 'olga' },
  ),
)
assert.equal(opened.id, 'open-1')
got(await client.open(terms, tea))
got(await client.open(terms, cake))
got(await client.amend(sale, { max_per_grab: 4 }))
got(await client.pause(sale))
got(await client.resume(sale, { operator: 'olga' }))
const held = got(await client.grab(sale, 'ann', { quantity: 4, attributes: { device: 'd1' } }))
assert.equal(held.due, 400)
got(await client.extend(sale, held.grab, 'ann'))
const paid = { payment: 'p', paid: 400, currency: 'CNY' }
const { aud } = JSON.parse(Buffer.from(held.payment_token.split('.')[1], 'base64url'))
paid.receipt = receipt({ aud, offer: sale, grab: held.grab, user: 'ann', ...paid })
got(await client.confirm(sale, held.grab, 'ann', paid))
got(await client.return(sale, held.grab, 'ann', { quantity: 1, reason: 'broken' }))
const other = got(await client.grab(sale, 'bob'))
got(await client.release(sale, other.grab, 'bob'))
const grabs = [tea, cake].map((name) => ({ offer: name, user: 'ann' }))
for (const answer of await client.takeBasket(grabs, { id: 'both' })) got(answer)
got(await client.redeem(tea, 'both.2', 'ann', 'order-1'))
got(await client.unredeem(tea, 'both.2', 'ann', 'order-1'))
const closed = got(await client.close(sale))
for (const answer of await client.takeBasket([{ offer: sale, user: 'c' }, grabs[0]])) got(answer)

const refused = got(await client.grab(sale, 'ann', { id: 'late-1' }))
assert.match(refused.message, /is closed/)
assert.deepEqual([refused.id, refused.user, refused.code], ['late-1', 'ann', 29])
assert.equal('detail' in refused, false)
await assert.rejects(client.offer(`${offer}-x`), (error) => error instanceof RequestProblem && error.status === 404)
await assert.rejects(client.offers({ limit: 0 }), { name: 'RequestProblem', field: 'limit' })
assert.throws(() => client.grab('..', 'ann'), TypeError)

assert.equal((await client.offer(sale, { after: closed })).state, 'closed')
const pages = []
for await (const page of client.pages((asked) => client.offerGrabs(sale, asked), { limit: 1, order: 'place' })) {
  pages.push(...page.grabs.map((row) => row.user))
}
assert.deepEqual(pages, ['ann', 'bob'])
assert.equal((await client.userGrabs('ann', { limit: 5, after: closed })).grabs.length > 2, true)
assert.equal((await client.userBalances('ann')).balances.length > 1, true)
assert.equal((await client.userTransfers('ann', { limit: 3 })).transfers.length, 3)

const types = []
let place
for await (const { id, type, event } of client.offerEvents(sale, { after: 0 })) {
  assert.equal(event.offer, sale)
  types.push(type)
  if (type === 'grab.held') place ??= id
  if (type === 'offer.closed') break
}
assert.deepEqual([types[0], types.filter((type) => type === 'grab.held').length], ['offer.opened', 2])
for await (const { type } of client.offerEvents(sale, { after: place })) {
  assert.equal(type, 'grab.extended')
  break
}
const control = new AbortController()
const following = client.userEvents('ann', { signal: control.signal }).next()
setTimeout(() => control.abort(new Error('enough')), 200)
await assert.rejects(following, /enough/)

const list = `${offer}-list`
const waiting = `w-${offer}`
const scarce = { kind: 'stock', issuer: 'shop', total: 1, price: 1, currency: 'CNY', hold_ms: 600_000 }
await client.open({ ...scarce, waiting_list: true }, list)
await client.grab(list, 'ann')
await client.grab(list, waiting, { wait: true, id: 'w-1' })
const enough = new AbortController()
let told
const onPosition = (position) => {
  told = position
  enough.abort(new Error('told'))
}
await assert.rejects(async () => {
  for await (const { type } of client.userEvents(waiting, { signal: enough.signal, onPosition })) {
    assert.equal(type, 'grab.queued')
  }
}, /told/)
assert.deepEqual(told, { offer: list, grab: 'w-1', position: 1 })
assert.equal(typeof OutcomeUnknown, 'function')
console.log(JSON.stringify(outcomes))
