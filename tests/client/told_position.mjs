// Follows a user with a callback that throws, and prints what came: node told_position.mjs URL
import { Client } from '../../grabstream/client/javascript/grabstream.mjs'

const onPosition = ({ position }) => {
  throw new Error(`position ${position}`)
}
const types = []
try {
  for await (const { type } of new Client(process.argv[2]).userEvents('ann', { onPosition })) types.push(type)
} catch (error) {
  console.log(types.join(' '), '|', error.name, error.message)
}
