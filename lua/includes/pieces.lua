-- Units of an offer that are taken: holds, the queue of those who wait, codes. The same steps as models/rules, in the same order.
-- Needs the includes `records`, `decide`, `limits`, `offers`, `undo`.

-- So many grabs at the front of the queue are considered when units are left.
local CONSIDERED_MAX = 100

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

-- Reads many grabs at once that are not known yet.
local function read_grabs(offer, names)
  local wanted = {}
  for _, name in ipairs(names) do
    if offer.grabs[name] == nil then wanted[#wanted + 1] = name end
  end
  if #wanted == 0 then return end
  local records = redis.call('HMGET', KEYS[offer.base + GRABS], unpack(wanted))
  for i, name in ipairs(wanted) do offer.grabs[name] = records[i] and unpack_grab(records[i]) end
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
  return ',"grab":"' .. name .. '","user":"' .. grab.user .. '","quantity":' .. int(quantity) .. ',"amount":' .. int(amount)
    .. ',"asset":"' .. offer.asset .. '","place":' .. grab.place .. ',"left":' .. int(offer.units_left)
end

local function begin_hold(offer, grab, quantity, now)
  grab.held, grab.deadline, grab.grace = quantity, now + offer.rules.hold_ms, offer.rules.grace_ms
  put(offer, 'held', offer.held + quantity)
end

local function hold_text(offer, grab)
  local text = ',"deadline_at":' .. int(grab.deadline)
  if offer.rules.currency then text = text .. ',"due":' .. int(grab.price * grab.held) .. ',"currency":"' .. offer.rules.currency .. '"' end
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

-- The name of the i-th grab in the queue, from 1, or nil. `offer.line` holds the front of the queue as far as it has been read.
local function waiter_at(offer, i)
  local line = offer.line
  while #line < i do
    if offer.queue_from < offer.queue_stored then
      local names = redis.call('ZRANGE', KEYS[offer.base + QUEUE], offer.queue_from, offer.queue_from + CONSIDERED_MAX - 1)
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

-- How many units must be left for a waiting grab to be served: what it asks for, or one with take `up_to`. Infinite when what it
-- would have to pay is above AMOUNT_MAX: the price, or max_per_grab, was amended since it joined the queue.
local function wanted_at_least(offer, grab)
  local wanted = offer.rules.take == 'all' and grab.quantity or 1
  return wanted * (offer.rules.price or 0) <= AMOUNT_MAX and wanted or math.huge
end

-- Units that a newcomer can take: those that suffice for none of the first CONSIDERED_MAX grabs in the queue.
local function available(offer)
  if offer.units_left == 0 or offer.queue_length == 0 then return offer.units_left end
  if not offer.least_wanted then
    local least, considered = math.huge, {}
    for i = 1, math.min(offer.queue_length, CONSIDERED_MAX) do considered[i] = waiter_at(offer, i) end
    read_grabs(offer, considered)
    for _, name in ipairs(considered) do least = math.min(least, wanted_at_least(offer, grab_of(offer, name))) end
    offer.least_wanted = least
  end
  return offer.units_left < offer.least_wanted and offer.units_left or 0
end

-- A new grab stands at the end of the queue.
local function join_queue(offer, name, grab)
  put(offer, 'queued', offer.queued + 1)
  grab.place, grab.status = offer.queued, WAITING
  append(offer.queue_new, name)
  put(offer, 'queue_length', offer.queue_length + 1)
  if offer.least_wanted and offer.queue_length <= CONSIDERED_MAX then
    put(offer, 'least_wanted', math.min(offer.least_wanted, wanted_at_least(offer, grab)))
  end
end
