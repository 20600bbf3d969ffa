#!lua flags=allow-oom
-- Holds that were paid: units are the user's for good. A payment that cannot be served is to be paid back, once.
--
-- Command: confirm
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list · KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11 …] eight keys for each offer, then three for each campaign, see includes/offers.lua
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms · ARGV[5] ''
-- ARGV[6] msgpack, see includes/course.lua; a body: {grab, payment, paid, currency, quantity}
-- Outcomes: 21 fenced (whole call) · 23 conflict · 24 no_such_offer · 20 invalid · 25 no_such_grab · 33 not_enough_left ·
--           34 expired · 35 not_held · 2 confirmed
-- Events: grab.confirmed · payment.refund_due · grab.released (expired) · grab.held (waited)
-- Returns msgpack: {0, history, rows} as grab does, or {code, retry_at, message}.
--- @include "shard"
--- @include "undo"
--- @include "records"
--- @include "calendar"
--- @include "decide"
--- @include "repeats"
--- @include "limits"
--- @include "offers"
--- @include "pieces"
--- @include "course"

local CONFIRM_FORM = '%s,"held":%.0f%s,"issuer":"%s"%s%s,"digest":"%s"}'

-- What became of a payment: {offer, grab, code, seq, at, quantity}, or nil.
local function payment_of(campaign, payment)
  local known = campaign.payments[payment]
  if not known then
    local record = redis.call('HGET', campaign.payments_key, payment)
    known = record and cmsgpack.unpack(record) or nil
  end
  return known
end

-- A payment that cannot be served is refused, and is to be paid back, once.
local function unserved(call, offer, id, digest, body, campaign, name, more)
  local code = CODE[name]
  local row = refused_row(call, code, more or {})
  if not body.payment or body.paid == 0 then return row end
  call.lines[#call.lines + 1] = event_head(call, offer, 'payment.refund_due', id) .. ',"grab":"' .. body.grab .. '","payment":"'
    .. body.payment .. '","amount":' .. body.paid .. ',"asset":"' .. body.currency .. '","outcome":"' .. name
    .. '","digest":"' .. digest .. '"}'
  keep_payment(call, campaign, body.payment, offer, body.grab, code, 0)
  row[2] = call.seq
  row[10].message = (row[10].message and row[10].message .. '; ' or '') .. 'the payment is to be paid back'
  return row, true
end

-- Whether a payment that came too late gets its units all the same; they are taken then.
local function retake(call, offer, grab, quantity)
  if offer.rules.late ~= 'retake' or offer.closed or call.now >= offer.closes_at then return false end
  if quantity > (offer.queue_length > 0 and 0 or offer.units_left) then return false end
  local counted = windows_of_now(offer, grab.under, call.now)
  if not is_left(offer, counted, quantity) then return false end
  take_anew(offer, grab, counted, quantity)
  return true
end

local function confirm(call, offer, grab, id, digest, body, campaign, quantity)
  local retaken = grab.held == 0
  keep_units(offer, grab, quantity)
  local codes = hand_out(offer, grab, quantity)
  local payment = (body.payment and ',"payment":"' .. body.payment .. '"' or '')
    .. (body.paid > 0 and ',"paid":' .. body.paid .. ',"currency":"' .. body.currency .. '"' or '')
  call.lines[#call.lines + 1] = string.format(CONFIRM_FORM,
    event_head(call, offer, 'grab.confirmed', id) .. grab_text(offer, body.grab, grab, quantity, quantity), grab.held, payment,
    offer.issuer, retaken and ',"retaken":true' or '', codes_text(codes), digest)
  grab.confirmed_seq, grab.confirmed_at = call.seq, call.now
  if body.payment then
    grab.payments[#grab.payments + 1] = {body.payment, quantity}
    keep_payment(call, campaign, body.payment, offer, body.grab, CODE.confirmed, quantity)
  end
  touch_grab(offer, body.grab)
  local said = coupon_row(offer, grab, codes, {})
  return {CODE.confirmed, call.seq, call.now, quantity, quantity, grab.place, offer.units_left, 0, 0, said}, true
end

return settle(function(call, offer, grab, id, digest, body, campaign)
  local known = body.payment and payment_of(campaign, body.payment)
  if known then
    if known[1] ~= offer.name or known[2] ~= body.grab then return {CODE.conflict, 0, call.now} end
    return again_row(known[3], known[4], known[5], known[6])
  end
  if not grab then return unserved(call, offer, id, digest, body, campaign, 'no_such_grab') end
  local base = grab.held > 0 and grab.held or grab.lapsed
  if base == 0 then
    if not body.payment and grab.taken > 0 and grab.confirmed_seq > 0 then
      return again_row(CODE.confirmed, grab.confirmed_seq, grab.confirmed_at)
    end
    return unserved(call, offer, id, digest, body, campaign, 'not_held')
  end
  local quantity = body.quantity or base
  if body.paid ~= grab.price * quantity or (body.paid > 0 and body.currency ~= offer.rules.currency) then
    return unserved(call, offer, id, digest, body, campaign, 'invalid', {message = 'paid: not what is due'})
  end
  if quantity > base then return unserved(call, offer, id, digest, body, campaign, 'not_enough_left', {left = base}) end
  if grab.held == 0 and not retake(call, offer, grab, quantity) then
    return unserved(call, offer, id, digest, body, campaign, 'expired')
  end
  return confirm(call, offer, grab, id, digest, body, campaign, quantity)
end)
