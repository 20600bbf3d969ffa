#!lua flags=allow-oom
-- Extends the deadline of a hold by hold_ms, as often as the offer allows.
--
-- Command: extend
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list ·
--   KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] past zset · KEYS[12] cleaning hash
-- KEYS[13 …] ten keys for each offer, then five for each campaign, see includes/offers.lua
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms ·
--   ARGV[5] ''
-- ARGV[6] msgpack, see includes/command.lua; a body: {grab}
-- Outcomes: 21 fenced (whole call) · 23 conflict · 24 no_such_offer · 25 no_such_grab · 31 limit_reached ·
--           34 expired · 35 not_held · 10 extended
-- Events: grab.extended · grab.released (expired) · grab.held (waited)
-- Returns msgpack: {0, history, rows} as grab does, or {code, retry_at, message}.
--- @include "packed_values"
--- @include "decide"
--- @include "offers"
--- @include "pieces"
--- @include "command"

return carry_out(about_grab(function(call, offer, grab, id, digest, body)
  if not grab then return refused_row(call, CODE.no_such_grab) end
  if grab.held == 0 then
    return refused_row(call, grab.status == EXPIRED and CODE.expired or CODE.not_held)
  end
  if grab.extensions >= offer.rules.extensions then
    return refused_row(call, CODE.limit_reached, {limit = {'grab', 'offer', offer.rules.extensions, 0, 0,
      'offer'}})
  end
  grab.extensions, grab.deadline = grab.extensions + 1, grab.deadline + offer.rules.hold_ms
  add_line(call, event_head(call, offer, 'grab.extended', id)
    .. grab_text(offer, body.grab, grab, grab.held, grab.held)
    .. ',"deadline_at":' .. int(grab.deadline) .. ',"digest":"' .. digest .. '"}')
  touch_grab(offer, body.grab)
  return done_row(call, offer, CODE.extended, grab, grab.held, {deadline_at = grab.deadline}), true
end))
