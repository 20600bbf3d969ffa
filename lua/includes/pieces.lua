-- Units of an offer that come and go: holds, their end, those who wait, codes. The same steps as models/rules, in the same order.
-- Needs the includes `records`, `decide`, `limits`, `offers`, `undo`.

local SERVED_AT_ONCE_MAX = 100

-- A grab of an offer by its name, or nil; read once a call.
local function grab_of(offer, name)
  local grab = offer.grabs and offer.grabs[name]
  if grab == nil and offer.pieces then
    local record = redis.call('HGET', KEYS[offer.base + GRABS], name)
    grab = record and unpack_grab(record)
    put(offer.grabs, name, grab)
  end
  return grab or nil
end

-- The grab is written back, and its deadline with it.
local function touch_grab(offer, name)
  put(offer.grabs_changed, name, true)
  if offer.rules.hold_ms then put(offer.holds, name, true) end
end

local function move_units(offer, quantity)
  put(offer, 'units_left', offer.units_left + quantity)
  put(offer, 'amount_left', offer.amount_left + quantity)
end

-- The fields that every event about a grab has.
local function grab_text(offer, name, grab, quantity, amount)
  return ',"grab":"' .. name .. '","user":"' .. grab.user .. '","quantity":' .. quantity .. ',"amount":' .. amount
    .. ',"asset":"' .. offer.asset .. '","place":' .. grab.place .. ',"left":' .. offer.units_left
end

local function begin_hold(offer, grab, quantity, now)
  grab.held, grab.deadline, grab.grace = quantity, now + offer.rules.hold_ms, offer.rules.grace_ms
  put(offer, 'held', offer.held + quantity)
end

local function hold_text(offer, grab)
  local text = ',"deadline_at":' .. grab.deadline
  if offer.rules.currency then text = text .. ',"due":' .. grab.price * grab.held .. ',"currency":"' .. offer.rules.currency .. '"' end
  return text
end

-- Adds to an answer what is said of a hold.
local function hold_row(offer, grab, more)
  more.deadline_at = grab.deadline
  if offer.rules.currency then more.due, more.currency = grab.price * grab.held, offer.rules.currency end
  return more
end

-- The next codes, sealed, where the offer has codes.
local function hand_out(offer, grab, quantity)
  if not offer.loads.codes then return {} end
  local key, from = KEYS[offer.base + CODES], offer.codes_taken
  local codes = redis.call('LRANGE', key, from, from + quantity - 1)
  -- What came back in this very call stands behind what was there.
  local i = math.max(from + #codes - redis.call('LLEN', key), 0)
  while #codes < quantity do
    i = i + 1
    codes[#codes + 1] = offer.codes_back[i] or error('offer ' .. offer.name .. ' has fewer codes than units')
  end
  put(offer, 'codes_taken', from + quantity)
  for _, code in ipairs(codes) do grab.codes[#grab.codes + 1] = code end
  return codes
end

local function codes_text(codes)
  return #codes > 0 and ',"codes":["' .. table.concat(codes, '","') .. '"]' or ''
end

-- Adds to an answer what is said of coupons: the codes, or the number of the grab.
local function coupon_row(offer, grab, codes, more)
  if offer.kind == 'coupon' then
    if #codes > 0 then more.codes = codes else more.number = grab.place end
  end
  return more
end

-- Who waits first, or nil.
local function next_in_queue(offer)
  while true do
    local stored = offer.queue_read
    if not stored or offer.queue_at > #stored then
      local from = offer.queue_from or 0
      if from >= offer.queue_stored then break end
      offer.queue_read = redis.call('ZRANGE', KEYS[offer.base + QUEUE], from, from + SERVED_AT_ONCE_MAX - 1)
      offer.queue_from, offer.queue_at = from + SERVED_AT_ONCE_MAX, 1
    else
      local name = stored[offer.queue_at]
      if not offer.queue_gone[name] then return name end
      offer.queue_at = offer.queue_at + 1
    end
  end
  for _, name in ipairs(offer.queue_new) do
    if not offer.queue_gone[name] then return name end
  end
end

local function take_from_queue(offer, name)
  offer.queue_gone[name] = true
  offer.queue_length = offer.queue_length - 1
end

local function wait_no_more(offer, name, grab, now)
  take_from_queue(offer, name)
  give_back(offer, grab, grab.quantity)
  grab.status = RELEASED
  if offer.closed then offer.due = due_when_closed(offer, now) end
  touch_grab(offer, name)
end

-- Somebody waits no more; the limits are given back.
local function leave_queue(call, offer, name, grab, command, digest)
  wait_no_more(offer, name, grab, call.now)
  call.lines[#call.lines + 1] = event_head(call, offer, 'grab.released', command) .. grab_text(offer, name, grab, 0, 0)
    .. ',"reason":"left_queue","to":"' .. returns_to(offer) .. (digest and '","digest":"' .. digest or '') .. '"}'
  grab.ended_seq, grab.ended_at = call.seq, call.now
end

-- Who waited gets units, as a hold.
local function serve_one(offer, name, grab, quantity, now)
  take_from_queue(offer, name)
  give_back(offer, grab, grab.quantity - quantity)
  offer.places = offer.places + 1
  grab.place, grab.quantity, grab.price, grab.status = offer.places, quantity, offer.rules.price or 0, ACTIVE
  move_units(offer, -quantity)
  begin_hold(offer, grab, quantity, now)
  touch_grab(offer, name)
end

-- Units that came back go to those who wait, first come, first served, as holds; a bounded number at once.
local function serve(call, offer, command)
  if not offer.pieces or offer.closed or call.now >= offer.closes_at then return end
  local served = 0
  while offer.queue_length > 0 and offer.units_left > 0 do
    local name = next_in_queue(offer)
    local grab = grab_of(offer, name)
    if offer.rules.take == 'all' and grab.quantity > offer.units_left then return end
    if served == SERVED_AT_ONCE_MAX then
      offer.due, offer.changed = call.now, true
      return
    end
    served = served + 1
    local asked, quantity = grab.quantity, math.min(grab.quantity, offer.units_left)
    serve_one(offer, name, grab, quantity, call.now)
    call.lines[#call.lines + 1] = event_head(call, offer, 'grab.held', command) .. grab_text(offer, name, grab, quantity, quantity)
      .. (asked ~= quantity and ',"asked":' .. asked or '') .. hold_text(offer, grab) .. ',"waited":true}'
  end
end

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
  call.lines[#call.lines + 1] = event_head(call, offer, 'grab.released', command) .. grab_text(offer, name, grab, quantity, quantity)
    .. ',"reason":"' .. reason .. '","to":"' .. returns_to(offer) .. '"' .. (digest and ',"digest":"' .. digest .. '"}' or '}')
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

-- Units that had lapsed leave the offer once more, and count in the windows of now.
local function take_anew(offer, grab, counted, quantity)
  move_units(offer, -quantity)
  grab.counted[#grab.counted + 1] = {quantity, counted}
  count(offer, counted, quantity)
end

-- What became of a payment.
local function keep_payment(call, campaign, payment, offer, grab, code, quantity)
  campaign.payments[payment] = {offer.name, grab, code, call.seq, call.now, quantity}
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

-- The place of an order among those of a grab, or nil.
local function order_at(grab, name)
  for i, order in ipairs(grab.orders) do
    if order[1] == name then return i end
  end
end

-- Units of a grab were used for an order, or (quantity 0) are no more.
local function keep_order(call, offer, name, grab, order, quantity)
  local at = order_at(grab, order)
  if at then table.remove(grab.orders, at) end
  grab.orders[#grab.orders + 1] = {order, quantity, call.seq, call.now}
  touch_grab(offer, name)
end
