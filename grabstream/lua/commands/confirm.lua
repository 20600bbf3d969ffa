#!lua flags=allow-oom
-- Confirms a hold that was paid: its units are then the user's. A payment that cannot be served is due for a
-- refund, once.
--
-- Command: confirm
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list ·
--   KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] past zset · KEYS[12] cleaning hash
-- KEYS[13 …] ten keys for each offer, then five for each campaign, see includes/offers.lua
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms ·
--   ARGV[5] ''
-- ARGV[6] msgpack: {offers, campaign of each offer (from 1), campaigns, offer of each confirmation, sizes,
--         payments, users, paid, currencies, quantities, signed: whether a receipt says it}. sizes: {number
--         of confirmations; the widths of ids, digests, grabs and payments, as in `grab`; that of payments is
--         false if any has none}. payments: if any has none, a list. payments, users, quantities: false if
--         none has one; else a list, in which '' or 0 stands for none. offer, paid, currency ('' for none),
--         signed: a list, or the value of all
-- ARGV[7] ids, with '","' between them · ARGV[8] digests · ARGV[9] grabs · ARGV[10] payments, or ''. The id
--         of a payment is the inside of a JSON text, in its one encoding
-- Outcomes: 21 fenced (whole call) · 23 conflict · 24 no_such_offer · 20 invalid · 25 no_such_grab ·
--           31 limit_reached · 33 not_enough_left · 34 expired · 35 not_held · 2 confirmed
--           A payment for a retired offer gets 24 and is to be paid back, unless the payment is recorded.
-- Events: grab.confirmed · payment.refund_due · grab.released (expired) · grab.held (waited)
-- Returns msgpack: {0, history, rows} as grab does, or {code, retry_at, message}.
--- @include "decide"
--- @include "repeats"
--- @include "limits"
--- @include "offers"
--- @include "past"
--- @include "pieces"
--- @include "settling"
--- @include "command"
--- @include "paying"

-- The record in a field of the payments of a campaign, or nil. It counts while its offer exists, and for a
-- time after.
local function payment_of(call, campaign, field)
  local known = stored_payment(campaign, field)
  if known and (not has_retired(call, known[1]) or known_past_of(campaign, known[1], call.now)) then
    return known
  end
end

local ANOTHER_PAYMENT = '; this payment was not booked: another payment needs another id'

-- Whether a command names a recorded payment with another amount, currency or quantity. A recorded `quantity`
-- of 0 is a payment that was not served.
local function is_another(known, body)
  if body.paid ~= known[7] or (body.paid > 0 and body.currency ~= known[8]) then return true end
  return body.quantity ~= nil and known[6] > 0 and body.quantity ~= known[6]
end

local function another_payment_text(known)
  return 'payment: this id is recorded with '
    .. (known[7] > 0 and int(known[7]) .. ' ' .. known[8] or 'nothing paid')
    .. (known[6] > 0 and ' for ' .. int(known[6]) .. (known[6] > 1 and ' units' or ' unit') or '')
    .. ANOTHER_PAYMENT
end

-- The basket of a grab, or '', as a field of an event; the field before it ends as a text.
local function basket_text(grab)
  return grab and grab.basket and '","basket":"' .. grab.basket or ''
end

-- The row for money due for a refund, with its event. The event names the user of the command or, where the
-- command names none, of the grab: several users of an envelope may have grabs of one id.
local function refund_due_row(call, offer, grab, id, digest, body, campaign, name, amount)
  local user = body.user or grab and grab.user
  add_line(call, event_head(call, offer, 'payment.refund_due', id) .. ',"grab":"' .. body.grab
    .. (user and '","user":"' .. user or '') .. '","payment":"' .. body.payment
    .. '","amount":' .. int(amount) .. ',"asset":"' .. body.currency .. basket_text(grab)
    .. '","outcome":"' .. name .. '","digest":"' .. digest .. '"}')
  local details = keep_refund_due(call, campaign, body.payment, offer.name, body.grab, CODE[name], amount,
    body.currency, grab)
  local row = refused_row(call, CODE[name], details)
  row.seq = call.seq
  return row, true
end

-- Refuses a payment whose id is recorded for something else; `here` is its record for this grab, or nil. A
-- sum in a receipt beyond the one recorded for the grab is due for a refund; returns the row, and whether
-- there is an event. Without a receipt, nothing is booked: the caller may be wrong. `offer` may have retired;
-- nothing can be booked where it is nil.
local function refuse_known(call, campaign, offer, name, id, digest, body, here)
  local details = here and {message = another_payment_text(here)} or nil
  local plain = {code = CODE.conflict, at = call.now, details = details}
  if body.paid == 0 then return plain end
  local booked = payment_of(call, campaign, payment_field(body.payment, name, body.grab, body.currency))
  local total = (booked and booked[7] or 0) + (here and here[8] == body.currency and here[7] or 0)
  if booked and body.paid == total then return again_row(CODE.conflict, booked[4], booked[5]) end
  if not body.signed or not offer or body.paid <= total then return plain end
  return refund_due_row(call, offer, nil, id, digest, body, campaign, 'conflict', body.paid - total)
end

-- The row for a payment that is recorded, or nil, and whether there is an event. For the same grab and amount
-- it has the recorded outcome; for another grab or amount, a conflict. Where the command names a user, and
-- the grab is not known to be theirs (`refused_as`), it reveals nothing about the payment, apart from that it
-- found no grab before; a receipt that names another user is a conflict. Other grabs of the basket that the
-- payment settles are not recorded yet: `basket` is that of the grab, or nil.
local function repeated_payment(call, campaign, offer, name, id, digest, body, refused_as, basket)
  if not body.payment then return nil end
  local known = payment_of(call, campaign, body.payment)
  local here = known and known[1] == name and known[2] == body.grab and known
    or (known or basket) and payment_of(call, campaign, payment_field(body.payment, name, body.grab)) or nil
  if not here and (not known or known[9] and known[9] == basket) then return nil end
  local is_same = here and not is_another(here, body)
  local was_unknown = here and (here[3] == CODE.no_such_grab or here[3] == CODE.no_such_offer)
  local is_foreign = refused_as and not (was_unknown and is_same)
  if is_foreign and not body.signed then
    return refused_row(call, refused_as, {message = 'this payment was not booked: it is recorded, '
      .. 'but not known to be for a grab of this user'})
  end
  if is_foreign or not is_same then
    return refuse_known(call, campaign, offer, name, id, digest, body, here)
  end
  return again_row(here[3], here[4], here[5], here[6])
end

-- Refuses a payment that cannot be served; if money was paid, an event records the refund due, once.
local function refuse_payment(call, offer, grab, id, digest, body, campaign, name)
  if not body.payment or body.paid == 0 then
    return refused_row(call, CODE[name], unserved_details(CODE[name], grab))
  end
  return refund_due_row(call, offer, grab, id, digest, body, campaign, name, body.paid)
end

-- Takes the expired units of a grab again for a late payment; returns whether it could.
local function retake(call, offer, grab, quantity)
  if offer.rules.late ~= 'retake' or offer.closed or call.now >= offer.closes_at then return false end
  if quantity > available(offer) then return false end
  local counted = in_current_windows(offer, grab.under, call.now)
  if #grab.counted >= COUNTED_MAX and not are_same_counters(grab.counted[#grab.counted][2], counted) then
    return false
  end
  if not is_left(offer, counted, quantity) then return false end
  retake_units(offer, grab, counted, quantity)
  return true
end

local function confirm(call, offer, grab, id, digest, body, campaign, quantity)
  local retaken = grab.held == 0
  keep_units(offer, grab, quantity)
  local codes = hand_out(offer, grab, quantity)
  local payment = (body.payment and ',"payment":"' .. body.payment .. '"' or '')
    .. (body.paid > 0 and string.format(',"paid":%d,"currency":"%s"', int(body.paid), body.currency) or '')
    .. (grab.basket and ',"basket":"' .. grab.basket .. '"' or '')
  add_line(call, event_head(call, offer, 'grab.confirmed', id)
    .. grab_text(offer, body.grab, grab, quantity, quantity)
    .. string.format(',"held":%d', int(grab.held)) .. payment .. ',"issuer":"' .. offer.issuer
    .. (retaken and '","retaken":true' or '"')
    .. codes_text('codes', codes) .. ',"digest":"' .. digest .. '"}')
  grab.confirmed_seq, grab.confirmed_at = call.seq, call.now
  if body.payment then
    grab.payments[#grab.payments + 1] = {body.payment, quantity}
    keep_payment(call, campaign, body.payment, offer.name, body.grab, CODE.confirmed, quantity, body.paid,
      body.currency, grab.basket)
  end
  touch_grab(offer, body.grab)
  return done_row(call, offer, CODE.confirmed, grab, quantity, coupon_row(offer, grab, codes, {})), true
end

-- Confirms where there is no offer: a recorded payment gets its recorded outcome; money for a retired offer
-- is due for a refund.
local function confirm_without_offer(call, name, id, digest, body, campaign)
  local past = known_past_of(campaign, name, call.now)
  -- It is not known any more whose grab it was: a receipt vouches for its user.
  local known = repeated_payment(call, campaign, past, name, id, digest, body,
    body.user and not body.signed and CODE.no_such_offer)
  if known then return known end
  if past then return (refuse_payment(call, past, nil, id, digest, body, campaign, 'no_such_offer')) end
  if body.paid == 0 then return nil end
  local message = has_retired(call, name)
    and 'the offer retired too long ago, so this payment was not booked: '
      .. 'see the view payments, and adjust what is missing'
    or 'no offer was ever opened under this id, so this payment was not booked: '
      .. 'pay it back to its sender'
  return refused_row(call, CODE.no_such_offer, {message = message})
end

local confirm_for_grab = about_grab(function(call, offer, grab, id, digest, body, campaign)
  local known, has_event = repeated_payment(call, campaign, offer, offer.name, id, digest, body,
    body.user and not grab and CODE.no_such_grab, grab and grab.basket)
  if known then return known, has_event end
  if not grab then return refuse_payment(call, offer, nil, id, digest, body, campaign, 'no_such_grab') end
  local base = grab.held > 0 and grab.held or grab.lapsed
  if base == 0 then
    if not body.payment and grab.taken > 0 and grab.confirmed_seq > 0 then
      return again_row(CODE.confirmed, grab.confirmed_seq, grab.confirmed_at)
    end
    return refuse_payment(call, offer, grab, id, digest, body, campaign, 'not_held')
  end
  local quantity = body.quantity or base
  if body.paid ~= grab.price * quantity or (body.paid > 0 and body.currency ~= offer.rules.currency) then
    return refuse_payment(call, offer, grab, id, digest, body, campaign, 'invalid')
  end
  if body.payment and #grab.payments >= PAYMENTS_MAX then
    return refuse_payment(call, offer, grab, id, digest, body, campaign, 'limit_reached')
  end
  if quantity > base then
    return refuse_payment(call, offer, grab, id, digest, body, campaign, 'not_enough_left')
  end
  if grab.held == 0 and not retake(call, offer, grab, quantity) then
    return refuse_payment(call, offer, grab, id, digest, body, campaign, 'expired')
  end
  return confirm(call, offer, grab, id, digest, body, campaign, quantity)
end)

-- The confirmations of a call, as carry_out and includes/paying.lua get them: the usual columns and grabs,
-- payments, users, paid, currencies, quantities by confirmation. Those that no confirmation has are false; ''
-- and 0 stand for none.
local read_confirmations
do
  -- Common values of all confirmations were sent once.
  local function column_of(values, confirmations)
    if type(values) == 'table' or not values then return values end
    local column = {}
    for i = 1, confirmations do column[i] = values end
    return column
  end

  -- The i-th confirmation: {grab, user, payment, paid, currency, quantity, signed: whether a receipt says
  -- it}; missing values are absent.
  local function body_of(columns, i)
    local function value_in(column, none)
      local value = column and column[i]
      return value and value ~= none and value or nil
    end
    return {grab = columns.grabs[i], user = value_in(columns.users, ''),
      payment = value_in(columns.payments, ''), paid = columns.paid[i],
      currency = value_in(columns.currencies, ''), quantity = value_in(columns.quantities, 0),
      signed = value_in(columns.signed, false)}
  end

  function read_confirmations()
    for n = 6, 10 do spend(COST.argument_byte * #ARGV[n]) end
    local sent = cmsgpack.unpack(ARGV[6])
    local confirmations, ids, digests, grabs, payments = unpack(sent[5])
    local columns = {sent[1], sent[2], sent[3], values_of(ARGV[7], ids, confirmations),
      column_of(sent[4], confirmations), values_of(ARGV[8], digests, confirmations)}
    columns[7] = function(i) return body_of(columns, i) end
    columns.grabs = values_of(ARGV[9], grabs, confirmations)
    columns.payments = payments and values_of(ARGV[10], payments, confirmations) or sent[6]
    columns.users, columns.quantities, columns.signed = sent[7], sent[10], column_of(sent[11], confirmations)
    columns.paid, columns.currencies = column_of(sent[8], confirmations), column_of(sent[9], confirmations)
    return columns
  end
end

return carry_out(confirm_for_grab, confirm_without_offer, read_confirmations, confirm_run)
