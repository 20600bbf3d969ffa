#!lua flags=allow-oom
-- Closes an offer by command: what is left returns to the issuer, and the seed is revealed. Users may still
-- pay for their holds.
--
-- Command: close
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list ·
--   KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] past zset · KEYS[12] cleaning hash
-- KEYS[13 …] ten keys for each offer, then five for each campaign, see includes/offers.lua
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms ·
--   ARGV[5] ''
-- ARGV[6] msgpack, see includes/command.lua; a body: {operator, signers: a JSON array as text}
-- Outcomes: 21 fenced (whole call) · 23 conflict · 24 no_such_offer · 29 over · 7 closed
-- Events: offer.closed
-- Returns msgpack: {0, history, rows} as grab does, or {code, retry_at, message}.
--- @include "decide"
--- @include "offers"
--- @include "command"

return carry_out_for_offer(function(call, offer, id, digest, body)
  local amount, left = offer.amount_left, offer.units_left
  close_offer(call, offer, 'command', id, digest, senders_text(body))
  return {code = CODE.closed, seq = call.seq, at = call.now, amount = amount, left = left}, true
end)
