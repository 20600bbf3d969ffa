-- Units that are returned to an offer, or that a user keeps: the end of holds, payments, returns, orders. The
-- same steps as in models/rules, in the same order.
--- @include "cost"
--- @include "packed_values"
--- @include "decide"
--- @include "limits"
--- @include "offers"
--- @include "pieces"
--- @include "queue"

-- Returns units to the offer while it is open. After the close they go to the account of returns_to.
local function return_to_offer(offer, quantity)
  if not offer.closed then move_units(offer, quantity) end
end

-- Ends the hold of a grab; returns the number of units that it held.
local function end_hold(offer, name, grab, status)
  local quantity = grab.held
  grab.held, grab.status = 0, status
  offer.held = offer.held - quantity
  give_back(offer, grab, quantity)
  return_to_offer(offer, quantity)
  touch_grab(offer, name)
  return quantity
end

-- Ends the hold of a grab with an event, then serves the queue; returns the event's seq.
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

-- Ends a hold if it has expired. The first call that reads the hold after its end does this, always in the
-- same way.
local function lapse(call, offer, name, grab)
  if grab.held == 0 or call.now < grab.deadline + grab.grace then return end
  grab.lapsed = grab.held
  give_up(call, offer, name, grab, EXPIRED, 'expired', 'sweep')
end

-- Makes units the user's permanently: units that are held, or expired units that a late payment has taken
-- again.
local function keep_units(offer, grab, quantity)
  if grab.held == 0 then
    grab.lapsed = grab.lapsed - quantity
  else
    grab.held = grab.held - quantity
    offer.held = offer.held - quantity
  end
  grab.taken = grab.taken + quantity
end

-- The number of entries that `grab.counted` may have.
local COUNTED_MAX = 100

-- Whether two lists have the same counters in the same windows.
local function are_same_counters(some, others)
  if #some ~= #others then return false end
  for i, counter in ipairs(some) do
    local other = others[i]
    if counter[1] ~= other[1] or counter[2] ~= other[2] or counter[3] ~= other[3] then return false end
  end
  return true
end

-- Takes expired units from the offer again; they count in the current windows.
local function retake_units(offer, grab, counted, quantity)
  move_units(offer, -quantity)
  local newest = grab.counted[#grab.counted]
  if newest and are_same_counters(newest[2], counted) then
    newest[1] = newest[1] + quantity
  else
    grab.counted[#grab.counted + 1] = {quantity, counted}
  end
  count(offer, counted, quantity)
end

-- The number of payments a grab may have that were not returned, since the event of a return may name all of
-- them.
local PAYMENTS_MAX = 100

-- The details of the answer to a payment that cannot be served, by its outcome; `grab` may be nil where the
-- outcome is about no grab.
local function unserved_details(code, grab)
  if code == CODE.limit_reached then
    return {limit = {'payment', 'offer', PAYMENTS_MAX, 0, 0, 'offer'},
      message = 'payment: a grab has at most ' .. PAYMENTS_MAX .. ' payments that were not returned'}
  end
  if code == CODE.not_enough_left then return {left = grab.held > 0 and grab.held or grab.lapsed} end
  return {message = code == CODE.invalid and 'paid: is not the amount due' or nil}
end

-- The record in a field of the payments of a campaign: {offer, grab, code, seq, at, quantity, paid, currency
-- or '', basket or nil}, or nil. The field is the payment, or a `payment_field`.
local function stored_payment(campaign, field)
  local known = campaign.payments[field]
  if type(known) == 'table' then return known end
  local record = known or redis.call('HGET', campaign.payments_key, field)
  return record and cmsgpack.unpack(record) or nil
end

-- Records the outcome and the amount of a payment; of a grab of a basket (nil: none) also as that of the
-- grab, since others may follow.
local function keep_payment(call, campaign, payment, name, grab, code, quantity, paid, currency, basket)
  local known = {name, grab, code, call.seq, call.now, quantity, paid or 0, (paid or 0) > 0
    and currency or '', basket}
  campaign.payments[payment], campaign.payments_changed[payment] = known, true
  if basket then
    local field = payment_field(payment, name, grab)
    campaign.payments[field], campaign.payments_changed[field] = known, true
  end
end

-- Records a payment, or the sum of it beyond the recorded one, as due for a refund. Returns the details of
-- its answer; `known_grab` is the grab, if it was found.
local function keep_refund_due(call, campaign, payment, name, grab, code, amount, currency, known_grab)
  if code == CODE.conflict then
    payment = payment_field(payment, name, grab, currency)
    local booked = stored_payment(campaign, payment)
    amount = amount + (booked and booked[7] or 0)
  end
  keep_payment(call, campaign, payment, name, grab, code, 0, amount, currency,
    code ~= CODE.conflict and known_grab and known_grab.basket or nil)
  if code == CODE.conflict then
    return {message = 'payment: this id is recorded with other contents; what exceeds it is to be paid back'}
  end
  local details = unserved_details(code, known_grab)
  details.message = (details.message and details.message .. '; ' or '') .. 'the payment is to be paid back'
  return details
end

-- Subtracts returned units from the payments that paid for them, the oldest first; returns a list of
-- {payment, units}.
local function refund_units(grab, quantity)
  local refunds, paid = {}, grab.payments
  while quantity > 0 and #paid > 0 do
    local refunded = math.min(paid[1][2], quantity)
    quantity = quantity - refunded
    refunds[#refunds + 1] = {paid[1][1], refunded}
    paid[1][2] = paid[1][2] - refunded
    if paid[1][2] == 0 then table.remove(paid, 1) end
  end
  return refunds
end

local return_units
do
  -- Voids the codes of units that are returned, the last ones of the grab. Returns them.
  local function void_codes(offer, grab, quantity)
    local kept = #grab.codes - quantity
    local codes = {unpack(grab.codes, kept + 1)}
    for i = #grab.codes, kept + 1, -1 do grab.codes[i] = nil end
    spend(COST.item * quantity + COST.listed_byte * bytes_of(codes))
    return codes
  end

  -- Returns a user's units; `restored`: also to the limits. Units with codes go back without them, since the
  -- user has seen them: they are in the offer's account until it closes, but they cannot be taken. Returns
  -- the details of the answer.
  function return_units(offer, name, grab, quantity, restored)
    local details = {}
    grab.taken = grab.taken - quantity
    if restored then give_back(offer, grab, quantity) end
    if #grab.codes == 0 then
      return_to_offer(offer, quantity)
    else
      details.voided_codes = void_codes(offer, grab, quantity)
      if not offer.closed then offer.amount_left = offer.amount_left + quantity end
    end
    touch_grab(offer, name)
    return details
  end
end

-- The use of a grab for an order: {quantity, seq, at}, or nil.
local function order_of(offer, name, order)
  local field = name .. '/' .. order
  local known = offer.orders[field]
  if not known then
    local record = redis.call('HGET', KEYS[offer.base + KEY.orders], field)
    known = record and unpack_order(record) or nil
  end
  return known
end

-- Records that an order used units of a grab, or (quantity 0) that the use was undone.
local function keep_order(call, offer, name, order, quantity)
  local field = name .. '/' .. order
  offer.orders[field] = {quantity, call.seq, call.now}
  offer.orders_changed[field] = true
  touch_grab(offer, name)
end
