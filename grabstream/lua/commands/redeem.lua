#!lua flags=allow-oom
-- Redeems units of a coupon grab for an order, once per order, before valid_until.
--
-- Command: redeem
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list ·
--   KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] past zset · KEYS[12] cleaning hash
-- KEYS[13 …] ten keys for each offer, then five for each campaign, see includes/offers.lua
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms ·
--   ARGV[5] ''
-- ARGV[6] msgpack, see includes/command.lua; a body: {grab, order, quantity}
-- Outcomes: 21 fenced (whole call) · 23 conflict · 24 no_such_offer · 25 no_such_grab · 34 expired ·
--           36 not_redeemable · 11 redeemed
-- Events: grab.redeemed · grab.released (expired) · grab.held (waited)
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
  if order and order[1] > 0 then
    if order[1] ~= body.quantity then return {code = CODE.conflict, at = call.now} end
    return again_row(CODE.redeemed, order[2], order[3], order[1])
  end
  if offer.rules.valid_until and call.now >= offer.rules.valid_until then
    return refused_row(call, CODE.expired)
  end
  if offer.kind ~= 'coupon' or body.quantity > grab.taken - grab.redeemed then
    return refused_row(call, CODE.not_redeemable)
  end
  grab.redeemed = grab.redeemed + body.quantity
  add_line(call, event_head(call, offer, 'grab.redeemed', id)
    .. grab_text(offer, body.grab, grab, body.quantity, body.quantity) .. ',"order":"' .. body.order
    .. '","digest":"' .. digest .. '"}')
  keep_order(call, offer, body.grab, body.order, body.quantity)
  return done_row(call, offer, CODE.redeemed, grab, body.quantity), true
end))
