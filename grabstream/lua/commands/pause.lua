#!lua flags=allow-oom
-- Pauses an offer: it refuses grabs, and serves no queued grabs, until it is resumed.
--
-- Command: pause
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list ·
--   KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] past zset · KEYS[12] cleaning hash
-- KEYS[13 …] ten keys for each offer, then five for each campaign, see includes/offers.lua
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms ·
--   ARGV[5] ''
-- ARGV[6] msgpack, see includes/command.lua; a body: {operator, signers}
-- Outcomes: 21 fenced (whole call) · 23 conflict · 24 no_such_offer · 29 over · 8 paused
-- Events: offer.paused
-- Returns msgpack: {0, history, rows} as grab does, or {code, retry_at, message}.
--- @include "decide"
--- @include "offers"
--- @include "queue"
--- @include "command"

return carry_out_for_offer(function(call, offer, id, digest, body)
  offer.paused = true
  add_line(call, event_head(call, offer, 'offer.paused', id) .. senders_text(body) .. ',"digest":"' .. digest
    .. '"}')
  serve(call, offer, id) -- serves no queued grab: the sweeper leaves them to the resume
  return done_row(call, offer, CODE.paused), true
end)
