// Grabs once, and prints the outcome or the error: node one_call.mjs URL OFFER USER ID MILLISECONDS
import { Client } from '../../grabstream/client/javascript/grabstream.mjs'

const [url, offer, user, id, timeoutMs] = process.argv.slice(2)
try {
  const answer = await new Client(url, { timeoutMs: Number(timeoutMs) }).grab(offer, user, { id })
  console.log(answer.outcome, answer.repeated ?? false)
} catch (error) {
  console.log(error.name, error.type ?? '')
}
