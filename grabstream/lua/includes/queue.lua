-- Grabs leave the queue when they are served, or give up. The same steps as in models/rules, in the same
-- order.
--- @include "cost"
--- @include "packed_values"
--- @include "decide"
--- @include "limits"
--- @include "offers"
--- @include "pieces"

-- The number of queued grabs that one command, or one step of the sweeper, handles at most: the cost of a
-- single command must be bounded too.
local SERVED_AT_ONCE_MAX = 25

local end_wait, leave_queue, serve_grab
do
  local function take_from_queue(offer, name)
    spend(COST.waiter)
    offer.queue_gone[name] = true
    offer.queue_length = offer.queue_length - 1
    offer.least_wanted = nil
    for i, other in ipairs(offer.line) do
      if other == name then
        table.remove(offer.line, i)
        return
      end
    end
  end

  -- Removes a grab from the queue; the limits get its units back.
  function end_wait(offer, name, grab, now)
    take_from_queue(offer, name)
    give_back(offer, grab, grab.quantity)
    grab.status, grab.carried = RELEASED, nil
    if offer.closed then offer.due = due_when_closed(offer, now) end
    touch_grab(offer, name)
  end

  -- Removes a grab from the queue, with its event.
  function leave_queue(call, offer, name, grab, command, digest)
    end_wait(offer, name, grab, call.now)
    add_line(call, event_head(call, offer, 'grab.released', command) .. grab_text(offer, name, grab, 0, 0)
      .. ',"reason":"left_queue","to":"' .. returns_to(offer) .. (digest and '","digest":"' .. digest or '')
      .. '"}')
    grab.ended_seq, grab.ended_at = call.seq, call.now
  end

  -- Gives units to a queued grab, as a hold.
  function serve_grab(offer, name, grab, quantity, now)
    take_from_queue(offer, name)
    give_back(offer, grab, grab.quantity - quantity)
    offer.places = offer.places + 1
    grab.place, grab.quantity, grab.status = offer.places, quantity, ACTIVE
    grab.price = offer.rules.price or 0
    grab.carried = nil
    move_units(offer, -quantity)
    begin_hold(offer, grab, quantity, now)
    touch_grab(offer, name)
  end
end

-- The time (ms) at which the sweeper next handles an open offer with a queue. If units are left for queued
-- grabs: now or, while all new grabs are refused (`refusal`: the row), at the next opening; a paused offer
-- serves them when it is resumed. Else when the offer closes.
local function due_when_open(offer, now, refusal)
  if offer.paused or available(offer) == offer.units_left then return offer.closes_at end
  return math.min(refusal and (refusal.retry_at or offer.closes_at) or now, offer.closes_at)
end

-- Serves the queue: units that are left go, as holds, to the first grab for which they suffice, of the first
-- CONSIDERED_MAX grabs; at most SERVED_AT_ONCE_MAX grabs per command, the sweeper serves the others. Grabs
-- for which the units do not suffice keep their positions. No grab is served while all new grabs are refused:
-- while the offer is paused, and outside its hours. Afterwards, an open offer is due as due_when_open says.
local serve
do
  -- The number of units that a queued grab gets when it is served.
  local function units_for(offer, grab)
    local price = offer.rules.price or 0
    local payable = price > 0 and math.floor(AMOUNT_MAX / price) or grab.quantity
    return math.min(grab.quantity, offer.units_left, payable)
  end

  function serve(call, offer, command)
    if not offer.pieces or offer.closed or call.now >= offer.closes_at then return end
    if not offer.rules.waiting_list then return end
    offer.due = offer.closes_at
    if offer.queue_length == 0 then return end
    if offer.rules.hours then spend(COST.span * #offer.rules.hours) end
    local refusal = refusal_of_offer(offer, call.now)
    if refusal then
      offer.due = due_when_open(offer, call.now, refusal)
      return
    end
    -- An earlier look at the queue may have found already that the units suffice for no grab. (`least_wanted`
    -- is nil where this is not known.)
    if offer.units_left < (offer.least_wanted or 0) then return end
    local served, i, least = 0, 1, math.huge
    while offer.units_left > 0 and i <= CONSIDERED_MAX do
      local name = waiter_at(offer, i)
      if not name then break end
      spend(COST.considered)
      local wanted = wanted_at_least(offer, i == 1 and grab_of(offer, name).quantity
        or asked_by(offer, {name})[1])
      if wanted > offer.units_left then
        i, least = i + 1, math.min(least, wanted)
      elseif served == SERVED_AT_ONCE_MAX then
        offer.due, offer.changed = call.now, true
        return
      else
        served = served + 1
        local grab = grab_of(offer, name)
        local asked, quantity, carried = grab.quantity, units_for(offer, grab), grab.carried
        serve_grab(offer, name, grab, quantity, call.now)
        add_grab(call, 'grab.held', offer, name, grab.user, quantity, quantity, nil,
          carry_into({asked = asked ~= quantity and int(asked) .. '' or nil}, carried), command)
      end
    end
    if offer.units_left > 0 then offer.least_wanted = least end
  end
end
