-- Units of an offer that come back or are kept: the end of holds, payments, returns, orders. The same steps
-- as models/rules, in the same order.
--- @include "records"
--- @include "decide"
--- @include "limits"
--- @include "offers"
--- @include "pieces"
--- @include "queue"

-- Units come back: to the offer while it is open.
local function take_back(offer, quantity)
  if not offer.closed then move_units(offer, quantity) end
end

-- A grab holds nothing more.
local function end_hold(offer, name, grab, status)
  local quantity = grab.held
  grab.held, grab.status = 0, status
  offer.held = offer.held - quantity
  give_back(offer, grab, quantity)
  take_back(offer, quantity)
  touch_grab(offer, name)
  return quantity
end

-- Ends what is held of a grab; returns the event's seq.
local function give_up(call, offer, name, grab, status, reason, command, digest)
  local quantity = end_hold(offer, name, grab, status)
  add_line(call, event_head(call, offer, 'grab.released', command)
    .. grab_text(offer, name, grab, quantity, quantity)
    .. ',"reason":"' .. reason .. '","to":"' .. returns_to(offer) .. '"'
    .. (digest and ',"digest":"' .. digest .. '"}' or '}'))
  grab.ended_seq, grab.ended_at = call.seq, call.now
  local seq = call.seq
  serve(call, offer, command)
  return seq
end

-- Ends a hold whose time is over; whoever meets it first does so, and always in this way.
local function lapse(call, offer, name, grab)
  if grab.held == 0 or call.now < grab.deadline + grab.grace then return end
  grab.lapsed = grab.held
  give_up(call, offer, name, grab, EXPIRED, 'expired', 'sweep')
end

-- Held units, or units that had lapsed and were taken anew, are the user's for good.
local function keep_units(offer, grab, quantity)
  if grab.held == 0 then
    grab.lapsed = grab.lapsed - quantity
  else
    grab.held = grab.held - quantity
    offer.held = offer.held - quantity
  end
  grab.taken = grab.taken + quantity
end

-- How many windows the units of one grab may be counted in.
local COUNTED_MAX = 100

-- Whether two lists of counters are the same ones in the same windows.
local function counts_alike(some, others)
  if #some ~= #others then return false end
  for i, one in ipairs(some) do
    local other = others[i]
    if one[1] ~= other[1] or one[2] ~= other[2] or one[3] ~= other[3] then return false end
  end
  return true
end

-- Units that had lapsed leave the offer once more, and count in the windows of now.
local function take_anew(offer, grab, counted, quantity)
  move_units(offer, -quantity)
  local newest = grab.counted[#grab.counted]
  if newest and counts_alike(newest[2], counted) then
    newest[1] = newest[1] + quantity
  else
    grab.counted[#grab.counted + 1] = {quantity, counted}
  end
  count(offer, counted, quantity)
end

-- A grab's payments that were not returned: a return may name all of them in its event.
local PAYMENTS_MAX = 100

-- What is said of one payment more.
local function too_many_payments()
  return {limit = {'payment', 'offer', PAYMENTS_MAX, 0, 0, 'offer'},
    message = 'payment: a grab has at most ' .. PAYMENTS_MAX .. ' payments that were not returned'}
end

-- What became of a payment, and how much it was.
local function keep_payment(call, campaign, payment, name, grab, code, quantity, paid, currency)
  campaign.payments[payment] = {name, grab, code, call.seq, call.now, quantity, paid or 0, (paid or 0) > 0
    and currency or ''}
  campaign.payments_changed[payment] = true
end

-- Takes units off the payments they were paid by, the first first; returns a list of {payment, units}.
local function unpay(grab, quantity)
  local refunds, paid = {}, grab.payments
  while quantity > 0 and #paid > 0 do
    local back = math.min(paid[1][2], quantity)
    quantity = quantity - back
    refunds[#refunds + 1] = {paid[1][1], back}
    paid[1][2] = paid[1][2] - back
    if paid[1][2] == 0 then table.remove(paid, 1) end
  end
  return refunds
end

-- Units that were the user's come back, with their codes, and to the limits where they are restored.
local function hand_back(offer, name, grab, quantity, restored)
  grab.taken = grab.taken - quantity
  if #grab.codes > 0 then
    for i = #grab.codes - quantity + 1, #grab.codes do
      if not offer.closed then offer.codes_back[#offer.codes_back + 1] = grab.codes[i] end
    end
    for _ = 1, quantity do table.remove(grab.codes) end
  end
  if restored then give_back(offer, grab, quantity) end
  take_back(offer, quantity)
  touch_grab(offer, name)
end

-- What an order used of a grab: {quantity, seq, at}, or nil.
local function order_of(offer, name, order)
  local field = name .. '/' .. order
  local known = offer.orders[field]
  if not known then
    local record = redis.call('HGET', KEYS[offer.base + ORDERS], field)
    known = record and unpack_order(record) or nil
  end
  return known
end

-- Units of a grab were used for an order, or (quantity 0) are no more.
local function keep_order(call, offer, name, order, quantity)
  local field = name .. '/' .. order
  offer.orders[field] = {quantity, call.seq, call.now}
  offer.orders_changed[field] = true
  touch_grab(offer, name)
end
