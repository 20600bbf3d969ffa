// What a service in TypeScript writes; compiled by a test, never run.
import { Client, OutcomeUnknown, type Answer, type Hours, type WaitingPosition } from '../../grabstream/client/javascript/grabstream.mjs'

export function open(client: Client): Promise<Answer> {
  const hours = [{ weekdays: ['mon', 'tue'], from: '09:00' }] satisfies Hours[]
  return client.open({ kind: 'stock', issuer: 's', total: 1, hours }, 'fair:lamp', { operator: 'mia', approvals: [] })
}

export async function buy(client: Client, user: string): Promise<number> {
  const answer: Answer = await client.grab('fair:lamp', user, { quantity: 2, id: 'g-1' })
  if (answer.outcome !== 'held') return 0
  const paid = await client.confirm('fair:lamp', answer.grab!, user, { paid: answer.due!, currency: 'CNY' })
  for await (const page of client.pages((asked) => client.offers(asked), { state: 'open' })) {
    for (const offer of page.offers) console.log(offer.units_left.toFixed())
  }
  const onPosition = ({ grab, position }: WaitingPosition) => console.log(grab, position.toFixed())
  for await (const { type, event } of client.userEvents(user, { after: '0.0', onPosition })) {
    if (type === 'grab.expired') console.log(event.grab)
  }
  for (const { available } of (await client.userBalances(user)).balances) {
    const sum: bigint = BigInt(available)
    // @ts-expect-error a sum may be beyond the numbers that are exact
    available.toFixed()
    console.log(`${sum}`)
  }
  const mine = await client.userGrabs(user, { after: paid })
  return mine.grabs.reduce((sum, row) => sum + row.quantity, 0)
}

export function wrong(client: Client): unknown {
  // @ts-expect-error a state that offers do not have
  client.offers({ state: 'broken' })
  // @ts-expect-error a term that offers do not have
  client.open({ kind: 'stock', issuer: 's', total: 1, colour: 'red' })
  // @ts-expect-error a term that `amend` does not change
  client.amend('fair:lamp', { issuer: 's' })
  // @ts-expect-error a grab has a user
  return client.grab('fair:lamp').catch((error: unknown) => error instanceof OutcomeUnknown && error.id)
}
