#!lua flags=allow-oom
-- Returns units that were the user's, and the money that was paid for them. Their codes are void.
--
-- Command: return
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list ·
--   KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] past zset · KEYS[12] cleaning hash
-- KEYS[13 …] ten keys for each offer, then five for each campaign, see includes/offers.lua
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms ·
--   ARGV[5] ''
-- ARGV[6] msgpack, see includes/command.lua; a body: {grab, quantity, reason: as JSON text}
-- Outcomes: 21 fenced (whole call) · 23 conflict · 24 no_such_offer · 25 no_such_grab · 33 not_enough_left ·
--           35 not_held · 4 returned
-- Events: grab.returned · grab.released (expired) · grab.held (waited)
-- Returns msgpack: {0, history, rows} as grab does, or {code, retry_at, message}.
--- @include "decide"
--- @include "offers"
--- @include "pieces"
--- @include "queue"
--- @include "settling"
--- @include "command"

-- The refunds for returned units, as JSON text or '': to the payments that paid for them, the oldest first.
local function refunds_text(grab, quantity)
  local refunds = refund_units(grab, quantity)
  if grab.price == 0 then return '' end
  for i, refund in ipairs(refunds) do
    refunds[i] = '["' .. refund[1] .. '",' .. int(refund[2] * grab.price) .. ']'
  end
  return table.concat(refunds, ',')
end

return carry_out(about_grab(function(call, offer, grab, id, digest, body)
  if not grab then return refused_row(call, CODE.no_such_grab) end
  local returnable = grab.taken - grab.redeemed
  local quantity = body.quantity or returnable
  if grab.taken == 0 then return refused_row(call, CODE.not_held) end
  if quantity == 0 or quantity > returnable then
    return refused_row(call, CODE.not_enough_left, {left = returnable})
  end
  local refunds = refunds_text(grab, quantity)
  local details = return_units(offer, body.grab, grab, quantity, offer.rules.return_restores)
  add_line(call, event_head(call, offer, 'grab.returned', id)
    .. grab_text(offer, body.grab, grab, quantity, quantity)
    .. (body.reason ~= '""' and ',"reason":' .. body.reason or '') .. ',"to":"' .. returns_to(offer) .. '"'
    .. (refunds ~= '' and ',"refunds":[' .. refunds .. '],"currency":"' .. offer.rules.currency .. '"' or '')
    .. ',"issuer":"' .. offer.issuer .. (offer.rules.return_restores and '","restored":true' or '"')
    .. codes_text('voided_codes', details.voided_codes or {}) .. ',"digest":"' .. digest .. '"}')
  local row = done_row(call, offer, CODE.returned, grab, quantity, details)
  serve(call, offer, id)
  row.left = offer.units_left
  return row, true
end))
