-- The offers and campaigns of a call: reads them, closes and creates offers, makes the texts of events, and
-- notes what to write back. KEYS[13 …]: ten keys for each offer, then five for each campaign:
--   offer: state hash · users hash (an envelope's parts by user, or counters) · parts string · grabs hash ·
--     codes list · audience set · seen set (tickets used, chunks loaded) · queue zset · orders hash ·
--     names set (of codes, while they are loaded)
--   campaign: answers hash · payments hash · counters hash · state hash · tickets zset
--- @include "cost"
--- @include "undo"
--- @include "packed_values"
--- @include "calendar"
--- @include "decide"
--- @include "limits"

local SHARD_KEYS, OFFER_KEYS, CAMPAIGN_KEYS = 12, 10, 5
-- The places of the keys of an offer after its base. One table, since Lua allows 200 local variables.
local KEY = {state = 1, users = 2, parts = 3, grabs = 4, codes = 5, audience = 6, seen = 7, queue = 8,
  orders = 9, names = 10}

-- The key of a kind, of the o-th offer of the call.
local function key_of(o, kind)
  return KEYS[SHARD_KEYS + OFFER_KEYS * (o - 1) + KEY[kind]]
end

-- A campaign of the call: its keys, its counters, and what the call has read and changed of it.
local function campaign_at(name, offers, c)
  local base = SHARD_KEYS + OFFER_KEYS * offers + CAMPAIGN_KEYS * (c - 1)
  local answers, payments, counters, state, tickets = unpack(KEYS, base + 1, base + CAMPAIGN_KEYS)
  return {name = name, answers_key = answers, payments_key = payments, state_key = state,
    tickets_key = tickets,
    counters = counters_at(counters), answers = {}, made = {}, payments = {}, payments_changed = {},
      payments_made = {}, tickets = {}, tickets_used = {},
    past = {}}
end

-- Stores the answer to a command. A campaign with a large answer is marked (see are_answered in
-- includes/repeats.lua).
local function keep_answer(campaign, id, record)
  put(campaign.answers, id, record)
  append(campaign.made, id)
  append(campaign.made, record)
  if #record > BOUNDS.large_answer_bytes then put(campaign, 'has_large', true) end
end

-- Sets the campaign's zone from its first offer. If the offer has another zone, stores the campaign's offsets
-- in the offer's rules and returns the campaign's zone as JSON text; else returns nil. The caller writes
-- `campaign.zone`.
local function join_zone(campaign, terms)
  -- The time zone in which a campaign's limits count, as JSON text, or false. The campaign's first offer sets
  -- it; it holds until the campaign's last offer retires.
  if campaign.zone == nil then campaign.zone = redis.call('HGET', campaign.state_key, 'zone') end
  if not campaign.zone then
    campaign.zone = terms.campaign_zone_json or terms.zone_json
    campaign.zone_is_new = true
  end
  if campaign.zone == terms.zone_json then return nil end
  terms.rules.campaign_offsets = cjson.decode(campaign.zone).offsets
  return campaign.zone
end

local function write_past(campaign, past)
  write('HSET', campaign.state_key, 'retired/' .. past.name,
    string.format('%d:%d', past.offer_seq, past.at))
end

-- Reads the state of an offer; returns nil if none exists under this id. `o` is the index of the offer among
-- the keys.
local load_offer
do
  local NO_LIMITS = {}
  -- The last rules that were unpacked, and the text they were unpacked from. Code that changes rules copies
  -- them first (change_terms).
  local rules_packed, rules

  local function unpack_rules(packed)
    if packed ~= rules_packed then
      rules_packed, rules = packed, cmsgpack.unpack(packed)
      rules.limits = rules.limits or NO_LIMITS
    end
    return rules
  end

  function load_offer(name, o, campaign)
    local base = SHARD_KEYS + OFFER_KEYS * (o - 1)
    -- All at once: Redis finds each single field of a small hash by looking at those before it.
    local found, f = redis.call('HGETALL', KEYS[base + KEY.state]), {}
    spend(COST.offer)
    for i = 1, #found, 2 do f[found[i]] = found[i + 1] end
    if not f.state then return nil end
    spend(COST.record_byte * #f.rules)
    local offer = {
      name = name, base = base, campaign = campaign, closed = f.state == 'closed', paused = f.paused == '1',
      opens_at = tonumber(f.opens_at), closes_at = tonumber(f.closes_at), asset = f.asset,
      parts = tonumber(f.parts), amount_left = tonumber(f.amount_left), units_left = tonumber(f.units_left),
      places = tonumber(f.places), offer_seq = tonumber(f.offer_seq), issuer = f.issuer, reason = f.reason,
      kind = f.kind, rules = unpack_rules(f.rules), total = tonumber(f.total),
      loads = f.loads and cmsgpack.unpack(f.loads) or {}, users = {}, seen_new = {}, tail = offer_tail(name),
    }
    offer.was_closed, offer.was_paused = offer.closed, offer.paused
    if offer.kind == 'envelope' then
      offer.law, offer.min, offer.max, offer.draw, offer.seed = f.law, tonumber(f.min), tonumber(f.max),
        f.draw, f.seed
      -- The source of the parts: the seed, and the randomness of the beacon's round.
      offer.source = offer.rules.beacon and f.seed .. ':' .. offer.rules.beacon or f.seed
      offer.held = 0
    else
      offer.pieces = true
      offer.held, offer.queued = tonumber(f.held), tonumber(f.queued)
      offer.counters = counters_at(KEYS[base + KEY.users])
      offer.grabs, offer.grabs_changed, offer.holds, offer.holds_gone = {}, {}, {}, {}
      offer.queue_new, offer.queue_gone, offer.orders, offer.orders_changed = {}, {}, {}, {}
      -- As they are written: of the grabs of a run (includes/taking.lua), of confirmations that are decided
      -- together (includes/paying.lua); `records` are those of the latter, by grab.
      offer.grabs_made, offer.holds_made, offer.records = {}, {}, {}
      offer.codes_taken, offer.codes_new = 0, {}
      offer.queue_length = offer.rules.waiting_list and redis.call('ZCARD', KEYS[base + KEY.queue]) or 0
      offer.queue_stored, offer.queue_from, offer.queue_new_read = offer.queue_length, 0, 0
      offer.line, offer.asked = {}, {}
    end
    return offer
  end
end

-- Returns the offers and the campaigns of a call, from the names of the offers, the campaign of each (from
-- 1), and the names of the campaigns, as the gate packs them. An offer is read when it is first used; it is
-- false where none exists. Offers are in the order of their first commands.
local function load_offers(names, campaign_of, campaign_names)
  local campaigns = {}
  for c = 1, #campaign_names do campaigns[c] = campaign_at(campaign_names[c], #names, c) end
  return setmetatable({}, {__index = function(offers, o)
    local offer = load_offer(names[o], o, campaigns[campaign_of[o]]) or false
    rawset(offers, o, offer)
    return offer
  end}), campaigns
end

-- The refusal, as a row, that every grab of an offer gets now, for any sender, in order of precedence; nil if
-- user, limits and units decide.
local refusal_of_offer
do
  local function is_incomplete(offer)
    if offer.rules.codes and not offer.loads.codes then return true end
    if offer.rules.beacon_round and not offer.rules.beacon then return true end
    for _, list in pairs(offer.loads) do
      if list.loaded < list.chunks then return true end
    end
    return false
  end

  function refusal_of_offer(offer, now)
    if now < offer.opens_at then return {code = CODE.not_open_yet, at = now, retry_at = offer.opens_at} end
    local over = offer.closed or now >= offer.closes_at
    if not over then
      local opens = offer.rules.hours and opens_next(offer.rules.hours, offer.rules.offsets, now)
      if opens then return {code = CODE.not_open_yet, at = now, retry_at = opens} end
      if is_incomplete(offer) then return {code = CODE.not_open_yet, at = now} end
    end
    if offer.paused then return {code = CODE.on_hold, at = now} end
    if offer.closed and offer.reason == 'drained' then return {code = CODE.sold_out, at = now} end
    return over and {code = CODE.over, at = now} or nil
  end
end

-- The beginning of every event's text, up to the fields of its type. Takes the next seq of the shard and of
-- the offer.
local function event_head(call, offer, type, command)
  spend(COST.event)
  put(offer, 'offer_seq', offer.offer_seq + 1)
  put(offer, 'changed', true)
  -- Lua formats a number that is joined to a text as a floating-point number: that costs four times as much.
  return string.format(
    '{"type":"%s","v":1,"shard":%s,"seq":%d,"offer_seq":%d,"offer":"%s","at":%d,"command":"%s"', type,
    call.shard, next_seq(call), offer.offer_seq, offer.name, call.now, command)
end

-- The account that gets returned units: the offer while it is open; after the close, the account to which the
-- close sent the rest.
local function returns_to(offer)
  if not offer.closed then return 'offer:' .. offer.name end
  return (offer.pieces and 'issuer:' or 'wallet:') .. offer.issuer
end

-- The time (ms) at which the sweeper next handles a closed offer: now while users are queued, since it
-- removes them; else when the offer retires, which is not before its units can no longer be redeemed.
local function due_when_closed(offer, now)
  if (offer.queue_length or 0) > 0 then return now end
  return math.max(now + offer.rules.retire_after_ms, offer.rules.valid_until or 0)
end

local function end_offer(offer, reason, now)
  offer.closed, offer.paused, offer.reason = true, false, reason
  offer.amount_left, offer.units_left = 0, 0
  offer.due = due_when_closed(offer, now)
end

-- The sender and the signers (a JSON array) of a command of an operator, as fields of its event.
local function senders_text(body)
  return (body.operator and ',"operator":"' .. body.operator .. '"' or '')
    .. (body.signers and ',"signers":' .. body.signers or '')
end

-- The row for a command that is not known yet, and whose approvals have expired at the time of the shard; nil
-- if not. A repeat gets its first answer however old its approvals are.
local function unapproved_row(call, body)
  if not body.approved_until or body.approved_until > call.now then return nil end
  return {code = CODE.invalid, at = call.now,
    details = {message = 'approvals: expires_at: has passed; sign the command again'}}
end

-- Closes an offer: what is left returns to the issuer, and the seed is revealed. `digest` and
-- `senders` are nil if no command closes it. The reason `drained` belongs to the grab before it.
local function close_offer(call, offer, reason, command, digest, senders)
  local amount, left = offer.amount_left, offer.units_left
  end_offer(offer, reason, call.now)
  add_line(call, event_head(call, offer, 'offer.closed', command)
    .. ',"reason":"' .. reason .. '","asset":"' .. offer.asset .. '","amount":' .. int(amount)
    .. ',"left":' .. int(left) .. ',"refund_to":"' .. returns_to(offer) .. '"'
    .. (offer.seed and ',"seed":"' .. offer.seed .. '"' or '')
    .. (senders or '')
    .. (digest and ',"digest":"' .. digest .. '"}' or '}'), reason == 'drained')
end

-- Notes the writes of an offer and of the records that were made for it.
local write_offer
do
  local function write_pieces(offer)
    local base, fields = offer.base, offer.grabs_made
    for name in pairs(offer.grabs_changed) do
      fields[#fields + 1] = name
      fields[#fields + 1] = pack_grab(offer.grabs[name])
    end
    write_in_pieces('HSET', KEYS[base + KEY.grabs], fields)
    fields = {}
    for name in pairs(offer.orders_changed) do
      fields[#fields + 1] = name
      fields[#fields + 1] = pack_order(unpack(offer.orders[name]))
    end
    write_in_pieces('HSET', KEYS[base + KEY.orders], fields)
    write_counters(offer.counters)
    local holds, gone = offer.holds_made, offer.holds_gone
    for name in pairs(offer.holds) do
      local grab, member = offer.grabs[name], offer.name .. '/' .. name
      if grab.held > 0 then
        holds[#holds + 1] = string.format('%d', grab.deadline + grab.grace)
        holds[#holds + 1] = member
      else
        gone[#gone + 1] = member
      end
    end
    write_in_pieces('ZADD', KEYS[8], holds)
    write_in_pieces('ZREM', KEYS[8], gone)
    write_in_pieces('RPUSH', KEYS[base + KEY.codes], offer.codes_new)
    if offer.names_new then write_in_pieces('SADD', KEYS[base + KEY.names], offer.names_new) end
    if offer.codes_taken > 0 then write('LTRIM', KEYS[base + KEY.codes], offer.codes_taken, -1) end
    for name in pairs(offer.queue_gone) do write('ZREM', KEYS[base + KEY.queue], name) end
    for _, name in ipairs(offer.queue_new) do
      if not offer.queue_gone[name] then
        write('ZADD', KEYS[base + KEY.queue], offer.grabs[name].place, name)
      end
    end
  end

  function write_offer(call, offer)
    local base = offer.base
    local key = KEYS[base + KEY.state]
    write_in_pieces('HSET', KEYS[base + KEY.users], offer.users)
    write('HSET', key, 'amount_left', string.format('%d', offer.amount_left),
      'units_left', string.format('%d', offer.units_left), 'places', string.format('%d', offer.places),
      'offer_seq', string.format('%d', offer.offer_seq))
    if offer.closed ~= offer.was_closed or offer.paused ~= offer.was_paused then
      offer.was_closed, offer.was_paused = offer.closed, offer.paused
      write('HSET', key, 'state', offer.closed and 'closed' or 'open', 'paused', offer.paused and '1' or '0')
    end
    if offer.pieces then
      write_pieces(offer)
      write('HSET', key, 'held', string.format('%d', offer.held), 'queued',
        string.format('%d', offer.queued))
    end
    if offer.amended then
      write('HSET', key, 'rules', cmsgpack.pack(offer.rules), 'total', string.format('%d', offer.total),
        'opens_at', string.format('%d', offer.opens_at), 'closes_at',
        string.format('%d', offer.closes_at))
    end
    if offer.loads_changed then write('HSET', key, 'loads', cmsgpack.pack(offer.loads)) end
    if offer.audience_new then
      local members = {}
      for name in pairs(offer.audience_new) do members[#members + 1] = name end
      write_in_pieces('SADD', KEYS[base + KEY.audience], members)
    end
    if next(offer.seen_new) then
      local members = {}
      for name in pairs(offer.seen_new) do members[#members + 1] = name end
      write_in_pieces('SADD', KEYS[base + KEY.seen], members)
    end
    if offer.due then write('ZADD', KEYS[6], string.format('%d', offer.due), offer.name) end
    if offer.closed then
      write('HSET', key, 'reason', offer.reason)
      -- A user with a hold may still pay after the close, and then gets codes.
      write('UNLINK', KEYS[base + KEY.parts])
      if offer.held == 0 then write('UNLINK', KEYS[base + KEY.codes]) end
    end
    if offer.closed or offer.names_gone then write('UNLINK', KEYS[base + KEY.names]) end
  end
end

-- Changes the number of offers of a campaign; returns the new number.
local function count_offers(campaign, by)
  campaign.offers = (campaign.offers or tonumber(redis.call('HGET', KEYS[9], campaign.name) or 0)) + by
  write('HSET', KEYS[9], campaign.name, campaign.offers)
  return campaign.offers
end

-- Notes the writes of a new offer, and of its parts if they are drawn ahead. The caller notes the answer of
-- the command.
local function create_offer(name, o, campaign, terms, opens_at, closes_at, parts)
  local base = SHARD_KEYS + OFFER_KEYS * (o - 1)
  local key = KEYS[base + KEY.state]
  write('HSET', key, 'state', 'open', 'paused', '0', 'kind', terms.kind, 'issuer', terms.issuer,
    'asset', terms.asset, 'total', string.format('%d', terms.total), 'parts',
      string.format('%d', terms.units),
    'amount_left', string.format('%d', terms.total), 'units_left', string.format('%d', terms.units),
      'places', '0',
    'offer_seq', '1', 'opens_at', string.format('%d', opens_at), 'closes_at',
      string.format('%d', closes_at),
    'rules', cmsgpack.pack(terms.rules))
  if terms.seed then
    write('HSET', key, 'law', terms.law, 'min', string.format('%d', terms.min), 'max',
      string.format('%d', terms.max),
      'draw', terms.draw, 'seed', terms.seed)
  else
    write('HSET', key, 'held', '0', 'queued', '0')
  end
  if parts ~= '' then write('SET', KEYS[base + KEY.parts], parts) end
  write('ZADD', KEYS[6], string.format('%d', closes_at), name)
  write('SADD', KEYS[7], name)
  count_offers(campaign, 1)
  if campaign.zone_is_new then write('HSET', campaign.state_key, 'zone', campaign.zone) end
end

-- Applies an amendment to the terms; the caller has moved the units.
local function change_terms(offer, changes)
  offer.total = changes.total or offer.total
  local rules = {}
  for name, value in pairs(offer.rules) do rules[name] = value end
  offer.rules = rules
  for name, value in pairs(changes) do
    if name ~= 'total' and name ~= 'opens_at' and name ~= 'closes_at' and name ~= 'title' then
      offer.rules[name] = value
    end
  end
  offer.opens_at = changes.opens_at or offer.opens_at
  if changes.closes_at then offer.closes_at, offer.due = changes.closes_at, changes.closes_at end
  offer.amended, offer.least_wanted = true, nil
end

-- Stores a granted part under its user; returns the part.
local function keep_part(call, offer, id, user, digest, amount)
  local part = pack_part(offer.places, amount, call.seq, call.now, id, digest)
  local made, count_made = offer.users, #offer.users
  made[count_made + 1], made[count_made + 2] = user, part
  return part
end

-- Stores parts that users got one after the other: {place and seq of the first; times: of each stretch,
-- {time, number of parts}; grabs, users, amounts}. Takes them from the offer.
local function keep_run_of_parts(offer, parts)
  local made, last, i, amount = offer.users, #offer.users, 0, 0
  for _, stretch in ipairs(parts.times) do
    local pack_next = packer_of('parts', parts.place + i, parts.seq + i, stretch[1])
    for _ = 1, stretch[2] do
      i = i + 1
      made[last + 1], made[last + 2] = parts.users[i], pack_next(parts.amounts[i], parts.grabs[i])
      last, amount = last + 2, amount + parts.amounts[i]
    end
  end
  offer.places, offer.units_left, offer.amount_left = parts.place + i - 1, offer.units_left - i,
    offer.amount_left - amount
end

-- Whether a single-use ticket was used: for its offer or, if it is good for more offers of the campaign, in
-- the campaign. `ends_at` is the time at which a campaign's ticket ends, else nil. After that time the ticket
-- is refused as expired, so its id is forgotten.
local function is_used(offer, once, ends_at, now)
  if not ends_at then
    return offer.seen_new['ticket/' .. once] or redis.call('SISMEMBER', KEYS[offer.base + KEY.seen], 'ticket/'
      .. once) == 1
  end
  local ends = offer.campaign.tickets[once] or redis.call('ZSCORE', offer.campaign.tickets_key, once)
  return ends and tonumber(ends) > now
end

local function use_ticket(offer, once, ends_at)
  if not ends_at then return put(offer.seen_new, 'ticket/' .. once, true) end
  put(offer.campaign.tickets, once, ends_at)
  append(offer.campaign.tickets_used, once)
end

-- Notes the used tickets of a campaign. Each new id also removes the first two ids whose tickets have ended.
local function write_tickets(campaign, now)
  local used = campaign.tickets_used
  if #used == 0 then return end
  local until_now = string.format('%d', now)
  local ended = redis.call('ZRANGEBYSCORE', campaign.tickets_key, '-inf', until_now, 'LIMIT', 0, 3 * #used)
  local gone, again, at = {}, {}, 1
  for i, once in ipairs(used) do
    while #gone < 2 * i and ended[at] do
      if not again[ended[at]] then gone[#gone + 1] = ended[at] end
      at = at + 1
    end
    again[once] = true
  end
  write_in_pieces('ZREM', campaign.tickets_key, gone)
  for _, once in ipairs(used) do
    write('ZADD', campaign.tickets_key, string.format('%d', campaign.tickets[once]), once)
  end
  campaign.tickets_used = {}
end

-- Notes what a call has changed in its offers and campaigns; its events are already noted.
local function write_all(call, offers, campaigns)
  for o = 1, #offers do
    if offers[o] and offers[o].changed then write_offer(call, offers[o]) end
  end
  for _, campaign in ipairs(campaigns) do
    write_in_pieces('HSET', campaign.answers_key, campaign.made)
    if campaign.has_large then write('HSET', campaign.state_key, 'large', '1') end
    write_counters(campaign.counters)
    write_tickets(campaign, call.now)
    local payments = campaign.payments_made
    for payment in pairs(campaign.payments_changed) do
      payments[#payments + 1] = payment
      payments[#payments + 1] = cmsgpack.pack(campaign.payments[payment])
    end
    write_in_pieces('HSET', campaign.payments_key, payments)
    for _, past in pairs(campaign.past) do
      if past and past.changed then write_past(campaign, past) end
    end
  end
  write_refusals(call)
end

-- Ends a call that has decided: packs the reply, then writes everything, the outbox first. `packed` has rows
-- that come first and are packed.
local function finish(call, offers, campaigns, rows, run, packed)
  local reply
  if packed and #packed > 0 then
    for i = 1, #rows do packed[#packed + 1] = cmsgpack.pack(rows[i]) end
    -- A list of three values, of which the last is a list with its length in four bytes.
    reply = string.char(147) .. cmsgpack.pack(0, call.history) .. struct.pack('>BI4', 221, #packed)
      .. table.concat(packed)
  else
    reply = cmsgpack.pack(run and {0, call.history, rows, run} or {0, call.history, rows})
  end
  append_events(call)
  write_all(call, offers, campaigns)
  commit()
  return reply
end
