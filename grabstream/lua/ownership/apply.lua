#!lua flags=allow-oom
-- Applies events of the journal to a shard that is being recovered, so that the shard gets the state that
-- deciding them had made.
--
-- Command: none; the shard's owner calls it while the shard is fenced (docs/design.md, Recovery).
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list ·
--   KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] past zset · KEYS[12] cleaning hash
-- KEYS[13 …] ten keys for each offer, then five for each campaign, see includes/offers.lua
-- ARGV[1] term · ARGV[2] owner · ARGV[3] server epoch ·
--   ARGV[4] seq before the events, or '' when they are the events of only some offers
-- ARGV[5] seq of the shard after all events, or '' when the shard is still incomplete after them ·
--   ARGV[6] time of the shard after them, ms
-- ARGV[7] msgpack: {offers, campaign of each (from 1), campaigns, events, offer of each event (from 1),
--         offers retired before}; an event is a map of its fields. offer.opened has `row` in place of terms,
--         in the form of `open`; offer.amended has `changes` in the form of `amend`; ledger.adjusted has
--         `whole` in the form of `adjust`; grab.queued has `carried` as in `grab`; `parts` represents many
--         events
-- ARGV[7 + i] parts of the i-th event that opens an offer, 6 bytes each; '' when there are none, or when
--   `apply_parts` has written them
-- Outcomes: none, it decides nothing
-- Events: none, it applies journaled events
-- Returns the number of applied events of the list; the caller sends the others again. Or the error LOST when
--         the shard has another owner, or HOLE when events of an offer are missing before these.
--- @include "cost"
--- @include "shard"
--- @include "packed_values"
--- @include "decide"
--- @include "limits"
--- @include "offers"
--- @include "codes"
--- @include "past"
--- @include "pieces"
--- @include "queue"
--- @include "settling"

local lost = lost_ownership()
if lost then return lost end
local shard = redis.call('HMGET', KEYS[1], 'server_epoch', 'seq', 'partial')
if shard[1] then return redis.error_reply('LOST the shard is not fenced') end
if ARGV[4] ~= '' and (shard[3] or (shard[2] or '0') ~= ARGV[4]) then
  return redis.error_reply('LOST the shard has changed')
end

local names, campaign_of, campaign_names, events, offer_of, retired = unpack(cmsgpack.unpack(ARGV[7]))
spend(COST.argument_byte * #ARGV[7])
local offers, campaigns = load_offers(names, campaign_of, campaign_names)
local call = {seq = 0, now = 0, lines = {}, refused_ids = {}, refused_fields = {}, demand = {}}
local APPLY = {}
-- The events after which the deciding call served the queue, or would have. (So it did with a grab that has
-- waited.)
local SERVES = {['offer.amended'] = true, ['offer.paused'] = true, ['offer.resumed'] = true,
  ['grab.released'] = true, ['grab.returned'] = true}
-- The events that a grab makes itself. (Served later, a grab that has waited makes one with `waited`.)
local MAKES = {['grab.granted'] = true, ['grab.held'] = true, ['grab.queued'] = true}

-- Stores the row of an event's command as the answer under its id.
local function keep_row(offer, event, row)
  local field = event.command
  if MAKES[event.type] then field = answer_field_of_grab(offer.name, field) end
  keep_answer(offer.campaign, field, pack_row(offer.name, row, event.digest, event.whole))
end

-- Stores the answer to a command about a grab.
local function keep_grab_row(offer, event, grab, code, details)
  local quantity = event.quantity
  keep_row(offer, event, {code = code, seq = event.seq, at = event.at, amount = quantity, quantity = quantity,
    place = grab.place, left = offer.units_left, details = details})
end

-- -- offers -------------------------------------------------------------------------------------------------

APPLY['offer.loaded'] = function(offer, event)
  spend(COST.item * #event.items + COST.line_byte * bytes_of(event.items))
  local list = offer.loads[event.what]
  offer.seen_new[event.what .. '/' .. event.chunk] = true
  local loading = {chunks = event.chunks, loaded = (list and list.loaded or 0) + 1, count = event.count}
  if event.what == 'codes' then
    add_codes(offer, list, loading, event.items)
  else
    offer.audience_new = offer.audience_new or {}
    for _, user in ipairs(event.items) do offer.audience_new[user] = true end
  end
  offer.loads[event.what] = loading
  offer.loads_changed = true
  keep_row(offer, event, {code = CODE.loaded, seq = event.seq, at = event.at, quantity = event.count,
    left = offer.units_left})
end

APPLY['offer.amended'] = function(offer, event)
  move_units(offer, (event.added or 0) - (event.removed or 0))
  change_terms(offer, event.changes)
  keep_row(offer, event, {code = CODE.amended, seq = event.seq, at = event.at, left = offer.units_left})
end

do
  local function apply_pause(code)
    return function(offer, event)
      offer.paused = code == CODE.paused
      keep_row(offer, event, {code = code, seq = event.seq, at = event.at, left = offer.units_left})
    end
  end

  APPLY['offer.paused'] = apply_pause(CODE.paused)
  APPLY['offer.resumed'] = apply_pause(CODE.resumed)
end

APPLY['offer.closed'] = function(offer, event)
  end_offer(offer, event.reason, event.at)
  if event.digest then
    keep_row(offer, event, {code = CODE.closed, seq = event.seq, at = event.at,
      amount = event.amount, left = event.left})
  end
end

APPLY['ledger.adjusted'] = function(offer, event)
  keep_row(offer, event, {code = CODE.adjusted, seq = event.seq, at = event.at, left = offer.units_left})
end

-- -- grabs --------------------------------------------------------------------------------------------------

-- In a block, because a script may have at most 200 locals.
do
  -- Uses a ticket at the time of its event, since that time decides which other tickets the campaign forgets.
  local function reuse_ticket(offer, event)
    if not event.ticket then return end
    use_ticket(offer, event.ticket, event.ticket_ends_at)
    write_tickets(offer.campaign, event.at)
    commit()
  end

  local function take_part(offer, event)
    offer.places, offer.units_left, offer.amount_left = event.place, event.left,
      offer.amount_left - event.amount
    reuse_ticket(offer, event)
    keep_part(call, offer, event.command, event.user, event.digest, event.amount)
  end

  -- Plain grabs of an envelope that follow each other in the shard, in columns
  -- (streams/relaying/apply_arguments.py).
  APPLY['parts'] = function(offer, event)
    spend(COST.plain_grab * #event.grabs)
    keep_run_of_parts(offer, event)
    offer.offer_seq = event.offer_seq + #event.grabs - 1
  end

  -- Takes the codes of a grab from the front of the list, in which they are in this order.
  local function take_codes(offer, grab, codes)
    spend(COST.item * #codes + COST.listed_byte * bytes_of(codes))
    offer.codes_taken = offer.codes_taken + #codes
    for _, code in ipairs(codes) do grab.codes[#grab.codes + 1] = code end
  end

  -- Makes a grab as it was decided; returns it and the details of its answer about limits.
  local function make_grab(offer, event)
    local under = event.under or counted_under(offer, event.user, event.attributes, event.at)
    count(offer, under, event.quantity)
    local grab = new_grab(event.user, event.quantity, under)
    grab.place, grab.basket = event.place, event.basket
    offer.grabs[event.grab] = grab
    reuse_ticket(offer, event)
    touch_grab(offer, event.grab)
    return grab, #under > 0 and {limits = limit_states(offer, under, event.at)} or {}
  end

  local function take_units(offer, grab, event)
    offer.places, grab.price = event.place, offer.rules.price or 0
    move_units(offer, -event.quantity)
  end

  APPLY['grab.granted'] = function(offer, event)
    if not offer.pieces then return take_part(offer, event) end
    local grab, details = make_grab(offer, event)
    take_units(offer, grab, event)
    grab.taken = event.quantity
    local codes = event.codes or {}
    take_codes(offer, grab, codes)
    keep_grab_row(offer, event, grab, CODE.granted, coupon_row(offer, grab, codes, details))
  end

  -- A queued grab was served. The answer to the command that had returned the units states the units left
  -- after the serving, so it is corrected here.
  local function apply_served(offer, event)
    local grab = grab_of(offer, event.grab)
    serve_grab(offer, event.grab, grab, event.quantity, event.at)
    local campaign = offer.campaign
    local record = campaign.answers[event.command] or redis.call('HGET', campaign.answers_key, event.command)
    if not record then return end
    local _, _, _, _, _, digest, tail = unpack_answer(record)
    local name, row = unpack_row(tail)
    if name == offer.name and row.at == event.at and row.seq < event.seq then
      row.left = offer.units_left
      keep_row(offer, {command = event.command, digest = digest}, row)
    end
  end

  APPLY['grab.held'] = function(offer, event)
    if event.waited then return apply_served(offer, event) end
    local grab, details = make_grab(offer, event)
    take_units(offer, grab, event)
    begin_hold(offer, grab, event.quantity, event.at)
    keep_grab_row(offer, event, grab, CODE.held, hold_row(offer, grab, details))
  end

  APPLY['grab.queued'] = function(offer, event)
    local grab, details = make_grab(offer, event)
    join_queue(offer, event.grab, grab, event.carried)
    keep_row(offer, event, {code = CODE.waiting, seq = event.seq, at = event.at,
      quantity = event.quantity, place = grab.place, left = offer.units_left, details = details})
  end

  APPLY['grab.extended'] = function(offer, event)
    local grab = grab_of(offer, event.grab)
    grab.extensions, grab.deadline = grab.extensions + 1, event.deadline_at
    touch_grab(offer, event.grab)
    keep_grab_row(offer, event, grab, CODE.extended, {deadline_at = grab.deadline})
  end

  APPLY['grab.confirmed'] = function(offer, event)
    local grab, quantity, codes = grab_of(offer, event.grab), event.quantity, event.codes or {}
    if event.retaken then
      retake_units(offer, grab, in_current_windows(offer, grab.under, event.at), quantity)
    end
    keep_units(offer, grab, quantity)
    take_codes(offer, grab, codes)
    grab.confirmed_seq, grab.confirmed_at = event.seq, event.at
    if event.payment then
      grab.payments[#grab.payments + 1] = {event.payment, quantity}
      keep_payment(call, offer.campaign, event.payment, offer.name, event.grab, CODE.confirmed, quantity,
        event.paid, event.currency, grab.basket)
    end
    touch_grab(offer, event.grab)
    keep_grab_row(offer, event, grab, CODE.confirmed, coupon_row(offer, grab, codes, {}))
  end

  APPLY['grab.released'] = function(offer, event)
    local grab = grab_of(offer, event.grab)
    if event.reason == 'left_queue' then
      end_wait(offer, event.grab, grab, event.at)
    else
      local expired = event.reason == 'expired'
      if expired then grab.lapsed = grab.held end
      end_hold(offer, event.grab, grab, expired and EXPIRED or RELEASED)
    end
    grab.ended_seq, grab.ended_at = event.seq, event.at
    if event.digest then keep_grab_row(offer, event, grab, CODE.released) end
  end

  APPLY['grab.returned'] = function(offer, event)
    local grab = grab_of(offer, event.grab)
    refund_units(grab, event.quantity)
    local details = return_units(offer, event.grab, grab, event.quantity, event.restored)
    keep_grab_row(offer, event, grab, CODE.returned, details)
  end

  APPLY['grab.redeemed'] = function(offer, event)
    local grab = grab_of(offer, event.grab)
    grab.redeemed = grab.redeemed + event.quantity
    keep_order(call, offer, event.grab, event.order, event.quantity)
    keep_grab_row(offer, event, grab, CODE.redeemed)
  end

  APPLY['grab.unredeemed'] = function(offer, event)
    local grab = grab_of(offer, event.grab)
    grab.redeemed = grab.redeemed - event.quantity
    keep_order(call, offer, event.grab, event.order, 0)
    keep_grab_row(offer, event, grab, CODE.unredeemed)
  end

  APPLY['payment.refund_due'] = function(offer, event)
    local code, grab = CODE[event.outcome], grab_of(offer, event.grab)
    local details = keep_refund_due(call, offer.campaign, event.payment, offer.name, event.grab, code,
      event.amount, event.asset, code ~= CODE.no_such_grab and grab or nil)
    keep_row(offer, event, {code = code, seq = event.seq, at = event.at, details = details})
  end
end

local read_ahead
do
  -- The number of events whose counters are read at once. An offer that these events amend is left out, since
  -- its limits may change between them.
  local AT_ONCE = 32

  -- Reads the counters for an event and the events after it, unless an earlier event has done so.
  function read_ahead(from)
    if from % AT_ONCE ~= 1 then return end
    local to, amended = math.min(from + AT_ONCE - 1, #events), {}
    for i = from, to do
      if events[i].type == 'offer.amended' then amended[offer_of[i]] = true end
    end
    for i = from, to do
      local event, o = events[i], offer_of[i]
      local offer = offers[o]
      if offer and offer.pieces and MAKES[event.type] and not event.waited and #offer.rules.limits > 0
        and not amended[o] then
        event.under = counted_under(offer, event.user, event.attributes, event.at)
      end
    end
    for _, offer in ipairs(offers) do
      if offer and offer.pieces then read_wanted(offer.counters) end
    end
    for _, campaign in ipairs(campaigns) do read_wanted(campaign.counters) end
  end
end

-- -- all events ---------------------------------------------------------------------------------------------

local open
do
  local opened = 0

  function open(o, name, event)
    opened = opened + 1
    local campaign, row, parts = campaigns[campaign_of[o]], event.row, ARGV[7 + opened]
    if row.draw == 'ahead' and parts == '' then
      local written = redis.call('STRLEN', key_of(o, 'parts'))
      if written ~= 6 * row.units then
        error('PARTS ' .. written .. ' bytes of the parts of offer ' .. name .. ' were written before')
      end
    end
    spend(COST.part_byte * #parts)
    join_zone(campaign, row)
    create_offer(name, o, campaign, row, event.opens_at, event.closes_at, parts)
    commit()
    offers[o] = load_offer(name, o, campaign)
    keep_row(offers[o], event, {code = CODE.opened, seq = event.seq, at = event.at,
      amount = row.total, left = row.units})
  end
end

-- Leaves to the sweeper what the last deciding call that served the queue, at `offer.served_at`, left to it:
-- units for queued grabs, when it had served as many grabs as it may, or none because the offer was paused or
-- outside its hours. After the closing time no grab is served, so later changes leave nothing.
local function leave_to_sweeper(offer)
  if offer.closed or not offer.served_at or not offer.rules.waiting_list then return end
  offer.due = due_when_open(offer, offer.served_at, refusal_of_offer(offer, offer.served_at))
end

-- The shard is incomplete from the first write to the last: if this script fails in between, the shard is
-- rebuilt from the beginning.
redis.call('HSET', KEYS[1], 'partial', '1')
write_in_pieces('SADD', KEYS[10], retired)
local gone, applied = {}, 0

for i, event in ipairs(events) do
  if i > 1 and is_spent() then break end
  spend(COST.command + COST.event)
  read_ahead(i)
  applied = i
  local o = offer_of[i]
  local name, offer = names[o], offers[o]
  call.seq, call.now = event.seq, event.at
  local campaign = campaigns[campaign_of[o]]
  local past = not offer and past_of(campaign, name)
  if (offer and offer.offer_seq or past and past.offer_seq or 0) + 1 ~= event.offer_seq then
    return redis.error_reply('HOLE before event ' .. event.offer_seq .. ' of offer ' .. name .. ', at seq '
      .. event.seq)
  end
  if event.type == 'offer.opened' then
    open(o, name, event)
  elseif event.type == 'offer.retired' then
    offer.offer_seq = event.offer_seq
    gone[#gone + 1] = {offer, event.at}
    offers[o] = false
  elseif past then
    -- A payment for an offer that had already retired.
    past.offer_seq, past.changed = event.offer_seq, true
    keep_refund_due(call, campaign, event.payment, past.name, event.grab, CODE[event.outcome], event.amount,
      event.asset)
  else
    if offer.was_open and event.at >= offer.closes_at then leave_to_sweeper(offer) end
    offer.offer_seq, offer.changed = event.offer_seq, true
    APPLY[event.type](offer, event)
    -- Afterwards, since an amendment may set another closing time.
    offer.was_open = event.at < offer.closes_at
    if offer.was_open and offer.pieces and (SERVES[event.type] or event.waited) then
      offer.served_at = event.at
    end
  end
end
for _, offer in ipairs(offers) do
  if offer and offer.was_open then leave_to_sweeper(offer) end
end
write_all(call, offers, campaigns)
for _, offer_and_time in ipairs(gone) do remove_offer(unpack(offer_and_time)) end
if ARGV[5] ~= '' then
  local seq, at = ARGV[5], ARGV[6]
  if applied < #events then
    local last = events[applied]
    seq, at = string.format('%d', last.last_seq or last.seq), string.format('%d', last.at)
  end
  write('HSET', KEYS[1], 'seq', seq, 'time', at)
  write('HDEL', KEYS[1], 'partial')
end
commit()
return applied
