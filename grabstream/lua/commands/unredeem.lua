#!lua flags=allow-oom
-- Takes back the use of units for an order.
--
-- Command: unredeem
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list ·
--   KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] past zset · KEYS[12] cleaning hash
-- KEYS[13 …] ten keys for each offer, then five for each campaign, see includes/offers.lua
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms ·
--   ARGV[5] ''
-- ARGV[6] msgpack, see includes/command.lua; a body: {grab, order}
-- Outcomes: 21 fenced (whole call) · 23 conflict · 24 no_such_offer · 25 no_such_grab · 36 not_redeemable ·
--   12 unredeemed
-- Events: grab.unredeemed · grab.released (expired) · grab.held (waited)
-- Returns msgpack: {0, history, rows} as grab does, or {code, retry_at, message}.
--- @include "decide"
--- @include "repeats"
--- @include "offers"
--- @include "pieces"
--- @include "settling"
--- @include "command"

return carry_out(about_grab(function(call, offer, grab, id, digest, body)
  if not grab then return refused_row(call, CODE.no_such_grab) end
  local order = order_of(offer, body.grab, body.order)
  if not order then return refused_row(call, CODE.not_redeemable) end
  local quantity, seq, time = unpack(order)
  if quantity == 0 then return again_row(CODE.unredeemed, seq, time) end
  grab.redeemed = grab.redeemed - quantity
  add_line(call, event_head(call, offer, 'grab.unredeemed', id)
    .. grab_text(offer, body.grab, grab, quantity, quantity)
    .. ',"order":"' .. body.order .. '","digest":"' .. digest .. '"}')
  keep_order(call, offer, body.grab, body.order, 0)
  return done_row(call, offer, CODE.unredeemed, grab, quantity), true
end))
