-- An offer's state as a table, what closes it, and the texts of its events; and the table of a call's offers and campaigns.
-- Needs the includes `decide`, `records`, `limits`. KEYS[11 …]: eight keys for each offer, then three for each campaign:
--   offer hash · users hash (an envelope's parts by user, or counters) · parts string · grabs hash · codes list · audience set ·
--   seen set (tickets used, chunks loaded) · queue zset
--   answers hash · payments hash · counters hash

local SHARD_KEYS, OFFER_KEYS, CAMPAIGN_KEYS = 10, 8, 3
local STATE, USERS, PARTS, GRABS, CODES, AUDIENCE, SEEN, QUEUE = 1, 2, 3, 4, 5, 6, 7, 8
local ANSWERS, PAYMENTS, COUNTERS = 1, 2, 3

-- Where an offer shares its campaign with others, its answers say which offer they are about.
local function offer_tail(name)
  return string.find(name, ':', 1, true) and name or ''
end

-- A campaign of the call: where its answers, payments and counters are, and what the call has made of them.
local function campaign_at(name, offers, c)
  local base = SHARD_KEYS + OFFER_KEYS * offers + CAMPAIGN_KEYS * (c - 1)
  return {name = name, answers_key = KEYS[base + ANSWERS], payments_key = KEYS[base + PAYMENTS],
    counters = counters_at(KEYS[base + COUNTERS]), answers = {}, made = {}, payments = {}, payments_changed = {}}
end

local NO_LIMITS = {}

-- The state of an offer, or nil when there is none under this id. `o` is its place among the keys.
local function load_offer(name, o, campaign)
  local base = SHARD_KEYS + OFFER_KEYS * (o - 1)
  local f = redis.call('HMGET', KEYS[base + STATE], 'state', 'paused', 'opens_at', 'closes_at', 'asset', 'parts', 'amount_left',
    'units_left', 'places', 'offer_seq', 'law', 'min', 'max', 'draw', 'seed', 'issuer', 'reason', 'kind', 'rules', 'held', 'queued',
    'loads', 'total')
  if not f[1] then return nil end
  local offer = {
    name = name, base = base, campaign = campaign, closed = f[1] == 'closed', paused = f[2] == '1',
    opens_at = tonumber(f[3]), closes_at = tonumber(f[4]), asset = f[5], parts = tonumber(f[6]),
    amount_left = tonumber(f[7]), units_left = tonumber(f[8]), places = tonumber(f[9]), offer_seq = tonumber(f[10]),
    issuer = f[16], reason = f[17], kind = f[18], rules = cmsgpack.unpack(f[19]), total = tonumber(f[23]),
    users = {}, tail = offer_tail(name),
  }
  if offer.kind == 'envelope' then
    offer.law, offer.min, offer.max, offer.draw, offer.seed = f[11], tonumber(f[12]), tonumber(f[13]), f[14], f[15]
    offer.held = 0
  else
    offer.pieces = true
    offer.held, offer.queued = tonumber(f[20]), tonumber(f[21])
    offer.counters = counters_at(KEYS[base + USERS])
    offer.grabs, offer.grabs_changed, offer.holds, offer.holds_gone = {}, {}, {}, {}
    offer.queue_new, offer.queue_gone = {}, {}
    offer.codes_taken, offer.codes_back = 0, {}
    offer.queue_length = offer.rules.waiting_list and redis.call('ZCARD', KEYS[base + QUEUE]) or 0
    offer.queue_stored = offer.queue_length
  end
  offer.rules.limits = offer.rules.limits or NO_LIMITS
  offer.seen_new = {}
  offer.loads = f[22] and cmsgpack.unpack(f[22]) or {}
  return offer
end

-- The offers and campaigns of a call: names, the campaign of each (from 1), and the campaigns' names, as the gate packs them.
local function load_offers(names, campaign_of, campaign_names)
  local offers, campaigns = {}, {}
  for c = 1, #campaign_names do campaigns[c] = campaign_at(campaign_names[c], #names, c) end
  for o = 1, #names do offers[o] = load_offer(names[o], o, campaigns[campaign_of[o]]) or false end
  return offers, campaigns
end

-- The beginning of every event's text, up to the fields of its type. Takes the next seq of shard and offer.
local function event_head(call, offer, type, command)
  put(offer, 'offer_seq', offer.offer_seq + 1)
  put(offer, 'changed', true)
  return '{"type":"' .. type .. '","v":1,"shard":' .. call.shard .. ',"seq":' .. next_seq(call) .. ',"offer_seq":'
    .. offer.offer_seq .. ',"offer":"' .. offer.name .. '","at":' .. call.now .. ',"command":"' .. command .. '"'
end

-- The account that gets units which come back: after the close, where the close sent the rest.
local function returns_to(offer)
  if not offer.closed then return 'offer:' .. offer.name end
  return (offer.pieces and 'issuer:' or 'wallet:') .. offer.issuer
end

-- When a closed offer leaves Redis: not before its units can no longer be redeemed.
local function retires_at(offer, now)
  return math.max(now + offer.rules.retire_after_ms, offer.rules.valid_until or 0)
end

-- When the sweeper sees to a closed offer: at once to send home who waits, else to retire it.
local function due_when_closed(offer, now)
  return (offer.queue_length or 0) > 0 and now or retires_at(offer, now)
end

local function end_offer(offer, reason, now)
  offer.closed, offer.paused, offer.reason = true, false, reason
  offer.amount_left, offer.units_left = 0, 0
  offer.due = due_when_closed(offer, now)
end

-- Ends an offer: what is left goes back to the issuer, the seed is revealed. `digest` is nil when no command asked for it.
local function close_offer(call, offer, reason, command, digest, operator)
  local amount, left = offer.amount_left, offer.units_left
  end_offer(offer, reason, call.now)
  call.lines[#call.lines + 1] = event_head(call, offer, 'offer.closed', command)
    .. ',"reason":"' .. reason .. '","asset":"' .. offer.asset .. '","amount":' .. amount
    .. ',"left":' .. left .. ',"refund_to":"' .. returns_to(offer) .. '"'
    .. (offer.seed and ',"seed":"' .. offer.seed .. '"' or '')
    .. (operator and ',"operator":"' .. operator .. '"' or '')
    .. (digest and ',"digest":"' .. digest .. '"}' or '}')
end

local function write_pieces(offer)
  local base, fields = offer.base, {}
  for name in pairs(offer.grabs_changed) do
    fields[#fields + 1] = name
    fields[#fields + 1] = pack_grab(offer.grabs[name])
  end
  write_in_pieces('HSET', KEYS[base + GRABS], fields)
  write_counters(offer.counters)
  local holds, gone = {}, {}
  for name in pairs(offer.holds) do
    local grab, member = offer.grabs[name], offer.name .. '/' .. name
    if grab.held > 0 then
      holds[#holds + 1] = string.format('%.0f', grab.deadline + grab.grace)
      holds[#holds + 1] = member
    else
      gone[#gone + 1] = member
    end
  end
  write_in_pieces('ZADD', KEYS[8], holds)
  write_in_pieces('ZREM', KEYS[8], gone)
  write_in_pieces('RPUSH', KEYS[base + CODES], offer.codes_back)
  if offer.codes_taken > 0 then redis.call('LPOP', KEYS[base + CODES], offer.codes_taken) end
  for name in pairs(offer.queue_gone) do redis.call('ZREM', KEYS[base + QUEUE], name) end
  for _, name in ipairs(offer.queue_new) do
    if not offer.queue_gone[name] then redis.call('ZADD', KEYS[base + QUEUE], offer.grabs[name].place, name) end
  end
end

-- Writes an offer back, and the records that were made for it.
local function write_offer(call, offer)
  local base = offer.base
  local key = KEYS[base + STATE]
  write_in_pieces('HSET', KEYS[base + USERS], offer.users)
  redis.call('HSET', key, 'state', offer.closed and 'closed' or 'open', 'paused', offer.paused and '1' or '0',
    'amount_left', string.format('%.0f', offer.amount_left), 'units_left', string.format('%.0f', offer.units_left),
    'places', string.format('%.0f', offer.places), 'offer_seq', string.format('%.0f', offer.offer_seq))
  if offer.pieces then
    write_pieces(offer)
    redis.call('HSET', key, 'held', string.format('%.0f', offer.held), 'queued', string.format('%.0f', offer.queued))
  end
  if offer.amended then
    redis.call('HSET', key, 'rules', cmsgpack.pack(offer.rules), 'total', string.format('%.0f', offer.total),
      'opens_at', string.format('%.0f', offer.opens_at), 'closes_at', string.format('%.0f', offer.closes_at))
  end
  if offer.loads_changed then redis.call('HSET', key, 'loads', cmsgpack.pack(offer.loads)) end
  if offer.audience_new then
    local members = {}
    for name in pairs(offer.audience_new) do members[#members + 1] = name end
    write_in_pieces('SADD', KEYS[base + AUDIENCE], members)
  end
  if next(offer.seen_new) then
    local members = {}
    for name in pairs(offer.seen_new) do members[#members + 1] = name end
    write_in_pieces('SADD', KEYS[base + SEEN], members)
  end
  if offer.due then redis.call('ZADD', KEYS[6], string.format('%.0f', offer.due), offer.name) end
  if offer.closed then
    redis.call('HSET', key, 'reason', offer.reason)
    -- Who holds units when it closes may still pay, and gets the codes then.
    redis.call('UNLINK', KEYS[base + PARTS])
    if offer.held == 0 then redis.call('UNLINK', KEYS[base + CODES]) end
  end
end

-- Writes a new offer, and its parts where they are drawn ahead; what a campaign remembers of it is the caller's.
local function create_offer(name, o, campaign, terms, opens_at, closes_at, parts)
  local base = SHARD_KEYS + OFFER_KEYS * (o - 1)
  local key = KEYS[base + STATE]
  redis.call('HSET', key, 'state', 'open', 'paused', '0', 'kind', terms.kind, 'issuer', terms.issuer,
    'asset', terms.asset, 'total', string.format('%.0f', terms.total), 'parts', string.format('%.0f', terms.units),
    'amount_left', string.format('%.0f', terms.total), 'units_left', string.format('%.0f', terms.units), 'places', '0',
    'offer_seq', '1', 'opens_at', string.format('%.0f', opens_at), 'closes_at', string.format('%.0f', closes_at),
    'rules', cmsgpack.pack(terms.rules))
  if terms.seed then
    redis.call('HSET', key, 'law', terms.law, 'min', string.format('%.0f', terms.min), 'max', string.format('%.0f', terms.max),
      'draw', terms.draw, 'seed', terms.seed)
  else
    redis.call('HSET', key, 'held', '0', 'queued', '0')
  end
  if parts ~= '' then redis.call('SET', KEYS[base + PARTS], parts) end
  redis.call('ZADD', KEYS[6], string.format('%.0f', closes_at), name)
  redis.call('SADD', KEYS[7], name)
  redis.call('HINCRBY', KEYS[9], campaign.name, 1)
end

-- What an amendment makes of the terms; the units have moved already.
local function change_terms(offer, changes)
  offer.total = changes.total or offer.total
  for name, value in pairs(changes) do
    if name ~= 'total' and name ~= 'opens_at' and name ~= 'closes_at' and name ~= 'title' then offer.rules[name] = value end
  end
  offer.opens_at = changes.opens_at or offer.opens_at
  if changes.closes_at then offer.closes_at, offer.due = changes.closes_at, changes.closes_at end
  offer.amended = true
end

-- Takes an offer out of Redis; with its last offer goes what the campaign remembers.
local function remove_offer(offer)
  redis.call('SADD', KEYS[10], offer.name)
  redis.call('SREM', KEYS[7], offer.name)
  redis.call('ZREM', KEYS[6], offer.name)
  for key = 1, OFFER_KEYS do redis.call('UNLINK', KEYS[offer.base + key]) end
  local campaign = offer.campaign
  if redis.call('HINCRBY', KEYS[9], campaign.name, -1) == 0 then
    redis.call('HDEL', KEYS[9], campaign.name)
    redis.call('UNLINK', campaign.answers_key, campaign.payments_key, campaign.counters.key)
  end
end

-- Writes back what a call has changed of its offers and campaigns; the events are written already.
local function write_all(call, offers, campaigns)
  for o = 1, #offers do
    if offers[o] and offers[o].changed then write_offer(call, offers[o]) end
  end
  for _, campaign in ipairs(campaigns) do
    write_in_pieces('HSET', campaign.answers_key, campaign.made)
    write_counters(campaign.counters)
    for payment in pairs(campaign.payments_changed) do
      redis.call('HSET', campaign.payments_key, payment, cmsgpack.pack(campaign.payments[payment]))
    end
  end
  write_refusals(call)
end

-- Ends a call that decided: writes all, the outbox first, and packs the reply.
local function finish(call, offers, campaigns, rows, run)
  append_events(call)
  write_all(call, offers, campaigns)
  return cmsgpack.pack(run and {0, call.history, rows, run} or {0, call.history, rows})
end
