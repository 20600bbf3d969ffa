-- Limits: how many units a user, or a value of an attribute, has left in the current window; counting units
-- and returning them.
--   A counter is one hash field `<by>/<per>/<value>` that holds `<window>:<count>`. In any other window its
--   count is 0. Counters of a campaign are in a hash of the campaign, and their windows follow the campaign's
--   time zone. A grab records the counters it was counted in as a list of {name, window, 1 if of the
--   campaign}; in this file `counter` is such an entry.
--- @include "cost"
--- @include "undo"
--- @include "calendar"
--- @include "decide"

local function offsets_for(offer, of_campaign)
  return of_campaign and offer.rules.campaign_offsets or offer.rules.offsets
end

-- For each limit of an offer, its window at a time and when that ends. Most grabs of a call have the same
-- ones.
local function windows_at(offer, now)
  local windows = offer.windows
  if not windows or windows.now ~= now or windows.rules ~= offer.rules then
    windows = {now = now, rules = offer.rules}
    for i, limit in ipairs(offer.rules.limits) do
      local offsets = offsets_for(offer, limit.scope == 'campaign')
      windows[i] = {window_of(limit.per, offsets, now), window_ends(limit.per, offsets, now)}
    end
    offer.windows = windows
  end
  return windows
end

-- The counters that a grab counts in.
local function counted_under(offer, user, attributes, now)
  local counted, windows, limits = {}, windows_at(offer, now), offer.rules.limits
  for i = 1, #limits do
    local limit, value = limits[i], user
    if limit.by ~= 'user' then value = attributes and attributes[limit.by] end
    local name = limit.by .. '/' .. limit.per .. '/' .. value
    spend(COST.counter_byte * #name)
    counted[i] = {name, windows[i][1], limit.scope == 'campaign' and 1 or 0}
  end
  return counted
end

-- The counters of a hash: `values` holds those that were read, `changed` names those to write back; `made`
-- has names and texts of others that are written back.
local function counters_at(key)
  return {key = key, values = {}, changed = {}, made = {}}
end

local read_counters, read_counter
do
  local function parse_counter(text)
    if not text then return {0, 0} end
    local window, count = string.match(text, '^(%d+):(%d+)$')
    return {tonumber(window), tonumber(count)}
  end

  -- Reads many counters at once.
  function read_counters(counters, fields)
    for from = 1, #fields, WRITE_VALUES_MAX do
      local last = math.min(from + WRITE_VALUES_MAX - 1, #fields)
      local texts = redis.call('HMGET', counters.key, unpack(fields, from, last))
      for i = from, last do counters.values[fields[i]] = parse_counter(texts[i - from + 1]) end
    end
  end

  -- The {window, count} that is stored for a counter, and the hash of counters it belongs to.
  function read_counter(offer, counter)
    local counters = counter[3] == 1 and offer.campaign.counters or offer.counters
    local value = counters.values[counter[1]]
    if not value then
      value = parse_counter(redis.call('HGET', counters.key, counter[1]))
      counters.values[counter[1]] = value
    end
    return value, counters
  end
end

-- The count of a counter in the entry's window.
local function count_in(offer, counter)
  local value = read_counter(offer, counter)
  return value[1] == counter[2] and value[2] or 0
end

local function set_counter(offer, counter, count)
  spend(COST.counter)
  local _, counters = read_counter(offer, counter)
  put(counters.values, counter[1], {counter[2], count})
  put(counters.changed, counter[1], true)
end

local function count(offer, counted, quantity)
  for _, counter in ipairs(counted) do set_counter(offer, counter, count_in(offer, counter) + quantity) end
end

-- Subtracts units of a grab from the counters they were counted in, the newest first; counters whose window
-- is over stay unchanged. `grab.counted` is a list of {units, counters}; a late payment that takes units
-- again may add an entry.
local function give_back(offer, grab, quantity)
  local counted_units = grab.counted
  while quantity > 0 and #counted_units > 0 do
    local newest = counted_units[#counted_units]
    local returned = math.min(newest[1], quantity)
    quantity = quantity - returned
    for _, counter in ipairs(newest[2]) do
      local value = read_counter(offer, counter)
      if value[1] == counter[2] then set_counter(offer, counter, value[2] - returned) end
    end
    newest[1] = newest[1] - returned
    if newest[1] == 0 then table.remove(counted_units) end
  end
end

-- The state of the i-th limit: {by, per, max, left, resets_at or 0, scope}.
local function limit_state(offer, counted, i, now)
  local limit = offer.rules.limits[i]
  return {limit.by, limit.per, limit.max, math.max(limit.max - count_in(offer, counted[i]), 0),
    windows_at(offer, now)[i][2], limit.scope}
end

local function limit_states(offer, counted, now)
  local states = {}
  for i = 1, #counted do states[i] = limit_state(offer, counted, i, now) end
  return states
end

local in_current_windows, is_left
do
  -- What a counter counts by, and its period.
  local function by_and_per(counter)
    return string.match(counter[1], '^([^/]+)/([^/]+)/')
  end

  -- The counters of a grab, with the windows that are current now.
  function in_current_windows(offer, counted, now)
    local current = {}
    for i, counter in ipairs(counted) do
      local _, per = by_and_per(counter)
      current[i] = {counter[1], window_of(per, offsets_for(offer, counter[3] == 1), now), counter[3]}
    end
    return current
  end

  -- Whether the present limits leave a quantity in all of these counters.
  function is_left(offer, counted, quantity)
    for _, counter in ipairs(counted) do
      local by, per = by_and_per(counter)
      for _, limit in ipairs(offer.rules.limits) do
        local same = limit.by == by and limit.per == per and (limit.scope == 'campaign') == (counter[3] == 1)
        if same and limit.max - count_in(offer, counter) < quantity then return false end
      end
    end
    return true
  end
end

local function write_counters(counters)
  local fields = counters.made
  for name in pairs(counters.changed) do
    local value = counters.values[name]
    fields[#fields + 1] = name
    fields[#fields + 1] = string.format('%d:%d', value[1], value[2])
  end
  write_in_pieces('HSET', counters.key, fields)
end
