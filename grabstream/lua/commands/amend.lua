#!lua flags=allow-oom
-- Changes the terms of an open offer, in order with its grabs. The total never falls below the units that are
-- taken or held.
--
-- Command: amend
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list ·
--   KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] past zset · KEYS[12] cleaning hash
-- KEYS[13 …] ten keys for each offer, then five for each campaign, see includes/offers.lua
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms ·
--   ARGV[5] ''
-- ARGV[6] msgpack, see includes/command.lua; a body: {changes, json: the changes as text, operator, signers}
-- Outcomes: 21 fenced (whole call) · 23 conflict · 24 no_such_offer · 20 invalid · 29 over ·
--   33 not_enough_left · 6 amended
-- Events: offer.amended · grab.held (waited)
-- Returns msgpack: {0, history, rows} as grab does, or {code, retry_at, message}.
--- @include "decide"
--- @include "offers"
--- @include "pieces"
--- @include "queue"
--- @include "command"

local OF_ENVELOPE = {title = true, opens_at = true, closes_at = true, beacon = true, beacon_round = true}

-- The reason why these changes are invalid for this offer at this time, or nil.
local function unfit(offer, changes, now)
  local rules = offer.rules
  if not offer.pieces then
    for name in pairs(changes) do
      if not OF_ENVELOPE[name] then
        return 'changes: the money, parts and law of an envelope cannot change'
      end
    end
  end
  if changes.beacon then
    if not rules.beacon_round then return 'changes.randomness: the offer does not await a beacon' end
    if rules.beacon then return 'changes.randomness: was already given' end
    if now < rules.beacon_at then return 'changes.randomness: the round is not due yet' end
    if changes.beacon_round ~= rules.beacon_round then
      return 'changes.randomness: the offer awaits round ' .. int(rules.beacon_round)
    end
  end
  if changes.opens_at and now >= offer.opens_at then return 'changes.opens_at: the offer is already open' end
  local closes_at = changes.closes_at or offer.closes_at
  if (changes.opens_at or changes.closes_at) and closes_at <= math.max(changes.opens_at or offer.opens_at,
    now) then
    return 'changes.closes_at: must be after opens_at and after now'
  end
  if not offer.pieces then return nil end
  if changes.total and offer.loads.codes then
    return 'changes.total: the total of an offer with codes cannot change'
  end
  if changes.max_per_grab and changes.max_per_grab > BOUNDS.codes_per_grab
    and (rules.codes or offer.loads.codes) then
    return 'changes.max_per_grab: ' .. BOUNDS.with_codes
  end
  if changes.price and not rules.currency then return 'changes.price: the offer has no currency' end
  if not rules.hold_ms and (changes.hold_ms or changes.extensions or changes.late or changes.grace_ms) then
    return 'changes.hold_ms: an offer that grants at once cannot get holds'
  end
  if ((changes.late or rules.late) == 'grace') ~= ((changes.grace_ms or rules.grace_ms) > 0) then
    return 'changes.grace_ms: is required with late: grace, and only with it'
  end
  if (changes.price or rules.price or 0) * (changes.max_per_grab or rules.max_per_grab) > AMOUNT_MAX then
    return 'changes.price: price × max_per_grab is too large'
  end
end

return carry_out(function(call, offer, id, digest, body)
  local changes = body.changes
  local message = unfit(offer, changes, call.now)
  if message then return refused_row(call, CODE.invalid, {message = message}) end
  if offer.closed then return refused_row(call, CODE.over) end
  local added = (changes.total or offer.total) - offer.total
  if offer.units_left + added < 0 then
    return refused_row(call, CODE.not_enough_left, {left = offer.units_left})
  end
  move_units(offer, added)
  change_terms(offer, changes)
  local source = offer.pieces and 'issuer:' .. offer.issuer or 'external:' .. offer.rules.funding
  add_line(call, event_head(call, offer, 'offer.amended', id) .. ',"changes":' .. body.json .. ',"asset":"'
    .. offer.asset
    .. '","source":"' .. source .. '"' .. (added > 0 and ',"added":' .. int(added) or '')
    .. (added < 0 and ',"removed":' .. int(-added) or '')
    .. ',"left":' .. int(offer.units_left) .. senders_text(body) .. ',"digest":"' .. digest .. '"}')
  local row = done_row(call, offer, CODE.amended)
  serve(call, offer, id)
  row.left = offer.units_left
  return row, true
end)
