-- Calendar arithmetic on an offer's time zone offsets, in integers: the same as models/calendar.py, function
-- by function. `offsets` is a list of {from ms, ms that the local clock is ahead of UTC}, in order of time;
-- it is empty for UTC.
-- What only these functions need is local to the block, because a script may have at most 200 locals.

local window_of, window_ends, opens_next
do
  local HOUR_MS, DAY_MS, MINUTE_MS, WEEK_MINUTES, THURSDAY = 3600000, 86400000, 60000, 10080, 3

  local function whole(number, divisor)
    return (number - number % divisor) / divisor
  end

  local function offset_index(offsets, at)
    for i = #offsets, 2, -1 do
      if offsets[i][1] <= at then return i end
    end
    return 1
  end

  local function offset_at(offsets, at)
    return #offsets == 0 and 0 or offsets[offset_index(offsets, at)][2]
  end

  -- Returns the first time after `after` at which the local clock shows `local_ms`. Where the local clock
  -- skips `local_ms`, returns the first time at which it shows a later time.
  local function utc_of(offsets, local_ms, after)
    if #offsets > 0 then
      for i = offset_index(offsets, after), #offsets do
        local at = math.max(local_ms - offsets[i][2], offsets[i][1])
        if at > after and (not offsets[i + 1] or at < offsets[i + 1][1]) then return at end
      end
    end
    return local_ms
  end

  local function hour_shift(offsets)
    return #offsets == 0 and 0 or offsets[1][2] % HOUR_MS
  end

  -- The number of the window that a time is in.
  function window_of(per, offsets, at)
    if per == 'offer' then return 0 end
    if per == 'hour' then return whole(at + hour_shift(offsets), HOUR_MS) end
    local day = whole(at + offset_at(offsets, at), DAY_MS)
    if per == 'day' then return day end
    if per == 'week' then return whole(day + THURSDAY, 7) end
    error('limits: this program has no window for the period ' .. tostring(per))
  end

  -- The time (ms) at which the window of a time ends; 0 when it never ends.
  function window_ends(per, offsets, at)
    if per == 'offer' then return 0 end
    local window = window_of(per, offsets, at)
    if per == 'hour' then return (window + 1) * HOUR_MS - hour_shift(offsets) end
    local day = per == 'day' and window + 1 or (window + 1) * 7 - THURSDAY
    return utc_of(offsets, day * DAY_MS, at)
  end

  -- Returns nil when a time is within the opening hours of the week (pairs of minutes since Monday 00:00),
  -- else the time (ms) at which the next opening hours begin.
  function opens_next(hours, offsets, at)
    if #hours == 0 then return nil end
    local opens
    for _ = 1, 4 do
      local clock = at + offset_at(offsets, at)
      local week_begins = (whole(whole(clock, DAY_MS) + THURSDAY, 7) * 7 - THURSDAY) * DAY_MS
      local minute = whole(clock - week_begins, MINUTE_MS)
      local ahead = WEEK_MINUTES
      for i = 1, #hours do
        local begins = hours[i][1]
        if begins <= minute and minute < hours[i][2] then return opens end
        ahead = math.min(ahead, (begins - minute - 1) % WEEK_MINUTES + 1)
      end
      -- The local clock may skip these hours; then the next ones count.
      opens = utc_of(offsets, week_begins + (minute + ahead) * MINUTE_MS, at)
      at = opens
    end
    return opens
  end
end
