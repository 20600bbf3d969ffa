#!lua
-- Decides grabs of one shard, in order, in one call.
--
-- Command: grab
-- KEYS[1] shard hash · KEYS[2] outbox stream · KEYS[3] refusals hash · KEYS[4] refusal_order list ·
--   KEYS[5] demand hash
-- KEYS[6] due zset · KEYS[7] offers set · KEYS[8] holds zset · KEYS[9] campaigns hash · KEYS[10] retired set
-- KEYS[11] past zset · KEYS[12] cleaning hash
-- KEYS[13 …] ten keys for each offer, then five for each campaign, see includes/offers.lua
-- ARGV[1] shard/shards · ARGV[2] caller time ms · ARGV[3] time to use ms or '' · ARGV[4] clock skew ms ·
--   ARGV[5] outbox events max
-- ARGV[6] msgpack: {offers, campaign of each offer (from 1), campaigns, ids, offer of each (from 1), digests
--         or false, users, quantities or false, attributes as JSON text or '' or false, extras, plain};
--         extras: false, or for each grab false or {attributes, basket, wait, carried: {name, JSON text} of
--         each field that its events repeat, ticket_expires_at, ticket_once, ticket_ends_at (if a use counts
--         in the whole campaign)};
--         plain: false, or, if all grabs are of one offer and for one unit, without extras, and no user
--         occurs twice: {number of grabs, width of the ids, width of the users}; then ids, users and offer of
--         each are false. A width is the length of all texts or, if they differ, the format of ARGV[7] or
--         ARGV[8] for `struct.unpack`
-- ARGV[7] the ids of plain grabs, with '","' between them · ARGV[8] their users
-- Outcomes: 21 fenced · 22 busy (whole call) · then for each: 20 invalid · 23 conflict · 24 no_such_offer ·
--           26 already_taken · 27 not_open_yet · 28 on_hold · 29 over · 30 not_eligible · 31 limit_reached ·
--           32 sold_out · 33 not_enough_left · 0 granted · 1 held · 15 waiting
-- Events: grab.granted · grab.held · grab.queued · offer.closed (drained)
-- Returns msgpack: {0, history, rows, run}; or {code, retry_at, message} when the whole call was refused.
--         run: {first seq, first place, first left, time, amounts} of the plain grabs granted first, or
--         absent. rows: for each further grab {code, seq, at, amount, quantity, place, left, repeated,
--         retry_at, details}. Grabs that do not fit into the call get no row; the caller sends them with its
--         next call.
--- @include "cost"
--- @include "undo"
--- @include "packed_values"
--- @include "calendar"
--- @include "decide"
--- @include "repeats"
--- @include "limits"
--- @include "offers"
--- @include "envelope"
--- @include "pieces"
--- @include "taking"

local call, refused = begin_call()
if not call then return cmsgpack.pack(refused) end

local arguments = cmsgpack.unpack(ARGV[6])
local names, campaign_of, ids, offer_of = arguments[1], arguments[2], arguments[4], arguments[5]
local digests, users, quantities = arguments[6], arguments[7], arguments[8]
local attributes, extras = arguments[9], arguments[10]
local offers, campaigns = load_offers(names, campaign_of, arguments[3])
local offer_users = {}
-- The run of the first grabs; of pieces, their packed rows.
local first, run, packed = 1, nil, nil
if arguments[11] then
  ids, users, first, run, packed = decide_plain(call, offers[1], campaigns[1], arguments[11])
  if first > #ids then return finish(call, offers, campaigns, {}, run, packed) end
end

if not offer_of then
  offer_of = {}
  for i = 1, #ids do offer_of[i] = 1 end
end

do
  local function basket_at(i)
    local extra = extras and extras[i]
    return extra and extra.basket and campaign_of[offer_of[i]] .. '/' .. extra.basket
  end

  -- The number of grabs that this call has room for, estimated before they are read. A basket is never
  -- divided.
  local function fitting()
    spend(COST.argument_byte * #ARGV[6])
    local estimate = 0
    for i = first, #ids do
      if i > 1 and is_spent(estimate) and not (basket_at(i) and basket_at(i) == basket_at(i - 1)) then
        return i - 1
      end
      local offer = offers[offer_of[i]]
      estimate = estimate + COST.command
      if offer then
        local spans = offer.rules.hours and #offer.rules.hours or 0
        estimate = estimate + COST.span * spans + COST.counter * #offer.rules.limits
      end
    end
    return #ids
  end

  for i = #ids, fitting() + 1, -1 do ids[i], users[i] = nil, nil end
end

local taken, eligible, counted, refusals = {}, {}, {}, {}

local function refusal_field_at(i)
  local o = offer_of[i]
  return refusal_field_of_grab(names[o], users[i], ids[i])
end

if not quantities then
  digests, quantities, attributes = {}, {}, {}
  for i = 1, #ids do digests[i], quantities[i], attributes[i] = PLAIN, 1, '' end
end
do
  local function lookup(key, fields)
    local by_field = {}
    if #fields == 0 then return by_field end
    local values = redis.call('HMGET', key, unpack(fields))
    for i = 1, #fields do by_field[fields[i]] = values[i] end
    return by_field
  end

  -- Small records are read at once: the records of users in each offer, and the refusals. Answers may be
  -- large, since they have codes, so each is read when its grab is decided.
  for o = 1, #offers do offer_users[o] = {} end
  for i = 1, #ids do
    local asked = offer_users[offer_of[i]]
    asked[#asked + 1] = users[i]
  end
  for o = 1, #offers do
    local offer = offers[o]
    if offer and not offer.pieces then taken[o] = lookup(KEYS[offer.base + KEY.users], offer_users[o]) end
    if offer and offer.rules.audience == 'list' and #offer_users[o] > 0 then
      local is_member = redis.call('SMISMEMBER', KEYS[offer.base + KEY.audience], unpack(offer_users[o]))
      eligible[o] = {}
      for n, user in ipairs(offer_users[o]) do eligible[o][user] = is_member[n] == 1 end
    end
  end
  if redis.call('EXISTS', KEYS[3]) == 1 then
    local fields = {}
    for i = 1, #ids do fields[i] = refusal_field_at(i) end
    refusals = lookup(KEYS[3], fields)
    for i = 1, #ids do
      local record = refusals[fields[i]]
      if record then
        refusals[fields[i]] = refusal_that_counts(call, campaigns[campaign_of[offer_of[i]]], fields[i],
          record) or false
      end
    end
  end
end

-- The reason why a grab is invalid for this offer, or nil.
local function unfit(i, offer)
  local extra = extras and extras[i]
  if not offer.pieces then
    if extra and extra.basket then return 'basket: an envelope cannot be in a basket' end
    return quantities[i] ~= 1 and 'quantity: an envelope has one part per user' or nil
  end
  if quantities[i] > offer.rules.max_per_grab then
    return 'quantity: above max_per_grab, which is ' .. string.format('%d', offer.rules.max_per_grab)
  end
  if quantities[i] > BOUNDS.codes_per_grab and offer.loads.codes then
    return 'quantity: ' .. BOUNDS.with_codes
  end
  if offer.rules.take == 'all' and quantities[i] > offer.total then
    return string.format('quantity: above the total of the offer, %d', offer.total)
  end
  if quantities[i] * (offer.rules.price or 0) > AMOUNT_MAX then
    return 'quantity: price × quantity is above 10000000000000'
  end
  for _, limit in ipairs(offer.rules.limits) do
    if limit.by ~= 'user' and not (extra and extra.attributes and extra.attributes[limit.by]) then
      return 'attributes: a limit counts by ' .. limit.by
    end
  end
end

-- The counters of all grabs of pieces after the run are read at once.
for i = first, #ids do
  local offer = offers[offer_of[i]]
  if offer and offer.pieces and #offer.rules.limits > 0 and not unfit(i, offer) then
    counted[i] = counted_under(offer, users[i], extras and extras[i] and extras[i].attributes, call.now)
  end
end
for o = 1, #offers do
  if offers[o] and offers[o].pieces then read_wanted(offers[o].counters) end
end
for _, campaign in ipairs(campaigns) do read_wanted(campaign.counters) end

local lines, now = call.lines, call.now

-- The refusal of a grab as a row, in order of precedence; nil if the grab can be executed.
local refusal_of
do
  local function may_wait(i, offer)
    return offer.rules.waiting_list and extras and extras[i] and extras[i].wait
  end

  local function is_eligible(i, o, offer)
    local audience = offer.rules.audience
    if audience == 'list' then return eligible[o][users[i]] end
    if audience ~= 'ticket' then return true end
    local extra = extras and extras[i]
    if not extra or not extra.ticket_expires_at or now >= extra.ticket_expires_at then return false end
    return extra.ticket_once == '' or not is_used(offer, extra.ticket_once, extra.ticket_ends_at, now)
  end

  function refusal_of(i, o, offer)
    if not offer then return {code = CODE.no_such_offer, at = now} end
    local part = taken[o] and taken[o][users[i]]
    if part then
      local place, amount, seq = unpack_part(part)
      return {code = CODE.already_taken, seq = seq, at = now, amount = amount, quantity = 1, place = place}
    end
    local refusal_of_all = refusal_of_offer(offer, now)
    if refusal_of_all then return refusal_of_all end
    if not is_eligible(i, o, offer) then return {code = CODE.not_eligible, at = now} end
    if not offer.pieces then return nil end
    local asked, up_to = quantities[i], offer.rules.take == 'up_to'
    for n = 1, #offer.rules.limits do
      if offer.rules.limits[n].max - count_in(offer, counted[i][n]) < (up_to and 1 or asked) then
        local limit = limit_state(offer, counted[i], n, now)
        return {code = CODE.limit_reached, at = now, retry_at = limit[5], details = {limit = limit}}
      end
    end
    local free = available(offer)
    if (free > 0 and (up_to or asked <= free)) or may_wait(i, offer) then return nil end
    if free == 0 then return {code = CODE.sold_out, at = now} end
    return {code = CODE.not_enough_left, at = now, details = {left = free}}
  end
end

-- Decides a grab of which nothing is remembered; returns its row.
local decide_new
do
  -- Uses a single-use ticket; returns its text for the event.
  local function ticket_text(offer, extra)
    if offer.rules.audience ~= 'ticket' or extra.ticket_once == '' then return '' end
    use_ticket(offer, extra.ticket_once, extra.ticket_ends_at)
    return ',"ticket":"' .. extra.ticket_once .. (extra.ticket_ends_at and '","ticket_ends_at":'
      .. int(extra.ticket_ends_at) or '"')
  end

  -- The values of a grab in the optional columns of a run (includes/runs.lua).
  local function rare_columns(i, ticket, quantity, codes)
    local extra, rare = extras and extras[i], {}
    if quantity ~= quantities[i] then rare.asked = int(quantities[i]) .. '' end
    if attributes[i] ~= '' then rare.attributes = attributes[i] end
    if extra then carry_into(rare, extra.carried) end
    if ticket ~= '' then
      rare.tickets = '["' .. extra.ticket_once .. '",'
        .. (extra.ticket_ends_at and int(extra.ticket_ends_at) or 'null') .. ']'
    end
    if digests[i] ~= PLAIN then rare.digests = '"' .. digests[i] .. '"' end
    if #codes > 0 then rare.codes = '["' .. table.concat(codes, '","') .. '"]' end
    return rare
  end

  local function tail_text(i, extra, ticket)
    return (attributes[i] == '' and '' or ',"attributes":' .. attributes[i])
      .. (extra and carried_text(extra.carried) or '') .. ticket
      .. (extra and extra.basket and ',"basket":"' .. extra.basket .. '"' or '')
  end

  -- Adds a grab that was granted or held to the run of the call.
  local function write_grab(type, i, offer, quantity, amount, ticket, codes)
    local extra = extras and extras[i]
    add_grab(call, type, offer, ids[i], users[i], quantity, amount, extra and extra.basket or nil,
      rare_columns(i, ticket, quantity, codes))
  end

  -- Grants the next part of an envelope; returns the row.
  local function take_part(i, o, offer)
    local id, user = ids[i], users[i]
    local ticket = ticket_text(offer, extras and extras[i])
    local amount = part_at(offer, #offer_users[o])
    offer.places, offer.units_left, offer.amount_left = offer.places + 1, offer.units_left - 1,
      offer.amount_left - amount
    write_grab('grab.granted', i, offer, 1, amount, ticket, {})
    taken[o][user] = keep_part(call, offer, id, user, digests[i], amount)
    local row = {code = CODE.granted, seq = call.seq, at = call.now, amount = amount, quantity = 1,
      place = offer.places, left = offer.units_left}
    if offer.units_left == 0 then close_offer(call, offer, 'drained', id) end
    return row
  end

  -- Grants or holds units, or adds the grab to the queue; returns the row.
  local function take_pieces(i, offer)
    local rules, extra, id = offer.rules, extras and extras[i], ids[i]
    local under, wanted = counted[i] or {}, quantities[i]
    if rules.take == 'up_to' then
      for n = 1, #under do wanted = math.min(wanted, rules.limits[n].max - count_in(offer, under[n])) end
    end
    local free = available(offer)
    local waits = free < (rules.take == 'up_to' and 1 or wanted)
    local quantity = waits and wanted or math.min(wanted, free)
    count(offer, under, quantity)
    local ticket = ticket_text(offer, extra)
    local grab = new_grab(users[i], quantity, under)
    grab.basket = extra and extra.basket or nil
    put(offer.grabs, id, grab)
    local code, details = CODE.granted, {}
    if #under > 0 then details.limits = limit_states(offer, under, now) end
    if waits then
      join_queue(offer, id, grab, extra and extra.carried or nil)
      add_line(call, event_head(call, offer, 'grab.queued', id) .. grab_text(offer, id, grab, quantity, 0)
        .. tail_text(i, extra, ticket) .. ',"digest":"' .. digests[i] .. '"}')
      code = CODE.waiting
    else
      put(offer, 'places', offer.places + 1)
      grab.place, grab.price = offer.places, rules.price or 0
      move_units(offer, -quantity)
      if rules.hold_ms then
        begin_hold(offer, grab, quantity, now)
        write_grab('grab.held', i, offer, quantity, quantity, ticket, {})
        code = CODE.held
        hold_row(offer, grab, details)
      else
        grab.taken = quantity
        local codes = hand_out(offer, grab, quantity)
        write_grab('grab.granted', i, offer, quantity, quantity, ticket, codes)
        coupon_row(offer, grab, codes, details)
      end
    end
    touch_grab(offer, id)
    local row = {code = code, seq = call.seq, at = now, amount = waits and 0 or quantity, quantity = quantity,
      place = grab.place, left = offer.units_left, details = details}
    local record = pack_row(offer.name, row, digests[i])
    keep_answer(offer.campaign, answer_field_of_grab(offer.name, id), record)
    return row
  end

  function decide_new(i)
    local o = offer_of[i]
    local offer = offers[o]
    local row = refusal_of(i, o, offer)
    if row then return row end
    if offer.pieces then return take_pieces(i, offer) end
    return take_part(i, o, offer)
  end
end

-- The digest of a grab, in full also for a plain grab, for records that do not hold its offer and user.
local function digest_in_full(i)
  if digests[i] ~= PLAIN then return digests[i] end
  return PLAIN .. '$' .. names[offer_of[i]] .. '/' .. users[i]
end

-- Counts and remembers a refusal; returns its row.
local function keep(i, row)
  if row.code > CODE.invalid and row.code ~= CODE.conflict then
    local o = offer_of[i]
    local field = refusal_field_at(i)
    if refusals[field] then call.in_order[field] = true end
    refusals[field] = refuse(call, row.code, field, names[o], digest_in_full(i))
  end
  return row
end

-- The answer that is stored under the id of a grab, or false.
local function answer_to(i)
  local o = offer_of[i]
  local part = taken[o] and taken[o][users[i]]
  return answer_to_grab(call, campaigns[campaign_of[o]], offers[o], names[o], part, ids[i])
end

-- The answer, or else the refusal, that is stored under the id of a grab.
local function known(i)
  local record = answer_to(i)
  return record, not record and next(refusals) and refusals[refusal_field_at(i)]
end

-- The row of what is stored under the id, see includes/repeats.lua.
local function repeated(i, record, refusal, otherwise)
  local o = offer_of[i]
  local offer = offers[o]
  local sent = {digest = digest_in_full(i), offer = names[o]}
  -- Whether the grab of this id is this user's; used for a plain grab, whose record has no digest.
  function sent.has()
    if not offer or digests[i] ~= PLAIN then return false end
    -- The answer to a grab of an envelope is its user's part.
    if not offer.pieces then return true end
    local grab = grab_of(offer, ids[i])
    return grab ~= nil and grab.user == users[i]
  end
  local row = repeated_row(record, refusal, sent, now, campaigns[campaign_of[o]].name, offer and offer.parts,
    otherwise)
  local first_row = row.details and row.details.first or row
  if first_row.code == CODE.already_taken and taken[o] and taken[o][users[i]] then
    first_row.place, first_row.amount, first_row.seq = unpack_part(taken[o][users[i]])
    first_row.quantity = 1
  end
  return row
end

local function decide_one(i)
  local record, refusal = known(i)
  local offer = offers[offer_of[i]]
  local unfit_because = offer and unfit(i, offer)
  local invalid = unfit_because and {code = CODE.invalid, at = now, details = {message = unfit_because}}
  if record or refusal then return repeated(i, record, refusal, invalid) end
  return invalid or keep(i, decide_new(i))
end

-- Decides the grabs of a basket: all are granted or held, or all are refused with the outcome of the first
-- refusal.
local decide_basket
do
  -- Whether a basket gets recorded answers: one of its grabs was granted or held, or all of its grabs have
  -- recorded refusals. (If only some refusals are still recorded, nothing was taken, and the basket is
  -- decided again.)
  local function is_known_basket(members)
    local all = true
    for _, i in ipairs(members) do
      local record, refusal = known(i)
      if record then return true end
      all = all and refusal
    end
    return all
  end

  -- The reason why one call cannot answer a recorded basket, or nil. A basket is never divided.
  local function too_large_to_answer(members)
    local bytes = 0
    for _, i in ipairs(members) do
      bytes = bytes + redis.call('HSTRLEN', campaigns[campaign_of[offer_of[i]]].answers_key,
        answer_field_of_grab(names[offer_of[i]], ids[i]))
    end
    if bytes <= BOUNDS.basket_answers_bytes then return nil end
    return 'basket: the recorded answers of its grabs have more than ' .. BOUNDS.basket_answers_bytes
      .. ' bytes; send each grab by itself'
  end

  -- The reason why a new basket is invalid, or nil.
  local function unfit_basket(members)
    if #members > BOUNDS.basket_grabs then
      return 'basket: at most ' .. BOUNDS.basket_grabs .. ' grabs, this has ' .. #members
    end
    local codes = 0
    for _, i in ipairs(members) do
      local offer = offers[offer_of[i]]
      if offer and offer.pieces and offer.loads.codes and not offer.rules.hold_ms then
        codes = codes + quantities[i]
      end
    end
    if codes <= BOUNDS.codes_per_grab then return nil end
    return 'basket: its grabs get at most ' .. BOUNDS.codes_per_grab .. ' codes together'
  end

  local function refuse_all(members, rows, message)
    local row = {code = CODE.invalid, at = now, details = {message = message}}
    for _, i in ipairs(members) do rows[i] = row end
  end

  function decide_basket(members, rows)
    local too_large = too_large_to_answer(members)
    if too_large then return refuse_all(members, rows, too_large) end
    if is_known_basket(members) then
      for _, i in ipairs(members) do
        local record, refusal = known(i)
        local unknown = {code = offers[offer_of[i]] and CODE.conflict or CODE.no_such_offer, at = now}
        rows[i] = (record or refusal) and repeated(i, record, refusal) or unknown
      end
      return
    end
    local problem = unfit_basket(members)
    if problem then return refuse_all(members, rows, problem) end
    end_run(call)
    local seq, count_lines = call.seq, #lines
    undo_log = {}
    for _, i in ipairs(members) do
      local offer = offers[offer_of[i]]
      local unfit_because = offer and unfit(i, offer)
      local row
      if answer_to(i) then
        row = {code = CODE.conflict, at = now}
      elseif unfit_because then
        row = {code = CODE.invalid, at = now}
      else
        row = decide_new(i)
      end
      if row.code >= CODE.invalid then
        undo()
        call.seq, call.run = seq, nil
        for n = #lines, count_lines + 1, -1 do lines[n], call.joined[n], call.seqs[n] = nil, nil, nil end
        for _, j in ipairs(members) do
          rows[j] = keep(j, {code = row.code, at = now, retry_at = row.retry_at, details = {
            message = 'basket: refused at offer ' .. names[offer_of[i]] .. ', with grab ' .. ids[i]}})
        end
        return
      end
      rows[i] = row
    end
    end_run(call)
    for n = count_lines + 2, #lines do call.joined[n] = true end
    undo_log = nil
  end
end

local rows = {}
for i = first, #ids do
  local basket = extras and extras[i] and extras[i].basket
  if not rows[i] then
    if i > 1 and is_spent() then break end
    spend(COST.command)
  end
  if not basket then
    rows[i] = decide_one(i)
  elseif not rows[i] then
    local members = {}
    for j = i, #ids do
      if extras[j] and extras[j].basket == basket
        and campaign_of[offer_of[j]] == campaign_of[offer_of[i]] then
        members[#members + 1] = j
      end
    end
    decide_basket(members, rows)
  end
end

-- The rows of the run are in `run`; a basket may have rows after the first missing one.
local rest = {}
for i = first, #ids do
  if not rows[i] then break end
  rest[#rest + 1] = list_row(rows[i])
end
return finish(call, offers, campaigns, rest, run, packed)
