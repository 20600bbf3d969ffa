-- Limits: how many units a user, or a value of an attribute, has left in the current window; counting units
-- and returning them.
--   A counter has the name `<by>/<per>/<value>`, and a count for one window; in any other window its count is
--   0. All counters of a value are in one hash field `<by>/<value>`: for each period in the order of PERIODS
--   that was counted, its letter and `<window>:<count>`. Counters of a campaign are in a hash of the
--   campaign, and their windows follow the campaign's time zone. A grab records the counters it was counted
--   in as a list of {name, window, 1 if of the campaign}; in this file `counter` is such an entry.
--- @include "cost"
--- @include "undo"
--- @include "calendar"
--- @include "decide"

local function offsets_for(offer, is_campaign_wide)
  return is_campaign_wide and offer.rules.campaign_offsets or offer.rules.offsets
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

-- The counters of a hash: `values` holds {window, count} of those that were read, `changed` names those to
-- write back; `wanted` has fields to be read, `is_wanted` those and the fields that were read; `made` has
-- fields and their new texts, written as they are.
local function counters_at(key)
  return {key = key, values = {}, changed = {}, wanted = {}, is_wanted = {}, made = {}}
end

local counted_under, read_wanted, write_counters, next_counters, count_in, count, give_back
do
  -- The periods of limits, in the order of their counters in a text, and their letters, which must differ.
  local PERIODS, LETTERS = {'day', 'hour', 'offer', 'week'}, {'d', 'h', 'o', 'w'}
  local LETTER_OF, PERIOD_OF = {}, {}
  for i = 1, #PERIODS do
    LETTER_OF[PERIODS[i]] = LETTERS[i]
    PERIOD_OF[LETTERS[i]] = PERIODS[i]
  end

  -- Raises for a period without a letter of its own: a text would leave its counter out.
  local function check_period(period)
    if PERIOD_OF[LETTER_OF[period]] ~= period then
      error('limits: this program has no letter for counters of the period ' .. period)
    end
  end

  -- The counters of a text by their period.
  local function parse_counters(text, field)
    local by_period, bytes = {}, 0
    for letter, window, units in string.gmatch(text, '(%l)(%d+):(%d+)') do
      local period = PERIOD_OF[letter]
      if not period then break end
      by_period[period] = {tonumber(window), tonumber(units)}
      bytes = bytes + 2 + #window + #units
    end
    if bytes ~= #text or bytes == 0 then error('the counters ' .. field .. ' are damaged') end
    return by_period
  end

  local function counters_text(by_period)
    local text = ''
    for i = 1, #PERIODS do
      local value = by_period[PERIODS[i]]
      if value then
        text = text .. string.format('%s%d:%d', LETTER_OF[PERIODS[i]], value[1], value[2])
      end
    end
    return text
  end

  -- The hash of counters that a counter belongs to.
  local function counters_of(offer, counter)
    return counter[3] == 1 and offer.campaign.counters or offer.counters
  end

  -- A counter that nothing was counted in.
  local NONE = {0, 0}

  -- The key, period and value of a counter.
  local function parts_of(name)
    return string.match(name, '^([^/]+)/([^/]+)/([^/]+)$')
  end

  local function field_of(name)
    local by, period, value = parts_of(name)
    check_period(period)
    return by .. '/' .. value
  end

  -- Notes what a field holds.
  local function keep_field(counters, field, text)
    if not text then return end
    local by, value = string.match(field, '^([^/]+)/([^/]+)$')
    for period, counter in pairs(parse_counters(text, field)) do
      counters.values[by .. '/' .. period .. '/' .. value] = counter
    end
  end

  -- What the field of a counter holds then.
  local function text_of(counters, name)
    local by_period, by, _, value = {}, parts_of(name)
    for i = 1, #PERIODS do
      local counter = counters.values[by .. '/' .. PERIODS[i] .. '/' .. value]
      if counter ~= NONE then by_period[PERIODS[i]] = counter end
    end
    return counters_text(by_period)
  end

  -- Notes that a field is to be read.
  local function want_field(counters, field)
    if counters.is_wanted[field] then return end
    counters.is_wanted[field] = true
    counters.wanted[#counters.wanted + 1] = field
  end

  -- The counters that a grab counts in; notes that they are to be read.
  function counted_under(offer, user, attributes, now)
    local counted, windows, limits = {}, windows_at(offer, now), offer.rules.limits
    for i = 1, #limits do
      local limit, value = limits[i], user
      if limit.by ~= 'user' then value = attributes and attributes[limit.by] end
      local name = limit.by .. '/' .. limit.per .. '/' .. value
      spend(COST.counter_byte * #name)
      counted[i] = {name, windows[i][1], limit.scope == 'campaign' and 1 or 0}
      want_field(counters_of(offer, counted[i]), limit.by .. '/' .. value)
    end
    return counted
  end

  -- Reads all counters of a hash that are to be read.
  function read_wanted(counters)
    local wanted = counters.wanted
    if #wanted == 0 then return end
    counters.wanted = {}
    for from = 1, #wanted, WRITE_VALUES_MAX do
      local last = math.min(from + WRITE_VALUES_MAX - 1, #wanted)
      local texts = redis.call('HMGET', counters.key, unpack(wanted, from, last))
      for i = from, last do keep_field(counters, wanted[i], texts[i - from + 1]) end
    end
  end

  -- The {window, count} that is stored for a counter, and the hash of counters it belongs to.
  local function read_counter(offer, counter)
    local counters = counters_of(offer, counter)
    local value = counters.values[counter[1]]
    if not value then
      want_field(counters, field_of(counter[1]))
      read_wanted(counters)
      value = counters.values[counter[1]] or NONE
      counters.values[counter[1]] = value
    end
    return value, counters
  end

  -- Notes the writes of all counters that have changed. A field is written whole.
  function write_counters(counters)
    local fields, is_written = counters.made, {}
    for name in pairs(counters.changed) do
      local field = field_of(name)
      if not is_written[field] then
        is_written[field] = true
        fields[#fields + 1] = field
        fields[#fields + 1] = text_of(counters, name)
      end
    end
    write_in_pieces('HSET', counters.key, fields)
  end

  -- What the counters of a value become with one more unit, by what they are, a text or false, made once for
  -- each: whether the limits of these indexes have a unit left, the new text, and by the index of each limit
  -- what it then leaves, packed.
  function next_counters(offer, now, indexes)
    local limits, windows = offer.rules.limits, windows_at(offer, now)
    return setmetatable({}, {__index = function(all, text)
      local counters = text and parse_counters(text, 'of a user') or {}
      local made = {is_left = true, lefts = {}}
      for _, n in ipairs(indexes) do
        local limit, window = limits[n], windows[n][1]
        check_period(limit.per)
        local counter = counters[limit.per]
        local units = (counter and counter[1] == window and counter[2] or 0) + 1
        if units > limit.max then made.is_left = false end
        counters[limit.per] = {window, units}
        made.lefts[n] = cmsgpack.pack(limit.max - units)
      end
      made.text = counters_text(counters)
      all[text] = made
      return made
    end})
  end

  -- The count of a counter in the entry's window.
  function count_in(offer, counter)
    local value = read_counter(offer, counter)
    return value[1] == counter[2] and value[2] or 0
  end

  local function set_counter(offer, counter, units)
    spend(COST.counter)
    local _, counters = read_counter(offer, counter)
    put(counters.values, counter[1], {counter[2], units})
    put(counters.changed, counter[1], true)
  end

  function count(offer, counted, quantity)
    for _, counter in ipairs(counted) do set_counter(offer, counter, count_in(offer, counter) + quantity) end
  end

  -- Subtracts units of a grab from the counters they were counted in, the newest first; counters whose window
  -- is over stay unchanged. `grab.counted` is a list of {units, counters}; a late payment that takes units
  -- again may add an entry.
  function give_back(offer, grab, quantity)
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
