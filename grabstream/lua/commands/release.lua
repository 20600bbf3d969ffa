#!lua flags=allow-oom
-- Releases a hold, or removes a grab from the queue.
--
-- Command: release
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list ·
--   KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] past zset · KEYS[12] cleaning hash
-- KEYS[13 …] ten keys for each offer, then five for each campaign, see includes/offers.lua
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms ·
--   ARGV[5] ''
-- ARGV[6] msgpack, see includes/command.lua; a body: {grab}
-- Outcomes: 21 fenced (whole call) · 23 conflict · 24 no_such_offer · 25 no_such_grab · 34 expired ·
--           35 not_held · 3 released
-- Events: grab.released · grab.held (waited)
-- Returns msgpack: {0, history, rows} as grab does, or {code, retry_at, message}.
--- @include "packed_values"
--- @include "decide"
--- @include "repeats"
--- @include "queue"
--- @include "settling"
--- @include "command"

return carry_out(about_grab(function(call, offer, grab, id, digest, body)
  if not grab then return refused_row(call, CODE.no_such_grab) end
  if grab.status == WAITING then
    leave_queue(call, offer, body.grab, grab, id, digest)
    local row = done_row(call, offer, CODE.released, grab)
    serve(call, offer, id)
    row.left = offer.units_left
    return row, true
  end
  if grab.held > 0 then
    local quantity = grab.held
    local seq = give_up(call, offer, body.grab, grab, RELEASED, 'command', id, digest)
    local row = done_row(call, offer, CODE.released, grab, quantity)
    row.seq = seq
    return row, true
  end
  if grab.status == RELEASED then return again_row(CODE.released, grab.ended_seq, grab.ended_at) end
  return refused_row(call, grab.status == EXPIRED and CODE.expired or CODE.not_held)
end))
