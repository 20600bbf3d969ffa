-- Units of an offer that are taken: holds, the queue, codes. The same steps as in models/rules, in the same
-- order.
--- @include "cost"
--- @include "undo"
--- @include "packed_values"
--- @include "decide"
--- @include "offers"

-- The number of grabs, from the front of the queue, that are considered when units are left.
local CONSIDERED_MAX = 100

-- A grab of an offer by its name, or nil; read once per call.
local function grab_of(offer, name)
  local grab = offer.grabs and offer.grabs[name]
  if grab == nil and offer.pieces then
    local record = offer.records[name] or redis.call('HGET', KEYS[offer.base + KEY.grabs], name)
    grab = record and unpack_grab(record)
    put(offer.grabs, name, grab)
  end
  return grab or nil
end

-- Marks a grab, and its deadline, to be written back.
local function touch_grab(offer, name)
  if not offer.grabs_changed[name] then spend(COST.grab) end
  put(offer.grabs_changed, name, true)
  if offer.rules.hold_ms then put(offer.holds, name, true) end
end

local function move_units(offer, quantity)
  put(offer, 'units_left', offer.units_left + quantity)
  put(offer, 'amount_left', offer.amount_left + quantity)
end

-- The fields that every event about a grab has.
local function grab_text(offer, name, grab, quantity, amount)
  return string.format(
    ',"grab":"%s","user":"%s","quantity":%d,"amount":%d,"asset":"%s","place":%d,"left":%d', name, grab.user,
    int(quantity), int(amount), offer.asset, grab.place, int(offer.units_left))
end

local function begin_hold(offer, grab, quantity, now)
  grab.held, grab.deadline, grab.grace = quantity, now + offer.rules.hold_ms, offer.rules.grace_ms
  put(offer, 'held', offer.held + quantity)
end

-- The fields that a grab carries for its events: a list of {name, JSON text}, or nil. Nothing is decided by
-- it.
local function carried_text(carried)
  local text = ''
  for _, field in ipairs(carried or {}) do text = text .. ',"' .. field[1] .. '":' .. field[2] end
  return text
end

-- The same as columns of a run; adds them to `rare`, and returns it.
local function carry_into(rare, carried)
  for _, field in ipairs(carried or {}) do rare[field[1]] = field[2] end
  return rare
end

-- Adds the details of a hold to those of an answer; returns them.
local function hold_row(offer, grab, details)
  details.deadline_at = grab.deadline
  if offer.rules.currency then
    details.due, details.currency = grab.price * grab.held, offer.rules.currency
  end
  return details
end

-- Takes the next codes (sealed) for a grab; returns {} if the offer has no codes.
local function hand_out(offer, grab, quantity)
  if not offer.loads.codes then return {} end
  spend(COST.item * quantity)
  local from = offer.codes_taken
  local codes = redis.call('LRANGE', KEYS[offer.base + KEY.codes], from, from + quantity - 1)
  if #codes < quantity then error('offer ' .. offer.name .. ' has fewer codes than units') end
  put(offer, 'codes_taken', from + quantity)
  for _, code in ipairs(codes) do grab.codes[#grab.codes + 1] = code end
  spend(COST.listed_byte * bytes_of(codes))
  return codes
end

-- Codes as a field of an event. The texts around them are joined in the same step, since it is expensive to
-- make long texts.
local function codes_text(field, codes)
  if #codes == 0 then return '' end
  local texts = {unpack(codes)}
  texts[1] = ',"' .. field .. '":["' .. texts[1]
  texts[#texts] = texts[#texts] .. '"]'
  return table.concat(texts, '","')
end

-- Adds the details of coupons to those of an answer, the codes or the number of the grab; returns them.
local function coupon_row(offer, grab, codes, details)
  if offer.kind == 'coupon' then
    if #codes > 0 then details.codes = codes else details.number = grab.place end
  end
  return details
end

-- The name of the i-th grab in the queue, from 1, or nil. `offer.line` is the part of the queue, from its
-- front, that has been read.
local function waiter_at(offer, i)
  local line = offer.line
  while #line < i do
    if offer.queue_from < offer.queue_stored then
      local names = redis.call('ZRANGE', KEYS[offer.base + KEY.queue], offer.queue_from,
        offer.queue_from + CONSIDERED_MAX - 1)
      offer.queue_from = offer.queue_from + CONSIDERED_MAX
      for _, name in ipairs(names) do
        if not offer.queue_gone[name] then line[#line + 1] = name end
      end
    else
      local name = offer.queue_new[offer.queue_new_read + 1]
      if not name then return nil end
      offer.queue_new_read = offer.queue_new_read + 1
      if not offer.queue_gone[name] then line[#line + 1] = name end
    end
  end
  return line[i]
end

-- The quantities that queued grabs ask for, as a list. Of a record that was not read before, only the
-- quantity is unpacked.
local function asked_by(offer, names)
  local asked, unknown = offer.asked, {}
  for _, name in ipairs(names) do
    if not offer.grabs[name] and not asked[name] then unknown[#unknown + 1] = name end
  end
  if #unknown > 0 then
    spend(COST.asked * #unknown)
    local records = redis.call('HMGET', KEYS[offer.base + KEY.grabs], unpack(unknown))
    -- Unpacks three values, of which the third is the quantity; the record's first three bytes are their
    -- number.
    for i, name in ipairs(unknown) do
      spend(COST.asked_byte * #records[i])
      asked[name] = select(4, cmsgpack.unpack_limit(records[i], 3, 3))
    end
  end
  local quantities = {}
  for i, name in ipairs(names) do
    quantities[i] = offer.grabs[name] and offer.grabs[name].quantity or asked[name]
  end
  return quantities
end

-- The number of units that must be left to serve a queued grab: all that it asks for, or 1 if the offer's
-- take is `up_to`. Infinite if the grab's price would be above AMOUNT_MAX, because the price or max_per_grab
-- was amended after the grab joined the queue.
local function wanted_at_least(offer, asked)
  local wanted = offer.rules.take == 'all' and asked or 1
  return wanted * (offer.rules.price or 0) <= AMOUNT_MAX and wanted or math.huge
end

-- The units that a new grab can take: those that suffice for none of the first CONSIDERED_MAX grabs in the
-- queue.
local function available(offer)
  if offer.units_left == 0 or offer.queue_length == 0 then return offer.units_left end
  if not offer.least_wanted then
    local least, considered = math.huge, {}
    for i = 1, math.min(offer.queue_length, CONSIDERED_MAX) do considered[i] = waiter_at(offer, i) end
    for _, asked in ipairs(asked_by(offer, considered)) do
      least = math.min(least, wanted_at_least(offer, asked))
    end
    offer.least_wanted = least
  end
  return offer.units_left < offer.least_wanted and offer.units_left or 0
end

-- Adds a new grab to the end of the queue. It keeps its carried fields for the event that serves it.
local function join_queue(offer, name, grab, carried)
  put(offer, 'queued', offer.queued + 1)
  grab.place, grab.status, grab.carried = offer.queued, WAITING, carried
  if carried then spend(COST.record_byte * #carried_text(carried)) end
  append(offer.queue_new, name)
  put(offer, 'queue_length', offer.queue_length + 1)
  if offer.least_wanted and offer.queue_length <= CONSIDERED_MAX then
    put(offer, 'least_wanted', math.min(offer.least_wanted, wanted_at_least(offer, grab.quantity)))
  end
end
