// Uses every method of the JavaScript client, and prints what it got: node every_call.mjs URL OFFER
import assert from 'node:assert/strict'
import { Client, OutcomeUnknown, RequestProblem } from '../../client/javascript/grabstream.mjs'

const [url, offer] = process.argv.slice(2)
const client = new Client(`${url}/`)
const terms = { kind: 'coupon', issuer: 'shop', total: 9 }
const [sale, tea, cake] = ['sale', 'tea', 'cake'].map((name) => `${offer}:${name}`)
const outcomes = []
const got = (answer) => (outcomes.push(answer.outcome), answer)

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
got(await client.confirm(sale, held.grab, 'ann', { payment: 'p', paid: 400, currency: 'CNY' }))
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
assert.equal(typeof OutcomeUnknown, 'function')
console.log(JSON.stringify(outcomes))
