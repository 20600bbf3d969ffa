#!lua flags=allow-oom
-- Offers that refuse grabs until they are resumed.
--
-- Command: pause
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list · KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8 …] four keys for each command, see includes/steer.lua
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms · ARGV[5] ''
-- ARGV[6] msgpack: list of {id, offer, campaign, digest}
-- Outcomes: 21 fenced (whole call) · 23 conflict · 24 no_such_offer · 29 over · 8 paused
-- Events: offer.paused
-- Returns msgpack: {0, history, rows} as grab does, or {code, retry_at, message}.
--- @include "shard"
--- @include "records"
--- @include "decide"
--- @include "repeats"
--- @include "offers"
--- @include "steer"

return steer(function(call, offer, id, digest)
  offer.paused = true
  call.lines[#call.lines + 1] = event_head(call, offer, 'offer.paused', id) .. ',"digest":"' .. digest .. '"}'
  return 8, 0
end)
