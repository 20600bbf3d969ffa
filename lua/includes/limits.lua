-- Limits: what a user, or a value of an attribute, has left in the window of now; counting, and giving back.
--   A counter is one hash field `<by>/<per>/<value>` holding `<window>:<count>`: in another window the count
--   is 0. A campaign's counters have a hash of their own, and their windows are those of the campaign's zone.
--   What a grab was counted under is a list of {counter, window, 1 if of the campaign}.
--- @include "cost"
--- @include "undo"
--- @include "calendar"
--- @include "decide"

local function offsets_for(offer, of_campaign)
  return of_campaign and offer.rules.campaign_offsets or offer.rules.offsets
end

local function counted_under(offer, user, attributes, now)
  local counted = {}
  for i, limit in ipairs(offer.rules.limits) do
    local of_campaign = limit.scope == 'campaign'
    local value = user
    if limit.by ~= 'user' then value = attributes and attributes[limit.by] end
    local name = limit.by .. '/' .. limit.per .. '/' .. value
    spend(COST.counter_byte * #name)
    counted[i] = {name, window_of(limit.per, offsets_for(offer, of_campaign), now), of_campaign and 1 or 0}
  end
  return counted
end

-- A hash of counters as a table that reads what it is asked for; `changed` are the fields to write back.
local function counters_at(key)
  return {key = key, values = {}, changed = {}}
end

local function parse_counter(text)
  if not text then return {0, 0} end
  local window, count = string.match(text, '^(%d+):(%d+)$')
  return {tonumber(window), tonumber(count)}
end

-- Reads many fields at once that are not known yet.
local function read_counters(counters, fields)
  for from = 1, #fields, WRITE_VALUES_MAX do
    local last = math.min(from + WRITE_VALUES_MAX - 1, #fields)
    local found = redis.call('HMGET', counters.key, unpack(fields, from, last))
    for i = from, last do counters.values[fields[i]] = parse_counter(found[i - from + 1]) end
  end
end

local function counter_of(offer, one)
  local counters = one[3] == 1 and offer.campaign.counters or offer.counters
  local value = counters.values[one[1]]
  if not value then
    value = parse_counter(redis.call('HGET', counters.key, one[1]))
    counters.values[one[1]] = value
  end
  return value, counters
end

-- How much a counter has in the window a grab counts in.
local function count_in(offer, one)
  local value = counter_of(offer, one)
  return value[1] == one[2] and value[2] or 0
end

local function set_counter(offer, one, count)
  spend(COST.counter)
  local _, counters = counter_of(offer, one)
  put(counters.values, one[1], {one[2], count})
  put(counters.changed, one[1], true)
end

local function count(offer, counted, quantity)
  for _, one in ipairs(counted) do set_counter(offer, one, count_in(offer, one) + quantity) end
end

-- Takes units of a grab off the counters they were counted under, the newest first; nothing of a window that
-- is over. `grab.counted` is a list of {units, counters}: a payment that retook some made another of these.
local function give_back(offer, grab, quantity)
  local batches = grab.counted
  while quantity > 0 and #batches > 0 do
    local batch = batches[#batches]
    local back = math.min(batch[1], quantity)
    quantity = quantity - back
    for _, one in ipairs(batch[2]) do
      local value = counter_of(offer, one)
      if value[1] == one[2] then set_counter(offer, one, value[2] - back) end
    end
    batch[1] = batch[1] - back
    if batch[1] == 0 then table.remove(batches) end
  end
end

-- {by, per, max, left, resets_at or 0, scope} of the i-th limit.
local function limit_state(offer, counted, i, now)
  local limit = offer.rules.limits[i]
  return {limit.by, limit.per, limit.max, math.max(limit.max - count_in(offer, counted[i]), 0),
    window_ends(limit.per, offsets_for(offer, limit.scope == 'campaign'), now), limit.scope}
end

local function limit_states(offer, counted, now)
  local states = {}
  for i = 1, #counted do states[i] = limit_state(offer, counted, i, now) end
  return states
end

local function named_by(one)
  return string.match(one[1], '^([^/]+)/([^/]+)/')
end

-- The counters of a grab in their windows of now.
local function windows_of_now(offer, counted, now)
  local found = {}
  for i, one in ipairs(counted) do
    local _, per = named_by(one)
    found[i] = {one[1], window_of(per, offsets_for(offer, one[3] == 1), now), one[3]}
  end
  return found
end

-- Whether the limits, as they are now, leave so much under these counters.
local function is_left(offer, counted, quantity)
  for _, one in ipairs(counted) do
    local by, per = named_by(one)
    for _, limit in ipairs(offer.rules.limits) do
      local same = limit.by == by and limit.per == per and (limit.scope == 'campaign') == (one[3] == 1)
      if same and limit.max - count_in(offer, one) < quantity then return false end
    end
  end
  return true
end

local function write_counters(counters)
  local fields = {}
  for name in pairs(counters.changed) do
    local value = counters.values[name]
    fields[#fields + 1] = name
    fields[#fields + 1] = string.format('%.0f:%.0f', value[1], value[2])
  end
  write_in_pieces('HSET', counters.key, fields)
end
